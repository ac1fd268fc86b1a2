"""Rows of a cache of any size: read before written, written once, found in far-apart and unordered rows."""

import numpy as np
import pytest
from helpers import same_bits

import gdn

WINDOW = 32768                       # rows that the library looks at together: the cases below cross it
TAKE = np.array([[1.0, 0.0]], np.float32)           # width 2: out is the input one token back


def step(cache, x, rows_in, rows_out):
    """One channel, width 2: (out, cache after), by the definition: every row is read first."""
    old, new = cache[:, 0, 0], cache.copy()
    start = np.where(rows_in < 0, 0, old[rows_in])
    inputs = np.concatenate([start[:, None], x[:, :, 0]], 1)
    for i, s in np.ndindex(rows_out.shape):
        if rows_out[i, s] >= 0 and (s == 0 or s < x.shape[1]):
            new[rows_out[i, s], 0, 0] = inputs[i, x.shape[1] - s]
    return inputs[:, :-1, None], new


def candidates(rng, n_rows):
    """Rows close together, around the edges of windows, and anywhere."""
    edges = np.arange(0, n_rows, WINDOW)[:, None] + np.arange(-3, 4)
    pool = np.concatenate([np.arange(12), edges.ravel(), rng.integers(0, n_rows, 20)])
    return np.unique(pool[(pool >= 0) & (pool < n_rows)])


@pytest.mark.parametrize("seed", range(60))
def test_read_before_written(seed):
    rng = np.random.default_rng(seed)
    n_rows = int(rng.choice([12, WINDOW, WINDOW + 1, 4 * WINDOW + 5]))
    n, K, T = int(rng.integers(1, 9)), int(rng.integers(1, 4)), int(rng.integers(0, 5))
    cache = rng.standard_normal((n_rows, 1, 1)).astype(np.float32)
    x = rng.standard_normal((n, T, 1)).astype(np.float32)
    pool = candidates(rng, n_rows)
    rows_out = rng.permutation(np.concatenate([pool, np.full(n * K, -1)]))[:n * K].reshape(n, K)
    sources = np.concatenate([rows_out.ravel(), rng.choice(pool, n), [-1]])          # mostly rows that are written
    rows_in = rng.choice(sources, n)
    out, after = step(cache, x, rows_in, rows_out)
    result = gdn.causal_conv1d_inplace(x, TAKE, None, cache, rows_in, rows_out, activation=None)
    assert same_bits(result, out) and same_bits(cache, after)


def test_delta_rule_swaps_and_forks_far_apart():
    rng = np.random.default_rng(1)
    f = np.float32
    n_rows, n = 2 * WINDOW + 7, 5
    q, k, v = (rng.standard_normal((n, 3, 1, 2)).astype(f) for _ in range(3))
    g, beta = -rng.random((n, 3, 1)).astype(f), rng.random((n, 3, 1)).astype(f)
    cache = rng.standard_normal((n_rows, 1, 2, 2)).astype(f)
    rows_in = np.array([n_rows - 1, 0, 0, WINDOW, -1])
    rows_out = np.array([0, n_rows - 1, WINDOW, 1, 2 * WINDOW])
    start = np.where((rows_in < 0)[:, None, None, None], f(0), cache[rows_in])
    out, end = gdn.gated_delta_net(q, k, v, g, beta, start)
    expected = cache.copy()
    expected[rows_out] = end
    assert same_bits(gdn.gated_delta_net_inplace(q, k, v, g, beta, cache, rows_in, rows_out), out)
    assert same_bits(cache, expected)


@pytest.mark.parametrize("rows", [[3, 3], [WINDOW, 0, WINDOW], [0, 2 * WINDOW + 1, 5, 2 * WINDOW + 1],
                                  [5, WINDOW - 1, 4, WINDOW - 1], [WINDOW + 5, 5, WINDOW + 5]])
def test_written_twice(rows):
    n, twice = len(rows), max(r for r in rows if rows.count(r) == 2)
    cache = np.arange(3 * WINDOW, dtype=np.float32).reshape(-1, 1, 1)
    before, x = cache.copy(), np.ones((n, 1, 1), np.float32)
    with pytest.raises(ValueError, match=f"row {twice} is written twice"):
        gdn.causal_conv1d_inplace(x, TAKE, None, cache, np.full(n, -1), rows)
    assert same_bits(cache, before)


def test_a_slot_that_does_not_exist_writes_nothing():
    cache, x = np.zeros((3, 1, 1), np.float32), np.ones((2, 1, 1), np.float32)
    gdn.causal_conv1d_inplace(x, TAKE, None, cache, [-1, -1], [[0, 1], [1, 0]])      # slots 1 need a second token
    assert cache.ravel().tolist() == [1, 1, 0]


def test_many_unordered_rows():
    n, K = 10000, 4
    rows_out = np.random.default_rng(2).permutation(n * K).reshape(n, K)
    cache = np.arange(n * K, dtype=np.float32).reshape(-1, 1, 1)
    x = np.ones((n, K, 1), np.float32)
    rows_in = np.roll(rows_out[:, 0], 1)
    out, after = step(cache, x, rows_in, rows_out)
    assert same_bits(gdn.causal_conv1d_inplace(x, TAKE, None, cache, rows_in, rows_out, activation=None), out)
    assert same_bits(cache, after)
