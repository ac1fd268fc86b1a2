"""l2_norm, rms_norm_gated, decay_gate and solve_tri against float64, at their edges, and with bad input."""

import numpy as np
import pytest
from helpers import DATA, Carved, assert_close, random_layout, same_bits

import gdn
from gdn import reference

F = np.float32
WIDTHS = [1, 15, 16, 17, 31, 33, 63, 132, 260, 4096]


def rms(x, gate, weight, eps, activation):
    x, gate = np.asarray(x, np.float64), np.asarray(gate, np.float64)
    act = reference.sigmoid(gate) * (gate if activation == "silu" else 1)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight * act


# ---- norms -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", ["sum", "max"])
@pytest.mark.parametrize("n", WIDTHS)
def test_l2_norm(rng, n, form):
    x = rng.standard_normal((3, 4, n)).astype(F)
    x[0] *= 1e-4
    x[1] *= 1e3
    x[2, 0] = 0
    out = gdn.l2_norm(x, form=form)
    for row, ref in zip(out.reshape(-1, n), reference.l2_norm(x, form=form).reshape(-1, n), strict=True):
        assert_close(row, ref, "row")


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("n", WIDTHS)
def test_rms_norm_gated(rng, n, activation):
    x, gate = rng.standard_normal((2, 5, n)).astype(F), 3 * rng.standard_normal((2, 5, n)).astype(F)
    weight = rng.standard_normal(n).astype(F)
    x[0, 0] *= 1e-4
    gate[0, 1] = -3
    out = gdn.rms_norm_gated(x, gate, weight, activation=activation)
    for row, ref in zip(out.reshape(-1, n), rms(x, gate, weight, 1e-6, activation).reshape(-1, n), strict=True):
        assert_close(row, ref, "row")


def test_norms_of_more_rows_than_an_item_has(rng):
    """Each is some 16384 values, which end inside every axis."""
    x, gate = rng.standard_normal((2, 3, 50, 7, 40)).astype(F)
    weight = rng.standard_normal(40).astype(F)
    for y in (x, x.transpose(2, 0, 1, 3)):
        assert_close(gdn.l2_norm(y), reference.l2_norm(y), "l2_norm")
    for y, z in ((x, gate), (x.transpose(2, 0, 1, 3), gate.transpose(2, 0, 1, 3))):
        assert_close(gdn.rms_norm_gated(y, z, weight), rms(y, z, weight, 1e-6, "silu"), "rms_norm_gated")


def test_activations_as_named():
    x = gate = np.full((1, 1), -3, F)
    silu, sigmoid = (gdn.rms_norm_gated(x, gate, np.ones(1, F), activation=a)[0, 0] for a in ("silu", "sigmoid"))
    assert silu == pytest.approx(3 * reference.sigmoid(-3), rel=1e-6)
    assert sigmoid == pytest.approx(-reference.sigmoid(-3), rel=1e-6)


def test_nan_row_stays_alone(rng):
    x = rng.standard_normal((6, 50)).astype(F)
    clean = gdn.l2_norm(x)
    x[2, 7] = np.nan
    out = gdn.l2_norm(x)
    rows = [0, 1, 3, 4, 5]
    assert np.isnan(out[2]).all() and same_bits(out[rows], clean[rows])


@pytest.mark.parametrize("seed", range(20))
def test_norms_any_strides(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(i) for i in rng.integers(1, 8, int(rng.integers(0, 4)))) + (int(rng.integers(1, 70)),)
    x, gate = (Carved(rng.standard_normal(shape).astype(F), **(random_layout(rng, len(shape)) | {"zeros": []}))
               for _ in range(2))
    weight = Carved(rng.standard_normal(shape[-1]).astype(F), gaps=[2])
    out = Carved(shape=shape, **random_layout(rng, len(shape), output=True))
    gdn.rms_norm_gated(x.array, gate.array, weight.array, out=out.array)
    assert same_bits(out.array, gdn.rms_norm_gated(x.array.copy(), gate.array.copy(), weight.array.copy()))
    gdn.l2_norm(x.array, out=out.array)
    assert same_bits(out.array, gdn.l2_norm(x.array.copy()))
    assert x.intact() and gate.intact() and weight.intact() and out.intact()
    y = x.array.copy()
    assert gdn.l2_norm(y, out=y) is y and same_bits(y, out.array)


