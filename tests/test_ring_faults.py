"""Rings beside hostile neighbours: processes that cannot say when they began, steps of another ring, steps that nobody worked
on, records that contradict each other, thousands of marked slots, readers side by side, full disks."""

import errno
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers import missing
from ring_tools import EXTENTS, LAYERS, Lengths, Run, committed_row, fields, fork, read_rows
from test_ring_processes import child, kill, shared

import gdn

# ---------------------------------------------------------------- who is who

def step_many(ring, seq_id, n, limit_files):
    """A process that steps its own sequence n times: its exit code is 0 if none was refused or stolen."""
    pid = fork()
    if pid == 0:
        code = 1
        try:
            if limit_files:
                os.closerange(3, 200)
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
                with pytest.raises(OSError, match="Too many open files"):
                    os.open("/proc/self/stat", os.O_RDONLY)
            for _ in range(n):
                ring.begin([seq_id], [1]).commit(written=True)
            code = 0
        finally:
            os._exit(code)
    return pid


@pytest.mark.parametrize("n", [3000, pytest.param(40000, marks=pytest.mark.slow)])
def test_a_process_without_free_files_keeps_its_lock(n):
    memory, ring = shared(4)
    for seq_id in range(4):
        ring.acquire(seq_id)
    pids = [step_many(ring, seq_id, n, seq_id % 2 == 0) for seq_id in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert [ring.position(seq_id) for seq_id in range(4)] == [n] * 4


def test_an_unknown_start_is_of_the_living():
    """A step, and the lock, of a living process whose start nobody knows are its own; once it is dead they are nobody's."""
    memory, ring = shared(2)
    ring.acquire(0)
    with child(lambda: ring.begin([0], [1])) as pid:
        header, slots, _ = fields(memory)
        slots["owner_start"] = 0
        with pytest.raises(gdn.RingBusyError, match="in a step"):
            ring.begin([0], [1])
        header["lock"] = pid
        os.kill(pid, signal.SIGSTOP)                        # a holder that does not let go, for a while
        threading.Timer(1, lambda: header.__setitem__("lock", 0)).start()
        started = time.monotonic()
        with pytest.raises(gdn.RingBusyError, match="in a step"):
            ring.begin([0], [1])
        assert time.monotonic() - started > 0.5
        header["lock"] = pid
        kill(pid)
        ring.begin([0], [1]).commit(written=True)


# ---------------------------------------------------------------- steps that nobody worked on

def test_a_step_that_returned_early_is_aborted(one):
    one.step(s0=2)
    before = one.bits(0)
    with pytest.raises(ValueError, match="aborted: nobody worked on the states of layers 0, 1;"), one.ring.begin([0], [1]):
        pass
    with pytest.raises(ValueError, match="layers 0 .conv., 1;"), one.ring.begin([0], [1]) as step:
        step.ssm(0)
    step = one.ring.begin([0], [1])
    step.mark(0)
    step.conv(1)
    with pytest.raises(ValueError, match="layers 1 .ssm.;"):
        step.commit()
    assert not step.is_open and one.bits(0) == before and one.ring.position(0) == 2
    one.step(s0=1)
    one.check(0)
    for bad in (2, -1):
        step = one.ring.begin([0], [1])
        for mark in (step.ssm, step.conv, step.mark):
            with pytest.raises(IndexError):
                mark(bad)
        step.abort()
    with pytest.raises(TypeError, match="written must be True or False"):
        one.ring.begin([0], [1]).commit(written=1)
    with one.ring.begin(Lengths([0], [0], [True])):       # writes nothing of its own
        pass
    assert one.ring.position(0) == 0


@pytest.mark.parametrize("form", ["planes", "log"])
def test_a_former_tenant_never_shows(form):
    ring = gdn.StateRing.create(1, 2, form=form, **EXTENTS)
    for layer in range(LAYERS):
        ring.ssm(layer).numpy()[:] = np.nan
        ring.conv(layer).numpy()[:] = np.nan
    ring.acquire(0)
    with pytest.raises(ValueError, match="aborted"), ring.begin([0], [2]):
        pass
    data = ring.save(0, depth=False)
    assert not np.isnan(np.frombuffer(data, np.float32, offset=88)).any()
    other = gdn.StateRing.create(1, 0, **EXTENTS)
    other.load(0, data)
    assert not any(x.any() for part in read_rows(other, committed_row(other, 0)) for x in part)


# ---------------------------------------------------------------- records and bytes

def test_records_that_contradict_each_other_are_refused():
    buffer = bytearray(gdn.StateRing.nbytes_for(3, 3, **EXTENTS))
    ring = gdn.StateRing.create(3, 3, buffer=buffer, **EXTENTS)
    ring.acquire(0)
    ring.acquire(5)
    ring.begin([0], [2]).commit(written=True)
    for slot, name, value in ((0, "valid", 3), (0, "position", 1), (1, "seq_id", 0)):
        bent = bytearray(buffer)
        fields(bent)[1][name][slot] = value
        with pytest.raises(ValueError, match="damaged"):
            gdn.StateRing(bent)
    buffer = bytearray(gdn.StateRing.nbytes_for(3, 3, form="log", **EXTENTS))
    ring = gdn.StateRing.create(3, 3, buffer=buffer, form="log", **EXTENTS)
    ring.acquire(0)
    ring.begin([0], [2]).commit(written=True)
    for name, value in (("row", 1), ("row", 6), ("n_log", 3), ("n_log", 17), ("first", 20), ("new_row", 4), ("zero", 2),
                        ("order", 2), ("n_tree", 5)):
        bent = bytearray(buffer)
        fields(bent)[1][name][0] = value
        with pytest.raises(ValueError, match="damaged"):
            gdn.StateRing(bent)


def test_buffers_of_objects_are_no_memory():
    for make in (gdn.StateRing, lambda b: gdn.StateRing.create(1, buffer=b, **EXTENTS)):
        with pytest.raises(TypeError, match="not objects"):
            make(np.array([None] * 10000, object))
    ring = gdn.StateRing.create(1, **EXTENTS)
    with pytest.raises(TypeError, match="not objects"):
        ring.load(0, np.array([None] * 1000, object))


def test_old_rings_are_refused_by_name():
    buffer = bytearray(gdn.StateRing.nbytes_for(1, **EXTENTS))
    gdn.StateRing.create(1, buffer=buffer, **EXTENTS)
    buffer[8] = 1
    with pytest.raises(ValueError, match="a ring of abi 1, no ring of abi 2"):
        gdn.StateRing(buffer)


def test_tags_go_with_states():
    rings = {tag: gdn.StateRing.create(2, 1, tag=tag, **EXTENTS) for tag in (0, 7, 2**64 - 1)}
    assert [ring.tag for ring in rings.values()] == list(rings)
    for mine, ring in rings.items():
        ring.acquire(0)
        data = ring.save(0)
        for other, target in rings.items():
            if mine == other or 0 in (mine, other):
                target.load(9, data)
                target.release(9)
            else:
                with pytest.raises(ValueError, match=f"its tag is {mine:#x}, the ring's {other:#x}"):
                    target.load(9, data)
    for bad, error in ((-1, ValueError), (2**64, ValueError), (1.0, TypeError), (True, TypeError), ("a", TypeError)):
        with pytest.raises(error, match="tag"):
            gdn.StateRing.create(1, tag=bad, **EXTENTS)


@pytest.mark.parametrize("target", [(0, "planes"), (1, "planes"), (8, "planes"), (0, "log"), (8, "log")], ids=str)
def test_bytes_without_depth_load_anywhere(one, target):
    one.step(s0=6)
    n_rollback, form = target
    ring = gdn.StateRing.create(2, n_rollback, form=form, **EXTENTS)
    ring.load(3, one.ring.save(0, depth=False))
    assert (ring.position(3), ring.max_rollback(3)) == (6, 0)
    back = Run()
    back.truth = one.truth
    back.ring.load(0, ring.save(3))             # no depth there: these too
    back.keys[0] = one.keys[0][:]
    back.check(0)
    one.ring.copy(0, 1, depth=False)
    assert one.ring.max_rollback(1) == 0 and one.ring.max_rollback(0) == 4
    one.keys[1] = one.keys[0][:]
    one.check(1)
    with pytest.raises(TypeError, match="depth must be True or False"):
        one.ring.save(0, depth=1)


# ---------------------------------------------------------------- many slots, many readers

def median(call, n):
    times = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def test_a_full_ring_of_marked_slots_answers_soon():
    """4096 slots in a living process's step: who looks for a slot asks for that process once, without the lock."""
    n = 4096
    memory, ring = shared(n + 1)
    ring.acquire(-2)
    for seq_id in range(n):
        ring.acquire(seq_id)

    def refused():
        with pytest.raises(gdn.RingFullError):
            ring.acquire(-3)

    with child(lambda: ring.begin(range(n), [1] * n)):
        assert median(refused, 50) < 1e-3
        alone = median(lambda: ring.begin([-2], [1]).commit(written=True), 2000)
        stop = threading.Event()

        def pester():
            while not stop.is_set():
                refused()

        other = child(lambda: None, pester)
        with other:
            assert median(lambda: ring.begin([-2], [1]).commit(written=True), 2000) < max(2 * alone, 50e-6)
        stop.set()


@pytest.mark.parametrize("ids", ["i << 40", "i << 56", "i", "random"])
def test_ids_of_any_bits_are_found_as_soon(ids):
    n = 16384 if ids != "i << 56" else 128
    rng = np.random.default_rng(1)
    make = {"i << 40": lambda i: i << 40, "i << 56": lambda i: (i - 64) << 56, "i": lambda i: i,
            "random": lambda i: int(rng.integers(2**62))}[ids]
    numbers = [make(i) for i in range(n)]
    ring = gdn.StateRing.create(n, n_layers=1, H_v=1, S_k=1, S_v=1)
    for number in numbers:
        ring.acquire(number)
    array, ones = np.array(numbers), np.ones(n, int)
    assert median(lambda: ring.begin(array, ones).commit(written=True), 5) < n * 2e-6
    for number in numbers[::2]:
        ring.release(number)
    assert sorted(ring.seq_ids) == sorted(numbers[1::2])
    for number in numbers[::2]:
        with pytest.raises(KeyError):
            ring.position(number)
        ring.acquire(number)
    assert ring.n_free == 0


def test_eight_threads_copy_one_prefix():
    ring = gdn.StateRing.create(9 + 64, 0, n_layers=2, H_v=4, S_k=64, S_v=64)
    ring.acquire(1000)
    ring.begin([1000], [5]).commit(written=True)
    start, errors = threading.Barrier(8), []

    def work(thread):
        try:
            start.wait()
            for i in range(8):
                ring.copy(1000, 8 * thread + i)
                ring.save(1000)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    assert {ring.position(i) for i in range(64)} == {5}
    ring.begin([1000], [1]).commit(written=True)          # nobody reads any more


def test_a_reader_that_died_reads_no_more():
    memory, ring = shared(2)
    ring.acquire(0)
    at = int(fields(memory)[0]["readers_offset"][0])
    readers = np.frombuffer(memory, np.uint32)[at // 4:at // 4 + 32]
    with child(lambda: None) as pid:
        readers[0], readers[8] = 1, pid
        for change in (lambda: ring.begin([0], [1]), lambda: ring.release(0), lambda: ring.rollback(0, 0)):
            with pytest.raises(gdn.RingBusyError, match="being copied"):
                change()
        ring.copy(0, 1)
        ring.save(0)
        kill(pid)
        ring.begin([0], [1]).commit(written=True)


def test_busy_is_an_error_of_its_own(one):
    one.step(s0=1)
    step = one.ring.begin([0], [1])
    for busy in (lambda: one.ring.begin([0], [1]), lambda: one.ring.acquire(0), lambda: one.ring.copy(0, 1),
                 lambda: one.ring.reset(0), lambda: one.ring.load(0, one.ring.save(0))):
        with pytest.raises(gdn.RingBusyError):
            busy()
    step.abort()
    for wrong in (lambda: one.ring.rollback(0, 9), lambda: one.ring.begin(gdn.Batch([0], [7]))):
        with pytest.raises(ValueError) as error:
            wrong()
        assert error.type is ValueError
    assert issubclass(gdn.RingBusyError, ValueError)


# ---------------------------------------------------------------- files

def test_a_ring_in_a_file(tmp_path):
    path = tmp_path / "ring"
    ring = gdn.StateRing.create(2, 1, path=path, **EXTENTS)
    ring.acquire(4)
    stat = path.stat()
    assert stat.st_size == ring.nbytes and stat.st_blocks * 512 >= ring.nbytes
    with open(path, "r+b") as file:
        assert gdn.StateRing(mmap.mmap(file.fileno(), 0)).seq_ids == [4]
    with pytest.raises(FileExistsError):
        gdn.StateRing.create(2, 1, path=path, **EXTENTS)
    with pytest.raises(ValueError, match="buffer or path"):
        gdn.StateRing.create(2, 1, path=tmp_path / "other", buffer=bytearray(10000), **EXTENTS)
    assert not (tmp_path / "other").exists()


def test_a_full_disk_is_said(tmp_path):
    """A file system of one megabyte, in a mount namespace of its own."""
    script = f"""
import os, sys
libc = __import__("ctypes").CDLL(None, use_errno=True)
if libc.mount(b"none", {str(tmp_path).encode()!r}, b"tmpfs", 0, b"size=1m") != 0:
    sys.exit(77)
import gdn
try:
    gdn.StateRing.create(64, n_layers=1, H_v=4, S_k=64, S_v=64, path={str(tmp_path / 'ring')!r})
except OSError as error:
    assert error.errno == {errno.ENOSPC}, error
    assert "cannot be reserved" in str(error), error
    assert os.listdir({str(tmp_path)!r}) == []
    print("said")
"""
    unshare = ["unshare", "--mount"] + ([] if os.geteuid() == 0 else ["--user", "--map-root-user"])
    done = subprocess.run([*unshare, sys.executable, "-c", script], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    if done.returncode == 77 or "unshare" in done.stderr:
        missing("a file system of one's own: unshare --mount is not allowed here")
    assert done.stdout == "said\n", done.stderr


# ---------------------------------------------------------------- for long

@pytest.mark.parametrize("n", [20000, pytest.param(10**6, marks=pytest.mark.slow)])
def test_nothing_grows(n):
    """Acquire, copy and release again and again: memory, time and the id table stay as they are."""
    ring = gdn.StateRing.create(16, 0, n_layers=1, H_v=1, S_k=2, S_v=2)
    ring.acquire(-5)

    def some(first, count):
        started = time.perf_counter()
        for i in range(first, first + count):
            ring.acquire(i)
            ring.copy(-5, -7 - i)
            ring.release(i)
            ring.release(-7 - i)
        return time.perf_counter() - started

    some(0, n // 10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = [some(n * (i + 1), n // 100) for i in range(90)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2000
    assert min(times[-40:]) < 2 * min(times[:40])
    assert ring.seq_ids == [-5] and ring.n_free == 15
