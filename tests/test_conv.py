"""The causal convolution against float64: widths, splits, snapshots, rows, strides, aliasing, recorded layers."""

import numpy as np
import pytest
from helpers import DATA, Carved, assert_close, random_layout, same_bits

import gdn
from gdn import reference


def truth(x, weight, bias=None, state=None, activation="silu"):
    """(out, every input with the carried ones in front) in float64."""
    n, T, C = x.shape
    width = weight.shape[1]
    carried = np.zeros((n, C, width - 1)) if state is None else np.asarray(state, np.float64)
    inputs = np.concatenate([np.swapaxes(carried, 1, 2), x], 1).astype(np.float64)
    y = sum(inputs[:, w:w + T] * weight[:, w].astype(np.float64) for w in range(width))
    y = y + (0 if bias is None else bias)
    return (y * reference.sigmoid(y) if activation == "silu" else y), inputs


def window(inputs, T, slot, width):
    """The state s tokens before the end."""
    return np.swapaxes(inputs[:, T - slot:T - slot + width - 1], 1, 2)


def make(rng, n=2, T=9, C=21, width=4):
    f = np.float32
    return (rng.standard_normal((n, T, C)).astype(f), rng.standard_normal((C, width)).astype(f),
            rng.standard_normal(C).astype(f), rng.standard_normal((n, C, width - 1)).astype(f))


@pytest.mark.parametrize("width", [*range(1, 10), 17, 18, 40])
@pytest.mark.parametrize("C", [1, 16, 37, 200])
@pytest.mark.parametrize("activation", ["silu", None])
def test_widths(rng, width, C, activation):
    for T in (0, 1, 2, 3, 15, 16, 17, 40):
        x, weight, bias, state = make(rng, 2, T, C, width)
        for b, s in ((bias, state), (None, None)):
            out, new = gdn.causal_conv1d(x, weight, b, s, activation=activation, snapshots=3)
            ref, inputs = truth(x, weight, b, s, activation)
            assert_close(out, ref, "out")
            assert new.shape[0] == max(1, min(3, T))
            for slot in range(new.shape[0]):
                assert np.array_equal(new[slot], window(inputs, T, slot, width))


@pytest.mark.parametrize("split", [(9,), (1, 8), (2, 7), (1, 1, 1, 6), (0, 9, 0)])
def test_split_calls_equal_one(rng, split):
    x, weight, bias, state = make(rng)
    whole, end = gdn.causal_conv1d(x, weight, bias, state)
    parts, start = [], 0
    for n in split:
        part, state = gdn.causal_conv1d(x[:, start:start + n], weight, bias, state)
        parts.append(part)
        start += n
    assert same_bits(np.concatenate(parts, 1), whole) and same_bits(state, end)


def test_snapshots_beyond_a_sequence_stay_untouched(rng):
    x, weight, bias, state = make(rng, n=3, T=5)
    cu = [0, 0, 4, 5]
    kept = np.full((4, 3, 21, 3), 7, np.float32)
    out, result = gdn.causal_conv1d(x[:1], weight, bias, state, cu_seqlens=cu, snapshots=4, state_out=kept)
    assert result is kept
    allocated = gdn.causal_conv1d(x[:1], weight, bias, state, cu_seqlens=cu, snapshots=4)[1]
    for i in range(3):
        part = x[:1, cu[i]:cu[i + 1]]
        ref, inputs = truth(part, weight, bias, state[i:i + 1])
        assert_close(out[:, cu[i]:cu[i + 1]], ref, "out")
        for slot in range(4):
            exists = slot == 0 or slot < part.shape[1]
            expected = window(inputs, part.shape[1], slot, 4)[0] if exists else None
            assert np.array_equal(kept[slot, i], expected if exists else np.full((21, 3), 7))
            assert np.array_equal(allocated[slot, i], expected if exists else np.zeros((21, 3)))


