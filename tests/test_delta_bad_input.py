"""Malformed calls: the named exception, nothing written, and the next valid call works."""

import subprocess
import sys

import numpy as np
import pytest
from helpers import Carved, assert_close, bits, case, truth

import gdn

N, T, H_K, H_V, S_K, S_V, ROWS = 2, 5, 2, 4, 8, 12, 6


class Call:
    """A valid call whose arguments a test spoils; every array it may write is prefilled."""

    def __init__(self):
        rng = np.random.default_rng(3)
        c = case(rng, N, T, H_K, H_V, S_K, S_V, "-1e-3")
        self.inputs = {n: c[n] for n in ("q", "k", "v", "g", "beta")}
        self.state = c["state"]
        self.out = Carved(rng.standard_normal(c["v"].shape))
        self.state_out = Carved(rng.standard_normal(c["state"].shape))
        self.slots = Carved(rng.standard_normal((3, *c["state"].shape)))
        self.cache = Carved(rng.standard_normal((ROWS, *c["state"].shape[1:])))
        self.whole = {**self.inputs, "state": self.state, "head_map": "tiled", "out": self.out.array,
                      "state_out": self.state_out.array}
        self.inplace = {**self.inputs, "cache": self.cache.array, "rows_in": [0, 3], "head_map": "tiled",
                        "out": self.out.array}
        self.packed = {**{n: x.reshape(1, N * T, *x.shape[2:]) for n, x in self.inputs.items()}, "state": self.state,
                       "head_map": "tiled", "out": self.out.array.reshape(1, N * T, H_V, S_V),
                       "state_out": self.state_out.array, "cu_seqlens": [0, 4, 10]}

    def memory(self):
        arrays = [*self.inputs.values(), self.state]
        return [bits(x).copy() for x in arrays] + [x.words.copy() for x in (self.out, self.state_out, self.slots,
                                                                            self.cache)]


def refused(function, arguments, call, error, words):
    before = call.memory()
    with pytest.raises(error) as caught:
        function(**arguments)
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {caught.value}"
    text = str(caught.value)
    assert all(w in text for w in ([words] if isinstance(words, str) else words)), text
    assert all(np.array_equal(a, b) for a, b in zip(before, call.memory(), strict=True)), "memory was written"


def works(n_threads=2):
    """Valid calls right after a refused one."""
    call = Call()
    c = {**call.inputs, "state": call.state}
    expected, final, _ = truth(c, "tiled")
    gdn.gated_delta_net(**call.whole, n_threads=n_threads)
    assert_close(call.out.array, expected, "out of the next call")
    assert_close(call.state_out.array, final, "state of the next call")
    call.cache.array[[0, 3]] = call.state
    gdn.gated_delta_net_inplace(**call.inplace, n_threads=n_threads)
    assert_close(call.cache.array[[0, 3]], final, "cache of the next call")


def test_the_calls_are_valid_before_they_are_spoiled():
    works()
    call = Call()
    gdn.gated_delta_net(**call.packed)
    gdn.gated_delta_net(**{**call.whole, "state_out": call.slots.array}, snapshots=3)


NAMES = ("q", "k", "v", "g", "beta", "state")
OUTPUTS = ("out", "state_out")


@pytest.mark.parametrize("name", NAMES + OUTPUTS)
@pytest.mark.parametrize("dtype", ["f8", ">f2", ">f4", "i4", "i8", "u1", "u2", "?", "c8", "O", "M8[s]"])
def test_types_are_not_cast(name, dtype):
    call = Call()
    x = call.whole[name]
    spoiled = np.zeros(x.shape, dtype) if dtype in ("O", "M8[s]") else x.astype(dtype)
    refused(gdn.gated_delta_net, {**call.whole, name: spoiled}, call, TypeError, name)


@pytest.mark.parametrize("dtype", ["f8", ">f2", "i4", "u2", ">f4"])
def test_caches_are_not_cast(dtype):
    call = Call()
    refused(gdn.gated_delta_net_inplace, {**call.inplace, "cache": call.cache.array.astype(dtype)}, call, TypeError,
            "cache")
    works()


