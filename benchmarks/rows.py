"""The rows of the target table: what each ratio is of, what is wanted, and how it is measured.

A row's function runs in a process of its own (BLAS pinned to one thread, GDN_LEVEL as the row says), checks the answer,
times, and returns (value, details).  ``python -m benchmarks.rows NAME`` does just that and prints JSON.
"""

import ctypes
import json
import statistics
import sys
from dataclasses import dataclass

import numpy as np

from benchmarks import allocations, layers, models, native, ours, peers
from benchmarks.check import check_conv, check_result
from benchmarks.pairs import best_of, compare, repeats, sample
from benchmarks.remote import Remote
from benchmarks.shapes import KIMI, QWEN, Shape, aligned, conv_inputs, inputs

ROWS = {}


@dataclass
class Row:
    name: str
    what: str
    target: float
    stretch: float | None
    at_least: bool          # larger is better
    unit: str
    level: str | None       # GDN_LEVEL of the row's process; None = the machine's best
    measure: object

    def verdict(self, value):
        def met(bound):
            return bound is not None and (value >= bound if self.at_least else value <= bound)
        return "stretch" if met(self.stretch) else "pass" if met(self.target) else "MISS"


def row(name, what, *, target, stretch=None, at_least, unit="x", level=None):
    def register(measure):
        ROWS[name] = Row(name, what, target, stretch, at_least, unit, level, measure)
        return measure
    return register


def times(p, **more):
    """A comparison's parts, in microseconds, as details of a row."""
    return {"a_us": round(p.a * 1e6, 2), "b_us": round(p.b * 1e6, 2), "pairs": p.n, **more}


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


# The token log -------------------------------------------------------------------------------------------------------

STEPS = 64


def repeated(call, n):
    def calls():
        for _ in range(n):
            call()
    return calls


@row("log-decode", "a decode step on 8 entries of a token log, 24 layers: time over x *= a", target=1.15, stretch=1.0,
     at_least=False)
def _():
    states = ours.layer_states(QWEN)
    p = compare(ours.log_decode(QWEN, states, 8), in_place_pass(states, 1))
    return p.ratio, times(p)


@row("log-mean", "64 such steps with folds (16 entries, 8 kept): time over as many x *= a", target=1.3, stretch=1.15,
     at_least=False)
def _():
    states = ours.layer_states(QWEN, n_rows=2)
    one = ours.layer_states(QWEN)
    p = compare(ours.log_decode(QWEN, states, ours.KEPT, n_steps=STEPS), repeated(in_place_pass(one, 1), STEPS))
    return p.ratio, times(p)


@row("log-planes", "the same steps over steps that write the next of 10 planes", target=0.7, stretch=0.6, at_least=False)
def _():
    log = ours.log_decode(QWEN, ours.layer_states(QWEN, n_rows=2), ours.KEPT, n_steps=STEPS)
    p = compare(log, ours.decode_planes(QWEN, ours.layer_states(QWEN, n_rows=10), STEPS))
    return p.ratio, times(p)


@row("log-drafts", "a step of 4 drafts on 8 entries, 24 layers: time over a single token", target=1.6, stretch=1.35,
     at_least=False)
def _():
    states = ours.layer_states(QWEN)
    p = compare(ours.log_decode(QWEN, states, 8, 4), ours.log_decode(QWEN, states, 8))
    flops = 16.0 * states.size
    sgemm = compare(sgemm_of(GEMM_FLOPS), sgemm_of(GEMM_FLOPS), budget=0.5)
    return p.ratio, times(p, products_at_sgemm_us=round(flops / GEMM_FLOPS * sgemm.a * 1e6, 1))


@row("log-tree", "a tree of 8 drafts, 24 layers: time over a chain of 8", target=1.15, stretch=1.05, at_least=False)
def _():
    states, tree = ours.layer_states(QWEN), np.array([[-1, 0, 0, 1, 1, 2, 2, 3]])
    p = compare(ours.log_decode(QWEN, states, 8, 8, parents=tree), ours.log_decode(QWEN, states, 8, 8))
    return p.ratio, times(p)


@row("checkpoints", "a prompt of 2048 tokens with a checkpoint every 256: time over without", target=1.06, stretch=1.03,
     at_least=False)
def _():
    p = compare(*(ours.prefill_checkpoints(QWEN, 2048, every) for every in (256, 0)))
    return p.ratio, times(p)


def bfloat16():
    from ml_dtypes import bfloat16 as dtype
    return dtype


def decode_narrow(dtype):
    p = compare(ours.decode(QWEN, ours.narrow_states(QWEN, dtype)), ours.decode(QWEN, ours.layer_states(QWEN)))
    return p.ratio, times(p)


@row("decode-bf16", "decode on bfloat16 states in place, 24 layers: time over float32 states", target=0.75, stretch=0.6,
     at_least=False)
def _():
    return decode_narrow(bfloat16())


@row("decode-f16", "the same on float16 states", target=0.75, stretch=0.6, at_least=False)
def _():
    return decode_narrow(np.float16)


