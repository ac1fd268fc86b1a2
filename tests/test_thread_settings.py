"""How many threads a call uses, and who is listened to."""

import os
import subprocess
import sys

import pytest
from helpers import optional

import gdn
from gdn import _core


@pytest.fixture(autouse=True)
def default_threads():
    yield
    gdn.set_num_threads(None)


def python(code, **env):
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, check=True, capture_output=True,
                          text=True).stdout.strip()


def test_set_and_reset():
    default = gdn.get_num_threads()
    gdn.set_num_threads(5)
    assert gdn.get_num_threads() == 5
    gdn.set_num_threads(None)
    assert gdn.get_num_threads() == default >= 1


@pytest.mark.parametrize("n, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError), (True, TypeError)])
def test_bad_numbers(n, error):
    with pytest.raises(error, match="n_threads"):
        gdn.set_num_threads(n)


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


def test_cgroup_quota(tmp_path):
    assert _core.cgroup_quota(str(tmp_path)) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert _core.cgroup_quota(str(tmp_path)) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("150000\n")
    assert _core.cgroup_quota(str(tmp_path)) == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _core.cgroup_quota(str(tmp_path)) == 2
    (tmp_path / "cpu.max").write_text("300000 100000\n")
    assert _core.cgroup_quota(str(tmp_path)) == 3


def test_forked_child_runs_serial():
    code = """
import os, numpy as np, gdn
gdn.set_num_threads(4)
x = np.ones((64, 64, 128), np.float32)
gdn.l2_norm(x)
pid = os.fork()
if pid == 0:
    gdn.l2_norm(x)
    os._exit(0 if gdn.get_num_threads() == 1 else 3)
print(os.waitpid(pid, 0)[1], gdn.get_num_threads())
"""
    assert python(code) == "0 4"
