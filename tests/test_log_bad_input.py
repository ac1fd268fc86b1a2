"""Malformed lists of a token log are refused by name before anything is written."""

import numpy as np
import pytest
from helpers import bits

import gdn

H, S, N_ROWS, N_ENTRIES, T = 2, 16, 4, 12, 3
NOWHERE = np.full(2, -1)


def good():
    """The arguments of a call of two sequences, of 3 tokens each, that is as it should be."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape, dtype=np.float32)
    log = gdn.TokenLog(draw(N_ENTRIES, H, S), draw(N_ENTRIES, H, S), -np.abs(draw(N_ENTRIES, H)), draw(N_ENTRIES, 8))
    return {"log": log, "rows_in": [0, 1], "rows_out": None, "log_in": [[0, 1, -1], [2, -1, -1]],
            "log_out": [[3, 4, -1], [5, 6, 7]], "parents": None,
            "checkpoints": [(0, -1, 2), (1, 3, 3)], "cache": draw(N_ROWS, H, S, S), "conv": draw(N_ROWS, 8, 3),
            "inputs": [draw(2, T, H, S), draw(2, T, H, S), draw(2, T, H, S), -np.abs(draw(2, T, H)), np.abs(draw(2, T, H))],
            "x": draw(2, T, 8), "weight": draw(8, 4)}


def call(a, conv):
    lists = {name: a[name] for name in ("log", "log_in", "log_out", "parents", "checkpoints")}
    if conv:
        return gdn.causal_conv1d_inplace(a["x"], a["weight"], None, a["conv"], a["rows_in"], a["rows_out"], **lists)
    return gdn.gated_delta_net_inplace(*a["inputs"], a["cache"], a["rows_in"], a["rows_out"], **lists)


def read_only(a):
    log = a["log"]
    parts = [x.copy() for x in (log.k, log.d, log.g, log.x)]
    for x in parts:
        x.flags.writeable = False
    return gdn.TokenLog(*parts)


TREE = [[-1, 0, 0], [-1, -1, 1]]
BAD = {
    "log_in without a log": ({"log": None, "log_out": None}, ValueError, "log_in"),
    "log_out without a log": ({"log": None, "log_in": None}, ValueError, "log_out"),
    "log of another kind": ({"log": object()}, TypeError, "log must be a TokenLog"),
    "entry too large": ({"log_in": [[0, 12], [2, -1]]}, IndexError, r"log_in\[0, 1\] is 12.*12 entries"),
    "entry below -1": ({"log_in": [[0, -2], [2, -1]]}, IndexError, r"log_in\[0, 1\] is -2"),
    "entry behind -1": ({"log_in": [[0, -1, 8], [2, -1, -1]]}, ValueError, "behind a -1"),
    "entry behind a leading -1": ({"log_in": [[-1, 0], [2, -1]]}, ValueError, "behind a -1"),
    "entry read twice": ({"log_in": [[0, 0], [2, -1]]}, ValueError, "entry 0 is named twice"),
    "entry read by two": ({"log_in": [[0, 1], [1, -1]]}, ValueError, "entry 1 is named twice"),
    "entry read and written": ({"log_out": [[3, 2, -1], [5, 6, 7]]}, ValueError, "entry 2 is named twice"),
    "entry written twice": ({"log_out": [[3, 4, 6], [5, 6, 7]]}, ValueError, "entry 6 is named twice"),
    "log_out too large": ({"log_out": [[3, 4, 12], [5, 6, 7]]}, IndexError, r"log_out\[0, 2\] is 12"),
    "log_out below -1": ({"log_out": [[3, 4, -3], [5, 6, 7]]}, IndexError, r"log_out\[0, 2\] is -3"),
    "log_out too narrow": ({"log_out": [[3, 4], [5, 6]]}, ValueError, "log_out has room for 2 tokens"),
    "log_in of three": ({"log_in": [[0], [1], [2]]}, ValueError, r"log_in must have shape \(2, any number\)"),
    "log_in of one axis": ({"log_in": [0, 1]}, ValueError, "log_in must have shape"),
    "log_in of three axes": ({"log_in": np.zeros((2, 1, 1), int)}, ValueError, "log_in must have shape"),
    "log_in of floats": ({"log_in": [[0.0], [1.0]]}, TypeError, "log_in must hold integers"),
    "log_out of floats": ({"log_out": np.zeros((2, 3))}, TypeError, "log_out must hold integers"),
    "log_in beyond int64": ({"log_in": np.array([[2**63], [1]], np.uint64)}, IndexError, "log_in"),
    "parents of another shape": ({"parents": [-1, 0, 1], "checkpoints": None}, ValueError, r"parents must have shape \(2, 3\)"),
    "parents of floats": ({"parents": np.zeros((2, 3)), "checkpoints": None}, TypeError, "parents must hold integers"),
    "its own parent": ({"parents": [[-1, 1, 0], [-1, 0, 0]], "checkpoints": None}, ValueError, "1 of sequence 0 continues 1"),
    "a later parent": ({"parents": [[-1, 0, 0], [1, 0, 0]], "checkpoints": None}, ValueError, "0 of sequence 1 continues 1"),
    "a parent below -1": ({"parents": [[-1, -2, 0], [-1, 0, 0]], "checkpoints": None}, ValueError, "continues -2"),
    "a tree's snapshot": ({"parents": TREE, "checkpoints": None, "rows_out": [2, -1]}, ValueError, "a tree has no last state"),
    "a tree's checkpoint": ({"parents": TREE}, ValueError, "it must be -1 to 0"),
    "checkpoint of another sequence": ({"checkpoints": [(2, 0, 2)]}, IndexError, "sequence 2, the call has 2"),
    "checkpoint of sequence -1": ({"checkpoints": [(-1, 0, 2)]}, IndexError, "sequence -1"),
    "checkpoint before the log": ({"checkpoints": [(0, -3, 2)]}, ValueError, "after -3 tokens of sequence 0, it must be -2 to 3"),
    "checkpoint behind the end": ({"checkpoints": [(1, 4, 2)]}, ValueError, "after 4 tokens of sequence 1, it must be -1 to 3"),
    "checkpoint to no row": ({"checkpoints": [(0, 0, -1)]}, IndexError, "row -1, the cache has 4 rows"),
    "checkpoint beyond the cache": ({"checkpoints": [(0, 0, 4)]}, IndexError, "row 4, the cache has 4 rows"),
    "checkpoints into one row": ({"checkpoints": [(0, 0, 2), (1, 0, 2)]}, ValueError, "row 2 is written twice"),
    "checkpoint and snapshot into one row": ({"rows_out": [2, -1]}, ValueError, "row 2 is written twice"),
    "checkpoints of pairs": ({"checkpoints": [(0, 0)]}, ValueError, "checkpoints must be"),
    "checkpoints of one axis": ({"checkpoints": [0, 0, 2]}, ValueError, "checkpoints must be"),
    "checkpoints of floats": ({"checkpoints": [(0, 0.5, 2)]}, TypeError, "checkpoints must hold integers"),
    "a log that cannot be written": ({"log": read_only}, ValueError, "read-only"),
}


def untouched(a):
    log = [] if a["log"] is None or isinstance(a["log"], object) and not isinstance(a["log"], gdn.TokenLog) else [
        a["log"].k, a["log"].d, a["log"].g, a["log"].x]
    return [bits(x) for x in (a["cache"], a["conv"], *log)]


@pytest.mark.parametrize("conv", [False, True])
def test_the_call_is_valid_before_it_is_spoiled(conv):
    call(good(), conv)
    call(good() | {"parents": TREE, "checkpoints": [(0, -1, 2)]}, conv)
    call(good() | {"rows_out": [1, -1], "checkpoints": []}, conv)
    call(good() | {"log": read_only(good()), "log_out": None}, conv)


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_malformed_lists(name, conv):
    change, error, message = BAD[name]
    a = good()
    a |= {key: value(a) if callable(value) else value for key, value in change.items()}
    before = untouched(a)
    with pytest.raises(error, match=message):
        call(a, conv)
    assert all(np.array_equal(x, y) for x, y in zip(before, untouched(a), strict=True))
    call(good(), conv)


LOGS = {
    "k of two axes": (lambda a: {"k": a["k"][0]}, "k must have 3 axes"),
    "fewer d": (lambda a: {"d": a["d"][1:]}, "d has 11 entries, k has 12"),
    "fewer g": (lambda a: {"g": a["g"][1:]}, "g has 11 entries"),
    "fewer x": (lambda a: {"x": a["x"][1:]}, "x has 11 entries"),
    "g of other heads": (lambda a: {"g": a["g"][:, :1]}, "g has 1 heads, d has 2"),
    "g of other channels": (lambda a: {"g": np.zeros((12, 2, 5), np.float32)}, "g has 5 channels, k has 16"),
    "g of one axis": (lambda a: {"g": a["g"][:, 0]}, "g must have shape"),
}


@pytest.mark.parametrize("name", LOGS)
def test_logs_that_contradict_themselves(name):
    log = good()["log"]
    parts = {"k": log.k, "d": log.d, "g": log.g, "x": log.x}
    change, message = LOGS[name]
    with pytest.raises(ValueError, match=message):
        gdn.TokenLog(**(parts | change(parts)))


FITS = {
    "other keys": ({"H_k": 1}, "log_k has extents"), "other values": ({"S_v": 8}, "log_d has extents"),
    "other gate": ({"per_channel": True}, "log_g has extents"), "other heads": ({"H_v": 4}, "log_d has extents"),
}


@pytest.mark.parametrize("name", FITS)
def test_a_log_of_another_layer(name):
    change, message = FITS[name]
    a = good()
    a["log"] = gdn.TokenLog.allocate(N_ENTRIES, **({"H_k": H, "H_v": H, "S_k": S, "S_v": S} | change))
    with pytest.raises(ValueError, match=message):
        call(a, False)


def test_a_log_without_inputs():
    a = good()
    a["log"] = gdn.TokenLog.allocate(N_ENTRIES, H_k=H, H_v=H, S_k=S, S_v=S)
    with pytest.raises(ValueError, match="log has no x"):
        call(a, True)
    a["log"] = gdn.TokenLog.allocate(N_ENTRIES, H_k=H, H_v=H, S_k=S, S_v=S, channels=9)
    with pytest.raises(ValueError, match="log_x has extents"):
        call(a, True)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_logs_are_not_cast(dtype):
    log = good()["log"]
    for name in ("k", "d", "g", "x"):
        parts = {"k": log.k, "d": log.d, "g": log.g, "x": log.x}
        with pytest.raises(TypeError, match=f"{name} must be float32"):
            gdn.TokenLog(**(parts | {name: parts[name].astype(dtype)}))


@pytest.mark.parametrize("bad", [{"n_entries": -1}, {"H_k": 0}, {"S_v": 2.0}, {"per_channel": 1}, {"channels": True}])
def test_extents_of_a_log(bad):
    arguments = {"n_entries": 3, "H_k": 1, "H_v": 1, "S_k": 4, "S_v": 4} | bad
    with pytest.raises((ValueError, TypeError), match=next(iter(bad))):
        gdn.TokenLog.allocate(arguments.pop("n_entries"), **arguments)


@pytest.mark.parametrize("tensor", ["k", "d", "g"])
@pytest.mark.parametrize("other", ["cache", "q", "out", "log"])
def test_entries_that_are_written_overlap_nothing(tensor, other):
    a = good()
    memory = np.zeros(20000, np.float32)
    sizes = {"k": (N_ENTRIES, H, S), "d": (N_ENTRIES, H, S), "g": (N_ENTRIES, H)}
    shape = {"cache": (N_ROWS, H, S, S), "log": sizes["d" if tensor != "d" else "k"]}.get(other, (2, T, H, S))
    parts = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    parts[tensor] = memory[:np.prod(sizes[tensor])].reshape(sizes[tensor])
    shared = memory[20:20 + np.prod(shape)].reshape(shape)
    if other == "log":
        parts["d" if tensor != "d" else "k"] = shared
    log = gdn.TokenLog(**parts)
    inputs, cache, out = a["inputs"], a["cache"], None
    if other == "q":
        inputs[0] = shared
    elif other == "cache":
        cache = shared
    elif other == "out":
        out = shared
    with pytest.raises(ValueError, match="overlap"):
        gdn.gated_delta_net_inplace(*inputs, cache, [0, 1], log=log, log_out=a["log_out"], out=out)
