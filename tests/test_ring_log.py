"""Rings in log form against a float64 replay of what was kept: accepted drafts, folds, spare rows, forms, processes, memory."""

import os

import numpy as np
import pytest
from ring_tools import EMPTY, EXTENTS, LAYERS, Lengths, Run, fields, fork, read_state, run_layers
from test_ring_processes import child, kill, shared

import gdn

LOG = {"form": "log"}


def log_run(**options):
    return Run(**LOG, **options)


def tree_step(run, seq_id, parents):
    """A committed tree of new tokens, each continuing its parent; returns their keys."""
    keys = []
    for parent in parents:
        keys.append(run.truth.token(([EMPTY, *run.keys[seq_id]])[-1] if parent < 0 else keys[parent]))
    with run.ring.begin(Lengths([seq_id], [len(parents)], [False], [parents])) as step:
        run_layers(run.ring, run.truth, step, [keys])
    return keys


def accept(run, seq_id, keys, path):
    run.ring.accept(seq_id, path)
    run.keys[seq_id] += [keys[t] for t in path]


# ---------------------------------------------------------------- drafts

@pytest.mark.parametrize("way", ["rollback", "accept"])
@pytest.mark.parametrize("before", [0, 3, 16, 40])
@pytest.mark.parametrize("n", range(1, 10))
def test_every_number_of_accepted_drafts(way, before, n):
    """Of 9, more than the convolution's window is deep; then 12 tokens, each output and state as if never drafted."""
    run = log_run(n_rollback=8)
    run.acquire(0)
    if before:
        run.step(s0=before)
    if way == "rollback":
        run.step(s0=9)
        run.rollback(0, 9 - n)
    else:
        keys = tree_step(run, 0, list(range(-1, 8)))
        assert run.ring.position(0) == before
        accept(run, 0, keys, list(range(n)))
    run.check(0)
    for more in range(1, 13):
        run.step(s0=1)
        run.check(0)
        assert run.ring.max_rollback(0) >= min(8, n - 1 + more)      # a step of 9 leaves 8, of which 9 - n are taken back


def test_sequences_accept_different_counts():
    run = log_run(n_rollback=8)
    run.acquire(0, 1, 2)
    run.step(s0=20, s1=3, s2=1)
    for kept in ((0, 4, 9), (9, 1, 5), (3, 8, 2)):
        run.step(s0=9, s1=9, s2=9)
        for seq_id, n in enumerate(kept):
            run.rollback(seq_id, min(9 - n, 8))
            run.check(seq_id)


def test_branches_and_what_is_taken_back():
    run = log_run(n_rollback=8)
    run.acquire(0)
    run.step(s0=15)
    keys = tree_step(run, 0, [-1, -1, 0, 1, 1, 3])
    for wrong in ([0, 1], [2], [1, 3, 4], [6], [-1], [0, 0], [3, 1]):
        with pytest.raises(ValueError, match="no path of a tree"):
            run.ring.accept(0, wrong)
    accept(run, 0, keys, [1, 3, 5])
    run.check(0)
    keys = tree_step(run, 0, [-1, 0, 0])
    accept(run, 0, keys, [])
    run.check(0)
    with pytest.raises(ValueError, match="no path of a tree"):
        run.ring.accept(0, [])
    for reset in (run.ring.reset, run.ring.release):
        tree_step(run, 0, [-1, 0])
        reset(0)
        run.keys[0] = []
    assert run.ring.n_free == 3


