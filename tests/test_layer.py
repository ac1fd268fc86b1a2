"""Whole layers: transformers' recorded ones with every intermediate, splits, mixed batches, rollback, padding, LoRA."""

import copy
import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from helpers import assert_close, same_bits
from layer_cases import FAMILIES, Case, one_sequence, run, state_of

import gdn
from gdn.adapters import state_dict

TRACE = {"conv_out": "conv_output_silu", "q_l2": "q", "k_l2": "k", "g": "gate", "beta": "beta", "core": "attn_output",
         "gated_norm": "attn_out_norm", "z": "z", "b": "b", "a": "a", "y": "linear_attn_out"}


@pytest.fixture(params=FAMILIES)
def case(request):
    return Case(request.param)


# ---- against transformers --------------------------------------------------------------------------------------------

def test_every_intermediate(case):
    """Prefill of 70 tokens, then 5 single steps."""
    ring = case.ring()
    ring.acquire(7)
    traces = []
    for start, end in [(0, 70), *((t, t + 1) for t in range(70, 75))]:
        traces.append({})
        y = run(case.layer, ring, case.x[start:end], [7] * (end - start), trace=traces[-1])
        assert same_bits(y, traces[-1]["linear_attn_out"])
        if end in (70, 75):
            name = "prefill" if end == 70 else "final"
            ssm, conv = state_of(ring, 7)
            assert_close(ssm, case.data[f"state_{name}"][0], f"state after {end}")
            assert_close(conv, case.data[f"conv_state_{name}"][0][:, 1:], f"convolution after {end}")
    trace = {name: np.concatenate([t[name] for t in traces]) for name in traces[0]}
    compared = 0
    for name, ours in TRACE.items():
        if name in case.data:
            expected = case.data[name][0]
            assert_close(trace[ours].reshape(expected.shape), expected, ours)
            compared += 1
    assert compared >= 8
    assert_close(trace["v"].reshape(75, -1), case.data["conv_out"][0][:, 2 * case.layer.key_size:], "v")
    if "mixed_qkv" in case.data:
        assert_close(trace["qkv_mixed"], case.data["mixed_qkv"][0], "qkv_mixed")


@pytest.mark.parametrize("mode", ["auto", "chunked", "recurrent"])
@pytest.mark.parametrize("parts", [[75], [1, 69, 5], [35, 40], [1] * 75], ids=["75", "1+69+5", "35+40", "75x1"])
def test_splits(case, parts, mode):
    for form in ("planes", "log"):
        assert_close(one_sequence(case.ring(form=form), case, parts, mode=mode), case.y, f"{parts} {mode} {form}")


# ---- batches ---------------------------------------------------------------------------------------------------------

def interleaved(rng, lengths):
    """Ids of sequences 0, 1, ... mixed token by token."""
    return rng.permutation(np.repeat(np.arange(len(lengths)), lengths))


def stream(case, seq_id):
    """Another input for each sequence: the recorded tokens in another order."""
    return np.random.default_rng(seq_id).permutation(case.x)


def alone(case, x):
    ring = case.ring()
    ring.acquire(0)
    return run(case.layer, ring, x, [0] * len(x))


@pytest.mark.parametrize("options", [{"spare": 0}, {"spare": 1}, {"form": "log"}], ids=str)
def test_mixed_batch_with_rollback(case, options):
    """Three sequences token by token, with drafts that are taken back in between, equal the sequences alone."""
    rng = np.random.default_rng(3)
    ring = case.ring(4, n_rollback=4, **options)
    xs = [stream(case, i) for i in range(3)]
    expected = [alone(case, x) for x in xs]
    for i in range(3):
        ring.acquire(i)
    done = [0, 0, 0]
    while min(done) < 75:
        ids = interleaved(rng, [min(int(rng.integers(0, 9)), 75 - n) for n in done])
        at = np.array([done[s] + int((ids[:i] == s).sum()) for i, s in enumerate(ids)], int)
        x = np.array([xs[s][t] for s, t in zip(ids, at, strict=True)], np.float32).reshape(-1, 64)
        y = run(case.layer, ring, x, ids, at)
        for i, s in enumerate(ids):
            scale = np.abs(expected[s]).max()
            assert np.abs(y[i] - expected[s][at[i]]).max() <= 1e-5 * scale, (s, at[i])
        for s in range(3):
            done[s] += int((ids == s).sum())
            back = int(rng.integers(0, 1 + min(2, ring.max_rollback(s)))) if done[s] < 75 else 0
            ring.rollback(s, back)
            done[s] -= back
            assert ring.position(s) == done[s]
    assert done == [75, 75, 75]


