"""Whole layers at n_embd 2048: transformers' module of each family, ours with its weights, and what ours costs beside
its matmuls."""

import importlib
import time

import numpy as np

import gdn
from benchmarks.check import expect
from gdn.adapters.state_dict import read_layer
from gdn.layer import _Arrays

N_EMBD = 2048
FAMILIES = {        # transformers' folder of a family: config, module, (H_k, H_v, S_k, S_v)
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet", (16, 32, 128, 128)),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet", (16, 32, 128, 128)),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridGatedDeltaNet", (15, 15, 96, 192)),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearDeltaAttention", (16, 16, 128, 128)),
}
BOUND = 1e-3        # of the largest output: the two compute the same thing


def module(family):
    """(transformers' module with random weights, its config)."""
    import torch
    config_name, layer_name, (H_k, H_v, S_k, S_v) = FAMILIES[family]
    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = ({"linear_num_heads": H_k, "linear_head_dim": S_k} if family == "kimi_linear" else
             {"linear_num_key_heads": H_k, "linear_num_value_heads": H_v, "linear_key_head_dim": S_k,
              "linear_value_head_dim": S_v})
    config = getattr(code, config_name)(
        hidden_size=N_EMBD, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], vocab_size=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    torch.manual_seed(0)
    mixer = getattr(code, layer_name)(config, 0).eval()
    for name, p in mixer.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            torch.nn.init.uniform_(p, -1, 1)              # these are left uninitialised by some modules
    return mixer, config


def our_layer(mixer, config):
    weights, ours = read_layer(mixer.state_dict(), "", config)
    return (gdn.KimiDeltaAttention if ours["kind"] == "kda" else gdn.GatedDeltaNet)(weights, ours)


def tokens(n_tokens):
    return np.random.default_rng(1).standard_normal((n_tokens, N_EMBD), np.float32)


def one_sequence(layer, n_tokens):
    """(ring, batch): for one token the sequence goes on, else it starts afresh."""
    ring = gdn.StateRing.create(1, n_layers=1, **layer.extents)
    ring.acquire(0)
    return ring, gdn.Batch([0] * n_tokens, None if n_tokens == 1 else np.arange(n_tokens))


def our_call(layer, n_tokens, n_threads):
    (ring, batch), x = one_sequence(layer, n_tokens), tokens(n_tokens)

    def call():
        with ring.begin(batch) as step:
            return layer(x, batch, step, 0, n_threads=n_threads)
    return call


def their_call(mixer, config, n_tokens, n_threads):
    """The module in torch, its cache carried for one token and new for many."""
    import torch
    from transformers.cache_utils import DynamicCache
    torch.set_num_threads(n_threads)
    x, carried = torch.from_numpy(tokens(n_tokens))[None], DynamicCache(config=config)

    def call():
        with torch.no_grad():
            return mixer(x, cache=carried if n_tokens == 1 else DynamicCache(config=config))[0].numpy()
    return call


def both_calls(family, n_tokens, n_threads):
    """(theirs, ours), on the same weights and tokens, their first outputs compared."""
    mixer, config = module(family)
    theirs = their_call(mixer, config, n_tokens, n_threads)
    ours = our_call(our_layer(mixer, config), n_tokens, n_threads)
    expect(f"{family} layer", ours(), theirs(), BOUND)
    return theirs, ours


# ---- beside the matmuls ----------------------------------------------------------------------------------------------

def kernel_call(layer, arrays, n_threads):
    """The layer's kernels alone, by the public functions: in place on its own arrays and on the caches of one sequence."""
    t, T, threads = arrays, arrays.qkv.shape[1], {"n_threads": n_threads}
    conv, ssm = (np.zeros(shape, np.float32) for shape in ((1, layer.C, layer.width - 1),
                                                           (1, layer.H_v, layer.S_v, layer.S_k)))
    row = np.zeros(1, np.int64)
    start = row if T == 1 else row - 1
    minus_one, zero = np.full(layer.H_v, -1, np.float32), np.zeros(layer.H_v, np.float32)

    def call():
        gdn.causal_conv1d_inplace(t.qkv, layer.conv, layer.conv_bias, conv, start, row, out=t.qkv, **threads)
        gdn.decay_gate(t.a, layer.A, layer.dt_bias, gate=layer.gate, lower_bound=layer.lower_bound, out=t.a, **threads)
        if layer.beta_factor != 1:
            gdn.decay_gate(t.b, minus_one, zero, gate="bounded", lower_bound=-layer.beta_factor, out=t.b, **threads)
            np.negative(t.b, out=t.b)
        gdn.gated_delta_net_inplace(t.q, t.k, t.v, t.a, t.b, ssm, start, row, head_map=layer.head_map, qk_l2norm=True,
                                    beta_logit=layer.beta_factor == 1, out=t.v, **threads)
        gdn.rms_norm_gated(t.v, t.z, layer.norm, layer.norm_eps, activation=layer.activation, out=t.v, **threads)
    return call


def beside(layer, n_tokens, n_threads=1, rounds=None):
    """Seconds (of the layer less its matmuls, of the kernels alone): medians over rounds that take turns.

    The kernels find their arrays and the caches as the projections leave them.  The ring's step, one for all layers of a
    model, is opened outside both.
    """
    inside = []

    def timed(x, weight, out=None):
        start = time.perf_counter()
        y = np.matmul(x, weight.T, out=out)
        inside.append(time.perf_counter() - start)
        return y

    (ring, batch), x = one_sequence(layer, n_tokens), tokens(n_tokens)
    arrays = _Arrays(layer, n_tokens)
    kernels = kernel_call(layer, arrays, n_threads)
    layer._product = timed
    times = []
    for _ in range(rounds or (60 if n_tokens == 1 else 9)):
        with ring.begin(batch) as step:
            inside.clear()
            start = time.perf_counter()
            layer(x, batch, step, 0, n_threads=n_threads)
            outside = time.perf_counter() - start - sum(inside)
        layer._project(x, arrays)
        start = time.perf_counter()
        kernels()
        times.append((outside, time.perf_counter() - start))
    del layer._product
    return np.median(times, 0)
