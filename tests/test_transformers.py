"""Layers against transformers' own modules: random tiny configurations of every family, run on the CPU."""

import numpy as np
import pytest
from helpers import assert_close, missing
from hypothesis import given, settings
from hypothesis import strategies as st

import gdn

try:
    import torch
    from transformers.cache_utils import DynamicCache
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3next
except ImportError as error:
    missing(error)

MODULES = {
    "qwen3_next": (qwen3next, "Qwen3NextConfig", "Qwen3NextGatedDeltaNet"),
    "qwen3_5": (qwen35, "Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet"),
    "olmo_hybrid": (olmo, "OlmoHybridConfig", "OlmoHybridGatedDeltaNet"),
    "kimi_linear": (kimi, "KimiLinearConfig", "KimiLinearDeltaAttention"),
}


def build(family, hidden, H_k, r, S_k, S_v, width, seed):
    """transformers' module with weights that matter, its config, and the layer that reads them."""
    module, config_name, layer_name = MODULES[family]
    common = {"hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
              "vocab_size": 32, "intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"],
              "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "kimi_linear":
        sizes = {"linear_num_heads": H_k, "linear_head_dim": S_k, "linear_conv_kernel_dim": width}
    else:
        sizes = {"linear_num_key_heads": H_k, "linear_num_value_heads": H_k * r, "linear_key_head_dim": S_k,
                 "linear_value_head_dim": S_v, "linear_conv_kernel_dim": width}
    config = getattr(module, config_name)(**common, **sizes)
    torch.manual_seed(seed)
    mixer = getattr(module, layer_name)(config, 0).eval()
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-3, 2)
            elif name.endswith("dt_bias"):
                p.uniform_(-3, 1)
            elif "norm" in name:
                p.uniform_(0.5, 1.5)
            else:
                p.normal_(0, 0.4 if "conv" in name else hidden**-0.5)
    cls = gdn.KimiDeltaAttention if family == "kimi_linear" else gdn.GatedDeltaNet
    weights = {"x." + name: w for name, w in mixer.state_dict().items()}
    return mixer, config, cls.from_state_dict(weights, "x.", config)


def theirs(mixer, config, x, parts):
    """The module's outputs, its cache carried from part to part."""
    cache, ys, start = DynamicCache(config=config), [], 0
    for n in parts:
        with torch.no_grad():
            y = mixer(torch.from_numpy(x[None, start:start + n]), cache=cache)
        ys.append(y.numpy()[0])
        start += n
    return np.concatenate(ys)


def ours(layer, x, parts):
    ring = gdn.StateRing.create(1, n_layers=1, **layer.extents)
    ring.acquire(0)
    ys, start = [], 0
    for n in parts:
        batch = gdn.Batch([0] * n)
        with ring.begin(batch) as step:
            ys.append(layer(x[start:start + n], batch, step, 0))
        start += n
    return np.concatenate(ys)


@pytest.mark.parametrize("family", MODULES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_random_configurations(family, data):
    size = st.sampled_from([8, 12, 16, 24, 32])
    S_k, r = data.draw(size), data.draw(st.integers(1, 3))
    S_v = data.draw(size) if family != "kimi_linear" else S_k
    seed = data.draw(st.integers(0, 2**16))
    hidden, H_k = data.draw(st.sampled_from([16, 40])), data.draw(st.integers(1, 3))
    width = data.draw(st.integers(2, 5))
    mixer, config, layer = build(family, hidden, H_k, r, S_k, S_v, width, seed)
    prefill = data.draw(st.integers(2, 70))
    parts = [prefill, 1, 1, 1]
    x = np.random.default_rng(seed).standard_normal((prefill + 3, config.hidden_size)).astype(np.float32)
    assert_close(ours(layer, x, parts), theirs(mixer, config, x, parts), family, 2e-5)
