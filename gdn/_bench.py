"""`python -m gdn bench`: what this machine does at one model's head shape (H_k=16, H_v=32, S=128), in a minute."""

import statistics
import time

import numpy as np

import gdn

H_K, H_V, S, LAYERS, CHANNELS = 16, 32, 128, 24, 8192


def median_time(call, seconds):
    """Median seconds of a call, after one to warm up."""
    call()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def inputs(n_tokens, per_channel, n_layers=1):
    rng = np.random.default_rng(0)
    H_k = H_V if per_channel else H_K                  # Kimi's layers have one key head a value head
    q, k = (rng.standard_normal((1, n_tokens, H_k, S), np.float32) for _ in range(2))
    v = rng.standard_normal((1, n_tokens, H_V, S), np.float32)
    g = -rng.uniform(0.001, 0.2, (1, n_tokens, H_V, S) if per_channel else (1, n_tokens, H_V)).astype(np.float32)
    beta = rng.uniform(0, 1, (1, n_tokens, H_V)).astype(np.float32)
    return (q, k, v, g, beta), np.zeros((n_layers, 1, H_V, S, S), np.float32), np.empty_like(v)


def delta(n_tokens, per_channel, n_layers, n_threads):
    """A call that runs n_layers layers, each on its own state, in place."""
    arrays, caches, out = inputs(n_tokens, per_channel, n_layers)

    def call():
        for cache in caches:
            gdn.gated_delta_net_inplace(*arrays, cache, [0], head_map="interleaved", qk_l2norm=True, out=out,
                                        n_threads=n_threads)
    return call, n_tokens * n_layers


def conv(n_tokens, n_threads):
    x = np.random.default_rng(0).standard_normal((1, n_tokens, CHANNELS), np.float32)
    weight, cache, out = x[0, :4].T.copy(), np.zeros((1, CHANNELS, 3), np.float32), np.empty_like(x)
    return lambda: gdn.causal_conv1d_inplace(x, weight, None, cache, [0], out=out, n_threads=n_threads), n_tokens


ROWS = (
    ("GDN prefill, 2048 tokens", lambda n: delta(2048, False, 1, n)),
    ("GDN prefill, 64 tokens", lambda n: delta(64, False, 1, n)),
    ("KDA prefill, 512 tokens", lambda n: delta(512, True, 1, n)),
    ("GDN decode, one layer", lambda n: delta(1, False, 1, n)),
    ("GDN decode, 24 layers", lambda n: delta(1, False, LAYERS, n)),
    ("KDA decode, 24 layers", lambda n: delta(1, True, LAYERS, n)),
    ("conv width 4, 512 tokens", lambda n: conv(512, n)),
)


def run(seconds=0.5):
    """Print microseconds per token (of one layer) for one thread and for all, and the rate of the faster.

    The rate counts 6 S_k S_v flops per token and value head for prefill, one read and one write of the state for
    decode, one read and one write of the activations for the convolution.
    """
    threads = gdn.get_num_threads()
    config = gdn.show_config("dicts")
    print(f"gdn {config['version']}, level {config['level']}, {config['processor']}; H_k={H_K} H_v={H_V} S={S}")
    print(f"{'':26}{'1 thread':>12}{f'{threads} threads':>12}   microseconds per token and layer")
    for name, make in ROWS:
        each = []
        for n in (1, threads):
            call, tokens = make(n)
            each.append(median_time(call, seconds) / tokens)
        print(f"{name:26}{each[0] * 1e6:12.2f}{each[1] * 1e6:12.2f}   {rate(name, min(each))}", flush=True)
    return 0


def rate(name, seconds):
    if "prefill" in name:
        return f"{6 * S * S * H_V / seconds / 1e9:.0f} GFLOP/s"
    size = 2 * 4 * (CHANNELS if "conv" in name else S * S * H_V)
    return f"{size / seconds / 1e9:.1f} GB/s"
