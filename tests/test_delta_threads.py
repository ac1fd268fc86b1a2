"""Threads: the same bits for any number, concurrent callers, the GIL, forked children."""

import contextlib
import ctypes
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers import GATES, assert_close, case, run, same_bits, truth

import gdn

INPUTS = ("q", "k", "v", "g", "beta")


def python(script, timeout=120):
    """Run a script in a process of its own; a hang is a failure."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SHAPES = [(1, 1, 1, 1, 64, 256), (1, 40, 1, 1, 64, 256), (1, 100, 2, 4, 32, 48), (3, 33, 1, 3, 20, 33),
          (5, 1, 2, 2, 16, 16), (1, 70, 1, 1, 128, 16)]


@pytest.mark.parametrize("mode", ["recurrent", "chunked"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("fla", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_threads_gives_the_same_bits(rng, mode, per_channel, fla, shape):
    n_seqs, n_tokens, H_k, H_v, S_k, S_v = shape
    c = case(rng, n_seqs, n_tokens, H_k, H_v, S_k, S_v, "mix", per_channel)
    if fla:
        c["state"] = np.ascontiguousarray(c["state"].swapaxes(-1, -2)).swapaxes(-1, -2)
    one = run(c, mode=mode, head_map="tiled", n_threads=1)
    assert_close(one[0], truth(c, "tiled")[0], "out")
    for n_threads in (2, 3, 4, 7, 64, None):
        more = run(c, mode=mode, head_map="tiled", n_threads=n_threads)
        assert same_bits(more[0], one[0]) and same_bits(more[1], one[1]), n_threads


@pytest.mark.parametrize("per_channel", [False, True])
def test_two_hundred_runs_give_the_same_bits(rng, per_channel):
    c = case(rng, 2, 40, 2, 4, 32, 48, "mix", per_channel)
    first = run(c, head_map="tiled", n_threads=1)
    for i in range(200):
        again = run(c, head_map="tiled", n_threads=(1, 2, 3, 7)[i % 4])
        assert same_bits(again[0], first[0]) and same_bits(again[1], first[1]), f"run {i}"


@pytest.mark.parametrize("mode", ["recurrent", "chunked"])
def test_in_place_rows_under_threads_give_the_same_bits(rng, mode):
    """Rows that are read by one sequence and written by another, split over more workers than heads."""
    c = case(rng, 3, 20, 1, 1, 32, 256, "-1e-3", state=False)
    start = rng.standard_normal((9, 1, 256, 32)).astype(np.float32)
    results = []
    for n_threads in (1, 2, 3, 7) * 10:
        cache = start.copy()
        out = gdn.gated_delta_net_inplace(*(c[n] for n in INPUTS), cache, [0, 3, 6],
                                          [[3, 4, 5], [6, 7, 8], [0, 1, 2]], mode=mode, n_threads=n_threads)
        results.append((out, cache))
    assert all(same_bits(a, results[0][0]) and same_bits(b, results[0][1]) for a, b in results)


def test_the_default_number_can_be_set(rng):
    c = case(rng, 2, 40, 2, 2)
    before = gdn.get_num_threads()
    assert before >= 1
    expected = run(c, n_threads=1)
    try:
        for n in (1, 3):
            gdn.set_num_threads(n)
            assert gdn.get_num_threads() == n
            out, state = run(c)
            assert same_bits(out, expected[0]) and same_bits(state, expected[1])
        for bad, error in ((0, ValueError), (-1, ValueError), ("2", TypeError), (1.5, TypeError), (True, TypeError)):
            with pytest.raises(error, match="n_threads"):
                gdn.set_num_threads(bad)
            assert gdn.get_num_threads() == 3
    finally:
        gdn.set_num_threads(None)
    assert gdn.get_num_threads() == before


# ---- the work partition ----------------------------------------------------------------------------------------

class Table(ctypes.Structure):
    """gdn_level of gdn/kernels/level.pxd, up to the convolution's function."""
    ITEM = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    _fields_ = [("name", ctypes.c_char_p), ("vl", ctypes.c_int), ("delta_plan", ctypes.c_void_p),
                ("delta_scratch", ctypes.c_void_p), ("conv_scratch", ctypes.c_void_p), ("delta", ITEM), ("conv", ITEM)]


