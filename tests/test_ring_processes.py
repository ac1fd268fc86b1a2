"""The ring between processes: killed owners, killed holders of the lock, forks, commits seen from outside."""

import ctypes
import mmap
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from ring_tools import EMPTY, EXTENTS, LAYERS, Truth, committed_row, fields, fork, read_rows, run_layers

import gdn

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX processes")


def shared(n_slots, n_rollback=1, **options):
    memory = mmap.mmap(-1, gdn.StateRing.nbytes_for(n_slots, n_rollback, **options, **EXTENTS))
    return memory, gdn.StateRing.create(n_slots, n_rollback, buffer=memory, **options, **EXTENTS)


def wait():
    time.sleep(60)


@contextmanager
def child(work, then=wait):
    """A forked child that runs work() and then waits to be killed; yields its process id when work() is done."""
    ready, done = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            kept = work()                       # kept: nothing it made may be finalised
            os.write(done, b"y")
            then()
            del kept
        finally:
            os._exit(1)
    os.close(done)
    try:
        assert os.read(ready, 1) == b"y", "the child failed"
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def kill(pid):
    """Kill and wait until it is a zombie; the context reaps it."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def stat(pid):
    """The fields of /proc/pid/stat behind the command's name."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()


def until(true, seconds=20):
    stop = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < stop
        time.sleep(0.001)


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# ---------------------------------------------------------------- owners

@pytest.mark.parametrize("resolve", ["begin", "attach"])
def test_killed_between_begin_and_commit(resolve):
    memory, ring = shared(3, 2)
    truth, keys = Truth(), {0: [], 1: []}
    for seq_id in (0, 1):
        ring.acquire(seq_id)
        for _ in range(3):
            keys[seq_id].append(truth.token(([EMPTY] + keys[seq_id])[-1]))
    with ring.begin([0, 1], [3, 3]) as step:
        run_layers(ring, truth, step, list(keys.values()))
    before = [read_rows(ring, committed_row(ring, i)) for i in (0, 1)]

    def work():
        step = ring.begin([0, 1], [2, 1])
        for layer in range(LAYERS):
            rows = step.rows_out[step.rows_out >= 0]
            ring.ssm(layer).numpy()[rows] = np.nan
            ring.conv(layer).numpy()[rows] = np.nan
        return step

    with child(work) as pid:
        for refused in (lambda: ring.begin([0], [1]), lambda: ring.rollback(0, 1), lambda: ring.save(1)):
            with pytest.raises(ValueError, match="in a step"):
                refused()
        assert ring.position(0) == 3 and ring.max_rollback(0) == 1 and ring.max_rollback(1) == 2
        kill(pid)
        other = gdn.StateRing(memory) if resolve == "attach" else ring
        if resolve == "attach":
            assert not fields(memory)[1]["mark"].any()
        for seq_id in (0, 1):
            after = read_rows(other, committed_row(other, seq_id))
            for a, b in zip(before[seq_id][0] + before[seq_id][1], after[0] + after[1], strict=True):
                assert a.tobytes() == b.tobytes()
            assert other.position(seq_id) == 3
        assert other.max_rollback(0) == 1 and other.max_rollback(1) == 2
        ring.rollback(0, 1)
        truth.check(keys[0][1], *read_rows(ring, committed_row(ring, 0)))


def test_killed_in_place_is_lost():
    memory, ring = shared(2, 0)
    ring.acquire(0)
    saved = ring.save(0)
    with child(lambda: ring.begin([0], [1])) as pid:
        kill(pid)
        with pytest.raises(gdn.StateLostError):
            ring.begin([0], [1])
        ring.load(0, saved)
        ring.begin([0], [1]).commit(written=True)


def test_a_living_process_keeps_its_step_and_commits():
    memory, ring = shared(2)
    for seq_id in (0, 1):
        ring.acquire(seq_id)
    (told, tell), (heard, say) = os.pipe(), os.pipe()
    pid = fork()
    if pid == 0:
        try:
            step = ring.begin([0, 1], [1, 2])
            os.write(say, b"b")
            os.read(told, 1)
            step.commit(written=True)
            os.write(say, b"c")
        finally:
            os._exit(0)
    assert os.read(heard, 1) == b"b"
    with pytest.raises(ValueError, match="in a step"):
        ring.begin([0], [1])
    assert gdn.StateRing(memory).position(1) == 0
    os.write(tell, b"x")
    assert os.read(heard, 1) == b"c"
    assert [ring.position(0), ring.position(1)] == [1, 2]
    os.waitpid(pid, 0)
    for end in (told, tell, heard, say):
        os.close(end)