def test_trees_that_are_refused():
    run = log_run(n_rollback=3)
    run.acquire(0)
    with pytest.raises(ValueError, match="at most n_rollback . 1 = 4 tokens"):
        run.ring.begin(gdn.Batch([0] * 5, parents=[-1, 0, 1, 2, 3]))
    with pytest.raises(ValueError, match="forks: 1 tokens of sequence 0 are not in the step, .* in a tree"):
        run.ring.begin(gdn.Batch([0, 0], parents=[-1, 0]), forks=[(0, 1, 5)])
    for parents, message in (([-1, 1], "entry 1 of sequence 0 continues 1"), ([0, -1], "entry 0"), ([-1, -2], "entry 1"),
                             ([-1], "1 entries, seq_ids 2")):
        with pytest.raises(ValueError, match=message):
            gdn.Batch([0, 0], parents=parents)
    with pytest.raises(ValueError, match="entry 1 of sequence 5 continues 0"):
        gdn.Batch([0, 5], parents=[-1, 0])
    batch = gdn.Batch([5, 0, -1, 5, 0, 5], [8, 0, 0, 9, 1, 9], parents=[-1, -1, 7, 0, 1, 0])
    assert batch.parents.tolist() == [-1, 0, 0, -1, 0] and batch.first_positions.tolist() == [8, 0]
    with pytest.raises(ValueError, match="position 10 of sequence 5.*expected 9"):
        gdn.Batch([5, 5, 5], [8, 9, 10], parents=[-1, 0, 0])


# ---------------------------------------------------------------- folding

@pytest.mark.parametrize("n_rollback", [0, 2, 8])
def test_4096_tokens_of_random_steps(n_rollback):
    run, rng = log_run(n_slots=1, n_rollback=n_rollback, n_spare=1), np.random.default_rng(n_rollback)
    run.acquire(0)
    folds = 0
    while len(run.keys[0]) < 4096:
        n = int(rng.choice([1, 1, 2, 3, 9, 64, 200]))
        step = run.step(s0=n)
        folds += step.checkpoints is not None
        run.rollback(0, int(rng.integers(min(n, n_rollback) + 1)))
    run.check(0)
    assert folds > 20


def test_a_log_is_folded_when_it_is_full():
    """16 tokens write no state; the 17th folds all but 8; 40 more fold those before the last 8."""
    run = log_run(n_rollback=8)
    run.acquire(0)
    for n in range(16):
        step = run.step(s0=1)
        assert step.checkpoints is None and step.rows_in.tolist() == [-1] and (step.log_in >= 0).sum() == n
    assert run.step(s0=1).checkpoints.tolist() == [[0, -7, 0]]          # of zeros: into its own row
    step = run.step(s0=40)
    assert step.rows_in.tolist() == [0] and step.checkpoints.tolist() == [[0, 32, 5]]
    assert step.log_out[0, :32].tolist() == [-1] * 32 and (step.log_out[0, 32:] >= 0).all()
    run.check(0)
    run.rollback(0, 8)
    run.check(0)
    assert (run.step(s0=1).log_in >= 0).sum() == 0


def test_sixteen_slots_in_lockstep():
    """Two spare rows: some fold before they are full, so that no step needs more."""
    run = log_run(n_slots=16, n_rollback=8, n_spare=2)
    run.acquire(*range(16))
    folded = []
    for _ in range(60):
        step = run.step(**{f"s{i}": 1 for i in range(16)})
        folded.append(0 if step.checkpoints is None else len(step.checkpoints))
    assert folded[16] == 16 and max(folded[17:]) == 2          # the first is of zeros, into rows of their own
    for seq_id in range(16):
        run.check(seq_id)
    with pytest.raises(ValueError, match="n_spare = 2"):
        run.ring.begin(range(16), [17] * 16)
    step = run.ring.begin([0, 1], [17, 17])
    with pytest.raises(gdn.RingBusyError, match="other steps hold: n_spare = 2"):
        run.ring.begin([2], [17])
    step.abort()
    run.ring.begin([2], [17]).abort()


def test_restarts_write_nothing_until_they_fold(n_rollback=4):
    run = log_run(n_rollback=n_rollback)
    run.acquire(0)
    run.step(s0=30)
    for n in (0, 1, 5, 16, 17, 50):
        key = []
        for _ in range(n):
            key.append(run.truth.token(([EMPTY] + key)[-1]))
        for end in ("abort", "commit"):
            step = run.ring.begin(Lengths([0], [n], [True]))
            assert step.rows_in.tolist() == [-1] and (step.log_in < 0).all()
            run_layers(run.ring, run.truth, step, [key])
            getattr(step, end)()
            if end == "abort":
                run.check(0)
        run.keys[0] = key
        run.check(0)
        assert run.ring.max_rollback(0) == min(n, n_rollback)


