"""Rows of the kernels: against numpy, and against themselves in other circumstances."""

import ctypes
import statistics

import numpy as np

from benchmarks import allocations, native, ours
from benchmarks.pairs import best_of, compare, repeats, sample
from benchmarks.remote import Remote
from benchmarks.rows.table import row, times
from benchmarks.shapes import KIMI, QWEN, Shape, aligned, inputs

# Against numpy -------------------------------------------------------------------------------------------------------

GEMM = 1024
GEMM_FLOPS = 2.0 * GEMM**3


def sgemm_of(flops):
    """A float32 product of about so many flops on the BLAS that numpy brings, (m, 1024) by (1024, 1024)."""
    rng = np.random.default_rng(0)
    m = max(1, round(flops / (2 * GEMM * GEMM)))
    a, b, c = aligned((m, GEMM)), aligned((GEMM, GEMM)), aligned((m, GEMM))
    rng.standard_normal(out=a, dtype=np.float32)
    rng.standard_normal(out=b, dtype=np.float32)
    return lambda: np.matmul(a, b, out=c)


def over_sgemm(call, flops):
    p = compare(call, sgemm_of(GEMM_FLOPS))
    return flops / GEMM_FLOPS / p.ratio, times(p, gflops=round(flops / p.a / 1e9, 1),
                                               sgemm_gflops=round(GEMM_FLOPS / p.b / 1e9, 1))


@row("prefill", "GDN prefill, 2048 tokens: rate over numpy sgemm", target=0.62, stretch=0.75, at_least=True)
def _():
    return over_sgemm(ours.prefill(QWEN, 2048), QWEN.flops(2048))


@row("prefill-v3", "the same at level v3 over sgemm on AVX2 (OPENBLAS_CORETYPE=Haswell)", target=0.75, stretch=0.85,
     at_least=True, level="v3")
def _():
    return over_sgemm(ours.prefill(QWEN, 2048), QWEN.flops(2048))


@row("prefill-64", "GDN prefill, 64 tokens, cold: rate over numpy sgemm", target=0.45, stretch=0.6, at_least=True)
def _():
    return over_sgemm(ours.prefill_cold(QWEN, 64), QWEN.flops(64) * ours.LAYERS)


@row("v3-v4", "GDN prefill, 2048 tokens: time at level v3 over level v4", target=2.1, stretch=1.9, at_least=False,
     level="v4")
def _():
    with Remote("v3", "prefill", QWEN.name, 2048) as v3, Remote("v4", "prefill", QWEN.name, 2048) as v4:
        p = compare(v3, v4, least_pairs=9)
    return p.ratio, times(p)


@row("kda-gdn", "KDA prefill, 512 tokens, H=32: time over GDN's", target=1.35, stretch=1.15, at_least=False)
def _():
    gdn_shape = Shape("gdn of the same heads", KIMI.H_k, KIMI.H_v, KIMI.S_k, KIMI.S_v)
    p = compare(ours.prefill(KIMI, 512), ours.prefill(gdn_shape, 512))
    return p.ratio, times(p, kda_gflops=round(KIMI.flops(512) / p.a / 1e9, 1))


def in_place_pass(states, n_threads):
    """x *= a over the same bytes (a = 1 keeps the numbers): numpy's, on several threads OpenMP's."""
    x, a = states.reshape(-1), np.float32(1)
    if n_threads == 1:
        return lambda: np.multiply(x, a, out=x)
    multiply = native.load("multiply.c", "-fopenmp").multiply
    arguments = ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(x.size), ctypes.c_float(1), n_threads
    return lambda: multiply(*arguments)


def decode_over_pass(n_threads):
    states = ours.layer_states(QWEN)
    p = best_of(2 * n_threads - 1, ours.decode(QWEN, states, n_threads=n_threads), in_place_pass(states, n_threads))
    gigabytes = 2 * states.nbytes / 1e9
    return p.ratio, times(p, gb_s=round(gigabytes / p.a, 1), pass_gb_s=round(gigabytes / p.b, 1))


@row("decode", "decode, 24 layers in place (48 MiB): time over x *= a", target=1.25, stretch=1.1, at_least=False)
def _():
    return decode_over_pass(1)


@row("decode-2", "the same with two threads each", target=1.25, stretch=1.1, at_least=False)
def _():
    return decode_over_pass(2)


# Against itself ------------------------------------------------------------------------------------------------------

def verify(n_layers):
    states = ours.layer_states(QWEN, n_rows=4, n_layers=n_layers)
    one, four = (ours.decode(QWEN, states, n_tokens=4, n_snapshots=n) for n in (1, 4))
    p = compare(four, one)
    return p.ratio, times(p, layers=n_layers)


@row("verify", "a verify step of 4 tokens keeping 4 snapshots: time over keeping one", target=2.2, stretch=1.6,
     at_least=False)
def _():
    return verify(1)


@row("verify-24", "the same through 24 layers (192 MiB of snapshots)", target=2.2, stretch=1.6, at_least=False)
def _():
    return verify(ours.LAYERS)


@row("threads-prefill", "prefill, 2048 tokens: two threads over one", target=1.8, stretch=1.95, at_least=True)
def _():
    two, one = (ours.prefill(QWEN, 2048, n_threads=n) for n in (2, 1))
    p = best_of(3, two, one, budget=6)
    return 1 / p.ratio, times(p)