@pytest.fixture
def work_items():
    """work_items(workers, call, name): the (item, worker) pairs of the kernel named that call() runs, each as ever.  A worker's
    first item waits until as many workers have one, so that it does not matter who is quick."""
    module = sys.modules[f"gdn._level_{gdn.show_config('dicts')['level']}"]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = Table.from_address(pointer(module.table, b"gdn._level"))
    assert table.name.decode() == gdn.show_config("dicts")["level"]

    def observe(workers, call, name="delta"):
        kernel = Table.ITEM(ctypes.cast(getattr(table, name), ctypes.c_void_p).value)
        seen, together = [], threading.Barrier(workers)

        @Table.ITEM
        def item_fn(job, item, scratch):
            me = threading.get_native_id()
            first = all(worker != me for _, worker in seen)
            seen.append((item, me))
            if first and len({worker for _, worker in seen}) <= workers:
                with contextlib.suppress(threading.BrokenBarrierError):
                    together.wait(20)
            kernel(job, item, scratch)

        setattr(table, name, item_fn)
        try:
            call()
        finally:
            setattr(table, name, kernel)
        return seen

    return observe


@pytest.mark.parametrize("mode", ["recurrent", "chunked"])
@pytest.mark.parametrize("heads, n_seqs, S_v, n_threads, items, items_single, workers", [
    ((1, 1), 1, 256, 1, 1, 1, 1),        # one worker: nothing to split for
    ((1, 1), 1, 256, 4, 4, 4, 4),        # few heads, many workers: the value columns are split
    ((1, 2), 1, 256, 4, 4, 4, 4),        # value heads that share a key head are one item a part
    ((2, 2), 1, 256, 4, 4, 4, 4),
    ((1, 1), 3, 256, 4, 6, 6, 4),
    ((4, 8), 1, 256, 4, 4, 8, 4),        # heads enough; of single tokens every value head is an item
    ((2, 2), 3, 256, 4, 6, 6, 4),
    ((1, 1), 1, 8, 4, 1, 1, 1),          # a tile of columns is not split
])
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_work_items(rng, work_items, mode, heads, n_seqs, S_v, n_threads, items, items_single, workers,
                    n_tokens):
    if not gdn.show_config("dicts")["openmp"]:
        workers = 1
    c = case(rng, n_seqs, n_tokens, *heads, 16, S_v)
    out, state = np.empty_like(c["v"]), np.empty_like(c["state"])
    seen = work_items(workers, lambda: run(c, mode=mode, head_map="tiled", n_threads=n_threads, out=out, state_out=state))
    assert sorted(item for item, _ in seen) == list(range(items_single if n_tokens == 1 else items))
    assert len({worker for _, worker in seen}) == workers
    expected, final, _ = truth(c, "tiled")
    assert_close(out, expected, "out")
    assert_close(state, final, "state")


@pytest.fixture
def four_threads():
    gdn.set_num_threads(4)
    yield
    gdn.set_num_threads(None)


def workers_by_default(work_items, workers, call, name):
    if not gdn.show_config("dicts")["openmp"]:
        workers = 1
    assert len({worker for _, worker in work_items(workers, call, name)}) == workers


@pytest.mark.parametrize("mode", ["recurrent", "chunked"])
@pytest.mark.parametrize("H, n_tokens, workers", [(4, 7, 1), (4, 8, 2), (4, 23, 3), (4, 24, 4), (1, 31, 1), (1, 96, 4)])
def test_workers_of_the_delta_rule_by_default(rng, work_items, four_threads, mode, H, n_tokens, workers):
    """One more for every 2^17 state elements to update, n_tokens * H * 16 * 256 here."""
    c = case(rng, 1, n_tokens, H, H, 16, 256)
    workers_by_default(work_items, workers, lambda: run(c, mode=mode), "delta")