# ---------------------------------------------------------------- save, load, fork

def test_between_the_forms():
    """With its log into a ring of that form, bit by bit as it was; without depth into any."""
    run, other, planes = log_run(n_rollback=4), log_run(n_rollback=5, n_spare=1), Run(n_rollback=2)
    run.acquire(0)
    for n in (5, 13, 3):
        run.step(s0=n)
        other.truth = planes.truth = run.truth
        other.ring.load(9, run.ring.save(0))
        other.keys[9] = run.keys[0][:]
        other.check(9)
        assert other.ring.max_rollback(9) >= run.ring.max_rollback(0)
        assert other.ring.save(9, depth=False) == run.ring.save(0, depth=False)
        with pytest.raises(ValueError, match="save it with depth=False|by 4 tokens, the ring keeps 2"):
            planes.ring.load(9, run.ring.save(0))
        planes.ring.load(9, run.ring.save(0, depth=False))
        planes.keys[9] = run.keys[0][:]
        with planes.ring.begin([9], [0]) as step:
            ssm, conv = planes.ring.ssm(0).numpy()[step.rows_in[0]], planes.ring.conv(0).numpy()[step.rows_in[0], 0]
        truth = read_state(run.ring, 0)
        assert np.abs(ssm - truth[0][0]).max() < 1e-6 and (conv == truth[1][0]).all()
        planes.step(s9=3)
        with pytest.raises(ValueError, match="depth=False"):
            run.ring.load(7, planes.ring.save(9))
        run.ring.load(7, planes.ring.save(9, depth=False))
        run.keys[7] = planes.keys[9][:]
        run.check(7)
        run.step(s7=2)
        for ring, seq_id in ((run.ring, 7), (other.ring, 9), (planes.ring, 9)):
            ring.release(seq_id)


