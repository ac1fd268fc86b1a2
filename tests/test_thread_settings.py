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


def test_default_is_within_the_quota():
    """On eight CPUs, in a container that may use one and a half."""
    code = """
import builtins, io, os
files = {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "150000 100000"}
real = open
builtins.open = lambda path, *rest, **options: io.StringIO(files[path]) if path in files else real(path, *rest, **options)
os.sched_getaffinity = lambda pid: range(8)
import gdn
print(gdn.get_num_threads())"""
    assert python(code, OMP_NUM_THREADS="8") == ("2" if gdn.show_config("dicts")["openmp"] else "1")


def test_omp_num_threads():
    assert python("import gdn; print(gdn.get_num_threads())", OMP_NUM_THREADS="1") == "1"


def test_threadpoolctl():
    threadpoolctl = optional("threadpoolctl")
    with threadpoolctl.threadpool_limits(1):
        assert gdn.get_num_threads() == 1
