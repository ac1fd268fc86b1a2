"""Weights and configurations under transformers' names, as plain layer weights and config."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gdn import weight_layouts
from gdn.adapters.fields import SILU, Fields, refuse_unread
from gdn.layer_config import FLOAT32_MAX, LayerConfig

__all__ = ["read_layer"]

NAMES = {
    "qkvz": ("in_proj_qkvz",), "qkv": ("in_proj_qkv",), "z": ("in_proj_z", "g_proj"), "qkvzba": ("in_proj",),
    "q": ("q_proj",), "k": ("k_proj",), "v": ("v_proj",),
    "ba": ("in_proj_ba",), "b": ("in_proj_b", "b_proj"), "a": ("in_proj_a", "a_proj", "forget_gate.f_proj", "f_proj"),
    "f_a": ("forget_gate.f_a_proj", "f_a_proj"), "f_b": ("forget_gate.f_b_proj", "f_b_proj"),
    "g_a": ("g_a_proj",), "g_b": ("g_b_proj",), "out": ("out_proj", "o_proj", "dense"),
}
PARAMETERS = {
    **{slot: tuple(f"{name}.weight" for name in names) for slot, names in NAMES.items()},
    "conv": ("conv1d.weight",), "conv_bias": ("conv1d.bias",),
    **{f"conv_{x}": (f"{x}_conv1d.weight",) for x in "qkv"},
    **{f"conv_bias_{x}": (f"{x}_conv1d.bias",) for x in "qkv"},
    "A_log": ("A_log", "forget_gate.A_log"), "dt_bias": ("dt_bias", "forget_gate.dt_bias"),
    "norm": ("norm.weight", "o_norm.weight", "out_norm.weight"),
}
F, G, CONV = (("f_a", "f_b"), ("a",)), (("g_a", "g_b"), ("z",)), (("conv",), weight_layouts.JOINED["conv"])
FORMS = {"gdn": ((("qkvz",), ("qkv", "z"), ("q", "k", "v", "z")), (("ba",), ("b", "a")), CONV),
         "fused": ((("qkvzba",),), CONV),
         "kda": ((("qkv",), ("q", "k", "v")), CONV, (("b",),), F, G)}
OPTIONAL = ("conv_bias", *weight_layouts.JOINED["conv_bias"])
FLOATS = ("float16", "bfloat16", "float32", "float64")


def read_layer(weights: Any, prefix: str, config: Any,
               overrides: Mapping[str, Any] | None = None) -> tuple[dict[str, NDArray[np.float32]], LayerConfig]:
    """(weights, `gdn.LayerConfig`) for `gdn.GatedDeltaNet` or `gdn.KimiDeltaAttention`.

    weights   a mapping of names to arrays (numpy, torch, or anything numpy reads), or an open safetensors file
    prefix    what stands before the layer's names, such as "model.layers.1.linear_attn."
    config    a mapping or object with transformers' field names; model_type is one of `FAMILIES`.  A nested text_config
              is used if there is one.  Fields are read as transformers' own class of the family reads them
    overrides a mapping of fields of the result that are to be other than the model's: {"gate": "bounded",
              "lower_bound": -5.0}

    Projections may be fused or apart as `gdn.weight_layouts` says, whatever the model type.  Separate q, k, v convolutions and
    unprefixed gate names, as released checkpoints have them, are read too.
    ValueError: an unknown model type, a missing field, a field that the family's class does not read and that would
    mean another layer, a tensor that is missing, mis-shaped, beyond float32's range or of no known use.
    TypeError: a tensor that is not float16, bfloat16, float32 or float64.
    """
    outer = Fields(config)
    field = outer.inner("text_config") or outer
    linear = field.inner("linear_attn_config") or Fields({})
    model = field("model_type")
    if model not in FAMILIES:
        raise ValueError(f"config: unknown model_type {model!r}, expected one of {', '.join(FAMILIES)}")
    if field("hidden_act", "silu") not in SILU:
        raise ValueError(f"config: hidden_act is {field('hidden_act')!r}, the convolution has silu only")
    family, read = FAMILIES[model]
    made = not field.is_mapping and "linear_num_heads" in field         # from linear_attn_config, when it was made
    source = _Source(weights, prefix)
    layer = LayerConfig(**{"n_embd": field("hidden_size"), "head_map": "interleaved", "norm_eps": field("rms_norm_eps"),
                           "family": family, **read(field, Fields({}) if made else linear)})
    slots = _slots(source, layer)
    layer = replace(layer, **{f"{x}_rank": source.length(f"{x}_a", layer.S_v) for x in "fg" if f"{x}_a" in slots})
    layer = layer.override(overrides)
    refuse_unread([outer, field, linear], layer, overrides)
    _check_heads(source, layer, field)
    w = _read(source, slots, layer)
    return w, replace(layer, projections=source.projections())


# ---- configurations --------------------------------------------------------------------------------------------------

def _gdn(field, linear):
    return {"kind": "gdn", "H_k": field("linear_num_key_heads"), "H_v": field("linear_num_value_heads"),
            "S_k": field("linear_key_head_dim"), "S_v": field("linear_value_head_dim"),
            "width": field("linear_conv_kernel_dim"), "activation": "silu"}


def _qwen4_exp(field, linear):
    said = field("output_gate_type", "silu")               # hidden_act where it is absent, which is that
    if said not in (*SILU, "sigmoid"):
        raise ValueError(f"config: output_gate_type is {said!r}, expected silu or sigmoid")
    return _gdn(field, linear) | {"activation": "sigmoid" if said == "sigmoid" else "silu"}


def _olmo_hybrid(field, linear):
    return _gdn(field, linear) | {"norm_eps": 1e-5,          # fixed in the model, whatever the config says
                                  "beta_factor": 2.0 if field("linear_allow_neg_eigval", True) else 1.0}


def _kda(heads, size, width, bound):
    return {"kind": "kda", "H_k": heads, "H_v": heads, "S_k": size, "S_v": size, "width": width, "activation": "sigmoid",
            "gate": "softplus" if bound is None else "bounded", "lower_bound": bound}


def _extents(field, linear):
    return (linear("num_heads", None) or field("linear_num_heads"), linear("head_dim", None) or field("linear_head_dim"),
            linear("short_conv_kernel_size", None) or field("linear_conv_kernel_dim"))


def _kimi_linear(field, linear):
    return _kda(*_extents(field, linear), None)


def _glm5_next(field, linear):
    bound = field.get("linear_lower_bound") if "linear_lower_bound" in field else -5.0
    bound = linear.get("gate_lower_bound") if "gate_lower_bound" in linear else bound
    if bound is None and linear.names() and linear("safe_gate", True):
        bound = -5.0
    return _kda(*_extents(field, linear), bound)


def _bailing_hybrid(field, linear):
    # A configuration object's head_dim is the rotary part's, a checkpoint's is these layers'.
    heads = field("linear_num_heads", None) or field("num_attention_heads")
    size = field("linear_head_dim", None) or field("head_dim")
    width = field("linear_conv_kernel_dim", None) or field("short_conv_kernel_size")
    bound = field("kda_lower_bound", -5.0)
    return _kda(heads, size, width, bound if field("kda_safe_gate", True) else None)


FAMILIES = {"qwen3_next": ("qwen3_next", _gdn), "lara_mini": ("lara_mini", _gdn),
            **{model: ("qwen3_5", _gdn) for model in ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")},
            "qwen4_exp": ("qwen4_exp", _qwen4_exp), "qwen4_exp_text": ("qwen4_exp", _qwen4_exp),
            "olmo_hybrid": ("olmo_hybrid", _olmo_hybrid), "kimi_linear": ("kimi_linear", _kimi_linear),
            "glm5_next": ("glm5_next", _glm5_next), "glm5_next_text": ("glm5_next", _glm5_next),
            "bailing_hybrid": ("bailing_hybrid", _bailing_hybrid)}


# ---- tensors ---------------------------------------------------------------------------------------------------------

def _slots(source, c):
    """The weights of the layer's inputs in the form that most of the tensors have."""
    forms = FORMS["fused" if c.kind == "gdn" and source.find("qkvzba") else c.kind]
    return [slot for choice in forms for slot in max(choice, key=source.share)]


