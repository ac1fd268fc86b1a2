"""The package as a stranger gets it: sdist from a clean tree, wheel from the sdist, used away from the tree.

The wheel is built once, by a compiler that knows no OpenMP: everything else must be as in the build under test.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import gdn

ROOT = Path(__file__).parents[1]
CLUTTER = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.so", "__pycache__", "*.egg-info", ".hypothesis")

NO_OPENMP = """#!/bin/sh
for argument in "$@"; do
    case "$argument" in -fopenmp*) echo "no such option: $argument" >&2; exit 1;; esac
done
exec {compiler} "$@"
"""

# Everything that could come out another way with other threads or another build, as one digest.
DIGEST = """
import hashlib, numpy as np, gdn
rng, digest = np.random.default_rng(5), hashlib.sha256()
for S_k, S_v, n_tokens in ((128, 128, 70), (20, 33, 33), (64, 64, 1)):
    q, k = rng.standard_normal((2, 2, n_tokens, 2, S_k)).astype(np.float32)
    v, x = (rng.standard_normal((2, n_tokens, 4, S_v)).astype(np.float32) for _ in range(2))
    for channels in ((), (S_k,)):
        g = -rng.random((2, n_tokens, 4, *channels)).astype(np.float32)
        for mode in ("chunked", "recurrent"):
            for y in gdn.gated_delta_net(q, k, v, g, v[..., 0], head_map="tiled", qk_l2norm=True, beta_logit=True,
                                         mode=mode, n_threads=3):
                digest.update(y.tobytes())
    for y in (*gdn.causal_conv1d(v[:, :, 0], x[0, 0, :, :S_v].T.copy(), n_threads=3), gdn.l2_norm(v, n_threads=3),
              gdn.rms_norm_gated(v, x, v[0, 0, 0], n_threads=3), gdn.decay_gate(v[..., 0], -abs(x[0, 0, :, 0]), x[0, 0, :, 1])):
        digest.update(y.tobytes())
print(gdn.__file__, gdn.show_config("dicts")["openmp"], digest.hexdigest())
"""

USER = """
cimport gdn
from libc.stdint cimport uintptr_t
import gdn

cdef extern from "gdn.h" nogil:
    bint gdn_api_ok(const gdn.gdn_api *)

def version():
    cdef const gdn.gdn_api *api = <const gdn.gdn_api *><uintptr_t>gdn.capi
    cdef gdn.gdn_delta_net_args args
    args.size = 0
    assert gdn_api_ok(api) and api.size == sizeof(gdn.gdn_api) and api.gated_delta_net(&args) == gdn.GDN_ERR_ABI
    return api.status_string(gdn.GDN_OK).decode()
"""


def run(*command, cwd, **env):
    done = subprocess.run([str(c) for c in command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "tree", ignore=CLUTTER)
    run(sys.executable, "setup.py", "-q", "sdist", "-d", folder, cwd=folder / "tree")
    return next(folder.glob("gdn-*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    compiler = folder / "cc"
    compiler.write_text(NO_OPENMP.format(compiler=shutil.which(os.environ.get("CC", "cc"))))
    compiler.chmod(0o755)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, sdist, cwd=folder,
        CC=str(compiler), GDN_DEBUG="1" if gdn.show_config("dicts")["debug"] else "0")
    return next(folder.glob("gdn-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of an installed wheel, to be put on PYTHONPATH."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel, cwd=folder)
    return folder


def test_sdist_has_all_sources_and_nothing_generated(sdist):
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    sources = {str(p.relative_to(ROOT)) for kind in ("*.py", "*.pyx", "*.pxi", "*.pxd", "*.h")
               for p in (ROOT / "gdn").rglob(kind)}
    assert sources <= names, sources - names
    assert {"README.md", "LICENSE", "Makefile", "examples/shakespeare/shakespeare.gguf", "tests/test_build.py"} <= names
    written = {str(p.relative_to(ROOT)) for p in (ROOT / "gdn/native").glob("*.c")}              # by hand
    assert written <= names
    assert not [n for n in names - written if n.startswith(("gdn/", "build/")) and n.endswith((".c", ".so", ".o"))]


def test_sdist_is_the_same_bytes_every_time(tmp_path):
    shutil.copytree(ROOT, tmp_path / "tree", ignore=CLUTTER)
    archives = []
    for umask, when in (("022", 10**9), ("077", 11 * 10**8)):
        for path in (tmp_path / "tree").rglob("*"):
            os.utime(path, (when, when))
        run("sh", "-c", f"umask {umask}; exec {sys.executable} setup.py -q sdist -d {tmp_path / umask}", cwd=tmp_path / "tree",
            SOURCE_DATE_EPOCH="1700000000", GDN_LINK_ONLY="1")
        archive, = (tmp_path / umask).glob("gdn-*.tar.gz")
        archives.append(archive.read_bytes())
    assert archives[0] == archives[1]


def test_wheel_carries_modules_and_headers_alone(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"gdn/include/gdn.h", "gdn/__init__.pxd", "gdn/_core.pxd", "gdn/adapters/gguf.py"} <= names
    assert not [n for n in names if n.endswith((".c", ".pyx", ".pxi", ".gguf")) or not n.startswith(("gdn/", "gdn-"))]


def test_without_openmp_serial_and_the_same_bits(installed, tmp_path):
    _, here_openmp, here = run(sys.executable, "-c", DIGEST, cwd=ROOT).split()
    path, openmp, there = run(sys.executable, "-c", DIGEST, cwd=tmp_path, PYTHONPATH=str(installed)).split()
    assert Path(path).is_relative_to(installed) and openmp == "False"
    assert there == here, f"bits differ from the build under test (OpenMP there: {here_openmp})"


def test_cimport_from_the_installed_package(installed, tmp_path):
    (tmp_path / "user.pyx").write_text(USER)
    (tmp_path / "setup.py").write_text(
        "import gdn\nfrom Cython.Build import cythonize\nfrom setuptools import Extension, setup\n"
        "setup(ext_modules=cythonize([Extension('user', ['user.pyx'], include_dirs=[gdn.get_include()])]))\n")
    run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tmp_path, PYTHONPATH=str(installed))
    assert run(sys.executable, "-c", "import user; print(user.version())", cwd=tmp_path,
               PYTHONPATH=f"{installed}{os.pathsep}{tmp_path}") == "ok\n"


def test_a_level_the_build_lacks_is_an_import_error():
    # None in sys.modules is an absent module to every importer, an editable install's among them.
    done = subprocess.run([sys.executable, "-c", "import sys; sys.modules['gdn._level_base'] = None; import gdn"], cwd=ROOT,
                          env={**os.environ, "GDN_LEVEL": "base"}, capture_output=True, text=True)
    assert done.returncode == 1 and "ImportError: level base is not part of this build" in done.stderr
