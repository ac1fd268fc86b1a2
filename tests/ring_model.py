"""What a ring must answer to every operation, right or refused, in either form."""

import contextlib

import numpy as np
import pytest
from ring_tools import EMPTY, EXTENTS, LAYERS, Boom, Lengths, Truth, committed_row, pool, read_rows, read_state, run_layers

import gdn


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


class LogSequence:
    """The same of a ring with a log: the keys of its tokens, and how many at least can be taken back."""

    lost = False

    def __init__(self, n_rollback):
        self.keys, self.sure, self.n_rollback, self.tree = [], 0, n_rollback, None

    def copy(self):
        other = LogSequence(self.n_rollback)
        other.keys, other.sure = list(self.keys), self.sure
        return other

    def touched(self, n_tokens, fresh, n_rollback):
        return []

    def fail(self, touched):
        pass

    def advance(self, keys, touched, fresh):
        self.keys, self.sure, self.tree = ([], 0, None) if fresh else (self.keys, self.sure, None)
        self.keys, self.sure = self.keys + list(keys), min(self.n_rollback, self.sure + len(keys))


IDS = [0, 1, 2, 7, 2**40]


def all_refused(error, text, *calls):
    """Every call, a function and its arguments, raises that."""
    for call, *arguments in calls:
        with pytest.raises(error, match=text):
            call(*arguments)


