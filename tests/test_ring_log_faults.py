"""Rings in log form at odd extents: what other caches of states got wrong, each against a float64 replay or bit by bit."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ring_tools import Boom, Lengths, Run, lists, read_state, run_layers
from test_ring_log import LOG, accept, log_run, tree_step
from test_ring_processes import child, kill, shared

import gdn
from gdn import reference

# ---------------------------------------------------------------- a stack of layers at odd extents

H_K, H_V, S_K, S_V, CHANNELS, WIDTH, LAYERS = 2, 4, 70, 33, 129, 4, 2
NAMES = ("q", "k", "v", "g", "beta")


class Stack:
    """A ring in log form, and the same steps of random tokens on every call of `step`: outputs of both kinds."""

    def __init__(self, n_slots=3, n_rollback=4, *, per_channel=False, n_threads=None, form="log", seed=0):
        self.ring = gdn.StateRing.create(n_slots, n_rollback, n_layers=LAYERS, H_k=H_K, H_v=H_V, S_k=S_K, S_v=S_V, form=form,
                                         conv_channels=CHANNELS, conv_width=WIDTH, per_channel=per_channel, head_map="tiled")
        self.gate, self.n_threads, self.rng = (H_V, S_K) if per_channel else (H_V,), n_threads, np.random.default_rng(seed)
        self.weights = self.rng.standard_normal((LAYERS, CHANNELS, WIDTH), np.float32)
        self.kept = {}                          # sequence -> each layer's inputs of its tokens

    def acquire(self, *ids):
        for seq_id in ids:
            self.ring.acquire(seq_id)
            self.kept[seq_id] = [self.draw(0) for _ in range(LAYERS)]

    def draw(self, n):
        shapes = ((H_K, S_K), (H_K, S_K), (H_V, S_V), self.gate, (H_V,), (CHANNELS,))
        q, k, v, g, beta, x = (self.rng.standard_normal((n, *shape), np.float32) for shape in shapes)
        unit = (q / np.linalg.norm(q, axis=-1, keepdims=True), k / np.linalg.norm(k, axis=-1, keepdims=True))
        return [*unit, v, -np.exp(g), reference.sigmoid(beta).astype(np.float32), x]

    def run(self, step, parts):
        """Each layer's tokens (parts: of every sequence, behind each other) through the ring; the outputs."""
        cu_seqlens, outs = np.concatenate([[0], np.cumsum(step.n_tokens)]).astype(np.int64), []
        for layer, inputs in enumerate(parts):
            options = dict(cu_seqlens=cu_seqlens, n_threads=self.n_threads, **lists(self.ring, step, layer))
            *delta, x = (part[None] for part in inputs)
            outs.append(gdn.gated_delta_net_inplace(*delta, step.ssm(layer), step.rows_in, step.rows_out, head_map="tiled",
                                                    **options))
            outs.append(gdn.causal_conv1d_inplace(x, self.weights[layer], None, step.conv(layer), step.rows_in, step.rows_out,
                                                  **options))
        return outs

    def step(self, ids, sizes, spoil=None, parents=None, forks=None):
        """A committed step of new tokens; spoil(layer, inputs) may change them before they are run."""
        parts = [self.draw(sum(sizes)) for _ in range(LAYERS)]
        for layer in range(LAYERS) if spoil else ():
            spoil(layer, parts[layer])
        for i, seq_id in enumerate(ids):
            mine, start = self.kept[seq_id], sum(sizes[:i])
            for layer in range(LAYERS if parents is None else 0):
                mine[layer] = [np.concatenate([old, new[start:start + sizes[i]]])
                               for old, new in zip(mine[layer], parts[layer], strict=True)]
        batch = (ids, sizes) if parents is None else (Lengths(ids, sizes, [False] * len(ids), parents),)
        with self.ring.begin(*batch, forks=forks) as step:
            return self.run(step, parts)

    def rollback(self, seq_id, n):
        self.ring.rollback(seq_id, n)
        for layer in self.kept[seq_id]:
            layer[:] = [part[:len(part) - n] for part in layer]

    def states(self, seq_id):
        return read_state(self.ring, seq_id)

    def check(self, seq_id):
        """Every layer's states against the recurrence in float64 over the tokens that were kept."""
        for (*delta, x), ssm, conv in zip(self.kept[seq_id], *self.states(seq_id), strict=True):
            assert self.ring.position(seq_id) == len(x)
            state = reference.recurrent(*(part[None] for part in delta))[1][0]
            assert np.abs(ssm - state).max() <= 2e-5 * np.abs(state).max()
            np.testing.assert_array_equal(conv, np.concatenate([np.zeros((WIDTH - 1, CHANNELS)), x])[-WIDTH + 1:].T)


