"""Subnormals are zeros within the delta rule, the convolution and the norms: as inputs (DAZ) and as results (FTZ), in
every worker, so that no number of threads changes a bit.  Outside, the floating-point mode is the caller's own."""

import ctypes
import platform
import subprocess

import numpy as np
import pytest
from helpers import case, run
from test_delta_threads import together

import gdn


def full(value, *shape):
    return np.full(shape, value, np.float32)


def delta(q, state, n_threads, mode, n_tokens=40):
    """Keys and values are zero: out is q . state."""
    rows = (1, n_tokens, 4)
    zero = full(0, *rows, 16)
    return gdn.gated_delta_net(full(q, *rows, 16), zero, zero, full(0, *rows), full(1, *rows), full(state, 1, 4, 16, 16),
                               mode=mode, n_threads=n_threads)[0]


def conv(x, weight, n_threads):
    return gdn.causal_conv1d(full(x, 1, 64, 4096), full(weight, 4096, 1), activation=None, n_threads=n_threads)[0]


def l2_norm(x, scale, n_threads):
    return gdn.l2_norm(full(x, 1024, 64), scale**-2, n_threads=n_threads)


def rms_norm_gated(x, scale, n_threads):
    x = full(x, 1024, 64)
    return gdn.rms_norm_gated(x, full(1, 1024, 64), full(1, 64), scale**-2, n_threads=n_threads)


CALLS = {
    "one token": lambda *a: delta(*a, "recurrent", 1),
    "recurrent": lambda *a: delta(*a, "recurrent"),
    "chunked": lambda *a: delta(*a, "chunked"),
    "conv": conv,
    "l2_norm": l2_norm,
    "rms_norm_gated": rms_norm_gated,
}


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("factors", [(1e-39, 1e18), (1e-21, 1e-18)], ids=["input", "result"])
@pytest.mark.parametrize("name", CALLS)
def test_subnormals_are_zeros(name, factors, n_threads):
    """A subnormal times what would make it a normal number, and two normal numbers whose product is none."""
    call = CALLS[name]
    assert call(1e-15, 1e-15, n_threads).all()
    assert not call(*factors, n_threads).any()


# ---- the floating-point mode -----------------------------------------------------------------------------------

def subnormals_live():
    x = np.full(4, 1e-40, np.float32)
    half = x * np.full(4, 0.5, np.float32)
    return bool((half > 0).all() and (np.full(4, 1e-20, np.float32) * np.full(4, 1e-20, np.float32) > 0).all())


MODE_PROBE = """
#include <stdio.h>
/* How many of n workers flush subnormals, as inputs or as results. */
int flushing(int n)
{
    int count = 0;
    #pragma omp parallel num_threads(n) reduction(+:count)
    {
        volatile float tiny = 1e-40f, small = 1e-20f, one = 1.0f;
        volatile float kept = tiny * one, made = small * small;
        count += !(kept > 0.0f) || !(made > 0.0f);
    }
    return count;
}
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.c").write_text(MODE_PROBE)
    base = ["cc", "-O1", "-shared", "-fPIC", "-o", str(folder / "probe.so"), str(folder / "probe.c")]
    if subprocess.run([*base, "-fopenmp"], capture_output=True).returncode:
        subprocess.run(base, check=True)          # a compiler without OpenMP built gdn serial too
    return ctypes.CDLL(str(folder / "probe.so")).flushing


@pytest.mark.parametrize("mode", ["recurrent", "chunked"])
def test_the_floating_point_mode_is_left_alone(rng, mode, probe):
    """Of the calling thread, of other Python threads, and of OpenMP's workers, also after a refused call."""
    c = case(rng, 4, 40, 2, 2)
    assert subnormals_live() and probe(3) == 0

    def work(i=0):
        for n_threads in (1, 3):
            run(c, mode=mode, n_threads=n_threads)
            assert subnormals_live() and probe(3) == 0
            with pytest.raises(ValueError):
                run(c, mode=mode, n_threads=n_threads, scale=float("inf"))
            assert subnormals_live()

    work()
    together(3, work)
    assert subnormals_live() and probe(3) == 0


FLUSHING = """
#include <xmmintrin.h>
unsigned get(void) { return _mm_getcsr(); }
void set(unsigned mode) { _mm_setcsr(mode); }
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads MXCSR")
def test_a_caller_that_flushes_goes_on_flushing(rng, tmp_path):
    """The mode is restored, not reset: rounding, masks and flush bits as the caller had them."""
    (tmp_path / "mode.c").write_text(FLUSHING)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "mode.so"), str(tmp_path / "mode.c")], check=True)
    mode = ctypes.CDLL(str(tmp_path / "mode.so"))
    c = case(rng, 2, 20)
    before = mode.get()
    try:
        for bits_ in (0x8040, 0x8000, 0x0040, 0):
            mode.set(before & ~0x8040 | bits_)
            run(c, n_threads=2)
            assert mode.get() & 0xFFC0 == (before & ~0x8040 | bits_) & 0xFFC0
    finally:
        mode.set(before)
