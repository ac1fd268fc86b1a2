"""A ring beside its truth: steps run the kernels on the ring's rows, a float64 replay knows what they must hold."""

import contextlib
import itertools

import numpy as np
import pytest

import gdn
from gdn import reference

LAYERS, H_K, H_V, S_K, S_V, CHANNELS, WIDTH = 2, 1, 2, 4, 3, 5, 4
EXTENTS = dict(n_layers=LAYERS, H_v=H_V, S_k=S_K, S_v=S_V, conv_channels=CHANNELS, conv_width=WIDTH)
BOUND = 1e-5
EMPTY = 0                                       # the key of the state that has seen nothing


def pool(fill, n_slots, n_rollback, spare, offset=0):
    """A buffer for a ring, every byte of it one that would show: NaN, or 0x3e, which is 0.186 in float32."""
    n = gdn.StateRing.nbytes_for(n_slots, n_rollback, spare=spare, **EXTENTS) + 128
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

    def check(self, key, ssm, conv):
        """ssm and conv: a state's rows of every layer.  Within the bound, and the very bits written at its token."""
        for layer in range(LAYERS):
            truth = self.states[key][layer]
            error = np.abs(ssm[layer] - truth).max()
            assert error <= BOUND * max(np.abs(truth).max(), 1e-30), f"state after token {key}"
            np.testing.assert_array_equal(conv[layer], self.windows[key][layer])
        bits = b"".join(x.tobytes() for x in ssm)
        assert self.bits.setdefault(key, bits) == bits, f"state after token {key} is not the one that was written"


def run_layers(ring, truth, step, keys, layers=range(LAYERS)):
    """Run a step's tokens (keys: a list for every sequence) through the ring's layers.  Outputs are checked."""
    flat = [key for sequence in keys for key in sequence]
    cu_seqlens = np.concatenate([[0], np.cumsum([len(sequence) for sequence in keys])]).astype(np.int64)
    for layer in layers:
        parts = [truth.tokens[key][layer] for key in flat]
        empty = [np.zeros((1, 0, *shape), np.float32) for shape in ((H_K, S_K), (H_K, S_K), (H_V, S_V), (H_V,), (H_V,))]
        q, k, v, g, beta = (np.concatenate([empty[i], *(part[i] for part in parts)], 1) for i in range(5))
        out = gdn.gated_delta_net_inplace(q, k, v, g, beta, step.ssm(layer), step.rows_in, step.rows_out,
                                          cu_seqlens=cu_seqlens, head_map="tiled")
        for t, key in enumerate(flat):
            expected = truth.outputs[key][layer]
            assert np.abs(out[0, t] - expected).max() <= BOUND * max(np.abs(expected).max(), 1)
        x = np.array([p[5] for p in parts], np.float32).reshape(-1, CHANNELS)
        out = gdn.causal_conv1d_inplace(x[None], truth.weights[layer], None, step.conv(layer), step.rows_in,
                                        step.rows_out, cu_seqlens=cu_seqlens)
        for t, key in enumerate(flat):
            assert np.abs(out[0, t] - truth.conv_outputs[key][layer]).max() <= BOUND * 10


def read_rows(ring, row):
    """A row of every layer: recurrent and convolution states."""
    return ([ring.ssm(layer).numpy()[row].copy() for layer in range(LAYERS)],
            [ring.conv(layer).numpy()[row, 0].copy() for layer in range(LAYERS)])


def committed_row(ring, seq_id):
    """The row of a sequence's committed state: what a step of no tokens would read."""
    step = ring.begin([seq_id], [0])
    step.abort()
    return step.rows_in[0]


class Sequence:
    """A sequence as it should be: the keys of its tokens, and which key every plane holds (None: nothing of use)."""

    def __init__(self, n_planes):
        self.keys, self.planes, self.head, self.lost = [], [None] * n_planes, 0, False
        self.planes[0] = EMPTY

    def copy(self):
        other = Sequence(len(self.planes))
        other.keys, other.planes, other.head = list(self.keys), list(self.planes), self.head
        other.lost = self.lost
        return other

    def depth(self, n_rollback):
        """How many tokens can be taken back: planes behind the head that hold what was there before each token."""
        history = [EMPTY, *self.keys]
        depth = 0
        while depth < min(n_rollback, len(self.keys)) and \
                self.planes[(self.head - depth - 1) % len(self.planes)] == history[-depth - 2]:
            depth += 1
        return depth

    def touched(self, n_tokens, fresh, n_rollback):
        """The planes that a step of so many tokens may write."""
        n = min(n_tokens, n_rollback + 1) + (fresh and n_tokens <= n_rollback)
        return [(self.head + 1 + i) % len(self.planes) for i in range(n)]

    def fail(self, touched):
        for plane in touched:
            self.planes[plane] = None
        self.lost = self.lost or self.head in touched

    def advance(self, keys, touched, fresh):
        before = [EMPTY] if fresh else [EMPTY, *self.keys]
        self.keys = (before + list(keys))[1:]
        history = [EMPTY, *self.keys]
        if fresh:
            self.planes = [None] * len(self.planes)      # what they hold is of the sequence before
        for back, plane in enumerate(reversed(touched)):
            self.planes[plane] = history[-1 - back]
        if touched:
            self.head = touched[-1]
        self.lost = False


