"""Layers read from GGUF files: the tiny models against transformers' weights and outputs, every stored form and type."""

import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf_tools import (
    FORMS,
    GDN_KEYS,
    H_K,
    H_V,
    INNER,
    KDA_KEYS,
    KIMI,
    KIMI_META,
    META,
    RANK,
    S_K,
    S_V,
    C,
    E,
    H,
    S,
    random_tensors,
    write,
)
from helpers import DATA, assert_close

import gdn
from gdn import reference
from gdn.adapters.gguf import describe, inspect, read_layer


def npz(name):
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


def layer(w, config, x):
    """The whole layer on one sequence, in float64, from the weights and the configuration alone."""
    w = {key: value.astype(np.float64) for key, value in w.items()}
    n, H_k, H_v, S_k = len(x), config.H_k, config.H_v, config.S_k
    pre = x @ w["qkv"].T
    padded = np.concatenate([np.zeros((config.width - 1, pre.shape[1])), pre])
    conv = sum(padded[i:i + n] * w["conv"][:, i] for i in range(config.width)) + w.get("conv_bias", 0)
    q, k, v = np.split(conv * reference.sigmoid(conv), [H_k * S_k, 2 * H_k * S_k], axis=1)
    beta = config.beta_factor * reference.sigmoid(x @ w["b"].T)
    kda = config.kind == "kda"
    a = x @ w["f_a"].T @ w["f_b"].T if kda else x @ w["a"].T
    g = reference.softplus(a + w["dt_bias"]) * (np.repeat(w["A"], S_k) if kda else w["A"])
    z = x @ w["g_a"].T @ w["g_b"].T if kda else x @ w["z"].T
    o, _ = reference.recurrent(
        q.reshape(1, n, H_k, S_k), k.reshape(1, n, H_k, S_k), v.reshape(1, n, H_v, -1),
        g.reshape((1, n, H_v, S_k) if kda else (1, n, H_v)), beta[None], head_map=config.head_map, qk_l2norm=True,
        l2_eps=config.l2_eps, l2_form=config.l2_form)
    o = o / np.sqrt((o * o).mean(-1, keepdims=True) + config.norm_eps) * w["norm"]
    gate = reference.sigmoid(z) * (z if config.activation == "silu" else 1)
    return (o.reshape(n, -1) * gate) @ w["out"].T


# The tiny models

def test_qwen3next_weights_are_transformers(rng):
    w, config = read_layer(DATA / "qwen3next.gguf", 1)
    ref, S, r = npz("qwen3next"), 64, 2
    rows = {"qkv": [], "z": []}
    group = 2 * S + 2 * r * S
    for start, size in ((0, S), (S, S), (2 * S, r * S)):
        rows["qkv"] += [kh * group + start + i for kh in range(2) for i in range(size)]
    rows["z"] = [kh * group + 2 * S + r * S + i for kh in range(2) for i in range(r * S)]
    for key in rows:
        np.testing.assert_array_equal(w[key], ref["w.in_proj_qkvz.weight"][rows[key]])
    np.testing.assert_array_equal(w["b"], ref["w.in_proj_ba.weight"][[0, 1, 4, 5]])
    np.testing.assert_array_equal(w["a"], ref["w.in_proj_ba.weight"][[2, 3, 6, 7]])
    np.testing.assert_array_equal(w["conv"], ref["w.conv1d.weight"][:, 0])
    np.testing.assert_array_equal(w["dt_bias"], ref["w.dt_bias"])
    np.testing.assert_allclose(w["A"], -np.exp(ref["w.A_log"]), rtol=1e-6)
    np.testing.assert_array_equal(w["norm"], ref["w.norm.weight"])
    np.testing.assert_array_equal(w["out"], ref["w.out_proj.weight"])
    assert set(w) == GDN_KEYS
    assert config == gdn.LayerConfig(
        kind="gdn", n_embd=64, H_k=2, H_v=4, S_k=64, S_v=64, width=4, head_map="interleaved",
        norm_eps=float(np.float32(1e-6)), activation="silu", family="qwen3_next",
        projections={"attn_qkv": "qkv", "attn_gate": "z", "ssm_ba": "ba", "ssm_out": "out"})


