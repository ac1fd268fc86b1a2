"""What each architecture's files mean: signs, gates, ranks, orders, types; and what is refused since it is not read."""

import gguf
import gguf_models as models
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf_tools import FORMS, META, random_tensors
from gguf_tools import write as write_block
from helpers import DATA

import gdn
from gdn.adapters.gguf import describe, inspect, read_layer

BOUNDED = ("glm5-next", "bailingmoe3", "kimi-k3")


def write(tmp_path, arch, rng, meta=(), change=(), **options):
    """A model of the architecture, its keys and the tensors of block 1 changed; None takes one away."""
    if arch == "bailingmoe3":
        options.setdefault("bound", -5.0)
    keys, tensors = models.model(arch, rng, **options)
    keys |= dict(meta)
    tensors |= {f"blk.1.{name}": x for name, x in dict(change).items()}
    return models.write(tmp_path / "x.gguf", arch, *({k: x for k, x in d.items() if x is not None} for d in (keys, tensors)))


def refused(path, match, overrides=None):
    with pytest.raises(ValueError, match=match) as caught:
        read_layer(path, 1, overrides)
    assert str(path) in str(caught.value)


EXPECTED = {
    "qwen3next": ("gdn", "softplus", "silu", "interleaved", "qwen3_next"),
    "qwen35": ("gdn", "softplus", "silu", "tiled", "qwen3_5"), "qwen35moe": ("gdn", "softplus", "silu", "tiled", "qwen3_5"),
    "qwen4exp": ("gdn", "softplus", "sigmoid", "tiled", "qwen4_exp"), "clef": ("gdn", "softplus", "silu", "tiled", "clef"),
    "kimi-linear": ("kda", "softplus", "sigmoid", "interleaved", "kimi_linear"),
    "glm5-next": ("kda", "softplus", "sigmoid", "interleaved", "glm5_next"),
    "bailingmoe3": ("kda", "bounded", "sigmoid", "interleaved", "bailing_hybrid"),
    "kimi-k3": ("kda", "softplus", "sigmoid", "interleaved", "kimi_k3"),
}


@pytest.mark.parametrize("arch", EXPECTED)
def test_configs(tmp_path, rng, arch):
    path = write(tmp_path, arch, rng, eps=1e-5)
    w, c = read_layer(path, 1)
    assert (c.kind, c.gate, c.activation, c.head_map, c.family) == EXPECTED[arch]
    assert (c.H_k, c.H_v, c.S_k, c.S_v, c.beta_factor) == (4 if c.kind == "kda" else 2, 4, 32, 32, 1.0)
    assert c.l2_eps == (1e-6 if arch == "glm5-next" else 1e-5)
    ranks = {"bailingmoe3": (None, None), "kimi-k3": (32, None)}.get(arch, (32, 32) if c.kind == "kda" else (None, None))
    assert (c.f_rank, c.g_rank) == ranks
    assert (w["A"] <= 0).all() and w["A"].shape == (4,)
    assert len({read_layer(path, il)[1].tag for il in range(3)}) == 1


# The decay

@pytest.mark.parametrize("arch", EXPECTED)
def test_a_decay_of_the_wrong_sign_is_refused(tmp_path, rng, arch):
    _, tensors = models.model(arch, rng)
    A = tensors["blk.1.ssm_a"]
    for wrong in (-A, np.where(np.arange(A.size).reshape(A.shape) == 2, -A, A), np.full_like(A, np.nan)):
        refused(write(tmp_path, arch, rng, change={"ssm_a": wrong}), r"blk\.1\.ssm_a holds .*exp\(A_log\)")


def test_the_sign_of_bailingmoe3(tmp_path, rng):
    _, tensors = models.model("bailingmoe3", rng)
    A = tensors["blk.1.ssm_a"]
    w, _ = read_layer(write(tmp_path, "bailingmoe3", rng, change={"ssm_a": A}), 1)
    np.testing.assert_array_equal(w["A"], -A[:, 0])