@pytest.mark.parametrize("form", ["planes", "log"])
def test_padding_changes_no_bit(case, form):
    rng = np.random.default_rng(5)
    ids = interleaved(rng, [5, 1, 40])
    x = rng.standard_normal((len(ids), 64)).astype(np.float32)
    keep = np.sort(rng.choice(len(ids) + 20, len(ids), replace=False))
    padded_ids, padded_x = np.full(len(ids) + 20, -1), np.full((len(ids) + 20, 64), np.nan, np.float32)
    padded_ids[keep], padded_x[keep] = ids, x
    results = []
    for batch_ids, hidden in ((ids, x), (padded_ids, padded_x)):
        ring, trace = case.ring(4, 2, form=form), {}
        for i in range(3):
            ring.acquire(i)
        y = run(case.layer, ring, hidden, batch_ids, trace=trace)
        results.append((y, trace, [ring.save(i) for i in range(3)]))
    (y, trace, states), (padded_y, padded_trace, padded_states) = results
    padding = padded_ids == -1
    for name, z in {"y": padded_y, **padded_trace}.items():
        assert same_bits(z[~padding], y if name == "y" else trace[name]), name
        assert not z[padding].any(), name
    assert states == padded_states


@pytest.mark.parametrize("lay_out", [np.asfortranarray, lambda x: x[:, ::-1].copy()[:, ::-1], lambda x: np.repeat(x, 2, 0)[::2],
                                     lambda x: np.repeat(x, 2, 1)[:, ::2]], ids=["F", "reversed", "rows", "columns"])
def test_how_x_lies_changes_no_bit(case, lay_out):
    """Nor does padding then, which makes a copy of x."""
    x = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
    ys = []
    for hidden, ids in ((x, [7] * 3), (lay_out(x), [7] * 3), (lay_out(np.concatenate([x, x[:1]])), [7, 7, 7, -1])):
        ring = case.ring()
        ring.acquire(7)
        ys.append(run(case.layer, ring, hidden, ids)[:3])
    assert same_bits(ys[0], ys[1]) and same_bits(ys[0], ys[2])


def test_only_padding_and_no_tokens(case):
    ring = case.ring()
    ring.acquire(7)
    one = run(case.layer, ring, case.x[:9], [7] * 9)
    before = state_of(ring, 7)
    for ids in ([-1, -1, -1], []):
        y = run(case.layer, ring, np.full((len(ids), 64), np.nan, np.float32), ids, trace={})
        assert y.shape == (len(ids), 64) and not y.any()
    assert all(same_bits(a, b) for a, b in zip(before, state_of(ring, 7), strict=True))
    assert_close(one, case.y[:9], "y")


@pytest.mark.parametrize("form", ["planes", "log"])
def test_position_zero_starts_afresh(case, form):
    ring = case.ring(form=form)
    ring.acquire(7)
    first = run(case.layer, ring, case.x[:20], [7] * 20)
    again = run(case.layer, ring, case.x[:20], [7] * 20, np.arange(20))
    assert same_bits(first, again)
    assert ring.position(7) == 20
    with pytest.raises(ValueError, match="sequence 7.*20.*19"):
        run(case.layer, ring, case.x[:1], [7], [19])


@pytest.mark.parametrize("form", ["planes", "log"])
def test_failed_step_leaves_the_state(case, form):
    ring = case.ring(n_rollback=2, form=form)
    ring.acquire(7)
    run(case.layer, ring, case.x[:20], [7] * 20)
    before = ring.save(7)
    with pytest.raises(RuntimeError), ring.begin(gdn.Batch([7])) as step:
        case.layer(case.x[20:21], gdn.Batch([7]), step, 0)
        raise RuntimeError
    assert ring.position(7) == 20 and ring.save(7) == before
    assert_close(run(case.layer, ring, case.x[20:21], [7]), case.y[20:21], "y")


# ---- options ---------------------------------------------------------------------------------------------------------

