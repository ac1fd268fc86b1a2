"""gated_delta_net_inplace: one cache, rows read as if before any is written, and nothing else touched."""

import itertools

import numpy as np
import pytest
from helpers import MODES, Carved, assert_close, case, pack, same_bits, sequence, truth
from hypothesis import given, settings
from hypothesis import strategies as st

import gdn

INPUTS = ("q", "k", "v", "g", "beta")
GATE = pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channel"])
CACHES = {
    "ggml": {},
    "FLA": {"order": [0, 1, 3, 2]},
    "padded rows": {"gaps": [7, 0, 0, 0]},
    "padded everything": {"gaps": [3, 2, 1, 0]},
    "rows innermost": {"order": [1, 2, 3, 0]},
    "reversed": {"flips": [0, 3]},
}


def expected_call(c, cache, rows_in, rows_out, head_map, cu=None):
    """(out, cache afterwards, the rows that are written) of one call, from the reference."""
    cache = np.array(cache, np.float64)
    before, written, outs = cache.copy(), set(), []
    rows_out = np.reshape(rows_in if rows_out is None else rows_out, (len(rows_in), -1)).astype(int)
    for i, row in enumerate(rows_in):
        n = c["v"].shape[1] if cu is None else cu[i + 1] - cu[i]
        solo = sequence({**c, "state": None}, 0, n, slice(i, i + 1))
        solo["state"] = np.zeros((1, *cache.shape[1:])) if row < 0 else before[row:row + 1]
        out, final, states = truth(solo, head_map)
        outs.append(out)
        for s, target in enumerate(rows_out[i]):
            if target >= 0 and (s == 0 or s < n):
                cache[target] = final[0] if s == 0 else states[n - 1 - s][0]
                written.add(int(target))
    out = np.concatenate(outs, 0 if cu is None else 1)
    return out, cache, written


def check(c, cache, rows_in, rows_out=None, mode="auto", head_map=None, cu=None, n_threads=None):
    """Run on a carved cache; compare out and every written row, and the bits of every other."""
    before = cache.array.copy()
    out, wanted, written = expected_call(c, before, rows_in, rows_out, head_map, cu)
    inputs = {n: c[n] for n in INPUTS} if cu is None else pack(c, cu)
    got = gdn.gated_delta_net_inplace(**inputs, cache=cache.array, rows_in=rows_in, rows_out=rows_out, mode=mode,
                                      head_map=head_map, cu_seqlens=cu, n_threads=n_threads)
    assert cache.intact(), "memory between the cache's rows was written"
    assert_close(got, out, "out")
    for row in range(len(before)):
        if row in written:
            assert_close(cache.array[row], wanted[row], f"row {row}")
        else:
            assert same_bits(cache.array[row], before[row]), f"row {row} was not to be written"
    return got


def new_cache(rng, c, n_rows, layout="ggml"):
    shape = (n_rows, c["v"].shape[2], c["v"].shape[3], c["q"].shape[3])
    return Carved(rng.standard_normal(shape).astype(np.float32), **CACHES[layout])


