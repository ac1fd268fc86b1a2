"""Random calls on a token log, a tree and checkpoints, and what they must give: a float64 replay of entries, then tokens."""

import numpy as np
from helpers import CANARY, assert_close, bits

import gdn
from gdn import reference

GATES = {"none": (0.0,), "slow": (-1e-4,), "some": (-0.1, -1.5), "mixed": (0.0, -1e-4, -0.3, -89.0, -1e8, -np.inf)}


def gates(rng, kind, shape):
    """Log decays: of two values anything between, of others one of them each."""
    values = GATES[kind]
    g = rng.uniform(*sorted(values), shape) if len(values) == 2 else rng.choice(values, shape)
    return g.astype(np.float32)


def unit(rng, *shape):
    x = rng.standard_normal(shape)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def random_tree(rng, n):
    return np.array([rng.integers(-1, t) if rng.random() < 0.5 else t - 1 for t in range(n)], np.int64)


def cache_of(rng, n_rows, H_v, S_v, S_k, order):
    """States (n_rows, H_v, S_v, S_k), key or value index contiguous, or neither; NaN in the gaps."""
    shape = {"keys": (n_rows, H_v, S_v, S_k), "values": (n_rows, H_v, S_k, S_v), "apart": (n_rows, H_v, S_v, 2 * S_k)}[order]
    memory = np.full(shape, np.nan, np.float32)
    cache = {"keys": memory, "values": memory.swapaxes(-1, -2), "apart": memory[..., ::2]}[order]
    return memory, cache


