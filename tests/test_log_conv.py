"""The convolution on a token log, trees and checkpoints: windows are the last width - 1 ancestors."""

import numpy as np
import pytest
from helpers import assert_close, bits, same_bits
from log_cases import random_tree

import gdn
from gdn import reference


def convolution(inputs, weight, bias, window, activation, parents):
    """The convolution of one sequence, (n, channels) in float64, and the window (channels, width - 1) behind every token."""
    before = np.asarray(window, np.float64).T
    windows, out = [], np.zeros(inputs.shape)
    for t, row in enumerate(np.asarray(inputs, np.float64)):
        last = before if parents[t] < 0 else windows[parents[t]]
        window = np.concatenate([last, row[None]])
        windows.append(window[1:])
        y = (window * np.asarray(weight, np.float64).T).sum(0) + bias
        out[t] = y * reference.sigmoid(y) if activation else y
    return out, [w.T for w in windows]


def run(seed, lengths, entries, *, width=4, channels=70, trees=False, packed=True, snapshots=0, checkpoints=(), activation="silu",
        zeros=(), apart=False, inplace=False, own=False, n_threads=1):
    rng = np.random.default_rng(seed)
    n_seqs, total, n = len(lengths), sum(lengths), width - 1
    x = rng.standard_normal((total, channels), dtype=np.float32)
    weight, bias = (rng.standard_normal(s, dtype=np.float32) for s in ((channels, width), (channels,)))
    n_rows = n_seqs * (1 + snapshots) + len(checkpoints) + 2
    cache = rng.standard_normal((n_rows, channels, n), dtype=np.float32)
    rows = rng.permutation(n_rows)
    rows_in, rows = rows[:n_seqs].copy(), rows[n_seqs:]
    rows_in[list(zeros)] = -1
    rows_out, rows = rows[:n_seqs * snapshots].reshape(n_seqs, -1), rows[n_seqs * snapshots:]
    checkpoints = [(i, m, int(row)) for (i, m), row in zip(checkpoints, rows, strict=False)]
    if own:                                                       # to where the next sequence starts
        checkpoints[0] = (*checkpoints[0][:2], int(rows_in[(checkpoints[0][0] + 1) % n_seqs]))
    pool = total + sum(entries) + 3
    memory = rng.standard_normal((pool, 2 * channels), dtype=np.float32)
    x_log = memory[:, ::2] if apart else memory[:, :channels]
    log = gdn.TokenLog.allocate(pool, H_k=1, H_v=1, S_k=1, S_v=1)
    log = gdn.TokenLog(log.k, log.d, log.g, x_log)
    free = rng.permutation(pool)
    log_in = np.full((n_seqs, max(entries) + 1), -1)
    for i, m in enumerate(entries):
        log_in[i, :m], free = free[:m], free[m:]
    log_out = np.full((n_seqs, max(lengths)), -1)
    parents = [random_tree(rng, m) if trees else np.arange(m) - 1 for m in lengths]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    expected = []
    for i, m in enumerate(lengths):
        log_out[i, :m], free = free[:m], free[m:]
        window = cache[rows_in[i]] if rows_in[i] >= 0 else np.zeros((channels, n))
        past = np.concatenate([window.T, log.x[log_in[i, :entries[i]]]])
        states = {j - entries[i]: past[j:j + n].T for j in range(entries[i] + 1)}
        out, after = convolution(x[starts[i]:starts[i + 1]], weight, bias, states[0], activation, parents[i])
        expected.append((out, states | {t + 1: w for t, w in enumerate(after)}))
    before, entries_before = cache.copy(), memory.copy()
    inputs = x.copy()
    given = inputs[None] if packed else inputs.reshape(n_seqs, -1, channels)
    tree = np.concatenate(parents) if packed else np.reshape(parents, (n_seqs, -1))
    out = gdn.causal_conv1d_inplace(
        given, weight, bias, cache, rows_in, rows_out if snapshots else None, activation=activation,
        cu_seqlens=starts if packed else None, out=given if inplace else None, log=log, log_in=log_in, log_out=log_out,
        parents=tree if trees else None, checkpoints=checkpoints, n_threads=n_threads).reshape(x.shape)
    written = []
    for i, (ref, after) in enumerate(expected):
        assert_close(out[starts[i]:starts[i + 1]], ref, f"out of sequence {i}", 1e-6)
        for s, row in enumerate(rows_out[i]):
            if s == 0 or s < lengths[i]:
                assert same_bits(cache[row], after[lengths[i] - s])
                written.append(row)
        assert same_bits(log.x[log_out[i, :lengths[i]]], x[starts[i]:starts[i + 1]])
    for i, m, row in checkpoints:
        assert same_bits(cache[row], expected[i][1][m])
        written.append(row)
    kept = np.setdiff1d(np.arange(n_rows), written)
    assert np.array_equal(bits(cache[kept]), bits(before[kept]))
    memory[log_out[log_out >= 0]] = entries_before[log_out[log_out >= 0]]
    assert np.array_equal(bits(memory), bits(entries_before)) or apart
    return out


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2, 5, 20])
def test_entries_before_tokens(n, apart, trees, width):
    run(n, (n, 3, 1), (2, 0, 9), width=width, trees=trees, apart=apart, snapshots=0 if trees else 3,
        checkpoints=[(0, -1), (2, -9), (2, -4), (1, 0)] + ([] if trees else [(1, 2), (0, n)]), zeros=(1,))


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", ["silu", None])
def test_out_may_be_x(activation, packed, trees):
    run(1, (6, 6), (2, 5), trees=trees, packed=packed, activation=activation, inplace=True)


def test_windows_go_where_others_start():
    run(2, (3, 4), (2, 5), checkpoints=[(0, -1), (1, 2)], own=True)


def test_threads_change_no_bit():
    outs = [run(3, (9, 2), (2, 5), channels=600, trees=True, n_threads=n) for n in (1, 2, 3, 7)]
    assert all(same_bits(outs[0], out) for out in outs[1:])


def test_checkpoints_need_no_log():
    """Windows at places of a plain call, as of calls that end there."""
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((1, 40, 33), dtype=np.float32), rng.standard_normal((33, 4), dtype=np.float32)
    cache = np.zeros((42, 33, 3), np.float32)
    gdn.causal_conv1d_inplace(x, weight, None, cache, [-1], [0], checkpoints=[(0, n, n + 1) for n in range(41)])
    for n in range(41):
        _, state = gdn.causal_conv1d(x[:, :n], weight)
        assert same_bits(cache[n + 1], state[0])


def test_nan_in_one_branch_reaches_no_other():
    rng = np.random.default_rng(5)
    parents = random_tree(rng, 9)
    x, weight = rng.standard_normal((1, 9, 20), dtype=np.float32), rng.standard_normal((20, 4), dtype=np.float32)
    cache = np.zeros((1, 20, 3), np.float32)
    clean = gdn.causal_conv1d_inplace(x, weight, None, cache, [0], parents=parents[None])
    for bad in range(9):
        spoiled = x.copy()
        spoiled[0, bad] = np.nan
        out = gdn.causal_conv1d_inplace(spoiled, weight, None, cache, [0], parents=parents[None])
        for t in range(9):
            path = [t]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            assert np.isnan(out[0, t]).all() if bad in path[:4] else same_bits(out[0, t], clean[0, t])