@pytest.mark.parametrize("i", [0, 1], ids=["x", "gate"])
def test_the_gated_norm_in_place(rng, i):
    arrays, weight = list(rng.standard_normal((2, 5, 33)).astype(F)), rng.standard_normal(33).astype(F)
    expected = gdn.rms_norm_gated(*arrays, weight)
    assert gdn.rms_norm_gated(*arrays, weight, out=arrays[i]) is arrays[i] and same_bits(arrays[i], expected)


# ---- decay gate --------------------------------------------------------------------------------------------------

def test_softplus_keeps_relative_accuracy():
    x = np.concatenate([[-1e4, -104, -103, -100, -95, -88, -87, -30, -16.7, -9, -1e-7, 0, 1e-7, 20, 89, 1e4],
                        np.linspace(-104, 30, 4001)]).astype(F)
    out = -gdn.decay_gate(x.reshape(1, -1, 1), -np.ones(1, F), np.zeros(1, F)).ravel()
    ref = reference.softplus(x)
    normal = ref >= np.finfo(F).tiny
    assert (np.abs(out - ref)[normal] <= 1e-6 * ref[normal]).all()
    assert (np.abs(out - ref)[~normal] <= 2 * np.finfo(F).smallest_subnormal).all()
    assert (out[ref > 2e-45] > 0).all()


def test_gate_of_zero_at_an_infinite_rate():
    a, A = np.full((1, 1, 1), -200, F), np.array([-np.inf], F)          # -exp(A_log) from A_log = 88.8 on
    assert gdn.decay_gate(a, A, np.zeros(1, F)) == 0
    assert np.isneginf(gdn.decay_gate(a + 200, A, np.zeros(1, F)))
    assert np.isnan(gdn.decay_gate(np.full((1, 1, 1), np.nan, F), A, np.zeros(1, F)))
    assert np.isnan(gdn.decay_gate(np.full((1, 1, 1), np.nan, F), np.zeros(1, F), np.zeros(1, F)))
    bounded = gdn.decay_gate(np.array([-1, 0, 1, np.nan], F).reshape(1, 4, 1), A, np.zeros(1, F), gate="bounded",
                             lower_bound=-5)
    assert np.array_equal(bounded.ravel(), [0, -2.5, -5, np.nan], equal_nan=True)


@pytest.mark.parametrize("gate, bound", [("softplus", None), ("bounded", -5.0), ("clamped", -1.0)])
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 20), (1, 70, 33), (1, 1, 1, 1), (1, 3, 4, 1), (1, 4, 4, 4),
                                   (2, 4, 4), (3, 5, 1), (0, 2, 3), (2, 0, 3, 8), (2, 450, 3, 20), (3, 400, 33)])
def test_decay_gate(rng, shape, gate, bound):
    a = 3 * rng.standard_normal(shape).astype(F)
    A = -np.exp(rng.standard_normal(shape[2])).astype(F)
    bias = rng.standard_normal(shape[2:]).astype(F)
    x = a.astype(np.float64) + bias
    A_ = A.reshape(A.shape + (1,) * (len(shape) - 3)).astype(np.float64)
    ref = bound * reference.sigmoid(-A_ * x) if gate == "bounded" else reference.softplus(x) * A_
    form, ref = {"gate": gate, "lower_bound": bound}, np.maximum(ref, bound) if gate == "clamped" else ref
    out = gdn.decay_gate(a, A, bias, **form)
    assert_close(out, ref, "g")
    if len(shape) == 4:
        assert same_bits(gdn.decay_gate(a, A, bias.ravel(), **form), out)
    if a.size:
        target = np.empty_like(a)
        for b in (bias, bias.ravel()):
            gdn.decay_gate(gdn.Tensor(a), gdn.Tensor(A), gdn.Tensor(b), **form, out=gdn.Tensor(target))
            assert same_bits(target, out)
            assert same_bits(gdn.decay_gate(gdn.Tensor(a), A, gdn.Tensor(b), **form), out)
    strided, rates = Carved(a, **random_layout(rng, len(shape), output=True)), Carved(A, gaps=[2])
    target = Carved(shape=shape, **random_layout(rng, len(shape), output=True))
    for layout in ({"gaps": [3]}, {"gaps": [0, 2]}, {"order": range(bias.ndim)[::-1]}):
        gdn.decay_gate(strided.array, rates.array, Carved(bias, **layout).array, **form, out=target.array)
        assert same_bits(target.array, out) and target.intact()
    assert gdn.decay_gate(a, A, bias, **form, out=a) is a and same_bits(a, out)


