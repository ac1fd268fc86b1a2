"""Where gated delta rules lose digits or make NaN: strong, slow and mixed decays, equal keys, subnormals, poison."""

import time

import numpy as np
import pytest
from helpers import MODES, assert_close, case, run, same_bits, sequence, truth

BOTH = pytest.mark.parametrize("mode", ["recurrent", "chunked"])
GATE = pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channel"])


def check(c, mode, bound=1e-5):
    expected, final, _ = truth(c)
    out, state = run(c, mode=mode)
    assert_close(out, expected, "out", bound)
    assert_close(state, final, "state", bound)
    return out, state


@BOTH
@GATE
@pytest.mark.parametrize("g", [0, -1e-4, -3e-4, -0.5, -1, -3, -5, -20, -87, -88, -89, -100, -104, -745, -2661, -1e8])
def test_one_decay_throughout(rng, mode, per_channel, g):
    """Nothing is anchored so that exp overflows, no inf meets a 0."""
    for n_tokens in (1, 64, 128, 130):
        c = case(rng, 1, n_tokens, 1, 1, 32, 16, per_channel=per_channel)
        c["g"][...] = g
        check(c, mode)


@BOTH
@GATE
@pytest.mark.parametrize("pair", [(-1e-3, -2661), (0, -3), (-0.1, -1e4), (-0.1, -1e8), (-1e-3, -np.inf), (-0.01, -89)])
def test_two_decays_mixed(rng, mode, per_channel, pair):
    for n_tokens in (64, 130, 200):
        c = case(rng, 1, n_tokens, 1, 2, 32, 16, per_channel=per_channel)
        c["g"][...] = rng.choice(np.float32(pair), c["g"].shape)
        expected = truth(c, "tiled")
        out, state = run(c, mode=mode, head_map="tiled")
        assert_close(out, expected[0], "out")
        assert_close(state, expected[1], "state")
        c["g"][...] = pair[0]
        c["g"][:, 1::2] = pair[1]
        expected = truth(c, "tiled")
        out, state = run(c, mode=mode, head_map="tiled")
        assert_close(out, expected[0], "out, alternating")
        assert_close(state, expected[1], "state, alternating")


@BOTH
@GATE
@pytest.mark.parametrize("huge", [-1e4, -1e8, -np.inf, -3e38])
def test_one_huge_decay_leaves_the_small_ones_alone(rng, mode, per_channel, huge):
    for at in (0, 1, 15, 16, 31, 32, 63, 64, 99):
        c = case(rng, 1, 100, 1, 1, 16, 16, "-1e-3", per_channel)
        c["g"][...] = -0.1 if at % 2 else -1e-3
        c["g"][0, at] = huge
        check(c, mode)


@BOTH
def test_minus_infinity_forgets(rng, mode):
    """The state before the token leaves no trace: the same bits from any other start."""
    c = case(rng, 1, 40, 1, 1, 16, 16, "-1e-3")
    c["g"][0, 20] = -np.inf
    out, state = check(c, mode)
    other = {**c, "state": c["state"][..., ::-1] * 3}
    out_2, state_2 = run(other, mode=mode)
    assert same_bits(out[:, 20:], out_2[:, 20:]) and same_bits(state, state_2)
    assert not same_bits(out[:, :20], out_2[:, :20])


@BOTH
def test_minus_infinity_in_one_channel(rng, mode):
    c = case(rng, 1, 40, 1, 1, 16, 16, "-1e-3", per_channel=True)
    c["g"][0, 20, 0, 5] = -np.inf
    check(c, mode)
    c["k"][..., 5] = 0
    out, state = run(c, mode=mode)
    assert (state[..., 5] == 0).all() and (state[..., :5] != 0).any()


@BOTH
@GATE
def test_positive_gates_are_computed_as_they_stand(rng, mode, per_channel):
    c = case(rng, 1, 40, 1, 1, 16, 16, "-1e-3", per_channel)
    c["g"][...] = rng.uniform(-0.2, 0.1, c["g"].shape)
    c["g"][0, 7] = 2.5
    check(c, mode)


