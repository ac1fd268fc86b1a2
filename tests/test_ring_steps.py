"""StateRing: steps that fail, copies, and what is saved and loaded."""

import functools
import gc
import struct
import zlib

import numpy as np
import pytest
from ring_tools import EXTENTS, LAYERS, Boom, Lengths, Run, fields, run_layers

import gdn

# ---------------------------------------------------------------- steps that fail

@pytest.mark.parametrize("size", [1, 3, 5, 9])
def test_a_failed_step_leaves_the_state(one, size):
    one.step(s0=3)
    before = one.bits(0)
    with pytest.raises(Boom), one.ring.begin([0], [size]) as step:
        for layer in range(LAYERS):
            one.ring.ssm(layer).numpy()[step.rows_out[step.rows_out >= 0]] = np.nan
            if one.ring.form == "log":
                one.ring.log(layer).d[step.log_out[step.log_out >= 0]] = np.nan
        raise Boom
    assert one.bits(0) == before
    assert one.ring.max_rollback(0) == (3 if one.ring.form == "log" else max(0, min(3, 5 - min(size, 5))))
    one.check(0)
    one.step(s0=2)
    one.check(0)


def test_without_a_spare_plane_a_failed_step_loses_the_sequence():
    run = Run(n_rollback=0)
    assert run.ring.n_planes == 1
    run.acquire(0)
    step = run.step(s0=2)
    assert step.rows_in.tolist() == step.rows_out[:, 0].tolist()      # in place
    saved = run.ring.save(0)
    for repair in (lambda: run.ring.reset(0), lambda: run.ring.load(0, saved), lambda: run.ring.release(0)):
        run.ring.begin([0], [1]).abort()
        for use in (run.ring.position, run.ring.max_rollback, run.ring.save, lambda i: run.ring.rollback(i, 0),
                    lambda i: run.ring.begin([i], [1]), lambda i: run.ring.copy(i, 5)):
            with pytest.raises(gdn.StateLostError, match="sequence 0"):
                use(0)
        assert run.ring.seq_ids == [0] and run.ring.slot(0) == 0
        repair()
        assert run.ring.seq_ids == [0] and run.ring.position(0) in (0, 2) or run.ring.n_free == 3


def test_a_step_ends_once(one):
    step = one.ring.begin([0], [1])
    step.abort()
    for end in (step.commit, step.abort):
        with pytest.raises(ValueError, match="already committed or aborted"):
            end()
    with pytest.raises(TypeError, match="begin"):
        type(step)()


def test_step_numbers_wrap_past_zero():
    """0 is no step: the one after the last 32-bit number is 1."""
    buffer = bytearray(gdn.StateRing.nbytes_for(1, **EXTENTS))
    ring = gdn.StateRing.create(1, buffer=buffer, **EXTENTS)
    ring.acquire(0)
    last_step = fields(buffer)[0]["last_step"]
    last_step[:] = 2**32 - 1
    ring.begin([0], [1]).commit(written=True)
    assert ring.position(0) == 1 and last_step == 1


def test_positions_do_not_overflow():
    """The longest steps there are; a sequence that stands beyond can only start afresh."""
    one, most = Run(), 2**62 - 1
    one.acquire(0)
    for _ in range(2):
        one.ring.begin([0], [most]).commit(written=True)
    for n in (0, 1, most):
        with pytest.raises(ValueError, match=f"{2 * most}, beyond .* none can be continued"):
            one.ring.begin([0], [n])
    assert one.ring.position(0) == 2 * most
    one.ring.begin(Lengths([0], [1], [True])).commit(written=True)
    assert one.ring.position(0) == 1


def test_a_dropped_step_is_aborted(one):
    step = one.ring.begin([0], [1])
    with pytest.raises(ValueError, match="in a step"):
        one.ring.begin([0], [1])
    del step
    one.ring.begin([0], [1]).commit(written=True)


def test_a_step_in_a_dying_cycle_is_aborted(one):
    def fail():
        try:
            step = one.ring.begin([0], [1])
            raise Boom
        except Boom as error:
            return [step, error, error.__traceback__]

    cycle = fail()
    cycle.append(cycle)
    del cycle
    gc.collect()
    one.ring.begin([0], [1]).commit(written=True)


