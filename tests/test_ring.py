"""The state ring: one test for each thing that users of other state caches ran into, and for every refusal."""


import numpy as np
import pytest
from ring_tools import EMPTY, EXTENTS, LAYERS, Lengths, Run, pool, read_state, run_layers

import gdn

# ---------------------------------------------------------------- rollback

def test_rolling_back_a_whole_batch(one):
    for _ in range(10):
        one.step(s0=1)
    before = one.bits(0)
    one.step(s0=3)
    one.rollback(0, 3)
    one.check(0)
    assert one.bits(0) == before


def test_rollback_across_a_shorter_batch(one):
    one.step(s0=4)
    one.step(s0=1)
    one.rollback(0, 2)
    one.check(0)


def test_old_snapshots_after_fewer_tokens_than_planes(one):
    one.step(s0=2)
    assert one.ring.max_rollback(0) == 2        # to the zero state, which counts
    one.rollback(0, 1)
    one.check(0)
    one.rollback(0, 1)
    one.check(0)
    with pytest.raises(ValueError, match="by 0 tokens, not by 1"):
        one.ring.rollback(0, 1)


def test_conv_window_is_part_of_the_snapshot(one):
    other = Run(form=one.ring.form)
    other.acquire(0)
    other.truth = one.truth
    one.step(s0=3)
    one.rollback(0, 2)
    other.keys[0] = one.keys[0][:]
    with other.ring.begin([0], [1]) as step:
        run_layers(other.ring, other.truth, step, [one.keys[0]])
    if one.ring.form == "planes":
        assert one.bits(0) == other.bits(0)
    for run in (one, other):
        run.step(s0=1)                          # outputs are checked
        run.check(0)


@pytest.mark.parametrize("form", ["planes", "log"])
def test_sequences_accept_different_counts(form):
    run = Run(form=form)
    run.acquire(0, 1, 2)
    run.step(s0=2, s1=2, s2=2)
    before = run.bits(0)
    run.step(s0=3, s1=3, s2=3)
    for seq_id, accepted in ((0, 0), (1, 1), (2, 3)):
        run.rollback(seq_id, 3 - accepted)
        run.check(seq_id)
    assert run.bits(0) == before                # zero accepted: that row as it was
    run.step(s2=1, s0=2, s1=5)
    for seq_id in range(3):
        run.check(seq_id)


def test_rollback_twice_and_refused_rollback(one):
    one.step(s0=7)
    one.rollback(0, 2)
    one.rollback(0, 1)
    one.check(0)
    depth, before = one.ring.max_rollback(0), one.bits(0)
    with pytest.raises(ValueError, match=f"by {depth} tokens, not by {depth + 1}"):
        one.ring.rollback(0, depth + 1)
    with pytest.raises(ValueError, match="negative"):
        one.ring.rollback(0, -1)
    assert (one.ring.position(0), one.ring.max_rollback(0), one.bits(0)) == (4, depth, before)


def test_verify_accept_decode_equals_sequential(one):
    one.step(s0=4)
    one.rollback(0, 1)
    one.step(s0=1)
    one.check(0)


@pytest.mark.parametrize("form", ["planes", "log"])
@pytest.mark.parametrize("n_rollback", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 9, 70])
def test_depth_after_a_step(n_rollback, size, form):
    run = Run(n_rollback=n_rollback, form=form)
    run.acquire(0)
    run.step(s0=size)
    assert run.ring.max_rollback(0) == min(n_rollback, size)
    run.step(s0=1)
    assert run.ring.max_rollback(0) == min(n_rollback, size + 1)
    run.rollback(0, run.ring.max_rollback(0))
    run.check(0)


def test_rollback_moves_no_state_bytes(one):
    one.step(s0=5)
    def contents():
        logs = [one.ring.log(layer) for layer in range(LAYERS)] if one.ring.form == "log" else []
        return [part.tobytes() for layer in range(LAYERS) for part in (one.ring.ssm(layer).numpy(), one.ring.conv(layer).numpy())
                ] + [part.tobytes() for log in logs for part in (log.k, log.d, log.g, log.x)]

    before = contents()
    one.rollback(0, 3)
    assert before == contents()


