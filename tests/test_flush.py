"""Subnormals are zeros within the delta rule, the convolution and the norms: as inputs (DAZ) and as results (FTZ), in
every worker, so that no number of threads changes a bit."""

import numpy as np
import pytest

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
