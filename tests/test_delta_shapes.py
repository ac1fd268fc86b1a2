"""Extents: nothing at all, tails, several sequences, packed sequences, odd sizes, head maps, snapshots."""

import numpy as np
import pytest
from helpers import MODES, Carved, assert_close, case, pack, run, same_bits, sequence, snapshot_truth, truth

import gdn

BOTH = pytest.mark.parametrize("mode", ["recurrent", "chunked"])
GATE = pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channel"])


# ---- nothing at all --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", MODES)
@GATE
def test_no_tokens(rng, mode, per_channel):
    c = case(rng, 2, 0, 2, 4, 16, 8, per_channel=per_channel)
    c["state"][0, 0, 0, :3] = [np.nan, -0.0, 1e-42]                 # passed on bit for bit, not computed with
    out, state = run(c, mode=mode, head_map="tiled")
    assert out.shape == (2, 0, 4, 8) and same_bits(state, c["state"])
    target = Carved(shape=c["state"].shape, order=[1, 0, 3, 2], gaps=[1, 2, 3, 4])
    run(c, mode=mode, head_map="tiled", state_out=target.array)
    assert same_bits(target.array, c["state"]) and target.intact()
    kept = c["state"].copy()
    run({**c, "state": kept}, mode=mode, head_map="tiled", state_out=kept)
    assert same_bits(kept, c["state"])
    out, slots = run(c, mode=mode, head_map="tiled", snapshots=3)
    assert slots.shape == (1, *c["state"].shape) and same_bits(slots[0], c["state"])
    out, state = run({**c, "state": None}, mode=mode, head_map="tiled")
    assert state.shape == c["state"].shape and not state.any()


@pytest.mark.parametrize("mode", MODES)
@GATE
@pytest.mark.parametrize("n_tokens", [0, 5])
def test_no_sequences(rng, mode, per_channel, n_tokens):
    c = case(rng, 0, n_tokens, 2, 2, 16, 8, per_channel=per_channel)
    out, state = run(c, mode=mode)
    assert out.shape == (0, n_tokens, 2, 8) and state.shape == (0, 2, 8, 16)
    cache = np.ones((2, 2, 8, 16), np.float32)
    inputs = {n: c[n] for n in ("q", "k", "v", "g", "beta")}
    out = gdn.gated_delta_net_inplace(**inputs, cache=cache, rows_in=np.zeros(0, np.int64), mode=mode)
    assert out.shape == (0, n_tokens, 2, 8) and (cache == 1).all()
    out = gdn.gated_delta_net_inplace(**inputs, cache=cache[:0], rows_in=[], rows_out=np.zeros((0, 4), int), mode=mode)
    assert out.shape == (0, n_tokens, 2, 8)
    slots = gdn.Tensor(np.zeros((0, 2, 8, 16), np.float32))
    out, state = run(c, mode=mode, snapshots=1, state_out=slots)
    assert out.shape == (0, n_tokens, 2, 8) and state is slots


def test_an_allocated_state_is_a_plain_array(rng, tmp_path):
    c = case(rng, 1, 2, 1, 1, 16, 16)
    mapped = np.memmap(tmp_path / "state", np.float32, "w+", shape=c["state"].shape)
    assert type(run({**c, "state": mapped})[1]) is np.ndarray


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(0, 5, 0), (0, 0), (0,), (), (3, 0, 0, 40)])
def test_packed_with_empty_sequences(rng, mode, lengths):
    c = case(rng, len(lengths), max(lengths, default=0), 1, 2, 16, 20)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    packed = pack(c, cu) if lengths else {n: c[n].reshape(1, 0, *c[n].shape[2:]) for n in
                                          ("q", "k", "v", "g", "beta")}
    out, state = gdn.gated_delta_net(**packed, state=c["state"], cu_seqlens=cu, head_map="tiled", mode=mode)
    assert out.shape == (1, sum(lengths), 2, 20) and state.shape == c["state"].shape
    for i, n in enumerate(lengths):
        solo = sequence(c, 0, n, slice(i, i + 1))
        expected, final, _ = truth(solo, "tiled")
        assert_close(out[:, cu[i]:cu[i + 1]], expected, f"out of sequence {i}")
        assert_close(state[i:i + 1], final, f"state of sequence {i}")
        assert n or same_bits(state[i], c["state"][i])


