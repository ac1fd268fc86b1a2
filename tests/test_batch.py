"""Batches: grouping, padding, positions, and what a ring makes of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdn


@given(st.lists(st.integers(-3, 4), max_size=40))
def test_grouping(ids):
    batch = gdn.Batch(ids)
    real = [i for i in ids if i != -1]
    assert batch.unique_ids.tolist() == list(dict.fromkeys(real))
    assert batch.lengths.tolist() == [real.count(i) for i in batch.unique_ids]
    assert batch.n_tokens == len(ids) and batch.n_seqs == len(set(real))
    assert batch.cu_seqlens.tolist() == [0, *np.cumsum(batch.lengths)]
    x = np.arange(1, len(ids) + 1)
    expected = [t for s in batch.unique_ids for t, i in zip(x, ids, strict=True) if i == s]
    assert batch.gather(x).tolist() == expected
    assert batch.scatter(batch.gather(x)).tolist() == [0 if i == -1 else t for t, i in zip(x, ids, strict=True)]
    assert batch.first_positions.tolist() == [-1] * batch.n_seqs
    assert all(a.dtype == np.int64 for a in (batch.unique_ids, batch.lengths, batch.cu_seqlens, batch.first_positions))


def test_nothing_moves_when_grouped():
    x = np.zeros((4, 2), np.float32)
    batch = gdn.Batch([9, 9, 2, 2])
    assert batch.order is None and batch.gather(x) is x and batch.scatter(x) is x


def test_positions():
    batch = gdn.Batch([5, 3, -1, 5, 3], [0, 8, 99, 1, 9])
    assert batch.first_positions.tolist() == [0, 8]
    for positions, message in (([0, 8, 0, 2, 9], "position 2 of sequence 5.*expected 1"),
                               ([0, 8, 0, 1, 8], "position 8 of sequence 3.*expected 9"),
                               ([0, -8, 0, 1, -7], "negative, got -8 for sequence 3"),
                               ([0, 8, 0, 1], "4 entries, seq_ids 5")):
        with pytest.raises(ValueError, match=message):
            gdn.Batch([5, 3, -1, 5, 3], positions)


def test_ids_are_checked():
    for bad in ([[1, 2], 3], [[1], [2]], 3):
        with pytest.raises(ValueError, match="ring.copy"):
            gdn.Batch(bad)
    for bad in ([1.0, 2.0], ["a"], [None]):
        with pytest.raises(TypeError, match="seq_ids must hold integers"):
            gdn.Batch(bad)
    with pytest.raises(ValueError, match="positions must hold one entry a token; got shape"):
        gdn.Batch([1], [[0]])
    with pytest.raises(ValueError, match="positions of sequence 1 run beyond 64 bits"):
        gdn.Batch([1, 1], [2**63 - 1, 5])
    with pytest.raises(ValueError, match="64 signed bits"):
        gdn.Batch(np.array([2**63], np.uint64))


def test_a_ring_checks_what_a_batch_says():
    ring = gdn.StateRing.create(3, n_layers=1, H_v=1, S_k=4, S_v=4)
    ring.acquire(1)
    ring.acquire(2)
    with ring.begin(gdn.Batch([2, 1, -1, 2])) as step:
        assert step.seq_ids.tolist() == [2, 1] and step.n_tokens.tolist() == [2, 1]
        assert step.ring is ring and step.is_open and step.batch.n_tokens == 4
        step.ssm(0)
    assert not step.is_open
    assert (ring.position(1), ring.position(2)) == (1, 2)
    with pytest.raises(ValueError, match="sequence 2 stands at position 2, the step begins at 3"):
        ring.begin(gdn.Batch([1, 2], [1, 3]))
    ring.begin(gdn.Batch([1, 2], [0, 2])).commit(written=True)
    assert (ring.position(1), ring.position(2)) == (1, 3)
    with pytest.raises(KeyError):
        ring.begin(gdn.Batch([1, 3]))


def test_a_batch_is_its_own():
    ids = np.array([5, 3, 5, -1])
    batch = gdn.Batch(ids)
    ids[:] = 9
    assert batch.seq_ids.tolist() == [5, 3, 5, -1]


@pytest.mark.parametrize("ids", [[0, 1, 0, -1], [0, 0, 0]])
def test_rows_are_counted(ids):
    batch = gdn.Batch(ids)
    real = sum(i >= 0 for i in ids)
    for method, n in ((batch.gather, len(ids)), (batch.scatter, real)):
        rows = method(np.ones((n, 2), np.float32))
        assert rows.shape[1:] == (2,) and rows.dtype == np.float32
        for x in (np.ones((n + 1, 2)), np.ones((n - 1, 2)), np.array(1.0)):
            with pytest.raises(ValueError, match=f"expected {n} rows"):
                method(x)
        for x in (None, "x", [1, 2]):
            with pytest.raises(TypeError, match="x must be an array"):
                method(x)
