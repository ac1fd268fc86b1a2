"""A hundred thousand steps over 64 sequences: random accepts, aborts, trees, copies, saves, restarts, from counters just before
2^32.  Memory and time per step stay; every thousandth step one sequence is compared with its tokens' replay in float64."""

import os
import random
import time

import numpy as np
import pytest
from ring_tools import CHANNELS, H_K, H_V, LAYERS, S_K, S_V, WIDTH, Lengths, fields, lists, read_state
from test_ring_processes import shared

import gdn
from gdn import reference

N_SEQS, DEPTH, N_TOKENS = 64, 4, 4096
FAR = 2**32 - 500                               # where positions and the ring's counters begin


class Tokens:
    """A vocabulary: every layer's inputs of each of its tokens."""

    def __init__(self):
        rng = np.random.default_rng(0)

        def draw(*shape):
            return rng.standard_normal((LAYERS, N_TOKENS, *shape)).astype(np.float32)

        self.q, self.k = (reference.l2_norm(draw(H_K, S_K)).astype(np.float32) for _ in range(2))
        self.v, self.x, self.g = draw(H_V, S_V), draw(CHANNELS), -np.exp(draw(H_V))
        self.beta = rng.random((LAYERS, N_TOKENS, H_V), np.float32)
        self.weight = rng.standard_normal((LAYERS, CHANNELS, WIDTH)).astype(np.float32)

    def run(self, ring, step, tokens):
        """The kernels of every layer on a step's tokens (a list for every sequence)."""
        flat = np.concatenate([np.array(mine, np.int64) for mine in tokens])
        cu_seqlens = np.cumsum([0, *map(len, tokens)])
        for i in range(LAYERS):
            options = dict(cu_seqlens=cu_seqlens, **lists(ring, step, i))
            gdn.gated_delta_net_inplace(*(part[i, flat][None] for part in (self.q, self.k, self.v, self.g, self.beta)),
                                        step.ssm(i), step.rows_in, step.rows_out, head_map="tiled", **options)
            gdn.causal_conv1d_inplace(self.x[i, flat][None], self.weight[i], None, step.conv(i), step.rows_in, step.rows_out,
                                      **options)

    def check(self, ring, seq_id, kept):
        for i, (state, window) in enumerate(zip(*read_state(ring, seq_id), strict=True)):
            x = np.concatenate([np.zeros((WIDTH - 1, CHANNELS), np.float32), self.x[i, kept]])[len(kept):]
            np.testing.assert_array_equal(window, x.T)
            truth = np.zeros((H_V, S_V, S_K))
            if kept:
                parts = (part[i, kept][None] for part in (self.q, self.k, self.v, self.g, self.beta))
                truth = reference.recurrent(*parts, truth[None])[1][0]
            assert np.abs(state - truth).max() <= 1e-5 * max(np.abs(truth).max(), 1e-30)


class Soak:
    def __init__(self, form):
        self.memory, self.ring = shared(N_SEQS + 8, DEPTH, form=form)
        self.random, self.tokens = random.Random(form), Tokens()
        self.kept = {2**32 - N_SEQS // 2 + i: [] for i in range(N_SEQS)}        # of each sequence, since it began
        self.start = {}
        header, slots, _ = fields(self.memory)
        header["sequence"], header["last_step"] = FAR, FAR
        for seq_id in self.kept:
            self.ring.acquire(seq_id)
            self.start[seq_id] = FAR
        slots["position"][:N_SEQS] = FAR

    def some(self, n):
        for _ in range(n):
            self.step()

    def step(self):
        pick = self.random.choice
        ids = self.random.sample(list(self.kept), pick([1, 1, 2, 4, 8]))
        fresh = [self.random.random() < 0.004 for _ in ids]
        new = [[self.random.randrange(N_TOKENS) for _ in range(pick([1, 1, 1, 2, 3, 5]))] for _ in ids]
        trees = self.ring.form == "log" and self.random.random() < 0.2
        parents = [[pick([t - 1, t - 1, *range(-1, t)]) for t in range(len(mine))] for mine in new] if trees else None
        step = self.ring.begin(Lengths(ids, [len(mine) for mine in new], fresh, parents) if trees or any(fresh) else ids,
                               None if trees or any(fresh) else [len(mine) for mine in new])
        self.tokens.run(self.ring, step, new)
        if self.random.random() < 0.1:
            step.abort()
        else:
            step.commit()
            for i, seq_id in enumerate(ids):
                if fresh[i]:
                    self.kept[seq_id], self.start[seq_id] = [], 0
                if trees:
                    self.accept_path(seq_id, new[i], parents[i])
                else:
                    self.accept(seq_id, new[i])
        if self.random.random() < 0.1:
            self.move(pick(list(self.kept)))

    def accept(self, seq_id, new):
        refused = self.random.randrange(min(len(new), DEPTH) + 1)
        self.ring.rollback(seq_id, refused)
        self.kept[seq_id] += new[:len(new) - refused]

    def accept_path(self, seq_id, new, parents):
        path, at = [], self.random.randrange(-1, len(new))
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        self.ring.accept(seq_id, path)
        self.kept[seq_id] += [new[t] for t in path]

    def move(self, seq_id):
        """A sequence goes on from its copy, or from its bytes."""
        if self.random.random() < 0.5:
            self.ring.copy(seq_id, -7)
            self.ring.release(seq_id)
            self.ring.copy(-7, seq_id)
            self.ring.release(-7)
        else:
            data = self.ring.save(seq_id, depth=self.random.random() < 0.5)
            self.ring.release(seq_id)
            self.ring.load(seq_id, data)

    def check(self):
        seq_id = self.random.choice(list(self.kept))
        assert self.ring.position(seq_id) == self.start[seq_id] + len(self.kept[seq_id])
        self.tokens.check(self.ring, seq_id, self.kept[seq_id])


def resident():
    """Kilobytes of this process's memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
@pytest.mark.parametrize("form", ["planes", "log"])
@pytest.mark.parametrize("n", [4000, pytest.param(10**5, marks=pytest.mark.slow)])
def test_soak(n, form):
    soak, times, memory = Soak(form), [], []
    for _ in range(n // 1000):
        started = time.process_time()
        soak.some(1000)
        times.append((time.process_time() - started) * 1e-3)
        memory.append(resident())
        soak.check()
    tenth = max(1, len(times) // 10)
    first, last = np.median(times[tenth:tenth + 3 * tenth]), np.median(times[-3 * tenth:])
    print(f"{form}: {n} steps, {first * 1e6:.0f} us each early, {last * 1e6:.0f} late; {memory[tenth]} kB, then {memory[-1]}")
    assert memory[-1] - memory[tenth] < 4000
    assert last < 1.5 * first
    header = fields(soak.memory)[0]
    assert header["last_step"][0] < 2**31 and header["sequence"][0] < 2**31, "the counters have not wrapped"
    for seq_id, kept in soak.kept.items():
        assert soak.ring.position(seq_id) == soak.start[seq_id] + len(kept)
