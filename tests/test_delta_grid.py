"""The delta rule against the float64 recurrence on a grid of lengths, heads, sizes and gates.

Every case runs in both forms, on arrays carved from NaN-filled memory, with canaries behind out and state.  A covering
part, in which every pair of values meets, runs always; the whole grid is a slow test."""

import itertools

import numpy as np
import pytest
from helpers import (
    GATES,
    Carved,
    assert_close,
    broadcastable,
    case,
    covering,
    head_map,
    random_layout,
    run,
    same_bits,
    truth,
)

TOKENS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 200, 1000)
SEQUENCES = (1, 2, 3)
HEADS = ((1, 1), (2, 2), (2, 4), (2, 6))
SIZES = ((1, 1), (3, 5), (16, 16), (20, 33), (64, 64), (96, 192), (128, 128))
FACTORS = (TOKENS, SEQUENCES, HEADS, SIZES, GATES, (False, True))


def check(rng, n_tokens, n_seqs, heads, sizes, gates, per_channel, modes=("recurrent", "chunked")):
    c = case(rng, n_seqs, n_tokens, *heads, *sizes, gates, per_channel)
    layouts = {name: random_layout(rng, x.ndim) if rng.random() < 0.5 else {} for name, x in c.items()}
    c = {name: broadcastable(name, x, layouts[name]) for name, x in c.items()}
    options = {"head_map": head_map(c, int(rng.integers(2)))}
    expected, final, _ = truth(c, **options)
    inputs = {name: Carved(x, **layouts[name]) for name, x in c.items()}
    for mode in modes:
        out = Carved(shape=c["v"].shape, **(random_layout(rng, 4, True) if rng.random() < 0.5 else {}))
        state = Carved(shape=c["state"].shape, **(random_layout(rng, 4, True) if rng.random() < 0.5 else {}))
        got = run({n: x.array for n, x in inputs.items()}, **options, mode=mode, out=out.array, state_out=state.array,
                  n_threads=int(rng.integers(1, 4)))
        assert got[0] is out.array and got[1] is state.array
        assert out.intact() and state.intact(), f"{mode}: memory around an output was written"
        assert_close(out.array, expected, f"{mode} out")
        assert_close(state.array, final, f"{mode} state")
        if n_tokens == 0:
            assert same_bits(state.array, c["state"])
    for name, x in inputs.items():
        assert same_bits(x.array, c[name]) and x.intact(), f"{name} was written"


def name(row):
    return "-".join(str(x).replace(" ", "") for x in row)


# Two different covering sets: pairs meet in more than one company.
ROWS = list(dict.fromkeys(covering(FACTORS, 1) + covering(FACTORS, 2)))


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_covering_part(rng, row):
    check(rng, *row)


def test_covering_part_meets_every_pair():
    for a, b in itertools.combinations(range(len(FACTORS)), 2):
        met = {(row[a], row[b]) for row in ROWS}
        assert met == set(itertools.product(FACTORS[a], FACTORS[b]))


@pytest.mark.slow
@pytest.mark.parametrize("n_tokens", TOKENS)
@pytest.mark.parametrize("sizes", SIZES, ids=name)
@pytest.mark.parametrize("per_channel", [False, True])
def test_whole_grid(rng, n_tokens, sizes, per_channel):
    for n_seqs, heads, gates in itertools.product(SEQUENCES, HEADS, GATES):
        try:
            check(rng, n_tokens, n_seqs, heads, sizes, gates, per_channel)
        except AssertionError as failure:
            raise AssertionError(f"n_seqs={n_seqs} heads={heads} gates={gates}: {failure}") from failure


@pytest.mark.slow
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("mode", ["recurrent", "chunked"])
def test_long(rng, gates, per_channel, mode):
    check(rng, 4096, 1, (1, 2), (64, 64), gates, per_channel, [mode])


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, 257))
def test_every_head_size(rng, size):
    check(rng, 37, 1, (1, 2), (size, 257 - size), "mix", size % 2 == 0)
    check(rng, 37, 1, (1, 1), (size, size), "-1e-3", size % 2 == 1)


@pytest.mark.parametrize("mode", ["recurrent", "chunked"])
def test_outputs_are_allocated_when_none_are_given(rng, mode):
    from gdn import gated_delta_net
    c = case(rng, 2, 19, 2, 4, 16, 24, state=False)
    expected, final, _ = truth(c, "interleaved")
    out, state = gated_delta_net(**c, head_map="interleaved", mode=mode)
    assert type(out) is np.ndarray and out.dtype == np.float32
    assert type(state) is np.ndarray and state.dtype == np.float32
    assert_close(out, expected, "out")
    assert_close(state, final, "state")