def test_rows_forked_swapped_and_padded(rng):
    x, weight, bias, _ = make(rng, n=4, T=3)
    cache = rng.standard_normal((7, 21, 3)).astype(np.float32)
    old = cache.copy()
    rows_in, rows_out = [1, 0, 0, -1], [[0, 2], [1, -1], [3, 4], [-1, -1]]
    out = gdn.causal_conv1d_inplace(x, weight, bias, cache, rows_in, rows_out)
    start = np.concatenate([old[[1, 0, 0]], np.zeros((1, 21, 3), np.float32)])
    ref, inputs = truth(x, weight, bias, start)
    assert_close(out, ref, "out")
    for i in range(4):
        for slot in range(2):
            if rows_out[i][slot] >= 0:
                assert np.array_equal(cache[rows_out[i][slot]], window(inputs, 3, slot, 4)[i])
    assert same_bits(cache[5:], old[5:])


@pytest.mark.parametrize("rows_in, rows_out, error", [
    ([0, 9], None, IndexError), ([0, -2], None, IndexError), ([0, 1], [0, 9], IndexError), ([0, 1], [2, 2], ValueError),
    ([0], None, ValueError), ([0.0, 1.0], None, TypeError), ([0, 1], [[0], [1], [2]], ValueError)])
def test_bad_rows(rng, rows_in, rows_out, error):
    x, weight, bias, _ = make(rng)
    cache = rng.standard_normal((5, 21, 3)).astype(np.float32)
    old, out = cache.copy(), np.full(x.shape, 3, np.float32)
    with pytest.raises(error, match="rows"):
        gdn.causal_conv1d_inplace(x, weight, bias, cache, rows_in, rows_out, out=out)
    assert same_bits(cache, old) and (out == 3).all()


@pytest.mark.parametrize("seed", range(30))
def test_any_strides(seed):
    rng = np.random.default_rng(seed)
    arrays = make(rng, n=2, T=int(rng.integers(1, 20)), C=int(rng.integers(1, 50)), width=int(rng.integers(1, 6)))
    carved = [Carved(a, **(random_layout(rng, a.ndim) | {"zeros": []})) for a in arrays]
    out = Carved(shape=arrays[0].shape, **random_layout(rng, 3, output=True))
    state = Carved(shape=arrays[3].shape, **random_layout(rng, 3, output=True))
    gdn.causal_conv1d(*(c.array for c in carved), out=out.array, state_out=state.array)
    plain, end = gdn.causal_conv1d(*arrays)
    assert same_bits(out.array, plain) and same_bits(state.array, end)
    assert all(c.intact() for c in (*carved, out, state))


def test_in_place_and_tokens_contiguous(rng):
    x, weight, bias, state = make(rng, T=40, C=64)
    out, end = gdn.causal_conv1d(x, weight, bias, state)
    y, s = x.copy(), state.copy()
    assert gdn.causal_conv1d(y, weight, bias, s, out=y, state_out=s)[0] is y
    assert same_bits(y, out) and same_bits(s, end)
    turned = np.ascontiguousarray(np.swapaxes(x, 1, 2)).swapaxes(1, 2)
    assert same_bits(gdn.causal_conv1d(turned, weight, bias, state)[0], out)


def test_threads_do_not_change_bits(rng):
    x, weight, bias, state = make(rng, n=2, T=60, C=1000)
    results = [gdn.causal_conv1d(x, weight, bias, state, n_threads=n) for n in (1, 2, 3, 7)]
    assert all(same_bits(a, results[0][0]) and same_bits(b, results[0][1]) for a, b in results)


def test_nan_stays_in_its_channel_and_window(rng):
    x, weight, bias, state = make(rng, T=20)
    clean = gdn.causal_conv1d(x, weight, bias, state)[0]
    x[0, 8, 3] = np.nan
    out = gdn.causal_conv1d(x, weight, bias, state)[0]
    bad = np.zeros(out.shape, bool)
    bad[0, 8:12, 3] = True
    assert np.isnan(out[bad]).all() and same_bits(out[~bad], clean[~bad])