@pytest.mark.parametrize("n_tokens, workers", [(15, 1), (16, 2), (47, 3), (48, 4), (100, 4)])
def test_workers_of_the_convolution_by_default(rng, work_items, four_threads, n_tokens, workers):
    """One more for every 16384 values, n_tokens * 1024 here."""
    x, weight = rng.standard_normal((1, n_tokens, 1024), np.float32), rng.standard_normal((1024, 4), np.float32)
    workers_by_default(work_items, workers, lambda: gdn.causal_conv1d(x, weight), "conv")


# ---- several callers -------------------------------------------------------------------------------------------

def together(n, work):
    """Run work(i) in n Python threads at once and pass on what they raise."""
    errors, barrier = [], threading.Barrier(n)

    def body(i):
        try:
            barrier.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
        assert not t.is_alive(), "a call hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("shared", [False, True], ids=["own caches", "one cache"])
def test_eight_callers(rng, n_threads, shared):
    """Each decodes its own sequence; sizes differ, so that scratch handed to two at once would show."""
    sizes = [(16, 16), (33, 20), (64, 64), (20, 128), (5, 3), (96, 48), (128, 128), (32, 256)]
    if shared:
        sizes = [(32, 48)] * 8
    cases = [case(np.random.default_rng(i), 1, 30, 1, 2, *sizes[i], GATES[i], bool(i % 2)) for i in range(8)]
    serial = [run(c, head_map="tiled", n_threads=1, mode="recurrent") for c in cases]
    caches = [np.concatenate([c["state"], c["state"]]) for c in cases]
    if shared:
        whole = np.concatenate(caches)
        caches = [whole] * 8
    outs = [np.empty_like(c["v"]) for c in cases]

    def work(i):
        c, row = cases[i], 2 * i if shared else 0
        for _ in range(5):
            caches[i][row] = c["state"][0]
            for t in range(30):
                gdn.gated_delta_net_inplace(*(c[n][:, t:t + 1] for n in INPUTS), caches[i], [row], head_map="tiled",
                                            out=outs[i][:, t:t + 1], n_threads=n_threads)
            out, state = run(c, head_map="tiled", mode="chunked", n_threads=n_threads)
            assert_close(out, serial[i][0], f"chunked out of caller {i}")
            assert_close(state, serial[i][1], f"chunked state of caller {i}")

    together(8, work)
    for i, c in enumerate(cases):
        row = 2 * i if shared else 0
        assert_close(outs[i], serial[i][0], f"out of caller {i}")
        assert_close(caches[i][row:row + 1], serial[i][1], f"state of caller {i}")
        assert same_bits(caches[i][row + 1], c["state"][0]), "another row was written"


def test_errors_under_threads_arrive(rng):
    c = case(rng, 1, 20)
    good = run(c, n_threads=1)

    def work(i):
        for _ in range(50):
            if i % 2:
                with pytest.raises(ValueError, match="scale"):
                    run(c, n_threads=2, scale=float("nan"))
                with pytest.raises(IndexError, match="rows_in"):
                    gdn.gated_delta_net_inplace(*(c[n] for n in INPUTS), c["state"].copy(), [1], n_threads=2)
            else:
                assert same_bits(run(c, n_threads=2)[0], good[0])

    together(6, work)


def repeated(shape, n, axis):
    """Ones, the same memory n times along an axis."""
    return np.broadcast_to(np.ones(shape, np.float32), (*shape[:axis], n, *shape[axis + 1:]))


def long_delta(mode, n):
    q, g = repeated((1, 1, 16, 64), n, 1), repeated((1, 1, 16), n, 1)
    out = np.empty(q.shape, np.float32)
    return lambda: gdn.gated_delta_net(q, q, q, -g, g, scale=0, mode=mode, out=out, n_threads=1)


def long_conv(n):
    x, weight, out = repeated((1, 1, 16), n, 1), repeated((16, 1), 500, 1), np.empty((1, n, 16), np.float32)
    return lambda: gdn.causal_conv1d(x, weight, out=out, n_threads=1)


def long_solve(n):
    a, b, out = repeated((1, 256, 256), n, 0), repeated((1, 256, 64), n, 0), np.empty((n, 256, 64), np.float32)
    return lambda: gdn.solve_tri(a, b, unit=True, out=out, n_threads=1)


