"""Whole tiny models of every architecture with linear attention, random weights, as llama.cpp loads and runs them.

    meta, tensors = model("kimi-k3", rng, bound=-5.0)
    write(path, "kimi-k3", meta, tensors)

Four blocks each, the last of full attention.  What a block's tensors mean and which keys are needed is llama.cpp's
loader's matter: its class of each architecture (src/models) is what these follow.
"""

import numpy as np
from gguf import GGUFWriter

N_VOCAB, E, N_BLOCKS, FF = 96, 64, 4, 48
GDN_ARCHS = ("qwen3next", "qwen35", "qwen35moe", "qwen4exp", "clef")
KDA_ARCHS = ("kimi-linear", "glm5-next", "bailingmoe3", "kimi-k3")
HC = {"qwen4exp": 2, "glm5-next": 4}          # residual streams
KV_LORA, NOPE, V_HEAD = 16, 16, 16            # multi-head latent attention of the KDA families


class Tensors(dict):
    """Random tensors by name, their shapes in numpy's order: rows first."""

    def __init__(self, rng):
        super().__init__()
        self.rng = rng

    def add(self, name, *shape, scale=None):
        scale = shape[-1] ** -0.5 if scale is None else scale
        self[name] = (self.rng.standard_normal(shape) * scale).astype(np.float32)

    def norm(self, name, *shape):
        self[name] = (1 + 0.2 * self.rng.standard_normal(shape)).astype(np.float32)


def write(path, arch, meta, tensors, types=None, **split):
    """A GGUF file of a whole model; keys without the architecture's prefix.  types: {name: (qtype, uint8 data)}.

    ``split`` as of GGUFWriter: split_max_tensors=20 makes parts, path-00001-of-0000N.gguf, without .gguf in between.
    """
    writer = GGUFWriter(path, arch, **split)
    for key, value in {"tokenizer.ggml.model": "none", **meta}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
               list: writer.add_array}
        add[type(value)](key if key.startswith("tokenizer.") else f"{arch}.{key}", value)
    for name, data in tensors.items():
        qtype, data = (types or {}).get(name, (None, data))
        writer.add_tensor(name, data, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model(arch, rng, *, H_k=2, H_v=4, S=32, width=4, eps=1e-6, bound=None, fused=False):
    """(metadata, tensors); KDA architectures have H_v heads.  fused: attn_qkv (kimi-linear), ssm_in (qwen3next)."""
    t = Tensors(rng)
    meta = {"vocab_size": N_VOCAB, "block_count": N_BLOCKS, "context_length": 512, "embedding_length": E,
            "feed_forward_length": FF, "attention.layer_norm_rms_epsilon": eps, "ssm.conv_kernel": width,
            "rope.freq_base": 10000.0}
    t.add("token_embd.weight", N_VOCAB, E, scale=1.0)
    t.add("output.weight", N_VOCAB, E)
    if arch != "qwen4exp":
        t.norm("output_norm.weight", E)
    kda = arch in KDA_ARCHS
    meta |= _kda_meta(arch, H_v, S, bound) if kda else _gdn_meta(arch, H_k, H_v, S)
    for il in range(N_BLOCKS):
        linear = il < N_BLOCKS - 1
        _norms(t, arch, il)
        if kda:
            (_kda if linear else _latent_attention)(t, arch, il, H_v, S, width, fused)
        elif linear:
            _gdn(t, arch, il, H_k, H_v, S, width, fused)
        else:
            _attention(t, arch, il)
        _ffn(t, arch, il)
    _head(t, arch, meta)
    return meta, dict(t)


# ---- linear attention ------------------------------------------------------------------------------------------------

def _gdn(t, arch, il, H_k, H_v, S, width, fused):
    b, key, value = f"blk.{il}.", H_k * S, H_v * S
    if fused:
        t.add(b + "ssm_in.weight", 2 * key + 2 * value, E)
    else:
        t.add(b + "attn_qkv.weight", 2 * key + value, E)
        t.add(b + "attn_gate.weight", value, E)
    if arch == "qwen3next":
        t.add(b + "ssm_ba.weight", 2 * H_v, E)
    else:
        t.add(b + "ssm_beta.weight", H_v, E)
        t.add(b + "ssm_alpha.weight", H_v, E)
    t.add(b + "ssm_conv1d.weight", 2 * key + value, width)
    t[b + "ssm_a"] = -np.exp(t.rng.standard_normal(H_v)).astype(np.float32)
    t.add(b + "ssm_dt.bias", H_v, scale=1.0)
    t.norm(b + "ssm_norm.weight", S)
    t.add(b + "ssm_out.weight", E, value)


def _kda(t, arch, il, H, S, width, fused):
    b, inner = f"blk.{il}.", H * S
    if fused:
        t.add(b + "attn_qkv.weight", 3 * inner, E)
    for x in "qkv":
        if not fused:
            t.add(f"{b}attn_{x}.weight", inner, E)
        t.add(f"{b}ssm_conv1d_{x}.weight", inner, 1, width)
    t.add(b + "ssm_beta.weight", H, E)
    A = np.exp(t.rng.standard_normal(H)).astype(np.float32)
    t[b + "ssm_a"] = {"kimi-linear": -A[:, None], "bailingmoe3": A[:, None]}.get(arch, -A)
    t.add(b + "ssm_dt.bias", inner, scale=1.0)
    t.norm(b + "ssm_norm.weight", S)
    t.add(b + "attn_output.weight", E, inner)
    for gate in "fg":
        if arch == "bailingmoe3":
            t.add(f"{b}ssm_{gate}_a.weight", inner, E)
        elif arch == "kimi-k3" and gate == "g":
            t.add(b + "ssm_g.weight", inner, E)
        else:
            t.add(f"{b}ssm_{gate}_a.weight", S, E)
            t.add(f"{b}ssm_{gate}_b.weight", inner, S)


# ---- what stands around it -------------------------------------------------------------------------------------------

def _gdn_meta(arch, H_k, H_v, S):
    meta = {"attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 32,
            "attention.value_length": 32, "rope.dimension_count": 16, "rope.dimension_sections": [4, 2, 2, 0],
            "ssm.state_size": S, "ssm.group_count": H_k, "ssm.time_step_rank": H_v, "ssm.inner_size": H_v * S,
            "full_attention_interval": N_BLOCKS}
    if arch in ("qwen3next", "qwen35moe", "qwen4exp"):
        meta |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16,
                 "expert_shared_feed_forward_length": 16}
    if arch == "qwen4exp":
        meta |= {"hyper_connection.count": HC[arch], "hyper_connection.low_rank": 8, "attention.indexer.head_count": 2,
                 "attention.indexer.key_length": 32, "attention.indexer.top_k": 8}
    if arch == "clef":
        meta |= {"decision.routing_block_count": 1, "decision.block_count": 1, "decision.head_count": 2,
                 "attention.layer_norm_epsilon": 1e-5}
    return meta


