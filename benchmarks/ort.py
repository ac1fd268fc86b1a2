"""onnxruntime's LinearAttention and CausalConvWithState, one node a session, on bound 64-byte-aligned buffers.

Unaligned buffers cost it half its speed, and copies in and out would be counted against it: so everything is bound once
and a call is ``run_with_iobinding`` alone.  Its conventions: [B, T, H*S] packed, state [B, H_v, key, value], log decay,
beta after the sigmoid, heads interleaved, scale 1/sqrt(S_k).
"""

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from benchmarks.shapes import aligned

DOMAIN = "com.microsoft"


def session(op, inputs, outputs, n_threads, **attributes):
    names = ([name for name, _ in arrays] for arrays in (inputs, outputs))
    node = helper.make_node(op, *names, domain=DOMAIN, **attributes)

    def infos(arrays):
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, a.shape) for name, a in arrays if name]

    graph = helper.make_graph([node], op, infos(inputs), infos(outputs))
    model = helper.make_model(graph, ir_version=10, opset_imports=[
        helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)])
    onnx.checker.check_model(model, check_custom_domain=False)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = n_threads, 1
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def bound(op, inputs, outputs, n_threads, **attributes):
    """A callable that runs the node on the arrays of inputs and outputs, (name, array) lists, and nothing else."""
    s = session(op, inputs, outputs, n_threads, **attributes)
    binding = s.io_binding()
    for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, a in arrays:
            if name:
                bind(name, "cpu", 0, np.float32, a.shape, a.ctypes.data)

    def call(_keep=(s, inputs, outputs)):
        s.run_with_iobinding(binding)
    return call


def own(x):
    copy = aligned(x.shape)
    copy[...] = x
    return copy


def linear_attention(shape, data, n_threads=1, in_place=False):
    """(call, out, state), the last two in gdn's axes; in_place binds one value as both state input and output."""
    q, k, v, g, beta, state = data
    B, T = v.shape[:2]
    packed = [own(x.reshape(B, T, -1)) for x in (q, k, v)]
    past = own(state.swapaxes(-1, -2))
    out, present = aligned(packed[2].shape), past if in_place else aligned(past.shape)
    call = bound("LinearAttention",
                 [*zip("qkv", packed, strict=True), ("past", past), ("decay", own(g.reshape(B, T, -1))),
                  ("beta", own(beta.reshape(B, T, -1)))], [("out", out), ("present", present)], n_threads,
                 q_num_heads=shape.H_k, kv_num_heads=shape.H_v, update_rule="gated_delta")
    return call, out.reshape(v.shape), present.swapaxes(-1, -2)


def causal_conv(x, weight, state, channels_last, n_threads=1):
    """(call, out, state): x, out (n_seqs, n_tokens, channels) in gdn's axes, whichever layout it computes in."""
    swap = (lambda a: a) if channels_last else (lambda a: a.swapaxes(1, 2))
    x, past = own(swap(x)), own(swap(state.swapaxes(1, 2)))
    out, present = aligned(x.shape), aligned(past.shape)
    call = bound("CausalConvWithState", [("x", x), ("w", own(weight[:, None])), ("", None), ("past", past)],
                 [("out", out), ("present", present)], n_threads, activation="silu", channels_last=channels_last)
    return call, swap(out), swap(present).swapaxes(1, 2)