def test_a_decay_padded_beyond_the_heads(tmp_path, rng):
    A = -np.exp(rng.standard_normal(7)).astype(np.float32)
    padded = np.where(np.arange(7) < 4, A, np.nan).astype(np.float32)
    w, _ = read_layer(write(tmp_path, "kimi-k3", rng, change={"ssm_a": padded}), 1)
    np.testing.assert_array_equal(w["A"], A[:4])
    refused(write(tmp_path, "kimi-k3", rng, change={"ssm_a": A[:3]}), r"ssm_a has ne = \[3\], expected \[4\]")
    refused(write(tmp_path, "glm5-next", rng, change={"ssm_a": A}), r"ssm_a has ne = \[7\], expected \[4\]")


@pytest.mark.parametrize("arch", BOUNDED)
def test_bounds(tmp_path, rng, arch):
    _, c = read_layer(write(tmp_path, arch, rng, bound=-0.1), 1)
    assert (c.gate, c.lower_bound) == ("bounded", float(np.float32(-0.1)))
    for wrong in (0.0, 1.0, float("nan"), float("-inf"), "-5"):
        refused(write(tmp_path, arch, rng, meta={"kda.gate_lower_bound": wrong}), "lower_bound is .*(below 0|finite number)")


def test_a_bound_that_must_be_there(tmp_path, rng):
    path = write(tmp_path, "bailingmoe3", rng, meta={"kda.gate_lower_bound": None})
    refused(path, r"bailingmoe3\.kda\.gate_lower_bound is None")
    assert read_layer(path, 1, {"gate": "bounded", "lower_bound": -4})[1].lower_bound == -4
    refused(write(tmp_path, "bailingmoe3", rng, meta={"kda.safe_gate": False}), r"kda\.safe_gate is False")


# Keys that nobody reads

MEANT = [("kda.safe_gate", False, True), ("kda.allow_neg_eigval", False, True), ("linear_attn.use_full_rank_gate", False, True),
         ("kda.gate_activation", "sigmoid", "silu"), ("attention.output_gate_type", "sigmoid", "silu"),
         ("kda.use_gate", True, False)]


@pytest.mark.parametrize("key, same, other", MEANT)
def test_keys_that_would_mean_another_function(tmp_path, rng, key, same, other):
    read_layer(write(tmp_path, "kimi-linear", rng, meta={key: same}), 1)
    path = write(tmp_path, "kimi-linear", rng, meta={key: other})
    refused(path, rf"kimi-linear\.{key} is {other!r}, which .*own class does not read")
    with pytest.raises(ValueError, match=key):
        describe(path)


def test_what_is_said_explicitly(tmp_path, rng):
    for name in ("kda.gate_lower_bound", "linear_lower_bound", "gate_lower_bound", "kda.lower_bound"):
        path = write(tmp_path, "kimi-linear", rng, meta={name: -5.0})
        refused(path, rf"kimi-linear\.{name} is -5\.0, .*overrides={{")
        _, c = read_layer(path, 1, {"gate": "bounded", "lower_bound": -5.0})
        assert (c.gate, c.lower_bound) == ("bounded", -5.0)
    path = write(tmp_path, "qwen4exp", rng, meta={"output_gate_type": "silu"})
    refused(path, r"qwen4exp\.output_gate_type is 'silu'.*overrides={'activation'")
    assert read_layer(path, 1, {"activation": "silu"})[1].activation == "silu"
    read_layer(write(tmp_path, "qwen35", rng, meta={"output_gate_type": "swish"}), 1)
    layer = gdn.KimiDeltaAttention.from_gguf(write(tmp_path, "kimi-linear", rng), 1, overrides={"beta_factor": 2.0})
    assert layer.config.beta_factor == 2
    for wrong in ({"gate": "bounded"}, {"lower_bound": -5.0}, {"gate": "bounded", "lower_bound": 5.0}, {"H_v": 4},
                  {"gaet": "softplus"}):
        refused(write(tmp_path, "kimi-linear", rng), "overrides|lower_bound", wrong)


def test_keys_of_no_known_meaning(tmp_path, rng):
    for arch, key in (("kimi-linear", "kda.other"), ("qwen35", "kda.head_dim"), ("qwen35", "ssm.dt_b_c_rms"),
                      ("glm5-next", "ssm.state_size")):
        refused(write(tmp_path, arch, rng, meta={key: 7}), rf"{arch}\.{key} is of no known meaning")


