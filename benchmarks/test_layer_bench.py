"""Whole layers at n_embd 2048: against transformers' own on the CPU, and what a layer costs beside its matmuls.

pytest benchmarks/test_layer_bench.py; `outside` is the layer's time less that spent in its matmuls, over the time of
its kernels called alone on contiguous arrays and as many threads, with caches as the matmuls leave them.  The ring's
step, one for all layers of a model, is opened outside both.
"""

import time

import numpy as np
import pytest

import gdn

N_EMBD = 2048
SHAPES = {        # family: (H_k, H_v, S_k, S_v)
    "qwen3_next": (16, 32, 128, 128),
    "qwen3_5": (16, 32, 128, 128),
    "olmo_hybrid": (15, 15, 96, 192),
    "kimi_linear": (16, 16, 128, 128),
}
MODULES = {
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextGatedDeltaNet"),
    "qwen3_5": ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet"),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridGatedDeltaNet"),
    "kimi_linear": ("kimi_linear", "KimiLinearConfig", "KimiLinearDeltaAttention"),
}


def random_layer(family):
    """The family's layer at N_EMBD with random weights."""
    H_k, H_v, S_k, S_v = SHAPES[family]
    rng, C, value = np.random.default_rng(0), 2 * H_k * S_k + H_v * S_v, H_v * S_v
    shapes = {"qkv": (C, N_EMBD), "b": (H_v, N_EMBD), "conv": (C, 4), "A": (H_v,), "norm": (S_v,),
              "out": (N_EMBD, value), "dt_bias": (H_v,)}
    kda = family == "kimi_linear"
    if kda:
        shapes |= {"f_a": (S_k, N_EMBD), "f_b": (H_v * S_k, S_k), "g_a": (S_v, N_EMBD), "g_b": (value, S_v),
                   "dt_bias": (H_v * S_k,)}
    else:
        shapes |= {"z": (value, N_EMBD), "a": (H_v, N_EMBD)}
    weights = {name: rng.standard_normal(shape, np.float32) * np.float32(shape[-1]**-0.5 if len(shape) > 1 else 1)
               for name, shape in shapes.items()}
    weights["A"] = -np.abs(weights["A"])
    config = {"kind": "kda" if kda else "gdn", "n_embd": N_EMBD, "H_k": H_k, "H_v": H_v, "S_k": S_k, "S_v": S_v,
              "width": 4, "head_map": "interleaved", "norm_eps": 1e-6, "l2_eps": 1e-6, "l2_form": "sum",
              "beta_factor": 2.0 if family == "olmo_hybrid" else 1.0, "activation": "sigmoid" if kda else "silu",
              "lower_bound": None}
    return (gdn.KimiDeltaAttention if kda else gdn.GatedDeltaNet)(weights, config)


def one_sequence(layer, n_tokens):
    """(ring, batch, x): for one token the sequence goes on, else it starts afresh."""
    ring = gdn.StateRing.create(1, n_layers=1, **layer.extents)
    ring.acquire(0)
    batch = gdn.Batch([0] * n_tokens, None if n_tokens == 1 else np.arange(n_tokens))
    return ring, batch, np.random.default_rng(1).standard_normal((n_tokens, N_EMBD), np.float32)


def layer_call(layer, n_tokens):
    ring, batch, x = one_sequence(layer, n_tokens)

    def call():
        with ring.begin(batch) as step:
            return layer(x, batch, step, 0)
    return call


def matmul_call(layer, n_tokens):
    """The layer's matrix products alone, on contiguous arrays."""
    rng = np.random.default_rng(1)
    weights = [layer.inputs, *layer.low_rank.values(), layer.out]
    xs = [rng.standard_normal((n_tokens, w.shape[1]), np.float32) for w in weights]

    def call():
        for x, w in zip(xs, weights, strict=True):
            x @ w.T
    return call


