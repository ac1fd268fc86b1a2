"""Weight forms: any fused or separate projections give the same layer, and LoRA pairs follow the names they came by."""

import itertools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import DATA, assert_close, optional, same_bits

import gdn
from gdn import weight_layouts
from gdn.adapters import state_dict

H_K, R, S_K, S_V, N_EMBD, WIDTH = 3, 2, 8, 12, 20, 4
H_V, KEY, VALUE = H_K * R, H_K * S_K, H_K * R * S_V
CONFIG = {"model_type": "qwen3_next", "hidden_size": N_EMBD, "linear_num_key_heads": H_K,
          "linear_num_value_heads": H_V, "linear_key_head_dim": S_K, "linear_value_head_dim": S_V,
          "linear_conv_kernel_dim": WIDTH, "rms_norm_eps": 1e-6}
QKVZ = {"fused": ("in_proj_qkvz",), "qkv and z": ("in_proj_qkv", "in_proj_z"),
        "apart": ("q_proj", "k_proj", "v_proj", "g_proj")}
BA = {"fused": ("in_proj_ba",), "apart": ("in_proj_b", "in_proj_a")}
CONV = {"one": ("conv1d",), "three": ("q_conv1d", "k_conv1d", "v_conv1d")}


def by_head(*parts):
    """Rows of each key head together, written out head by head."""
    heads = [[p[h * len(p) // H_K:(h + 1) * len(p) // H_K] for p in parts] for h in range(H_K)]
    return np.concatenate([p for head in heads for p in head])


def every_form(q, k, v, z, b, a):
    """{name: rows} under every name that any form uses."""
    return {"q_proj": q, "k_proj": k, "v_proj": v, "g_proj": z, "in_proj_z": z, "in_proj_b": b, "in_proj_a": a,
            "in_proj_qkv": np.concatenate([q, k, v]), "in_proj_qkvz": by_head(q, k, v, z), "in_proj_ba": by_head(b, a)}


def random_rows(rng, columns):
    return [rng.standard_normal((n, columns)).astype(np.float32) * 0.3 for n in (KEY, KEY, VALUE, VALUE, H_V, H_V)]


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(11)
    conv, bias = rng.standard_normal((2 * KEY + VALUE, 1, WIDTH)), rng.standard_normal(2 * KEY + VALUE)
    everything = {f"{name}.weight": w for name, w in every_form(*random_rows(rng, N_EMBD)).items()}
    everything |= {"conv1d.weight": conv, "conv1d.bias": bias, "A_log": rng.standard_normal(H_V),
                   "dt_bias": rng.standard_normal(H_V), "norm.weight": rng.uniform(0.5, 1.5, S_V),
                   "out_proj.weight": rng.standard_normal((N_EMBD, VALUE))}
    for x, start, stop in (("q", 0, KEY), ("k", KEY, 2 * KEY), ("v", 2 * KEY, 2 * KEY + VALUE)):
        everything |= {f"{x}_conv1d.weight": conv[start:stop], f"{x}_conv1d.bias": bias[start:stop]}
    return {name: w.astype(np.float32) for name, w in everything.items()}


def chosen(tensors, qkvz, ba, conv, bias=True):
    names = [f"{name}.weight" for name in (*QKVZ[qkvz], *BA[ba], *CONV[conv], "norm", "out_proj")]
    names += [f"{name}.bias" for name in CONV[conv]] if bias else []
    return {name: tensors[name] for name in (*names, "A_log", "dt_bias")}


def run(layer, n=9):
    x = np.random.default_rng(2).standard_normal((n, layer.n_embd)).astype(np.float32)
    ring = gdn.StateRing.create(1, n_layers=1, **layer.extents)
    ring.acquire(0)
    batch, trace = gdn.Batch([0] * n), {}
    with ring.begin(batch) as step:
        return layer(x, batch, step, 0, trace=trace), trace


def load(tensors, *form, lora=None, **options):
    return gdn.GatedDeltaNet.from_state_dict(chosen(tensors, *form, **options), "", CONFIG, lora)


@pytest.mark.parametrize("form", list(itertools.product(QKVZ, BA, CONV)), ids=" ".join)
def test_forms_are_the_same_layer(tensors, form):
    y, trace = run(load(tensors, *form))
    want, want_trace = run(load(tensors, "apart", "apart", "one"))
    assert same_bits(y, want)
    assert all(same_bits(trace[name], want_trace[name]) for name in want_trace)


def test_the_constructor_takes_any_form(tensors):
    want, _ = run(load(tensors, "apart", "apart", "one"))
    _, config = state_dict.read_layer(chosen(tensors, "fused", "fused", "one"), "", CONFIG)
    weights = {"qkvz": tensors["in_proj_qkvz.weight"], "ba": tensors["in_proj_ba.weight"], "A": -np.exp(tensors["A_log"]),
               "dt_bias": tensors["dt_bias"], "norm": tensors["norm.weight"], "out": tensors["out_proj.weight"],
               **{f"conv_{x}": tensors[f"{x}_conv1d.weight"][:, 0] for x in "qkv"}, "conv_bias": tensors["conv1d.bias"]}
    assert same_bits(run(gdn.GatedDeltaNet(weights, config))[0], want)
    with pytest.raises(ValueError, match="qkvz has 5 rows, expected 192"):
        gdn.GatedDeltaNet({**weights, "qkvz": np.zeros((5, N_EMBD), np.float32)}, config)
    with pytest.raises(ValueError, match="weights"):
        gdn.GatedDeltaNet({**weights, "qkvz": None}, config)
    with pytest.raises(ValueError, match="weights have z in two forms"):
        gdn.GatedDeltaNet({**weights, "z": tensors["in_proj_z.weight"]}, config)
    with pytest.raises(ValueError, match="conv_q, conv_k, conv_v go together, only 2"):
        gdn.GatedDeltaNet({name: w for name, w in weights.items() if name != "conv_k"}, config)


@pytest.mark.parametrize("form", list(itertools.product(QKVZ, BA)), ids=" ".join)
def test_lora_under_the_names_the_weights_came_by(tensors, form):
    rng = np.random.default_rng(5)
    rank = 2
    B = every_form(*random_rows(rng, rank))
    names = (*QKVZ[form[0]], *BA[form[1]], "out_proj")
    B["out_proj"] = rng.standard_normal((N_EMBD, rank)).astype(np.float32)
    lora, merged = {}, dict(tensors)
    for name in names:
        A = rng.standard_normal((rank, VALUE if name == "out_proj" else N_EMBD)).astype(np.float32) * 0.3
        lora[name] = [(A, B[name], 0.5)]
        merged[f"{name}.weight"] = tensors[f"{name}.weight"] + 0.5 * B[name] @ A
    y, _ = run(load(tensors, *form, "one", lora=lora))
    assert_close(y, run(load(merged, *form, "one"))[0], f"lora on {names}", 2e-5)


def test_lora_on_a_part_of_qkv_whatever_the_form(tensors):
    rng = np.random.default_rng(6)
    A, B = rng.standard_normal((3, N_EMBD), np.float32), rng.standard_normal((VALUE, 3), np.float32)
    changed = {**tensors, "v_proj.weight": tensors["v_proj.weight"] + (0.1 * B @ A).astype(np.float32)}
    want, _ = run(load(changed, "apart", "apart", "one"))
    assert_close(run(load(tensors, "fused", "fused", "one", lora={"v": [(A, B, 0.1)]}))[0], want, "lora on v", 2e-5)


def test_lora_of_a_gguf_file_by_its_names():
    data = np.load(DATA / "qwen3next.npz")
    rng = np.random.default_rng(7)
    A, B = rng.standard_normal((2, 64), np.float32), rng.standard_normal((8, 2), np.float32)
    from_file = gdn.GatedDeltaNet.from_gguf(DATA / "qwen3next.gguf", 1, lora={"ssm_ba": [(A, B, 1)]})
    config = {"model_type": "qwen3_next", "hidden_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
              "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6}
    weights = {name: data[name] for name in data.files if name.startswith("w.")}
    weights["w.in_proj_ba.weight"] = weights["w.in_proj_ba.weight"] + (B @ A).astype(np.float32)
    assert_close(run(from_file)[0], run(gdn.GatedDeltaNet.from_state_dict(weights, "w.", config))[0], "ssm_ba", 2e-5)


def test_tensors_that_nobody_reads_are_refused(tensors):
    weights = chosen(tensors, "fused", "fused", "one")
    for name in ("in_proj_qkvz.bias", "in_proj_z.weight", "in_proj_qkvz.weight_scale_inv"):
        with pytest.raises(ValueError, match=f"{name} of no known use"):
            gdn.GatedDeltaNet.from_state_dict({**weights, name: np.zeros(3)}, "", CONFIG)
    with pytest.raises(TypeError, match="in_proj_ba.weight must be float16, .* got int8"):
        quantised = tensors["in_proj_ba.weight"].astype(np.int8)
        gdn.GatedDeltaNet.from_state_dict({**weights, "in_proj_ba.weight": quantised}, "", CONFIG)


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"])
def test_what_a_config_says(tensors, model):
    """What a model fixes, what it leaves to the config, and where that may stand."""
    weights, olmo = chosen(tensors, "fused", "fused", "one"), model == "olmo_hybrid"
    config = {**CONFIG, "model_type": model, "rms_norm_eps": 3e-6, "hidden_act": "swish"}
    fixed = {"kind": "gdn", "head_map": "interleaved", "norm_eps": 1e-5 if olmo else 3e-6, "l2_eps": 1e-6, "l2_form": "sum",
             "beta_factor": 2 if olmo else 1, "activation": "silu", "gate": "softplus", "lower_bound": None, "S_v": S_V,
             "family": "qwen3_5" if "qwen3_5" in model else model}
    for given in (config, {"model_type": "whole", "text_config": config}, SimpleNamespace(**config),
                  SimpleNamespace(text_config=SimpleNamespace(**config))):
        said = state_dict.read_layer(weights, "", given)[1]
        assert {name: getattr(said, name) for name in fixed} == fixed
    assert state_dict.read_layer(weights, "", {**config, "linear_allow_neg_eigval": False})[1].beta_factor == 1
    with pytest.raises(ValueError, match="hidden_act is 'gelu'"):
        state_dict.read_layer(weights, "", {**config, "hidden_act": "gelu"})


def test_element_types(tensors):
    """bfloat16 is read, torch's integers are refused as numpy's."""
    torch, weights, name = optional("torch"), chosen(tensors, "fused", "fused", "one"), "out_proj.weight"
    out = torch.from_numpy(tensors[name])
    bf16 = tensors[name].astype(optional("ml_dtypes").bfloat16)
    for x in (out.bfloat16(), bf16):
        read = state_dict.read_layer({**weights, name: x}, "", CONFIG)[0]["out"]
        assert same_bits(read, bf16.astype(np.float32))
    with pytest.raises(TypeError, match=f"{name} must be float16, .* got int8"):
        state_dict.read_layer({**weights, name: out.to(torch.int8)}, "", CONFIG)


def test_a_transposed_weight_is_refused(tensors):
    name = "out_proj.weight"
    with pytest.raises(ValueError, match=rf"{name} has shape \({VALUE}, {N_EMBD}\), expected \({N_EMBD}, {VALUE}\)"):
        load({**tensors, name: tensors[name].T.copy()}, "fused", "fused", "one")


def test_a_rate_beyond_float32_forgets_everything(tensors):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = load({**tensors, "A_log": np.full(H_V, 100, np.float32)}, "fused", "fused", "one")
    assert (layer.A == -np.inf).all()


def test_the_closest_form_says_what_is_missing(tensors):
    weights = chosen(tensors, "apart", "apart", "three")
    for name in ("k_proj", "g_proj", "in_proj_a", "v_conv1d"):
        with pytest.raises(ValueError, match=f"weights lack .*{name}.weight.*, expected shape"):
            gdn.GatedDeltaNet.from_state_dict({n: w for n, w in weights.items() if n != f"{name}.weight"}, "", CONFIG)


def test_kimi_takes_no_other_gate():
    """And its gates may be of any rank."""
    with np.load(DATA / "kimi.npz") as data:
        weights = {name: data[name] for name in data.files if name.startswith("w.")}
    config = {"model_type": "kimi_linear", "hidden_size": 64, "linear_num_heads": 3, "linear_head_dim": 32,
              "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-5}
    zeros = np.zeros((6, 64), np.float32)
    for name in ("z", "ba", "ssm_ba"):
        with pytest.raises(ValueError, match=f"lora: unknown projection '{name}'"):
            gdn.KimiDeltaAttention.from_state_dict(weights, "w.", config, {name: [(zeros[:1], zeros[:, :1], 1)]})
    ranks = {f"w.{gate}{x}_proj.weight": np.ones(shape, np.float32) for gate, r in (("forget_gate.f_", 5), ("g_", 7))
             for x, shape in (("a", (r, 64)), ("b", (96, r)))}
    w, _ = state_dict.read_layer({**weights, **ranks}, "w.", config)
    assert w["f_a"].shape == (5, 64) and w["g_b"].shape == (96, 7)
    rng = np.random.default_rng(8)
    A, B = rng.standard_normal((2, 64), np.float32), rng.standard_normal((96, 2), np.float32)
    y, _ = run(gdn.KimiDeltaAttention.from_state_dict(weights, "w.", config, {"k_proj": [(A, B, 0.2)]}))
    weights["w.k_proj.weight"] = weights["w.k_proj.weight"] + (0.2 * B @ A).astype(np.float32)
    assert_close(y, run(gdn.KimiDeltaAttention.from_state_dict(weights, "w.", config))[0], "lora on k_proj", 2e-5)


def test_rows_of_every_form():
    c = gdn.LayerConfig(kind="gdn", n_embd=1, H_k=H_K, H_v=H_V, S_k=S_K, S_v=S_V, width=WIDTH, head_map="interleaved",
                        norm_eps=0, activation="silu")
    rows = weight_layouts.rows(c)
    weights = every_form(*random_rows(np.random.default_rng(0), 1))
    assert rows["qkvz"] == len(weights["in_proj_qkvz"]) and rows["qkv"] == len(weights["in_proj_qkv"])
    assert rows["ba"] == len(weights["in_proj_ba"])
