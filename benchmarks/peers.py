"""The peers' calls on the inputs of shapes.py, each (call, out, state) with out and state in gdn's axes.

Whatever a peer needs its inputs to look like is prepared outside the call, so that only its own operation is timed.
"""

import importlib.metadata
import os

import numpy as np
import pytest

WHEELS = {"ggml": "libggml-python", "ik": "ik-llama-cpp-python", "onnxruntime": "onnxruntime", "torch": "torch",
          "transformers": "transformers"}


def versions():
    """Installed version of every peer; None for the absent."""
    found = {}
    for name, wheel in WHEELS.items():
        try:
            found[name] = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def present(name, make, *args):
    """make(*args); where the peer is not installed a skipped case that says so, under CI a failed one."""
    try:
        return make(*args)
    except ImportError as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{name} is absent: {missing}")


def arena(arrays, more=0):
    """Bytes for a ggml context that holds the arrays twice, and some."""
    return 2 * sum(a.nbytes for a in arrays) + more + (16 << 20)


def ggml_delta(shape, data, n_threads=1):
    from tests.peers import ggml
    ctx = ggml.load().context(arena(data))
    q, k, v, g, beta, state = data
    n_seqs, n_tokens = v.shape[:2]
    tensors = [ctx.array(x) for x in (q, k, v, g.reshape(*v.shape[:3], -1), beta[..., None], state)]
    packed = ctx.op("gated_delta_net", *tensors, 1)
    out, new = ggml.delta_net_result(packed, shape.S_v, shape.H_v, n_tokens, n_seqs)
    return ctx.graph(packed, n_threads=n_threads), out.numpy(), new.numpy()


def ik_delta(shape, data, n_threads=1):
    from tests.peers import ik
    ctx = ik.load().context(arena(data))
    out, new = ik_layer(ctx, shape, data, ctx.array(data[-1].swapaxes(-1, -2)))[1:]
    return ctx.graph(out, n_threads=n_threads), out.numpy(), new.numpy().swapaxes(-1, -2)


def ik_inputs(ctx, data):
    """q and k by head, v as it is, the gates' memory head-fastest behind permuted views, beta as logits."""
    q, k, v, g, beta, _ = data
    logit = np.log(beta) - np.log1p(-beta)
    by_head = [ctx.array(x.swapaxes(1, 2)) for x in (q, k)]
    return [*by_head, ctx.array(v).permute(0, 2, 1, 3), ctx.array(g[..., None]).permute(1, 2, 0, 3),
            ctx.array(logit[..., None]).permute(0, 2, 1, 3)]


def ik_layer(ctx, shape, data, state, inputs=None):
    from tests.peers import ik
    n_seqs, n_tokens = data[2].shape[:2]
    flat = state.view((shape.S_v, shape.S_k * shape.H_v, 1, n_seqs))
    packed = ctx.op("delta_net", *(inputs or ik_inputs(ctx, data)), flat)
    return packed, *ik.delta_net_result(packed, shape.S_v, shape.H_v, n_tokens, n_seqs)


def ggml_decode(shape, data, states, n_threads=1):
    """One token through every layer as llama.cpp's graph does it: the op, then the copy of its state into the cache.

    The op's result lies in the same buffer for every layer, as the graph allocator would have it.  Returns
    (call, out of the last layer, states).
    """
    from tests.peers import ggml
    ctx = ggml.load().context(arena(data, 2 * states.nbytes + len(states) * (4 << 20)))
    q, k, v, g, beta, _ = data
    tensors = [ctx.array(x) for x in (q, k, v, g.reshape(*v.shape[:3], -1), beta[..., None])]
    caches, results, buffer = [ctx.array(s) for s in states], [], None
    for cache in caches:
        packed = ctx.op("gated_delta_net", *tensors, cache, 1)
        buffer = buffer or packed.address
        out, new = ggml.delta_net_result(packed.place(buffer), shape.S_v, shape.H_v, 1, 1)
        results.append(ctx.op("cpy", new, cache))
    return ctx.graph(*results, n_threads=n_threads), out.numpy(), [c.numpy() for c in caches]


def ik_decode(shape, data, states, n_threads=1):
    """One token through every layer by ik's op alone, without a copy back; one result buffer for all layers."""
    from tests.peers import ik
    ctx = ik.load().context(arena(data, 2 * states.nbytes + len(states) * (4 << 20)))
    inputs, results, buffer = ik_inputs(ctx, data), [], None
    for s in states:
        state = ctx.array(s.swapaxes(-1, -2)).view((shape.S_v, shape.S_k * shape.H_v, 1, 1))
        packed = ctx.op("delta_net", *inputs, state)
        buffer = buffer or packed.address
        results.append(packed.place(buffer))
    out, new = ik.delta_net_result(results[-1], shape.S_v, shape.H_v, 1, 1)
    return ctx.graph(*results, n_threads=n_threads), out.numpy(), new.numpy().swapaxes(-1, -2)


def torch_delta(shape, data, n_threads=1):
    """transformers' torch functions, eager, with what they allocate themselves: chunked, one token recurrent."""
    import torch
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen
    if shape.kda:
        function = kimi.chunk_kimi_delta_attention if data[2].shape[1] > 1 else kimi.recurrent_kimi_delta_attention
    else:
        function = (qwen.torch_chunk_gated_delta_rule if data[2].shape[1] > 1
                    else qwen.torch_recurrent_gated_delta_rule)
    torch.set_num_threads(n_threads)
    q, k, v, g, beta = (torch.from_numpy(x) for x in data[:5])
    state = torch.from_numpy(np.ascontiguousarray(data[5].swapaxes(-1, -2)))
    out, new = np.empty_like(data[2]), np.empty_like(data[5]).swapaxes(-1, -2)

    @torch.inference_mode()
    def run():
        return function(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)

    first = run()
    out[...], new[...] = first[0].numpy(), first[1].numpy()
    return run, out, new.swapaxes(-1, -2)


def ort_delta(shape, data, n_threads=1, in_place=False):
    from benchmarks import ort
    return ort.linear_attention(shape, data, n_threads, in_place)


def ort_decode(shape, data, states, n_threads=1):
    """One token through every layer, each its own session with one value bound as state input and output."""
    layers = [ort_delta(shape, (*data[:5], state), n_threads, in_place=True) for state in states]

    def call():
        for layer, *_ in layers:
            layer()
    return call, *layers[-1][1:]


def ggml_conv(x, weight, state, n_threads=1):
    """concat, ssm_conv and silu on the transposed input, as llama.cpp's graph."""
    from tests.peers import ggml
    ctx = ggml.load().context(arena((x, state), 4 * x.nbytes))
    joined = ctx.op("concat", ctx.array(state), ctx.array(x).permute(1, 0, 2, 3), 0)
    out = ctx.op("silu", ctx.op("ssm_conv", joined, ctx.array(weight)))
    width, n_tokens = weight.shape[1], x.shape[1]
    return ctx.graph(out, n_threads=n_threads), out.numpy()[0], joined.numpy()[0][..., n_tokens:n_tokens + width - 1]


def ort_conv(x, weight, state, channels_last, n_threads=1):
    from benchmarks import ort
    return ort.causal_conv(x, weight, state, channels_last, n_threads)
