"""Weights and configurations under transformers' names, as plain layer weights and config."""

import numpy as np

__all__ = ["read_layer"]

QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


def read_layer(weights, prefix, config):
    """(weights, config) for `gdn.GatedDeltaNet` or `gdn.KimiDeltaAttention`.

    weights   a mapping of names to arrays (numpy, torch, or anything numpy reads), or an open safetensors file
    prefix    what stands before the layer's names, such as "model.layers.1.linear_attn."
    config    a mapping or object with transformers' field names; model_type qwen3_next, qwen3_5(_moe)(_text),
              olmo_hybrid or kimi_linear.  A nested text_config is used if there is one.

    Separate q, k, v convolutions and unprefixed gate names, as released checkpoints have them, are read too.
    ValueError: an unknown model type, a missing field, or a tensor that is missing or mis-shaped.
    """
    field = _Fields(config)
    source = _Source(weights, prefix)
    model = field("model_type")
    if field("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"config: hidden_act {field('hidden_act')!r}, the convolution has silu only")
    if model in QWEN:
        layer, read = _linear_config(field), (_fused if _is_fused(source) else _qwen35)
    elif model == "olmo_hybrid":
        layer, read = _linear_config(field), _olmo
        layer["norm_eps"] = 1e-5                        # fixed in the model, whatever the config says
        layer["beta_factor"] = 2.0 if field("linear_allow_neg_eigval", True) else 1.0
    elif model == "kimi_linear":
        layer, read = _kimi_config(field), _kimi
    else:
        raise ValueError(f"config: unknown model_type {model!r}, expected one of "
                         f"{', '.join((*QWEN, 'olmo_hybrid', 'kimi_linear'))}")
    return read(source, layer), layer


def _linear_config(field):
    return _layer_config("gdn", field, field("linear_num_key_heads"), field("linear_num_value_heads"),
                         field("linear_key_head_dim"), field("linear_value_head_dim"),
                         field("linear_conv_kernel_dim"), "silu")


def _kimi_config(field):
    released = _Fields(field("linear_attn_config", None) or {})
    heads = released("num_heads", None) or field("linear_num_heads")
    size = released("head_dim", None) or field("linear_head_dim")
    width = released("short_conv_kernel_size", None) or field("linear_conv_kernel_dim")
    layer = _layer_config("kda", field, heads, heads, size, size, width, "sigmoid")
    layer["lower_bound"] = released("gate_lower_bound", None) or field("gate_lower_bound", None)
    return layer


def _layer_config(kind, field, H_k, H_v, S_k, S_v, width, activation):
    return {"kind": kind, "n_embd": field("hidden_size"), "H_k": H_k, "H_v": H_v, "S_k": S_k, "S_v": S_v,
            "width": width, "head_map": "interleaved", "norm_eps": field("rms_norm_eps"), "l2_eps": 1e-6,
            "l2_form": "sum", "beta_factor": 1.0, "activation": activation, "lower_bound": None}


# ---- the families ----------------------------------------------------------------------------------------------------

def _is_fused(source):
    return "in_proj_qkvz.weight" in source


def _fused(source, c):
    """Qwen3-Next: rows grouped per key head, qkvz = q | k | v of r heads | z of r heads, ba = b of r | a of r."""
    key, value, r = c["S_k"], c["H_v"] // c["H_k"] * c["S_v"], c["H_v"] // c["H_k"]
    qkvz = source("in_proj_qkvz.weight", c["H_k"] * (2 * key + 2 * value), c["n_embd"])
    q, k, v, z = _ungroup(qkvz, c["H_k"], (key, key, value, value))
    b, a = _ungroup(source("in_proj_ba.weight", 2 * c["H_v"], c["n_embd"]), c["H_k"], (r, r))
    return {"qkv": np.concatenate([q, k, v]), "z": z, "b": b, "a": a, **_common(source, c), **_scalar_gate(source, c)}


def _ungroup(rows, n_groups, sizes):
    grouped = rows.reshape(n_groups, sum(sizes), -1)
    return [part.reshape(-1, rows.shape[1]) for part in np.split(grouped, np.cumsum(sizes)[:-1], axis=1)]


def _qwen35(source, c):
    C, value = _channels(c)
    return {"qkv": source("in_proj_qkv.weight", C, c["n_embd"]), "z": source("in_proj_z.weight", value, c["n_embd"]),
            "b": source("in_proj_b.weight", c["H_v"], c["n_embd"]),
            "a": source("in_proj_a.weight", c["H_v"], c["n_embd"]), **_common(source, c), **_scalar_gate(source, c)}


def _olmo(source, c):
    return {"qkv": _separate(source, c), "z": source("g_proj.weight", c["H_v"] * c["S_v"], c["n_embd"]),
            "b": source("b_proj.weight", c["H_v"], c["n_embd"]), "a": source("a_proj.weight", c["H_v"], c["n_embd"]),
            **_common(source, c, "o_norm", "o_proj"), **_scalar_gate(source, c)}


def _kimi(source, c):
    gate = "forget_gate." if "forget_gate.A_log" in source else ""
    n_key, rank = c["H_v"] * c["S_k"], c["S_k"]
    return {"qkv": _separate(source, c), "b": source("b_proj.weight", c["H_v"], c["n_embd"]),
            "f_a": source(gate + "f_a_proj.weight", rank, c["n_embd"]),
            "f_b": source(gate + "f_b_proj.weight", n_key, rank),
            "g_a": source("g_a_proj.weight", rank, c["n_embd"]),
            "g_b": source("g_b_proj.weight", c["H_v"] * c["S_v"], rank),
            **_common(source, c, "o_norm", "o_proj"), **_scalar_gate(source, c, gate, n_key)}


def _channels(c):
    return 2 * c["H_k"] * c["S_k"] + c["H_v"] * c["S_v"], c["H_v"] * c["S_v"]


def _sizes(c):
    return {"q": c["H_k"] * c["S_k"], "k": c["H_k"] * c["S_k"], "v": c["H_v"] * c["S_v"]}


def _separate(source, c):
    return np.concatenate([source(f"{x}_proj.weight", n, c["n_embd"]) for x, n in _sizes(c).items()])


def _common(source, c, norm="norm", out="out_proj"):
    C, value = _channels(c)
    weights = {"norm": source(f"{norm}.weight", c["S_v"]), "out": source(f"{out}.weight", c["n_embd"], value)}
    if "conv1d.weight" in source or "q_conv1d.weight" not in source:
        weights["conv"] = source("conv1d.weight", C, 1, c["width"])
    else:
        weights["conv"] = np.concatenate([source(f"{x}_conv1d.weight", n, 1, c["width"])
                                          for x, n in _sizes(c).items()])
    if "conv1d.bias" in source:
        weights["conv_bias"] = source("conv1d.bias", C)
    elif "q_conv1d.bias" in source:
        weights["conv_bias"] = np.concatenate([source(f"{x}_conv1d.bias", n) for x, n in _sizes(c).items()])
    weights["conv"] = weights["conv"].reshape(C, c["width"])
    return weights


def _scalar_gate(source, c, gate="", n_bias=None):
    A_log = source(gate + "A_log", c["H_v"])
    return {"A": -np.exp(A_log), "dt_bias": source(gate + "dt_bias", n_bias or c["H_v"])}


# ---- access ----------------------------------------------------------------------------------------------------------

class _Fields:
    """Fields of a mapping or an object."""

    def __init__(self, config):
        if not isinstance(config, dict) and hasattr(config, "keys"):
            config = dict(config)
        self.config = config
        nested = self("text_config", None)
        if nested is not None:
            self.config = nested

    def __call__(self, name, *default):
        value = self.config.get(name) if isinstance(self.config, dict) else getattr(self.config, name, None)
        if value is not None:
            return value
        if default:
            return default[0]
        raise ValueError(f"config lacks {name}")


class _Source:
    """Tensors as float32 arrays, their extents checked up to axes of one."""

    def __init__(self, weights, prefix):
        self.weights, self.prefix = weights, prefix
        self.names = set(weights.keys())

    def __contains__(self, name):
        return self.prefix + name in self.names

    def __call__(self, name, *shape):
        name = self.prefix + name
        if name not in self.names:
            raise ValueError(f"weights lack {name}, expected shape {shape}")
        get = self.weights.get_tensor if hasattr(self.weights, "get_tensor") else self.weights.__getitem__
        x = get(name)
        if hasattr(x, "detach"):                        # torch, whose bfloat16 numpy does not read
            x = x.detach().float().cpu().numpy()
        x = np.asarray(x, np.float32)
        if [n for n in x.shape if n != 1] != [n for n in shape if n != 1]:
            raise ValueError(f"weights: {name} has shape {x.shape}, expected {shape}")
        return x.reshape(shape)