def test_outputs_and_copies_are_their_own(case):
    """A decode step leaves its arrays to the next one: neither earlier results nor copies of the layer see it."""
    ring = case.ring(2)
    ring.acquire(1)
    ring.acquire(2)
    first = run(case.layer, ring, case.x[:1], [1])
    kept = first.copy()
    second = run(case.layer, ring, case.x[1:2], [1])
    assert same_bits(first, kept)
    for layer in (copy.copy(case.layer), copy.deepcopy(case.layer), pickle.loads(pickle.dumps(case.layer))):
        ring.reset(2)
        assert same_bits(run(layer, ring, case.x[:1], [2]), first)
        assert same_bits(run(layer, ring, case.x[1:2], [2]), second)


def test_a_long_call_keeps_nothing(case):
    """Only calls of few tokens leave their arrays to the next."""
    ring = case.ring()
    ring.acquire(7)
    x = np.tile(case.x, (20, 1))
    tracemalloc.start()
    run(case.layer, ring, x, [7] * len(x))
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < x.nbytes / 2 and peak > 4 * x.nbytes


def test_threads_share_a_layer(case):
    """Steps of a token on rings of their own at the same time, with the bits of one after the other."""
    n = 30

    def decode(_):
        ring = case.ring()
        return one_sequence(ring, case, [1] * n)

    expected = decode(0)
    with ThreadPoolExecutor(4) as pool:
        assert all(same_bits(y, expected) for y in pool.map(decode, range(8)))


def test_lora(case):
    """y += scale * B (A x) on every projection equals the merged weights."""
    rng = np.random.default_rng(1)
    weights, config = state_dict.read_layer(case.weights, "", case.config)
    names = [n for n in ("qkv", "z", "b", "a", "f_a", "f_b", "g_a", "g_b", "out") if n in weights]
    lora, merged = {}, dict(weights)
    for name in names:
        n_out, n_in = weights[name].shape
        pairs = [(0.1 * rng.standard_normal((r, n_in), np.float32), 0.1 * rng.standard_normal((n_out, r), np.float32), 0.5)
                 for r in (1, 3)]
        lora[name] = pairs
        merged[name] = (weights[name] + sum(scale * B @ A for A, B, scale in pairs)).astype(np.float32)
    layers, ys = (type(case.layer)(weights, config, lora), type(case.layer)(merged, config)), []
    for A, B, _ in sum(lora.values(), []):
        A[:], B[:] = np.nan, np.nan                     # a layer's own, as its weights are
    for layer in layers:
        ring = case.ring()
        ring.acquire(0)
        ys.append(run(layer, ring, case.x, [0] * 75))
    assert_close(ys[0], ys[1], "lora", 2e-5)
    assert np.abs(ys[0] - case.y).max() > 0.01 * np.abs(case.y).max()