@pytest.mark.parametrize("form", ["planes", "log"])
def test_refused_begin_changes_nothing(form):
    run = Run(form=form)
    run.acquire(0, 1)
    run.step(s0=2, s1=1)
    before = run.ring.save(0), run.ring.save(1)
    for error, ids, sizes in ((KeyError, [0, 9], [1, 1]), (ValueError, [0, 1, 0], [1, 1, 1]),
                              (ValueError, [0, 1], [1, -1]),
                              (ValueError, [0, 1], [1]), (ValueError, [[0]], [1]), (TypeError, [0.0], [1]),
                              (TypeError, [0], ["a"]), (ValueError, [2**64], [1]), (ValueError, 2**70, [1]),
                              (ValueError, [0], [2**63 - 1]), (KeyError, [-1], [1])):
        with pytest.raises(error):
            run.ring.begin(ids, sizes)
    with pytest.raises(TypeError, match="Batch"):
        run.ring.begin([0])
    with pytest.raises(ValueError, match="seq_ids must be a list of integers"):
        run.ring.begin([[0], [0, 1]], [1, 1])
    assert before == (run.ring.save(0), run.ring.save(1))


def test_other_refusals(one):
    one.step(s0=1)
    ring = one.ring
    for error, call in ((KeyError, lambda: ring.position(3)), (KeyError, lambda: ring.release(3)),
                        (KeyError, lambda: ring.slot(3)), (KeyError, lambda: ring.save(3)),
                        (KeyError, lambda: ring.reset(3)), (KeyError, lambda: ring.copy(3, 4)),
                        (ValueError, lambda: ring.copy(0, 0)),
                        (ValueError, lambda: ring.acquire(0)), (ValueError, lambda: ring.acquire(5, 0)),
                        (IndexError, lambda: ring.acquire(5, 3)), (IndexError, lambda: ring.acquire(5, -1)),
                        (ValueError, lambda: ring.acquire(-1)), (ValueError, lambda: ring.acquire(2**63)),
                        (TypeError, lambda: ring.acquire("a")), (TypeError, lambda: ring.acquire(1.0)),
                        (IndexError, lambda: ring.ssm(2)), (IndexError, lambda: ring.conv(-1)),
                        (TypeError, lambda: ring.load(7, 3)), (ValueError, lambda: ring.load(7, b"")),
                        (ValueError, lambda: ring.load(-1, ring.save(0))),
                        (ValueError, lambda: ring.load(7, memoryview(ring.save(0))[::2]))):
        with pytest.raises(error):
            call()
    assert ring.seq_ids == [0] and ring.n_free == 2


def test_a_step_keeps_its_own_lists(one):
    ids, lengths = np.array([0]), np.array([2])
    step = one.ring.begin(ids, lengths)
    ids[:], lengths[:] = 9, 9
    assert (step.seq_ids, step.n_tokens) == ([0], [2])
    step.commit(written=True)


def test_a_sequence_being_filled_is_busy():
    """By a thread that acquires, copies or loads it right now: not lost."""
    buffer = bytearray(gdn.StateRing.nbytes_for(1, **EXTENTS))
    ring = gdn.StateRing.create(1, **EXTENTS, buffer=buffer)
    ring.acquire(0)
    slot = fields(buffer)[1][0]
    slot["mark"], slot["state"] = 3, 3
    for use in (ring.position, ring.max_rollback, ring.slot, ring.save, ring.reset, ring.release):
        with pytest.raises(ValueError, match="being copied, saved or filled"):
            use(0)
    assert ring.seq_ids == [] and ring.n_free == 0


def test_a_step_of_a_ring_made_anew_closes_nothing():
    buffer = bytearray(gdn.StateRing.nbytes_for(1, **EXTENTS))
    ring = gdn.StateRing.create(1, **EXTENTS, buffer=buffer)
    ring.acquire(0)
    stale = ring.begin([0], [1])
    ring = gdn.StateRing.create(1, **EXTENTS, buffer=buffer)
    ring.acquire(0)
    step = ring.begin([0], [3])                 # the same number, of the same process
    for close in (functools.partial(stale.commit, True), stale.abort):
        with pytest.raises(ValueError, match="another process, or its ring was made anew"):
            close()
    del close, stale
    step.commit(written=True)
    assert ring.position(0) == 3