@BOTH
@GATE
def test_zero_keys_and_strong_decay(rng, mode, per_channel):
    c = case(rng, 1, 64, 1, 1, 16, 16, "-5", per_channel)
    c["g"][...] = -20
    c["k"][:, ::3] = 0
    check(c, mode)


@BOTH
@GATE
@pytest.mark.parametrize("n_tokens", [17, 19, 31, 33, 35, 63, 65, 67, 127])
def test_the_last_decay_is_the_last_tokens(rng, mode, per_channel, n_tokens):
    c = case(rng, 1, n_tokens, 1, 1, 16, 16, per_channel=per_channel)
    c["g"][...] = -0.5
    c["g"][0, -1] = -0.05
    check(c, mode)


@BOTH
@GATE
@pytest.mark.parametrize("beta", [0, 0.5, 1, 2])
@pytest.mark.parametrize("n_tokens", [64, 256])
def test_equal_keys(rng, mode, per_channel, beta, n_tokens):
    c = case(rng, 1, n_tokens, 1, 1, 64, 32, "zero", per_channel)
    c["k"][...] = c["k"][:, :1]
    c["beta"][...] = beta
    check(c, mode, 3e-4 if beta == 2 and mode == "chunked" else 1e-5)


@BOTH
def test_beta_up_to_two(rng, mode):
    c = case(rng, 2, 130, 1, 1, 24, 48, "-1e-3")
    c["beta"] *= 2
    check(c, mode)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("beta", [1, 2])
def test_one_key_channel_is_not_chunked(positive, beta):
    """All keys are one direction: the sums of a chunk would cancel to the one number that a state is, and miss the bound."""
    for seed in range(50):
        c = case(np.random.default_rng(seed), 1, 17, 1, 1, 1, 1, "-3e-4")
        if positive:
            c["q"][...] = c["k"][...] = 1
        c["beta"] *= beta
        assert all(map(same_bits, check(c, "chunked"), run(c, mode="recurrent")))


@GATE
@pytest.mark.parametrize("g", [-3e-4, -1e-4, -1e-3])
def test_slow_decay_does_not_drift_in_chunks(rng, per_channel, g):
    c = case(rng, 1, 4096, 1, 1, 16, 16, per_channel=per_channel)
    c["g"][...] = g
    c["beta"][...] = 0.02
    check(c, "chunked")


@BOTH
@GATE
def test_a_decay_alone_keeps_its_digits(rng, mode, per_channel):
    """Without keys a state is its start times exp(sum of g): rounded to one float, a factor applied thousands of times
    would be off a thousand times the same way."""
    n = 32768
    c = case(rng, 1, n, 1, 1, 16, 16, per_channel=per_channel)
    c["k"][...] = 0
    for g in (-3e-4, -2.7e-4, -1.1e-4):
        c["g"][...] = g
        _, state = run(c, mode=mode)
        assert_close(state, c["state"] * np.exp(n * np.float64(np.float32(g))), "state")


@GATE
def test_slow_decay_does_not_drift_token_by_token(rng, per_channel):
    c = case(rng, 1, 2000, 1, 1, 32, 32, per_channel=per_channel)
    c["g"][...] = -1e-3
    c["beta"][...] = 0.02
    expected, final, _ = truth(c)
    state = c["state"].copy()
    out = np.empty_like(c["v"])
    for t in range(2000):
        part = {**sequence(c, t, t + 1), "state": state}
        run(part, out=out[:, t:t + 1], state_out=state)
    assert_close(out, expected, "out")
    assert_close(state, final, "state")


@pytest.mark.parametrize("splits", [(65, 65), (1, 129), (129, 1), (2, 31, 97), (40, 0, 90)])
@GATE
def test_split_calls_equal_one(rng, per_channel, splits):
    c = case(rng, 2, 130, 1, 2, 32, 20, "mix", per_channel)
    expected, final, _ = truth(c, "tiled")
    for mode in MODES:
        state, start, outs = c["state"], 0, []
        for n in splits:
            out, state = run({**sequence(c, start, start + n), "state": state}, mode=mode, head_map="tiled")
            outs.append(out)
            start += n
        assert_close(np.concatenate(outs, 1), expected, f"{mode} out")
        assert_close(state, final, f"{mode} state")