def test_blocks_that_the_metadata_calls_attention(tmp_path, rng):
    for arch, name, value, why in (
            ("kimi-k3", "attention.head_count_kv", [0, 1, 0, 1], "block 1 .*head_count_kv says"),
            ("qwen35", "attention.recurrent_layers", [True, False, True, False], "block 1 .*recurrent_layers says"),
            ("kimi-k3", "attention.head_count", [4, 4, 2, 4], r"attention\.head_count is \[4, 4, 2, 4\]")):
        refused(write(tmp_path, arch, rng, meta={name: value}), why)
    read_layer(write(tmp_path, "qwen35", rng, meta={"attention.recurrent_layers": [True, True, True, False]}), 1)
    read_layer(write(tmp_path, "kimi-k3", rng, meta={"attention.head_count": [4] * 4}), 1)


# Tensors

NEEDED = {"bailingmoe3": ("ssm_f_a", "ssm_g_a"), "kimi-k3": ("ssm_f_a", "ssm_f_b", "ssm_g"),
          "glm5-next": ("ssm_f_b", "ssm_g_a", "ssm_g_b"), "qwen4exp": ("attn_gate", "ssm_alpha"), "clef": ("ssm_conv1d",)}


@pytest.mark.parametrize("arch", NEEDED)
def test_missing_tensors_are_named(tmp_path, rng, arch):
    for name in NEEDED[arch]:
        path = write(tmp_path, arch, rng, change={f"{name}.weight": None})
        refused(path, rf"blk\.1\.{name}\.weight is missing, expected with ne")


def test_gates_of_another_familys_rank(tmp_path, rng):
    low = {"ssm_f_a.weight": np.ones((32, 64), np.float32), "ssm_f_b.weight": np.ones((128, 32), np.float32)}
    refused(write(tmp_path, "bailingmoe3", rng, change=low), r"ssm_f_a\.weight has ne = \[64, 32\], expected \[64, 128\]")
    full = {"ssm_g.weight": np.ones((128, 64), np.float32)}
    refused(write(tmp_path, "kimi-linear", rng, change=full), r"ssm_g\.weight of no known use")


def test_fused_projections_are_the_separate_ones(tmp_path, rng):
    _, tensors = models.model("kimi-linear", rng)
    parts = {f"attn_{x}.weight": tensors[f"blk.1.attn_{x}.weight"] for x in "qkv"}
    ref, _ = read_layer(write(tmp_path, "kimi-linear", np.random.default_rng(1), change=parts), 1)
    fused = {name: None for name in parts} | {"attn_qkv.weight": np.concatenate(list(parts.values()))}
    w, c = read_layer(write(tmp_path, "kimi-linear", np.random.default_rng(1), change=fused), 1)
    assert c.projections["attn_qkv"] == "qkv"
    for key in ref:
        np.testing.assert_array_equal(w[key], ref[key], err_msg=key)


@pytest.mark.parametrize("shape", [(4, 4), (4, 1, 4), (1, 4, 1, 4), (4, 4, 1)])
def test_unit_axes_of_square_convolutions(tmp_path, rng, shape):
    """As many channels as taps: nothing but the order of the axes says which are which."""
    meta = META | {"ssm.conv_kernel": 4, "ssm.state_size": 1, "ssm.group_count": 1, "ssm.time_step_rank": 1, "ssm.inner_size": 2}
    sizes = {2 * 2 * 8 + 6 * 16: 4, 6 * 16: 2, 16: 2, 6: 1, 3: 4}
    shapes = {name: tuple(sizes.get(n, n) for n in old) for name, old in FORMS["qwen35"].items()}
    tensors = random_tensors(shapes, rng)
    conv = tensors["ssm_conv1d.weight"]
    path = write_block(tmp_path / "x.gguf", "qwen35", meta, tensors | {"ssm_conv1d.weight": conv.reshape(shape)})
    np.testing.assert_array_equal(read_layer(path, 1)[0]["conv"], conv)


