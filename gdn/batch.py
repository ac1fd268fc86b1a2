"""Which token belongs to which sequence: tokens of several sequences, in any order, as one batch."""

import numpy as np

__all__ = ["PADDING", "Batch"]

PADDING = -1


class Batch:
    """The tokens of one step.

    seq_ids    (n_tokens,) integers: the sequence of every token, in any order; within one sequence the order given is
               the order in time.  -1 is padding: it touches no state and its output rows are zero.
    positions  (n_tokens,) integers or None: how many tokens its sequence's state has seen before each token.  A
               sequence whose first token here has position 0 starts afresh.  None continues every sequence where it
               stands.  Positions of padding are not looked at.

    n_tokens         all tokens, padding included
    unique_ids       (n_seqs,) int64, in order of first appearance
    lengths          (n_seqs,) int64, tokens of each
    starts_fresh     (n_seqs,) bool
    first_positions  (n_seqs,) int64, -1 where the sequence continues where it stands
    cu_seqlens       (n_seqs + 1,) int64, running sum of lengths
    order            (sum of lengths,) the tokens grouped by sequence, or None if they lie so already, without padding

    Raises ValueError: a token with a list of ids, positions that are negative or do not count up within a sequence.
    """

    __slots__ = ("n_tokens", "unique_ids", "lengths", "starts_fresh", "first_positions", "cu_seqlens", "order")

    def __init__(self, seq_ids, positions=None):
        ids = _one_id_a_token(seq_ids)
        self.n_tokens = len(ids)
        tokens = np.flatnonzero(ids != PADDING)
        unique, first, inverse, counts = np.unique(
            ids[tokens], return_index=True, return_inverse=True, return_counts=True)
        appearance = np.argsort(first)
        self.unique_ids, self.lengths = unique[appearance], counts[appearance].astype(np.int64)
        self.cu_seqlens = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])
        order = tokens[np.argsort(np.argsort(appearance)[inverse], kind="stable")]
        self.first_positions = np.full(len(unique), -1, np.int64)
        if positions is not None:
            self.first_positions[:] = self._first_positions(_integers(positions, "positions"), order)
        self.starts_fresh = self.first_positions == 0
        self.order = None if np.array_equal(order, np.arange(self.n_tokens)) else order

    def _first_positions(self, positions, order):
        if positions.shape != (self.n_tokens,):
            raise ValueError(f"positions has shape {positions.shape}, seq_ids ({self.n_tokens},)")
        at, starts = positions[order], self.cu_seqlens[:-1]
        expected = np.repeat(at[starts] - starts, self.lengths) + np.arange(len(order))
        for i in np.flatnonzero((at != expected) | (at < 0))[:1]:
            seq = self.unique_ids[np.searchsorted(starts, i, "right") - 1]
            if at[i] < 0:
                raise ValueError(f"positions[{order[i]}] is {at[i]}, of sequence {seq}: positions begin at 0")
            raise ValueError(f"positions[{order[i]}] is {at[i]}, but sequence {seq} continues at {expected[i]}")
        return at[starts]

    def gather(self, x):
        """Rows of x (n_tokens, ...), grouped by sequence, without padding; x itself where they lie so already."""
        return x if self.order is None else x[self.order]

    def scatter(self, x):
        """The inverse of gather; rows of padding are zero."""
        if self.order is None:
            return x
        y = np.zeros((self.n_tokens, *x.shape[1:]), x.dtype)
        y[self.order] = x
        return y

    def __len__(self):
        return self.n_tokens

    def __repr__(self):
        lengths = ", ".join(f"{i}: {n}" for i, n in zip(self.unique_ids, self.lengths, strict=True))
        return f"gdn.Batch of {self.n_tokens} tokens, by sequence {{{lengths}}}"


def _integers(values, name):
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must fit into 64 bits, got {array.max()}")
    return array.astype(np.int64)


def _one_id_a_token(seq_ids):
    try:
        ids = np.asarray(seq_ids)
    except ValueError:                     # lists of different lengths
        ids = np.empty((0, 0))
    if ids.ndim == 2 or (ids.dtype == object and any(np.ndim(i) for i in ids.ravel())):
        raise ValueError("seq_ids has a list of ids for one token; a token belongs to one sequence: fork a state with "
                         "ring.copy(src_seq, dst_seq) and give each sequence its own token")
    if ids.ndim != 1:
        raise ValueError(f"seq_ids must be a list of integers, one a token, got shape {ids.shape}")
    return _integers(ids, "seq_ids")
