"""Layers from transformers' names and configs; transformers itself is not needed."""

import numpy as np

from gdn.adapters import weights as w
from gdn.layer import LayerConfig

GDN_MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid")
KDA_MODELS = ("kimi_linear",)

NAMES = {
    "qkvz": ("in_proj_qkvz.weight",), "qkv": ("in_proj_qkv.weight",), "z": ("in_proj_z.weight", "g_proj.weight"),
    "q": ("q_proj.weight",), "k": ("k_proj.weight",), "v": ("v_proj.weight",),
    "ba": ("in_proj_ba.weight",), "b": ("in_proj_b.weight", "b_proj.weight"),
    "a": ("in_proj_a.weight", "a_proj.weight"),
    "f_a": ("forget_gate.f_a_proj.weight", "f_a_proj.weight"),
    "f_b": ("forget_gate.f_b_proj.weight", "f_b_proj.weight"),
    "g_a": ("g_a_proj.weight",), "g_b": ("g_b_proj.weight",),
    "conv": ("conv1d.weight",),
    "conv_q": ("q_conv1d.weight",), "conv_k": ("k_conv1d.weight",), "conv_v": ("v_conv1d.weight",),
    "A_log": ("A_log", "forget_gate.A_log"), "dt_bias": ("dt_bias", "forget_gate.dt_bias"),
    "norm": ("norm.weight", "o_norm.weight"), "out": ("out_proj.weight", "o_proj.weight"),
}


def gated_delta_net(weights, prefix, config):
    """The arguments of gdn.GatedDeltaNet."""
    field = _Fields(config, GDN_MODELS)
    olmo = field.model_type == "olmo_hybrid"
    return _build(w.gated_delta_net, weights, prefix, LayerConfig(
        field("hidden_size"), field("linear_num_key_heads"), field("linear_num_value_heads"),
        field("linear_key_head_dim"), field("linear_value_head_dim"), field("linear_conv_kernel_dim"),
        eps=1e-5 if olmo else field("rms_norm_eps"),          # OLMo's is fixed in the code
        beta_factor=2.0 if olmo and field("linear_allow_neg_eigval", default=True) else 1.0))


def kimi_delta_attention(weights, prefix, config):
    """The arguments of gdn.KimiDeltaAttention."""
    field = _Fields(config, KDA_MODELS)
    H, S = field("linear_num_heads", "num_heads"), field("linear_head_dim", "head_dim", nested_first=True)
    return _build(w.kimi_delta_attention, weights, prefix, LayerConfig(
        field("hidden_size"), H, H, S, S, field("linear_conv_kernel_dim", "short_conv_kernel_size"),
        eps=field("rms_norm_eps"), activation="sigmoid",
        lower_bound=field("gate_lower_bound", "linear_lower_bound", "lower_bound", default=None)))


def _build(assemble, weights, prefix, config):
    get = weights.__getitem__ if hasattr(weights, "__getitem__") else weights.get_tensor      # safetensors' open file
    tensors = {key[len(prefix):]: get(key) for key in weights.keys() if key.startswith(prefix)}
    source = w.Source(NAMES, prefix, lambda name: tensors[name].shape if name in tensors else None,
                      lambda name: as_float32(tensors[name], prefix + name))
    parts = assemble(source, config)
    if unknown := tensors.keys() - source.used:
        raise ValueError(f"tensors of no known use: {', '.join(prefix + name for name in sorted(unknown))}")
    return parts


def as_float32(x, name):
    """numpy or torch (bfloat16 too) as a float32 array."""
    if hasattr(x, "detach"):
        if not x.is_floating_point():
            raise TypeError(f"tensor {name} must be floating point, got {x.dtype}")
        x = x.detach().float().cpu().numpy()
    x = np.asarray(x)
    if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
        raise TypeError(f"tensor {name} must be floating point, got {x.dtype}")
    return x.astype(np.float32, copy=False)


class _Fields:
    """Fields of a config: a mapping or an object; text_config and linear_attn_config are looked into."""

    def __init__(self, config, known):
        self.get = config.get if hasattr(config, "get") else lambda name, default: getattr(config, name, default)
        self.model_type = self.get("model_type", None)
        if self.model_type not in known:
            raise ValueError(f"model_type must be one of {', '.join(known)}, got {self.model_type!r}")
        if (text := self.get("text_config", None)) is not None:
            self.get = text.get if hasattr(text, "get") else lambda name, default: getattr(text, name, default)
        self.nested = self.get("linear_attn_config", None) or {}
        act = self.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise ValueError(f"hidden_act must be silu, got {act!r}")

    def __call__(self, *names, nested_first=False, **default):
        """The first of names that is there; nested_first: linear_attn_config's is meant, though both may have one."""
        for where in ((self.nested.get, self.get) if nested_first else (self.get, self.nested.get)):
            for name in names:
                if (value := where(name, None)) is not None:
                    return value
        if "default" in default:
            return default["default"]
        raise ValueError(f"config has no {' or '.join(names)}")
