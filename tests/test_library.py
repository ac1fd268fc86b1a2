"""libgdn.so: what it needs, who can use it, and that it and Python's modules agree."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from c_tools import Api
from conftest import library_table

import gdn

PROGRAM = r"""
#include <gdn.h>
#include <stdio.h>
#include <string.h>
int main(void)
{
    const gdn_api *api = gdn_get_api(GDN_ABI);
    size_t bytes;
    gdn_ring_params params;
    if (gdn_get_api(GDN_ABI + 1) || gdn_get_api(0)) return 3;
    if (!gdn_api_ok(api)) return 2;
    memset(&params, 0, sizeof(params));
    params.size = sizeof(params);
    params.n_slots = params.n_layers = params.H_v = params.S_k = params.S_v = params.conv_width = 1;
    if (api->ring_size(&params, &bytes) != GDN_OK || gdn_get_api(GDN_ABI) != api) return 1;
    return puts(api->status_string(GDN_OK)) < 0;
}
"""


def build(folder, name, *command):
    source = folder / name
    source.write_text(PROGRAM)
    flags = subprocess.run([sys.executable, "-m", "gdn", "config", "--cflags"], check=True, capture_output=True, text=True)
    libs = subprocess.run([sys.executable, "-m", "gdn", "config", "--libs"], check=True, capture_output=True, text=True)
    subprocess.run([*command, "-Wall", "-Wextra", "-Werror", *flags.stdout.split(), str(source), "-o", str(folder / "use"),
                    *libs.stdout.split()], check=True)
    return folder / "use"


@pytest.mark.parametrize("path, only", [(gdn.get_library, "gdn_get_api"), (gdn.get_ggml_backend, "ggml_backend_init")])
def test_symbols(path, only):
    """One function is exported, and nothing of Python, ggml or C++ is needed."""
    lines = subprocess.run(["nm", "-D", path()], check=True, capture_output=True, text=True).stdout.splitlines()
    defined = [line.split()[-1] for line in lines if line.split()[-2] in "TDBRVW"]
    needed = [line.split()[-1].split("@")[0] for line in lines if line.split()[-2] == "U"]
    assert defined == [only]
    assert not [name for name in needed if re.match("_?Py|ggml|_Z", name)]
    dynamic = subprocess.run(["readelf", "-d", path()], check=True, capture_output=True, text=True).stdout
    assert "NODELETE" in dynamic and "libpython" not in dynamic


@pytest.mark.parametrize("name, command", [("use.c", ["cc", "-std=c99"]), ("use.cpp", ["c++", "-std=c++11"])])
def test_programs_without_python(tmp_path, name, command):
    use = build(tmp_path, name, *command)
    assert subprocess.run([use], capture_output=True, text=True, check=True).stdout.strip()
    for level, status in (("base", 0), ("v9", 2), ("", 0)):
        assert subprocess.run([use], env={**os.environ, "GDN_LEVEL": level}, capture_output=True).returncode == status


def test_cmake(tmp_path):
    (tmp_path / "use.c").write_text(PROGRAM)
    (tmp_path / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.16)\nproject(use C)\nfind_package(gdn REQUIRED)\n"
                                             "add_executable(use use.c)\ntarget_link_libraries(use PRIVATE gdn::gdn)\n")
    where = Path(gdn.get_library()).parent
    for command in (["cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-Dgdn_DIR={where}"], ["cmake", "--build", tmp_path / "b"],
                    [tmp_path / "b" / "use"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_installed(tmp_path):
    """make install-libgdn: pkg-config's file and CMake's find what was installed."""
    root = Path(gdn.__file__).parents[1]
    if not (root / "Makefile").is_file():
        pytest.skip("installed without its source tree")
    subprocess.run(["make", "-s", "-C", root, "-o", "libgdn", "install-libgdn", f"PREFIX={tmp_path}"], check=True)
    text = (tmp_path / "lib/pkgconfig/gdn.pc").read_text()
    assert "prefix=${pcfiledir}/../..\n" in text and f"Version: {gdn.__version__}" in text
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "libgdn.so", "libggml-gdn.so", "gdn.h", "gdn.pc", "gdnConfig.cmake"}


def test_one_ring_from_both_tables():
    """A step begun by one is known to the other; states written by one are read by the other."""
    ring = gdn.StateRing.create(2, n_layers=1, H_v=1, S_k=16, S_v=16, n_rollback=2)
    ring.acquire(7)
    mine, other = Api.from_address(gdn.capi), Api.from_address(library_table())
    address = ctypes.c_void_p(ring.address)
    position = ctypes.c_int64(-1)
    with ring.begin([7], [3]) as step:
        np.asarray(step.ssm(0))[step.rows_out[0][0]] = np.arange(256, dtype=np.float32).reshape(1, 16, 16)
        assert other.ring_release(address, 7) == mine.ring_release(address, 7) != 0
    assert other.ring_position(address, 7, ctypes.byref(position)) == 0 and position.value == 3
    assert other.ring_rollback(address, 7, 1) == 0 and ring.position(7) == 2
    assert other.ring_copy(address, 7, 8) == 0 and ring.position(8) == 2