def test_a_forked_child_does_not_end_its_parents_step():
    memory, ring = shared(1)
    ring.acquire(0)
    step = ring.begin([0], [1])
    pid = fork()
    if pid == 0:
        code = 1
        try:
            with pytest.raises(ValueError, match="another process"):
                step.commit(written=True)
            del step                            # nor abort it by dropping it
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    step.commit(written=True)
    assert ring.position(0) == 1


def test_a_process_id_used_again_is_not_the_owner():
    memory, ring = shared(1)
    ring.acquire(0)
    step = ring.begin([0], [1])
    slots = fields(memory)[1]
    slots["owner_start"] ^= 12345
    ring.begin([0], [1]).abort()
    with pytest.raises(ValueError, match="another process"):
        step.commit(written=True)


def end_first_thread():
    """The calling thread ends as it is, without Python; the others go on."""
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="ends a thread by its system call's number")
def test_a_process_whose_first_thread_has_ended_runs():
    """It is a zombie to all appearances, and so is the one killed after it, whose step is put back."""
    memory, ring = shared(1)
    ring.acquire(0)

    def work():
        began = threading.Event()

        def other():
            step = ring.begin([0], [1])
            began.set()
            wait()
            step.abort()

        threading.Thread(target=other).start()
        assert began.wait(20)

    with child(work, end_first_thread) as pid:
        until(lambda: stat(pid)[0] == "Z")
        with pytest.raises(ValueError, match="in a step"):
            ring.begin([0], [1])
        kill(pid)
        ring.begin([0], [1]).commit(written=True)


@pytest.mark.parametrize("mark", ["acquire", "reset", "lost load"])
def test_killed_while_moving_bytes(mark):
    memory, ring = shared(2)
    ring.acquire(0)
    ring.begin([0], [2]).commit(written=True)
    slots = fields(memory)[1]
    kind, state, touched = {"acquire": (3, 3, 0), "reset": (2, 1, 1), "lost load": (2, 2, 3)}[mark]
    slots[0]["mark"], slots[0]["state"], slots[0]["touched"], slots[0]["owner"] = kind, state, touched, dead_pid()
    slots[0]["owner_start"] = 1
    if mark == "acquire":
        with pytest.raises(KeyError):
            ring.position(0)
        assert ring.n_free == 2
    elif mark == "lost load":
        with pytest.raises(gdn.StateLostError):
            ring.position(0)
    else:
        assert ring.position(0) == 2 and ring.max_rollback(0) == 1


def test_a_slot_of_the_dead_can_be_asked_for():
    memory, ring = shared(2)
    ring.acquire(0, 1)
    slots = fields(memory)[1]
    slots[1]["mark"], slots[1]["state"], slots[1]["owner"], slots[1]["owner_start"] = 3, 3, dead_pid(), 1
    assert ring.acquire(5, 1) == 1 and ring.seq_ids == [5]


def test_a_full_ring_finds_slots_of_the_dead():
    memory, ring = shared(1)
    ring.acquire(0)
    slots = fields(memory)[1]
    slots[0]["mark"], slots[0]["state"], slots[0]["owner"], slots[0]["owner_start"] = 3, 3, dead_pid(), 1
    assert ring.acquire(5) == 0


# ---------------------------------------------------------------- the lock and the journal

@pytest.mark.parametrize("n_done", [0, 1, 2, 3])
def test_killed_in_the_middle_of_a_commit(n_done):
    """Records half changed, the lock held by nobody alive: all of the commit is undone."""
    memory, ring = shared(3)
    for seq_id in range(3):
        ring.acquire(seq_id)
    step = ring.begin([0, 1, 2], [1, 2, 1])
    before = fields(memory)[1].copy()
    step.commit(written=True)
    header, slots, journal = fields(memory)
    after = slots.copy()
    slots[:] = before
    slots[:n_done] = after[:n_done]
    for i in range(n_done):
        journal[i]["slot"], journal[i]["old"] = i, before[i]
    header["n_journal"], header["sequence"], header["lock"] = n_done, header["sequence"] + 1, dead_pid()
    started = time.monotonic()
    assert [ring.position(i) for i in range(3)] == [0, 0, 0]
    assert time.monotonic() - started < 5
    assert header["lock"][0] == 0 and header["n_journal"][0] == 0 and header["sequence"][0] % 2 == 0
    assert (slots == before).all()
    with pytest.raises(ValueError, match="in a step"):      # this process is alive and so is its step
        ring.begin([0], [1])


def child_that_commits(ring, n):
    """The process id of a child that commits a token of sequences 0..n-1 until it is killed."""
    pid = fork()
    if pid == 0:
        try:
            while True:
                ring.begin(range(n), [1] * n).commit(written=True)
        finally:
            os._exit(1)
    return pid


