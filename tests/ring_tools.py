"""A ring beside its truth: steps run the kernels on the ring's rows, a float64 replay knows what they must hold."""

import ctypes
import itertools
import os
import signal
import sys

import numpy as np

import gdn
from gdn import reference

LAYERS, H_K, H_V, S_K, S_V, CHANNELS, WIDTH = 2, 1, 2, 4, 3, 5, 4
EXTENTS = dict(n_layers=LAYERS, H_k=H_K, H_v=H_V, S_k=S_K, S_v=S_V, conv_channels=CHANNELS, conv_width=WIDTH)
BOUND = 1e-5
EMPTY = 0                                       # the key of the state that has seen nothing


def pool(fill, n_slots, n_rollback, spare=None, offset=0, **options):
    """A buffer for a ring, every byte of it one that would show: NaN, or 0x3e, which is 0.186 in float32."""
    n = gdn.StateRing.nbytes_for(n_slots, n_rollback, spare=spare, **EXTENTS, **options) + 128
    memory = np.full(n // 4 + 1, np.nan, np.float32).view(np.uint8) if fill == "nan" else np.full(n, 0x3E, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start:start + n - 64 - offset]


class Truth:
    """What every state ever reached must be, by the key of its last token.  Tokens are never used twice."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.counter = itertools.count(1)
        self.tokens = {}                        # key -> inputs of each layer
        self.states = {EMPTY: [np.zeros((H_V, S_V, S_K)) for _ in range(LAYERS)]}
        self.windows = {EMPTY: [np.zeros((CHANNELS, WIDTH - 1), np.float32) for _ in range(LAYERS)]}
        self.weights = self.rng.standard_normal((LAYERS, CHANNELS, WIDTH)).astype(np.float32)
        self.outputs, self.conv_outputs, self.bits = {}, {}, {}

    def token(self, before):
        """A new token after the state `before`; returns its key."""
        key, rng = next(self.counter), self.rng
        for table in (self.tokens, self.states, self.windows, self.outputs, self.conv_outputs):
            table[key] = []
        for layer in range(LAYERS):
            def draw(*shape):
                return rng.standard_normal(shape).astype(np.float32)
            q, k = (reference.l2_norm(draw(1, 1, H_K, S_K)).astype(np.float32) for _ in range(2))
            v, g, beta = draw(1, 1, H_V, S_V), -np.exp(draw(1, 1, H_V)), rng.random((1, 1, H_V), np.float32)
            x = draw(CHANNELS)
            self.tokens[key].append((q, k, v, g, beta, x))
            out, state = reference.recurrent(q, k, v, g, beta, self.states[before][layer][None])
            self.states[key].append(state[0])
            self.outputs[key].append(out[0, 0])
            line = np.concatenate([self.windows[before][layer], x[:, None]], 1)
            self.windows[key].append(line[:, 1:])
            y = (line.astype(np.float64) * self.weights[layer]).sum(1)
            self.conv_outputs[key].append(y * reference.sigmoid(y))
        return key

    def check(self, key, ssm, conv, exact=True):
        """ssm and conv: a state's rows of every layer.  Within the bound, and (exact) the very bits written at its token."""
        for layer in range(LAYERS):
            truth = self.states[key][layer]
            error = np.abs(ssm[layer] - truth).max()
            assert error <= BOUND * max(np.abs(truth).max(), 1e-30), f"state after token {key}"
            np.testing.assert_array_equal(conv[layer], self.windows[key][layer])
        if not exact:
            return
        bits = b"".join(x.tobytes() for x in ssm)
        assert self.bits.setdefault(key, bits) == bits, f"state after token {key} is not the one that was written"


def fork():
    """os.fork, of a child that does not outlive its parent, however that ends."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0 and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)              # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
    return pid


def lists(ring, step, layer):
    """What the in-place calls take of a step beyond its rows."""
    if ring.form == "planes":
        return {"checkpoints": step.checkpoints}
    return {"log": ring.log(layer), "log_in": step.log_in, "log_out": step.log_out, "parents": step.parents,
            "checkpoints": step.checkpoints}


def run_layers(ring, truth, step, keys, layers=range(LAYERS)):
    """Run a step's tokens (keys: a list for every sequence) through the ring's layers.  Outputs are checked."""
    flat = [key for sequence in keys for key in sequence]
    cu_seqlens = np.concatenate([[0], np.cumsum([len(sequence) for sequence in keys])]).astype(np.int64)
    for layer in layers:
        parts = [truth.tokens[key][layer] for key in flat]
        empty = [np.zeros((1, 0, *shape), np.float32) for shape in ((H_K, S_K), (H_K, S_K), (H_V, S_V), (H_V,), (H_V,))]
        q, k, v, g, beta = (np.concatenate([empty[i], *(part[i] for part in parts)], 1) for i in range(5))
        out = gdn.gated_delta_net_inplace(q, k, v, g, beta, step.ssm(layer), step.rows_in, step.rows_out,
                                          cu_seqlens=cu_seqlens, head_map="tiled", **lists(ring, step, layer))
        for t, key in enumerate(flat):
            expected = truth.outputs[key][layer]
            assert np.abs(out[0, t] - expected).max() <= BOUND * max(np.abs(expected).max(), 1)
        x = np.array([p[5] for p in parts], np.float32).reshape(-1, CHANNELS)
        out = gdn.causal_conv1d_inplace(x[None], truth.weights[layer], None, step.conv(layer), step.rows_in,
                                        step.rows_out, cu_seqlens=cu_seqlens, **lists(ring, step, layer))
        for t, key in enumerate(flat):
            assert np.abs(out[0, t] - truth.conv_outputs[key][layer]).max() <= BOUND * 10


def read_state(ring, seq_id):
    """A sequence's committed state of every layer: recurrent and convolution, from its row and its entries in float64."""
    step = ring.begin([seq_id], [0])
    step.abort()
    row, ssm, conv = step.rows_in[0], [], []
    for layer in range(LAYERS):
        state, window = ring.ssm(layer).numpy()[row] * (row >= 0), ring.conv(layer).numpy()[row, 0].copy()
        if row < 0:
            state, window = np.zeros_like(state), np.zeros_like(window)
        if ring.form == "log":
            entries, log = step.log_in[0][step.log_in[0] >= 0], ring.log(layer)
            state = reference.replay(state, log.k[entries], log.d[entries], log.g[entries])[-1]
            window = np.concatenate([window, log.x[entries].T], 1)[:, len(entries):]
        ssm.append(state)
        conv.append(window)
    return ssm, conv


def read_rows(ring, row):
    """A row of every layer: recurrent and convolution states."""
    return ([ring.ssm(layer).numpy()[row].copy() for layer in range(LAYERS)],
            [ring.conv(layer).numpy()[row, 0].copy() for layer in range(LAYERS)])


def committed_row(ring, seq_id):
    """The row of a sequence's committed state: what a step of no tokens would read."""
    step = ring.begin([seq_id], [0])
    step.abort()
    return step.rows_in[0]


class Lengths:
    """What begin reads of a Batch."""

    def __init__(self, ids, sizes, fresh, parents=None):
        self.unique_ids, self.lengths = np.array(ids, np.int64), np.array(sizes, np.int64)
        self.first_positions = np.where(fresh, 0, -1)
        self.parents = None if parents is None else [p for one in parents for p in one]


class Boom(Exception):
    pass


# The header's and the records' fields, as gdn.h's table gives them.
HEADER = np.dtype({"names": ["nonce", "n_slots", "slots_offset", "readers_offset", "journal_offset", "ids_offset", "lock",
                             "sequence", "n_journal", "last_step"],
                   "formats": ["<u8", "<i4", "<i8", "<i8", "<i8", "<i8", "<u4", "<u4", "<u4", "<u4"],
                   "offsets": [32, 48, 136, 144, 152, 184, 384, 388, 392, 396], "itemsize": 512})
SLOT = np.dtype([("seq_id", "<i8"), ("position", "<i8"), ("owner_start", "<u8"), ("n_tokens", "<i8"),
                 *((name, "<u4" if name in ("owner", "step") else "<i4") for name in (
                     "state", "mark", "owner", "step", "next", "id_at", "head", "valid", "touched", "row", "zero", "order",
                     "first", "n_log", "new_row", "n_kept", "n_new", "n_tree", "tree")), ("reserved", "<i4", 5)])
READERS = np.dtype([("count", "<u4", 8), ("owner", "<u4", 8), ("owner_start", "<u8", 8)])
UNDO = np.dtype([("slot", "<i4"), ("reserved", "<i4"), ("old", SLOT)])


def fields(buffer):
    """A ring's header, slot records and journal, as arrays over its memory."""
    buffer = np.frombuffer(buffer, np.uint8)
    header = buffer[:512].view(HEADER)
    n, slots, journal = (int(header[name][0]) for name in ("n_slots", "slots_offset", "journal_offset"))
    return (header, buffer[slots:slots + n * SLOT.itemsize].view(SLOT),
            buffer[journal:journal + n * UNDO.itemsize].view(UNDO))


class Run:
    """A ring, sequences by their tokens, and a truth for each."""

    def __init__(self, n_slots=3, n_rollback=4, **options):
        self.ring = gdn.StateRing.create(n_slots, n_rollback, **EXTENTS, **options)
        self.truth, self.keys = Truth(), {}

    def acquire(self, *ids):
        for seq_id in ids:
            self.ring.acquire(seq_id)
            self.keys[seq_id] = []

    def step(self, **sizes):
        """step(s0=2, s1=1): so many tokens of sequences 0 and 1, committed."""
        ids = [int(name[1:]) for name in sizes]
        new = []
        for seq_id, size in zip(ids, sizes.values(), strict=True):
            mine = []
            for _ in range(size):
                mine.append(self.truth.token(([EMPTY, *self.keys[seq_id]] + mine)[-1]))
            new.append(mine)
        with self.ring.begin(ids, list(sizes.values())) as step:
            run_layers(self.ring, self.truth, step, new)
        for seq_id, mine in zip(ids, new, strict=True):
            self.keys[seq_id] += mine
        return step

    def rollback(self, seq_id, n):
        self.ring.rollback(seq_id, n)
        self.keys[seq_id] = self.keys[seq_id][:len(self.keys[seq_id]) - n]

    def check(self, seq_id, keys=None):
        keys = self.keys[seq_id] if keys is None else keys
        assert self.ring.position(seq_id) == len(keys)
        self.truth.check([EMPTY, *keys][-1], *self.rows(seq_id), exact=self.ring.form == "planes")

    def rows(self, seq_id):
        return read_state(self.ring, seq_id)

    def bits(self, seq_id):
        return b"".join(x.tobytes() for part in self.rows(seq_id) for x in part)