def test_qwen35_weights_are_transformers_with_value_heads_tiled():
    w, config = read_layer(DATA / "qwen35.gguf", 1)
    ref, S = npz("qwen35"), 32
    heads = [0, 2, 1, 3]            # H_k = 2, r = 2: new head ri * 2 + kh holds old head kh * 2 + ri
    values = np.concatenate([np.arange(h * S, (h + 1) * S) for h in heads])
    channels = np.concatenate([np.arange(2 * 2 * S), 2 * 2 * S + values])
    for key, name, index in (("qkv", "in_proj_qkv.weight", channels), ("z", "in_proj_z.weight", values),
                             ("b", "in_proj_b.weight", heads), ("a", "in_proj_a.weight", heads),
                             ("dt_bias", "dt_bias", heads), ("norm", "norm.weight", slice(None))):
        np.testing.assert_array_equal(w[key], ref[f"w.{name}"][index], err_msg=key)
    np.testing.assert_array_equal(w["conv"], ref["w.conv1d.weight"][channels, 0])
    np.testing.assert_array_equal(w["out"], ref["w.out_proj.weight"][:, values])
    np.testing.assert_allclose(w["A"], -np.exp(ref["w.A_log"][heads]), rtol=1e-6)
    assert set(w) == GDN_KEYS
    assert (config.head_map, config.H_k, config.H_v, config.S_k, config.S_v) == ("tiled", 2, 4, 32, 32)


@pytest.mark.parametrize("name", ["qwen3next", "qwen35"])
def test_the_layer_computed_from_the_file_is_transformers(name):
    ref = npz(name)
    y = layer(*read_layer(DATA / f"{name}.gguf", 1), ref["x"][0].astype(np.float64))
    assert_close(y, ref["y"][0], f"y of {name}")


def kimi_tensors(ref):
    q, k, v = np.split(ref["w.conv1d.weight"], 3)
    gate = "w.forget_gate."
    named = {"attn_q": "w.q_proj", "attn_k": "w.k_proj", "attn_v": "w.v_proj", "attn_output": "w.o_proj",
             "ssm_beta": "w.b_proj", "ssm_norm": "w.o_norm", "ssm_f_a": f"{gate}f_a_proj", "ssm_f_b": f"{gate}f_b_proj",
             "ssm_g_a": "w.g_a_proj", "ssm_g_b": "w.g_b_proj"}
    return {f"{new}.weight": ref[f"{old}.weight"] for new, old in named.items()} | {
        "ssm_conv1d_q.weight": q[None], "ssm_conv1d_k.weight": k, "ssm_conv1d_v.weight": v[:, 0],   # 4, 3 and 2 axes
        "ssm_a": -np.exp(ref[f"{gate}A_log"]).reshape(1, 3, 1), "ssm_dt.bias": ref[f"{gate}dt_bias"]}


def test_kimi_linear_is_transformers(tmp_path):
    ref = npz("kimi")
    meta = KIMI_META | {"embedding_length": 64, "kda.head_dim": 32, "attention.head_count_kv": [2, 0]}
    path = write(tmp_path / "kimi.gguf", "kimi-linear", meta, kimi_tensors(ref))
    w, config = read_layer(path, 1)
    assert set(w) == KDA_KEYS
    np.testing.assert_array_equal(w["qkv"], np.concatenate([ref[f"w.{x}_proj.weight"] for x in "qkv"]))
    np.testing.assert_array_equal(w["conv"], ref["w.conv1d.weight"][:, 0])
    assert w["A"].shape == (3,) and w["dt_bias"].shape == (96,) and w["f_a"].shape == (32, 64)
    assert (config.kind, config.activation, config.H_k, config.lower_bound) == ("kda", "sigmoid", 3, None)
    assert_close(layer(w, config, ref["x"][0].astype(np.float64)), ref["y"][0], "y of kimi")


def test_trained_model_has_four_layers_in_half_precision():
    path = DATA.parents[1] / "examples" / "shakespeare" / "shakespeare.gguf"
    for il, described in enumerate(describe(path)):
        w, config = read_layer(path, il)
        assert described["il"] == il and described["types"] == ["F16", "F32"]
        assert {**asdict(config), "projections": None}.items() <= {**described, "projections": None}.items()
        assert described["state_bytes"] == 4 * (3 * 512 + 4 * 64 * 64)
        assert w["qkv"].shape == (512, 192) and w["qkv"].dtype == np.float32
        np.testing.assert_array_equal(w["qkv"], w["qkv"].astype(np.float16))
    assert il == 3


# Forms and types

