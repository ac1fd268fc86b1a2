"""transformers' own modules against files of their weights, stored by the rules of llama.cpp's converters (conversion/)."""

import numpy as np
import pytest
from gguf_tools import write
from helpers import assert_close
from transformers_layers import FAMILIES, FIXED, build, load, ours, theirs

import gdn

ARCHS = {"qwen3_next": "qwen3next", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe", "qwen4_exp": "qwen4exp",
         "kimi_linear": "kimi-linear", "glm5_next": "glm5-next", "bailing_hybrid": "bailingmoe3"}
KDA_NAMES = {"b_proj": "ssm_beta", "o_norm": "ssm_norm", "o_proj": "attn_output", "g_a_proj": "ssm_g_a", "g_b_proj": "ssm_g_b",
             "g_proj": "ssm_g_a", "forget_gate.f_a_proj": "ssm_f_a", "forget_gate.f_b_proj": "ssm_f_b",
             "forget_gate.f_proj": "ssm_f_a", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"}
GDN_NAMES = {"in_proj_qkvz": "ssm_in", "in_proj_ba": "ssm_ba", "in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate",
             "in_proj_b": "ssm_beta", "in_proj_a": "ssm_alpha", "norm": "ssm_norm", "out_proj": "ssm_out", "conv1d": "ssm_conv1d"}


def kda_file(family, w, c):
    tensors = {f"{new}.weight": w[f"{old}.weight"] for old, new in KDA_NAMES.items() if f"{old}.weight" in w}
    for x, conv in zip("qkv", np.split(w["conv1d.weight"], 3), strict=True):
        tensors[f"ssm_conv1d_{x}.weight"] = conv[None]
    A = np.exp(w["forget_gate.A_log"]).ravel()
    tensors |= {"ssm_a": A[:, None] if family == "bailing_hybrid" else -A, "ssm_dt.bias": w["forget_gate.dt_bias"]}
    meta = {"attention.head_count": len(A), "kda.head_dim": len(w["o_norm.weight"])}
    bound = getattr(c, "linear_lower_bound", None) if family == "glm5_next" else getattr(c, "kda_lower_bound", None)
    return meta | ({} if bound is None else {"kda.gate_lower_bound": float(bound)}), tensors


def gdn_file(family, w, c):
    tensors = {f"{new}.weight": w[f"{old}.weight"] for old, new in GDN_NAMES.items() if f"{old}.weight" in w}
    tensors["ssm_conv1d.weight"] = tensors["ssm_conv1d.weight"][:, 0]
    tensors |= {"ssm_a": -np.exp(w["A_log"]), "ssm_dt.bias": w["dt_bias"]}
    H_k, H_v, S_v = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_value_head_dim
    if family != "qwen3_next":                                  # value head h becomes head h % r * H_k + h // r
        heads = np.argsort([h % (H_v // H_k) * H_k + h // (H_v // H_k) for h in range(H_v)])
        values = (heads[:, None] * S_v + np.arange(S_v)).ravel()
        for name in ("ssm_a", "ssm_dt.bias", "ssm_beta.weight", "ssm_alpha.weight"):
            tensors[name] = tensors[name][heads]
        tensors["attn_gate.weight"] = tensors["attn_gate.weight"][values]
        tensors["ssm_out.weight"] = np.ascontiguousarray(tensors["ssm_out.weight"][:, values])
        for name in ("attn_qkv.weight", "ssm_conv1d.weight"):
            keys = len(tensors[name]) - len(values)
            tensors[name] = tensors[name][np.concatenate([np.arange(keys), keys + values])]
    return {"ssm.group_count": H_k, "ssm.time_step_rank": H_v, "ssm.state_size": c.linear_key_head_dim,
            "ssm.inner_size": H_v * S_v}, tensors


def convert(path, family, mixer, c):
    w = {name: x.numpy() for name, x in mixer.state_dict().items()}
    meta, tensors = (kda_file if FAMILIES[family][3] else gdn_file)(family, w, c)
    meta |= {"block_count": 2, "embedding_length": c.hidden_size, "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
             "ssm.conv_kernel": 4}
    return write(path, ARCHS[family], meta, tensors, il=0)


CASES = [*((family, {}) for family in ARCHS), ("glm5_next", {"linear_lower_bound": None}),
         ("bailing_hybrid", {"kda_lower_bound": -0.5}), ("qwen4_exp", {"linear_num_value_heads": 2})]


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], *case[1]]))
def both(request, tmp_path):
    """(family, the module, its configuration, the layer of its file)."""
    family, fields = request.param
    mixer, config = build(family, FIXED[family] | {"rms_norm_eps": 1e-6} | fields, 11)
    cls = gdn.KimiDeltaAttention if FAMILIES[family][3] else gdn.GatedDeltaNet
    path = convert(tmp_path / "x.gguf", family, mixer, config)
    return family, mixer, config, lambda **options: cls.from_gguf(path, 0, **options)


def test_the_layer_of_the_file_is_the_module(both):
    family, mixer, config, from_file = both
    x = np.random.default_rng(3).standard_normal((80, config.hidden_size)).astype(np.float32)
    assert_close(ours(from_file(), x, [70, 9, 1]), theirs(mixer, config, x, [79, 1]), family, 1e-5)


def test_adapters_in_the_checkpoints_order(both, rng):
    """The same pairs on the file's layer and on the state dict's, whose heads may lie in another order."""
    family, mixer, config, from_file = both
    layer = load(family, mixer, config)
    names = ("q", "v", "b", "out") if layer.config.kind == "kda" else ("qkv", "z", "b", "a", "out")
    shapes = gdn.weight_layouts.shapes(layer.config)
    lora = {name: [(rng.standard_normal((2, shapes[name][1]), np.float32) / 8,
                    rng.standard_normal((shapes[name][0], 2), np.float32), 0.5)] for name in names}
    x = rng.standard_normal((70, config.hidden_size), np.float32)
    expected = ours(load(family, mixer, config, lora=lora), x, [70])
    assert np.abs(expected - ours(layer, x, [70])).max() > 0.01
    assert_close(ours(from_file(lora=lora), x, [70]), expected, family, 1e-5)