# ---- tails and sizes -------------------------------------------------------------------------------------------

@BOTH
@GATE
@pytest.mark.parametrize("n_tokens", [*range(1, 20), 31, 32, 33, 47, 49, 63, 64, 65, 127, 128, 129, 200, 256])
def test_tails(rng, mode, per_channel, n_tokens):
    c = case(rng, 1, n_tokens, 1, 1, 48, 32, "mix", per_channel)
    expected, final, _ = truth(c)
    out = Carved(shape=c["v"].shape)
    state = Carved(shape=c["state"].shape)
    run({n: Carved(x).array for n, x in c.items()}, mode=mode, out=out.array, state_out=state.array)
    assert out.intact() and state.intact()
    assert_close(out.array, expected, "out")
    assert_close(state.array, final, "state")


SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 23, 24, 31, 33, 36, 47, 48, 63, 65, 80, 96, 100, 127, 129, 160, 192,
         255, 256]


@BOTH
@GATE
@pytest.mark.parametrize("size", SIZES)
def test_odd_sizes(rng, mode, per_channel, size):
    """Lanes beyond a size are neither read (they are NaN here) nor written, in either state order."""
    for S_k, S_v, fla in ((size, size, False), (size, 64, True), (16, size, True), (size, 24, False)):
        c = case(rng, 1, 21, 1, 1, S_k, S_v, "-1e-3", per_channel)
        expected, final, _ = truth(c)
        order = [0, 1, 3, 2] if fla else [0, 1, 2, 3]
        arrays = {n: Carved(x, lead=16) for n, x in c.items()}
        arrays["state"] = Carved(c["state"], order=order, lead=16)
        out, state = Carved(shape=c["v"].shape), Carved(shape=c["state"].shape, order=order)
        run({n: x.array for n, x in arrays.items()}, mode=mode, out=out.array, state_out=state.array)
        assert out.intact() and state.intact(), (S_k, S_v, fla)
        assert_close(out.array, expected, f"out {S_k}x{S_v}")
        assert_close(state.array, final, f"state {S_k}x{S_v}")


@BOTH
@GATE
@pytest.mark.parametrize("sizes", [(64, 128), (128, 64), (96, 192), (24, 48)])
def test_key_and_value_sizes_differ(rng, mode, per_channel, sizes):
    c = case(rng, 2, 70, 2, 2, *sizes, "mix", per_channel)
    expected, final, _ = truth(c)
    out, state = run(c, mode=mode)
    assert_close(out, expected, "out")
    assert_close(state, final, "state")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("S_v", [1, 5, 32])
def test_head_size_one_reads_both_ways(rng, mode, S_v):
    """A last axis of 1 is the scalar gate, and with S_k = 1 the per-channel gate too."""
    c = case(rng, 2, 40, 2, 2, 1, S_v)
    expected, final, _ = truth(c)
    bare = run(c, mode=mode)
    assert_close(bare[0], expected, "out")
    assert_close(bare[1], final, "state")
    last = run({**c, "g": c["g"][..., None], "beta": c["beta"][..., None]}, mode=mode)
    assert same_bits(bare[0], last[0]) and same_bits(bare[1], last[1])


@BOTH
def test_scalar_gate_with_a_last_axis(rng, mode):
    c = case(rng, 2, 40, 2, 4, 16, 16)
    bare = run(c, mode=mode, head_map="interleaved")
    last = run({**c, "g": c["g"][..., None]}, mode=mode, head_map="interleaved")
    assert same_bits(bare[0], last[0]) and same_bits(bare[1], last[1])