def kernel_call(layer, n_tokens, n_threads):
    """The layer's kernels alone, on contiguous arrays, in place on the caches of one sequence."""
    threads = {"n_threads": n_threads}
    rng, T, H_k, H_v, S_k, S_v = np.random.default_rng(1), n_tokens, layer.H_k, layer.H_v, layer.S_k, layer.S_v

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    qkv, z, b = normal(1, T, layer.C), normal(T, H_v, S_v), normal(1, T, H_v)
    a = normal(1, T, H_v, S_k) if layer.KIND == "kda" else normal(1, T, H_v)
    q, k, v = normal(1, T, H_k, S_k), normal(1, T, H_k, S_k), normal(1, T, H_v, S_v)
    conv, ssm, row = normal(1, layer.C, 3), normal(1, H_v, S_v, S_k), np.zeros(1, np.int64)
    start = row if T == 1 else row - 1
    u, g, o, y = (np.empty_like(x) for x in (qkv, a, v, z))

    def call():
        gdn.causal_conv1d_inplace(qkv, layer.conv, None, conv, start, row, out=u, **threads)
        gdn.decay_gate(a, layer.A, layer.dt_bias, out=g, **threads)
        gdn.gated_delta_net_inplace(q, k, v, g, b, ssm, start, row, head_map="interleaved", qk_l2norm=True,
                                    beta_logit=True, out=o, **threads)
        gdn.rms_norm_gated(o[0], z, layer.norm, activation=layer.activation, out=y, **threads)
    return call


def outside(layer, n_tokens, rounds=9):
    """(outside the matmuls, kernels alone) in seconds: medians over rounds that take turns."""
    inside = [0.0]

    def timed(x, weight, out=None):
        start = time.perf_counter()
        y = np.matmul(x, weight.T, out=out)
        inside[0] += time.perf_counter() - start
        return y

    n_threads = 1 if n_tokens < 64 else gdn.get_num_threads()
    ring, batch, x = one_sequence(layer, n_tokens)
    matmuls, kernels = matmul_call(layer, n_tokens), kernel_call(layer, n_tokens, n_threads)
    layer._product = timed
    times = []
    for _ in range(rounds):
        with ring.begin(batch) as step:
            inside[0], start = 0.0, time.perf_counter()
            layer(x, batch, step, 0, n_threads=n_threads)
            beside = time.perf_counter() - start - inside[0]
        matmuls()
        start = time.perf_counter()
        kernels()
        times.append((beside, time.perf_counter() - start))
    del layer._product
    return np.median(times, 0)


@pytest.mark.parametrize("n_tokens", [1, 512])
@pytest.mark.parametrize("family", SHAPES)
def test_layer(benchmark, family, n_tokens):
    layer = random_layer(family)
    beside, kernels = outside(layer, n_tokens, rounds=40 if n_tokens == 1 else 7)
    benchmark.extra_info["outside"] = beside / kernels
    benchmark.extra_info["microseconds"] = [round(1e6 * beside), round(1e6 * kernels)]
    benchmark.pedantic(layer_call(layer, n_tokens), rounds=5, warmup_rounds=1, iterations=20 if n_tokens == 1 else 1)


@pytest.mark.parametrize("n_tokens", [1, 512])
@pytest.mark.parametrize("family", SHAPES)
def test_transformers(benchmark, family, n_tokens):
    """transformers' module in torch on the CPU, its cache carried."""
    import importlib

    import torch
    from transformers.cache_utils import DynamicCache

    folder, config_name, layer_name = MODULES[family]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    H_k, H_v, S_k, S_v = SHAPES[family]
    sizes = ({"linear_num_heads": H_k, "linear_head_dim": S_k} if family == "kimi_linear" else
             {"linear_num_key_heads": H_k, "linear_num_value_heads": H_v, "linear_key_head_dim": S_k,
              "linear_value_head_dim": S_v})
    config = getattr(module, config_name)(
        hidden_size=N_EMBD, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], vocab_size=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    torch.manual_seed(0)
    mixer = getattr(module, layer_name)(config, 0).eval()
    for name, p in mixer.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            torch.nn.init.uniform_(p, -1, 1)              # these are left uninitialised by some modules
    x = torch.randn(1, n_tokens, N_EMBD)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        mixer(torch.randn(1, 8, N_EMBD), cache=cache)
        benchmark.pedantic(lambda: mixer(x, cache=cache if n_tokens == 1 else DynamicCache(config=config)), rounds=5,
                           warmup_rounds=1, iterations=20 if n_tokens == 1 else 1)
