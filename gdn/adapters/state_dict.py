"""Weights and configurations under transformers' names, as plain layer weights and config."""

from dataclasses import replace

import numpy as np

from gdn import weight_layouts
from gdn.layer_config import LayerConfig

__all__ = ["read_layer"]

QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")

NAMES = {
    "qkvz": ("in_proj_qkvz.weight",), "qkv": ("in_proj_qkv.weight",), "z": ("in_proj_z.weight", "g_proj.weight"),
    "q": ("q_proj.weight",), "k": ("k_proj.weight",), "v": ("v_proj.weight",),
    "ba": ("in_proj_ba.weight",), "b": ("in_proj_b.weight", "b_proj.weight"),
    "a": ("in_proj_a.weight", "a_proj.weight"),
    "f_a": ("forget_gate.f_a_proj.weight", "f_a_proj.weight"),
    "f_b": ("forget_gate.f_b_proj.weight", "f_b_proj.weight"),
    "g_a": ("g_a_proj.weight",), "g_b": ("g_b_proj.weight",),
    "conv": ("conv1d.weight",), "conv_bias": ("conv1d.bias",),
    **{f"conv_{x}": (f"{x}_conv1d.weight",) for x in "qkv"},
    **{f"conv_bias_{x}": (f"{x}_conv1d.bias",) for x in "qkv"},
    "A_log": ("A_log", "forget_gate.A_log"), "dt_bias": ("dt_bias", "forget_gate.dt_bias"),
    "norm": ("norm.weight", "o_norm.weight"), "out": ("out_proj.weight", "o_proj.weight"),
}
CONV = ("conv",), weight_layouts.JOINED["conv"]
FORMS = {"gdn": ((("qkvz",), ("qkv", "z"), ("q", "k", "v", "z")), (("ba",), ("b", "a")), CONV),
         "kda": ((("qkv",), ("q", "k", "v")), CONV, (("b", "f_a", "f_b", "g_a", "g_b"),))}
OPTIONAL = ("conv_bias", *weight_layouts.JOINED["conv_bias"])


