"""Whole layers against transformers: every intermediate, and the same tokens in any split, mix and rollback."""

import numpy as np
import pytest
from helpers import DATA, assert_close, same_bits

import gdn

CONFIGS = {
    "qwen3next": {"model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                  "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "qwen35": {"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
               "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "olmo": {"model_type": "olmo_hybrid", "linear_num_key_heads": 3, "linear_num_value_heads": 3,
             "linear_key_head_dim": 24, "linear_value_head_dim": 48, "linear_allow_neg_eigval": True},
    "kimi": {"model_type": "kimi_linear", "linear_num_heads": 3, "linear_head_dim": 32},
}
FAMILIES = tuple(CONFIGS)
PREFIX = "model.layers.1.mixer."


def fixture(name):
    with np.load(DATA / f"{name}.npz") as file:
        return {key: file[key] for key in file}


def config_of(name):
    return {"hidden_size": 64, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, **CONFIGS[name]}


def kind(name):
    return gdn.KimiDeltaAttention if name == "kimi" else gdn.GatedDeltaNet


def load(name, f, **kwargs):
    weights = {PREFIX + key[2:]: f[key] for key in f if key.startswith("w.")}
    return kind(name).from_state_dict(weights, PREFIX, config_of(name), **kwargs)


def ring_for(layer, n_slots=1, n_rollback=0, n_layers=1, **kwargs):
    return gdn.StateRing.create(n_slots, n_rollback, n_layers=n_layers, **layer.config.ring_extents, **kwargs)


def step(layer, ring, x, ids=None, positions=None, il=0, **kwargs):
    """One call: x (n, n_embd) of sequence 0, or of the sequences ids."""
    batch = gdn.Batch([0] * len(x) if ids is None else ids, positions)
    with ring.begin(batch) as s:
        return layer(x, batch, s, il, **kwargs)


def states(layer, ring, seq=0, il=0):
    """(recurrent state [value][key], convolution window) that a sequence stands on."""
    with ring.begin([seq], [0]) as s:
        row = s.rows_in[0]
        return ring.ssm(il).numpy()[row].copy(), ring.conv(il).numpy()[row, 0].copy()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    f = fixture(request.param)
    return request.param, f, load(request.param, f), f["x"][0]


def expected_trace(name, f):
    want = {"z": "z", "b": "b", "a": "a", "gate": "g", "beta": "beta", "conv_output_silu": "conv_out", "q": "q_l2",
            "k": "k_l2", "attn_output": "core", "attn_out_norm": "gated_norm", "linear_attn_out": "y",
            "qkv_mixed": "mixed_qkv"}
    return {ours: f[theirs][0] for ours, theirs in want.items() if theirs in f}


def test_every_intermediate_of_a_prefill_and_single_steps(family):
    name, f, layer, x = family
    ring = ring_for(layer)
    ring.acquire(0)
    traces = [{} for _ in range(6)]
    outs = [step(layer, ring, x[:70], trace=traces[0])]
    state, window = states(layer, ring)
    assert_close(state, f["state_prefill"][0].swapaxes(-1, -2), "state after the prefill")
    assert_close(window, f["conv_state_prefill"][0][:, 1:], "window after the prefill")
    outs += [step(layer, ring, x[t:t + 1], trace=traces[t - 69]) for t in range(70, 75)]
    assert_close(np.concatenate(outs), f["y"][0], "y")
    trace = {key: np.concatenate([t[key] for t in traces]) for key in traces[0]}
    for key, want in expected_trace(name, f).items():
        assert_close(trace[key].reshape(want.shape), want, key)
    state, window = states(layer, ring)
    assert_close(state, f["state_final"][0].swapaxes(-1, -2), "final state")
    assert_close(window, f["conv_state_final"][0][:, 1:], "final window")


def test_a_trace_has_the_documented_names_and_shapes(family):
    name, _, layer, x = family
    ring, trace = ring_for(layer), {}
    ring.acquire(0)
    plain = step(layer, ring, x[:9], positions=range(9))
    traced = step(layer, ring, x[:9], positions=range(9), trace=trace)
    assert same_bits(plain, traced)
    c = layer.config
    a = (9, c.H_v, c.S_k) if name == "kimi" else (9, c.H_v)
    keys, values = (9, c.H_k, c.S_k), (9, c.H_v, c.S_v)
    assert {key: value.shape for key, value in trace.items()} == {
        "qkv_mixed": (9, c.conv_channels), "conv_output_silu": (9, c.conv_channels), "q": keys, "k": keys, "v": values,
        "z": values, "attn_output": values, "attn_out_norm": values, "b": (9, c.H_v), "beta": (9, c.H_v), "a": a,
        "gate": a, "linear_attn_out": (9, c.n_embd)}
    assert all(value.dtype == np.float32 for value in trace.values())


def test_fused_projections_are_traced_flat():
    f, trace = fixture("qwen3next"), {}
    layer = load("qwen3next", f)
    ring = ring_for(layer)
    ring.acquire(0)
    step(layer, ring, f["x"][0], trace=trace)
    groups = f["mixed_qkvz"][0].reshape(75, 2, 6 * 64)             # per key head: q, k, 2 v, 2 z
    q, k, v, z = np.split(groups, [64, 128, 256], axis=2)
    assert_close(trace["qkv_mixed"], np.concatenate([x.reshape(75, -1) for x in (q, k, v)], axis=1), "qkv_mixed")
    assert_close(trace["z"], z.reshape(75, 4, 64), "z")
    b, a = np.split(f["mixed_ba"][0].reshape(75, 2, 4), 2, axis=2)
    assert_close(trace["b"], b.reshape(75, 4), "b")
    assert_close(trace["a"], a.reshape(75, 4), "a")


@pytest.mark.parametrize("sizes", [(75,), (1, 69, 5), (35, 40), (1,) * 75, (64, 1, 10)], ids=str)
def test_any_split(family, sizes):
    _, f, layer, x = family
    ring = ring_for(layer)
    ring.acquire(0)
    at = np.cumsum((0, *sizes))
    y = [step(layer, ring, x[a:b], positions=range(a, b)) for a, b in zip(at, at[1:], strict=False)]
    assert_close(np.concatenate(y), f["y"][0], "y")
    state, _ = states(layer, ring)
    assert_close(state, f["state_final"][0].swapaxes(-1, -2), "final state")