@pytest.mark.parametrize("head_map", [None, "tiled", "interleaved"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_folding_knows_its_head_map(head_map, per_channel):
    rng = np.random.default_rng(4)
    extents = dict(n_layers=1, H_k=2, H_v=4, S_k=70, S_v=3)
    ring = gdn.StateRing.create(2, 4, per_channel=per_channel, head_map=head_map, **LOG, **extents)
    ring.acquire(0)
    q, k, v = (rng.standard_normal((1, 6, h, s), np.float32) for h, s in ((2, 70), (2, 70), (4, 3)))
    g = -rng.random((1, 6, 4, 70) if per_channel else (1, 6, 4), np.float32)
    with ring.begin([0], [6]) as step:
        gdn.gated_delta_net_inplace(q, k, v, g, rng.random((1, 6, 4), np.float32), step.ssm(0), step.rows_in, log=ring.log(0),
                                    log_in=step.log_in, log_out=step.log_out, head_map=head_map or "tiled", qk_l2norm=True)
    if head_map is None:
        for fold in (lambda: ring.save(0, depth=False), lambda: ring.copy(0, 1, depth=False)):
            with pytest.raises(ValueError, match="H_k = 2 with H_v = 4 needs a head_map"):
                fold()
        assert ring.seq_ids == [0]
        return
    ring.copy(0, 1, depth=False)
    log, entries = ring.log(0), step.log_out[0]
    truth = gdn.reference.replay(np.zeros((4, 3, 70)), log.k[entries], log.d[entries], log.g[entries], head_map=head_map)[-1]
    assert np.abs(ring.ssm(0).numpy()[ring.begin([1], [0]).rows_in[0]] - truth).max() < 1e-6 * np.abs(truth).max()


@pytest.mark.parametrize("form", ["planes", "log"])
def test_forks_are_sequences_of_their_own(form):
    run = Run(n_slots=6, form=form)
    run.acquire(0)
    run.step(s0=7)
    keys = run.keys[0][:]
    mine = []
    for _ in range(20):
        mine.append(run.truth.token((keys + mine)[-1]))
    forks = [(0, 0, 10), (0, 13, 11), (0, 20, 12)]
    step = run.ring.begin([0], [20], forks=forks)
    assert run.ring.seq_ids == [0] and run.ring.n_free == 2
    with pytest.raises(gdn.RingBusyError, match="being copied, saved or filled"):
        run.ring.position(11)
    run_layers(run.ring, run.truth, step, [mine])
    step.abort()
    assert run.ring.seq_ids == [0] and run.ring.n_free == 5
    with run.ring.begin([0], [20], forks=forks) as step:
        run_layers(run.ring, run.truth, step, [mine])
    run.keys[0] += mine
    for _, n, new_id in forks:
        run.keys[new_id] = keys + mine[:n]
        run.check(new_id)
        assert run.ring.max_rollback(new_id) == 0
        run.step(**{f"s{new_id}": 3})
        run.check(new_id)
    run.check(0)
    for bad, error, message in (([(0, 2, 5)], ValueError, "forks: 2 tokens of sequence 0 are not in the step, which has 1"),
                                ([(9, 0, 5)], ValueError, "forks: sequence 9 is not in the step"),
                                ([(0, 0, 0)], gdn.RingBusyError, "sequence 0 is already acquired"),
                                ([(0, 0, 5), (0, 1, 5)], gdn.RingBusyError, "sequence 5 is already acquired"),
                                ([(0, 0, -1)], ValueError, "-1 is reserved"), ([(0, 1)], ValueError, "forks must be"),
                                ([(0, 0, 5), (0, 0, 6), (0, 0, 7)], gdn.RingFullError, "no slot for sequence 7")):
        before = run.ring.seq_ids
        with pytest.raises(error, match=message):
            run.ring.begin([0], [1], forks=bad)
        assert run.ring.seq_ids == before and run.ring.n_free == 2


# ---------------------------------------------------------------- processes

@pytest.mark.parametrize("n", [1, 9, 30], ids=["plain", "folded", "long"])
def test_killed_between_begin_and_commit(n):
    memory, ring = shared(3, 8, **LOG)
    run = Run()
    run.ring, run.keys = ring, {}
    run.acquire(0, 1)
    run.step(s0=12, s1=20)
    spare = fields(memory)[1]["row"].tolist()

    def work():
        step = ring.begin([0, 1], [n, n], forks=[(0, n, 5)])
        for layer in range(LAYERS):
            rows = step.checkpoints[:, 2]
            ring.ssm(layer).numpy()[rows], ring.conv(layer).numpy()[rows] = np.nan, np.nan
            for part in ("k", "d", "g", "x"):
                getattr(ring.log(layer), part)[step.log_out[step.log_out >= 0]] = np.nan
        return step

    for attach in (False, True):
        with child(work) as pid:
            kill(pid)
            if attach:
                gdn.StateRing(memory)
            for seq_id in (0, 1):
                run.check(seq_id)
        assert ring.n_free == 1 and fields(memory)[1]["row"].tolist() == spare
    for _ in range(9):                          # every row is there to be had
        run.step(s0=9, s1=9)
    run.check(0)


def test_killed_between_a_tree_and_its_accept():
    """Committed is committed: another process accepts."""
    memory, ring = shared(2, 8, **LOG)
    run = Run()
    run.ring, run.keys = ring, {}
    run.acquire(0)
    run.step(s0=14)
    told, tell = os.pipe()

    def work():
        keys = tree_step(run, 0, [-1, 0, 0, 2])
        os.write(tell, np.array(keys).tobytes())

    with child(work) as pid:
        kill(pid)
        keys = np.frombuffer(os.read(told, 32), np.int64).tolist()
    assert ring.position(0) == 14
    for use in (lambda: ring.begin([0], [1]), lambda: ring.copy(0, 1), lambda: ring.save(0), lambda: ring.rollback(0, 0)):
        with pytest.raises(ValueError, match="waits for accept"):
            use()
    again = []                                  # this process's generator has not moved: the same tokens
    for parent in (-1, 0, 0, 2):
        again.append(run.truth.token(run.keys[0][-1] if parent < 0 else again[parent]))
    assert again == keys
    gdn.StateRing(memory).accept(0, [0, 2, 3])
    run.keys[0] += [again[t] for t in (0, 2, 3)]
    run.check(0)


def test_eight_processes():
    memory, ring = shared(16, 3, n_spare=3, **LOG)
    pids = []
    for worker in range(8):
        pid = fork()
        if pid == 0:
            code = 1
            try:
                run = Run()
                run.ring, run.keys = gdn.StateRing(memory), {}
                run.acquire(worker)
                rng = np.random.default_rng(worker)
                for _ in range(60):
                    n = int(rng.integers(1, 9))
                    for _ in range(10**6):
                        try:
                            run.step(**{f"s{worker}": n})
                            break
                        except gdn.RingBusyError as error:
                            assert "n_spare" in str(error)
                            os.sched_yield()
                    run.rollback(worker, int(rng.integers(min(n, 3) + 1)))
                    if rng.random() < 0.3:
                        run.ring.copy(worker, 100 + worker)
                        run.keys[100 + worker] = run.keys[worker][:]
                        run.check(100 + worker)
                        run.ring.release(100 + worker)
                run.check(worker)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 8
    assert sorted(ring.seq_ids) == list(range(8))


# ---------------------------------------------------------------- memory, arguments

def test_memory_of_a_slot(capsys):
    """In states, at the extents of Qwen3-Next with 8 tokens of rollback: 1.8 with two spare rows, 2.7 with the default."""
    extents = dict(n_layers=4, H_v=32, S_k=128, S_v=128, conv_channels=8192, conv_width=4, H_k=16)
    state = 4 * (32 * 128 * 128 + 3 * 8192) * 4

    def states(**options):
        return gdn.StateRing.nbytes_for(16, 8, **extents, **options) / 16 / state

    figures = {(n_spare, per_channel): states(n_spare=n_spare, per_channel=per_channel, **LOG)
               for n_spare in (2, None) for per_channel in (False, True)}
    with capsys.disabled():
        print(f"\nstates a slot: {figures[2, False]:.2f} with n_spare=2, {figures[None, False]:.2f} by default, "
              f"KDA {figures[2, True]:.2f} and {figures[None, True]:.2f}; planes {states():.2f}")
    assert figures[2, False] <= 1.8 and figures[None, False] <= 2.7 and states() > 9.9


def test_options_are_checked():
    for options, error, message in (
            ({"form": "other"}, ValueError, "form must be"),
            ({"form": "log", "spare": 1}, ValueError, "spare is of the other form"),
            ({"n_spare": 1}, ValueError, "n_spare is of the other form"), ({"log_capacity": 9}, ValueError, "log_capacity is of"),
            ({"form": "log", "n_spare": 4}, ValueError, "n_spare must be 1 to n_slots = 3"),
            ({"form": "log", "n_spare": 0}, ValueError, "n_spare must be 1"),
            ({"form": "log", "log_capacity": 2}, ValueError, "log_capacity must be above n_rollback = 2"),
            ({"form": "log", "H_k": None}, ValueError, "needs H_k"),
            ({"form": "log", "H_k": 3}, ValueError, "no multiple of H_k"),
            ({"form": "log", "per_channel": 1}, TypeError, "per_channel"), ({"head_map": "other"}, ValueError, "head_map"),
            ({"dtype": "f64"}, TypeError, "dtype")):
        with pytest.raises(error, match=message):
            gdn.StateRing.create(3, 2, **{**EXTENTS, **options})
    ring = gdn.StateRing.create(3, 2, form="log", log_capacity=5, n_spare=1, head_map="tiled", **EXTENTS)
    assert (ring.form, ring.log_capacity, ring.n_spare, ring.H_k, ring.head_map) == ("log", 5, 1, 1, "tiled")
    assert gdn.StateRing.create(3, **ring.extents, n_layers=1).extents == ring.extents
    with pytest.raises(ValueError, match="has no log"):
        gdn.StateRing.create(1, **EXTENTS).log(0)
    with pytest.raises(IndexError, match="layer 2"):
        ring.log(2)