@pytest.mark.parametrize("name", NAMES + OUTPUTS)
def test_tensors_of_other_types(name):
    call = Call()
    x = call.whole[name]
    tensor = gdn.Tensor(np.zeros(x.size, np.int32), list(x.shape[::-1]) + [1] * (4 - x.ndim), type="i32")
    refused(gdn.gated_delta_net, {**call.whole, name: tensor}, call, TypeError, name)


@pytest.mark.parametrize("name", ["g", "beta"])
def test_a_tensor_of_two_gates(name):
    call = Call()
    two = gdn.Tensor(np.stack([call.inputs[name]] * 2))
    refused(gdn.gated_delta_net, {**call.whole, name: two}, call, ValueError, name)


@pytest.mark.parametrize("name", NAMES + OUTPUTS)
@pytest.mark.parametrize("value", [1.0, "text", [[1.0, 2.0]], object(), np.float32(1)])
def test_not_an_array(name, value):
    call = Call()
    refused(gdn.gated_delta_net, {**call.whole, name: value}, call, TypeError, name)


@pytest.mark.parametrize("name", NAMES + OUTPUTS)
def test_masks_are_not_ignored(name):
    call = Call()
    value = np.ma.masked_array(call.whole[name])
    refused(gdn.gated_delta_net, {**call.whole, name: value}, call, TypeError, [name, "masked"])
    with pytest.raises(TypeError, match="data must not be a masked array"):
        gdn.Tensor(value)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_missing_input(name):
    call = Call()
    refused(gdn.gated_delta_net, {**call.whole, name: None}, call, TypeError, name)
    works()


@pytest.mark.parametrize("name, axis", [(name, axis) for name in NAMES + OUTPUTS
                                        for axis in range(3 if name in ("g", "beta") else 4)])
@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_extents(name, axis, change):
    """Every axis of every argument, one too long and one too short: it is named, unless it is q or v, by which the others
    are measured."""
    call = Call()
    shape = list(call.whole[name].shape)
    shape[axis] += 1 if change == "longer" else -1
    spoiled = Carved(shape=shape)
    refused(gdn.gated_delta_net, {**call.whole, name: spoiled.array}, call, ValueError, "" if name in "qv" else f"{name} ")
    assert spoiled.intact() and np.isnan(spoiled.array).all()


@pytest.mark.parametrize("name", NAMES + OUTPUTS)
@pytest.mark.parametrize("change", ["added", "removed", "none"])
def test_ranks(name, change):
    call = Call()
    x = call.whole[name]
    if name in ("g", "beta") and change == "added":
        x = x[..., None]                                 # one more is legal, two more are not
    spoiled = {"added": x[None], "removed": x[0], "none": x.reshape(-1)[:1].reshape(())}[change]
    refused(gdn.gated_delta_net, {**call.whole, name: spoiled}, call, ValueError, name)


def unaligned(x):
    raw = np.zeros(x.nbytes + 8, np.uint8)
    y = np.ndarray(x.shape, np.float32, raw, 1)
    y[...] = x
    return y