def bad_calls():
    wide = np.zeros((2, 21, 6), np.float32)
    return {
        "state of w + 3": (lambda a: {"state": wide}, ValueError, "state"),
        "state of w": (lambda a: {"state": np.zeros((2, 21, 4), np.float32)}, ValueError, "state"),
        "state of one sequence": (lambda a: {"state": a["state"][:1]}, ValueError, "state"),
        "weight of other channels": (lambda a: {"weight": a["weight"][1:]}, ValueError, "weight"),
        "weight of width 0": (lambda a: {"weight": a["weight"][:, :0], "state": None}, ValueError, "weight"),
        "weight flat": (lambda a: {"weight": a["weight"].ravel()}, ValueError, "weight"),
        "bias too long": (lambda a: {"bias": np.zeros(22, np.float32)}, ValueError, "bias"),
        "bias two axes": (lambda a: {"bias": np.zeros((21, 1), np.float32)}, ValueError, "bias"),
        "x two axes": (lambda a: {"x": a["x"][0]}, ValueError, "x"),
        "x float64": (lambda a: {"x": a["x"].astype(float)}, TypeError, "x"),
        "weight float16": (lambda a: {"weight": a["weight"].astype(np.float16)}, TypeError, "weight"),
        "bias int": (lambda a: {"bias": np.zeros(21, np.int32)}, TypeError, "bias"),
        "state list": (lambda a: {"state": a["state"].tolist()}, TypeError, "state"),
        "activation relu": (lambda a: {"activation": "relu"}, ValueError, "activation"),
        "activation sigmoid": (lambda a: {"activation": "sigmoid"}, ValueError, "activation"),
        "snapshots 0": (lambda a: {"snapshots": 0}, ValueError, "snapshots"),
        "snapshots 1.5": (lambda a: {"snapshots": 1.5}, TypeError, "snapshots"),
        "n_threads 0": (lambda a: {"n_threads": 0}, ValueError, "n_threads"),
        "cu_seqlens": (lambda a: {"cu_seqlens": [0, 5, 9]}, ValueError, "cu_seqlens"),
        "out too small": (lambda a: {"out": np.zeros((2, 8, 21), np.float32)}, ValueError, "out"),
        "out broadcast": (lambda a: {"out": np.lib.stride_tricks.as_strided(np.zeros(21, np.float32), (2, 9, 21),
                                                                            (0, 0, 4))}, ValueError, "out"),
        "out is half x": (lambda a: {"x": a["big"][:, :9], "out": a["big"][:, 1:10]}, ValueError, "out"),
        "state_out shifted": (lambda a: {"state": a["pool"][:2], "state_out": a["pool"][1:]}, ValueError, "state_out"),
        "state_out too small": (lambda a: {"state_out": np.zeros((2, 21, 2), np.float32)}, ValueError, "state_out"),
        "too few slots": (lambda a: {"snapshots": 3, "state_out": np.zeros((2, 2, 21, 3), np.float32)}, ValueError,
                          "snapshots"),
        "unaligned": (lambda a: {"x": np.frombuffer(bytearray(2 * 9 * 21 * 4 + 1), np.uint8)[1:].view(np.float32)
                                 .reshape(2, 9, 21)}, ValueError, "x"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_bad_input(rng, name):
    spoil, error, word = bad_calls()[name]
    x, weight, bias, state = make(rng)
    a = {"x": x, "weight": weight, "bias": bias, "state": state, "big": rng.standard_normal((2, 10, 21), np.float32),
         "pool": rng.standard_normal((3, 21, 3), np.float32)}
    call = {k: a[k] for k in ("x", "weight", "bias", "state")} | {"out": np.full(x.shape, 3, np.float32)} | spoil(a)
    before = {k: v.copy() for k, v in call.items() if isinstance(v, np.ndarray)}
    with pytest.raises(error, match=word):
        gdn.causal_conv1d(**call)
    assert all(np.array_equal(call[k], v, equal_nan=True) for k, v in before.items())
    assert_close(gdn.causal_conv1d(x, weight, bias, state)[0], truth(x, weight, bias, state)[0], "the next call")


def check_overlap(function, output, other, **arguments):
    """Laid one over the other, the two are refused and nothing is written."""
    memory = np.zeros(max(arguments[n].nbytes for n in (output, other)) // 4, np.float32)
    for name in (output, other):
        x = arguments[name]
        arguments[name] = memory[:x.nbytes // 4].view(x.dtype).reshape(x.shape)
        arguments[name][...] = x
    before = {name: x.copy() for name, x in arguments.items()}
    with pytest.raises(ValueError, match=f"{output} overlaps {other}"):
        function(**arguments)
    assert all(np.array_equal(arguments[name], x) for name, x in before.items())


@pytest.mark.parametrize("output, other", [
    *(("out", name) for name in ("weight", "bias", "state", "cu_seqlens")),
    *(("state_out", name) for name in ("x", "weight", "bias", "out", "cu_seqlens"))])
def test_overlaps(rng, output, other):
    x, weight, bias, state = make(rng)
    check_overlap(gdn.causal_conv1d, output, other, x=x[:1], weight=weight, bias=bias, state=state,
                  cu_seqlens=np.array([0, 4, 9]), out=x[1:], state_out=state.copy())


@pytest.mark.parametrize("output, other", [
    *(("out", name) for name in ("cache", "rows_in", "rows_out", "cu_seqlens")),
    *(("cache", name) for name in ("x", "weight", "bias", "rows_in", "rows_out", "cu_seqlens"))])
def test_overlaps_in_place(rng, output, other):
    x, weight, bias, cache = make(rng)
    check_overlap(gdn.causal_conv1d_inplace, output, other, x=x[:1], weight=weight, bias=bias, cache=cache,
                  rows_in=np.array([1, 0]), rows_out=np.array([0, 1]), cu_seqlens=np.array([0, 4, 9]), out=x[1:])


def test_read_only(rng):
    x, weight, bias, state = make(rng)
    for a in (x, weight, bias, state):
        a.flags.writeable = False
    gdn.causal_conv1d(x, weight, bias, state)
    with pytest.raises(ValueError, match="out.*read-only"):
        gdn.causal_conv1d(x, weight, bias, state, out=x)
    with pytest.raises(ValueError, match="state_out.*read-only"):
        gdn.causal_conv1d(x, weight, bias, state, state_out=state)
    with pytest.raises(ValueError, match="cache.*read-only"):
        gdn.causal_conv1d_inplace(x, weight, bias, state, [0, 1])


@pytest.mark.parametrize("model", ["qwen3next", "qwen35", "kimi", "olmo"])
def test_recorded_layers(model):
    d = np.load(DATA / f"{model}.npz")
    names = [k for k in d.files if "conv1d.weight" in k]
    order = sorted(names, key=lambda k: "qkv".find(k.split("_conv1d")[0][-1]) if "_conv1d" in k else 0)
    weight = np.concatenate([d[k].reshape(-1, d[k].shape[-1]) for k in order])
    if model == "qwen3next":
        H_k, S, r = 2, 64, 2
        part = np.split(d["mixed_qkvz"].reshape(1, 75, H_k, -1), [S, 2 * S, 2 * S + r * S], -1)[:3]
        x = np.concatenate([p.reshape(1, 75, -1) for p in part], -1)
    else:
        x = d["mixed_qkv"]
    out, state = gdn.causal_conv1d(np.ascontiguousarray(x), weight, snapshots=6)
    assert_close(out, d["conv_out"], "conv_out")
    assert_close(state[0], d["conv_state_final"][..., -3:], "conv_state_final")
    assert_close(state[5], d["conv_state_prefill"][..., -3:], "conv_state_prefill")
