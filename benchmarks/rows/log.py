"""Rows of token logs, checkpoints and narrow element types."""

import numpy as np

from benchmarks import ours
from benchmarks.pairs import compare
from benchmarks.rows.kernels import GEMM_FLOPS, in_place_pass, sgemm_of
from benchmarks.rows.table import row, times
from benchmarks.shapes import QWEN, aligned, inputs

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