def odd_strides(x):
    raw = np.zeros(x.size * 6 + 8, np.uint8)
    y = np.ndarray(x.shape, np.float32, raw, 0, [s // 4 * 6 for s in x.strides])
    return y


@pytest.mark.parametrize("name", NAMES + OUTPUTS)
@pytest.mark.parametrize("spoil", [unaligned, odd_strides])
def test_alignment(name, spoil):
    call = Call()
    spoiled = spoil(np.ascontiguousarray(call.whole[name]))
    before = spoiled.tobytes()
    refused(gdn.gated_delta_net, {**call.whole, name: spoiled}, call, ValueError, name)
    assert spoiled.tobytes() == before


def frozen(x):
    y = x.view()
    y.flags.writeable = False
    return y


def stride_0(x, axis):
    return np.lib.stride_tricks.as_strided(x, x.shape, [0 if i == axis else s for i, s in enumerate(x.strides)])


def shifted(buffer, x, n):
    """x's shape over x's own memory, n elements on."""
    return buffer[n:n + x.size].reshape(x.shape)


WHOLE = {
    # heads
    "H_v no multiple": (lambda c: {n: c.whole[n][:, :, :3] for n in ("v", "g", "beta", "out")} | {
        n: c.whole[n][:, :3] for n in ("state", "state_out")}, ValueError, ["3", "2"]),
    "H_v below H_k": (lambda c: {n: c.whole[n][:, :, :1] for n in ("v", "g", "beta", "out")} | {
        n: c.whole[n][:, :1] for n in ("state", "state_out")}, ValueError, ["1", "2"]),
    "no key heads": (lambda c: {"q": c.whole["q"][:, :, :0], "k": c.whole["k"][:, :, :0]}, ValueError, "H_k"),
    "no value heads": (lambda c: {n: c.whole[n][:, :, :0] for n in ("v", "g", "beta", "out")} | {
        n: c.whole[n][:, :0] for n in ("state", "state_out")}, ValueError, "H_v"),
    "no key channels": (lambda c: {"q": c.whole["q"][..., :0], "k": c.whole["k"][..., :0], "state": None,
                                   "state_out": c.whole["state_out"][..., :0]}, ValueError, "S_k"),
    "no value channels": (lambda c: {"v": c.whole["v"][..., :0], "out": c.whole["out"][..., :0], "state": None,
                                     "state_out": c.whole["state_out"][:, :, :0]}, ValueError, "S_v"),
    "head_map missing": (lambda c: {"head_map": None}, ValueError, "head_map"),
    "head_map unknown": (lambda c: {"head_map": "grouped"}, ValueError, ["head_map", "grouped"]),
    "head_map a number": (lambda c: {"head_map": 1}, ValueError, "head_map"),
    "head_map unhashable": (lambda c: {"head_map": ["tiled"]}, ValueError, "head_map"),
    # gates
    "g per some other channels": (lambda c: {"g": np.zeros((N, T, H_V, S_K - 1), np.float32)}, ValueError, "g"),
    "g per value channel": (lambda c: {"g": np.zeros((N, T, H_V, S_V), np.float32)}, ValueError, "g"),
    "g per key head": (lambda c: {"g": c.whole["g"][:, :, :H_K]}, ValueError, "g"),
    "g time first": (lambda c: {"g": c.whole["g"].swapaxes(0, 1)}, ValueError, "g"),
    "beta per channel": (lambda c: {"beta": np.zeros((N, T, H_V, S_K), np.float32)}, ValueError, "beta"),
    "beta heads first": (lambda c: {"beta": c.whole["beta"].swapaxes(1, 2)}, ValueError, "beta"),
    # options
    "mode unknown": (lambda c: {"mode": "fast"}, ValueError, ["mode", "fast"]),
    "mode None": (lambda c: {"mode": None}, ValueError, "mode"),
    "mode a number": (lambda c: {"mode": 1}, ValueError, "mode"),
    "l2_form unknown": (lambda c: {"l2_form": "mean", "qk_l2norm": True}, ValueError, ["l2_form", "mean"]),
    "l2_form unknown and unused": (lambda c: {"l2_form": "mean"}, ValueError, "l2_form"),
    "l2_eps negative": (lambda c: {"l2_eps": -1e-6, "qk_l2norm": True}, ValueError, "l2_eps"),
    "l2_eps NaN": (lambda c: {"l2_eps": float("nan"), "qk_l2norm": True}, ValueError, "l2_eps"),
    "l2_eps text": (lambda c: {"l2_eps": "small"}, TypeError, ""),
    "scale NaN": (lambda c: {"scale": float("nan")}, ValueError, "scale"),
    "scale infinite": (lambda c: {"scale": float("inf")}, ValueError, "scale"),
    "scale beyond float32": (lambda c: {"scale": 1e39}, ValueError, "scale"),
    "scale text": (lambda c: {"scale": "auto"}, TypeError, ""),
    "scale an array": (lambda c: {"scale": np.ones(3)}, TypeError, ""),
    "unknown keyword": (lambda c: {"chunk_size": 64}, TypeError, "chunk_size"),
    "n_threads 0": (lambda c: {"n_threads": 0}, ValueError, "n_threads"),
    "n_threads negative": (lambda c: {"n_threads": -1}, ValueError, "n_threads"),
    "n_threads a fraction": (lambda c: {"n_threads": 1.5}, TypeError, "n_threads"),
    "n_threads text": (lambda c: {"n_threads": "2"}, TypeError, "n_threads"),
    "n_threads True": (lambda c: {"n_threads": True}, TypeError, "n_threads"),
    "state with other columns": (lambda c: {"state": np.zeros((*c.state.shape[:-1], S_K + 1), np.float32), "state_out": None},
                                 ValueError, "state has shape"),
    # snapshots
    "snapshots 0": (lambda c: {"snapshots": 0}, ValueError, "snapshots"),
    "snapshots negative": (lambda c: {"snapshots": -2}, ValueError, "snapshots"),
    "snapshots a fraction": (lambda c: {"snapshots": 2.0}, TypeError, "snapshots"),
    "snapshots text": (lambda c: {"snapshots": "2"}, TypeError, "snapshots"),
    "snapshots True": (lambda c: {"snapshots": True}, TypeError, "snapshots"),
    "snapshots without a slot axis": (lambda c: {"snapshots": 2}, ValueError, "state_out"),
    "a slot axis without snapshots": (lambda c: {"state_out": c.slots.array}, ValueError, "state_out"),
    "too few slots": (lambda c: {"snapshots": 4, "state_out": c.slots.array}, ValueError, ["state_out", "3", "4"]),
    "slots of other sequences": (lambda c: {"snapshots": 3, "state_out": c.slots.array[:, :1]}, ValueError,
                                 "state_out"),
    "slots of other heads": (lambda c: {"snapshots": 3, "state_out": c.slots.array[:, :, 1:]}, ValueError, "state_out"),
    "slots too small": (lambda c: {"snapshots": 3, "state_out": c.slots.array[..., 1:]}, ValueError, "state_out"),
    "slots all in one place": (lambda c: {"snapshots": 3, "state_out": stride_0(c.slots.array, 0)}, ValueError,
                               "state_out"),
    "slots overlap each other": (lambda c: {"snapshots": 3, "state_out": np.lib.stride_tricks.as_strided(
        c.slots.array, c.slots.array.shape, (4 * S_K * S_V, *c.slots.array.strides[1:]))}, ValueError, "state_out"),
    "state is one of the slots": (lambda c: {"snapshots": 3, "state_out": c.slots.array, "state": c.slots.array[1]},
                                  ValueError, ["state_out", "state"]),
    # writing
    "out read-only": (lambda c: {"out": frozen(c.out.array)}, ValueError, ["out", "read-only"]),
    "state_out read-only": (lambda c: {"state_out": frozen(c.state_out.array)}, ValueError, ["state_out", "read-only"]),
    "out bytes": (lambda c: {"out": memoryview(bytes(4 * N * T * H_V * S_V)).cast("f", (N, T, H_V, S_V))}, ValueError,
                  ["out", "read-only"]),
    "in place on a read-only state": (lambda c: {"state": frozen(c.state), "state_out": frozen(c.state)}, ValueError,
                                      ["state_out", "read-only"]),
    "out one row": (lambda c: {"out": stride_0(c.out.array, 1)}, ValueError, "out"),
    "state_out one head": (lambda c: {"state_out": stride_0(c.state_out.array, 1)}, ValueError, "state_out"),
    # overlap
    "out is q": (lambda c: {"q": c.out.array[:, :, :2, :8], "k": c.inputs["k"]}, ValueError, ["out", "q"]),
    "out is k": (lambda c: {"k": c.out.array[:, :, 2:, 4:]}, ValueError, ["out", "k"]),
    "out over g": (lambda c: {"g": c.out.array[..., 3]}, ValueError, ["out", "g"]),
    "out over beta": (lambda c: {"beta": c.out.array[..., 0]}, ValueError, ["out", "beta"]),
    "out is v reversed": (lambda c: {"v": c.out.array[:, ::-1]}, ValueError, ["out", "v"]),
    "out is v with heads swapped": (lambda c: {"v": c.out.array[:, :, ::-1]}, ValueError, ["out", "v"]),
    "out in state": (lambda c: {"out": c.cache.array.reshape(-1)[:N * T * H_V * S_V].reshape(N, T, H_V, S_V),
                                "state": c.cache.array[:N]}, ValueError, ["out", "state"]),
    "out in state_out": (lambda c: {"out": c.cache.array.reshape(-1)[:N * T * H_V * S_V].reshape(N, T, H_V, S_V),
                                    "state_out": c.cache.array[:N]}, ValueError, ["out", "state_out"]),
    "state_out shifted by a sequence": (lambda c: {"state": c.cache.array[:N], "state_out": c.cache.array[1:N + 1]},
                                        ValueError, ["state_out", "state"]),
    "state_out shifted by a head": (lambda c: {
        "state": shifted(c.cache.array.reshape(-1), c.state, 0),
        "state_out": shifted(c.cache.array.reshape(-1), c.state, S_K * S_V)}, ValueError, ["state_out", "state"]),
    "state_out is state reversed": (lambda c: {"state_out": c.state_out.array, "state": c.state_out.array[:, ::-1]},
                                    ValueError, ["state_out", "state"]),
    "state_out over v": (lambda c: {"v": c.cache.array.reshape(-1)[:N * T * H_V * S_V].reshape(N, T, H_V, S_V),
                                    "state_out": c.cache.array[:N]}, ValueError, ["state_out", "v"]),
    "state_out over q": (lambda c: {"q": c.cache.array.reshape(-1)[:N * T * H_K * S_K].reshape(N, T, H_K, S_K),
                                    "state_out": c.cache.array[:N]}, ValueError, ["state_out", "q"]),
    # packed
    "cu_seqlens with several rows": (lambda c: {"cu_seqlens": [0, 2, 5]}, ValueError, ["cu_seqlens", "2"]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_call(name):
    spoil, error, words = WHOLE[name]
    call = Call()
    refused(gdn.gated_delta_net, {**call.whole, **spoil(call)}, call, error, words)
    works()


PACKED = {
    "start is not 0": (lambda c: {"cu_seqlens": [1, 4, 10]}, ValueError, ["cu_seqlens", "1"]),
    "end too far": (lambda c: {"cu_seqlens": [0, 4, 11]}, ValueError, ["cu_seqlens", "11", "10"]),
    "end too soon": (lambda c: {"cu_seqlens": [0, 4, 9]}, ValueError, ["cu_seqlens", "9", "10"]),
    "decreasing": (lambda c: {"cu_seqlens": [0, 12, 10]}, ValueError, ["cu_seqlens", "12", "10"]),
    "negative": (lambda c: {"cu_seqlens": [0, -1, 10]}, ValueError, "cu_seqlens"),
    "far beyond": (lambda c: {"cu_seqlens": [0, 2**50, 10], "snapshots": 2**45, "state_out": None}, ValueError,
                   "cu_seqlens"),
    "differences beyond int64": (lambda c: {"cu_seqlens": [0, 2**62, -2**62], "snapshots": 2**45, "state_out": None},
                                 ValueError, "cu_seqlens"),
    "empty": (lambda c: {"cu_seqlens": []}, ValueError, "cu_seqlens"),
    "one number": (lambda c: {"cu_seqlens": 10}, ValueError, "cu_seqlens"),
    "two axes": (lambda c: {"cu_seqlens": [[0, 4, 10]]}, ValueError, "cu_seqlens"),
    "floats": (lambda c: {"cu_seqlens": [0.0, 4.0, 10.0]}, TypeError, "cu_seqlens"),
    "bits of bfloat16": (lambda c: {"cu_seqlens": gdn.Tensor(np.array([0, 4, 10], np.uint16), type="bf16")}, TypeError,
                         ["cu_seqlens", "bf16"]),
    "masked": (lambda c: {"cu_seqlens": np.ma.array([0, 4, 10])}, TypeError, ["cu_seqlens", "masked"]),
    "integers beyond int64": (lambda c: {"cu_seqlens": [0, 4, 10**30]}, ValueError, ["cu_seqlens", "int64"]),
    "booleans": (lambda c: {"cu_seqlens": [False, True, True]}, TypeError, "cu_seqlens"),
    "text": (lambda c: {"cu_seqlens": "0 4 10"}, TypeError, "cu_seqlens"),
    "beyond int64": (lambda c: {"cu_seqlens": np.array([0, 2**64 - 1, 10], np.uint64)}, ValueError, "cu_seqlens"),
    "more sequences than states": (lambda c: {"cu_seqlens": [0, 4, 6, 10]}, ValueError, ["state", "2", "3"]),
    "fewer sequences than states": (lambda c: {"cu_seqlens": [0, 10]}, ValueError, ["state", "2", "1"]),
    "too few slots": (lambda c: {"cu_seqlens": [0, 4, 10], "snapshots": 6, "state_out": c.slots.array}, ValueError,
                      ["state_out", "3", "6"]),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_call(name):
    spoil, error, words = PACKED[name]
    call = Call()
    arguments = {**call.packed, **spoil(call)}
    refused(gdn.gated_delta_net, arguments, call, error, words)
    works()


ALIASED_LENGTHS = """
import numpy as np
import gdn
q = np.full((1, 10, 1, 1), 0.5, np.float32)
v = np.full((1, 10, 1, 1), 1e30, np.float32)
buffer = np.zeros(20, np.int64)
buffer[:3] = [0, 4, 10]
out = buffer.view(np.float32)[:10].reshape(1, 10, 1, 1)
before = buffer.copy()
try:
    gdn.gated_delta_net(q, q, v, np.zeros((1, 10, 1), np.float32), np.ones((1, 10, 1), np.float32),
                        cu_seqlens=buffer[:3], out=out, n_threads=1)
except ValueError as error:
    assert "out" in str(error) and "cu_seqlens" in str(error), error
    assert np.array_equal(buffer, before)
else:
    raise SystemExit("not refused")
"""


def test_lengths_inside_an_output():
    """The call would read its own results as lengths; in a process of its own, which must survive."""
    done = subprocess.run([sys.executable, "-c", ALIASED_LENGTHS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"


def aliased_rows(c):
    rows = c.cache.array.reshape(-1)[c.cache.array.ctypes.data % 8 // 4:][:4].view(np.int64)
    rows[...] = [0, 3]
    return {"rows_in": rows}


INPLACE = {
    "row too large": (lambda c: {"rows_in": [0, ROWS]}, IndexError, ["rows_in", "6"]),
    "row far too large": (lambda c: {"rows_in": [0, 2**62]}, IndexError, "rows_in"),
    "row -2": (lambda c: {"rows_in": [-2, 0]}, IndexError, ["rows_in", "-2"]),
    "row wraps to -1": (lambda c: {"rows_in": np.array([2**64 - 1, 0], np.uint64)}, IndexError, "rows_in"),
    "row out too large": (lambda c: {"rows_out": [0, ROWS]}, IndexError, ["rows_out", "6"]),
    "row out -2": (lambda c: {"rows_out": [0, -2]}, IndexError, ["rows_out", "-2"]),
    "slot's row too large": (lambda c: {"rows_out": [[0, 1], [2, ROWS]]}, IndexError, ["rows_out", "6"]),
    "a slot that does not exist out of range": (lambda c: {"rows_out": [[0] + [-1] * 5 + [99], [1] + [-1] * 6]},
                                                IndexError, ["rows_out", "99"]),
    "written twice": (lambda c: {"rows_out": [4, 4]}, ValueError, ["rows_out", "4", "twice"]),
    "written twice by default": (lambda c: {"rows_in": [3, 3]}, ValueError, ["3", "twice"]),
    "written twice by two slots": (lambda c: {"rows_out": [[0, 1], [2, 0]]}, ValueError, "twice"),
    "written twice by one sequence": (lambda c: {"rows_out": [[0, 0], [2, 3]]}, ValueError, "twice"),
    "too few rows_in": (lambda c: {"rows_in": [0]}, ValueError, ["rows_in", "2"]),
    "too many rows_in": (lambda c: {"rows_in": [0, 1, 2]}, ValueError, ["rows_in", "3"]),
    "rows_in two axes": (lambda c: {"rows_in": [[0], [1]]}, ValueError, "rows_in"),
    "rows_in one number": (lambda c: {"rows_in": 0}, ValueError, "rows_in"),
    "rows_in None": (lambda c: {"rows_in": None}, TypeError, "rows_in"),
    "rows_in floats": (lambda c: {"rows_in": [0.0, 1.0]}, TypeError, "rows_in"),
    "rows_in booleans": (lambda c: {"rows_in": [True, False]}, TypeError, "rows_in"),
    "rows_in text": (lambda c: {"rows_in": "01"}, TypeError, "rows_in"),
    "too few rows_out": (lambda c: {"rows_out": [0]}, ValueError, "rows_out"),
    "rows_out transposed": (lambda c: {"rows_out": [[0, 1], [2, 3], [4, 5]]}, ValueError, "rows_out"),
    "rows_out three axes": (lambda c: {"rows_out": [[[0]], [[1]]]}, ValueError, "rows_out"),
    "rows_out without slots": (lambda c: {"rows_out": np.zeros((2, 0), int)}, ValueError, "rows_out"),
    "rows_out floats": (lambda c: {"rows_out": [0.0, 1.0]}, TypeError, "rows_out"),
    "cache read-only": (lambda c: {"cache": frozen(c.cache.array)}, ValueError, ["cache", "read-only"]),
    "cache of other heads": (lambda c: {"cache": c.cache.array[:, 1:]}, ValueError, ""),
    "cache of other sizes": (lambda c: {"cache": c.cache.array[..., 1:]}, ValueError, ""),
    "cache [key][value] not swapped": (lambda c: {"cache": c.cache.array.swapaxes(-1, -2)}, ValueError, ""),
    "cache of three axes": (lambda c: {"cache": c.cache.array[0]}, ValueError, "cache"),
    "cache None": (lambda c: {"cache": None}, TypeError, "cache"),
    "cache without rows": (lambda c: {"cache": c.cache.array[:0]}, IndexError, "rows_in"),
    "cache of one row repeated": (lambda c: {"cache": stride_0(c.cache.array, 0)}, ValueError, "cache"),
    "cache over v": (lambda c: {"v": c.cache.array.reshape(-1)[:N * T * H_V * S_V].reshape(N, T, H_V, S_V)}, ValueError,
                     ["cache", "v"]),
    "cache over q": (lambda c: {"q": c.cache.array.reshape(-1)[-N * T * H_K * S_K:].reshape(N, T, H_K, S_K)},
                     ValueError, ["cache", "q"]),
    "cache over out": (lambda c: {"out": c.cache.array.reshape(-1)[:N * T * H_V * S_V].reshape(N, T, H_V, S_V)},
                       ValueError, ["out", "cache"]),
    "rows inside the cache": (aliased_rows, ValueError, ["cache", "rows_in"]),
    "snapshots here": (lambda c: {"snapshots": 2}, TypeError, "snapshots"),
    "state_out here": (lambda c: {"state_out": c.state_out.array}, TypeError, "state_out"),
    "head_map missing": (lambda c: {"head_map": None}, ValueError, "head_map"),
    "mode unknown": (lambda c: {"mode": "parallel"}, ValueError, "mode"),
    "scale NaN": (lambda c: {"scale": float("nan")}, ValueError, "scale"),
    "out too small": (lambda c: {"out": c.out.array[:, 1:]}, ValueError, "out"),
    "lengths over several rows": (lambda c: {"cu_seqlens": [0, 5], "rows_in": [0]}, ValueError, ["cu_seqlens", "2"]),
    "one number for one sequence": (lambda c: {n: x[:1] for n, x in c.inplace.items() if isinstance(x, np.ndarray)
                                               and n != "cache"} | {"rows_in": 0}, ValueError, "rows_in"),
}


@pytest.mark.parametrize("name", INPLACE)
def test_inplace_call(name):
    spoil, error, words = INPLACE[name]
    call = Call()
    arguments = {**call.inplace, **spoil(call)}
    refused(gdn.gated_delta_net_inplace, arguments, call, error, words)
    works()


@pytest.mark.parametrize("missing", ["q", "k", "v", "g", "beta", "cache", "rows_in"])
def test_missing_arguments(missing):
    call = Call()
    arguments = {n: x for n, x in call.inplace.items() if n != missing}
    refused(gdn.gated_delta_net_inplace, arguments, call, TypeError, "argument")


def test_messages_quote_both_sides():
    call = Call()
    for arguments, words in (({"k": call.inputs["k"][:, :, :1]}, ["k", "1", "2"]),
                             ({"beta": call.inputs["beta"][:, :4]}, ["beta", "4", "5"]),
                             ({"out": call.out.array[..., :11]}, ["out", "11", "12"]),
                             ({"state": call.state[..., :7]}, ["state", "7", "8"]),
                             ({"state": call.state[:1]}, ["state", "1", "2"])):
        refused(gdn.gated_delta_net, {**call.whole, **arguments}, call, ValueError, words)


def test_errors_come_before_work_even_for_empty_calls():
    call = Call()
    empty = {n: x[:, :0] if n in call.inputs or n == "out" else x for n, x in call.whole.items()}
    for spoiled in ({"mode": "fast"}, {"head_map": None}, {"state": call.state[..., 1:]},
                    {"q": call.inputs["q"][:, :1]}, {"state_out": frozen(call.state_out.array)}):
        refused(gdn.gated_delta_net, {**empty, **spoiled}, call, ValueError, "")


@pytest.mark.parametrize("output", ["out", "state_out"])
@pytest.mark.parametrize("other", ["q", "k", "v", "g", "state", "out"])
def test_only_its_own_may_be_the_same(output, other):
    """Where every extent is the same, out may still be v alone, and state_out state."""
    arrays = {name: np.full((4, 4, 4, 4), 0.5, np.float32) for name in ("q", "k", "v", "g", "state", "out", "state_out")}
    arrays["beta"] = arrays["g"][0].copy()
    arrays[output] = arrays[other]
    if (output, other) in (("out", "v"), ("state_out", "state"), ("out", "out")):
        gdn.gated_delta_net(**arrays)
    else:
        with pytest.raises(ValueError, match=f"{output} overlaps {other}"):
            gdn.gated_delta_net(**arrays)
        assert all((x == 0.5).all() for x in arrays.values())


@pytest.mark.parametrize("name", ["qk_l2norm", "beta_logit"])
@pytest.mark.parametrize("value", ["no", 1, 0.0, None, [], np.ones(2)], ids=repr)
def test_flags_are_true_or_false(name, value):
    call = Call()
    refused(gdn.gated_delta_net, {**call.whole, name: value}, call, TypeError, [name, "True or False"])


@pytest.mark.parametrize("name", ["scale", "l2_eps"])
def test_numbers_beyond_floats(name):
    call = Call()
    refused(gdn.gated_delta_net, {**call.whole, name: 10**400}, call, ValueError, [name, "finite"])


@pytest.mark.parametrize("name", ["scale", "l2_eps"])
@pytest.mark.parametrize("value", [[1], 1j, {}, True], ids=repr)
def test_numbers_are_numbers(name, value):
    call = Call()
    refused(gdn.gated_delta_net, {**call.whole, name: value}, call, TypeError, [name, "number"])