@BOTH
def test_scalar_gate_is_the_channel_gate_with_equal_channels(rng, mode):
    c = case(rng, 1, 70, 1, 1, 16, 16)
    expected, final, _ = truth(c)
    out, state = run({**c, "g": np.repeat(c["g"][..., None], 16, -1)}, mode=mode)
    assert_close(out, expected, "out")
    assert_close(state, final, "state")


# ---- sequences and heads ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", MODES)
@GATE
def test_sequences_are_as_if_alone(rng, mode, per_channel):
    c = case(rng, 3, 65, 2, 4, 20, 24, "mix", per_channel)
    out, state = run(c, mode=mode, head_map="tiled")
    for i in range(3):
        alone = run(sequence(c, 0, 65, slice(i, i + 1)), mode=mode, head_map="tiled")
        assert_close(out[i:i + 1], truth(sequence(c, 0, 65, slice(i, i + 1)), "tiled")[0], f"sequence {i}")
        assert same_bits(out[i:i + 1], alone[0]) and same_bits(state[i:i + 1], alone[1]), f"sequence {i}"


@pytest.mark.parametrize("mode", MODES)
@GATE
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, list])
def test_packed_sequences_are_as_if_alone(rng, mode, per_channel, dtype):
    lengths = [7, 1, 65, 33]
    c = case(rng, 4, 65, 2, 4, 20, 24, "mix", per_channel)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    given = [int(x) for x in cu] if dtype is list else cu.astype(dtype)
    out, state = gdn.gated_delta_net(**pack(c, cu), state=c["state"], cu_seqlens=given, head_map="tiled", mode=mode)
    for i, n in enumerate(lengths):
        alone = run(sequence(c, 0, n, slice(i, i + 1)), mode=mode, head_map="tiled")
        assert same_bits(out[:, cu[i]:cu[i + 1]], alone[0]) and same_bits(state[i:i + 1], alone[1]), f"sequence {i}"
    expected, final, _ = truth(sequence(c, 0, 65, slice(2, 3)), "tiled")
    assert_close(out[:, 8:73], expected, "out")
    assert_close(state[2:3], final, "state")


