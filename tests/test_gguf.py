"""Layers read from GGUF files: the tiny models against transformers' weights and outputs, every stored form and type,
and files that are damaged or hostile."""

import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter
from gguf.quants import quantize
from helpers import DATA, assert_close

from gdn import reference
from gdn.adapters.gguf import describe, inspect, read_layer

GDN_KEYS = {"qkv", "z", "b", "a", "conv", "A", "dt_bias", "norm", "out"}
KDA_KEYS = {"qkv", "b", "conv", "A", "dt_bias", "norm", "out", "f_a", "f_b", "g_a", "g_b"}
E, H_K, H_V, S_K, S_V, WIDTH = 32, 2, 6, 8, 16, 3
C, INNER = 2 * H_K * S_K + H_V * S_V, H_V * S_V
SHAPES = {"ssm_a": (H_V,), "ssm_dt.bias": (H_V,), "ssm_conv1d.weight": (C, WIDTH), "ssm_norm.weight": (S_V,),
          "ssm_out.weight": (E, INNER), "attn_qkv.weight": (C, E), "attn_gate.weight": (INNER, E)}
FORMS = {"qwen3next": SHAPES | {"ssm_ba.weight": (2 * H_V, E)},
         "qwen35": SHAPES | {"ssm_beta.weight": (H_V, E), "ssm_alpha.weight": (H_V, E)}}
META = {"block_count": 2, "embedding_length": E, "ssm.conv_kernel": WIDTH, "ssm.state_size": S_K,
        "ssm.group_count": H_K, "ssm.time_step_rank": H_V, "ssm.inner_size": INNER,
        "attention.layer_norm_rms_epsilon": 1e-5}
H, S, RANK = 3, 16, 4
KIMI = {"ssm_a": (1, H, 1), "ssm_dt.bias": (H * S,), "ssm_norm.weight": (S,), "attn_output.weight": (E, H * S),
        "ssm_beta.weight": (H, E)}
KIMI |= {f"attn_{x}.weight": (H * S, E) for x in "qkv"} | {f"ssm_conv1d_{x}.weight": (H * S, 1, 4) for x in "qkv"}
KIMI |= {f"ssm_{x}_a.weight": (RANK, E) for x in "fg"} | {f"ssm_{x}_b.weight": (H * S, RANK) for x in "fg"}
KIMI_META = {"block_count": 2, "embedding_length": E, "ssm.conv_kernel": 4, "kda.head_dim": S,
             "attention.head_count": H, "attention.layer_norm_rms_epsilon": 1e-5}