def _rope(arch):
    return 0 if arch == "glm5-next" else 8


def _kda_meta(arch, H, S, bound):
    rope = _rope(arch)
    meta = {"attention.head_count": H, "attention.head_count_kv": [0] * (N_BLOCKS - 1) + [1],
            "attention.key_length": KV_LORA + rope, "attention.value_length": KV_LORA,
            "attention.key_length_mla": NOPE + rope, "attention.value_length_mla": V_HEAD,
            "attention.kv_lora_rank": KV_LORA, "rope.dimension_count": rope, "kda.head_dim": S,
            "leading_dense_block_count": N_BLOCKS, "expert_feed_forward_length": 16, "expert_shared_count": 1,
            "expert_gating_func": 2}
    if bound is not None:
        meta["kda.gate_lower_bound"] = bound
    if arch == "bailingmoe3":
        meta["kda.safe_gate"] = True
    if arch == "kimi-k3":
        meta |= {"attn_res.block_size": 2, "activation.situ_beta": 4.0, "activation.situ_linear_beta": 8.0}
    if arch == "glm5-next":
        meta |= {"attention.q_lora_rank": 16, "attention.indexer.head_count": 32, "attention.indexer.key_length": 64,
                 "attention.indexer.top_k": 8, "attention.indexer.kpool": 4, "hyper_connection.count": HC[arch],
                 "hyper_connection.sinkhorn_iterations": 4, "hyper_connection.epsilon": 1e-6}
    return meta


def _norms(t, arch, il):
    b = f"blk.{il}."
    if arch == "qwen4exp":
        hc = HC[arch]
        for part in ("attn", "ffn"):
            t.norm(f"{b}hc_{part}_norm.weight", hc * E)
            t.add(f"{b}hc_{part}_down.weight", 8, hc * E)
            t.add(f"{b}hc_{part}_up.weight", hc * E, 8)
            t.add(f"{b}hc_{part}_inject.weight", hc, hc * E)
        return
    t.norm(b + "attn_norm.weight", E)
    t.norm(b + ("ffn_norm.weight" if arch in KDA_ARCHS else "post_attention_norm.weight"), E)
    if arch == "glm5-next":
        hc = HC[arch]
        for part in ("attn", "ffn"):
            t.add(f"{b}hc_{part}_fn.weight", (2 + hc) * hc, hc * E)
            t.add(f"{b}hc_{part}_base.weight", (2 + hc) * hc, scale=0.5)
            t.add(f"{b}hc_{part}_scale.weight", 3, scale=0.5)
    if arch == "kimi-k3":
        t.add(b + "attn_res_score.weight", E, scale=0.2)
        t.add(b + "ffn_res_score.weight", E, scale=0.2)