CALLS = {
    "each its own": ([4, 0, 2], None),
    "first is zeros": ([-1, 0, 2], [4, 0, 2]),
    "zeros and nowhere by default": ([-1, 0, -1], None),
    "nothing kept": ([4, 0, 2], [-1, -1, -1]),
    "one is padding": ([4, -1, 2], [4, -1, 2]),
    "moved": ([0, 1, 2], [3, 4, 5]),
    "shifted": ([0, 1, 2], [1, 2, 3]),
    "shifted back": ([1, 2, 3], [0, 1, 2]),
    "swap": ([0, 1, 2], [1, 0, 2]),
    "cycle": ([5, 1, 3], [1, 3, 5]),
    "fork": ([3, 3, 3], [3, 0, 5]),
    "fork of the second": ([3, 3, 3], [0, 3, 5]),
    "fork and zeros": ([3, -1, 3], [1, 3, 2]),
    "snapshots": ([0, 4, 8], [[0, 1, 2], [4, 5, 6], [8, 9, 10]]),
    "snapshots, start in the middle": ([1, 6, 9], [[0, 1, 2], [4, 5, 6], [8, 9, 10]]),
    "snapshots, start is the oldest slot": ([2, 6, 10], [[0, 1, 2], [4, 5, 6], [8, 9, 10]]),
    "snapshots over each other's starts": ([0, 4, 8], [[8, 1, 2], [0, 5, 6], [4, 9, 10]]),
    "snapshots with holes": ([0, 4, 8], [[0, -1, 2], [-1, 5, -1], [-1, -1, 10]]),
    "only old slots": ([0, 4, 8], [[-1, 0, 1], [-1, 4, 5], [-1, -1, -1]]),
    "fork with snapshots": ([7, 7, -1], [[7, 0, 1], [2, 3, 4], [5, 6, 8]]),
    "seven slots": ([0, 7, 0], [list(range(7)), list(range(7, 14)), [-1] * 7]),
}


