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
    pair.step(ids, sizes, fresh, pick(ENDS), pick(WRITTEN), pick)


class RingMachine(RuleBasedStateMachine):
    saves = Bundle("saves")
    steps = 0                                   # sequences stepped and committed, over all examples

    @initialize(n_slots=st.integers(1, 4), n_rollback=st.integers(0, 4), spare=st.sampled_from([None, 0, 1, 2]),
                fill=st.sampled_from(["nan", "0x3e"]), offset=st.sampled_from([0, 4, 60]))
    def make(self, **extents):
        self.pair = Pair(**extents)

    @rule(data=st.data())
    def step(self, data):
        random_step(self.pair, lambda things: data.draw(st.sampled_from(things)))

    @rule(seed=st.integers(0, 2**32), n=st.sampled_from([1, 4, 20, 60]))
    def many(self, seed, n):
        """A run of steps and rollbacks; hypothesis alone would seldom get this deep."""
        pick = random.Random(seed).choice
        for _ in range(n):
            if pick([True, True, True, False]):
                random_step(self.pair, pick)
            else:
                self.pair.rollback(some_id(self.pair, pick), pick(range(4)))
            self.pair.check()

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

    @rule(seq_id=st.sampled_from(IDS), other=st.sampled_from(IDS))
    def copy(self, seq_id, other):
        self.pair.copy(seq_id, other)

    @rule(target=saves, seq_id=st.sampled_from(IDS))
    def save(self, seq_id):
        return self.pair.save(seq_id)

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

    def teardown(self):
        if hasattr(self, "pair"):
            type(self).steps += self.pair.steps


class Short(RingMachine):
    pass


class Long(RingMachine):
    pass


def run(machine, **size):
    calm = settings(deadline=None, suppress_health_check=list(HealthCheck), **size)
    run_state_machine_as_test(machine, settings=calm)


def test_ring_against_replay():
    run(Short, max_examples=150, stateful_step_count=30)
    assert Short.steps > 1000


@pytest.mark.slow
def test_ring_against_replay_long():
    run(Long, max_examples=1500, stateful_step_count=60)
    assert Long.steps > 10000
