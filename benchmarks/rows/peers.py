"""Rows of the kernels against other implementations of them."""

from benchmarks import ours, peers
from benchmarks.check import check_conv, check_result
from benchmarks.pairs import compare
from benchmarks.rows.kernels import GEMM_FLOPS, sgemm_of
from benchmarks.rows.table import row, times
from benchmarks.shapes import KIMI, QWEN, conv_inputs, inputs

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
