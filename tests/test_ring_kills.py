"""Three processes on one ring, killed and stopped anywhere: one without free files, one without /proc."""

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import sys
import time
import traceback

import numpy as np
import pytest
from ring_tools import fields, fork
from test_ring_processes import shared, stat, until

import gdn

SHARED = [100, 101]              # sequences that all processes step; 10 w and 10 w + 1 are worker w's own
WORKERS = 3
MS_PRIVATE, CLONE_NEWNS, MS_REC = 1 << 18, 0x20000, 1 << 14


def hide_proc():
    """An empty file system over /proc, for this process alone; whether that is allowed here."""
    libc = ctypes.CDLL(None)
    return (libc.unshare(CLONE_NEWNS) == 0 and libc.mount(b"none", b"/", None, MS_PRIVATE | MS_REC, None) == 0
            and libc.mount(b"none", b"/proc", b"tmpfs", 0, None) == 0)


def write_step(ring, step, positions):
    """In place of kernels: every state and every entry holds the position that it stands for."""
    for i, (n, start) in enumerate(zip(step.n_tokens, positions, strict=True)):
        for layer in range(ring.n_layers):
            ssm = step.ssm(layer).numpy()
            step.conv(layer)
            if ring.form == "log":
                for t in range(n):
                    if step.log_out[i, t] >= 0:
                        ring.log(layer).d[step.log_out[i, t]] = start + t + 1
            for s, row in enumerate(step.rows_out[i]):
                if row >= 0:
                    ssm[row] = start + n - s
            for source, after, row in step.checkpoints if step.checkpoints is not None else ():
                if source == i:
                    ssm[row] = start + after


def check_states(ring, seq_ids):
    """Every committed state is of its position: its row, and each entry on it."""
    for seq_id in seq_ids:
        position = ring.position(seq_id)
        step = ring.begin([seq_id], [0])
        step.abort()
        entries = step.log_in[0][step.log_in[0] >= 0] if ring.form == "log" else []
        for layer in range(ring.n_layers):
            if step.rows_in[0] >= 0:
                assert (ring.ssm(layer).numpy()[step.rows_in[0]] == position - len(entries)).all()
            for i, entry in enumerate(entries):
                assert (ring.log(layer).d[entry] == position - len(entries) + i + 1).all()


def work(memory, worker, seed):
    """Step, take back, copy and release, until the signal."""
    if worker == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    if worker == 2:
        hide_proc()
    ring, rng = gdn.StateRing(memory), np.random.default_rng(seed)
    mine, copied = [10 * worker, 10 * worker + 1], 10 * worker + 5
    with contextlib.suppress(KeyError):
        ring.release(copied)                    # of the process before
    while True:
        ids, own = (mine, True) if rng.random() < 0.7 else (SHARED, False)
        sizes = rng.integers(1, 8, 2)
        try:
            step = ring.begin(ids, sizes)
        except gdn.RingBusyError:
            if own:                             # nobody else has these
                raise
            continue
        write_step(ring, step, [ring.position(i) for i in ids])
        step.abort() if rng.random() < 0.2 else step.commit()
        if own:
            ring.rollback(mine[0], int(rng.integers(ring.max_rollback(mine[0]) + 1)))
            if rng.random() < 0.1:
                ring.copy(mine[1], copied)
                check_states(ring, [copied])
                ring.release(copied)
            check_states(ring, mine)


def spawn(memory, worker, seed, errors):
    pid = fork()
    if pid == 0:
        try:
            os.dup2(errors, 2)
            work(memory, worker, seed)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    return pid


@pytest.mark.parametrize("form", ["planes", "log"])
@pytest.mark.parametrize("n", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_and_stopped_anywhere(form, n, tmp_path):
    memory, ring = shared(16, 4, form=form)
    ids = [10 * worker + i for worker in range(WORKERS) for i in (0, 1)] + SHARED
    for seq_id in ids:
        ring.acquire(seq_id)
        for layer in range(ring.n_layers):
            ring.ssm(layer).numpy()[:] = 0
    rng = np.random.default_rng(n)
    with open(tmp_path / "errors", "w+") as errors:
        pids = [spawn(memory, worker, worker, errors.fileno()) for worker in range(WORKERS)]
        try:
            for i in range(n):
                time.sleep(0.01 + 0.05 * rng.random())
                worker = int(rng.integers(WORKERS))
                if rng.random() < 0.5:
                    os.kill(pids[worker], signal.SIGSTOP)
                    time.sleep(0.05 * rng.random())
                    os.kill(pids[worker], signal.SIGCONT)
                    time.sleep(0.005 * rng.random())
                os.kill(pids[worker], signal.SIGKILL)
                status = os.waitpid(pids[worker], 0)[1]
                pids[worker] = None
                errors.seek(0)
                assert status == signal.SIGKILL, errors.read()
                gdn.StateRing(memory)
                check_states(ring, [10 * worker, 10 * worker + 1])
                pids[worker] = spawn(memory, worker, 1000 + i, errors.fileno())
        finally:
            for pid in filter(None, pids):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        errors.seek(0)
        assert errors.read() == ""
    check_states(gdn.StateRing(memory), ids)
    assert not fields(memory)[1]["mark"].any() and min(ring.position(i) for i in ids) > 0
    for seq_id in ids:                          # every slot and every spare row is there to be had
        ring.begin([seq_id], [40]).abort()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end children with their parent")
def test_workers_end_with_their_parent():
    told, tell = os.pipe()
    parent = fork()
    if parent == 0:
        worker = fork()
        if worker != 0:
            os.write(tell, str(worker).encode())
        time.sleep(60)
        os._exit(1)
    worker = int(os.read(told, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)

    def has_ended():
        try:
            return stat(worker)[0] in "ZX"
        except FileNotFoundError:
            return True
    until(has_ended)


@pytest.mark.parametrize("form", ["planes", "log"])
def test_two_find_the_same_dead(form):
    """Both ask whether an owner lives; who hears it first steps on, and the other takes nothing from it."""
    rounds = 2000
    memory, ring = shared(1, 1, form=form)
    ring.acquire(0)
    slots = fields(memory)[1]
    at = np.frombuffer(mmap.mmap(-1, 3 * 64), np.int32)[::16]    # the round that is on, and those that each has done

    def race(me):
        for number in range(1, rounds + 1):
            while at[0] < number:
                os.sched_yield()
            with contextlib.suppress(gdn.RingBusyError):
                step = ring.begin([0], [1])
                end = time.perf_counter() + 2e-5
                while time.perf_counter() < end:
                    pass
                step.commit(written=True)
            at[me] = number

    pids = []
    for me in (1, 2):
        pids.append(fork())
        if pids[-1] == 0:
            code = 1
            try:
                race(me)
                code = 0
            finally:
                os._exit(code)
    for number in range(1, rounds + 1):
        slots["touched"] = slots["n_tokens"] = slots["owner_start"] = 1
        slots["owner"] = 2**22 + number                          # no process has such a number
        slots["mark"] = 1
        at[0] = number
        while at[1:].min() < number and os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            os.sched_yield()
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert ring.position(0) >= rounds