def test_killed_at_any_moment():
    """Commits of many sequences are whole, wherever the committing process is killed."""
    n, rng = 32, np.random.default_rng(3)
    memory, ring = shared(n, 2)
    for seq_id in range(n):
        ring.acquire(seq_id)
    half_changes = 0
    for _ in range(60):
        pid = child_that_commits(ring, n)
        time.sleep(0.002 + rng.random() * 0.01)
        kill(pid)
        half_changes += int(fields(memory)[0]["sequence"][0] % 2)
        other = gdn.StateRing(memory)
        os.waitpid(pid, 0)
        header, slots, _ = fields(memory)
        assert header["lock"][0] == 0 and header["sequence"][0] % 2 == 0 and not slots["mark"].any()
        assert len(set(slots["position"].tolist())) == len(set(slots["head"].tolist())) == 1
        assert {other.position(i) for i in range(n)} == set(slots["position"].tolist())
        ring.begin(range(n), [1] * n).commit(written=True)
    assert ring.position(0) > 100
    print(f"{half_changes} of 60 kills fell into a change")


def test_a_commit_is_seen_whole():
    n = 24
    memory, ring = shared(n)
    for seq_id in range(n):
        ring.acquire(seq_id)
    pid = child_that_commits(ring, n)
    try:
        header, slots, _ = fields(memory)
        seen, changes, stop = set(), 0, time.monotonic() + 1
        while time.monotonic() < stop:
            sequence = int(header["sequence"][0])
            positions = slots["position"].copy()
            if sequence % 2 == 0 and int(header["sequence"][0]) == sequence:
                assert len(set(positions.tolist())) == 1
                seen.add(int(positions[0]))
            else:
                changes += 1
        assert len(seen) > 10
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_processes_and_threads_share_the_lock():
    """Four processes acquire, step and release on one ring; nothing is lost or doubled."""
    memory, ring = shared(8)
    pids = []
    for worker in range(4):
        pid = fork()
        if pid == 0:
            code = 1
            try:
                mine = gdn.StateRing(memory)
                for i in range(300):
                    ids = [worker * 1000 + i, worker * 1000 + 500 + i]
                    for seq_id in ids:
                        mine.acquire(seq_id)
                    mine.begin(ids, [2, 1]).commit(written=True)
                    assert [mine.position(seq_id) for seq_id in ids] == [2, 1]
                    mine.release(ids[0])
                    mine.release(ids[1])
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert ring.n_free == 8


def lock_token(pid):
    """What a process writes into the ring's lock."""
    start = int(stat(pid)[19])
    with open("/proc/sys/kernel/random/boot_id", "rb") as boot:
        value = 2166136261
        for byte in boot.read():
            value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return pid | ((start ^ value << 32) * 0x9E3779B97F4A7C15 & 2**64 - 1) >> 54 << 22


def test_a_process_id_used_again_does_not_hold_the_lock():
    """The lock is of a process with this one's id that started at another time."""
    memory, ring = shared(1)
    fields(memory)[0]["lock"] = lock_token(os.getpid()) ^ 1 << 31
    started = time.monotonic()
    ring.acquire(0)
    assert time.monotonic() - started < 5


@pytest.mark.slow
@pytest.mark.parametrize("call", ["copy", "reset", "acquire"])
def test_the_lock_is_lost_while_bytes_move(call):
    """A call that cannot end what it began says so, and leaves its sequences usable."""
    extents = {"n_layers": 1, "H_v": 32, "S_k": 1024, "S_v": 1024}
    memory = mmap.mmap(-1, gdn.StateRing.nbytes_for(2, 0, spare=1, **extents))
    ring = gdn.StateRing.create(2, 0, spare=1, buffer=memory, **extents)
    ring.acquire(1)
    header, slots, _ = fields(memory)
    errors, moving = [], slots[0] if call == "reset" else slots[1]

    def work():
        try:
            getattr(ring, call)(*{"copy": (1, 2), "acquire": (2,)}.get(call, (1,)))
        except ValueError as error:
            errors.append(str(error))

    with child(lambda: None) as pid:
        worker, token = threading.Thread(target=work), lock_token(pid)
        worker.start()
        while moving["mark"] == 0:
            pass
        header["lock"] = token
        worker.join()
        header["lock"] = 0
    assert errors == ["the ring's lock is held by a process that does not let go"]
    assert ring.seq_ids == [1]
    ring.begin([1], [1]).commit(written=True)
    ring.acquire(2)
    ring.release(1)


@pytest.mark.slow
def test_a_lock_that_is_never_released():
    memory, ring = shared(1)

    with child(lambda: None) as pid:
        token = lock_token(pid)
        fields(memory)[0]["lock"] = token
        started = time.monotonic()
        with pytest.raises(ValueError, match="does not let go"):
            ring.acquire(0)
        assert 9 < time.monotonic() - started < 15
        fields(memory)[0]["lock"] = token
        kill(pid)
        assert ring.acquire(0) == 0
