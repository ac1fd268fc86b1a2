"""StateRing: the buffer it lies in, and threads around it."""

import mmap
import os
import threading
import time

import numpy as np
import pytest
from ring_tools import EMPTY, EXTENTS, LAYERS, UNDO, Run, Truth, committed_row, fields, pool, read_rows, run_layers

import gdn

# ---------------------------------------------------------------- the buffer

def test_attached_rings_are_one():
    memory = mmap.mmap(-1, gdn.StateRing.nbytes_for(2, 1, **EXTENTS))
    first = gdn.StateRing.create(2, 1, buffer=memory, **EXTENTS)
    second = gdn.StateRing(memory)
    first.acquire(4)
    assert second.seq_ids == [4]
    with first.begin([4], [1]) as step:
        step.ssm(1).numpy()[step.rows_out[0, 0]] = 2.5
        step.mark(0)
        step.mark(1)
        assert second.position(4) == 0
    assert second.position(4) == 1
    assert (read_rows(second, committed_row(second, 4))[0][1] == 2.5).all()


@pytest.mark.parametrize("offset", [0, 4, 12, 60])
def test_any_aligned_address(offset):
    buffer = pool("nan", 2, 1, None, offset)
    ring = gdn.StateRing.create(2, 1, buffer=buffer, **EXTENTS)
    for layer in range(LAYERS):
        for rows in (ring.ssm(layer), ring.conv(layer)):
            assert rows.data % 64 == 0 and rows.nb[3] % 64 == 0 and rows.ne[3] == 6
    moved = np.zeros(len(buffer) + 128, np.uint8)
    start = -moved.ctypes.data % 64 + 20        # attached where its rows are not on 64-byte addresses
    moved[start:start + len(buffer)] = buffer
    run = Run()
    run.ring, run.keys = gdn.StateRing(moved[start:start + len(buffer)]), {3: []}
    run.ring.acquire(3)
    run.step(s3=3)
    run.rollback(3, 1)
    run.check(3)


def test_buffers_that_are_refused():
    need = gdn.StateRing.nbytes_for(2, 1, **EXTENTS)
    with pytest.raises(ValueError, match=f"{need - 1} bytes, this ring needs {need}"):
        gdn.StateRing.create(2, 1, buffer=bytearray(need - 1), **EXTENTS)
    with pytest.raises(ValueError, match="multiple of 4"):
        gdn.StateRing.create(2, 1, buffer=np.zeros(need + 8, np.uint8)[1:], **EXTENTS)
    with pytest.raises(ValueError, match="writable"):
        gdn.StateRing.create(2, 1, buffer=bytes(need), **EXTENTS)
    with pytest.raises(ValueError, match="contiguous"):
        gdn.StateRing.create(2, 1, buffer=np.zeros(2 * need, np.uint8)[::2], **EXTENTS)
    with pytest.raises(TypeError, match="buffer protocol"):
        gdn.StateRing([1, 2])
    with pytest.raises(ValueError, match="no ring"):
        gdn.StateRing(bytearray(need))
    for name, value in (("H_v", 0), ("S_k", -1), ("n_layers", 2**31), ("conv_width", 0), ("conv_channels", -1),
                        ("spare", -1), ("H_v", 2**31 - 1)):
        with pytest.raises(ValueError, match=name):
            gdn.StateRing.nbytes_for(2**20, 1, **{**EXTENTS, "S_k": 2**20, "S_v": 2**20, name: value})
    with pytest.raises(TypeError, match="H_v"):
        gdn.StateRing.nbytes_for(2, 1, **{**EXTENTS, "H_v": 2.0})


@pytest.fixture
def whole():
    """The bytes of a ring of two slots and three planes, sequence 0 in the first slot."""
    buffer = bytearray(gdn.StateRing.nbytes_for(2, 1, **EXTENTS))
    gdn.StateRing.create(2, 1, buffer=buffer, **EXTENTS).acquire(0)
    return buffer


@pytest.mark.parametrize("slot, name, value", [
    (0, "state", -1), (0, "state", 0), (0, "state", 3), (0, "state", 4), (0, "mark", -1), (0, "mark", 3), (0, "mark", 4),
    (0, "seq_id", -1), (0, "head", -1), (0, "head", 3), (0, "valid", -1), (0, "valid", 3), (0, "position", -1),
    (0, "touched", -1), (0, "touched", 4), (0, "n_tokens", -1), (0, "next", -2), (0, "next", 2),
    (1, "state", 1), (1, "mark", 1), (1, "seq_id", 5)])
def test_a_record_out_of_range_is_refused(whole, slot, name, value):
    """One field of the first slot, which holds a sequence, or of the second, which is free."""
    fields(whole)[1][name][slot] = value
    with pytest.raises(ValueError, match="no ring"):
        gdn.StateRing(whole)


@pytest.mark.parametrize("n_journal, slot", [(1, -1), (1, 2), (3, 0)])
def test_a_damaged_journal_is_refused(whole, n_journal, slot):
    """Of a slot that is not there, or of more than there are."""
    header, slots, _ = fields(whole)
    at = header["journal_offset"][0] + (n_journal - 1) * UNDO.itemsize
    header["sequence"], header["n_journal"] = 1, n_journal
    entry = np.frombuffer(whole, UNDO, 1, at)
    entry["slot"], entry["old"] = slot, slots[0]
    with pytest.raises(ValueError, match="no ring"):
        gdn.StateRing(whole)