def read_layer(weights, prefix, config, overrides=None):
    """(weights, `gdn.LayerConfig`) for `gdn.GatedDeltaNet` or `gdn.KimiDeltaAttention`.

    weights   a mapping of names to arrays (numpy, torch, or anything numpy reads), or an open safetensors file
    prefix    what stands before the layer's names, such as "model.layers.1.linear_attn."
    config    a mapping or object with transformers' field names; model_type qwen3_next, qwen3_5(_moe)(_text),
              olmo_hybrid or kimi_linear.  A nested text_config is used if there is one
    overrides a mapping of the layer's config's fields that are to be other than the model's: {"lower_bound": -4.0}

    Projections may be fused or apart as `gdn.weight_layouts` says, whatever the model type.  Separate q, k, v convolutions and
    unprefixed gate names, as released checkpoints have them, are read too.
    ValueError: an unknown model type, a missing field, a tensor that is missing, mis-shaped or of no known use.
    TypeError: a tensor that is not floating point.
    """
    field = _Fields(config)
    model = field("model_type")
    if field("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"config: hidden_act {field('hidden_act')!r}, the convolution has silu only")
    if model in QWEN:
        layer = _linear_config(field)
    elif model == "olmo_hybrid":
        layer = _linear_config(field, norm_eps=1e-5,        # fixed in the model, whatever the config says
                               beta_factor=2.0 if field("linear_allow_neg_eigval", True) else 1.0)
    elif model == "kimi_linear":
        layer = _kimi_config(field)
    else:
        raise ValueError(f"config: unknown model_type {model!r}, expected one of "
                         f"{', '.join((*QWEN, 'olmo_hybrid', 'kimi_linear'))}")
    source = _Source(weights, prefix)
    if layer.kind == "kda":
        layer = replace(layer, f_rank=source.length("f_a", layer.S_v), g_rank=source.length("g_a", layer.S_v))
    layer = layer.override(overrides)
    w = _read(source, layer)
    return w, replace(layer, projections=source.projections())


def _linear_config(field, **forms):
    return _layer_config("gdn", field, field("linear_num_key_heads"), field("linear_num_value_heads"),
                         field("linear_key_head_dim"), field("linear_value_head_dim"),
                         field("linear_conv_kernel_dim"), "silu", **forms)


def _kimi_config(field):
    released = _Fields(field("linear_attn_config", None) or {})
    heads = released("num_heads", None) or field("linear_num_heads")
    size = released("head_dim", None) or field("linear_head_dim")
    width = released("short_conv_kernel_size", None) or field("linear_conv_kernel_dim")
    bound = released("gate_lower_bound", field("gate_lower_bound", None))
    return _layer_config("kda", field, heads, heads, size, size, width, "sigmoid",
                         gate="softplus" if bound is None else "bounded", lower_bound=bound)


def _layer_config(kind, field, H_k, H_v, S_k, S_v, width, activation, **forms):
    family = "qwen3_5" if field("model_type").startswith("qwen3_5") else field("model_type")
    return LayerConfig(**{"kind": kind, "n_embd": field("hidden_size"), "H_k": H_k, "H_v": H_v, "S_k": S_k, "S_v": S_v,
                          "width": width, "head_map": "interleaved", "norm_eps": field("rms_norm_eps"),
                          "activation": activation, "family": family} | forms)


# ---- tensors ---------------------------------------------------------------------------------------------------------

def _read(source, c):
    shapes = weight_layouts.shapes(c)
    slots = [slot for choice in FORMS[c.kind] for slot in max(choice, key=source.share)]
    slots += ["dt_bias", "norm", "out", *(slot for slot in OPTIONAL if source.find(slot))]
    w = {slot: source(slot, shapes[slot]) for slot in slots}
    with np.errstate(over="ignore"):                    # -inf: a head that forgets everything
        w["A"] = -np.exp(source("A_log", shapes["A"]))
    source.refuse_unused()
    return weight_layouts.flat(w, c)


class _Source:
    """A layer's tensors by what they are for, as float32 arrays, their extents checked up to axes of one."""

    def __init__(self, weights, prefix):
        self.weights, self.prefix = weights, prefix
        if not callable(getattr(weights, "keys", None)):
            raise TypeError(f"weights must map names to tensors, got {type(weights).__name__}")
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a string, got {prefix!r}")
        self.names = {name for name in weights.keys() if name.startswith(prefix)}
        self.used = {}

    def find(self, slot):
        return next((self.prefix + name for name in NAMES[slot] if self.prefix + name in self.names), None)

    def share(self, slots):
        """How much of a form is there: of none that is whole, the closest says best what is missing."""
        return sum(self.find(slot) is not None for slot in slots) / len(slots)

    def tensor(self, name):
        get = self.weights.get_tensor if hasattr(self.weights, "get_tensor") else self.weights.__getitem__
        x = get(name)
        return x if hasattr(x, "shape") else np.asarray(x)

    def length(self, slot, default):
        name = self.find(slot)
        return default if name is None or not self.tensor(name).shape else int(self.tensor(name).shape[0])

    def __call__(self, slot, shape):
        name = self.find(slot)
        if name is None:
            names = " or ".join(self.prefix + known for known in NAMES[slot])
            raise ValueError(f"weights lack {names}, expected shape {shape}")
        x = self.tensor(name)
        have = tuple(int(n) for n in x.shape)
        if [n for n in have if n != 1] != [n for n in shape if n != 1]:
            raise ValueError(f"weights: {name} has shape {have}, expected {shape}")
        self.used[slot] = name
        return _float32(x, name).reshape(shape)

    def refuse_unused(self):
        """A bias or a scale that is read by nobody would make another model of it."""
        unused = sorted(self.names - set(self.used.values()))
        if unused:
            raise ValueError(f"weights: {', '.join(unused)} of no known use in this layer")

    def projections(self):
        """{name under which a projection came: its name in `gdn.weight_layouts`}, for LoRA."""
        return {name.removeprefix(self.prefix).removesuffix(".weight"): slot for slot, name in self.used.items()
                if name.endswith("proj.weight") or "in_proj" in name}


def _float32(x, name):
    if hasattr(x, "detach"):                            # torch, whose bfloat16 numpy does not read
        if not x.is_floating_point():
            raise TypeError(f"weights: {name} must be floating point, got {x.dtype}")
        x = x.detach().float().cpu().numpy()
    if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
        raise TypeError(f"weights: {name} must be floating point, got {x.dtype}")
    return np.asarray(x, np.float32)


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