class Pair:
    """A ring and its model, with every operation on both; refusals are part of it.  `pick(list)` chooses."""

    def __init__(self, n_slots, n_rollback, spare, fill, offset, form="planes", log_capacity=None, n_spare=None):
        options = {"form": form} | ({"spare": spare} if form == "planes" else {
            "n_spare": n_spare and min(n_spare, n_slots), "log_capacity": log_capacity and n_rollback + log_capacity})
        self.buffer = pool(fill, n_slots, n_rollback, offset=offset, **options)
        self.ring = gdn.StateRing.create(n_slots, n_rollback, buffer=self.buffer, **options, **EXTENTS)
        self.n_slots, self.R, self.log = n_slots, n_rollback, form == "log"
        self.P = n_rollback + 1 + ((1 if n_rollback else 0) if spare is None else spare)
        assert self.ring.n_planes == (1 if self.log else self.P)
        self.truth, self.model, self.steps = Truth(), {}, 0
        for seq_id in IDS[:n_slots - 1]:
            self.ring.acquire(seq_id)
            self.model[seq_id] = self.new()

    def new(self):
        return LogSequence(self.R) if self.log else Sequence(self.P)

    def depth(self, seq_id):
        """What max_rollback must be; of a log, whose folds the ring times, what it is, between its bounds."""
        sequence = self.model[seq_id]
        if not self.log:
            return sequence.depth(self.R)
        depth = self.ring.max_rollback(seq_id)
        assert sequence.sure <= depth <= min(self.R, len(sequence.keys))
        return depth

    # what must be refused

    def refusal(self, seq_id, fresh=False, tree=False):
        if seq_id not in self.model:
            return pytest.raises(KeyError, match=str(seq_id))
        if self.model[seq_id].lost and not fresh:
            return pytest.raises(gdn.StateLostError, match=str(seq_id))
        if self.log and self.model[seq_id].tree is not None and not tree:
            return pytest.raises(ValueError, match=f"tree of sequence {seq_id} waits")
        return None

    def target_refusal(self, seq_id):
        if seq_id in self.model:
            return pytest.raises(gdn.RingBusyError, match=f"{seq_id} is already acquired")
        if len(self.model) == self.n_slots:
            return pytest.raises(gdn.RingFullError, match=f"{self.n_slots} slots")
        return None

    # operations

    def acquire(self, seq_id, slot):
        if slot is not None and slot >= self.n_slots:
            refusal = pytest.raises(IndexError, match=str(slot))
        elif seq_id in self.model:
            refusal = pytest.raises(gdn.RingBusyError, match=str(seq_id))
        elif slot is not None and slot in [self.ring.slot(other) for other in self.model]:
            refusal = pytest.raises(gdn.RingBusyError, match=f"slot {slot}")
        else:
            refusal = self.target_refusal(seq_id)
        with refusal or contextlib.nullcontext():
            given = self.ring.acquire(seq_id, slot)
            assert slot is None or given == slot
            self.model[seq_id] = self.new()

    def release(self, seq_id):
        with self.refusal(seq_id, True, True) or contextlib.nullcontext():
            self.ring.release(seq_id)
            del self.model[seq_id]

    def reset(self, seq_id):
        with self.refusal(seq_id, True, True) or contextlib.nullcontext():
            self.ring.reset(seq_id)
            sequence = self.model[seq_id]
            sequence.advance([], [] if self.log else [(sequence.head + 1) % self.P], True)

    def rollback(self, seq_id, n):
        refusal = self.refusal(seq_id)
        if refusal is None and not 0 <= n <= self.depth(seq_id):
            refusal = pytest.raises(ValueError, match=str(n))
        with refusal or contextlib.nullcontext():
            self.ring.rollback(seq_id, n)
            sequence = self.model[seq_id]
            if self.log:
                sequence.sure = max(0, sequence.sure - n)
            else:
                sequence.head = (sequence.head - n) % self.P
            sequence.keys = sequence.keys[:len(sequence.keys) - n]

    def copy(self, seq_id, other, depth=True):
        with self.refusal(seq_id) or self.target_refusal(other) or contextlib.nullcontext():
            self.ring.copy(seq_id, other, depth)
            self.model[other] = self.reachable(self.model[seq_id], depth)

    def save(self, seq_id, depth=True):
        with self.refusal(seq_id) or contextlib.nullcontext():
            return self.ring.save(seq_id, depth), self.reachable(self.model[seq_id], depth)
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
        with self.refusal(seq_id) or pytest.raises(gdn.RingBusyError, match=str(seq_id)):
            self.ring.begin([seq_id, seq_id], [1, 1])

    def reachable(self, sequence, depth=True):
        """What a copied or loaded sequence has: the planes that can be rolled back to, and no others."""
        other = sequence.copy()
        if self.log:
            other.sure = sequence.sure if depth else 0
            return other
        n = sequence.depth(self.R) if depth else 0
        other.planes, other.head = [None] * self.P, n
        for back in range(n + 1):
            other.planes[n - back] = [EMPTY, *sequence.keys][-1 - back]
        return other

    # steps

    def step(self, ids, sizes, fresh, end, written, pick):
        refusals = [r for r in (self.refusal(i, f) for i, f in zip(ids, fresh, strict=True)) if r is not None]
        with refusals[0] if refusals else contextlib.nullcontext():
            self.run_step(ids, sizes, fresh, end, written, pick)

    def begin(self, *arguments, **options):
        """The step, or None if it needs more spare rows than there are; never where there is one for every slot."""
        try:
            return self.ring.begin(*arguments, **options)
        except ValueError as error:
            if "n_spare" not in str(error) or self.ring.n_spare == self.n_slots:
                raise
            return None

    def run_step(self, ids, sizes, fresh, end, written, pick):
        new_ids = [i for i in IDS if i not in self.model][:self.n_slots - len(self.model)]
        forks = []
        if ids and new_ids and pick([True, False, False]):
            i = pick(range(len(ids)))
            forks = [(ids[i], pick(range(sizes[i] + 1)), pick(new_ids))]
        step = self.begin(Lengths(ids, sizes, fresh), forks=forks) if any(fresh) else self.begin(ids, sizes, forks=forks)
        if step is None:
            return
        keys, touched, intact = [], [], set()
        for seq_id, size, new, row in zip(ids, sizes, fresh, step.rows_in, strict=True):
            sequence = self.model[seq_id]
            assert row == -1 if new else row >= 0 or self.log
            history, mine = [EMPTY] if new else [EMPTY, *sequence.keys], []
            for _ in range(size):
                mine.append(self.truth.token((history + mine)[-1]))
            keys.append(mine)
            touched.append(sequence.touched(size, new, self.R))
            if not self.log and sequence.head not in touched[-1]:
                intact.add(sequence.head * self.n_slots + self.ring.slot(seq_id))
            all_refused(gdn.RingBusyError, "in a step", (self.ring.begin, [seq_id], [1]), (self.ring.release, seq_id),
                        (self.ring.rollback, seq_id, 0), (self.ring.reset, seq_id))      # nobody else gets it meanwhile
        if self.log:
            used, put = step.log_in[step.log_in >= 0].tolist(), step.log_out[step.log_out >= 0].tolist()
            assert len({*used, *put}) == len(used) + len(put)
            rows = [] if step.checkpoints is None else step.checkpoints[:, 2].tolist()
            assert not set(rows) & (set(step.rows_in.tolist()) - {-1}) and len(set(rows)) == len(rows)
        else:
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
            step.commit()
        for source, n, new_id in forks:
            i = ids.index(source)
            self.model[new_id] = self.new()
            self.model[new_id].keys = (([] if fresh[i] else self.model[source].keys) + keys[i][:n])
            if not self.log:
                self.model[new_id].planes[0] = [EMPTY, *self.model[new_id].keys][-1]
        for seq_id, mine, planes, new, out in zip(ids, keys, touched, fresh, step.rows_out, strict=True):
            self.model[seq_id].advance(mine, planes, new)
            for back, row in enumerate(out[out >= 0]):
                self.truth.check(mine[-1 - back], *read_rows(self.ring, row))
            assert self.ring.max_rollback(seq_id) >= min(self.R, len(mine))
            self.steps += 1
            if end == "accept":
                self.rollback(seq_id, pick(range(min(len(mine), self.R) + 1)))

    def tree(self, ids, sizes, fresh, end, pick):
        """A step of trees; committed, it waits for accept."""
        sizes = [min(n, self.R + 1) for n in sizes]
        parents = [[pick([-1, *range(t)]) for t in range(n)] for n in sizes]
        if not self.log:
            with pytest.raises(ValueError, match="form 'log'"):
                self.ring.begin(Lengths(ids, sizes, fresh, parents))
            return
        refusals = [r for r in (self.refusal(i, f) for i, f in zip(ids, fresh, strict=True)) if r is not None]
        with refusals[0] if refusals else contextlib.nullcontext():
            self.run_tree(ids, sizes, fresh, parents, end)

    def run_tree(self, ids, sizes, fresh, parents, end):
        step, keys = self.begin(Lengths(ids, sizes, fresh, parents)), []
        if step is None:
            return
        for seq_id, new, mine in zip(ids, fresh, parents, strict=True):
            before, tokens = EMPTY if new else [EMPTY, *self.model[seq_id].keys][-1], []
            for parent in mine:
                tokens.append(self.truth.token(before if parent < 0 else tokens[parent]))
            keys.append(tokens)
        if end in ("abort", "raise", "drop"):
            self.fail_step(step, keys, end, "garbage")
            return
        run_layers(self.ring, self.truth, step, keys)
        step.commit()
        for seq_id, new, mine, tokens in zip(ids, fresh, parents, keys, strict=True):
            sequence = self.model[seq_id]
            if new:
                sequence.advance([], [], True)
            sequence.sure = min(sequence.sure, self.ring.log_capacity - len(mine)) if mine else sequence.sure
            sequence.tree = (mine, tokens) if mine else None
            self.steps += 1

    def accept(self, seq_id, pick):
        """A random path of the tree that waits, or something that is none."""
        refusal = self.refusal(seq_id, tree=True)
        tree = None if refusal else self.model[seq_id].tree if self.log else None
        if refusal is None and tree is None:
            refusal = pytest.raises(ValueError, match="is no path of a tree")
        path = []
        if tree is not None:
            at = pick(range(-1, len(tree[0])))
            while at >= 0:
                path.insert(0, at)
                at = tree[0][at]
            wrong = pick([None, None, [len(tree[0])], path + path[-1:], [-1], path[1:] if len(path) > 1 else [-2]])
            if wrong:
                with pytest.raises(ValueError, match="is no path of a tree"):
                    self.ring.accept(seq_id, wrong)
        with refusal or contextlib.nullcontext():
            self.ring.accept(seq_id, path)
            self.model[seq_id].advance([tree[1][t] for t in path], [], False)

    def fail_step(self, step, keys, end, written):
        """Write some of the step, or garbage, and end it without a commit."""
        with contextlib.suppress(Boom), step if end == "raise" else contextlib.nullcontext():
            if written == "garbage":
                rows = step.rows_out[step.rows_out >= 0]
                if step.checkpoints is not None:
                    rows = np.concatenate([rows, step.checkpoints[:, 2]])
                for layer in range(LAYERS):
                    self.ring.ssm(layer).numpy()[rows] = np.nan
                    self.ring.conv(layer).numpy()[rows] = np.nan
                    for part in ("k", "d", "g", "x") if self.log else ():
                        getattr(self.ring.log(layer), part)[step.log_out[step.log_out >= 0]] = np.nan
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
                all_refused(gdn.StateLostError, "lost", *((use, seq_id) for use in (
                    self.ring.position, self.ring.max_rollback, self.ring.save)))
                continue
            assert self.ring.position(seq_id) == len(sequence.keys)
            assert self.ring.max_rollback(seq_id) == self.depth(seq_id)
            if self.log and sequence.tree is not None:
                all_refused(ValueError, "waits for accept", (self.ring.begin, [seq_id], [1]), (self.ring.save, seq_id),
                            (self.ring.rollback, seq_id, 0), (self.ring.copy, seq_id, -9))
                continue
            if not self.log:
                row = committed_row(self.ring, seq_id)
                assert row == sequence.head * self.n_slots + self.ring.slot(seq_id)
            self.truth.check([EMPTY, *sequence.keys][-1], *read_state(self.ring, seq_id), exact=not self.log)