@pytest.mark.parametrize("x, softplus, bounded, clamped", [(2, -2.12693, -4.40399, -2.12693), (6, -6.00248, -4.98764, -5)])
def test_the_three_gates_of_one_bound(x, softplus, bounded, clamped):
    a, A, zero = np.full((1, 1, 1), x, F), -np.ones(1, F), np.zeros(1, F)
    for gate, expected in (("softplus", softplus), ("bounded", bounded), ("clamped", clamped)):
        bound = None if gate == "softplus" else -5
        assert gdn.decay_gate(a, A, zero, gate=gate, lower_bound=bound) == pytest.approx(expected, abs=5e-6)
    nan = np.full((1, 1, 1), np.nan, F)
    assert np.isnan(gdn.decay_gate(nan, A, zero, gate="clamped", lower_bound=-5))
    assert gdn.decay_gate(a, A * np.inf, zero, gate="clamped", lower_bound=-5) == -5


@pytest.mark.parametrize("gate, bound, message", [
    ("softplus", -5, "lower_bound is -5, which gate \"softplus\" does not use"), ("softplus", 5, "does not use"),
    *((gate, bound, "lower_bound must be") for gate in ("bounded", "clamped")
      for bound in (None, 0, -0.0, 5.0, 1e-30, np.nan, -np.inf)),
    ("softplus", 0, "lower_bound must be below 0"), ("exp", None, "gate must be"), (None, None, "gate must be"),
    (None, -5, "gate must be"), (1, -5, "gate must be")])
def test_a_gate_and_its_bound_go_together(gate, bound, message):
    a, A, out = np.ones((1, 2, 3), F), -np.ones(3, F), np.full((1, 2, 3), 7, F)
    with pytest.raises(ValueError, match=message):
        gdn.decay_gate(a, A, A, gate=gate, lower_bound=bound, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("gate, bound", [("softplus", None), ("bounded", -5.0), ("clamped", -1.0)])
@pytest.mark.parametrize("bad", [1.0, 1e-38, np.inf, np.nan])
def test_the_sign_of_the_rate(gate, bound, bad):
    for shape in ((1, 2, 5), (1, 2, 5, 4)):
        a, A = np.ones(shape, F), np.array([0, -0.0, -np.inf, bad, -1, 7], F)[:5]
        out = np.full(shape, 7, F)
        for rates in (A, A[::-1], np.repeat(A, 2)[::2]):
            with pytest.raises(ValueError, match="A must be -exp.A_log., 0 or less, got .*for head"):
                gdn.decay_gate(a, rates, np.zeros(shape[2:], F), gate=gate, lower_bound=bound, out=out)
        assert (out == 7).all()
        A[3] = 0
        gdn.decay_gate(a, A, np.zeros(shape[2:], F), gate=gate, lower_bound=bound)


# ---- triangular solve --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("n, m, batch", [(1, 1, ()), (5, 3, (2,)), (20, 37, (2, 3)), (64, 64, (1,)), (33, 200, ()),
                                         (0, 4, ()), (150, 9, ())])
