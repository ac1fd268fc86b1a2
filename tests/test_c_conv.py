"""The convolution through the table: states in either form, rows, packed lengths, slots, refusals."""

from ctypes import byref, c_size_t

import numpy as np
import pytest
from c_tools import (
    NULL,
    REFUSED,
    SCRATCH,
    SHAPE,
    STRIDE,
    TYPE,
    VALUE,
    ConvArgs,
    ConvCall,
    check_refusal,
    spoiled,
)
from helpers import Carved, assert_close, same_bits
from test_conv import make, truth, window

import gdn

TENSORS = ConvArgs.TENSORS
NONE, SILU, SIGMOID = range(3)


def rows_along(axis, x):
    """Windows as a C caller may have them: rows along ne[2], or along ne[3] as a ring has them."""
    return x if axis == 2 else x[:, None]


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("width", [1, 4, 6])
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_call(rng, api, axis, width, n_threads, with_bias):
    """Large enough for three workers, each with its own part of the scratch."""
    x, weight, bias, state = make(rng, 2, 60, 300, width)
    bias = bias if with_bias else None
    target = Carved(shape=state.shape, gaps=[3, 0, 1])
    call = ConvCall(x, weight, bias, rows_along(axis, state), rows_along(axis, target.array), n_threads=n_threads)
    for activation, offset in ((SILU, 0), (NONE, 1), (SILU, 63)):
        call.out.array[...] = np.nan
        out = call.set(activation=activation).with_scratch(api, offset=offset).run(api)
        expected, inputs = truth(x, weight, bias, state, "silu" if activation == SILU else None)
        assert_close(out, expected, "out")
        assert np.array_equal(target.array, window(inputs, 60, 0, width)) and target.intact()


def test_the_same_bits_as_from_python(rng, api):
    x, weight, bias, state = make(rng)
    out, new = gdn.causal_conv1d(x, weight, bias, state)
    call = ConvCall(x, weight, bias, state, state, activation=SILU).with_scratch(api)
    assert same_bits(call.run(api), out) and same_bits(state, new)


def test_no_states_at_all(rng, api):
    x, weight, bias, _ = make(rng)
    assert same_bits(ConvCall(x, weight, bias, activation=SILU).with_scratch(api).run(api),
                     gdn.causal_conv1d(x, weight, bias)[0])


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("width", [1, 4, 6])
def test_rows_and_lengths(rng, api, axis, width):
    x, weight, _, cache = make(rng, 6, 12, 21, width)
    x, expected, cu = x[:1], cache.copy(), [0, 7, 7, 12]
    rows_in, rows_out = [3, -1, 0], [[0, 1], [3, -1], [4, 5]]
    want = gdn.causal_conv1d_inplace(x, weight, None, expected, rows_in, rows_out, cu_seqlens=cu)
    state = rows_along(axis, cache)
    call = ConvCall(x, weight, None, state, state, activation=SILU, n_seqs=3, n_snapshots=2, cu_seqlens=cu, rows_in=rows_in,
                    rows_out=rows_out).with_scratch(api)
    assert same_bits(call.run(api), want) and same_bits(cache, expected)


@pytest.mark.parametrize("axis", [2, 3])
def test_slots_without_rows(rng, api, axis):
    """rows_out NULL: snapshot s of sequence i is row s * n_seqs + i, or snapshot_nb bytes on."""
    x, weight, bias, _ = make(rng)
    _, inputs = truth(x, weight, bias)
    packed, planes = Carved(shape=(6, 21, 3)), Carved(shape=(3, 5, 21, 3))
    ConvCall(x, weight, bias, None, rows_along(axis, packed.array), n_snapshots=3).with_scratch(api).run(api)
    before = planes.array.copy()
    ConvCall(x, weight, bias, None, rows_along(axis, planes.array[0]), n_snapshots=3,
             snapshot_nb=planes.array.strides[0]).with_scratch(api).run(api)
    for s in range(3):
        assert np.array_equal(packed.array[2 * s:2 * s + 2], window(inputs, 9, s, 4))
        assert same_bits(planes.array[s, :2], packed.array[2 * s:2 * s + 2])
    assert same_bits(planes.array[:, 2:], before[:, 2:]) and packed.intact()


CONV_REFUSED = REFUSED | {
    **{f"{n} NULL": (spoiled(n, data=None), NULL) for n in ("x", "weight", "out")},
    **{f"{n} i32": (spoiled(n, type=26), TYPE) for n in TENSORS},
    **{f"{n} extent": (spoiled(n, ne=(1, 7)), SHAPE) for n in TENSORS[1:]},
    **{f"{n} of four axes": (spoiled(n, ne=(3, 2)), SHAPE) for n in TENSORS},
    **{f"{n} negative extent": (spoiled(n, ne=(2, -1)), SHAPE) for n in TENSORS},
    **{f"{n} stride": (spoiled(n, nb=(n != "bias", 6)), STRIDE) for n in TENSORS},
    **{f"{n} address": (lambda c, n=n: setattr(getattr(c.a, n), "data", getattr(c.a, n).data + 2), STRIDE) for n in TENSORS},
    **{f"{n} f16": (spoiled(n, type=1), TYPE) for n in ("weight", "bias")},
    "weight of width 0": (spoiled("weight", ne=(0, 0)), SHAPE),
    "state of width": (spoiled("state", ne=(0, 4)), SHAPE),
    "state_out of width": (spoiled("state_out", ne=(0, 4)), SHAPE),
    "x beyond memory": (lambda c: [spoiled(n, ne=(1, 2**63 - 1))(c) for n in ("x", "out")], SHAPE),
    "activation unknown": (lambda c: c.set(activation=SIGMOID), VALUE),
    "activation negative": (lambda c: c.set(activation=-1), VALUE),
}


@pytest.mark.parametrize("name", CONV_REFUSED)
def test_refused(rng, api, name):
    spoil, status = CONV_REFUSED[name]
    x, weight, bias, state = make(rng, 2, 5)
    target = Carved(shape=state.shape)
    call = ConvCall(x, weight, bias, state, target.array).with_scratch(api)
    spoil(call)
    check_refusal(api, call, name, status, target.words)


def test_scratch_too_small(rng, api):
    x, weight, bias, state = make(rng)
    target = Carved(shape=state.shape)
    call = ConvCall(x, weight, bias, state, target.array).with_scratch(api)
    for fields in ({"scratch_size": call.n_scratch - 1}, {"scratch_size": 0}, {"scratch": None}):
        before = [m.copy() for m in (call.out.words, call.scratch, target.words)]
        assert call.set(**fields).call(api) == SCRATCH
        assert str(call.n_scratch).encode() in call.text.value
        assert all(map(np.array_equal, before, (call.out.words, call.scratch, target.words))), "memory was written"


@pytest.mark.parametrize("n_snapshots", [2**40, 2**61, 2**63 - 1])
def test_sizes_do_not_wrap_around(rng, api, n_snapshots):
    """More slots than any memory holds: refused, or a scratch size nobody can offer, never a small one."""
    x, weight, bias, state = make(rng)
    call, n = ConvCall(x, weight, bias, None, state, n_snapshots=n_snapshots, snapshot_nb=64), c_size_t(0)
    status = call.scratch_size(api, byref(n))
    assert status in (SHAPE, VALUE) or n.value >= 8 * n_snapshots, (status, n.value)
