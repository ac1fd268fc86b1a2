"""Layers against transformers' own modules: random tiny configurations of every family, run on the CPU."""

import numpy as np
import pytest
from helpers import assert_close, missing, same_bits
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


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_stand_ins(family, monkeypatch):
    """transformers' module with the delta rule replaced by the stand-ins of gdn.adapters.torch."""
    from gdn.adapters import torch as stand_in

    mixer, config, _ = build(family, 16, 2, 2, 16, 24, 4, 3)
    x = np.random.default_rng(0).standard_normal((43, 16)).astype(np.float32)
    expected = theirs(mixer, config, x, [40, 1, 1, 1])
    calls = []

    def counted(function):
        return lambda *args, **kwargs: calls.append(function.__name__) or function(*args, **kwargs)

    module = MODULES[family][0]
    chunk, recurrent = (("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
                        if family == "qwen3_next" else ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"))
    monkeypatch.setattr(module, chunk, counted(stand_in.chunk_gated_delta_rule))
    monkeypatch.setattr(module, recurrent, counted(stand_in.fused_recurrent_gated_delta_rule))
    assert_close(theirs(mixer, config, x, [40, 1, 1, 1]), expected, family)
    assert calls == ["chunk_gated_delta_rule"] + ["fused_recurrent_gated_delta_rule"] * 3


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda",
                                  "fused_recurrent_kda"])
def test_stand_ins_alone(name):
    """Every option at once: grouped heads, packed sequences, states, a scale, outputs of q's type; no gradient is asked."""
    from gdn.adapters import torch as stand_in

    rng = np.random.default_rng(4)
    q, k, v, g, beta, state = (torch.from_numpy(rng.standard_normal(shape, np.float32)) for shape in (
        (1, 40, 2, 8), (1, 40, 2, 8), (1, 40, 4, 12), (1, 40, 4, 8) if "kda" in name else (1, 40, 4), (1, 40, 4), (2, 4, 8, 12)))
    tensors, cuts = (q.bfloat16(), k, v, -g.abs(), beta.sigmoid()), torch.tensor([0, 23, 40])
    arrays, states = [x.float().numpy() for x in tensors], state.numpy().swapaxes(-1, -2)
    options = {"scale": 0.3, "head_map": "interleaved", "qk_l2norm": True}
    with torch.no_grad():
        out, final = getattr(stand_in, name)(*tensors, initial_state=state.requires_grad_(), output_final_state=True, scale=0.3,
                                             cu_seqlens=cuts, use_qk_l2norm_in_kernel=True)
    assert out.dtype == torch.bfloat16 and final.dtype == torch.float32 and final.is_contiguous()
    for i, tokens in enumerate((slice(23), slice(23, 40))):
        y, end = gdn.reference.recurrent(*(x[:, tokens] for x in arrays), states[i:i + 1], **options)
        assert_close(out[:, tokens].float().numpy(), y, name, 2**-7)
        assert_close(final[i:i + 1].numpy().swapaxes(-1, -2), end, name)
    mode = "recurrent" if "recurrent" in name else "chunked"
    _, end = gdn.gated_delta_net(*arrays, states, cu_seqlens=cuts.numpy(), mode=mode, **options)
    assert same_bits(final.numpy().swapaxes(-1, -2), end)
    assert getattr(stand_in, name)(*tensors)[1] is None
    assert getattr(stand_in, name)(*tensors, output_final_state=True)[1].is_contiguous()


def test_stand_ins_refuse():
    from gdn.adapters import torch as stand_in

    q = torch.zeros(1, 3, 2, 8)
    g = torch.zeros(1, 3, 2)
    with pytest.raises(RuntimeError, match="v requires a gradient"):
        stand_in.chunk_gated_delta_rule(q, q, q.clone().requires_grad_(), g, g)
    for bad in (g.numpy(), g.to("meta")):
        with pytest.raises(TypeError, match="g must be a CPU tensor"):
            stand_in.chunk_gated_delta_rule(q, q, q, bad, g)
    for bad in (q.int(), q.bool(), q.to(torch.complex64)):
        with pytest.raises(TypeError, match="^k must hold floating-point numbers"):
            stand_in.chunk_gated_delta_rule(q, bad, q, g, g)
    with pytest.raises(ValueError, match="^g"):
        stand_in.chunk_gated_delta_rule(q, q, q, g[:, :2], g)
    for name, value in (("head_first", True), ("A_log", torch.zeros(1)), ("dt_bias", torch.ones(2)), ("lower_bound", 0.0),
                        ("use_gate_in_kernel", True), ("use_beta_sigmoid_in_kernel", True), ("safe_gate", True),
                        ("transpose_state_layout", True), ("state_v_first", True), ("gk", g), ("gv", g),
                        ("allow_neg_eigval", True), ("reverse", True), ("ssm_state_indices", g), ("num_accepted_tokens", g)):
        with pytest.raises(ValueError, match=f"{name} is not supported"):
            stand_in.fused_recurrent_gated_delta_rule(q, q, q, g, g, **{name: value})
    stand_in.fused_recurrent_gated_delta_rule(q, q, q, g, g, head_first=False, A_log=None)
