"""Whole layers: transformers' recorded ones with every intermediate, splits, mixed batches, rollback, padding, LoRA."""

import numpy as np
import pytest
from helpers import DATA, assert_close, same_bits

import gdn
from gdn.adapters import transformers

FAMILIES = {
    "qwen3next": {"model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                  "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "qwen35": {"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
               "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "olmo": {"model_type": "olmo_hybrid", "linear_num_key_heads": 3, "linear_num_value_heads": 3,
             "linear_key_head_dim": 24, "linear_value_head_dim": 48, "linear_allow_neg_eigval": True},
    "kimi": {"model_type": "kimi_linear", "linear_num_heads": 3, "linear_head_dim": 32},
}
TRACE = {"conv_out": "conv_output_silu", "q_l2": "q", "k_l2": "k", "g": "gate", "beta": "beta", "core": "attn_output",
         "gated_norm": "attn_out_norm", "z": "z", "b": "b", "a": "a", "y": "linear_attn_out"}


def family_class(family):
    return gdn.KimiDeltaAttention if family == "kimi" else gdn.GatedDeltaNet


class Case:
    """A family's recorded layer, loaded from its weights."""

    def __init__(self, family):
        self.data = dict(np.load(DATA / f"{family}.npz"))
        self.config = {"hidden_size": 64, "linear_conv_kernel_dim": 4, "rms_norm_eps": float(self.data["eps"]),
                       **FAMILIES[family]}
        self.weights = {name[2:]: w for name, w in self.data.items() if name.startswith("w.")}
        self.layer = family_class(family).from_state_dict(self.weights, "", self.config)
        self.x, self.y = self.data["x"][0], self.data["y"][0]

    def ring(self, n_slots=1, **options):
        return gdn.StateRing.create(n_slots, n_layers=1, **self.layer.extents, **options)


@pytest.fixture(params=FAMILIES)
def case(request):
    return Case(request.param)


def run(layer, ring, x, seq_ids, positions=None, **options):
    batch = gdn.Batch(seq_ids, positions)
    with ring.begin(batch) as step:
        return layer(x, batch, step, 0, **options)


def one_sequence(ring, case, parts, **options):
    ring.acquire(7)
    ends = np.cumsum(parts)
    return np.concatenate([run(case.layer, ring, case.x[end - n:end], [7] * n, **options)
                           for n, end in zip(parts, ends, strict=True)])


def state_of(ring, seq_id):
    """The recurrent state [key][value] and the last width - 1 inputs of the convolution."""
    with ring.begin([seq_id], [0]) as step:
        row = step.rows_in[0]
        return (ring.ssm(0).numpy()[row].swapaxes(-1, -2).copy(), ring.conv(0).numpy()[row].reshape(
            ring.conv_channels, ring.conv_width - 1).copy())


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
    assert_close(one_sequence(case.ring(), case, parts, mode=mode), case.y, f"{parts} {mode}")
