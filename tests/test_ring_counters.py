"""Rings whose counters stand just before 2^32: ids, positions, changes and steps; and many steps, which leave nothing behind."""

import resource
import time

import numpy as np
import pytest
from ring_tools import EMPTY, EXTENTS, Lengths, Run, fields, read_state
from test_ring_processes import child, kill, shared

import gdn

FORMS = pytest.mark.parametrize("form", ["planes", "log"])
IDS = [2**32 - 1, 2**32, 2**32 + 1, -2**63]
FAR = 2**32 - 20                                # tokens that the sequences are said to have seen


def far(form):
    """A ring with everything near 2^32 that counts in 32 bits, or might."""
    memory, ring = shared(6, 4, form=form)
    run = Run()
    run.ring, run.keys = ring, {}
    header, slots, _ = fields(memory)
    header["sequence"], header["last_step"] = 2**32 - 10, 2**32 - 4
    run.acquire(*IDS)
    run.step(**{f"s{i}": 6 for i in IDS})
    slots["position"][:len(IDS)] += FAR
    return memory, run


def check(run, seq_id):
    assert run.ring.position(seq_id) == FAR + len(run.keys[seq_id])
    run.truth.check([EMPTY, *run.keys[seq_id]][-1], *read_state(run.ring, seq_id), exact=run.ring.form == "planes")


@FORMS
def test_everything_near_the_end_of_32_bits(form):
    memory, run = far(form)
    for n in (1, 5, 3, 9, 1, 20):
        run.step(**{f"s{i}": n for i in IDS})
        for back, seq_id in enumerate(IDS):
            run.rollback(seq_id, min(n, back))
            check(run, seq_id)
    assert fields(memory)[0]["sequence"][0] < 1000 and fields(memory)[0]["last_step"][0] < 100
    stands = run.ring.position(IDS[0])
    assert stands > 2**32
    batch = Lengths(IDS[:1], [1], [False])
    for wrong in (stands - 1, stands + 1, stands - 2**32):
        batch.first_positions = np.array([wrong])
        with pytest.raises(ValueError, match=f"stands at position {stands}, the step begins at {wrong}"):
            run.ring.begin(batch)
    batch.first_positions = np.array([stands])
    run.ring.begin(batch).abort()
    other = gdn.StateRing.create(1, 4, form=form, **EXTENTS)
    other.load(2**63 - 1, run.ring.save(IDS[0]))
    run.ring.copy(IDS[0], 2**33)
    assert other.position(2**63 - 1) == run.ring.position(2**33) == stands
    for seq_id in (*IDS, 2**33):                # none is taken for another whose low bits are alike
        run.ring.release(seq_id)
        with pytest.raises(KeyError):
            run.ring.position(seq_id)
    assert run.ring.n_free == 6


@FORMS
def test_killed_while_the_count_of_changes_wraps(form):
    """The count's lowest bit says whether a change is under way: also in the one that begins at 2^32 - 1."""
    memory, run = far(form)
    header, slots, journal = fields(memory)
    before = slots.copy()
    run.ring.begin(IDS, [1] * 4).abort()
    header["sequence"] = 2**32 - 2
    with child(lambda: None) as pid:
        header["sequence"] += 1                 # as a process leaves it that dies with two records changed
        for i in range(2):
            journal["slot"][i], journal["old"][i] = i, slots[i]
            slots[i]["position"], slots[i]["head"] = 7, 0
        header["n_journal"], header["lock"] = 2, pid
        kill(pid)
        for seq_id in IDS:
            check(run, seq_id)
    assert header["sequence"] < 100 and header["n_journal"] == 0 and (slots["position"] == before["position"]).all()
    run.step(**{f"s{i}": 2 for i in IDS})
    for seq_id in IDS:
        check(run, seq_id)


@FORMS
@pytest.mark.parametrize("n", [10**5])
def test_steps_leave_nothing_behind(form, n):
    """10^5 steps: the memory stays, and the last ones are as quick as the first."""
    memory, ring = shared(2, 4, form=form)
    fields(memory)[0]["last_step"] = 2**32 - n // 2
    ring.acquire(0)

    def some(count):
        started = time.perf_counter()
        for i in range(count):
            ring.begin([0], [1 + i % 3]).commit(written=True)
            ring.rollback(0, i % 2)
        return time.perf_counter() - started

    some(n // 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = [some(n // 100) for _ in range(95)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2000
    assert min(times[-40:]) < 2 * min(times[:40])
    assert ring.max_rollback(0) >= 3 and 0 < fields(memory)[0]["last_step"][0] <= n
