"""Random tiny layers of every family of transformers, and what their modules compute."""

import importlib
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
from helpers import missing
from hypothesis import strategies as st

import gdn

try:
    import torch
    from transformers.cache_utils import DynamicCache
except ImportError as error:
    missing(error)

# Family: its folder, configuration and layer, and whether its gate is one per key channel.
FAMILIES = {
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextGatedDeltaNet", False),
    "qwen3_5": ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet", False),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeGatedDeltaNet", False),
    "qwen4_exp": ("qwen4_exp", "Qwen4ExpTextConfig", "Qwen4ExpTextGatedDeltaNet", False),
    "lara_mini": ("lara_mini", "LaraMiniConfig", "LaraMiniGatedDeltaNet", False),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridGatedDeltaNet", False),
    "kimi_linear": ("kimi_linear", "KimiLinearConfig", "KimiLinearDeltaAttention", True),
    "glm5_next": ("glm5_next", "Glm5NextTextConfig", "Glm5NextTextLinearAttention", True),
    "bailing_hybrid": ("bailing_hybrid", "BailingHybridConfig", "BailingHybridDeltaAttention", True),
}
# One configuration of each.
GDN = {"hidden_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
       "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4}
KDA = {"hidden_size": 24, "linear_num_heads": 3, "linear_head_dim": 16, "linear_conv_kernel_dim": 4}
FIXED = {family: KDA if kda else GDN for family, (*_, kda) in FAMILIES.items()} | {
    "qwen4_exp": GDN | {"output_gate_type": "sigmoid"},
    "bailing_hybrid": {"hidden_size": 24, "num_attention_heads": 3, "head_dim": 16, "short_conv_kernel_size": 4}}
SIZES = st.sampled_from([4, 8, 12, 16, 24, 32, 40])


def module_of(family):
    folder = FAMILIES[family][0]
    return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")


@st.composite
def settings_of(draw, family):
    """Fields of a random configuration of the family: extents and every switch that its class reads."""
    S, heads, width = draw(SIZES), draw(st.integers(1, 3)), draw(st.integers(2, 5))
    fields = {"hidden_size": draw(st.sampled_from([16, 40])), "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-3]))}
    bound = draw(st.sampled_from([-5.0, -0.5, -8.0]))        # further down, chunks of transformers round by 1e-5
    if family == "bailing_hybrid":
        return fields | {"num_attention_heads": heads, "head_dim": S, "short_conv_kernel_size": width,
                         "kda_safe_gate": draw(st.booleans()), "kda_lower_bound": bound}
    if FAMILIES[family][3]:
        fields |= {"linear_num_heads": heads, "linear_head_dim": S, "linear_conv_kernel_dim": width}
        return fields | {"linear_lower_bound": draw(st.sampled_from([None, bound]))} if family == "glm5_next" else fields
    fields |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads * draw(st.integers(1, 8)),
               "linear_key_head_dim": S, "linear_value_head_dim": draw(SIZES), "linear_conv_kernel_dim": width}
    if family == "qwen4_exp":
        fields["output_gate_type"] = draw(st.sampled_from(["sigmoid", "silu", None]))
    if family == "olmo_hybrid":
        fields["linear_allow_neg_eigval"] = draw(st.booleans())
    return fields


def build(family, fields, seed):
    """transformers' module with weights that matter, and its configuration."""
    _, config_name, layer_name, _ = FAMILIES[family]
    common = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32,
              "intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0,
              "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(module_of(family), config_name)(**common | fields)
    torch.manual_seed(seed)
    mixer = getattr(module_of(family), layer_name)(config, 0).eval()
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-3, 2)
            elif name.endswith("dt_bias"):
                p.uniform_(-3, 1)
            elif "norm" in name:
                p.uniform_(0.5, 1.5)
            else:
                p.normal_(0, 0.4 if "conv" in name else p.shape[1]**-0.5)
    return mixer, config


def load(family, mixer, config, **options):
    cls = gdn.KimiDeltaAttention if FAMILIES[family][3] else gdn.GatedDeltaNet
    return cls.from_state_dict({"x." + name: w for name, w in mixer.state_dict().items()}, "x.", config, **options)


def theirs(mixer, config, x, parts):
    """The module's outputs, its cache carried from part to part."""
    cache, ys = DynamicCache(config=config), []
    for part in np.split(x, np.cumsum(parts)[:-1]):
        with torch.no_grad():
            ys.append(mixer(torch.from_numpy(part[None]), cache=cache).numpy()[0])
    return np.concatenate(ys)


def ours(layer, x, parts, **options):
    ring = gdn.StateRing.create(1, n_layers=1, **layer.extents)
    ring.acquire(0)
    ys = []
    for part in np.split(x, np.cumsum(parts)[:-1]):
        batch = gdn.Batch([0] * len(part))
        with ring.begin(batch) as step:
            ys.append(layer(part, batch, step, 0, **options))
    return np.concatenate(ys)


@contextmanager
def recorded(family, mixer):
    """What the module's forward computes on the way, under the names of a layer's trace; (tokens, ...) each."""
    module, seen = module_of(family), {}
    chunk = "chunk_kimi_delta_attention" if FAMILIES[family][3] else "torch_chunk_gated_delta_rule"
    real = {name: getattr(module, name) for name in (chunk, "causal_conv1d_fn")}

    def rule(q, k, v, **options):
        out = real[chunk](q, k, v, **options)
        seen.update({name: module.l2norm(x[0], dim=-1) for name, x in (("q", q), ("k", k))})
        seen.update(v=v[0], gate=options["g"][0], beta=options["beta"][0], attn_output=out[0][0])
        return out

    def conv(x, *args, **options):
        y = real["causal_conv1d_fn"](x, *args, **options)
        seen.update(qkv_mixed=x[0].T, conv_output_silu=y[0].T)
        return y

    def keep(name, at=None):
        return lambda _, inputs, output: seen.update({name: (output if at is None else inputs[at]).squeeze(0)})

    parts = dict(mixer.named_modules())
    hooks = {"b": ("in_proj_b", "b_proj"), "a": ("in_proj_a", "a_proj", "forget_gate.f_b_proj", "forget_gate.f_proj"),
             "attn_out_norm": ("norm", "o_norm"), "linear_attn_out": ("out_proj", "o_proj")}
    with ExitStack() as stack, torch.no_grad():
        for name, fake in ((chunk, rule), ("causal_conv1d_fn", conv)):
            stack.enter_context(mock.patch.object(module, name, fake))
        for name, known in hooks.items():
            for part in (parts[p] for p in known if p in parts):
                stack.enter_context(part.register_forward_hook(keep(name)))
                if name == "attn_out_norm":
                    stack.enter_context(part.register_forward_hook(keep("z", at=1)))
        if family == "qwen3_next":                      # b and a come grouped by key head
            order = mixer.fix_query_key_value_ordering

            def told(*args):
                rows = order(*args)
                seen.update(b=rows[4][0], a=rows[5][0])
                return rows

            stack.enter_context(mock.patch.object(mixer, "fix_query_key_value_ordering", told))
        yield seen