@BOTH
def test_channel_decay_acts_on_the_key_axis(rng, mode):
    c = case(rng, 1, 40, 2, 2, 16, 16, per_channel=True)
    c["g"] = -np.exp(rng.uniform(-6, 2, c["g"].shape)).astype(np.float32)
    check(c, mode)
    c["k"][...] = 0
    one = {**sequence(c, 0, 1)}
    _, state = run(one, mode=mode)
    wanted = one["state"] * np.exp(one["g"][0, 0].astype(np.float64))[:, None, :]
    assert_close(state[0], wanted[0], "decayed state")


# ---- flags -----------------------------------------------------------------------------------------------------

@BOTH
@pytest.mark.parametrize("form, eps", [("sum", 1e-6), ("sum", 1e-2), ("max", 1e-6), ("max", 0.5)])
@pytest.mark.parametrize("size", [1, 20, 64])
def test_normalisation_inside(rng, mode, form, eps, size):
    c = case(rng, 2, 35, 2, 2, size, 16)
    c["q"] *= np.float32(10.0) ** rng.integers(-4, 4, c["q"].shape[:3])[..., None].astype(np.float32)
    c["k"] *= np.float32(10.0) ** rng.integers(-4, 1, c["k"].shape[:3])[..., None].astype(np.float32)
    c["q"][0, 3] = c["k"][0, 4] = 0
    options = {"qk_l2norm": True, "l2_eps": eps, "l2_form": form}
    expected, final, _ = truth(c, **options)
    out, state = run(c, mode=mode, **options)
    assert_close(out, expected, "out")
    assert_close(state, final, "state")


@BOTH
def test_beta_logits(rng, mode):
    c = case(rng, 2, 35, 2, 2, 16, 16)
    c["beta"] = rng.uniform(-20, 20, c["beta"].shape).astype(np.float32)
    c["beta"][0, :6, 0] = [-1e4, -89, -104, 0, 89, 1e4]
    expected, final, _ = truth(c, beta_logit=True)
    out, state = run(c, mode=mode, beta_logit=True)
    assert_close(out, expected, "out")
    assert_close(state, final, "state")


@BOTH
@pytest.mark.parametrize("scale", [1, 0, -2.5, 1e-3])
def test_scale(rng, mode, scale):
    c = case(rng, 2, 35, 2, 2, 16, 16)
    expected, final, _ = truth(c, scale=scale)
    out, state = run(c, mode=mode, scale=scale)
    assert_close(out, expected, "out")
    assert_close(state, final, "state")


# ---- poison ----------------------------------------------------------------------------------------------------

POISONS = pytest.mark.parametrize("poison", [np.nan, np.inf])


@pytest.mark.parametrize("mode", MODES)
@GATE
@POISONS
@pytest.mark.parametrize("at", [0, 13, 20, 33])
def test_a_poisoned_value_stays_in_its_column_and_future(rng, mode, per_channel, poison, at):
    c = case(rng, 2, 50, 2, 4, 20, 33, "-1e-3", per_channel)
    clean_out, clean_state = run(c, mode=mode, head_map="tiled")
    v = c["v"].copy()
    v[1, at, 2, 7] = poison
    out, state = run({**c, "v": v}, mode=mode, head_map="tiled")
    hit = np.zeros(out.shape, bool)
    hit[1, at:, 2, 7] = True
    assert same_bits(out[~hit], clean_out[~hit])
    assert not np.isfinite(out[1, at, 2, 7])
    hit = np.zeros(state.shape, bool)
    hit[1, 2, 7] = True
    assert same_bits(state[~hit], clean_state[~hit])
    assert not np.isfinite(state[1, 2, 7]).any()


