"""State rows of C callers, who may give either table alone: the delta rule's and the convolution's, in one cache or two."""

import ctypes

import numpy as np
import pytest
from c_tools import ABI, LEAST, OK, ROW, SHAPE, VALUE, ConvCall, DeltaCall
from helpers import Carved, case, same_bits
from test_conv import make

import gdn

RECURRENT = 2            # the mode whose bits do not depend on how many slots are kept


class Delta:
    row = (1, 16, 16)

    def __init__(self, rng):
        self.c = case(rng, 2, 12, 1, 1, 16, 16, state=False)

    def plain(self, state):
        return gdn.gated_delta_net(**{**self.c, "state": state}, mode="recurrent", snapshots=2)

    def call(self, state, state_out, **fields):
        return DeltaCall({**self.c, "state": state}, state_out, mode=RECURRENT, **fields)


class Conv:
    row = (21, 3)

    def __init__(self, rng):
        self.inputs = make(rng, 2, 12)[:3]

    def plain(self, state):
        return gdn.causal_conv1d(*self.inputs, state, snapshots=2)

    def call(self, state, state_out, **fields):
        return ConvCall(*self.inputs, state, state_out, activation=1, **fields)


@pytest.fixture(params=[Delta, Conv])
def op(request, rng):
    return request.param(rng)


TABLES = {
    "neither": {},
    "in, swapped": {"rows_in": [1, 0]},
    "in, forked": {"rows_in": [1, 1]},
    "in, forked from the first": {"rows_in": [0, 0]},
    "in, from a slot": {"rows_in": [3, 2]},
    "in, and zeros": {"rows_in": [-1, 0]},
    "in, from elsewhere": {"rows_in": [4, 4]},
    "out, swapped": {"rows_out": [[1, 4], [0, -1]]},
    "out, moved on": {"rows_out": [[1, 0], [2, 3]]},
    "out, elsewhere": {"rows_out": [[3, -1], [4, 2]]},
    "out, nowhere": {"rows_out": [[-1, -1], [-1, 0]]},
}


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("n_snapshots", [1, 2])
@pytest.mark.parametrize("tables", TABLES)
def test_one_table_alone(rng, api, op, tables, n_snapshots, in_place):
    """As if every row were read before any is written; without rows_in sequence i starts from row i, without rows_out
    its slot s goes to row s * n_seqs + i."""
    tables = {name: np.array(rows)[..., :n_snapshots] if name == "rows_out" else rows for name, rows in TABLES[tables].items()}
    rows_in = np.array(tables.get("rows_in", [0, 1]))
    rows_out = tables.get("rows_out", np.arange(2)[:, None] + 2 * np.arange(n_snapshots))
    cache = rng.standard_normal((5, *op.row)).astype(np.float32)
    target = Carved(cache if in_place else None, shape=cache.shape)
    expected = target.array.copy()
    start = np.where(rows_in.reshape(2, *[1] * len(op.row)) < 0, np.float32(0), cache[rows_in])
    want, new = op.plain(start)
    for i, s in np.ndindex(rows_out.shape):
        if rows_out[i, s] >= 0:
            expected[rows_out[i, s]] = new[s, i]
    state = target.array if in_place else cache
    call = op.call(state, target.array, n_snapshots=n_snapshots, n_threads=1, **tables).with_scratch(api)
    assert same_bits(call.run(api), want) and same_bits(target.array, expected) and target.intact()


@pytest.mark.parametrize("name, rows, fields, status", [
    ("state", 1, {}, SHAPE), ("state", 1, {"rows_in": [0, 0]}, OK), ("state", 1, {"rows_in": [0, 1]}, ROW),
    ("state", 1, {"rows_out": [0, 1]}, SHAPE), ("state", 2, {}, OK),
    ("state_out", 1, {}, SHAPE), ("state_out", 1, {"snapshot_nb": 1 << 20}, SHAPE),
    ("state_out", 2, {"snapshot_nb": 1 << 20}, OK),
    ("state_out", 1, {"rows_in": [0, 0]}, SHAPE), ("state_out", 3, {"n_snapshots": 2}, SHAPE),
    ("state_out", 1, {"rows_out": [0, -1]}, OK), ("state_out", 1, {"rows_out": [0, 1]}, ROW),
    ("state_out", 4, {"n_snapshots": 2**40}, VALUE)])
def test_rows_that_are_needed(rng, api, op, name, rows, fields, status):
    """Two sequences on so many rows of the state named, of four of the other."""
    state, state_out = (Carved(np.zeros((rows if name == n else 4, *op.row), np.float32)) for n in ("state", "state_out"))
    call = op.call(state.array, state_out.array, **fields)
    if status == OK:
        call.with_scratch(api).run(api)
    else:
        assert call.refused(api, status, state_out.words)


@pytest.mark.parametrize("grown, tail, status", [(-1, 0, OK), (0, 0, OK), (8, 0, OK), (4, 0, OK), (1000, 0, OK), (8, 1, ABI),
                                                 (1000, 1, ABI)])
def test_structs_of_other_sizes(rng, api, op, grown, tail, status):
    """A struct of a program that knows fewer members (-1: the fewest) or more of them: those not there are zero."""
    cache = rng.standard_normal((2, *op.row)).astype(np.float32)
    want, _ = op.plain(cache)
    call = op.call(cache, None).with_scratch(api)
    size = LEAST[call.Args] if grown < 0 else ctypes.sizeof(call.Args) + grown
    known = min(size, ctypes.sizeof(call.Args))
    memory = (ctypes.c_char * (size + 64))()
    ctypes.memset(memory, 0x55, size + 64)                # what lies behind is not looked at
    ctypes.memmove(memory, ctypes.byref(call.a), known)
    ctypes.memset(ctypes.byref(memory, known), 0, size - known)
    if tail:
        memory[size - 1] = tail
    a = call.Args.from_buffer(memory) if grown >= 0 else ctypes.cast(memory, ctypes.POINTER(call.Args)).contents
    a.size = size
    assert getattr(api, call.name)(ctypes.byref(a)) == status
    if status == OK:
        assert same_bits(call.out.array, want)