def bits(arrays):
    return [x.tobytes() for x in arrays]


# ---------------------------------------------------------------- shapes, threads, garbage

@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("sizes", [(1, 15, 17), (63, 1, 65), (64, 64, 1), (130, 2, 31), (129, 127, 33)], ids=str)
def test_odd_tails(sizes, per_channel):
    """Lengths around a chunk, S_k and S_v that fill no vector, an odd number of channels; then tokens one by one."""
    stack = Stack(per_channel=per_channel)
    stack.acquire(0, 1, 2)
    for more in (sizes, sizes[::-1], (1, 1, 1), (3, 1, 2)):
        stack.step([0, 1, 2], more)
        stack.rollback(0, min(more[0], 2))
        for seq_id in range(3):
            stack.check(seq_id)


def session(n_threads, per_channel=False, seed=0):
    """Prompts, single tokens, drafts, a tree, a fork and folds of all: outputs, rows and entries."""
    stack = Stack(6, n_threads=n_threads, per_channel=per_channel, seed=seed)
    stack.acquire(0, 1, 2)
    outs = stack.step([0, 1, 2], [70, 3, 1])
    for n in (1, 5, 1, 9, 4, 1, 40, 2):
        outs += stack.step([2, 0, 1], [n, 1, min(n, 5)])
        stack.rollback(1, min(n, 4))
    outs += stack.step([0, 2], [5, 3], parents=[[-1, 0, 0, 2, 1], [-1, -1, 0]])
    stack.ring.accept(0, [0, 2, 3])
    stack.ring.accept(2, [])
    outs += stack.step([0, 1], [1, 20], forks=[(1, 11, 7)])
    return bits(outs) + [stack.ring.save(seq_id, depth) for seq_id in (0, 1, 2, 7) for depth in (True, False)]


@pytest.mark.parametrize("per_channel", [False, True])
def test_threads_change_no_bit(per_channel):
    one = session(1, per_channel)
    for n_threads in (2, 3, 4):
        assert session(n_threads, per_channel) == one


def digest():
    return hashlib.sha256(b"".join(session(1, seed=3))).hexdigest()


def test_later_calls_give_the_bits_of_a_fresh_process():
    """Lengths up and down on another ring, two layers in turn, leave nothing behind that shows."""
    other, rng = Stack(per_channel=True, seed=9), np.random.default_rng(9)
    other.acquire(0, 1)
    for n in (1, 200, 3, 64, 1, 130, 2):
        other.step([0, 1], [n, int(rng.integers(1, 80))])
    here = Path(__file__).parent
    fresh = subprocess.run([sys.executable, "-c", "import test_ring_log_faults as t; print(t.digest())"], capture_output=True,
                           text=True, check=True, env={"PYTHONPATH": ":".join([str(here), str(here.parent), *sys.path])})
    assert digest() == digest() == fresh.stdout.strip()


# ---------------------------------------------------------------- NaN stays where it is

@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("what", range(6), ids=[*NAMES, "x"])
def test_nan_of_one_sequence_reaches_no_other(what, per_channel):
    clean, spoiled = Stack(per_channel=per_channel), Stack(per_channel=per_channel)

    def spoil(layer, inputs):
        inputs[what][9] = np.nan                # the last of sequence 1's tokens

    for stack in (clean, spoiled):
        stack.acquire(0, 1, 2)
        stack.step([0, 1, 2], [9, 4, 18])       # sequence 2 folds
    for n in range(6):
        one, other = clean.step([0, 1, 2], [3, 7, 2]), spoiled.step([0, 1, 2], [3, 7, 2], spoil if n == 0 else None)
        for a, b in zip(one, other, strict=True):
            assert bits((a[0, :3], a[0, 10:])) == bits((b[0, :3], b[0, 10:]))
        for seq_id in (0, 2):
            assert clean.ring.save(seq_id) == spoiled.ring.save(seq_id)
        if n == 0:                              # q is of its token alone
            assert np.isnan(np.frombuffer(spoiled.ring.save(1), np.float32, offset=88)).any() == (what != 0)
    spoiled.ring.release(1)
    spoiled.acquire(5)                          # the slot's next tenant
    spoiled.step([5], [30])
    spoiled.check(5)


