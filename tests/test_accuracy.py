"""Sigmoid, SiLU, softplus and long sums to a relative 1e-6 of float64, where float32 is about to run out."""

import numpy as np
import pytest

import gdn
from gdn import reference

F = np.float32
TINY, LEAST = np.finfo(F).tiny, float(np.finfo(F).smallest_subnormal)
GRID = np.concatenate([np.linspace(-110, 110, 20001), [-1e4, -1e-30, 0, 1e-30, 1e4, 1e30]]).astype(F)


def relative_error(x, ref):
    normal = np.abs(ref) >= TINY
    return (np.abs(x - ref)[normal] / np.abs(ref[normal])).max()


def logistic(x):
    """1 / (1 + exp(-x)) without overflow."""
    t = np.exp(-np.abs(x.astype(np.float64)))
    return np.where(x > 0, 1, t) / (1 + t)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_activations(activation):
    ref = logistic(GRID) * (GRID if activation == "silu" else 1)
    ones = np.ones((GRID.size, 1), F)
    gated = gdn.rms_norm_gated(ones, GRID[:, None], ones[0], 0.0, activation=activation)[:, 0]
    assert relative_error(gated, ref) < 1e-6
    if activation == "silu":
        out = gdn.causal_conv1d(GRID[None, :, None], ones[:1])[0][0, :, 0]
        assert relative_error(out, ref) < 1e-6


def test_nan_and_infinity():
    x = np.array([np.nan, np.inf, -np.inf], F)
    ones = np.ones((3, 1), F)
    silu, sigmoid = (gdn.rms_norm_gated(ones, x[:, None], ones[0], 0.0, activation=a)[:, 0]
                     for a in ("silu", "sigmoid"))
    assert np.isnan(silu[0]) and silu[1] == np.inf and not np.isfinite(silu[2])
    assert np.isnan(sigmoid[0]) and sigmoid[1] == 1 and sigmoid[2] == 0


@pytest.mark.parametrize("bound", [None, -5.0])
def test_decays_below_the_normal_range(bound):
    """Both gate forms round what float32 can hold, to the last subnormal."""
    x = GRID[(GRID > -1000) & (GRID < 1000)]
    out = gdn.decay_gate(x.reshape(1, -1, 1), -np.ones(1, F), np.zeros(1, F), gate="bounded" if bound else "softplus",
                         lower_bound=bound).ravel()
    ref = -reference.softplus(x) if bound is None else bound * logistic(x)
    subnormal = np.abs(ref) < TINY
    assert subnormal.any() and relative_error(out, ref) < 1e-6
    slack = LEAST * (1 if bound is None else 1 + abs(bound))       # the bound multiplies a rounded sigmoid
    assert (np.abs(out - ref)[subnormal] <= slack).all()
    assert (out[np.abs(ref) > 1.4 * LEAST * abs(bound or 1)] < 0).all()


@pytest.mark.parametrize("n", [4096, 8192])
def test_long_rows_of_one_value(n):
    """Equal terms are rounded the same way every time: the error of a plain sum grows with the row."""
    x = np.repeat(np.linspace(1, 2, 41).astype(F)[:, None], n, 1)
    ref = x.astype(np.float64)
    assert relative_error(gdn.l2_norm(x), reference.l2_norm(x)) < 1e-6
    out = gdn.rms_norm_gated(x, np.full_like(x, 200), np.ones(n, F), activation="sigmoid")
    assert relative_error(out, ref / np.sqrt((ref * ref).mean(-1, keepdims=True) + 1e-6)) < 1e-6
