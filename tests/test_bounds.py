"""What a call may take beside its work: time to compare strides, memory kept between calls."""

import time

import numpy as np
import pytest

import gdn
from gdn import _core

HARD = {      # shape; offset and strides of x, then of out: whether they meet takes exponential time to find out
    "a": ((24, 9, 25, 3), (2692, (20920, 24896, 692, 24904)), (1348, (23428, 2596, 108, 562260))),
    "b": ((32, 29, 2, 30), (1876, (9240, 18132, 1152, 20172)), (2996, (2124, 72, 67972, 135852))),
    "c": ((34, 3, 20, 35), (792, (29336, 25676, 15576, 14016)), (316, (48, 1178924, 1688, 33684))),
}


@pytest.mark.parametrize("name", HARD)
def test_hostile_strides_are_refused_soon(name):
    shape, *places = HARD[name]
    memory = np.zeros(1 << 22, np.uint8)
    x, out = (np.ndarray(shape, np.float32, memory, offset, strides) for offset, strides in places)
    start = time.perf_counter()
    with pytest.raises(ValueError, match="out, of shape .* may overlap x, of shape .* takes too long"):
        gdn.l2_norm(x, out=out)
    assert time.perf_counter() - start < 5 and not memory.any()


def test_scratch_is_given_back():
    """A call whose rows are permuted stages a copy of each: 128 MiB here."""
    n = 2048
    x = np.ones((n, 1, 1, 128), np.float32)
    g, cache, rows = np.zeros((n, 1, 1), np.float32), np.zeros((n, 1, 128, 128), np.float32), np.roll(np.arange(n), 1)
    gdn.gated_delta_net_inplace(x, x, x, g, g, cache, rows, np.arange(n), n_threads=1)
    assert _core.scratch_kept() <= 64 << 20
    gdn.causal_conv1d(x[:, :, 0], np.ones((128, 4), np.float32), n_threads=1)
    kept = _core.scratch_kept()
    gdn.causal_conv1d(x[:, :, 0], np.ones((128, 4), np.float32), n_threads=1)
    assert 0 < kept == _core.scratch_kept()