def test_solve_tri(rng, lower, unit, n, m, batch):
    a = (0.2 * rng.standard_normal((*batch, n, n)) + 2 * np.eye(n)).astype(F)
    b = rng.standard_normal((*batch, n, m)).astype(F)
    triangle = (np.tril if lower else np.triu)(a).astype(np.float64)
    if unit:
        triangle = triangle * (1 - np.eye(n)) + np.eye(n)
        a[..., np.arange(n), np.arange(n)] = np.nan                 # not read
    a = np.where((np.triu if lower else np.tril)(np.ones((n, n)), 1 if lower else -1) > 0, F(np.nan), a)
    out = gdn.solve_tri(a, b, lower=lower, unit=unit)
    assert_close(out, np.linalg.solve(triangle, b.astype(np.float64)), "X")
    strided = Carved(a, **(random_layout(rng, a.ndim) | {"zeros": []}))
    target = Carved(b, **random_layout(rng, b.ndim, output=True))
    gdn.solve_tri(strided.array, target.array, lower=lower, unit=unit, out=target.array)
    assert same_bits(target.array, out) and target.intact()


# ---- threads, bad input, recorded layers ---------------------------------------------------------------------------

def test_threads_do_not_change_bits(rng):
    x, w = rng.standard_normal((2, 40, 8, 128)).astype(F), rng.standard_normal(128).astype(F)
    a = rng.standard_normal((3, 60, 60)).astype(F) * F(0.1) + np.eye(60, dtype=F)
    b = rng.standard_normal((3, 60, 300)).astype(F)
    for call in (lambda n: gdn.l2_norm(x, n_threads=n), lambda n: gdn.rms_norm_gated(x, x, w, n_threads=n),
                 lambda n: gdn.decay_gate(x, -np.abs(w[:8]), np.zeros((8, 128), F), n_threads=n),
                 lambda n: gdn.solve_tri(a, b, n_threads=n)):
        assert all(same_bits(call(n), call(1)) for n in (2, 3, 7))


X, W = np.linspace(-1, 1, 30, dtype=F).reshape(5, 6), np.ones(6, F)
G, H = np.zeros((2, 5, 6), F), np.ones(6, F)
T3, B3 = np.eye(4, dtype=F), np.ones((4, 3), F)
POOL = np.zeros(100, F)
UNALIGNED = np.zeros(121, np.uint8)[1:].view(F).reshape(5, 6)
BAD = {
    "l2 float64": (lambda: gdn.l2_norm(X.astype(float)), TypeError, "x"),
    "l2 five axes": (lambda: gdn.l2_norm(X.reshape(1, 1, 1, 5, 6)), ValueError, "x"),
    "l2 scalar": (lambda: gdn.l2_norm(np.array(1, F)), ValueError, "x"),
    "l2 list": (lambda: gdn.l2_norm([1.0]), TypeError, "x"),
    "l2 form": (lambda: gdn.l2_norm(X, form="mean"), ValueError, "form"),
    "l2 eps NaN": (lambda: gdn.l2_norm(X, float("nan")), ValueError, "eps"),
    "l2 eps negative": (lambda: gdn.l2_norm(X, -1), ValueError, "eps"),
    "l2 eps text": (lambda: gdn.l2_norm(X, "1e-6"), TypeError, "eps"),
    "l2 out shape": (lambda: gdn.l2_norm(X, out=np.zeros((5, 5), F)), ValueError, "out"),
    "l2 out type": (lambda: gdn.l2_norm(X, out=np.zeros((5, 6))), TypeError, "out"),
    "l2 out shifted": (lambda: gdn.l2_norm(POOL[:30].reshape(5, 6), out=POOL[1:31].reshape(5, 6)), ValueError, "out"),
    "l2 unaligned": (lambda: gdn.l2_norm(UNALIGNED), ValueError, "x"),
    "l2 n_threads": (lambda: gdn.l2_norm(X, n_threads=0), ValueError, "n_threads"),
    "l2 n_threads text": (lambda: gdn.l2_norm(X, n_threads="2"), TypeError, "n_threads"),
    "rms gate shape": (lambda: gdn.rms_norm_gated(X, X[:4], W), ValueError, "gate"),
    "rms weight shape": (lambda: gdn.rms_norm_gated(X, X, W[:5]), ValueError, "weight"),
    "rms weight axes": (lambda: gdn.rms_norm_gated(X, X, W[None]), ValueError, "weight"),
    "rms activation": (lambda: gdn.rms_norm_gated(X, X, W, activation="relu"), ValueError, "activation"),
    "rms no activation": (lambda: gdn.rms_norm_gated(X, X, W, activation=None), ValueError, "activation"),
    "rms gate type": (lambda: gdn.rms_norm_gated(X, X.astype(float), W), TypeError, "gate"),
    "rms weight type": (lambda: gdn.rms_norm_gated(X, X, W.astype(np.float16)), TypeError, "weight"),
    "rms out over weight": (lambda: gdn.rms_norm_gated(X[:1], X[:1], POOL[:6], out=POOL[None, :6]), ValueError, "out"),
    "gate two axes": (lambda: gdn.decay_gate(G[0], H, H), ValueError, "a"),
    "gate A length": (lambda: gdn.decay_gate(G, H[:5], H), ValueError, "A"),
    "gate bias length": (lambda: gdn.decay_gate(G, H, H[:5]), ValueError, "dt_bias"),
    "gate bias axes": (lambda: gdn.decay_gate(G, H, np.ones((6, 4), F)), ValueError, "dt_bias"),
    "gate flat bias length": (lambda: gdn.decay_gate(G[..., None], H, np.ones(7, F)), ValueError, "dt_bias"),
    "gate bound NaN": (lambda: gdn.decay_gate(G, -H, H, gate="bounded", lower_bound=float("nan")), ValueError, "lower_bound"),
    "gate type": (lambda: gdn.decay_gate(G.astype(int), H, H), TypeError, "a"),
    "gate out shape": (lambda: gdn.decay_gate(G, H, H, out=np.zeros((2, 5, 7), F)), ValueError, "out"),
    "solve not square": (lambda: gdn.solve_tri(T3[:3], B3), ValueError, "a"),
    "solve rows": (lambda: gdn.solve_tri(T3, B3[:3]), ValueError, "a"),
    "solve batch": (lambda: gdn.solve_tri(np.stack([T3] * 2), np.stack([B3] * 3)), ValueError, "a"),
    "solve one axis": (lambda: gdn.solve_tri(T3, B3[0]), ValueError, "b"),
    "solve out over a": (lambda: gdn.solve_tri(POOL[:16].reshape(4, 4), B3, out=POOL[4:16].reshape(4, 3)), ValueError,
                         "out"),
    "solve out shape": (lambda: gdn.solve_tri(T3, B3, out=np.zeros((4, 4), F)), ValueError, "out"),
    "solve type": (lambda: gdn.solve_tri(T3.astype(float), B3), TypeError, "a"),
}