class Lengths:
    """What begin reads of a Batch."""

    def __init__(self, ids, sizes, fresh):
        self.unique_ids, self.lengths = np.array(ids, np.int64), np.array(sizes, np.int64)
        self.first_positions = np.where(fresh, 0, -1)


class Boom(Exception):
    pass


IDS = [0, 1, 2, 7, 2**40]


class Pair:
    """A ring and its model, with every operation on both; refusals are part of it.  `pick(list)` chooses."""

    def __init__(self, n_slots, n_rollback, spare, fill, offset):
        self.buffer = pool(fill, n_slots, n_rollback, spare, offset)
        self.ring = gdn.StateRing.create(n_slots, n_rollback, spare=spare, buffer=self.buffer, **EXTENTS)
        self.n_slots, self.R = n_slots, n_rollback
        self.P = n_rollback + 1 + ((1 if n_rollback else 0) if spare is None else spare)
        assert self.ring.n_planes == self.P
        self.truth, self.model, self.steps = Truth(), {}, 0
        for seq_id in IDS[:n_slots - 1]:
            self.ring.acquire(seq_id)
            self.model[seq_id] = Sequence(self.P)

    # what must be refused

    def refusal(self, seq_id, fresh=False):
        if seq_id not in self.model:
            return pytest.raises(KeyError, match=str(seq_id))
        if self.model[seq_id].lost and not fresh:
            return pytest.raises(gdn.StateLostError, match=str(seq_id))
        return None

    def target_refusal(self, seq_id):
        if seq_id in self.model:
            return pytest.raises(ValueError, match=f"{seq_id} is already acquired")
        if len(self.model) == self.n_slots:
            return pytest.raises(gdn.RingFullError, match=f"{self.n_slots} slots")
        return None

    # operations

    def acquire(self, seq_id, slot):
        if slot is not None and slot >= self.n_slots:
            refusal = pytest.raises(IndexError, match=str(slot))
        elif seq_id in self.model:
            refusal = pytest.raises(ValueError, match=str(seq_id))
        elif slot is not None and slot in [self.ring.slot(other) for other in self.model]:
            refusal = pytest.raises(ValueError, match=f"slot {slot}")
        else:
            refusal = self.target_refusal(seq_id)
        with refusal or contextlib.nullcontext():
            given = self.ring.acquire(seq_id, slot)
            assert slot is None or given == slot
            self.model[seq_id] = Sequence(self.P)

    def release(self, seq_id):
        with self.refusal(seq_id, True) or contextlib.nullcontext():
            self.ring.release(seq_id)
            del self.model[seq_id]

    def reset(self, seq_id):
        with self.refusal(seq_id, True) or contextlib.nullcontext():
            self.ring.reset(seq_id)
            sequence = self.model[seq_id]
            sequence.advance([], [(sequence.head + 1) % self.P], True)

    def rollback(self, seq_id, n):
        refusal = self.refusal(seq_id)
        if refusal is None and not 0 <= n <= self.model[seq_id].depth(self.R):
            refusal = pytest.raises(ValueError, match=str(n))
        with refusal or contextlib.nullcontext():
            self.ring.rollback(seq_id, n)
            sequence = self.model[seq_id]
            sequence.head = (sequence.head - n) % self.P
            sequence.keys = sequence.keys[:len(sequence.keys) - n]

    def copy(self, seq_id, other):
        with self.refusal(seq_id) or self.target_refusal(other) or contextlib.nullcontext():
            self.ring.copy(seq_id, other)
            self.model[other] = self.reachable(self.model[seq_id])

    def save(self, seq_id):
        with self.refusal(seq_id) or contextlib.nullcontext():
            return self.ring.save(seq_id), self.reachable(self.model[seq_id])
        return None

    def load(self, seq_id, saved, damage):
        data, sequence = saved
        refusal = self.target_refusal(seq_id)
        if seq_id in self.model and self.model[seq_id].lost:
            refusal = None
        if damage is not None:
            bent = bytearray(data)
            bent[damage % len(data)] ^= 1 << damage % 8
            data, refusal = bytes(bent), pytest.raises(ValueError, match="no intact saved sequence")
        with refusal or contextlib.nullcontext():
            self.ring.load(seq_id, data)
            self.model[seq_id] = sequence.copy()

    def attach(self):
        self.ring = gdn.StateRing(self.buffer)

    def name_twice(self, seq_id):
        with self.refusal(seq_id) or pytest.raises(ValueError, match=str(seq_id)):
            self.ring.begin([seq_id, seq_id], [1, 1])

    def reachable(self, sequence):
        """What a copied or loaded sequence has: the planes that can be rolled back to, and no others."""
        other, depth = sequence.copy(), sequence.depth(self.R)
        other.planes, other.head = [None] * self.P, depth
        for back in range(depth + 1):
            other.planes[depth - back] = [EMPTY, *sequence.keys][-1 - back]
        return other

    def step(self, ids, sizes, fresh, end, written, pick):
        refusals = [r for r in (self.refusal(i, f) for i, f in zip(ids, fresh, strict=True)) if r is not None]
        with refusals[0] if refusals else contextlib.nullcontext():
            self.run_step(ids, sizes, fresh, end, written, pick)

    def run_step(self, ids, sizes, fresh, end, written, pick):
        step = self.ring.begin(Lengths(ids, sizes, fresh)) if any(fresh) else self.ring.begin(ids, sizes)
        keys, touched, intact = [], [], set()
        for seq_id, size, new, row in zip(ids, sizes, fresh, step.rows_in, strict=True):
            sequence = self.model[seq_id]
            assert (row == -1) == new
            history, mine = [EMPTY] if new else [EMPTY, *sequence.keys], []
            for _ in range(size):
                mine.append(self.truth.token((history + mine)[-1]))
            keys.append(mine)
            touched.append(sequence.touched(size, new, self.R))
            if sequence.head not in touched[-1]:
                intact.add(sequence.head * self.n_slots + self.ring.slot(seq_id))
            for refused in (lambda: self.ring.begin([seq_id], [1]), lambda: self.ring.release(seq_id),   # noqa: B023
                            lambda: self.ring.rollback(seq_id, 0), lambda: self.ring.reset(seq_id)):     # noqa: B023
                with pytest.raises(ValueError, match="in a step"):      # nobody else gets it meanwhile
                    refused()
        assert not intact & set(step.rows_out.ravel().tolist())
        if end in ("abort", "raise", "drop"):
            self.fail_step(step, keys, end, written)
            for seq_id, planes in zip(ids, touched, strict=True):
                self.model[seq_id].fail(planes)
            return
        with step if end == "with" else contextlib.nullcontext():
            run_layers(self.ring, self.truth, step, keys)
        if end != "with":
            step.commit()
        with pytest.raises(ValueError, match="already committed"):
            step.commit(written=True)
        for seq_id, mine, planes, new, out in zip(ids, keys, touched, fresh, step.rows_out, strict=True):
            self.model[seq_id].advance(mine, planes, new)
            for back, row in enumerate(out[out >= 0]):
                self.truth.check(mine[-1 - back], *read_rows(self.ring, row))
            assert self.ring.max_rollback(seq_id) >= min(self.R, len(mine))
            self.steps += 1
            if end == "accept":
                self.rollback(seq_id, pick(range(min(len(mine), self.R) + 1)))

    def fail_step(self, step, keys, end, written):
        """Write some of the step, or garbage, and end it without a commit."""
        with contextlib.suppress(Boom), step if end == "raise" else contextlib.nullcontext():
            if written == "garbage":
                rows = step.rows_out[step.rows_out >= 0]
                for layer in range(LAYERS):
                    self.ring.ssm(layer).numpy()[rows] = np.nan
                    self.ring.conv(layer).numpy()[rows] = np.nan
            elif written != "nothing":
                run_layers(self.ring, self.truth, step, keys, range(1 if written == "one layer" else LAYERS))
            if end == "raise":
                raise Boom
        if end == "abort":
            step.abort()

    # comparison

    def check(self):
        assert sorted(self.ring.seq_ids) == sorted(self.model)
        assert self.ring.n_free == self.n_slots - len(self.model)
        assert len({self.ring.slot(i) for i in self.model}) == len(self.model)
        for seq_id, sequence in self.model.items():
            if sequence.lost:
                for refused in (self.ring.position, self.ring.max_rollback, self.ring.save):
                    with pytest.raises(gdn.StateLostError):
                        refused(seq_id)
                continue
            assert self.ring.position(seq_id) == len(sequence.keys)
            assert self.ring.max_rollback(seq_id) == sequence.depth(self.R)
            row = committed_row(self.ring, seq_id)
            assert row == sequence.head * self.n_slots + self.ring.slot(seq_id)
            self.truth.check([EMPTY, *sequence.keys][-1], *read_rows(self.ring, row))


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
        self.truth.check([EMPTY, *keys][-1], *self.rows(seq_id))

    def rows(self, seq_id):
        return read_rows(self.ring, committed_row(self.ring, seq_id))

    def bits(self, seq_id):
        return b"".join(x.tobytes() for part in self.rows(seq_id) for x in part)