@pytest.mark.parametrize("form", ["planes", "log"])
@pytest.mark.parametrize("n_rollback", [0, 3])
@pytest.mark.parametrize("sizes", [[130], [65, 65], [1, 129], [129, 1], [1] * 130], ids=str)
def test_any_split_of_a_prompt(sizes, n_rollback, form):
    """Outputs of every token (checked in the step) and the last state do not restart anywhere."""
    run = Run(n_rollback=n_rollback, form=form)
    run.acquire(0)
    for size in sizes:
        run.step(s0=size)
    run.check(0)


def test_no_tokens_change_nothing(one):
    one.step(s0=2)
    before = one.ring.save(0)
    step = one.step(s0=0)
    assert step.rows_out.tolist() == [[-1]]
    assert one.ring.save(0) == before
    with one.ring.begin([], []) as step:
        assert step.rows_in.shape == (0,) and step.rows_out.shape == (0, 1)


# ---------------------------------------------------------------- freshness

@pytest.mark.parametrize("form", ["planes", "log"])
@pytest.mark.parametrize("fill", ["nan", "0x3e"])
@pytest.mark.parametrize("n_rollback", [0, 2])
def test_a_new_sequence_sees_nothing_old(fill, n_rollback, form):
    ring = gdn.StateRing.create(2, n_rollback, buffer=pool(fill, 2, n_rollback, None, form=form), form=form, **EXTENTS)
    for seq_id in range(4):
        ring.acquire(seq_id)
        assert not any(x.any() for part in read_state(ring, seq_id) for x in part)
        assert (ring.position(seq_id), ring.max_rollback(seq_id)) == (0, 0)
        for layer in range(LAYERS):
            ring.ssm(layer).numpy()[:] = np.nan
            ring.conv(layer).numpy()[:] = np.nan
        ring.reset(seq_id)
        assert not any(x.any() for part in read_state(ring, seq_id) for x in part)
        ring.release(seq_id)


def test_position_zero_starts_afresh(one):
    one.step(s0=6)
    key = [one.truth.token(EMPTY)]
    step = one.ring.begin(Lengths([0], [1], [True]))
    assert step.rows_in.tolist() == [-1]
    run_layers(one.ring, one.truth, step, [key])
    step.abort()
    one.check(0)                                # not committed: as it was
    with one.ring.begin(Lengths([0], [1], [True])) as step:
        run_layers(one.ring, one.truth, step, [key])
    one.keys[0] = key
    one.check(0)
    assert one.ring.max_rollback(0) == 1
    one.rollback(0, 1)
    one.check(0)                                # its start is a snapshot too


def test_a_position_that_does_not_continue(one):
    one.step(s0=2)
    batch = Lengths([0], [1], [False])
    batch.first_positions = np.array([3])
    with pytest.raises(ValueError, match="stands at position 2, the step begins at 3"):
        one.ring.begin(batch)
    batch.first_positions = np.array([2])
    one.ring.begin(batch).abort()


def test_full_ring_names_its_size():
    run = Run(n_slots=3)
    run.acquire(1, 2, 3)
    with pytest.raises(gdn.RingFullError, match="all 3 slots"):
        run.ring.acquire(4)
    run.ring.release(2)
    assert run.ring.acquire(4) == 1
    assert run.ring.seq_ids == [1, 4, 3] and run.ring.n_free == 0


def test_true_is_no_number(one):
    for call in (lambda: one.ring.release(False), lambda: one.ring.acquire(True), lambda: one.ring.rollback(0, True),
                 lambda: one.ring.ssm(True), lambda: gdn.StateRing.create(True, **EXTENTS)):
        with pytest.raises(TypeError, match="must be an integer, got (True|False)"):
            call()
    one.check(0)