@pytest.mark.parametrize("mode", MODES)
@GATE
@pytest.mark.parametrize("H_v", [4, 6])
def test_head_maps_on_one_hot_keys(mode, per_channel, H_v):
    """Key head i writes its values to channel i: the state says which key head each value head read."""
    n = 20
    q = np.zeros((1, n, 2, 4), np.float32)
    q[:, :, 0, 0] = q[:, :, 1, 1] = 1
    v = np.broadcast_to(np.arange(1, H_v + 1, dtype=np.float32)[:, None], (1, n, H_v, 3))
    g = np.zeros((1, n, H_v, 4) if per_channel else (1, n, H_v), np.float32)
    beta = np.ones((1, n, H_v), np.float32)
    for name, heads in (("tiled", [h % 2 for h in range(H_v)]), ("interleaved", [h // (H_v // 2) for h in range(H_v)])):
        out, state = gdn.gated_delta_net(q, q, v, g, beta, head_map=name, scale=1, mode=mode)
        for h, key_head in enumerate(heads):
            wanted = np.zeros((3, 4))
            wanted[:, key_head] = h + 1
            assert np.array_equal(state[0, h], wanted), (name, h)
        assert np.array_equal(out, v)
    with pytest.raises(ValueError, match="head_map"):
        gdn.gated_delta_net(q, q, v, g, beta, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_equal_heads_need_no_map_and_take_either(rng, mode):
    c = case(rng, 1, 20, 3, 3)
    results = [run(c, mode=mode, head_map=name) for name in (None, "tiled", "interleaved")]
    assert all(same_bits(r[0], results[0][0]) and same_bits(r[1], results[0][1]) for r in results)


# ---- snapshots -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", MODES)
@GATE
@pytest.mark.parametrize("n_tokens, K", [(1, 1), (1, 4), (2, 4), (4, 4), (5, 3), (40, 1), (40, 6), (70, 70), (33, 40)])
def test_snapshots(rng, mode, per_channel, n_tokens, K):
    c = case(rng, 2, n_tokens, 1, 2, 20, 33, "mix", per_channel)
    expected, final, states = truth(c, "tiled")
    out, slots = run(c, mode=mode, head_map="tiled", snapshots=K)
    kept = min(K, n_tokens)
    assert slots.shape == (kept, *final.shape)
    assert_close(out, expected, "out")
    wanted = snapshot_truth(c, states, kept)
    for s in range(kept):
        assert_close(slots[s], wanted[s], f"slot {s}")
    target = Carved(shape=(K + 1, *final.shape), order=[1, 0, 2, 4, 3])
    before = target.array.copy()
    again = run(c, mode=mode, head_map="tiled", snapshots=K, state_out=target.array)
    assert_close(again[0], expected, "out beside a given array")
    assert target.intact()
    for s in range(kept):
        assert_close(target.array[s], wanted[s], f"slot {s} in a given array")
    assert same_bits(target.array[kept:], before[kept:]), "a slot that does not exist was written"


@pytest.mark.parametrize("mode", MODES)
@GATE
def test_a_snapshot_is_the_state_that_was_there(rng, mode, per_channel):
    """Going on from slot s over the last s tokens gives slot 0."""
    c = case(rng, 2, 40, 2, 2, 16, 16, "-1e-3", per_channel)
    _, slots = run(c, mode=mode, snapshots=5)
    for s in range(1, 5):
        rest = {**sequence(c, 40 - s, 40), "state": slots[s]}
        assert_close(run(rest, mode="recurrent")[1], slots[0], f"slot {s}", 1e-6)
    if mode == "recurrent":
        assert same_bits(slots[0], run(c, mode=mode)[1])
        for s in range(5):
            assert same_bits(slots[s], run(sequence(c, 0, 40 - s), mode=mode)[1]), f"slot {s}"


@pytest.mark.parametrize("mode", MODES)
@GATE
def test_snapshots_of_packed_sequences(rng, mode, per_channel):
    """A slot exists for s < its sequence's length (slot 0 always); others are zeros, or left alone when given."""
    lengths = [1, 0, 40, 3]
    c = case(rng, 4, 40, 1, 2, 16, 24, "mix", per_channel)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    options = {"cu_seqlens": cu, "head_map": "interleaved", "mode": mode, "snapshots": 5, "state": c["state"]}
    out, slots = gdn.gated_delta_net(**pack(c, cu), **options)
    given = Carved(shape=(6, *c["state"].shape))
    before = given.array.copy()
    gdn.gated_delta_net(**pack(c, cu), **options, state_out=given.array)
    assert slots.shape == (5, *c["state"].shape) and given.intact()
    for i, n in enumerate(lengths):
        solo = sequence(c, 0, n, slice(i, i + 1))
        expected, final, states = truth(solo, "interleaved")
        assert_close(out[:, cu[i]:cu[i + 1]], expected, f"out of sequence {i}")
        wanted = snapshot_truth(solo, states, 5)
        for s in range(6):
            if s < max(1, min(n, 5)):
                assert_close(slots[s, i], wanted[s, 0], f"sequence {i} slot {s}")
                assert same_bits(given.array[s, i], slots[s, i])
            else:
                assert s == 5 or not slots[s, i].any()
                assert same_bits(given.array[s, i], before[s, i]), f"sequence {i} slot {s} does not exist"
    assert same_bits(slots[0, 1], c["state"][1])


def test_many_more_snapshots_than_tokens(rng):
    c = case(rng, 1, 3)
    assert run(c, snapshots=10**12)[1].shape[0] == 3