def random_tensors(shapes, rng):
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(path, arch, meta, tensors, il=1, types=None):
    """A GGUF file of one block; `tensors` without the block's prefix, `types` by tensor name."""
    writer = GGUFWriter(path, arch)
    for key, value in meta.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key if "." in key and key.split(".")[0] in ("general", "split") else f"{arch}.{key}", value)
    for name, data in tensors.items():
        qtype = (types or {}).get(name)
        writer.add_tensor(f"blk.{il}.{name}", data if qtype is None else data_of(data, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def data_of(data, qtype):
    return data if data.dtype == np.uint8 else quantize(data, qtype)


def npz(name):
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


def layer(w, config, x):
    """The whole layer on one sequence, in float64, from the weights and the configuration alone."""
    w = {key: value.astype(np.float64) for key, value in w.items()}
    n, H_k, H_v, S_k = len(x), config["H_k"], config["H_v"], config["S_k"]
    pre = x @ w["qkv"].T
    padded = np.concatenate([np.zeros((config["width"] - 1, pre.shape[1])), pre])
    conv = sum(padded[i:i + n] * w["conv"][:, i] for i in range(config["width"])) + w.get("conv_bias", 0)
    q, k, v = np.split(conv * reference.sigmoid(conv), [H_k * S_k, 2 * H_k * S_k], axis=1)
    beta = config["beta_factor"] * reference.sigmoid(x @ w["b"].T)
    kda = config["kind"] == "kda"
    a = x @ w["f_a"].T @ w["f_b"].T if kda else x @ w["a"].T
    g = reference.softplus(a + w["dt_bias"]) * (np.repeat(w["A"], S_k) if kda else w["A"])
    z = x @ w["g_a"].T @ w["g_b"].T if kda else x @ w["z"].T
    o, _ = reference.recurrent(
        q.reshape(1, n, H_k, S_k), k.reshape(1, n, H_k, S_k), v.reshape(1, n, H_v, -1),
        g.reshape((1, n, H_v, S_k) if kda else (1, n, H_v)), beta[None], head_map=config["head_map"], qk_l2norm=True,
        l2_eps=config["l2_eps"], l2_form=config["l2_form"])
    o = o / np.sqrt((o * o).mean(-1, keepdims=True) + config["norm_eps"]) * w["norm"]
    gate = reference.sigmoid(z) * (z if config["activation"] == "silu" else 1)
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
    assert config == {"kind": "gdn", "n_embd": 64, "H_k": 2, "H_v": 4, "S_k": 64, "S_v": 64, "width": 4,
                      "head_map": "interleaved", "norm_eps": float(np.float32(1e-6)), "l2_eps": 1e-6, "l2_form": "sum",
                      "beta_factor": 1.0, "activation": "silu", "lower_bound": None}


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
    assert (config["head_map"], config["H_k"], config["H_v"], config["S_k"], config["S_v"]) == ("tiled", 2, 4, 32, 32)


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
    assert (config["kind"], config["activation"], config["H_k"], config["lower_bound"]) == ("kda", "sigmoid", 3, None)
    assert_close(layer(w, config, ref["x"][0].astype(np.float64)), ref["y"][0], "y of kimi")


def test_trained_model_has_four_layers_in_half_precision():
    path = DATA.parents[1] / "examples" / "shakespeare" / "shakespeare.gguf"
    for il, described in enumerate(describe(path)):
        w, config = read_layer(path, il)
        assert described["il"] == il and described["types"] == ["F16", "F32"]
        assert config.items() <= described.items()
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
        assert c == config and set(w) == set(ref) == GDN_KEYS
        for key in ref:
            np.testing.assert_array_equal(w[key], ref[key], err_msg=key)
            assert w[key].dtype == np.float32 and w[key].flags.c_contiguous and w[key].flags.writeable


def test_qwen35moe_and_convolution_bias(tmp_path, rng):
    tensors = random_tensors(FORMS["qwen35"] | {"ssm_conv1d.bias": (C,)}, rng)
    w, config = read_layer(write(tmp_path / "x.gguf", "qwen35moe", META, tensors), 1)
    assert config["head_map"] == "tiled" and config["S_k"] == S_K and config["S_v"] == S_V
    np.testing.assert_array_equal(w["conv_bias"], tensors["ssm_conv1d.bias"])


def test_kimi_gate_rank_and_lower_bound(tmp_path, rng):
    tensors = random_tensors(KIMI, rng)
    w, config = read_layer(write(tmp_path / "x.gguf", "kimi-linear", KIMI_META | {"kda.gate_lower_bound": -5.0},
                                 tensors), 1)
    assert config["lower_bound"] == -5.0 and w["f_a"].shape == (RANK, E) and w["g_b"].shape == (H * S, RANK)


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


def test_other_architectures_and_parts(tmp_path, rng):
    tensors = random_tensors(FORMS["qwen35"], rng)
    with pytest.raises(ValueError, match="general.architecture is 'llama', expected one of qwen3next"):
        describe(write(tmp_path / "x.gguf", "llama", META, tensors))
    with pytest.raises(ValueError, match="one part of 3"):
        describe(write(tmp_path / "x.gguf", "qwen35", META | {"split.count": 3}, tensors))
    assert "no linear-attention layers" in inspect(write(tmp_path / "x.gguf", "qwen35", META, {}))


# Damaged and hostile files

def outcome(path, il=1):
    """Whether the file reads; any error other than ValueError fails the test that asks."""
    try:
        describe(path)
        read_layer(path, il)
    except ValueError as error:
        assert str(path) in str(error)
        return False
    return True


@pytest.fixture
def whole(tmp_path, rng):
    """A small whole file's bytes, the end of its header, and a path to put damaged copies in."""
    path = write(tmp_path / "whole.gguf", "qwen35", META | {"tokens": ["a", "bc"], "numbers": [1, 2, 3]},
                 random_tensors(FORMS["qwen35"], rng))
    data = path.read_bytes()
    assert outcome(path)
    header = data.rindex(b"blk.1.") + 80
    return data, header, tmp_path / "damaged.gguf"


def test_no_gguf_at_all(tmp_path):
    path = tmp_path / "x.gguf"
    with pytest.raises(FileNotFoundError):
        read_layer(path, 0)
    for data in (b"", b"G", b"GGUF", bytes(4096), b"GGUF" + bytes(4096), b"\xff" * 4096, b"GGUF" + b"\xff" * 4096):
        path.write_bytes(data)
        assert not outcome(path), data[:8]
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(ValueError, match="big-endian"):
        describe(path)
    with pytest.raises(ValueError, match="not a regular file"):
        describe(tmp_path)


def test_truncated_anywhere(whole):
    data, header, path = whole
    for n in [*range(0, header, 7), *range(header, len(data), 997), len(data) - 1]:
        path.write_bytes(data[:n])
        assert not outcome(path), f"read although cut to {n} of {len(data)} bytes"


def test_flipped_bytes_in_the_header(whole, rng):
    data, header, path = whole
    tracemalloc.start()
    refused = 0
    for position in rng.integers(0, header, 400):
        damaged = bytearray(data)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        refused += not outcome(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 100
    assert peak < 16 * len(data) + (8 << 20), f"{peak} bytes allocated for a file of {len(data)}"


def key_value(key, type, value):
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", type) + value


def tensor_info(name, ne, type=0, offset=0):
    return struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, type, offset)


HUGE = (1 << 64) - 1
HOSTILE = {
    "pairs": struct.pack("<QQ", 0, HUGE), "tensors": struct.pack("<QQ", HUGE, 0),
    "pairs that fit no file": struct.pack("<QQ", 0, 1 << 19) + bytes(1 << 16),
    "key length": struct.pack("<QQQ", 0, 1, HUGE), "empty key": struct.pack("<QQ", 0, 1) + key_value(b"", 0, b"\0"),
    "key bytes": struct.pack("<QQ", 0, 1) + key_value(b"\xff\xfe", 0, b"\0"),
    "string length": struct.pack("<QQ", 0, 1) + key_value(b"k", 8, struct.pack("<Q", HUGE)),
    "value type": struct.pack("<QQ", 0, 1) + key_value(b"k", 77, bytes(64)),
    "same key": struct.pack("<QQ", 0, 2) + key_value(b"k", 0, b"\0") * 2,
    "array length": struct.pack("<QQ", 0, 1) + key_value(b"k", 9, struct.pack("<IQ", 0, HUGE)),
    "array of doubles": struct.pack("<QQ", 0, 1) + key_value(b"k", 9, struct.pack("<IQ", 12, 1 << 61)),
    "array of strings": struct.pack("<QQ", 0, 1) + key_value(b"k", 9, struct.pack("<IQ", 8, 1 << 40) + bytes(4096)),
    "nested arrays": struct.pack("<QQ", 0, 1) + key_value(b"k", 9, struct.pack("<IQ", 9, 1) * 100000),
    "alignment 0": struct.pack("<QQ", 0, 1) + key_value(b"general.alignment", 4, struct.pack("<I", 0)),
    "alignment 33": struct.pack("<QQ", 0, 1) + key_value(b"general.alignment", 4, struct.pack("<I", 33)),
    "alignment text": struct.pack("<QQ", 0, 1) + key_value(b"general.alignment", 8, struct.pack("<Q", 1) + b"8"),
    "no axes": struct.pack("<QQ", 1, 0) + tensor_info(b"blk.0.ssm_a", ()),
    "nine axes": struct.pack("<QQ", 1, 0) + tensor_info(b"blk.0.ssm_a", (1,) * 9),
    "extents": struct.pack("<QQ", 1, 0) + tensor_info(b"blk.0.ssm_a", (HUGE,) * 4),
    "extents that wrap to 0": struct.pack("<QQ", 1, 0) + tensor_info(b"blk.0.ssm_a", (1 << 32,) * 4),
    "offset": struct.pack("<QQ", 1, 0) + tensor_info(b"blk.0.ssm_a", (1,), 0, HUGE - 31),
    "odd offset": struct.pack("<QQ", 1, 0) + tensor_info(b"blk.0.ssm_a", (1,), 0, 3),
    "same tensor": struct.pack("<QQ", 2, 0) + tensor_info(b"blk.0.ssm_a", (1,)) * 2,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_header(tmp_path, what):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + HOSTILE[what] + bytes(4096))
    tracemalloc.start()
    with pytest.raises(ValueError) as caught:
        describe(path)
    assert "general.architecture" not in str(caught.value)      # refused for what is wrong, not for what is left out
    assert not outcome(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_unknown_type_of_the_layers_own_tensor(whole):
    data, _, path = whole
    at = data.index(b"blk.1.attn_gate.weight") + len(b"blk.1.attn_gate.weight") + 4 + 2 * 8
    for type in (4, 31, 1000, (1 << 32) - 1):
        path.write_bytes(data[:at] + struct.pack("<I", type) + data[at + 4:])
        with pytest.raises(ValueError, match=r"blk\.1\.attn_gate\.weight: type"):
            read_layer(path, 1)
        assert "unknown" in describe(path)[0]["types"]


# The command

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