@pytest.mark.parametrize("mode", MODES)
@GATE
@POISONS
@pytest.mark.parametrize("name", ["q", "k", "g", "beta"])
def test_other_poison_stays_in_its_heads_and_future(rng, mode, per_channel, poison, name):
    """A key head is read by two value heads; a query spoils one token, everything else all that follow."""
    c = case(rng, 2, 50, 2, 4, 20, 33, "-1e-3", per_channel)
    clean_out, clean_state = run(c, mode=mode, head_map="tiled")
    bad = c[name].copy()
    bad[(1, 20, 1) if bad.ndim == 3 else (1, 20, 1, 3)] = poison
    out, state = run({**c, name: bad}, mode=mode, head_map="tiled")
    heads = [1, 3] if name in ("q", "k") else [1]
    hit = np.zeros(out.shape, bool)
    hit[1, 20:21 if name == "q" else 50, heads[0]] = hit[1, 20:21 if name == "q" else 50, heads[-1]] = True
    assert same_bits(out[~hit], clean_out[~hit]), "clean outputs changed"
    assert not np.isfinite(out[1, 20, 1]).all()
    hit = np.zeros(state.shape, bool)
    if name != "q":
        hit[1, heads] = True
    assert same_bits(state[~hit], clean_state[~hit]), "clean states changed"


@pytest.mark.parametrize("mode", MODES)
@POISONS
def test_poisoned_state_stays_in_its_sequence_and_head(rng, mode, poison):
    c = case(rng, 2, 40, 2, 2, 20, 33, "-1e-3")
    clean_out, clean_state = run(c, mode=mode)
    bad = c["state"].copy()
    bad[0, 1, 3, 4] = poison
    out, state = run({**c, "state": bad}, mode=mode)
    assert same_bits(out[1], clean_out[1]) and same_bits(out[0, :, 0], clean_out[0, :, 0])
    assert same_bits(np.delete(out[0, :, 1], 3, -1), np.delete(clean_out[0, :, 1], 3, -1))
    assert same_bits(state[1], clean_state[1]) and same_bits(state[0, 0], clean_state[0, 0])


@pytest.mark.parametrize("n_tokens", [33, 40, 47])
@pytest.mark.parametrize("mode", MODES)
@GATE
def test_packed_neighbours_do_not_touch(rng, mode, per_channel, n_tokens):
    """Tokens of the next packed sequence lie behind a tail: whatever they hold, they are not read into results."""
    c = case(rng, 1, 2 * n_tokens, 1, 1, 16, 16, "-1e-3", per_channel, state=False)
    cu = [0, n_tokens, 2 * n_tokens]
    clean_out, clean_state = run(c, mode=mode, cu_seqlens=cu)
    for name in ("q", "k", "v", "g", "beta"):
        bad = {n: c[n].copy() for n in ("q", "k", "v", "g", "beta")}
        bad[name][:, n_tokens:] = np.nan
        out, state = run(bad, mode=mode, cu_seqlens=cu)
        assert same_bits(out[:, :n_tokens], clean_out[:, :n_tokens]) and same_bits(state[0], clean_state[0])


# ---- subnormals ------------------------------------------------------------------------------------------------

def fastest(c, mode, n=5):
    state, out = np.empty_like(c["state"]), np.empty_like(c["v"])
    best = np.inf
    for _ in range(n):
        start = time.perf_counter()
        run(c, mode=mode, out=out, state_out=state, n_threads=1)
        best = min(best, time.perf_counter() - start)
    return best


@BOTH
@GATE
@pytest.mark.parametrize("g", [-1, -88])
def test_subnormals_are_not_slow(rng, mode, per_channel, g):
    """A fading state passes through the subnormals; without flushing such tokens cost 30 times as much."""
    c = case(rng, 1, 500, 1, 1, 64, 64, per_channel=per_channel)
    c["k"][...] = 0
    c["state"][...] = 1
    normal = {**c, "g": np.full_like(c["g"], -1e-3)}
    c["g"][...] = g
    for _ in range(3):                            # a busy machine may slow one measurement, not three
        ratio = fastest(c, mode) / fastest(normal, mode)
        if ratio < 3:
            return
    pytest.fail(f"{ratio:.1f} times as slow as a state that does not fade")


@pytest.mark.parametrize("mode", MODES)
def test_subnormal_inputs_keep_the_bound(rng, mode):
    c = case(rng, 1, 40, 1, 1, 16, 16, "-5")
    c["v"][:, ::2] *= np.float32(1e-39)
    c["state"][...] = np.float32(1e-40)
    check(c, mode)