def long_rows(call, n):
    """Rows of one value: what takes time is finding them."""
    x, out = repeated((1, 1024, 1, 1), n, 0), np.empty((n, 1024, 1, 1), np.float32)
    return lambda: call(x, out=out, n_threads=1)


ONE = np.ones(1, np.float32)
LONG = {
    "recurrent": lambda n: long_delta("recurrent", 16 * n),
    "chunked": lambda n: long_delta("chunked", 64 * n),
    "conv": lambda n: long_conv(64 * n),
    "solve_tri": long_solve,
    "l2_norm": lambda n: long_rows(gdn.l2_norm, 16 * n),
    "rms_norm_gated": lambda n: long_rows(lambda x, **options: gdn.rms_norm_gated(x, x, ONE, **options), 16 * n),
    "decay_gate": lambda n: long_rows(lambda x, **options: gdn.decay_gate(x, -ONE, ONE, **options), 16 * n),
}


@pytest.mark.parametrize("name", LONG)
def test_the_gil_is_free_during_a_call(name):
    """A thread that sleeps and counts goes on counting."""
    n, tick, stop = 32, [0], threading.Event()

    def count():
        while not stop.is_set():
            time.sleep(0.001)
            tick[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        while True:
            call = LONG[name](n)
            start, before = time.perf_counter(), tick[0]
            call()
            ticks, seconds = tick[0] - before, time.perf_counter() - start
            if seconds > 0.2:
                break
            n *= 2
    finally:
        stop.set()
        counter.join()
    assert ticks >= 10, f"{ticks} ticks in {seconds:.2f} s"


# ---- processes -------------------------------------------------------------------------------------------------

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")

FORK = """
import os, signal, sys
import numpy as np
import gdn
rng = np.random.default_rng(0)
n = (2, 50, 4)
q, k, v = (rng.standard_normal((*n, 32)).astype(np.float32) * 0.1 for _ in range(3))
g, beta = np.full(n, -0.1, np.float32), np.full(n, 0.5, np.float32)
gdn.set_num_threads(4)
here = gdn.gated_delta_net(q, k, v, g, beta, n_threads=4)
pid = os.fork()
if pid == 0:
    signal.alarm(30)                                    # a hang ends the child by this signal
    there = gdn.gated_delta_net(q, k, v, g, beta, n_threads=4)
    same = all(np.array_equal(a, b) for a, b in zip(here, there))
    alone = len(os.listdir("/proc/self/task")) == gdn.get_num_threads() == 1
    grandchild = os.fork()
    if grandchild == 0:
        signal.alarm(30)
        gdn.gated_delta_net(q, k, v, g, beta, n_threads=4)
        os._exit(0)
    ok = os.waitpid(grandchild, 0)[1] == 0
    os._exit(0 if same and alone and ok else 2 if not same else 3 if not alone else 4)
status = os.waitpid(pid, 0)[1]
assert status == 0, f"child ended with status {status}"
assert gdn.get_num_threads() == 4
again = gdn.gated_delta_net(q, k, v, g, beta, n_threads=4)
assert all(np.array_equal(a, b) for a, b in zip(here, again))
"""


@LINUX
def test_a_forked_child_works_serially():
    python(FORK)


COUNT = """
import os
import numpy as np
import gdn
before = len(os.listdir("/proc/self/task"))
n = (1, {n_tokens}, {H})
q, v = np.ones((*n, 16), np.float32) / 4, np.ones((*n, {S_v}), np.float32)
gdn.gated_delta_net(q, q, v, np.zeros(n, np.float32), np.ones(n, np.float32), n_threads={n_threads})
print(len(os.listdir("/proc/self/task")) - before)
"""


@LINUX
@pytest.mark.parametrize("H, S_v, n_threads, most", [(2, 4, 64, 1), (1, 1, 64, 0), (3, 16, 1, 0), (8, 16, 3, 2)])
@pytest.mark.parametrize("n_tokens", [1, 40])
def test_no_more_threads_than_work(H, S_v, n_threads, most, n_tokens):
    started = int(python(COUNT.format(H=H, S_v=S_v, n_threads=n_threads, n_tokens=n_tokens)))
    assert started <= most