def threads_decode(n_layers):
    states = ours.layer_states(QWEN, n_layers=n_layers)
    two, one = (ours.decode(QWEN, states, n_threads=n) for n in (2, 1))
    p = best_of(3, two, one, budget=6)
    return 1 / p.ratio, times(p)


@row("threads-decode", "decode, 24 layers: two threads over one", target=1.8, stretch=1.95, at_least=True)
def _():
    return threads_decode(ours.LAYERS)


@row("threads-decode-hot", "decode, one layer hot: two threads over one", target=1.8, stretch=1.95, at_least=True)
def _():
    return threads_decode(1)


@row("overhead", "call from Python: H=1, S=16, one token, out and state given", target=6, stretch=3,
     at_least=False, unit="us")
def _():
    call = ours.tiny()
    n = repeats(call)
    samples = [sample(call, n) for _ in range(100)]
    return statistics.median(samples) * 1e6, {"best_us": round(min(samples) * 1e6, 2)}


@row("subnormal", "gates of -88..-100 over gates of -0.05, prefill and decode, the worse", target=1.1,
     at_least=False)
def _():
    results = {}
    for name, n_tokens, mode in (("prefill", 256, "chunked"), ("decode", 16, "recurrent")):
        hard, easy = (ours.prefill(QWEN, n_tokens, mode=mode, data=inputs(QWEN, n_tokens, g=g))
                      for g in ((-100, -88), (-0.05, -0.05)))
        results[name] = compare(hard, easy, budget=2).ratio
    return max(results.values()), {k: round(v, 3) for k, v in results.items()}


def head_sizes(sizes):
    base = ours.prefill(QWEN, 512)
    results = {}
    for S_k, S_v in sizes:
        shape = Shape(f"{S_k}/{S_v}", 16, 32, S_k, S_v)
        p = compare(base, ours.prefill(shape, 512), budget=1.5)
        results[shape.name] = round(p.ratio * shape.flops(512) / QWEN.flops(512), 3)
    return min(results.values()), results


@row("head-sizes", "head sizes 64, 96/192, 80, 48: rate over the 128 rate, the least", target=0.7, at_least=True)
def _():
    return head_sizes(((64, 64), (96, 192), (80, 80), (48, 48)))


@row("head-sizes-v3", "head sizes 48, 64, 80 at level v3: rate over the 128 rate, the least", target=0.75, stretch=0.85,
     at_least=True, level="v3")
def _():
    return head_sizes(((48, 48), (64, 64), (80, 80)))


def layouts(n_tokens, mode):
    """Calls that differ in how the same tensors lie: state order, head map, strides of q, k, v."""
    data = inputs(QWEN, n_tokens)
    q, k, v, *rest = data
    fused = aligned((1, n_tokens, 2 * QWEN.H_k + QWEN.H_v, QWEN.S_k))
    parts = fused[:, :, :QWEN.H_k], fused[:, :, QWEN.H_k:2 * QWEN.H_k], fused[:, :, 2 * QWEN.H_k:]
    by_head = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    for part, x in zip(parts, (q, k, v), strict=True):
        part[:] = x
    # One block, so that where the states lie does not tell the calls apart; a single token works in place.
    block = aligned((5, 2, *rest[-1].shape))
    pairs = [(old, old if n_tokens == 1 else new) for old, new in block]
    pairs[1] = [x.reshape(*x.shape[:-2], QWEN.S_k, QWEN.S_v).swapaxes(-1, -2) for x in pairs[1]]
    options = {"ggml order": {}, "FLA order": {}, "interleaved": {"head_map": "interleaved"},
               "fused q k v": {"data": (*parts, *rest)}, "by head": {"data": (*by_head, *rest)}}
    return {name: ours.prefill(QWEN, n_tokens, **{"mode": mode, "data": data, "states": pair, **option})
            for (name, option), pair in zip(options.items(), pairs, strict=True)}


@row("layouts", "state orders, head maps, strided q k v: time over the fastest of them, the worst", target=1.1,
     at_least=False)
def _():
    results = {}
    for n_tokens, mode in ((512, "chunked"), (1, "recurrent")):
        calls = layouts(n_tokens, mode)
        base = calls.pop("ggml order")
        ratios = {"ggml order": 1.0, **{name: compare(call, base, budget=1).ratio for name, call in calls.items()}}
        results |= {f"{name}, {n_tokens} tok": round(r / min(ratios.values()), 3) for name, r in ratios.items()}
    return max(results.values()), results


@row("layouts-24", "decode, 24 layers: states in FLA's order over ggml's", target=1.1, at_least=False)
def _():
    fla = ours.layer_states(QWEN)
    fla = fla.reshape(*fla.shape[:-2], QWEN.S_k, QWEN.S_v).swapaxes(-1, -2)
    p = compare(ours.decode(QWEN, fla), ours.decode(QWEN, ours.layer_states(QWEN)))
    return p.ratio, times(p)


@row("alloc", "native allocations in a decode call with out given, after the first", target=0, at_least=False, unit="")
def _():
    return allocations.of_decode()