@pytest.mark.parametrize("width", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_width_and_bias(width, bias):
    """One sequence in parts of 1 and 19 against the reference, tiled heads and the max form of the L2 norm."""
    rng = np.random.default_rng(width)
    H_k, H_v, S_k, S_v, n_embd = 2, 6, 8, 12, 16
    C = 2 * H_k * S_k + H_v * S_v
    shapes = {"qkv": (C, n_embd), "z": (H_v * S_v, n_embd), "b": (H_v, n_embd), "a": (H_v, n_embd),
              "conv": (C, width), "A": (H_v,), "dt_bias": (H_v,), "norm": (S_v,), "out": (n_embd, H_v * S_v)}
    if bias:
        shapes["conv_bias"] = (C,)
    w = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    w["A"] = -np.abs(w["A"])
    config = {"kind": "gdn", "n_embd": n_embd, "H_k": H_k, "H_v": H_v, "S_k": S_k, "S_v": S_v, "width": width,
              "head_map": "tiled", "norm_eps": 1e-5, "l2_eps": 1e-6, "l2_form": "max", "beta_factor": 2.0,
              "activation": "sigmoid", "lower_bound": None}
    layer = gdn.GatedDeltaNet(w, config)
    x = rng.standard_normal((20, n_embd)).astype(np.float32)
    ring = gdn.StateRing.create(1, n_layers=1, **layer.extents)
    ring.acquire(0)
    y = np.concatenate([run(layer, ring, x[:1], [0]), run(layer, ring, x[1:], [0] * 19)])

    ref, d = gdn.reference, {name: value.astype(np.float64) for name, value in w.items()}
    X = x.astype(np.float64)
    inputs = np.concatenate([np.zeros((width - 1, C)), X @ d["qkv"].T])
    u = d.get("conv_bias", 0) + sum(inputs[i:i + 20] * d["conv"][:, i] for i in range(width))
    u = u * ref.sigmoid(u)
    q, k, v = np.split(u, [H_k * S_k, 2 * H_k * S_k], 1)
    g = ref.softplus(X @ d["a"].T + d["dt_bias"]) * d["A"]
    out, _ = ref.recurrent(q.reshape(1, 20, H_k, S_k), k.reshape(1, 20, H_k, S_k), v.reshape(1, 20, H_v, S_v), g[None],
                           2 * ref.sigmoid(X @ d["b"].T)[None], head_map="tiled", qk_l2norm=True, l2_form="max")
    normed = out[0] / np.sqrt((out[0] ** 2).mean(-1, keepdims=True) + 1e-5) * d["norm"]
    z = (X @ d["z"].T).reshape(20, H_v, S_v)
    assert_close(y, (normed * ref.sigmoid(z)).reshape(20, -1) @ d["out"].T, f"width {width}")


@pytest.mark.parametrize("form", ["sum", "max"])
def test_options_reach_the_kernels(form):
    """Epsilons that no checkpoint has: each changes what it is for."""
    case = Case("qwen35")
    weights, config = state_dict.read_layer(case.weights, "", case.config)
    layer = gdn.GatedDeltaNet(weights, replace(config, l2_eps=3, l2_form=form, norm_eps=0.25))
    ring, trace = case.ring(), {}
    ring.acquire(0)
    run(layer, ring, case.x, [0] * 75, trace=trace)
    q, k = trace["conv_output_silu"][:, :2 * layer.key_size].reshape(75, 2, layer.H_k, layer.S_k).swapaxes(0, 1)
    for name, x in (("q", q), ("k", k)):
        assert_close(trace[name], gdn.reference.l2_norm(x, 3, form), name)
    inputs = (x[None] for x in (q, k, trace["v"], trace["gate"], trace["beta"]))
    (out,), _ = gdn.reference.recurrent(*inputs, head_map=layer.head_map, qk_l2norm=True, l2_eps=3, l2_form=form)
    assert_close(trace["attn_output"], out, "the delta rule")
    z = trace["z"].astype(np.float64)
    normed = out / np.sqrt((out**2).mean(-1, keepdims=True) + 0.25) * weights["norm"] * z * gdn.reference.sigmoid(z)
    assert_close(trace["attn_out_norm"], normed, "the norm")


def test_separate_convolutions_and_unprefixed_gate():
    """Kimi-Linear as released: one convolution for each of q, k, v, no forget_gate prefix, nested sizes."""
    case = Case("kimi")
    weights = {"m." + name.replace("forget_gate.", ""): w for name, w in case.weights.items() if "conv" not in name}
    for x, part in zip("qkv", np.split(case.weights["conv1d.weight"], 3), strict=True):
        weights[f"m.{x}_conv1d.weight"] = part
    config = {"model_type": "kimi_linear", "hidden_size": 64, "rms_norm_eps": float(case.data["eps"]),
              "linear_attn_config": {"num_heads": 3, "head_dim": 32, "short_conv_kernel_size": 4}}
    case.layer = gdn.KimiDeltaAttention.from_state_dict(weights, "m.", config)
    assert_close(one_sequence(case.ring(), case, [75]), case.y, "y")


def test_lower_bound():
    case = Case("kimi")
    layer = gdn.KimiDeltaAttention.from_state_dict(case.weights, "", {**case.config, "gate_lower_bound": -5.0},
                                                   overrides={"gate": "bounded", "lower_bound": -5.0})
    ring, trace = case.ring(), {}
    ring.acquire(0)
    run(layer, ring, case.x, [0] * 75, trace=trace)
    A = np.exp(case.weights["forget_gate.A_log"].astype(np.float64)).reshape(3, 1)
    dt_bias = case.weights["forget_gate.dt_bias"].reshape(3, 32)
    assert_close(trace["gate"], -5 * gdn.reference.sigmoid(A * (trace["a"].astype(np.float64) + dt_bias)), "gate")
