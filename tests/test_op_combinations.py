"""The parameters that llama.cpp's and onnxruntime's own tests combine for these operations, in their conventions.

llama.cpp: GATED_DELTA_NET over heads, head sizes, tokens, sequences, repeated value heads (tiled), permuted inputs, scalar and
per-channel gates; SSM_CONV over widths, channels, tokens, sequences and both input orders.  onnxruntime: LinearAttention
(update rules "delta" and "gated_delta", [B, T, H * S] packed, states [key][value], interleaved heads, scale given or not,
with and without a past state) and CausalConvWithState (bias, activation, past state, channels first and last).
"""

import numpy as np
import pytest
from helpers import assert_close

import gdn


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("permuted", [False, True], ids=["plain", "permuted"])
@pytest.mark.parametrize(("heads", "S", "T", "n_seqs", "repeat"), [
    (32, 128, 1, 1, 1), (32, 16, 1, 1, 1), (16, 64, 1, 2, 1), (8, 32, 4, 2, 1), (4, 64, 4, 1, 1), (4, 64, 4, 2, 2),
    (4, 64, 33, 2, 2), (4, 128, 64, 1, 2), (2, 16, 65, 2, 3), (4, 32, 127, 1, 1), (2, 64, 128, 2, 2), (4, 16, 256, 1, 2),
    (2, 128, 100, 1, 4)])
def test_gated_delta_net_of_ggml(heads, S, T, n_seqs, repeat, permuted, kda):
    H_v = heads * repeat
    shapes = [(n_seqs, T, heads, S), (n_seqs, T, heads, S), (n_seqs, T, H_v, S), (n_seqs, T, H_v, S) if kda else (n_seqs, T, H_v),
              (n_seqs, T, H_v)]
    q, k, v, g, beta = (normal(i, *shape) for i, shape in enumerate(shapes))
    case = unit(q), unit(k), v, -np.abs(g), 1 / (1 + np.exp(-beta))
    state = normal(9, n_seqs, H_v, S, S)
    expected = gdn.reference.recurrent(*case, state, head_map="tiled")
    if permuted:                                    # heads before tokens in memory, as after ggml_permute(0, 2, 1, 3)
        case = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in case]
    for mode in ("auto", "recurrent", "chunked"):
        out, end = gdn.gated_delta_net(*case, state, head_map="tiled", mode=mode)
        assert_close(out, expected[0], mode)
        assert_close(end, expected[1], mode)
    K = min(4, T)
    states = []
    gdn.reference.recurrent(*case, state, head_map="tiled", states=states)
    _, kept = gdn.gated_delta_net(*case, state, head_map="tiled", snapshots=K)
    assert_close(kept, np.stack(states[::-1][:K]), "snapshots")


@pytest.mark.parametrize("order", ["tokens first", "channels first"])
@pytest.mark.parametrize("n_seqs", [1, 4])
@pytest.mark.parametrize("T", [1, 4, 5, 32, 64])
@pytest.mark.parametrize(("width", "channels"), [(3, 1024), (4, 1024), (4, 1536), (4, 2048), (9, 256), (2, 100), (4, 6)])
def test_ssm_conv_of_ggml(width, channels, T, n_seqs, order):
    """ggml's input is the window and the tokens in one tensor; here they are views of it."""
    x = normal(1, n_seqs, channels, width - 1 + T)
    x = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) if order == "channels first" else x
    weight = normal(2, channels, width)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), width, axis=2)
    expected = np.einsum("nctw,cw->ntc", windows, weight)
    out, state = gdn.causal_conv1d(x[:, :, width - 1:].swapaxes(1, 2), weight, None, x[:, :, :width - 1], activation=None)
    assert_close(out, expected, "out")
    assert np.array_equal(state, x[:, :, T:])


@pytest.mark.parametrize("past", [False, True], ids=["from zeros", "past"])
@pytest.mark.parametrize("scale", [None, 1.0, 0.25])
@pytest.mark.parametrize("rule", ["delta", "gated_delta", "gated_delta per channel"])
@pytest.mark.parametrize(("B", "T", "H_k", "H_v", "S_k", "S_v"), [
    (1, 1, 1, 1, 4, 4), (1, 4, 2, 2, 8, 8), (2, 3, 2, 4, 8, 16), (1, 70, 2, 4, 64, 64), (2, 65, 4, 4, 32, 64),
    (1, 33, 1, 8, 128, 128)])
def test_linear_attention_of_onnxruntime(B, T, H_k, H_v, S_k, S_v, rule, scale, past):
    packed = [normal(i, B, T, n) for i, n in enumerate((H_k * S_k, H_k * S_k, H_v * S_v, H_v * S_k, H_v))]
    q, k, v = (x.reshape(B, T, H, -1) for x, H in zip(packed[:3], (H_k, H_k, H_v), strict=True))
    g = {"delta": np.zeros((B, T, H_v), np.float32), "gated_delta": -np.abs(packed[4]),
         "gated_delta per channel": -np.abs(packed[3]).reshape(B, T, H_v, S_k)}[rule]
    case = q, unit(k), v, g, 1 / (1 + np.exp(-packed[4]))
    state = normal(7, B, H_v, S_k, S_v).swapaxes(-1, -2) if past else None
    expected = gdn.reference.recurrent(*case, state, scale=scale, head_map="interleaved")
    out, present = gdn.gated_delta_net(*case, state, scale=scale, head_map="interleaved")
    assert_close(out, expected[0], "out")
    assert_close(present, expected[1], "present")


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("bias", "past"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("B", "C", "T", "width"), [
    (1, 2, 4, 3), (2, 4, 1, 4), (2, 3, 5, 2), (1, 64, 2, 4), (2, 33, 70, 4), (1, 8, 9, 5)])
def test_causal_conv_with_state_of_onnxruntime(B, C, T, width, bias, past, activation, channels_last):
    x, weight, b = normal(1, B, T, C), normal(2, C, 1, width), normal(3, C) if bias else None
    x = x if channels_last else np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    state = normal(4, B, C, width - 1) if past else None
    whole = np.concatenate([np.zeros((B, C, width - 1)) if state is None else state, x.swapaxes(1, 2)], 2)
    expected = np.einsum("nctw,cw->ntc", np.lib.stride_tricks.sliding_window_view(whole, width, axis=2), weight[:, 0])
    expected = expected if b is None else expected + b
    expected = expected if activation is None else expected * gdn.reference.sigmoid(expected)
    out, present = gdn.causal_conv1d(x, weight[:, 0], b, state, activation=activation)
    assert_close(out, expected, "out")
    assert np.array_equal(present, whole[:, :, T:].astype(np.float32))