@pytest.mark.parametrize("mode", ["recurrent", "chunked"])
@GATE
@pytest.mark.parametrize("layout", CACHES)
@pytest.mark.parametrize("call", CALLS)
def test_rows(rng, mode, per_channel, layout, call):
    rows_in, rows_out = CALLS[call]
    for n_tokens, sizes in itertools.product((1, 2, 6, 40), ((16, 32), (5, 7))):
        c = case(rng, 3, n_tokens, 1, 2, *sizes, "-1e-3", per_channel, state=False)
        check(c, new_cache(rng, c, 14, layout), rows_in, rows_out, mode, "tiled", n_threads=2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_no_tokens(rng, mode, call):
    """Slot 0 is the initial state, bit for bit; older slots do not exist."""
    rows_in, rows_out = CALLS[call]
    c = case(rng, 3, 0, 1, 2, 16, 8, state=False)
    cache = new_cache(rng, c, 14)
    cache.array[3, 0, 0, :2] = [np.nan, -0.0]
    before = cache.array.copy()
    gdn.gated_delta_net_inplace(*(c[n] for n in INPUTS), cache.array, rows_in, rows_out, head_map="tiled", mode=mode)
    first = np.reshape(rows_in if rows_out is None else rows_out, (3, -1))[:, 0]
    wanted = before.copy()
    for source, target in zip(rows_in, first, strict=True):
        if target >= 0:
            wanted[target] = 0 if source < 0 else before[source]
    assert same_bits(cache.array, wanted) and cache.intact()


@pytest.mark.parametrize("mode", MODES)
@GATE
@pytest.mark.parametrize("layout", CACHES)
def test_packed_rows(rng, mode, per_channel, layout):
    """Sequences of 1, 0, 40 and 3 tokens, each with four slots, on each other's rows."""
    cu = np.array([0, 1, 1, 41, 44])
    c = case(rng, 4, 40, 2, 2, 16, 20, "mix", per_channel, state=False)
    rows = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    check(c, new_cache(rng, c, 16, layout), [4, 9, 0, -1], rows, mode, cu=cu)


@pytest.mark.parametrize("mode", MODES)
def test_more_slots_than_tokens_leave_rows_alone(rng, mode):
    """K = 4 after two tokens: rows of slots 2 and 3 keep what an earlier call put there, even when they are NaN."""
    c = case(rng, 2, 2, state=False)
    cache = new_cache(rng, c, 8)
    cache.array[[2, 3, 6, 7]] = np.nan
    check_cache = cache.array.copy()
    gdn.gated_delta_net_inplace(*(c[n] for n in INPUTS), cache.array, [0, 4], [[0, 1, 2, 3], [4, 5, 6, 7]], mode=mode)
    assert same_bits(cache.array[[2, 3, 6, 7]], check_cache[[2, 3, 6, 7]])
    assert np.isfinite(cache.array[[0, 1, 4, 5]]).all()


def test_a_row_named_twice_is_fine_if_one_slot_does_not_exist(rng):
    """Only rows that are written count: with one token, slot 1 does not exist."""
    c = case(rng, 2, 1, state=False)
    cache = new_cache(rng, c, 4)
    check(c, cache, [0, 1], [[0, 3], [1, 3]])
    with pytest.raises(ValueError, match="twice"):
        gdn.gated_delta_net_inplace(*(case(rng, 2, 2, state=False)[n] for n in INPUTS), cache.array, [0, 1],
                                    [[0, 3], [1, 3]])


@pytest.mark.parametrize("mode", MODES)
def test_rollback_groups(rng, mode):
    """A server's layout: row = i * mem_size + kv_head + s.  Draft 4, accept some, go on from the accepted state."""
    mem_size, n_seqs, K = 6, 3, 4
    c = case(rng, n_seqs, 4, 2, 2, 16, 16, "-1e-3", state=False)
    cache = new_cache(rng, c, n_seqs * mem_size)
    start = cache.array.copy()
    kv_head = 1
    rows_in = np.arange(n_seqs) * mem_size + kv_head
    rows_out = rows_in[:, None] + np.arange(K)
    check(c, cache, rows_in, rows_out, mode)
    accepted = [0, 1, 3]                             # of four drafted tokens beyond the first
    follow = case(rng, n_seqs, 1, 2, 2, 16, 16, "-1e-3", state=False)
    back = [3 - a for a in accepted]
    resumed = rows_in + back                         # the slot that many tokens back
    out = check(follow, cache, resumed, rows_in, mode)
    for i, a in enumerate(accepted):
        solo = {**sequence(c, 0, 1 + a, slice(i, i + 1)), "state": start[rows_in[i]][None]}
        _, state, _ = truth(solo)
        wanted, final, _ = truth({**sequence(follow, 0, 1, slice(i, i + 1)), "state": state})
        assert_close(out[i:i + 1], wanted, f"sequence {i} after accepting {a}")
        assert_close(cache.array[rows_in[i]][None], final, f"row of sequence {i}")


@pytest.mark.parametrize("mode", MODES)
def test_a_cached_prefix_goes_on(rng, mode):
    """130 tokens at once, as 65 + 65, as 1 + 129, one by one: the same states in the same row."""
    c = case(rng, 1, 130, 1, 1, 32, 32, "-1e-3", state=False)
    expected, final, _ = truth(c)
    for splits in ([130], [65, 65], [1, 129], [1] * 130):
        cache = np.full((3, 1, 32, 32), np.nan, np.float32)
        outs, start = [], 0
        for n in splits:
            part = sequence(c, start, start + n)
            outs.append(gdn.gated_delta_net_inplace(*(part[x] for x in INPUTS), cache, [1 if start else -1], [1],
                                                    mode=mode))
            start += n
        assert_close(np.concatenate(outs, 1), expected, "out")
        assert_close(cache[1:2], final, "state")
        assert np.isnan(cache[[0, 2]]).all()


@pytest.mark.parametrize("mode", MODES)
@GATE
def test_the_same_bits_as_the_call_that_returns_states(rng, mode, per_channel):
    c = case(rng, 3, 40, 1, 2, 16, 32, "mix", per_channel)
    out, slots = gdn.gated_delta_net(**c, head_map="tiled", snapshots=3, mode=mode)
    cache = np.full((12, *c["state"].shape[1:]), np.nan, np.float32)
    cache[[2, 7, 9]] = c["state"]
    rows_out = [[0, 1, 2], [3, 4, 7], [9, 10, 11]]
    got = gdn.gated_delta_net_inplace(*(c[n] for n in INPUTS), cache, [2, 7, 9], rows_out, head_map="tiled", mode=mode)
    assert same_bits(got, out)
    for i, s in itertools.product(range(3), range(3)):
        assert same_bits(cache[rows_out[i][s]], slots[s, i])


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint16, np.uint64, ">i8", ">i4"])
def test_integer_types_and_strides_of_rows(rng, dtype):
    c = case(rng, 3, 2, state=False)
    rows = np.array([[0, 9, 1], [2, 9, 3], [4, 9, 5]], dtype)
    for rows_in, rows_out in ((rows[:, 0], rows[:, ::2]), (rows[::-1, 2], rows[:, 0]), (tuple(rows[:, 0]), None)):
        check(c, new_cache(rng, c, 10), rows_in, rows_out)


