"""The token log of calls in place: entries in, entries out, folds, checkpoints and trees, against a float64 replay."""

import itertools

import numpy as np
import pytest
from helpers import assert_close, same_bits
from hypothesis import given
from hypothesis import strategies as st
from log_cases import GATES, Case, unit

import gdn

SHAPES = {"128": {"S_k": 128, "S_v": 128}, "64/96": {"S_k": 64, "S_v": 96}, "40": {"S_k": 40, "S_v": 40},
          "96/8": {"S_k": 96, "S_v": 8}, "1": {"S_k": 1, "S_v": 33}}


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("order", ["keys", "values", "apart"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("n", "L"), [(1, 0), (1, 1), (1, 8), (1, 17), (2, 3), (3, 40), (4, 8), (16, 16)])
def test_few_tokens(n, L, shape, order, per_channel):
    if shape == "1" and n > 1:
        n, L = 1, L
    Case(n + L, lengths=(n,), entries=(L,), **SHAPES[shape], order=order, per_channel=per_channel).run()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("n", "L"), [(1, 12), (5, 9), (70, 20)])
def test_gates(n, L, gate, per_channel):
    for beta in (1, 2):
        Case(L, lengths=(n, 1), entries=(L, 3), gate=gate, beta=beta, per_channel=per_channel,
             checkpoints=[(0, n, ), (0, -L // 2), (1, 0)]).run()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("mode", ["auto", "chunked", "recurrent"])
@pytest.mark.parametrize("n", [0, 2, 15, 17, 33, 64, 130])
def test_lengths_and_modes(n, mode, per_channel):
    Case(n, lengths=(n, 3, 0, 1), entries=(10, 0, 4, 40), mode=mode, per_channel=per_channel, snapshots=3,
         checkpoints=[(0, -4), (0, n // 2), (1, 2), (2, 0), (2, -4)]).run()


@pytest.mark.parametrize("order", ["keys", "values", "apart"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_folds_at_every_place(order, per_channel):
    L, T = 9, 3
    Case(1, lengths=(T,), entries=(L,), S_k=64, order=order, per_channel=per_channel,
         checkpoints=[(0, n) for n in range(-L, T + 1)]).run()


@pytest.mark.parametrize("n", [1, 4, 40])
@pytest.mark.parametrize("order", ["keys", "values"])
def test_a_fold_into_the_row_it_starts_from(order, n):
    Case(2, lengths=(n, n), entries=(8, 5), order=order, checkpoints=[(0, -3), (0, -6), (0, n), (1, -5), (1, n)],
         own=[(0, 0), (3, 1)]).run()


@pytest.mark.parametrize("order", ["keys", "values"])
def test_all_reads_before_any_write(order):
    """Folds into rows from which other sequences start."""
    Case(3, lengths=(2, 1, 5), entries=(4, 6, 8), order=order, S_k=64, checkpoints=[(0, -1), (1, -4), (2, 3)],
         own=[(0, 0), (1, 1), (2, 2)], shift=1).run()


@pytest.mark.parametrize("n", [0, 1, 3, 20])
def test_from_zeros(n):
    Case(4, lengths=(n, n), entries=(0, 6), zeros=(0, 1), snapshots=2, checkpoints=[(0, 0), (1, -6), (1, -2)]).run()


@pytest.mark.parametrize("head_map", ["tiled", "interleaved"])
@pytest.mark.parametrize("log_order", ["plain", "apart"])
@pytest.mark.parametrize("n", [1, 6, 40])
def test_maps_and_strides(n, log_order, head_map):
    Case(5, lengths=(n, n), entries=(7, 2), packed=False, H_k=2, H_v=6, head_map=head_map, log_order=log_order, l2norm=True,
         logit=True, checkpoints=[(1, n), (0, -5)]).run()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("order", ["keys", "values", "apart"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n", [1, 2, 9, 40])
def test_trees(n, packed, order, per_channel):
    Case(n, lengths=(n, n), entries=(6, 0), trees=True, packed=packed, order=order, per_channel=per_channel, S_v=48,
         checkpoints=[(0, -2), (1, 0)]).run()


PARENTS = st.integers(0, 20).flatmap(lambda n: st.tuples(*(st.integers(-1, t - 1) for t in range(n))))


@given(trees=st.lists(PARENTS, min_size=1, max_size=3), per_channel=st.booleans(), order=st.sampled_from(["keys", "values"]),
       gate=st.sampled_from(list(GATES)), seed=st.integers(0, 99), data=st.data())
def test_trees_of_any_shape(trees, per_channel, order, gate, seed, data):
    entries = [data.draw(st.integers(0, 20), "entries") for _ in trees]
    folds = [(i, -data.draw(st.integers(0, n), "fold")) for i, n in enumerate(entries)]
    Case(seed, lengths=tuple(map(len, trees)), entries=entries, trees=trees, per_channel=per_channel, order=order, gate=gate,
         checkpoints=folds).run()


def test_a_path_s_entries_equal_a_run_of_the_path():
    rng = np.random.default_rng(6)
    tree = Case(6, lengths=(12,), entries=(5,), trees=True)
    tree.log_out[:] = np.setdiff1d(np.arange(tree.log.n_entries), tree.log_in)[:12]
    out = tree.call()
    for leaf in range(12):
        path = [leaf]
        while tree.parents[path[-1]] >= 0:
            path.append(tree.parents[path[-1]])
        path.reverse()
        chain = gdn.gated_delta_net_inplace(*(x[:, path] for x in tree.arrays()), tree.cache, tree.rows_in, log=tree.log,
                                            log_in=tree.log_in, head_map="tiled")
        assert_close(out[path], chain[0], "the path as a chain", 2e-6)
        new = (unit(rng, 1, 2, 2, 32), unit(rng, 1, 2, 2, 32), rng.standard_normal((1, 2, 4, 32), np.float32),
               np.full((1, 2, 4), -0.1, np.float32), np.full((1, 2, 4), 0.5, np.float32))
        more = np.concatenate([tree.log_in[0, :5], tree.log_out[0, path]])[None]
        after = gdn.gated_delta_net_inplace(*new, tree.cache, tree.rows_in, log=tree.log, log_in=more, head_map="tiled")
        both = [np.concatenate([x[:, path], y], 1) for x, y in zip(tree.arrays(), new, strict=True)]
        plain = gdn.gated_delta_net_inplace(*both, tree.cache, tree.rows_in, log=tree.log, log_in=tree.log_in, head_map="tiled")
        assert_close(after[0], plain[0, -2:], "tokens after an accepted path", 5e-6)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("what", ["q", "k", "v", "g", "beta"])
def test_nan_in_one_branch_reaches_no_other(what, per_channel):
    for bad in range(9):
        clean, spoiled = (Case(7, lengths=(9,), entries=(3,), trees=True, per_channel=per_channel) for _ in range(2))
        getattr(spoiled, what)[bad] = np.nan
        out, dirty = clean.call(), spoiled.call()
        sees = {bad}
        for t in range(bad + 1, 9):
            if clean.parents[t] in sees:
                sees.add(t)
        others = [t for t in range(9) if t not in sees]
        assert same_bits(out[others], dirty[others])
        assert np.isnan(dirty[bad]).any()


@pytest.mark.parametrize("per_channel", [False, True])
def test_checkpoints_equal_split_calls(per_channel):
    """At every position of a prompt of 300."""
    n, H, S = 300, 2, 32
    rng = np.random.default_rng(8)
    q, k, v = unit(rng, 1, n, H, S), unit(rng, 1, n, H, S), rng.standard_normal((1, n, H, S), dtype=np.float32)
    g = rng.uniform(-1, 0, (1, n, H, S) if per_channel else (1, n, H)).astype(np.float32)
    beta = rng.random((1, n, H), dtype=np.float32)
    state = rng.standard_normal((1, H, S, S), dtype=np.float32)
    cache = np.full((n + 2, H, S, S), np.nan, np.float32)
    cache[0] = state[0]
    out = gdn.gated_delta_net_inplace(q, k, v, g, beta, cache, [0], [0], checkpoints=[(0, m, m + 1) for m in range(n + 1)])
    whole, last = gdn.gated_delta_net(q, k, v, g, beta, state)
    assert_close(out, whole, "out", 1e-6)
    assert_close(cache[0], last[0], "the last state", 1e-6)
    assert same_bits(cache[1], state[0])
    for m in range(1, n + 1):
        _, split = gdn.gated_delta_net(*(x[:, :m] for x in (q, k, v, g, beta)), state)
        assert_close(cache[m + 1], split[0], f"the state after {m} tokens", 1e-6)


def test_the_state_of_a_cached_prompt_one_token_before_its_end():
    rng = np.random.default_rng(9)
    n, H, S = 70, 2, 32
    q, k, v = unit(rng, 1, n, H, S), unit(rng, 1, n, H, S), rng.standard_normal((1, n, H, S), dtype=np.float32)
    g, beta = rng.uniform(-1, 0, (1, n, H)).astype(np.float32), rng.random((1, n, H), dtype=np.float32)
    cache = np.zeros((2, H, S, S), np.float32)
    log = gdn.TokenLog.allocate(4, H_k=H, H_v=H, S_k=S, S_v=S)
    out = gdn.gated_delta_net_inplace(q, k, v, g, beta, cache, [-1], [0], log=log, checkpoints=[(0, n - 1, 1)])
    again = gdn.gated_delta_net_inplace(*(x[:, -1:] for x in (q, k, v, g, beta)), cache, [1])
    assert_close(again[0], out[0, -1:], "the last token again", 5e-6)


def test_nothing_given_changes_nothing():
    """A log of which nothing is read or written leaves the answer, and the cache, as they are."""
    case = Case(10, lengths=(1,), entries=(0,), keep=False)
    before = case.memory.copy()
    out = case.call()
    plain, _ = gdn.gated_delta_net(*case.arrays(), case.cache[case.rows_in], head_map="tiled")
    assert_close(out, plain[0], "out", 2e-6)
    assert same_bits(case.memory, before)


@pytest.mark.parametrize(("lengths", "trees"), [((1,), False), ((5,), False), ((40,), False), ((12, 3), True)])
@pytest.mark.parametrize("order", ["keys", "values", "apart"])
def test_threads_change_no_bit(lengths, trees, order):
    results = []
    for n_threads in (1, 2, 3, 7):
        case = Case(11, lengths=lengths, entries=(9,) * len(lengths), H_k=1, H_v=2, S_k=64, S_v=136, order=order, trees=trees,
                    checkpoints=[(0, -3), (0, 0)], n_threads=n_threads)
        results.append((case.call(), case.memory, case.log.d))
    for one, other in itertools.product(results[:1], results[1:]):
        assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400))
def test_any_call(seed):
    rng = np.random.default_rng(seed)
    n_seqs = int(rng.integers(1, 5))
    trees = rng.random() < 0.4
    some = [0, 1, 2, 5, 9, 16, 40] if trees else [0, 1, 1, 2, 4, 9, 16, 17, 33, 300]
    lengths = tuple(int(n) for n in rng.choice(some, n_seqs))
    entries = tuple(int(n) for n in rng.integers(0, 41, n_seqs))
    checkpoints = {(i, int(rng.integers(-entries[i], 1 if trees else lengths[i] + 1))) for i in rng.integers(0, n_seqs, 6)}
    S_k, S_v = int(rng.choice([16, 40, 64, 128])), int(rng.choice([8, 33, 64, 128]))
    Case(seed, lengths=lengths, entries=entries, trees=trees, checkpoints=sorted(checkpoints), H_v=int(rng.choice([2, 4])),
         S_k=S_k, S_v=S_v, per_channel=bool(rng.random() < 0.5), head_map=str(rng.choice(["tiled", "interleaved"])),
         order=str(rng.choice(["keys", "values", "apart"])), gate=str(rng.choice(list(GATES))), beta=float(rng.choice([1, 2])),
         snapshots=0 if trees else int(rng.integers(0, 4)), zeros=[0] if rng.random() < 0.2 else [],
         mode=str(rng.choice(["auto", "chunked", "recurrent"])), log_order=str(rng.choice(["plain", "apart"])),
         l2norm=bool(rng.random() < 0.3)).run()