def stored(qtype, shape, rng):
    """Random weights of a quantised type: (the bytes of a file, what the gguf package makes of them)."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[qtype]
    if qtype in (T.Q4_K, T.Q5_K, T.Q6_K):           # which the package unpacks only: any bytes, with scales that are finite
        data = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, n_bytes), np.uint8)
        data[..., slice(-2, None) if qtype == T.Q6_K else slice(0, 2)] = np.array([0.01], "<f2").view(np.uint8)
        if qtype != T.Q6_K:
            data[..., 2:4] = np.array([0.02], "<f2").view(np.uint8)
        data = data.reshape(*shape[:-1], -1)
    else:
        data = gguf.quantize(rng.standard_normal(shape).astype(np.float32), qtype)
    return data, gguf.dequantize(data, qtype).reshape(shape)


@pytest.mark.parametrize("qtype", [T.F16, T.BF16, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K, T.MXFP4], ids=lambda qtype: qtype.name)
def test_quantised_weights_are_the_dequantised_ones(tmp_path, rng, qtype):
    """Bit for bit, each of alpha, beta, conv, out and the rest; a convolution as wide as a block, where it must be."""
    block = gguf.GGML_QUANT_SIZES[qtype][0]
    keys, tensors = models.model("qwen35", rng, S=64, width=max(4, block))
    n_embd = 256
    wider = {name: [n_embd if n == 64 and "norm" not in name else n for n in x.shape] for name, x in tensors.items()}
    tensors = {name: np.full(shape, -1.0, np.float32) for name, shape in wider.items()}
    slots = {"a": "ssm_alpha", "b": "ssm_beta", "conv": "ssm_conv1d", "out": "ssm_out", "qkv": "attn_qkv", "z": "attn_gate"}
    types, expected = {}, {}
    for key, name in slots.items():
        data, expected[key] = stored(qtype, tensors[f"blk.1.{name}.weight"].shape, rng)
        types[f"blk.1.{name}.weight"] = qtype, data
    path = models.write(tmp_path / "x.gguf", "qwen35", keys | {"embedding_length": n_embd}, tensors, types)
    w, _ = read_layer(path, 1)
    for key, x in expected.items():
        np.testing.assert_array_equal(w[key].view(np.uint32), x.astype(np.float32).view(np.uint32), err_msg=key)
    types = describe(path)[1]["tensor_types"]
    assert {types[name] for name in slots.values()} == {qtype.name} and types["ssm_a"] == "F32"


# What is printed

def test_inspect_says_what_each_block_is(tmp_path, rng):
    text = inspect(write(tmp_path, "kimi-k3", rng, bound=-5.0))
    for line in ("kimi-k3, 3 linear-attention layers",
                 "layer 1: kda, attn_q + attn_k + attn_v + ssm_beta + ssm_f_a + ssm_f_b + ssm_g (F32)",
                 "family kimi_k3, gate bounded, lower bound -5, beta factor 1, gate ranks f 32, g full, output gate sigmoid",
                 "ssm_beta F32", "ssm_conv1d_q F32", "ssm_a F32", "layers 3: cannot be run: no linear attention"):
        assert line in text, line
    text = inspect(DATA / "qwen35.gguf")
    assert "family qwen3_5, gate softplus, beta factor 1, gate ranks f full, g full, output gate silu" in text
    assert "ssm_alpha F32" in text and "ssm_beta F32" in text and "ssm_conv1d F32" in text
    assert "every batch starts from zero" not in text
    assert inspect(write(tmp_path, "clef", rng)).count("every batch starts from zero, no state is kept") == 3


def test_inspect_says_why_a_block_cannot_be_run(tmp_path, rng):
    text = inspect(write(tmp_path, "glm5-next", rng, change={"ssm_f_b.weight": None}))
    assert "layer 1: cannot be run: tensor blk.1.ssm_f_b.weight is missing" in text
    assert "layer 0: kda" in text and "layer 2: kda" in text and "layer 1: kda" not in text
    text = inspect(write(tmp_path, "kimi-linear", rng, bound=-5.0))
    assert text.count("cannot be run: kimi-linear.kda.gate_lower_bound is -5.0") == 3
    _, tensors = models.model("qwen35", rng)
    text = inspect(write(tmp_path, "qwen35", rng, change={"ssm_a": -tensors["blk.1.ssm_a"]}))
    assert "layer 1: cannot be run: tensor blk.1.ssm_a holds" in text
    whole_numbers = tensors["blk.1.ssm_out.weight"].astype(np.int32)
    text = inspect(write(tmp_path, "qwen35", rng, change={"ssm_out.weight": whole_numbers}))
    assert "layer 1: cannot be run: tensor blk.1.ssm_out.weight: " in text and "I32" in text