@row("log-bf16", "64 decode steps on bfloat16 states and a token log, with folds: time over 64 in place on float32 states",
     target=0.85, stretch=0.7, at_least=False)
def _():
    log = ours.log_decode(QWEN, ours.narrow_states(QWEN, bfloat16(), 2), ours.KEPT, n_steps=STEPS)
    p = compare(log, repeated(ours.decode(QWEN, ours.layer_states(QWEN)), STEPS))
    return p.ratio, times(p)


@row("prefill-bf16", "prefill of 2048 tokens with bfloat16 q, k, v and out: time over float32's", target=1.03, stretch=0.97,
     at_least=False)
def _():
    q, k, v, *rest = inputs(QWEN, 2048)
    narrow = [aligned(x.shape, bfloat16()) for x in (q, k, v)]
    for x, y in zip(narrow, (q, k, v), strict=True):
        x[:] = y
    p = compare(ours.prefill(QWEN, 2048, data=(*narrow, *rest)), ours.prefill(QWEN, 2048))
    return p.ratio, times(p)


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


# Against the peers ----------------------------------------------------------------------------------------------------

PEER_BOUND = 1e-3       # of a peer's answer: it must compute the same thing, how exactly is its own affair


def over_peer(maker, shape, n_tokens, head_map, target):
    """How many times faster than a peer's call on the same numbers; beside it the rate that the target means here and
    that of sgemm, which no float32 method can pass by much."""
    data = inputs(shape, n_tokens)
    theirs, out, state = getattr(peers, maker)(shape, data)
    theirs()
    check_result(shape, data, out, state, head_map, PEER_BOUND)
    our = ours.prefill(shape, n_tokens, data=data, head_map=head_map)
    p = compare(theirs, our, least_pairs=3)
    gflops = shape.flops(n_tokens) / p.a / 1e9
    sgemm = compare(our, sgemm_of(GEMM_FLOPS), budget=1)
    return p.ratio, times(p, their_gflops=round(gflops, 1), gflops=round(gflops * p.a / p.b, 1),
                          target_gflops=round(gflops * target, 1), sgemm_gflops=round(GEMM_FLOPS / sgemm.b / 1e9, 1))


def peer_row(name, what, maker, shape, n_tokens, head_map, target, stretch=None, level=None):
    @row(name, what, target=target, stretch=stretch, at_least=True, level=level)
    def _():
        return over_peer(maker, shape, n_tokens, head_map, target)


peer_row("ggml-prefill", "GDN prefill, 2048 tokens, over ggml's op", "ggml_delta", QWEN, 2048, "tiled", 6, 8)
peer_row("ik-prefill", "GDN prefill, 2048 tokens, over ik's op", "ik_delta", QWEN, 2048, "interleaved", 4.5, 6)
peer_row("torch-prefill", "GDN prefill, 2048 tokens, over transformers' torch chunk", "torch_delta", QWEN, 2048,
         "interleaved", 6, 9)
peer_row("ort-prefill", "GDN prefill, 2048 tokens, over onnxruntime's LinearAttention", "ort_delta", QWEN, 2048,
         "interleaved", 2.4, 3)
peer_row("ggml-prefill-v3", "GDN prefill at level v3 over ggml's op", "ggml_delta", QWEN, 2048, "tiled", 3.5, 4.5, "v3")
peer_row("ik-prefill-v3", "GDN prefill at level v3 over ik's op", "ik_delta", QWEN, 2048, "interleaved", 2.5, 3.5, "v3")
peer_row("ggml-kda", "KDA prefill, 512 tokens, over ggml's op", "ggml_delta", KIMI, 512, "tiled", 5, 7)
peer_row("ort-kda", "KDA prefill, 512 tokens, over onnxruntime's", "ort_delta", KIMI, 512, "interleaved", 2.2, 2.8)
peer_row("torch-kda", "KDA prefill, 512 tokens, over transformers' torch KDA chunk", "torch_delta", KIMI, 512,
         "interleaved", 100)


def decode_over(maker, head_map):
    data, states = inputs(QWEN, 1), ours.layer_states(QWEN)
    theirs, out, _ = getattr(peers, maker)(QWEN, data, states)
    theirs()
    check_result(QWEN, (*data[:5], states[-1]), out, None, head_map, PEER_BOUND)
    p = compare(theirs, ours.decode(QWEN, states, head_map=head_map), settle=True)
    return p.ratio, times(p)


@row("ggml-decode", "decode, 24 layers, over ggml's op + the copy back into its cache", target=3.5, stretch=5,
     at_least=True)
def _():
    return decode_over("ggml_decode", "tiled")


@row("ik-decode", "decode, 24 layers, over ik's op", target=2.5, stretch=4, at_least=True)
def _():
    return decode_over("ik_decode", "interleaved")