# ---------------------------------------------------------------- copy, save, load

@pytest.mark.parametrize("form", ["planes", "log"])
def test_a_copy_shares_nothing(form):
    run = Run(form=form)
    run.acquire(0)
    run.step(s0=5)
    before = run.ring.save(0)
    run.ring.copy(0, 1)
    run.keys[1] = run.keys[0][:]
    assert run.ring.max_rollback(1) == run.ring.max_rollback(0)
    run.step(s1=3)
    run.check(1)
    assert run.ring.save(0) == before
    run.ring.release(0)
    run.rollback(1, 2)
    run.check(1)


@pytest.mark.parametrize("options", [{"spare": 3}, {"form": "log"}], ids=["planes", "log"])
def test_saved_with_pending_rollback_and_continued(options):
    here, there = Run(form=options.get("form", "planes")), Run(n_slots=1, **options)
    here.acquire(0)
    here.step(s0=6)
    there.truth = here.truth
    there.ring.load(7, here.ring.save(0))
    there.keys[7] = here.keys[0][:]
    assert there.ring.max_rollback(7) == here.ring.max_rollback(0) == 4
    for n in (2, 2):
        here.rollback(0, n)
        there.rollback(7, n)
        assert here.bits(0) == there.bits(7)
    for _ in range(20):
        here.step(s0=1)
        with there.ring.begin([7], [1]) as step:
            run_layers(there.ring, there.truth, step, [[here.keys[0][-1]]])
        assert here.bits(0) == there.bits(7)


@pytest.mark.parametrize("form", ["planes", "log"])
def test_damaged_bytes_are_refused(form):
    run = Run(form=form)
    run.acquire(0)
    run.step(s0=3)
    data = run.ring.save(0)
    before = run.ring.seq_ids, run.ring.n_free
    assert zlib.crc32(data[16:]) == int.from_bytes(data[12:16], "little")
    for length in [*range(0, 100), len(data) - 1]:
        with pytest.raises(ValueError, match="no intact saved sequence"):
            run.ring.load(1, data[:length])
    with pytest.raises(ValueError, match="no intact"):
        run.ring.load(1, data + b"\0")
    for bit in [*range(88 * 8), *range(88 * 8, len(data) * 8, 131)]:
        bent = bytearray(data)
        bent[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="no intact saved sequence"):
            run.ring.load(1, bent)
    assert (run.ring.seq_ids, run.ring.n_free) == before


@pytest.mark.parametrize("at,form,value", [(16, "<q", 0), (24, "<q", 2), (24, "<q", -1), (24, "<q", 2**62), (76, "<i", -1),
                                           (76, "<i", 4), (76, "<i", 5), (80, "<i", 1), (84, "<i", 1)])
def test_sealed_bytes_that_cannot_be_are_refused(one, at, form, value):
    """Sizes, positions and depths that no sequence has, under a checksum that fits."""
    one.step(s0=3)
    data = bytearray(one.ring.save(0))
    struct.pack_into(form, data, at, value)
    struct.pack_into("<I", data, 12, zlib.crc32(data[16:]))
    with pytest.raises(ValueError, match="no intact saved sequence.*: it"):
        one.ring.load(1, data)
    assert one.ring.seq_ids == [0]


@pytest.mark.parametrize("name", list(EXTENTS))
def test_bytes_of_another_shape_are_refused(one, name):
    one.step(s0=1)
    other = gdn.StateRing.create(3, 4, **{**EXTENTS, name: EXTENTS[name] + 1})
    with pytest.raises(ValueError, match=r"there and .* here"):
        other.load(0, one.ring.save(0))
    one.step(s0=5)
    with pytest.raises(ValueError, match="by 4 tokens, the ring keeps 3"):
        gdn.StateRing.create(3, 3, **EXTENTS).load(0, one.ring.save(0))
