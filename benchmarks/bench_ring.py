"""What the state ring costs: bookkeeping from Python and from C, rollback, and a decode through it.

    python -m pytest benchmarks/bench_ring.py
"""

import ctypes

import numpy as np
import pytest

import gdn
from benchmarks import native
from benchmarks.pairs import best_of
from benchmarks.shapes import QWEN, inputs

SEQUENCES = 64
SMALL = dict(n_layers=1, H_k=2, H_v=2, S_k=8, S_v=8, conv_channels=8, conv_width=4)
FORMS = {"in place": dict(n_rollback=0), "planes": dict(n_rollback=4), "log": dict(n_rollback=8, form="log")}


def full_ring(n_rollback, n_slots=SEQUENCES, **extents):
    ring = gdn.StateRing.create(n_slots, n_rollback, **(extents or SMALL))
    for seq_id in range(n_slots):
        ring.acquire(1000 + 7 * seq_id)
    return ring, [1000 + 7 * seq_id for seq_id in range(n_slots)]


@pytest.mark.parametrize("kind", ["list", "array"])
@pytest.mark.parametrize("form", FORMS)
def test_begin_commit_from_python(benchmark, form, kind):
    """64 sequences, one token each: under 50 microseconds, 60 with a log."""
    benchmark.group = "ring: begin + commit of 64 sequences"
    ring, ids = full_ring(**FORMS[form], **SMALL)
    sizes = [1] * SEQUENCES
    if kind == "array":
        ids, sizes = np.array(ids), np.array(sizes)
    benchmark(lambda: ring.begin(ids, sizes).commit(written=True))
    assert ring.position(1000) > 100
    assert benchmark.stats.stats.median < (60e-6 if form == "log" else 50e-6)


@pytest.mark.parametrize("form", FORMS)
def test_begin_commit_from_c(benchmark, form):
    """The same through the table: under 6 microseconds.  The benchmark's own column is 20000 pairs."""
    benchmark.group = "ring: begin + commit of 64 sequences"
    ring, ids = full_ring(**FORMS[form], **SMALL)
    call = native.load("ring_calls.c", f"-I{gdn.get_include()}").begin_commit
    call.restype = ctypes.c_double
    arrays = [np.array(ids, np.int64), np.ones(SEQUENCES, np.int64), np.empty(SEQUENCES, np.int64),
              np.empty((SEQUENCES, 1), np.int64), np.empty((SEQUENCES, 16 + 1 + 3), np.int64)]
    seq_ids, n_tokens, rows_in, rows_out, lists = (ctypes.c_void_p(a.ctypes.data) for a in arrays)
    seconds = benchmark.pedantic(lambda: call(
        ctypes.c_void_p(gdn.capi), ctypes.c_void_p(ring.address), seq_ids, n_tokens, ctypes.c_int64(SEQUENCES), rows_in,
        rows_out, ctypes.c_int64(1), lists, 20), rounds=3)
    benchmark.extra_info["seconds_a_pair"] = seconds
    print(f"{seconds * 1e6:.2f} us a pair")
    assert 0 < seconds < 6e-6


@pytest.mark.parametrize("n_embd_s", [64, 1 << 20])
def test_rollback_moves_no_state(benchmark, n_embd_s):
    """Equally long whatever the states' size, and no byte behind the header's tables changes."""
    benchmark.group = "ring: rollback of one token"
    side = int(n_embd_s ** 0.5)
    ring, (seq_id, *_) = full_ring(4, 1, n_layers=4, H_v=1, S_k=side, S_v=side)
    before = [ring.ssm(layer).numpy().copy() for layer in range(4)]

    def again():
        ring.begin([seq_id], [1]).commit(written=True)
        return (seq_id, 1), {}

    benchmark.pedantic(ring.rollback, setup=again, rounds=200)
    assert all((ring.ssm(layer).numpy() == x).all() for layer, x in enumerate(before))
    assert benchmark.stats.stats.median < 20e-6