def _check_heads(source, c, field):
    """Head counts and sizes against the tensors that say them alone, for an error that names both."""
    for slot, count, what in (("b", c.H_v, "H_v"), ("ba", 2 * c.H_v, "2 H_v"), ("norm", c.S_v, "S_v"),
                              *((("dt_bias", c.H_v, "H_v"),) if c.kind == "gdn" else ())):
        n = source.length(slot, count)
        if n != count:
            rotary = ("; head_dim may be the rotary part's: give linear_head_dim" if slot == "norm"
                      and c.family == "bailing_hybrid" and "linear_head_dim" not in field else "")
            raise ValueError(f"weights: {source.find(slot)} has shape {tuple(source.tensor(source.find(slot)).shape)}, expected "
                             f"{count}: {what} of the config{rotary}")


def _read(source, slots, c):
    shapes = weight_layouts.shapes(c)
    slots = [*slots, "dt_bias", "norm", "out", *(slot for slot in OPTIONAL if source.find(slot))]
    w = {slot: source(slot, shapes[slot]) for slot in slots}
    w["A"] = _A(source, c)
    source.refuse_unused()
    return weight_layouts.flat(w, c)


def _A(source, c):
    """-exp(A_log); of a KDA layer, A_log may be padded beyond the heads, and absent (0) where the gate is bounded."""
    if c.gate == "bounded" and not source.find("A_log"):
        return np.full(c.H_v, -1, np.float32)
    n = prod(source.tensor(source.find("A_log")).shape) if source.find("A_log") and c.kind == "kda" else c.H_v
    A_log = source("A_log", (max(n, c.H_v),))[:c.H_v]
    if np.isnan(A_log).any():
        raise ValueError(f"weights: {source.find('A_log')} holds NaN")
    with np.errstate(over="ignore"):                    # -inf: a head that forgets everything
        return -np.exp(A_log)


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
        return next((self.prefix + name for name in PARAMETERS[slot] if self.prefix + name in self.names), None)

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
            names = " or ".join(self.prefix + known for known in PARAMETERS[slot])
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
                if slot in NAMES}


def _float32(x, name):
    kind = str(x.dtype).removeprefix("torch.")
    if kind not in FLOATS:
        raise TypeError(f"weights: {name} must be {', '.join(FLOATS)}, got {kind}; a quantised weight means nothing without "
                        f"its scale: dequantise it first")
    if hasattr(x, "detach"):                            # torch, whose bfloat16 numpy does not read
        x = x.detach().cpu()
        x = x.numpy() if kind == "float64" else x.float().numpy()
    if kind == "float64" and (beyond := np.isfinite(x) & (np.abs(x) > FLOAT32_MAX)).any():
        raise ValueError(f"weights: {name} holds {x[beyond][0]}, beyond float32's range")
    return np.asarray(x, np.float32)