@pytest.mark.parametrize("what", range(6), ids=[*NAMES, "x"])
def test_nan_of_one_branch_reaches_no_other(what):
    """Siblings, their outputs in every layer, and what stays of an accepted path."""
    clean, spoiled = Stack(), Stack()
    parents = [-1, 0, 0, 2, 1]

    def spoil(layer, inputs):
        inputs[what][1] = np.nan                # of the branch 0, 1, 4

    for stack in (clean, spoiled):
        stack.acquire(0)
        stack.step([0], [14])
    one, other = clean.step([0], [5], None, [parents]), spoiled.step([0], [5], spoil, [parents])
    for a, b in zip(one, other, strict=True):
        assert bits((a[0, 0], a[0, 2:4])) == bits((b[0, 0], b[0, 2:4]))
    assert np.isnan(other[0][0, 1]).any() or what == 5
    for stack in (clean, spoiled):
        stack.ring.accept(0, [0, 2, 3])
    assert clean.ring.save(0) == spoiled.ring.save(0)
    for n in (1, 20, 3):
        assert bits(clean.step([0], [n])) == bits(spoiled.step([0], [n]))


# ---------------------------------------------------------------- prompts, prefixes, layers

def test_a_cached_prompt_is_taken_back_by_its_last_token():
    """Saved whole, loaded elsewhere, one token back and that token again: the output of the first run."""
    run, other = log_run(), log_run(n_rollback=6, n_slots=1)
    run.acquire(0)
    run.step(s0=37)
    other.truth = run.truth
    other.ring.load(4, run.ring.save(0))
    other.keys[4] = run.keys[0][:]
    last = other.keys[4][-1]
    other.rollback(4, 1)
    assert other.ring.position(4) == 36
    with other.ring.begin([4], [1]) as step:
        run_layers(other.ring, other.truth, step, [[last]])      # checks the outputs
    other.keys[4].append(last)
    other.check(4)


@pytest.mark.parametrize("form", ["planes", "log"])
def test_states_inside_a_long_call(form):
    """4278 tokens in one call, with forks at 1600 and 3200, against calls that end there."""
    whole, parts = Stack(form=form, seed=4), Stack(form=form, seed=4)
    inputs = [whole.draw(4278) for _ in range(LAYERS)]
    for stack in (whole, parts):
        stack.ring.acquire(0)
    with whole.ring.begin([0], [4278], forks=[(0, 1600, 1), (0, 3200, 2)]) as step:
        whole.run(step, inputs)
    done, wanted = 0, {}
    for end in (1600, 3200, 4278):
        with parts.ring.begin([0], [end - done]) as step:
            parts.run(step, [[part[done:end] for part in layer] for layer in inputs])
        wanted[end], done = parts.states(0), end
    for seq_id, end in ((1, 1600), (2, 3200), (0, 4278)):
        assert whole.ring.position(seq_id) == end
        for ours, theirs in zip(whole.states(seq_id)[0], wanted[end][0], strict=True):
            assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()
        assert bits(whole.states(seq_id)[1]) == bits(wanted[end][1])


def test_resuming_at_any_tail():
    """A state 64 tokens in, and 0 to 66 more: every output within the bound, whichever kernel takes them."""
    run = log_run(n_slots=2)
    run.acquire(0)
    run.step(s0=64)
    for tail in range(67):
        run.ring.copy(0, 1)
        run.keys[1] = run.keys[0][:]
        run.step(s1=tail)
        run.check(1)
        run.ring.release(1)


# ---------------------------------------------------------------- trees that end badly

@pytest.mark.parametrize("end", ["abort", "raise", "drop", "kill"])
@pytest.mark.parametrize("more", [1, 7], ids=["plain", "folded"])
def test_a_tree_that_is_not_committed(more, end):
    memory, ring = shared(2, 8, **LOG)
    run = Run()
    run.ring, run.keys = ring, {}
    run.acquire(0)
    run.step(s0=20)
    run.step(s0=more)
    before = ring.save(0)

    def spoil():
        step = ring.begin(Lengths([0], [4], [False], [[-1, 0, 0, 2]]))
        assert (step.checkpoints is None) == (more == 1)
        for part in ("k", "d", "g", "x"):
            getattr(ring.log(0), part)[step.log_out[step.log_out >= 0]] = np.nan
        return step

    if end == "kill":
        with child(spoil) as pid:
            kill(pid)
            gdn.StateRing(memory)
    elif end == "raise":
        with pytest.raises(Boom), spoil():
            raise Boom
    elif end == "abort":
        spoil().abort()
    else:
        spoil()                                 # and nobody holds it
    with pytest.raises(ValueError, match="no path of a tree"):
        ring.accept(0, [0])
    assert ring.save(0) == before
    accept(run, 0, tree_step(run, 0, [-1, 0, 0, 2]), [0, 2, 3])
    run.check(0)