@pytest.mark.parametrize("n_seqs", [1, 4])
def test_decode_through_a_log(benchmark, n_seqs):
    """One token of 24 layers with 8 tokens of rollback: at most 1.05 times the same calls on lists of one's own."""
    n_layers = 24
    ring, ids = full_ring(8, n_seqs, n_layers=n_layers, H_k=QWEN.H_k, H_v=QWEN.H_v, S_k=QWEN.S_k, S_v=QWEN.S_v, form="log")
    q, k, v, g, beta = (np.repeat(x[:1], n_seqs, 0) for x in inputs(QWEN, 1)[:5])
    out, ones = np.empty_like(v), np.ones(n_seqs, np.int64)
    caches, logs = [ring.ssm(layer) for layer in range(n_layers)], [ring.log(layer) for layer in range(n_layers)]

    def layers(rows_in, log_in, log_out, checkpoints):
        for cache, log in zip(caches, logs, strict=True):
            gdn.gated_delta_net_inplace(q, k, v, g, beta, cache, rows_in, head_map="interleaved", out=out, n_threads=1, log=log,
                                        log_in=log_in, log_out=log_out, checkpoints=checkpoints)

    lists = []                                  # of eight steps, from one fold to the next

    def through():
        for _ in range(8):
            step = ring.begin(ids, ones)
            lists.append((step.rows_in, step.log_in, step.log_out, step.checkpoints))
            layers(*lists[-1])
            step.commit(written=True)

    def bare():
        for given in lists[-8:]:
            layers(*given)

    for _ in range(3):
        through()
    pairs = best_of(3, through, bare, 6.0)
    benchmark.group = "ring: decode of 24 layers"
    benchmark.pedantic(through, rounds=5)
    benchmark.extra_info["over_bare_calls"] = pairs.ratio
    print(f"{pairs.ratio:.3f} times the bare calls ({pairs.a / 8e-3:.2f} ms a token against {pairs.b / 8e-3:.2f} ms)")
    assert pairs.ratio <= 1.05


@pytest.mark.parametrize("n_seqs", [1, 4])
def test_decode_through_the_ring(benchmark, n_seqs):
    """One token of Qwen3-Next's 24 layers: at most 1.05 times the in-place calls alone on the same rows."""
    n_layers = 24
    ring, ids = full_ring(0, n_seqs, n_layers=n_layers, H_v=QWEN.H_v, S_k=QWEN.S_k, S_v=QWEN.S_v)
    q, k, v, g, beta = (np.repeat(x[:1], n_seqs, 0) for x in inputs(QWEN, 1)[:5])
    out = np.empty_like(v)
    caches = [ring.ssm(layer) for layer in range(n_layers)]
    rows, ones = np.arange(n_seqs), np.ones(n_seqs, np.int64)

    def layers(rows_in, rows_out):
        for cache in caches:
            gdn.gated_delta_net_inplace(q, k, v, g, beta, cache, rows_in, rows_out, head_map="interleaved", out=out,
                                        n_threads=1)

    def through():
        step = ring.begin(ids, ones)
        layers(step.rows_in, step.rows_out)
        step.commit(written=True)

    through()
    expected = out.copy()
    ring.reset(ids[0])
    for seq_id in ids[1:]:
        ring.reset(seq_id)
    layers(rows, rows)
    assert (out == expected).all()
    pairs = best_of(3, through, lambda: layers(rows, rows), 6.0)
    benchmark.group = "ring: decode of 24 layers"
    benchmark.pedantic(through, rounds=5)
    benchmark.extra_info["over_bare_calls"] = pairs.ratio
    print(f"{pairs.ratio:.3f} times the bare calls ({pairs.a * 1e3:.2f} ms against {pairs.b * 1e3:.2f} ms)")
    assert pairs.ratio <= 1.05