@pytest.mark.parametrize("name", ["lower", "unit"])
def test_the_triangle_is_true_or_false(name):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 'upper'"):
        gdn.solve_tri(np.eye(3, dtype=F), np.ones((3, 2), F), **{name: "upper"})


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, word = BAD[name]
    before = POOL.copy()
    with pytest.raises(error, match=word):
        call()
    assert same_bits(POOL, before)
    assert_close(gdn.l2_norm(X), reference.l2_norm(X), "the next call")


@pytest.mark.parametrize("model", ["qwen3next", "qwen35", "kimi", "olmo"])
def test_recorded_layers(model):
    d = np.load(DATA / f"{model}.npz")
    weights = {k.split(".")[-1] if "A_log" in k or "dt_bias" in k else k: d[k] for k in d.files if k.startswith("w.")}
    q = d["conv_out"][..., :d["q_l2"][0, 0].size].reshape(d["q_l2"].shape)
    assert_close(gdn.l2_norm(q), d["q_l2"], "q_l2")
    if "a" in d.files:
        A = -np.exp(weights["A_log"].ravel()).astype(F)
        assert_close(gdn.decay_gate(d["a"], A, weights["dt_bias"].ravel()), d["g"], "g")
    z = d["z"].reshape(d["core"].shape) if "z" in d.files else None
    norm = next(d[k] for k in d.files if k.startswith("w.") and "norm" in k and k.endswith("weight")
                and d[k].shape == d["core"].shape[-1:])
    if z is not None:
        out = gdn.rms_norm_gated(d["core"], z, norm, float(d["eps"]),
                                 activation="sigmoid" if model == "kimi" else "silu")
        assert_close(out, d["gated_norm"], "gated_norm")