def _attention(t, arch, il):
    b = f"blk.{il}."
    for name, rows in (("attn_q", 2 * 2 * 32), ("attn_k", 32), ("attn_v", 32)):
        t.add(f"{b}{name}.weight", rows, E)
    t.add(b + "attn_output.weight", E, 2 * 32)
    for x in "qk":
        t.norm(f"{b}attn_{x}_norm.weight", 32)
        if arch == "qwen4exp":
            t.add(f"{b}indexer.{x}_proj.weight", {"q": 2 * 32, "k": 32}[x], E)
            t.norm(f"{b}indexer.{x}_norm.weight", 32)


def _latent_attention(t, arch, il, H, *_):
    b, rope = f"blk.{il}.", _rope(arch)
    if arch == "glm5-next":
        t.add(b + "attn_q_a.weight", 16, E)
        t.norm(b + "attn_q_a_norm.weight", 16)
        t.add(b + "attn_q_b.weight", H * (NOPE + rope), 16)
        for name, shape in (("indexer.proj", (32, E)), ("indexer.attn_k", (64, E)), ("indexer.attn_q_b", (32 * 64, 16)),
                            ("indexer_compressor_gate", (64, E)), ("indexer_compressor_ape", (4, 64)),
                            ("indexer.k_norm", (64,))):
            t.add(f"{b}{name}.weight", *shape)
        t.add(b + "indexer.k_norm.bias", 64)
    else:
        t.add(b + "attn_q.weight", H * (NOPE + rope), E)
    t.add(b + "attn_kv_a_mqa.weight", KV_LORA + rope, E)
    t.norm(b + "attn_kv_a_norm.weight", KV_LORA)
    t.add(b + "attn_k_b.weight", H, KV_LORA, NOPE)
    t.add(b + "attn_v_b.weight", H, V_HEAD, KV_LORA)
    t.add(b + "attn_output.weight", E, H * V_HEAD)
    if arch in ("bailingmoe3", "kimi-k3"):
        t.add(b + "attn_gate.weight", H if arch == "bailingmoe3" else H * V_HEAD, E)


def _ffn(t, arch, il):
    b = f"blk.{il}."
    if arch not in ("qwen3next", "qwen35moe", "qwen4exp"):
        for name, shape in (("gate", (FF, E)), ("up", (FF, E)), ("down", (E, FF))):
            t.add(f"{b}ffn_{name}.weight", *shape)
        return
    t.add(b + "ffn_gate_inp.weight", 4, E)
    t.add(b + "ffn_gate_inp_shexp.weight", E)
    for name, shape in (("gate", (16, E)), ("up", (16, E)), ("down", (E, 16))):
        t.add(f"{b}ffn_{name}_exps.weight", 4, *shape)
        t.add(f"{b}ffn_{name}_shexp.weight", *shape)


def _head(t, arch, meta):
    if arch == "kimi-k3":
        t.add("output_res_score.weight", E, scale=0.2)
    if arch == "qwen4exp":
        t.norm("output_hc_norm.weight", HC[arch] * E)
        t.add("output_hc_down.weight", 8, HC[arch] * E)
        t.add("output_hc_up.weight", HC[arch] * E, 8)
    if arch == "clef":
        _decision_head(t, 32)


def _decision_head(t, n):
    def pair(name, *shape):
        t.add(f"{name}.weight", *shape)
        t.add(f"{name}.bias", shape[0])

    for il, parts in enumerate((("cross_attn_norm_kv",), ("attn_norm",))):
        for name in (*parts, "cross_attn_norm", "ffn_norm"):
            pair(f"dec.blk.{il}.{name}", n)
        for part in ("cross_attn", "attn")[:il + 1]:
            for x in "qkvo":
                pair(f"dec.blk.{il}.{part}_{x}", n, n)
        pair(f"dec.blk.{il}.ffn_up", 24, n)
        pair(f"dec.blk.{il}.ffn_down", n, 24)
    pair("decision.hidden_norm", E)
    for name in ("option_summary_norm", "field_norm", "option_norm"):
        pair(f"decision.{name}", n)
    for name in ("memory", "question", "option_question", "global", "option_context", "option_lexical"):
        t.add(f"decision.proj_{name}.weight", n, E)
    t.add("decision.scales", 3)
    t.add("token_types.weight", 3, n)
    pair("decision.scorer", n, 4 * n)
    pair("decision.scorer_out", 1, n)
