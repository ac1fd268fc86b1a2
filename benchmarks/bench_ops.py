"""Every operation on every shape by every implementation: pytest-benchmark cases in groups `operation-shape`.

A case checks its answer, then times it.  Time is per call; ``extra_info`` carries the rate, the bytes that it moves,
the level and the CPU.  A combination that a peer does not compute (ik: KDA and heads other than 64 and 128; ggml:
S_k != S_v) is no case; a peer that is not installed is a skipped case that says so, under CI a failed one.
A level's calls run and are timed in a process of their own: the way there is not counted.
"""

import pytest
from threadpoolctl import threadpool_limits

from benchmarks import ours, peers
from benchmarks.check import check_conv, check_result
from benchmarks.machine import cpu_name, level, levels
from benchmarks.remote import Remote, clock
from benchmarks.rows.kernels import sgemm_of
from benchmarks.rows.peers import PEER_BOUND
from benchmarks.shapes import QWEN, SHAPES, conv_inputs, inputs

THREADS = (1, 2)
PREFILL = 512
CONV = 512
TIME = 0.6              # seconds a case is timed, about
GDN = [f"gdn-{level}" for level in levels()]

pytestmark = pytest.mark.benchmark(timer=clock)


def computes(name, shape):
    if name == "ik":
        return not shape.kda and shape.S_k == shape.S_v and shape.S_k in (64, 128)
    return name != "ggml" or shape.S_k == shape.S_v


def cases(*implementations):
    return [pytest.param(shape, name, n_threads, id=f"{shape.name}-{name}-{n_threads}")
            for shape in SHAPES.values() for name in implementations if computes(name, shape) for n_threads in THREADS]


def timed(benchmark, call, **info):
    """As many rounds as fit in TIME, three at least."""
    call()
    start = clock()
    call()
    once = clock() - start
    benchmark.pedantic(call, rounds=max(3, min(200, int(TIME / once))))
    seconds = benchmark.stats.stats.median
    benchmark.extra_info.update({"cpu": cpu_name()}, **{
        k: v / seconds / 1e9 if k.endswith("_per_s") else v for k, v in info.items()})


def delta_call(name, shape, n_tokens, n_threads):
    """A checked call of one token or many."""
    data = inputs(shape, n_tokens)
    call, out, state = peers.present(name, getattr(peers, {"onnxruntime": "ort"}.get(name, name) + "_delta"), shape, data,
                               n_threads)
    call()
    check_result(shape, data, out, state, "tiled" if name == "ggml" else "interleaved", PEER_BOUND)
    return call


@pytest.mark.parametrize("shape, name, n_threads", cases(*GDN, "sgemm", "onnxruntime", "ggml", "ik", "torch"))
def test_prefill(benchmark, shape, name, n_threads):
    """``PREFILL`` tokens on a given state.  sgemm: one product of as many flops."""
    benchmark.group = f"prefill{PREFILL}-{shape.name}"
    flops = shape.flops(PREFILL)
    info = {"gflop_per_s": flops, "n_threads": n_threads, "bytes": 2 * shape.state_bytes + 4 * PREFILL * (
        2 * shape.H_k * shape.S_k + 2 * shape.H_v * shape.S_v)}
    if name == "sgemm":
        with threadpool_limits(n_threads, "blas"):
            timed(benchmark, sgemm_of(flops), **info)
    elif name in GDN:
        with Remote(name[4:], "prefill", shape.name, PREFILL, n_threads) as call:
            timed(benchmark, call, level=name[4:], **info)
    else:
        timed(benchmark, delta_call(name, shape, PREFILL, n_threads), **info)


@pytest.mark.parametrize("shape, name, n_threads", cases(*GDN, "onnxruntime", "ggml", "ik"))
def test_decode(benchmark, shape, name, n_threads):
    """One token through the states of ``ours.LAYERS`` layers.  bytes: one read and one write of them, which is what gdn
    moves; ggml moves the copy besides, ik writes another place than it reads."""
    benchmark.group = f"decode-{shape.name}"
    moved = 2 * shape.state_bytes * ours.LAYERS
    info = {"gb_per_s": moved, "bytes": moved, "n_threads": n_threads}
    if name in GDN:
        with Remote(name[4:], "decode_layers", shape.name, n_threads) as call:
            timed(benchmark, call, level=name[4:], **info)
        return
    data, states = inputs(shape, 1), ours.layer_states(shape)
    maker = getattr(peers, {"onnxruntime": "ort"}.get(name, name) + "_decode")
    call, out, _ = peers.present(name, maker, shape, data, states, n_threads)
    call()
    check_result(shape, (*data[:5], states[-1]), out, None, "tiled" if name == "ggml" else "interleaved", PEER_BOUND)
    timed(benchmark, call, **info)


@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize("name", ["gdn", "onnxruntime-first", "onnxruntime-last", "ggml"])
def test_conv(benchmark, name, n_threads):
    """Causal convolution and SiLU over ``CONV`` tokens, 8192 channels, width 4."""
    benchmark.group = f"conv{CONV}-{QWEN.name}"
    x, weight, state = conv_inputs(CONV)
    moved = 2 * x.nbytes
    if name == "gdn":
        call = ours.conv(x, weight, state, n_threads=n_threads)
        call.check()
        benchmark.extra_info["level"] = level()
    else:
        arguments = (x, weight, state) if name == "ggml" else (x, weight, state, int(name.endswith("last")))
        call, out, new = peers.present(name, peers.ggml_conv if name == "ggml" else peers.ort_conv, *arguments, n_threads)
        call()
        check_conv(x, weight, state, out, new)
    timed(benchmark, call, gb_per_s=moved, bytes=moved, n_threads=n_threads)