def test_fused_qkvz_and_ba_equal_the_separate_form(tmp_path, rng):
    tensors = random_tensors(FORMS["qwen3next"], rng)
    ba = tensors["ssm_ba.weight"].reshape(H_K, 2, H_V // H_K, E)
    split = {k: x for k, x in tensors.items() if k != "ssm_ba.weight"}
    split |= {"ssm_beta.weight": ba[:, 0].reshape(H_V, E), "ssm_alpha.weight": ba[:, 1].reshape(H_V, E)}
    q, k, v = np.split(tensors["attn_qkv.weight"], [H_K * S_K, 2 * H_K * S_K])
    fused = {k: x for k, x in tensors.items() if k not in ("attn_qkv.weight", "attn_gate.weight")}
    fused["ssm_in.weight"] = np.concatenate(
        [x.reshape(H_K, -1, E) for x in (q, k, v, tensors["attn_gate.weight"])], axis=1).reshape(-1, E)
    ref, config = read_layer(write(tmp_path / "a.gguf", "qwen3next", META, tensors), 1)
    for i, form in enumerate((split, fused)):
        w, c = read_layer(write(tmp_path / f"{i}.gguf", "qwen3next", META, form), 1)
        assert replace(c, projections=config.projections) == config and set(w) == set(ref) == GDN_KEYS
        for key in ref:
            np.testing.assert_array_equal(w[key], ref[key], err_msg=key)
            assert w[key].dtype == np.float32 and w[key].flags.c_contiguous and w[key].flags.writeable


def test_qwen35moe_and_convolution_bias(tmp_path, rng):
    tensors = random_tensors(FORMS["qwen35"] | {"ssm_conv1d.bias": (C,)}, rng)
    w, config = read_layer(write(tmp_path / "x.gguf", "qwen35moe", META, tensors), 1)
    assert config.head_map == "tiled" and config.S_k == S_K and config.S_v == S_V
    np.testing.assert_array_equal(w["conv_bias"], tensors["ssm_conv1d.bias"])


def test_kimi_gate_rank_and_lower_bound(tmp_path, rng):
    """The bound is no field of the family: llama.cpp does not read it, so what is meant is said."""
    path = write(tmp_path / "x.gguf", "kimi-linear", KIMI_META | {"kda.gate_lower_bound": -5.0}, random_tensors(KIMI, rng))
    with pytest.raises(ValueError, match=r"kimi-linear\.kda\.gate_lower_bound is -5\.0.*overrides="):
        read_layer(path, 1)
    w, config = read_layer(path, 1, {"gate": "bounded", "lower_bound": -5.0})
    assert (config.gate, config.lower_bound) == ("bounded", -5.0)
    assert w["f_a"].shape == (RANK, E) and w["g_b"].shape == (H * S, RANK)
    assert read_layer(path, 1, {"gate": "softplus"})[1].lower_bound is None


@pytest.mark.parametrize("qtype, bound", [(T.F16, 1e-3), (T.BF16, 1e-2), (T.Q8_0, 1e-2), (T.Q5_1, 5e-2), (T.Q4_0, 0.2)])
def test_types(tmp_path, rng, qtype, bound):
    tensors = random_tensors(FORMS["qwen35"], rng)
    types = {name: qtype for name in tensors if name.startswith(("attn", "ssm_alpha", "ssm_beta", "ssm_out"))}
    path = write(tmp_path / "x.gguf", "qwen35", META, tensors, types=types)
    w, _ = read_layer(path, 1)
    for key, name in (("qkv", "attn_qkv.weight"), ("z", "attn_gate.weight"), ("out", "ssm_out.weight"),
                      ("b", "ssm_beta.weight"), ("a", "ssm_alpha.weight")):
        assert_close(w[key], tensors[name], f"{key} from {qtype.name}", bound)
        assert w[key].dtype == np.float32
    np.testing.assert_array_equal(w["conv"], tensors["ssm_conv1d.weight"])
    assert describe(path)[0]["types"] == sorted(["F32", qtype.name])


def test_vocabularies_are_stepped_over(tmp_path, rng):
    """Long arrays and strings before the tensors, some longer than the pieces they are read in, some empty."""
    strings = ["x" * n for n in (0, 1, 65527, 65528, 65529, 65536, 200_000, 0, 7)] + [""] * 9000
    tensors = random_tensors(FORMS["qwen35"], rng)
    meta = META | {"strings": strings, "types": list(range(70_000)), "text": "y" * 70_000, "last": ["a"]}
    path = write(tmp_path / "x.gguf", "qwen35", meta, tensors)
    np.testing.assert_array_equal(read_layer(path, 1)[0]["qkv"], tensors["attn_qkv.weight"])
    data = path.read_bytes()
    for n in (data.index(b"strings") + 3000, data.index(b"strings") + 200_000, data.index(b"last") + 20):
        path.write_bytes(data[:n])
        with pytest.raises(ValueError, match="truncated or damaged|9009 strings in a file of 3... bytes"):
            describe(path)


def q4_k_block(values):
    """256 whole numbers 0..15 as one block: scale 1, eight sub-scales 1, minima 0, nibbles in pairs of 32."""
    low, high = values.reshape(4, 2, 32).transpose(1, 0, 2)
    return np.concatenate([np.array([1, 0], "<f2").view(np.uint8), np.array([1] * 4 + [0] * 4 + [1] * 4, np.uint8),
                           (low | high << 4).astype(np.uint8).ravel()])


def test_q4_k(tmp_path, rng):
    meta = META | {"embedding_length": 256}
    shapes = {name: tuple(256 if n == E else n for n in shape) for name, shape in FORMS["qwen35"].items()}
    tensors = random_tensors(shapes, rng)
    numbers = rng.integers(0, 16, (INNER, 256))
    tensors["attn_gate.weight"] = np.stack([q4_k_block(row) for row in numbers])
    path = write(tmp_path / "x.gguf", "qwen35", meta, tensors, types={"attn_gate.weight": T.Q4_K})
    np.testing.assert_array_equal(read_layer(path, 1)[0]["z"], numbers)


def test_types_that_hold_no_weights(tmp_path, rng):
    tensors = random_tensors(FORMS["qwen35"], rng)
    tensors["attn_gate.weight"] = tensors["attn_gate.weight"].astype(np.int32)
    path = write(tmp_path / "x.gguf", "qwen35", META, tensors)
    with pytest.raises(ValueError, match=r"blk\.1\.attn_gate\.weight.*I32"):
        read_layer(path, 1)


# What is missing or contradicts the metadata

CASES = [(arch, name) for arch, shapes in (FORMS | {"kimi-linear": KIMI}).items() for name in shapes]


def model(arch, rng):
    return (KIMI_META, random_tensors(KIMI, rng)) if arch == "kimi-linear" else (META, random_tensors(FORMS[arch], rng))


@pytest.mark.parametrize("arch, name", CASES)
def test_missing_and_misshaped_tensors_are_named(tmp_path, rng, arch, name):
    meta, tensors = model(arch, rng)
    read_layer(write(tmp_path / "whole.gguf", arch, meta, tensors), 1)
    less = {k: x for k, x in tensors.items() if k != name}
    for function in (describe, lambda path: read_layer(path, 1)):
        with pytest.raises(ValueError, match=rf"blk\.1\.{name} is missing, expected.*\d"):
            function(write(tmp_path / "less.gguf", arch, meta, less))
        longer = np.concatenate([tensors[name]] * 2, axis=-1)
        with pytest.raises(ValueError, match=rf"blk\.1\.{name} has ne = \[.*\], expected \[.*\d"):
            function(write(tmp_path / "longer.gguf", arch, meta, tensors | {name: longer}))


@pytest.mark.parametrize("extra", ["attn_qkv.bias", "ssm_out.bias", "ssm_norm.scale", "ssm_other.weight"])
def test_tensors_that_nobody_reads_are_refused(tmp_path, rng, extra):
    """But for those of the block's other parts."""
    tensors = random_tensors(FORMS["qwen35"], rng)
    beside = {"attn_norm.weight": np.ones(E, np.float32), "ffn_up.weight": np.ones((4, E), np.float32)}
    read_layer(write(tmp_path / "x.gguf", "qwen35", META, tensors | beside), 1)
    with pytest.raises(ValueError, match=f"blk.1.{extra} of no known use"):
        read_layer(write(tmp_path / "y.gguf", "qwen35", META, tensors | beside | {extra: np.ones(3, np.float32)}), 1)


def test_transposed_tensor(tmp_path, rng):
    meta, tensors = model("qwen35", rng)
    tensors["attn_gate.weight"] = tensors["attn_gate.weight"].T.copy()
    with pytest.raises(ValueError, match=r"blk\.1\.attn_gate\.weight has ne = \[96, 32\], expected \[32, 96\]"):
        read_layer(write(tmp_path / "x.gguf", "qwen35", meta, tensors), 1)


BAD_META = [("block_count", 0), ("block_count", "2"), ("embedding_length", 1 << 31), ("ssm.conv_kernel", 2.5),
            ("ssm.state_size", 0), ("ssm.group_count", 4), ("ssm.group_count", [2, 2]), ("ssm.time_step_rank", 4),
            ("ssm.time_step_rank", 7), ("ssm.inner_size", 97), ("ssm.inner_size", 192),
            ("attention.layer_norm_rms_epsilon", float("nan")), ("attention.layer_norm_rms_epsilon", float("inf")),
            ("attention.layer_norm_rms_epsilon", -1.0), ("attention.layer_norm_rms_epsilon", "1e-6")]


@pytest.mark.parametrize("key, value", BAD_META)
def test_metadata_out_of_range_or_at_odds_with_the_tensors(tmp_path, rng, key, value):
    tensors = random_tensors(FORMS["qwen35"], rng)
    for meta in (META | {key: value}, {k: v for k, v in META.items() if k != key}):
        path = write(tmp_path / "x.gguf", "qwen35", meta, tensors)
        for function in (describe, lambda path: read_layer(path, 1)):
            with pytest.raises(ValueError, match=rf"qwen35\.{key}|expected \["):
                function(path)


def test_blocks_that_are_not_there(tmp_path):
    for il in (-1, 4, 1 << 40):
        with pytest.raises(ValueError, match=f"il is {il}, the model has blocks 0 to 3"):
            read_layer(DATA / "qwen35.gguf", il)
    with pytest.raises(ValueError, match=r"block 3 is no linear-attention layer; those are \[0, 1, 2\]"):
        read_layer(DATA / "qwen35.gguf", 3)
    with pytest.raises(TypeError):
        read_layer(DATA / "qwen35.gguf", "1")


def test_blocks_beyond_the_models_are_no_layers(tmp_path, rng):
    """As those that predict further tokens are."""
    path = write(tmp_path / "x.gguf", "qwen35", META, random_tensors(FORMS["qwen35"], rng), il=2)
    assert describe(path) == []


def test_version_2(tmp_path, rng):
    path = write(tmp_path / "x.gguf", "qwen35", META, random_tensors(FORMS["qwen35"], rng))
    layers, data = describe(path), path.read_bytes()
    path.write_bytes(data[:4] + b"\2" + data[5:])
    assert describe(path) == layers
    path.write_bytes(data[:4] + b"\1" + data[5:])
    with pytest.raises(ValueError, match="GGUF version 1, expected"):
        describe(path)


def test_two_forms_at_once_are_refused(tmp_path, rng):
    for extra in ("ssm_in.weight", "ssm_ba.weight"):
        shape = (C + INNER, E) if extra == "ssm_in.weight" else (2 * H_V, E)
        with pytest.raises(ValueError, match=f"blk.1.{extra} of no known use"):
            read_layer(write(tmp_path / "x.gguf", "qwen3next", META,
                             random_tensors(FORMS["qwen35"] | {extra: shape}, rng)), 1)


def test_other_architectures_and_parts(tmp_path, rng):
    tensors = random_tensors(FORMS["qwen35"], rng)
    with pytest.raises(ValueError, match="general.architecture is 'llama', expected one of qwen3next"):
        describe(write(tmp_path / "x.gguf", "llama", META, tensors))
    for n in (2, 3):
        with pytest.raises(ValueError, match=f"one part of {n}"):
            describe(write(tmp_path / "x.gguf", "qwen35", META | {"split.count": n}, tensors))
    assert describe(write(tmp_path / "x.gguf", "qwen35", META | {"split.count": 1}, tensors))
    assert "no linear-attention layers" in inspect(write(tmp_path / "x.gguf", "qwen35", META, {}))


def command(*args):
    return subprocess.run([sys.executable, "-m", "gdn", "inspect", *map(str, args)], capture_output=True, text=True)


def test_inspect_prints_each_layer(tmp_path):
    done = command(DATA / "qwen35.gguf")
    assert done.returncode == 0 and done.stdout.strip() == inspect(DATA / "qwen35.gguf")
    for text in ("3 linear-attention layers", "58,368 bytes of state", "19,456 bytes",
                 "layer 0: gdn, attn_qkv + attn_gate + ssm_beta + ssm_alpha (F32)",
                 "H_k 2, H_v 4, S_k 32, S_v 32, width 4, head map tiled"):
        assert text in done.stdout
    assert "layer 3" not in done.stdout
    (tmp_path / "zeros.gguf").write_bytes(bytes(100))
    for path in (tmp_path / "zeros.gguf", tmp_path / "absent.gguf", tmp_path):
        done = command(path)
        assert done.returncode == 1 and str(path) in done.stderr and "Traceback" not in done.stderr