def test_damaged_rings_are_refused(whole):
    whole = bytes(whole)
    for length in (0, 100, 511, 512, len(whole) - 1):
        with pytest.raises(ValueError, match="no ring"):
            gdn.StateRing(bytearray(whole[:length]))
    for byte in range(380):                     # extents, offsets and strides
        for value in (0, 1, 0x7F, 0xFF):
            bent = bytearray(whole)
            if bent[byte] == value:
                continue
            bent[byte] = value
            with pytest.raises(ValueError, match="no ring"):
                gdn.StateRing(bent)
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(3000):                       # anything else, several at a time: an answer or an error, never a crash
        bent = bytearray(whole)
        for at in rng.integers(384, 512 + 2 * 128 + 2 * 128 + 2 * 136 + 64, rng.integers(1, 4)):
            bent[at] = rng.integers(256)
        try:
            other = gdn.StateRing(bent)
            for seq_id in other.seq_ids:
                step = other.begin([seq_id], [2])
                for rows in (step.rows_in, step.rows_out):
                    assert ((-1 <= rows) & (rows < 2 * 3)).all(), "rows that the ring does not have"
                step.commit(written=True)
            other.acquire(12345)
        except (ValueError, gdn.RingFullError, gdn.StateLostError):
            refused += 1
    assert refused > 100


def test_rows_above_four_gigabytes():
    extents = dict(n_layers=3, H_v=32, S_k=128, S_v=128, conv_channels=8192, conv_width=4)
    n = gdn.StateRing.nbytes_for(512, 1, **extents)
    assert n > 9 << 30
    memory = mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    ring = gdn.StateRing.create(512, 1, buffer=memory, **extents)
    ring.acquire(1, slot=511)
    with ring.begin([1], [2]) as step:
        for layer in range(3):
            step.ssm(layer).numpy()[step.rows_out[0, 0], 31, 127, 127] = layer + 1
            step.conv(layer).numpy()[step.rows_out[0, 0], 0, 8191, 2] = -layer - 1
    row = committed_row(ring, 1)
    assert row == 2 * 512 + 511
    start, seen = ring.address, np.frombuffer(memory, np.float32)
    for layer in range(3):
        for rows, value in ((ring.ssm(layer), layer + 1), (ring.conv(layer), -layer - 1)):
            at = rows.data - start + row * rows.nb[3] + 4 * rows.ne[0] * rows.ne[1] * rows.ne[2] - 4
            assert seen[at // 4] == value
    assert ring.conv(2).data - start > 4 << 30
    assert gdn.StateRing(memory).position(1) == 2


def test_views_keep_the_memory():
    view = gdn.StateRing.create(1, **EXTENTS).ssm(0)
    view.numpy()[:] = 3
    assert (view.numpy() == 3).all()


def test_without_convolution():
    ring = gdn.StateRing.create(2, 1, n_layers=1, H_v=1, S_k=2, S_v=2)
    assert ring.conv(0).ne == (0, 0, 1, 6)
    ring.acquire(0)
    with ring.begin([0], [1]) as step:
        step.ssm(0).numpy()[step.rows_out[0]] = 1
    ring.load(1, ring.save(0))
    assert (ring.ssm(0).numpy()[committed_row(ring, 1)] == 1).all()


# ---------------------------------------------------------------- threads

def test_eight_threads_on_one_ring():
    n_steps, threads = 40, 8
    ring = gdn.StateRing.create(threads, 2, **EXTENTS)
    truths, keys = [Truth(seed) for seed in range(threads)], [[] for _ in range(threads)]
    for i in range(threads):
        ring.acquire(i)
        for _ in range(2 * n_steps):
            keys[i].append(truths[i].token(keys[i][-1] if keys[i] else EMPTY))
    errors = []

    def work(i):
        try:
            for t in range(0, 2 * n_steps, 2):
                with ring.begin([i], [3 if t + 3 <= 2 * n_steps else 2]) as step:
                    run_layers(ring, truths[i], step, [keys[i][t:t + step.n_tokens[0]]])
                ring.rollback(i, step.n_tokens[0] - 2)
                ring.position(i)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    for i in range(threads):
        assert ring.position(i) == 2 * n_steps
        truths[i].check(keys[i][-1], *read_rows(ring, committed_row(ring, i)))


def test_no_lock_waits_for_the_interpreter():
    """A holder of the ring's lock that needs the GIL, and one of the GIL that needs the lock, would wait for each other."""
    ring = gdn.StateRing.create(64, 1, **EXTENTS)
    ring.acquire(1)
    stop, calls = time.monotonic() + 1.5, []

    def work(call):
        while time.monotonic() < stop:
            start = time.monotonic()
            call()
            calls.append(time.monotonic() - start)

    def drop():
        ring.acquire(2)
        ring.begin([2], [1])
        ring.release(2)

    workers = [threading.Thread(target=work, args=(call,)) for call in (
        lambda: ring.seq_ids, lambda: ring.n_free, lambda: ring.save(1), lambda: ring.position(1), drop)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert max(calls) < 1, max(calls)


def test_one_sequence_from_many_threads():
    ring = gdn.StateRing.create(2, 1, **EXTENTS)
    ring.acquire(0)
    counts = {"committed": 0, "refused": 0}
    start, guard = threading.Barrier(4), threading.Lock()

    def work():
        start.wait()
        for _ in range(200):
            try:
                step = ring.begin([0], [1])
                os.sched_yield()
                step.commit(written=True)
                outcome = "committed"
            except ValueError as error:
                assert "in a step" in str(error)
                outcome = "refused"
            with guard:
                counts[outcome] += 1

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert counts["committed"] == ring.position(0) and sum(counts.values()) == 800