class Case:
    """One call: ``run()`` makes it and compares every output, entry, state and untouched byte with the replay.

    lengths     tokens of each sequence; all alike and packed False: not packed
    entries     of the log, each sequence's
    trees       each sequence's parents, or True: drawn; else chains
    checkpoints (sequence, n) each; folds are those with n <= 0
    snapshots   K, or 0 for none
    rows_in     "rows", or "zeros" for -1
    """

    def __init__(self, seed=0, *, lengths=(1,), entries=(8,), H_k=2, H_v=4, S_k=32, S_v=32, per_channel=False,
                 head_map="tiled", order="keys", gate="some", beta=1.0, packed=True, trees=False, checkpoints=(), snapshots=0,
                 zeros=(), own=(), shift=0, mode="auto", l2norm=False, logit=False, log_order="plain", keep=True, n_threads=1):
        rng = self.rng = np.random.default_rng(seed)
        n_seqs, total, most = len(lengths), sum(lengths), max([*lengths, 0])
        self.lengths, self.entries, self.head_map, self.mode, self.n_threads = lengths, entries, head_map, mode, n_threads
        self.packed, self.l2norm, self.logit, self.per_channel = packed, l2norm, logit, per_channel
        self.q, self.k = unit(rng, total, H_k, S_k), unit(rng, total, H_k, S_k)
        if l2norm:
            self.q, self.k = self.q * 3, self.k * 0.5
        self.v = rng.standard_normal((total, H_v, S_v), dtype=np.float32)
        channels = (S_k,) if per_channel else ()
        self.g = gates(rng, gate, (total, H_v, *channels))
        self.beta = rng.uniform(0, beta, (total, H_v)).astype(np.float32)
        if logit:
            self.beta = rng.standard_normal((total, H_v), dtype=np.float32)
        n_rows = n_seqs * (2 + snapshots) + len(checkpoints) + 3
        self.memory, self.cache = cache_of(rng, n_rows, H_v, S_v, S_k, order)
        rows = rng.permutation(n_rows)
        self.rows_in, rows = rows[:n_seqs].astype(np.int64), rows[n_seqs:]
        self.cache[self.rows_in] = rng.standard_normal((n_seqs, H_v, S_v, S_k), dtype=np.float32)
        self.rows_in[list(zeros)] = -1
        self.rows_out = None
        if snapshots:
            self.rows_out, rows = rows[:n_seqs * snapshots].reshape(n_seqs, snapshots).copy(), rows[n_seqs * snapshots:]
        self.checkpoints = [(i, n, int(row)) for (i, n), row in zip(checkpoints, rows, strict=False)]
        for c, i in own:                    # checkpoint number c goes to the row that sequence i starts from
            self.checkpoints[c] = (*self.checkpoints[c][:2], int(self.rows_in[(i + shift) % n_seqs]))
        self.parents = None
        if trees:
            drawn = [random_tree(rng, n) for n in lengths] if trees is True else trees
            self.parents = np.concatenate([*drawn, []]).astype(np.int64)
        pool = sum(entries) + total + 5
        self.log = gdn.TokenLog.allocate(pool, H_k=H_k, H_v=H_v, S_k=S_k, S_v=S_v, per_channel=per_channel)
        if log_order == "apart":            # every axis with gaps, heads outermost
            def apart(x):
                gaps = np.full(tuple(2 * n for n in (x.shape[1], x.shape[0], *x.shape[2:])), np.nan, np.float32)
                return gaps[tuple(slice(None, None, 2) for _ in x.shape)].swapaxes(0, 1)
            self.log = gdn.TokenLog(apart(self.log.k), apart(self.log.d), apart(self.log.g))
        for x in (self.log.k, self.log.d, self.log.g):
            x[:] = CANARY.view(np.float32)
        free = rng.permutation(pool).astype(np.int64)
        self.log_in = np.full((n_seqs, max([*entries, 0]) + 1), -1, np.int64)
        for i, n in enumerate(entries):
            self.log_in[i, :n], free = free[:n], free[n:]
            at = self.log_in[i, :n]
            self.log.k[at] = unit(rng, n, H_k, S_k)
            self.log.d[at] = 0.5 * rng.standard_normal((n, H_v, S_v), dtype=np.float32)
            self.log.g[at] = gates(rng, gate, (n, H_v, *channels))
        self.log_out = np.full((n_seqs, most), -1, np.int64)
        for i, n in enumerate(lengths):
            self.log_out[i, :n], free = free[:n], free[n:]
            self.log_out[i, :n][rng.random(n) < 0.2] = -1
        if not keep:
            self.log_out = None
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def arrays(self):
        """q, k, v, g, beta as the call takes them."""
        return [x[None] if self.packed else x.reshape(len(self.lengths), -1, *x.shape[1:])
                for x in (self.q, self.k, self.v, self.g, self.beta)]

    def call(self):
        parents = self.parents
        if parents is not None and not self.packed:
            parents = parents.reshape(len(self.lengths), -1)
        out = gdn.gated_delta_net_inplace(
            *self.arrays(), self.cache, self.rows_in, self.rows_out, head_map=self.head_map, mode=self.mode,
            cu_seqlens=self.starts if self.packed else None, qk_l2norm=self.l2norm, beta_logit=self.logit, log=self.log,
            log_in=self.log_in, log_out=self.log_out, parents=parents, checkpoints=self.checkpoints, n_threads=self.n_threads)
        return out.reshape(self.v.shape)

    def expected(self, i):
        """(out, {n: state after n tokens}, k, d) of sequence i in float64."""
        s, at = slice(*self.starts[i:i + 2]), self.log_in[i, :self.entries[i]]
        base = self.cache[self.rows_in[i]] if self.rows_in[i] >= 0 else np.zeros(self.cache.shape[1:])
        past = reference.replay(base, self.log.k[at], self.log.d[at], self.log.g[at], head_map=self.head_map)
        states, deltas = [], []
        out, _ = reference.recurrent(
            *(x[None, s] for x in (self.q, self.k, self.v, self.g, self.beta)), past[-1][None], head_map=self.head_map,
            qk_l2norm=self.l2norm, beta_logit=self.logit, states=states, deltas=deltas,
            parents=None if self.parents is None else self.parents[None, s])
        after = {n - len(past) + 1: S for n, S in enumerate(past)} | {n + 1: S[0] for n, S in enumerate(states)}
        k = reference.l2_norm(self.k[s]) if self.l2norm else self.k[s]
        return out[0], after, k, np.concatenate(deltas) if deltas else np.empty((0, *self.v.shape[1:]))

    def run(self, bound=1e-5):
        """The call against the replay.  Returns out."""
        expected = [self.expected(i) for i in range(len(self.lengths))]
        memory, entries = self.memory.copy(), [x.copy() for x in (self.log.k, self.log.d, self.log.g)]
        out = self.call()
        written = []
        for i, (ref, after, k, d) in enumerate(expected):
            s, n = slice(*self.starts[i:i + 2]), self.lengths[i]
            assert_close(out[s], ref, f"out of sequence {i}", bound)
            for snapshot, row in enumerate([] if self.rows_out is None else self.rows_out[i]):
                if row >= 0 and (snapshot == 0 or snapshot < n):
                    assert_close(self.cache[row], after[n - snapshot], f"snapshot {snapshot} of sequence {i}", bound)
                    written.append(row)
            for t in range(n if self.log_out is not None else 0):
                if (entry := self.log_out[i, t]) >= 0:
                    assert_close(self.log.k[entry], k[t], f"k of token {t}", 1e-6)
                    assert_close(self.log.d[entry], d[t], f"d of token {t} of sequence {i}", bound * np.abs(d).max() / max(
                        np.abs(d[t]).max(), 1e-30))
                    assert np.array_equal(self.log.g[entry], self.g[s][t])
        for i, n, row in self.checkpoints:
            assert_close(self.cache[row], expected[i][1][n], f"state of sequence {i} after {n} tokens", bound)
            written.append(row)
        kept = np.setdiff1d(np.arange(len(self.cache)), written)
        assert np.array_equal(bits(self.memory[kept]), bits(memory[kept])), "a row that no list names"
        fresh = np.setdiff1d(np.arange(len(self.log.k)), [] if self.log_out is None else self.log_out[self.log_out >= 0])
        for x, before in zip((self.log.k, self.log.d, self.log.g), entries, strict=True):
            assert np.array_equal(bits(x[fresh]), bits(before[fresh])), "an entry that log_out does not name"
        return out
