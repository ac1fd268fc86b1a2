"""A batch of tokens of several sequences, in any order."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gdn._arguments import integers

__all__ = ["Batch"]


class Batch:
    """Which sequence, and optionally which position, every token of a batch belongs to.

    seq_ids     (n_tokens,) integers in any order, repeated ids interleaved as they come; within one sequence the order
                given is the order in time.  -1 is padding: it touches no state, and its output rows are zero.
    positions   (n_tokens,) integers: how many tokens the state has seen before this one (no RoPE positions); those of
                padding are ignored.  A sequence whose first position is 0 starts afresh.  None continues every
                sequence where it stands.
    parents     (n_tokens,) integers: the batch's entry that each token continues, an earlier one of its sequence, or -1 =
                where the sequence stands: every sequence's tokens are then a tree of drafts, of which
                ``ring.accept`` keeps a path once the step is committed.  Those of padding are ignored.

    ValueError: a token with several ids (fork a sequence with ``ring.copy``), positions of another length, negative,
    or not those of what a token continues; parents of another length, or none of the sequence's earlier tokens.
    TypeError: anything but integers.  That the first position continues the sequence is checked by ``ring.begin(batch)``.

    n_tokens            entries, padding included;  n_grouped without it
    unique_ids          (n_seqs,) int64 ids in the order of first appearance, lengths (n_seqs,) their tokens
    first_positions     (n_seqs,) int64, 0 = start afresh, -1 = continue
    cu_seqlens          (n_seqs + 1,) int64 bounds of the sequences once grouped
    order               entry of every grouped token, or None where the batch is grouped and unpadded already
    parents             (n_grouped,) int64 index within its sequence's tokens of what each grouped token continues, or None
    """

    def __init__(self, seq_ids: ArrayLike, positions: ArrayLike | None = None, parents: ArrayLike | None = None) -> None:
        ids = _integers(seq_ids, "seq_ids")
        self.seq_ids, self.n_tokens = ids, len(ids)
        unique, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        real = np.flatnonzero(unique != -1)
        by_appearance = real[np.argsort(first[real])]
        rank = np.full(len(unique), -1, np.int64)
        rank[by_appearance] = np.arange(len(by_appearance))
        ranks = rank[inverse]
        self.unique_ids = unique[by_appearance]
        self.lengths = np.bincount(ranks[ranks >= 0], minlength=len(self.unique_ids)).astype(np.int64)
        self.cu_seqlens = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        order = np.argsort(ranks, kind="stable")[self.n_tokens - self.cu_seqlens[-1]:]
        self.n_grouped = len(order)
        self.order = None if np.array_equal(order, np.arange(self.n_tokens)) else order
        self.first_positions = np.full(len(self.unique_ids), -1, np.int64)
        self.parents = None if parents is None else self._read_parents(_integers(parents, "parents"), order)
        if positions is not None:
            self._read_positions(_integers(positions, "positions"), order)

    def _read_parents(self, parents: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(parents) != self.n_tokens:
            raise ValueError(f"parents has {len(parents)} entries, seq_ids {self.n_tokens}")
        within = np.full(self.n_tokens + 1, -1, np.int64)              # of every entry; the last is of parent -1
        within[order] = np.arange(len(order)) - np.repeat(self.cu_seqlens[:-1], self.lengths)
        grouped = parents[order]
        bad = np.flatnonzero((grouped < -1) | (grouped >= order))
        bad = bad if len(bad) else np.flatnonzero((grouped >= 0) & (self.seq_ids[grouped] != self.seq_ids[order]))
        if len(bad):
            raise ValueError(f"parents: entry {order[bad[0]]} of sequence {self.seq_ids[order[bad[0]]]} continues "
                             f"{grouped[bad[0]]}, which is no earlier entry of it")
        return within[grouped]

    def _read_positions(self, positions: NDArray[np.int64], order: NDArray[np.int64]) -> None:
        if len(positions) != self.n_tokens:
            raise ValueError(f"positions has {len(positions)} entries, seq_ids {self.n_tokens}")
        grouped = positions[order]
        self.first_positions = grouped[self.cu_seqlens[:-1]]
        starts = np.repeat(self.cu_seqlens[:-1], self.lengths)
        within = np.arange(len(grouped)) - starts
        if self.parents is not None:
            within = np.zeros(len(grouped), np.int64)
            for i, parent in enumerate(self.parents):
                within[i] = 0 if parent < 0 else within[starts[i] + parent] + 1
        expected = np.repeat(self.first_positions, self.lengths) + within
        bad = np.flatnonzero((grouped != expected) | (grouped < 0))
        if len(bad):
            i = bad[0]
            seq_id = self.seq_ids[order[i]]
            if grouped[i] < 0:
                raise ValueError(f"positions must not be negative, got {grouped[i]} for sequence {seq_id}")
            if expected[i] < 0:
                raise ValueError(f"positions of sequence {seq_id} run beyond 64 bits")
            raise ValueError(f"position {grouped[i]} of sequence {seq_id} does not continue it: expected {expected[i]}")

    @property
    def n_seqs(self) -> int:
        """Sequences that have tokens in the batch."""
        return len(self.unique_ids)

    def gather(self, x: NDArray[Any]) -> NDArray[Any]:
        """Rows of the batch's order, grouped by sequence and without padding; x itself where nothing moves.  ValueError:
        x (n_tokens, ...) has another number of rows; TypeError: x is no array."""
        self._check_rows(x, self.n_tokens)
        return x if self.order is None else x[self.order]

    def scatter(self, x: NDArray[Any]) -> NDArray[Any]:
        """Grouped rows back in the batch's order, zeros for padding; x itself where nothing moves.  ValueError: x has
        not n_grouped rows; TypeError: x is no array."""
        self._check_rows(x, self.n_grouped)
        if self.order is None:
            return x
        out = np.zeros((self.n_tokens, *x.shape[1:]), x.dtype)
        out[self.order] = x
        return out

    @staticmethod
    def _check_rows(x: NDArray[Any], n: int) -> None:
        if not isinstance(x, np.ndarray):
            raise TypeError(f"x must be an array, got {type(x).__name__}")
        if x.ndim == 0 or len(x) != n:
            raise ValueError(f"x has shape {x.shape}, expected {n} rows, one a token")

    def __repr__(self) -> str:
        return f"gdn.Batch(n_tokens={self.n_tokens}, unique_ids={self.unique_ids}, lengths={self.lengths})"


def _integers(values: ArrayLike, name: str) -> NDArray[np.int64]:
    """One entry a token, the batch's own."""
    several = f"{name} must hold one entry a token"
    if name == "seq_ids":
        several += "; a token of several sequences is not one token: ring.copy forks one"
    try:
        array = integers(values, name)
    except ValueError as error:
        raise ValueError(f"{error}; {several}") from error
    if array.ndim != 1:
        raise ValueError(f"{several}; got shape {array.shape}")
    return array.copy()