@row("ort-decode", "decode, one layer hot, in place, over onnxruntime's in place", target=1, stretch=1.3, at_least=True)
def _():
    data, states = inputs(QWEN, 1), ours.layer_states(QWEN, n_layers=1)
    theirs, out, state = peers.ort_delta(QWEN, data, in_place=True)
    theirs()
    check_result(QWEN, data, out, state, "interleaved", PEER_BOUND)
    p = compare(theirs, ours.decode(QWEN, states, head_map="interleaved"))
    return p.ratio, times(p)


def conv_over(maker, *args, n_tokens=512):
    x, weight, state = conv_inputs(n_tokens)
    theirs, out, new = getattr(peers, maker)(x, weight, state, *args)
    theirs()
    check_conv(x, weight, state, out, new)
    p = compare(theirs, ours.conv(x, weight, state))
    return p.ratio, times(p)


@row("ggml-conv", "causal conv + SiLU, 8192 channels, 512 tokens, over ggml's concat + ssm_conv + silu", target=5,
     stretch=10, at_least=True)
def _():
    return conv_over("ggml_conv")


@row("ggml-conv-1", "the same of one token", target=1, at_least=True)
def _():
    return conv_over("ggml_conv", n_tokens=1)


def conv_over_ort(n_tokens):
    layouts = {name: conv_over("ort_conv", last, n_tokens=n_tokens)
               for name, last in (("channels first", 0), ("channels last", 1))}
    name = min(layouts, key=lambda n: layouts[n][0])
    return layouts[name][0], {**layouts[name][1], "layout": name}


@row("ort-conv", "causal conv + SiLU over onnxruntime's CausalConvWithState, its faster layout", target=4, stretch=6,
     at_least=True)
def _():
    return conv_over_ort(512)


@row("ort-conv-1", "the same of one token", target=1, at_least=True)
def _():
    return conv_over_ort(1)


# Whole layers ---------------------------------------------------------------------------------------------------------

def layer_rows(family):
    def over_transformers(n_tokens):
        theirs, our = layers.both_calls(family, n_tokens, 1)
        p = compare(theirs, our, least_pairs=3)
        return p.ratio, times(p)

    @row(f"layer-prefill-{family}", f"{family} layer, n_embd 2048, 512 tokens, over transformers' layer", target=1,
         at_least=True)
    def _():
        return over_transformers(512)

    @row(f"layer-decode-{family}", f"{family} layer, a decode step, over transformers' layer", target=1, at_least=True)
    def _():
        return over_transformers(1)

    @row(f"layer-beside-{family}", f"{family} layer: time outside the matmuls over the kernels' own, one token and 512, "
         "the worse", target=1.25, at_least=False)
    def _():
        layer, results, details = layers.our_layer(*layers.module(family)), [], {}
        for n_tokens in (1, 512):
            outside, kernels = layers.beside(layer, n_tokens)
            results.append(outside / kernels)
            details |= {f"{n_tokens} tok": round(outside / kernels, 3), f"a_us {n_tokens}": round(outside * 1e6, 1),
                        f"b_us {n_tokens}": round(kernels * 1e6, 1)}
        return max(results), details


for _family in layers.FAMILIES:
    layer_rows(_family)


# Whole models of transformers -----------------------------------------------------------------------------------------

def model_row(family, dtype, what, target, stretch=None):
    short = "" if dtype == "float32" else "-bf16"
    of = "prefill of 1024 tokens" if what == "prefill" else "decode step"

    @row(f"model-{what}-{family}{short}", f"{family} model, {dtype}, {of}: transformers' time over that with gdn installed",
         target=target, stretch=stretch, at_least=True)
    def _():
        p, bound = models.ratio(family, dtype, what)
        return p.ratio, times(p, ratio_of_free_layers=round(bound, 2))


for _row in (("qwen3_5", "float32", "prefill", 1.65, 1.75), ("qwen3_5", "float32", "step", 1.10, 1.15),
             ("qwen3_5", "bfloat16", "prefill", 1.08), ("qwen3_5", "bfloat16", "step", 1.04),
             ("kimi_linear", "float32", "prefill", 12, 13), ("kimi_linear", "float32", "step", 1),
             ("kimi_linear", "bfloat16", "prefill", 2.9), ("kimi_linear", "bfloat16", "step", 1)):
    model_row(*_row)


@row("model-share-qwen3_5", "qwen3_5 model, float32, prefill: time that is neither matmul, MLP nor full attention, gdn installed "
     "over transformers alone", target=0.2, stretch=0.15, at_least=False)
def _():
    stock, installed, value = models.share("qwen3_5", "float32")
    return value, {"stock_ms": round(stock * 1e3), "installed_ms": round(installed * 1e3)}


@row("alloc", "native allocations in a decode call with out given, after the first", target=0, at_least=False, unit="")
def _():
    return allocations.of_decode()


def main():
    try:
        value, details = ROWS[sys.argv[1]].measure()
    except ImportError as error:
        if (error.name or "").startswith("gdn"):
            raise
        print(json.dumps({"absent": str(error)}))
    else:
        print(json.dumps({"value": value, "details": details}))


if __name__ == "__main__":
    main()
