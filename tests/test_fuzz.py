"""Random calls, valid and spoiled, in one process: each gives the right result or a named exception with nothing
written, and the process lives."""

import os
import random

import numpy as np
import pytest
from helpers import (
    GATES,
    MODES,
    Carved,
    assert_close,
    broadcastable,
    case,
    pack,
    random_layout,
    same_bits,
    snapshot_truth,
    truth,
)

import gdn

CASES = int(os.environ.get("GDN_FUZZ", 100))       # `make fuzz` runs more
ERRORS = (ValueError, TypeError, IndexError)


def draw_call(rng):
    """(arguments of a valid gated_delta_net call, its carved outputs and inputs, the case behind it, cu_seqlens)."""
    H_k = int(rng.integers(1, 4))
    n_seqs = int(rng.integers(0, 5))
    n_tokens = int(rng.choice([0, 1, 2, 5, 16, 17, 40, 70]))
    sizes = [int(rng.choice([1, 3, 4, 8, 15, 16, 20, 31, 32, 33, 48, 64, 65])) for _ in range(2)]
    c = case(rng, n_seqs, n_tokens, H_k, H_k * int(rng.integers(1, 4)), *sizes, str(rng.choice(GATES)),
             bool(rng.integers(2)), bool(rng.integers(2)))
    cu = None
    if rng.random() < 0.4 and n_seqs:
        cu = np.concatenate([[0], np.cumsum(rng.integers(0, n_tokens + 1, n_seqs))])
    inputs = pack(c, cu) if cu is not None else {n: c[n] for n in ("q", "k", "v", "g", "beta")}
    if c["state"] is not None:
        inputs["state"] = c["state"]
    carved = {}
    for name, x in inputs.items():
        layout = random_layout(rng, x.ndim)
        if cu is not None:                       # the sequences of the case are compared one by one
            layout["zeros"] = []
        carved[name] = Carved(broadcastable(name, x, layout), **layout)
        if cu is None:
            c[name] = carved[name].array.copy()
    arguments = {name: x.array for name, x in carved.items()}
    arguments["mode"] = str(rng.choice(MODES))
    arguments["head_map"] = str(rng.choice(["tiled", "interleaved"]))
    arguments["n_threads"] = int(rng.integers(1, 5))
    if cu is not None:
        arguments["cu_seqlens"] = cu.astype(rng.choice([np.int32, np.int64]))
    if rng.random() < 0.4:
        arguments["snapshots"] = int(rng.integers(1, 6))
    shape = (n_seqs, c["v"].shape[2], sizes[1], sizes[0])
    longest = n_tokens if cu is None else int(np.diff(cu).max())
    if "snapshots" in arguments:
        shape = (max(1, min(arguments["snapshots"], longest)) + int(rng.integers(2)), *shape)
    outputs = {"out": Carved(shape=arguments["v"].shape, **random_layout(rng, 4, True)),
               "state_out": Carved(shape=shape, **random_layout(rng, len(shape), True))}
    arguments.update({name: x.array for name, x in outputs.items()})
    return arguments, outputs, carved, c, cu


def check_call(arguments, outputs, carved, c, cu):
    before = {name: x.words.copy() for name, x in carved.items()}
    blank = outputs["state_out"].array.copy()
    gdn.gated_delta_net(**arguments)
    assert all(x.intact() for x in outputs.values())
    assert all(np.array_equal(x.words, before[name]) for name, x in carved.items())
    K = arguments.get("snapshots")
    state = outputs["state_out"].array if K else outputs["state_out"].array[None]
    blank = blank if K else blank[None]
    expected_out, expected_state = np.zeros(arguments["v"].shape), state.astype(np.float64)
    for i in range(c["v"].shape[0]):
        n = c["v"].shape[1] if cu is None else int(cu[i + 1] - cu[i])
        solo = {x: None if c[x] is None else c[x][i:i + 1, :n] if x != "state" else c[x][i:i + 1] for x in c}
        expected, _, states = truth(solo, arguments["head_map"])
        expected_out[(i,) if cu is None else (0, slice(cu[i], cu[i + 1]))] = expected[0]
        slots = snapshot_truth(solo, states, len(state))
        kept = max(1, min(n, K or 1))
        expected_state[:kept, i] = slots[:kept, 0]
        for s in range(kept, len(state)):
            assert same_bits(state[s, i], blank[s, i]), f"slot {s} of sequence {i} does not exist"
            state[s, i] = expected_state[s, i] = 0
    # The bound holds for a call's output and for its states: one sequence alone may be small against the rest.
    assert_close(outputs["out"].array, expected_out, "out")
    assert_close(state, expected_state, "state")


def spoil(arguments, draw):
    """One change that makes the call wrong, or leaves it right by luck."""
    name = draw.choice([n for n in ("q", "k", "v", "g", "beta", "state", "out", "state_out") if n in arguments])
    x = arguments[name]
    axis = draw.randrange(x.ndim)
    every = slice(None)
    kind = draw.choice(["type", "short", "long", "rank", "order", "option", "rows", "object", "frozen", "overlap"])
    if kind == "type":
        with np.errstate(all="ignore"):
            arguments[name] = x.astype(draw.choice(["f8", "f2", "i4", ">f4", "O"]))
    elif kind == "short":
        arguments[name] = x[(every,) * axis + (slice(draw.choice([1, 2])),)]
    elif kind == "long":
        arguments[name] = np.repeat(x, 2, axis)
    elif kind == "rank":
        arguments[name] = draw.choice([x[None], x[None, None], x[0] if len(x) else x.ravel(), x.ravel()])
    elif kind == "order":
        arguments[name] = x.swapaxes(axis, draw.randrange(x.ndim))
    elif kind == "option":
        arguments.update(draw.choice([{"mode": "quick"}, {"head_map": "both"}, {"scale": float("nan")},
                                      {"snapshots": 0}, {"n_threads": -1}, {"l2_eps": -1}, {"l2_form": ""}]))
    elif kind == "rows":
        arguments["cu_seqlens"] = draw.choice([[0], [], [0, 10**9], [0, 5, 3], [1, 2], [[0, 1]], [0.5], "x",
                                               [0, -(2**62), 2**62]])
    elif kind == "object":
        arguments[name] = draw.choice([object(), 3, "abc", [1.0], {}, b"bytes", range(5)])
    elif kind == "frozen":
        arguments["out"] = arguments["out"].view()
        arguments["out"].flags.writeable = False
    elif kind == "overlap":
        arguments[name] = arguments["out"][..., ::-1]


@pytest.mark.parametrize("seed", range(20))
def test_valid_calls(seed):
    for i in range(CASES // 20):
        rng = np.random.default_rng([seed, i])
        try:
            check_call(*draw_call(rng))
        except AssertionError as failure:
            raise AssertionError(f"seed [{seed}, {i}]: {failure}") from failure


@pytest.mark.parametrize("seed", range(20))
def test_spoiled_calls(seed):
    refused = 0
    for i in range(CASES // 4):
        arguments, outputs, carved, _, _ = draw_call(np.random.default_rng([seed, i]))
        spoil(arguments, random.Random(f"{seed} {i}"))
        before = [x.words.copy() for x in (*outputs.values(), *carved.values())]
        try:
            gdn.gated_delta_net(**arguments)
        except ERRORS as error:
            refused += 1
            assert str(error)
            after = [x.words for x in (*outputs.values(), *carved.values())]
            assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)), f"seed [{seed}, {i}]: {error}"
        assert all(x.intact() for x in (*outputs.values(), *carved.values())), f"seed [{seed}, {i}]"
    assert refused > CASES // 8