@pytest.mark.parametrize("n_seqs", [1, 3])
def test_rows_and_lengths_as_tensors(rng, n_seqs):
    c = case(rng, n_seqs, 2, state=False)
    rows_in, rows_out = np.arange(n_seqs, dtype=np.int32), np.arange(2 * n_seqs, dtype=np.int32).reshape(n_seqs, 2)
    cache, lengths = new_cache(rng, c, 10).array, np.arange(0, 2 * n_seqs + 1, 2, dtype=np.int32)
    packed = [np.ascontiguousarray(c[n]).reshape(1, 2 * n_seqs, *c[n].shape[2:]) for n in INPUTS]
    want, got = cache.copy(), cache.copy()
    out = gdn.gated_delta_net_inplace(*packed, want, rows_in, rows_out, head_map="tiled", cu_seqlens=lengths)
    as_tensors = [gdn.Tensor(x, type="i32") for x in (rows_in, rows_out, lengths)]
    assert same_bits(out, gdn.gated_delta_net_inplace(*packed, got, *as_tensors[:2], head_map="tiled",
                                                      cu_seqlens=as_tensors[2]))
    assert same_bits(want, got)


def test_out_may_be_v(rng):
    c = case(rng, 2, 20, state=False)
    cache = new_cache(rng, c, 2)
    expected, _, _ = expected_call(c, cache.array, [0, 1], None, None)
    v = c["v"].copy()
    assert gdn.gated_delta_net_inplace(c["q"], c["k"], v, c["g"], c["beta"], cache.array, [0, 1], out=v) is v
    assert_close(v, expected, "out")


def test_long_chains_of_rows(rng):
    """Sixty-four sequences, every one writing the next one's start."""
    c = case(rng, 64, 2, 1, 1, 8, 8, "-1e-3", state=False)
    rows = rng.permutation(64)
    check(c, new_cache(rng, c, 64), rows, np.roll(rows, 1), n_threads=3)


@settings(max_examples=200)
@given(st.data())
def test_any_rows(data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n_seqs, K, n_rows = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 20))
    packed = draw(st.booleans())
    lengths = [draw(st.integers(0, 12)) for _ in range(n_seqs)] if packed else [draw(st.integers(0, 40))] * n_seqs
    c = case(rng, n_seqs, max(lengths), 1, draw(st.integers(1, 2)), draw(st.sampled_from([1, 5, 16, 32])),
             draw(st.sampled_from([1, 7, 16, 40])), "mix", draw(st.booleans()), state=False)
    rows_in = draw(st.lists(st.integers(-1, n_rows - 1), min_size=n_seqs, max_size=n_seqs))
    rows_out = draw(st.permutations([*range(n_rows), *[-1] * (n_seqs * K)]))[:n_seqs * K]
    rows_out = np.reshape(rows_out, (n_seqs, K)) if K > 1 or draw(st.booleans()) else rows_out
    cu = np.concatenate([[0], np.cumsum(lengths)]) if packed else None
    check(c, new_cache(rng, c, n_rows, draw(st.sampled_from(list(CACHES)))), rows_in, rows_out, draw(
        st.sampled_from(MODES)), "tiled", cu, draw(st.integers(1, 3)))
