"""How many threads a call uses, and who is listened to."""

import os
import subprocess
import sys

from helpers import optional

import gdn


def python(code, **env):
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, check=True, capture_output=True,
                          text=True).stdout.strip()


def test_more_than_a_machine_starts_are_not_asked_for():
    gdn.set_num_threads(10**6)
    try:
        assert gdn.get_num_threads() == max(64, 4 * len(os.sched_getaffinity(0)))
    finally:
        gdn.set_num_threads(None)


def test_default_is_what_the_process_may_use():
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); import gdn; print(gdn.get_num_threads())"
    assert python(code) == "1"


def test_default_beside_bound_threads():
    """OpenMP binds the main thread to one CPU where it is told to; the process may still use the others."""
    n = min(2, len(os.sched_getaffinity(0)))
    code = "import gdn; print(gdn.get_num_threads())"
    assert python(code, OMP_PROC_BIND="true", OMP_NUM_THREADS="2") == (str(n) if gdn.show_config("dicts")["openmp"] else "1")


def test_more_threads_than_the_system_gives():
    """Under a limit of memory OpenMP would end the process; a call takes as many threads as there are, same bits."""
    code = """
import resource, numpy as np, gdn
x = np.random.default_rng(0).standard_normal((1, 64, 64, 128)).astype(np.float32)
v, g = x, -np.ones((1, 64, 64), np.float32)
want = gdn.gated_delta_net(x, x, v, g, -g, n_threads=1, qk_l2norm=True)[0]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for spare in (3 << 20, 20 << 20, 100 << 20, 300 << 20):
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
    for n in (64, 2, 64):
        try:
            got = gdn.gated_delta_net(x, x, v, g, -g, n_threads=n, qk_l2norm=True)[0]
            assert (got == want).all()
        except MemoryError:
            assert spare < 100 << 20
print("lives")"""
    assert python(code) == "lives"


def test_omp_num_threads():
    assert python("import gdn; print(gdn.get_num_threads())", OMP_NUM_THREADS="1") == "1"


def test_threadpoolctl():
    threadpoolctl = optional("threadpoolctl")
    with threadpoolctl.threadpool_limits(1):
        assert gdn.get_num_threads() == 1
