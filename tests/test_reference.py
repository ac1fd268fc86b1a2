"""The truth itself: the recurrence against plain Python loops, the chunked form against the recurrence, both against
recorded layers of the model families."""

import math

import numpy as np
import pytest
from helpers import DATA, GATES, case, error, head_map

from gdn import reference


def loops(q, k, v, g, beta, state, tiled, scale=None):
    """One sequence, one value head at a time, in Python floats: shares no line with gdn.reference."""
    n_seqs, n_tokens, H_v, S_v = v.shape
    H_k, S_k = q.shape[2:]
    out, final = np.zeros(v.shape), np.zeros((n_seqs, H_v, S_v, S_k))
    for n in range(n_seqs):
        for h in range(H_v):
            kh = h % H_k if tiled else h * H_k // H_v
            S = [[0.0 if state is None else float(state[n, h, j, i]) for j in range(S_v)] for i in range(S_k)]
            for t in range(n_tokens):
                for i in range(S_k):
                    decay = math.exp(g[n, t, h, i] if g.ndim == 4 else g[n, t, h])
                    S[i] = [decay * x for x in S[i]]
                for j in range(S_v):
                    known = sum(S[i][j] * float(k[n, t, kh, i]) for i in range(S_k))
                    d = float(beta[n, t, h]) * (float(v[n, t, h, j]) - known)
                    for i in range(S_k):
                        S[i][j] += float(k[n, t, kh, i]) * d
                for j in range(S_v):
                    dot = sum(S[i][j] * float(q[n, t, kh, i]) for i in range(S_k))
                    out[n, t, h, j] = dot * (S_k**-0.5 if scale is None else scale)
            final[n, h] = np.array(S).T
    return out, final


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("gates", ["zero", "mix", "one -inf"])
def test_recurrence_is_the_four_lines(rng, per_channel, tiled, gates):
    c = case(rng, 2, 7, 2, 6, 5, 3, gates, per_channel)
    name = "tiled" if tiled else "interleaved"
    for scale in (None, 0.3):
        out, state = reference.recurrent(**c, head_map=name, scale=scale)
        expected = loops(**c, tiled=tiled, scale=scale)
        assert error(out, expected[0]) < 1e-13
        assert error(state, expected[1]) < 1e-13


def test_no_state_is_a_state_of_zeros(rng):
    c = case(rng, 2, 5, S_k=3, S_v=4, state=False)
    out, state = reference.recurrent(**c)
    expected = loops(**c, tiled=True)
    assert error(out, expected[0]) < 1e-13
    assert error(state, expected[1]) < 1e-13


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("gates", GATES)
def test_chunked_equals_recurrence(rng, per_channel, gates):
    c = case(rng, 2, 37, 1, 2, 8, 5, gates, per_channel)
    expected = reference.recurrent(**c, head_map="tiled")
    for chunk in (1, 5, 16, 64):
        out, state = reference.chunked(**c, head_map="tiled", chunk=chunk)
        assert error(out, expected[0]) < 1e-12, chunk
        assert error(state, expected[1]) < 1e-12, chunk


def test_options(rng):
    c = case(rng, 1, 9, 1, 1, 6, 6)
    c["q"] *= 3
    c["k"] *= 0.01
    c["beta"] = rng.standard_normal(c["beta"].shape).astype(np.float32)
    for form, eps in (("sum", 1e-6), ("max", 1e-6), ("max", 0.2)):
        squares = [np.sqrt((c[x].astype(np.float64) ** 2).sum(-1, keepdims=True)) for x in "qk"]
        norms = [np.sqrt(n * n + eps) if form == "sum" else np.maximum(n, eps) for n in squares]
        plain = {**c, "q": c["q"] / norms[0], "k": c["k"] / norms[1], "beta": 1 / (1 + np.exp(-c["beta"]))}
        expected = reference.recurrent(**plain)
        for function in (reference.recurrent, reference.chunked):
            got = function(**c, qk_l2norm=True, l2_eps=eps, l2_form=form, beta_logit=True)
            assert error(got[0], expected[0]) < 1e-6
            assert error(got[1], expected[1]) < 1e-6


def test_a_scale_of_zero_is_one(rng):
    c = case(rng, 1, 3, 1, 1, 4, 5)
    for function in (reference.recurrent, reference.chunked):
        out, state = function(**c, scale=0)
        assert not out.any() and np.array_equal(state, function(**c)[1])


def test_states_and_trace(rng):
    c = case(rng, 2, 20, 2, 2, 4, 3)
    states, trace = [], []
    out, state = reference.recurrent(**c, states=states)
    assert len(states) == 20 and np.array_equal(states[-1], state)
    first = {**{n: c[n][:, :8] for n in ("q", "k", "v", "g", "beta")}, "state": c["state"]}
    assert np.array_equal(states[7], reference.recurrent(**first)[1])
    reference.chunked(**c, chunk=8, trace=trace)
    assert [t["A"].shape[-1] for t in trace] == [8, 8, 4]
    for t in trace:
        assert (t["Gamma"] <= 1).all() and not np.triu(t["A"]).any() and not np.triu(t["P"], 1).any()


def test_scalar_functions():
    x = np.array([-1e4, -745, -30, -16.7, -9, 0, 20, 89, 1e4])
    assert np.allclose(reference.softplus(x)[2:], [math.log1p(math.exp(v)) if v < 700 else v for v in x[2:]], 1e-15, 0)
    assert reference.softplus(-745) > 0 and reference.softplus(1e4) == 1e4
    wanted = [1 / (1 + math.exp(30)), 0.5, 1 / (1 + math.exp(-30))]
    assert np.allclose(reference.sigmoid([-30, 0, 30]), wanted, 1e-15, 0)
    assert list(reference.head_index(2, 6, "tiled")) == [0, 1, 0, 1, 0, 1]
    assert list(reference.head_index(2, 6, "interleaved")) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("family", ["qwen3next", "qwen35", "kimi", "olmo"])
@pytest.mark.parametrize("function", [reference.recurrent, reference.chunked])
def test_recorded_layers(family, function):
    z = np.load(DATA / f"{family}.npz")
    inputs = [z[n] for n in ("q_l2", "k_l2", "core", "g", "beta")]
    S_v = z["core"].shape[-1]
    H_k, S_k = z["q_l2"].shape[2:]
    inputs[2] = z["conv_out"][..., 2 * H_k * S_k:].reshape(1, 75, -1, S_v)
    prefill = function(*(x[:, :70] for x in inputs), head_map="interleaved")
    rest = function(*(x[:, 70:] for x in inputs), prefill[1], head_map="interleaved")
    assert error(np.concatenate([prefill[0], rest[0]], 1), z["core"]) < 1e-5
    assert error(prefill[1], z["state_prefill"].swapaxes(-1, -2)) < 1e-5
    assert error(rest[1], z["state_final"].swapaxes(-1, -2)) < 1e-5


def test_helpers_head_map(rng):
    c = case(rng, H_k=2, H_v=4)
    assert {head_map(c, 0), head_map(c, 1)} == {"tiled", "interleaved"}
    assert head_map(case(rng)) is None
