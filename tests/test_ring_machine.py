"""The ring under a random mix of everything, against a replay of the kept tokens in float64."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from ring_model import IDS, Pair

ENDS = ["commit", "commit", "with", "accept", "accept", "abort", "raise", "drop"]
WRITTEN = ["nothing", "one layer", "all", "garbage"]
SIZES, FRESH = [0, 1, 1, 2, 3, 4, 5, 7], [False] * 7 + [True]


def some_id(pair, pick):
    """Mostly a sequence that is there."""
    return pick(4 * list(pair.model) + IDS)


def random_step(pair, pick):
    ids = list(dict.fromkeys(some_id(pair, pick) for _ in range(pick([0, 1, 1, 2, 3]))))
    sizes, fresh = [pick(SIZES) for _ in ids], [pick(FRESH) for _ in ids]
    if ids and pick([True, False, False]):
        pair.tree(ids, sizes, fresh, pick(ENDS), pick)
        for seq_id in ids:
            if pick([True, True, False]):
                pair.accept(seq_id, pick)
    else:
        pair.step(ids, sizes, fresh, pick(ENDS), pick(WRITTEN), pick)


def random_action(pair, saves, random):
    """One operation of any kind, steps and rollbacks most often."""
    pick, kind = random.choice, random.random()
    if kind < 0.6:
        random_step(pair, pick)
    elif kind < 0.75:
        pair.rollback(some_id(pair, pick), pick(range(-1, 5)))
    elif kind < 0.8:
        saves.append(pair.save(some_id(pair, pick), pick([True, True, False])))
    elif kind < 0.84 and saves:
        saved = pick(saves)
        if saved is not None:
            pair.load(pick(IDS), saved, pick([None, None, random.randrange(2**31)]))
    elif kind < 0.88:
        pair.copy(some_id(pair, pick), pick(IDS), pick([True, True, False]))
    elif kind < 0.9:
        pair.accept(some_id(pair, pick), pick)
    elif kind < 0.94:
        pair.acquire(pick(IDS), pick([None, None, 0, 1, 2, 3, 4]))
    else:
        pick([pair.release, pair.reset, pair.reset, lambda seq_id: pair.attach(), pair.name_twice])(some_id(pair, pick))
    pair.check()


class RingMachine(RuleBasedStateMachine):
    saves = Bundle("saves")

    @initialize(n_slots=st.integers(1, 4), n_rollback=st.integers(0, 4), spare=st.sampled_from([None, 0, 1, 2]),
                fill=st.sampled_from(["nan", "0x3e"]), offset=st.sampled_from([0, 4, 60]),
                form=st.sampled_from(["planes", "log"]), log_capacity=st.sampled_from([None, 1, 3]),
                n_spare=st.sampled_from([None, 1, 2]))
    def make(self, **extents):
        self.pair = Pair(**extents)

    @rule(data=st.data())
    def step(self, data):
        random_step(self.pair, lambda things: data.draw(st.sampled_from(things)))

    @rule(seed=st.integers(0, 2**32), n=st.sampled_from([1, 4, 20, 60]))
    def many(self, seed, n):
        """A run of operations; hypothesis alone would seldom get this deep."""
        saves, generator = [], random.Random(seed)
        for _ in range(n):
            random_action(self.pair, saves, generator)

    @rule(seq_id=st.sampled_from(IDS), slot=st.one_of(st.none(), st.integers(0, 4)))
    def acquire(self, seq_id, slot):
        self.pair.acquire(seq_id, slot)

    @rule(seq_id=st.sampled_from(IDS))
    def release(self, seq_id):
        self.pair.release(seq_id)

    @rule(seq_id=st.sampled_from(IDS))
    def reset(self, seq_id):
        self.pair.reset(seq_id)

    @rule(data=st.data(), n=st.integers(-1, 5))
    def rollback(self, data, n):
        self.pair.rollback(some_id(self.pair, lambda things: data.draw(st.sampled_from(things))), n)

    @rule(seq_id=st.sampled_from(IDS), other=st.sampled_from(IDS), depth=st.booleans())
    def copy(self, seq_id, other, depth):
        self.pair.copy(seq_id, other, depth)

    @rule(target=saves, seq_id=st.sampled_from(IDS), depth=st.booleans())
    def save(self, seq_id, depth):
        return self.pair.save(seq_id, depth)

    @rule(data=st.data(), seq_id=st.sampled_from(IDS))
    def accept(self, data, seq_id):
        self.pair.accept(seq_id, lambda things: data.draw(st.sampled_from(things)))

    @rule(seq_id=st.sampled_from(IDS), saved=saves, damage=st.one_of(st.none(), st.none(), st.integers(0, 2**31)))
    def load(self, seq_id, saved, damage):
        if saved is not None:
            self.pair.load(seq_id, saved, damage)

    @rule()
    def attach(self):
        self.pair.attach()

    @rule(seq_id=st.sampled_from(IDS))
    def name_twice(self, seq_id):
        self.pair.name_twice(seq_id)

    @invariant()
    def agrees(self):
        if hasattr(self, "pair"):
            self.pair.check()


def run(**size):
    calm = settings(deadline=None, suppress_health_check=list(HealthCheck), **size)
    run_state_machine_as_test(RingMachine, settings=calm)


def walk(seed, n, form=None):
    """n random operations on a random ring, the same for a seed; returns how many sequences were stepped."""
    generator, saves = random.Random(seed), []
    pick = generator.choice
    pair = Pair(pick([1, 2, 3, 4]), pick(range(5)), pick([None, 0, 1, 2]), pick(["nan", "0x3e"]), pick([0, 4, 60]),
                form or pick(["planes", "log"]), pick([None, 1, 3]), pick([None, 1, 2]))
    for _ in range(n):
        random_action(pair, saves, generator)
    return pair.steps


def test_ring_against_replay():
    run(max_examples=60, stateful_step_count=25)


@pytest.mark.parametrize("form", ["planes", "log"])
def test_random_walks(form):
    assert sum(walk(seed, 100, form) for seed in range(60)) > 700


@pytest.mark.slow
def test_ring_against_replay_long():
    run(max_examples=600, stateful_step_count=60)


@pytest.mark.slow
def test_random_walks_long():
    assert sum(walk(1000 + seed, 400) for seed in range(120)) > 9000
