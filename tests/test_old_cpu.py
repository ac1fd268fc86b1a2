"""The base level on a processor without AVX, emulated: the wheel must run where its builder's instructions do not."""

import os
import platform
import shutil
import subprocess
import sys

import pytest
from helpers import missing

QEMU = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
if platform.machine() != "x86_64":
    pytest.skip("the base level is all there is on this machine", allow_module_level=True)
if not QEMU:
    missing("qemu-x86_64 (Debian: qemu-user-static)")


def old_cpu(*arguments, **env):
    return subprocess.run([QEMU, "-cpu", "Nehalem", sys.executable, *arguments], capture_output=True, text=True,
                          timeout=1200, env={**os.environ, **env})


def test_base_is_chosen():
    done = old_cpu("-c", "import gdn; print(gdn.show_config('dicts')['level'])", GDN_LEVEL="")
    assert (done.returncode, done.stdout) == (0, "base\n"), done.stderr


@pytest.mark.parametrize("level", ["v3", "v4"])
def test_a_level_above_the_cpu_is_an_import_error(level):
    done = old_cpu("-c", "import gdn", GDN_LEVEL=level)
    assert done.returncode == 1
    assert f"ImportError: GDN_LEVEL={level} asks for more than this machine runs" in done.stderr


@pytest.mark.slow
def test_check_passes():
    done = old_cpu("-m", "gdn", "check", GDN_LEVEL="")
    assert done.returncode == 0, done.stdout + done.stderr
