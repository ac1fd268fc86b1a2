"""Which interpreters may import gdn: one of a process, with its lock."""

import subprocess
import sys

import pytest

SUB = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
FIRST
code = "import sys; sys.path[:0] = " + repr(sys.path) + '''
try:
    import gdn, numpy
    print(gdn.l2_norm(numpy.ones((1, 4), "f")).sum())
except ImportError as error:
    print("ImportError:", error)
'''
sub = interpreters.create(*LEGACY)
interpreters.run_string(sub, code)
interpreters.destroy(sub)
LAST
print("end")
"""
USE = "import gdn, numpy; assert gdn.l2_norm(numpy.ones((1, 4), 'f')).sum() > 1.9"


def run(first, last):
    legacy = "()" if sys.version_info < (3, 13) else "('legacy',)"
    program = SUB.replace("FIRST", first).replace("LAST", last).replace("LEGACY", legacy)
    return subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)


def test_a_second_interpreter_is_refused():
    """By numpy, before gdn loads anything; the first one goes on."""
    done = run(USE, USE)
    assert done.returncode == 0 and "ImportError:" in done.stdout and done.stdout.endswith("\nend\n"), done.stdout + done.stderr


def test_any_interpreter_may_be_the_one():
    done = run("", "")
    assert done.returncode == 0 and done.stdout.startswith("1.99"), done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(sys, "_is_gil_enabled"), reason="CPython before 3.13 has no other way")
def test_the_lock_is_turned_on():
    """Scratch of Python's calls is guarded by it: the modules say so, and a free-threaded CPython turns it on."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", "import gdn, sys; print(sys._is_gil_enabled())"],
                          capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
