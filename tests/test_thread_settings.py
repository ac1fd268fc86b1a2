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


def test_omp_num_threads():
    assert python("import gdn; print(gdn.get_num_threads())", OMP_NUM_THREADS="1") == "1"


def test_threadpoolctl():
    threadpoolctl = optional("threadpoolctl")
    with threadpoolctl.threadpool_limits(1):
        assert gdn.get_num_threads() == 1
