"""float16 and bfloat16: every pattern in and out, calls against float32 calls on widened inputs, stochastic rounding."""

import itertools

import numpy as np
import pytest
from c_tools import OK, TYPE, VALUE, DeltaCall, tensor
from helpers import case, optional
from layer_cases import Case, one_sequence
from test_levels import LEVELS, python, runs_here

import gdn
from gdn import _drift

bf16, f16, f32 = optional("ml_dtypes").bfloat16, np.float16, np.float32
NARROW = pytest.mark.parametrize("dtype", [bf16, f16])
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")        # gates of -1e8 in float16 are -inf
NAMES = ("q", "k", "v", "g", "beta")
ORDERS = ([0, 1, 2, 3], [0, 1, 3, 2])


def equal(x, y):
    return x.dtype == y.dtype and np.array_equal(x.astype(f32), y.astype(f32), equal_nan=True)


def stored(x, dtype, **options):
    """x as a convolution's window of another type keeps it: nothing is computed."""
    x = x[:len(x) // 3 * 3].reshape(-1, 3)
    window = np.empty((1, len(x), 3), dtype)
    gdn.causal_conv1d(np.ascontiguousarray(x.T)[None], np.ones((len(x), 4), f32), state_out=window, **options)
    return window.reshape(-1)


def saturated(x, dtype):
    """x rounded to nearest by numpy or ml_dtypes; finite numbers beyond float16 become its largest."""
    with np.errstate(over="ignore", invalid="ignore"):
        y = x.astype(dtype)
    if dtype is f16:
        y = np.where(np.isinf(y) & np.isfinite(x), np.copysign(f16(65504), x).astype(f16), y)
    return y


def patterns(dtype):
    return np.concatenate([np.arange(65536, dtype=np.uint16), np.zeros(2, np.uint16)]).view(dtype)


def hard(dtype):
    """Around every number of a type, and random bits."""
    step = 1 << (16 if dtype is bf16 else 13)
    x = patterns(dtype).astype(f32).view(np.uint32)
    near = [x + np.uint32(d) for d in (0, 1, step // 2 - 1, step // 2, step // 2 + 1, step - 1)]
    rng = np.random.default_rng(0)
    small = (2.0**-rng.uniform(10, 30, 30000)).astype(f32)          # float16's subnormals
    return np.concatenate([*near, rng.integers(0, 2**32, 90000, np.uint32), small.view(np.uint32)]).view(f32)


@NARROW
def test_every_pattern(dtype):
    x = patterns(dtype)
    wide = stored(x, f32)
    assert equal(wide, x.astype(f32)) and equal(stored(wide, dtype), x) and equal(stored(x, dtype), x)
    assert (np.signbit(wide) == np.signbit(x)).all()
    x = hard(dtype)
    assert equal(stored(x, dtype), saturated(x[:len(x) // 3 * 3], dtype))


@NARROW
def test_activations_beyond_the_range(dtype):
    """out of the convolution is x: rounded to nearest as numpy does, to infinity beyond the largest."""
    x = hard(dtype)
    x = x[(np.abs(x) > 1e-37) | (x == 0)]                           # kernels may flush subnormals
    out, _ = gdn.causal_conv1d(x[None, None], np.ones((x.size, 1), f32), activation=None, out=np.empty((1, 1, x.size), dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        assert equal(out.reshape(-1), x.astype(dtype))


@pytest.mark.parametrize("level", LEVELS)
def test_at_every_level(level):
    if not runs_here(level):
        pytest.skip(f"this machine does not run {level}")
    done = python(f"""
import sys
sys.path.insert(0, {str(__file__).rsplit("/", 1)[0]!r})
import test_storage as t
for dtype in (t.bf16, t.f16):
    t.test_every_pattern(dtype)
    t.test_activations_beyond_the_range(dtype)
    t.test_one_rounding(dtype)
    for sizes in t.SIZES:
        t.test_tokens_one_by_one(sizes, dtype)
""", level)
    assert done.returncode == 0, done.stderr


# ---- against float32 on widened inputs -------------------------------------------------------------------------

SIZES = ((1, 1), (3, 5), (20, 33), (64, 40), (128, 128))


def narrowed(c, dtype, order):
    """A case in a narrow type, and the same numbers in float32; the states' axes lie in memory as `order` says."""
    narrow = {n: x.astype(dtype) for n, x in c.items()}
    narrow["state"] = np.ascontiguousarray(narrow["state"].transpose(order)).transpose(np.argsort(order))
    return narrow, {n: x.astype(f32, order="K") for n, x in narrow.items()}


def assert_near(x, wide, where):
    """Within a rounding of a float32 result that is summed in another order."""
    ulp = 2.0**-8 if x.dtype == bf16 else 2.0**-11
    assert (np.abs(x.astype(f32) - wide) <= 1.01 * ulp * np.abs(wide) + 1e-6).all(), where


@NARROW
def test_one_rounding(dtype):
    """What is computed is what float32 calls compute, rounded once: outputs, states and snapshots, chunked or one token."""
    rng = np.random.default_rng(1)
    for i, (sizes, order, per_channel) in enumerate(itertools.product(SIZES, ORDERS, (False, True))):
        for mode, n_tokens in (("chunked", 1 + 17 * (i % 5)), ("recurrent", 1), ("auto", 0)):
            narrow, wide = narrowed(case(rng, 2, n_tokens, 2, 4, *sizes, per_channel=per_channel), dtype, order)
            for K in (None, 1):
                out, state = gdn.gated_delta_net(**narrow, head_map="tiled", mode=mode, snapshots=K)
                out_32, state_32 = gdn.gated_delta_net(**wide, head_map="tiled", mode=mode, snapshots=K)
                where = (sizes, order, mode, K)
                if dtype is bf16 and mode == "recurrent":            # a row's dots may be summed in another order
                    assert_near(out, out_32, where)
                    assert_near(state, state_32, where)
                else:
                    assert equal(out, out_32.astype(dtype)) and equal(state, saturated(state_32, dtype)), where


@NARROW
@pytest.mark.parametrize("sizes", SIZES)
def test_tokens_one_by_one(sizes, dtype):
    """Several tokens in one call: the state in between is float32.  Another order of sums than float32 states have."""
    rng = np.random.default_rng(2)
    for order, n_tokens in itertools.product(ORDERS, (2, 5)):
        narrow, wide = narrowed(case(rng, 2, n_tokens, 1, 2, *sizes), dtype, order)
        state = gdn.gated_delta_net(**narrow, head_map="tiled", mode="recurrent", out=np.empty(wide["v"].shape, f32))[1]
        state_32 = gdn.gated_delta_net(**wide, head_map="tiled", mode="recurrent")[1]
        assert_near(state, state_32, order)


def test_mixed_types(rng):
    """Every argument of a type of its own, the state read in one and written in another."""
    for i, types in enumerate(itertools.islice(itertools.product((f32, bf16, f16), repeat=8), 0, None, 131)):
        c = case(rng, 2, (1, 4, 20)[i % 3], 1, 2, 32, 48, per_channel=i % 2 == 0)
        mixed = {n: c[n].astype(t) for n, t in zip((*NAMES, "state"), types, strict=False)}
        wide = {n: x.astype(f32) for n, x in mixed.items()}
        out, state_out = np.empty(c["v"].shape, types[6]), np.empty(c["state"].shape, types[7])
        gdn.gated_delta_net(**mixed, head_map="tiled", mode="chunked", out=out, state_out=state_out)
        out_32, state_32 = gdn.gated_delta_net(**wide, head_map="tiled", mode="chunked")
        assert equal(out, out_32.astype(types[6])) and equal(state_out, saturated(state_32, types[7]))


@NARROW
@pytest.mark.parametrize("order", ORDERS)
def test_in_place(rng, dtype, order):
    """Forks, swaps, staged rows and snapshots of a narrow cache; conv windows likewise."""
    c = case(rng, 4, 6, 1, 2, 32, 32, state=False)
    cache = np.ascontiguousarray(rng.standard_normal((9, 2, 32, 32)).transpose(order)).transpose(np.argsort(order)).astype(dtype)
    wide, rows_out = cache.astype(f32), [[1, 5], [0, -1], [6, 7], [4, 2]]
    options = {"head_map": "tiled", "mode": "chunked"}
    out = gdn.gated_delta_net_inplace(*(c[n] for n in NAMES), cache, [0, 1, 1, -1], rows_out, **options)
    out_32 = gdn.gated_delta_net_inplace(*(c[n] for n in NAMES), wide, [0, 1, 1, -1], rows_out, **options)
    written = [1, 5, 0, 6, 7, 4, 2]
    assert equal(out, out_32) and equal(cache[[3, 8]], wide[[3, 8]].astype(dtype))
    assert np.abs(cache[written].astype(f32) - wide[written]).max() <= 0.01 * np.abs(wide).max()
    for n_tokens in (1, 2, 7):
        x, weight = rng.standard_normal((2, n_tokens, 21)).astype(dtype), rng.standard_normal((21, 4)).astype(f32)
        windows = rng.standard_normal((4, 21, 3)).astype(dtype)
        wide = windows.astype(f32)
        out = gdn.causal_conv1d_inplace(x, weight, None, windows, [3, 0], [[0, 1], [3, 2]])
        out_32 = gdn.causal_conv1d_inplace(x.astype(f32), weight, None, wide, [3, 0], [[0, 1], [3, 2]])
        assert equal(out, out_32.astype(dtype)) and equal(windows, wide.astype(dtype))


@NARROW
@pytest.mark.parametrize("order", ORDERS)
def test_log(rng, dtype, order):
    """A fold rounds a state once, entries are float32: against a float32 cache of the same numbers."""
    for sizes, per_channel, n_tokens in itertools.product(((32, 32), (20, 33), (128, 16)), (False, True), (1, 4)):
        c = case(rng, 2, n_tokens, 1, 2, *sizes, state=False, per_channel=per_channel)
        rows = np.ascontiguousarray(rng.standard_normal((5, 2, *sizes[::-1])).transpose(order)).transpose(np.argsort(order))
        caches = [rows.astype(dtype), rows.astype(dtype).astype(f32)]
        logs, outs = [], []
        for cache in caches:
            log = gdn.TokenLog.allocate(20, H_k=1, H_v=2, S_k=sizes[0], S_v=sizes[1], per_channel=per_channel)
            entries = np.arange(10).reshape(2, 5)
            gdn.gated_delta_net_inplace(*(c[n] for n in NAMES), cache, [0, 1], log=log, head_map="tiled",
                                        log_out=entries[:, :n_tokens])
            outs.append(gdn.gated_delta_net_inplace(
                *(c[n] for n in NAMES), cache, [0, 1], log=log, head_map="tiled", log_in=entries[:, :n_tokens],
                log_out=10 + entries, checkpoints=[(0, -n_tokens + 1, 2), (1, 1, 3), (1, 0, 4)]))
            logs.append(log)
        if sizes[0] == 128:                          # a row's dots may be summed in another order
            assert np.abs(outs[0] - outs[1]).max() < 1e-5
            assert_near(caches[0], caches[1], order)
            continue
        assert equal(*outs) and all(equal(getattr(logs[0], n), getattr(logs[1], n)) for n in ("k", "d", "g"))
        assert equal(caches[0], saturated(caches[1], dtype))


@NARROW
def test_pointwise(rng, dtype):
    x, y = (rng.standard_normal((2, 3, 2, 37)).astype(dtype) for _ in range(2))
    w, A, bias = rng.standard_normal(37).astype(f32), -np.ones(2, f32), np.zeros((2, 37), f32)
    assert equal(gdn.l2_norm(x), gdn.l2_norm(x.astype(f32)).astype(dtype))
    assert equal(gdn.rms_norm_gated(x, y, w), gdn.rms_norm_gated(x.astype(f32), y.astype(f32), w).astype(dtype))
    assert equal(gdn.decay_gate(x, A, bias), gdn.decay_gate(x.astype(f32), A, bias))


@NARROW
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_no_number(dtype, value):
    """NaN and infinity in a state, a key or a value stay that, whatever the sizes; float16 saturates."""
    rng = np.random.default_rng(4)
    for sizes, order, where in itertools.product(((128, 16), (64, 16), (3, 5)), ORDERS, ("state", "k", "v")):
        c = case(rng, 1, 1, 1, 1, *sizes, gates="-1e-3")
        c[where].reshape(-1)[1] = value if where != "v" or value != 3e38 else 1e30
        if where == "k" and np.isnan(value):
            c["k"].view(np.uint32).reshape(-1)[1] = 0x7fffffff       # whose rounding would carry into the sign
        c["state"] = np.ascontiguousarray(c["state"].transpose(order)).transpose(np.argsort(order))
        state = saturated(c["state"], dtype)
        with np.errstate(all="ignore"):
            wide = gdn.gated_delta_net(**{**c, "state": state.astype(f32)}, mode="recurrent")[1]
            narrow = gdn.gated_delta_net(**{**c, "state": state}, mode="recurrent")[1].astype(f32)
            wide = saturated(wide, dtype).astype(f32)
        assert np.array_equal(np.isnan(narrow), np.isnan(wide)) and np.array_equal(np.isinf(narrow), np.isinf(wide))


# ---- stochastic rounding ---------------------------------------------------------------------------------------

@NARROW
def test_stochastic_mean(dtype):
    """Over 1,000 seeds the mean of what is kept is the number itself, within 3 sigma of what chance allows on average."""
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.standard_normal(200), 2.0**-rng.uniform(12, 26, 100) * rng.choice([-1, 1], 100)]).astype(f32)
    kept = np.stack([stored(x, dtype, rounding="stochastic", seed=s) for s in range(1000)]).astype(float)
    near = x.astype(dtype)
    far = np.nextafter(near, np.where(near.astype(f32) < x, np.inf, -np.inf).astype(dtype)).astype(float)
    low, high = np.minimum(near.astype(float), far), np.maximum(near.astype(float), far)
    assert ((kept == low) | (kept == high)).all()
    p = (x - low) / (high - low)
    sigma = (high - low) * np.sqrt(p * (1 - p) / 1000)
    z = ((kept.mean(0) - x) / sigma)[(0.02 < p) & (p < 0.98)]
    assert len(z) > 250 and np.abs(z.mean()) < 3 / np.sqrt(len(z)) and 0.85 < z.std() < 1.15 and np.abs(z).max() < 5
    exact = patterns(dtype)
    assert equal(stored(exact.astype(f32), dtype, rounding="stochastic", seed=7), exact)


def test_stochastic_saturates():
    x = np.array([65504, 65519, 65520, 1e30, -1e30, np.inf, -np.inf, np.nan, 0], f32)
    assert equal(stored(x, f16, rounding="stochastic", seed=1), saturated(x, f16))


@NARROW
def test_stochastic_bits(rng, dtype):
    """The same for any threads, parts, rows and strides; other seeds give others; float32 states need no rounding."""
    c = case(rng, 3, 9, 1, 2, 32, 64)
    arrays = [c[n] for n in NAMES]
    def run(seed, rows, order=ORDERS[0], **options):
        cache = np.ascontiguousarray(np.zeros((12, 2, 64, 32), dtype).transpose(order)).transpose(np.argsort(order))
        cache[rows] = c["state"]
        gdn.gated_delta_net_inplace(*arrays, cache, rows, head_map="tiled", rounding="stochastic", seed=seed, **options)
        return cache[rows]
    first = run(5, [0, 1, 2])
    for options in ({"n_threads": 1}, {"n_threads": 2}, {"n_threads": 12}, {"order": ORDERS[1]}):
        assert equal(run(5, [0, 1, 2], **options), first)
        assert equal(run(5, [7, 3, 11], **options), first)
    assert not equal(run(6, [0, 1, 2]), first)
    wide = gdn.gated_delta_net(**c, head_map="tiled", rounding="stochastic", seed=5)[1]
    assert equal(wide, gdn.gated_delta_net(**c, head_map="tiled")[1])
    one = {n: x[:1, :1] if n != "state" else x[:1].astype(dtype) for n, x in c.items()}        # one token: in place or not
    states = [gdn.gated_delta_net(**one, head_map="tiled", rounding="stochastic", seed=5, n_threads=n)[1] for n in (1, 4)]
    assert equal(*states)


def test_drift():
    """4096 decoded tokens, gates -1e-4 to -1: bounded, and no worse in the last quarter than in the one before."""
    for (dtype, rounding, form), errors in _drift.measure().items():
        worst = errors.max(1)
        assert (worst <= {"f32": 1e-5, "f16": 6e-3, "bf16": 5e-2}[dtype]).all(), (dtype, rounding, form)
        assert (errors[:, 3072:].max(1) <= 1.6 * errors[:, 2048:3072].max(1)).all(), (dtype, rounding, form)


# ---- faces and refusals ----------------------------------------------------------------------------------------

def test_tensors_and_torch(rng):
    """gdn.Tensor and torch tensors, through DLPack: their memory is what the kernels write."""
    torch = optional("torch")
    c = case(rng, 2, 5, 1, 2, 16, 16)
    narrow = {n: x.astype(bf16) for n, x in c.items()}
    out, state = gdn.gated_delta_net(**narrow, head_map="tiled")
    tensors = {n: torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for n, x in narrow.items()}
    mine, kept = torch.zeros(out.shape, dtype=torch.bfloat16), torch.zeros(state.shape, dtype=torch.bfloat16)
    assert gdn.gated_delta_net(**tensors, head_map="tiled", out=mine, state_out=kept)[0] is mine
    assert np.array_equal(mine.float().numpy(), out.astype(f32)) and np.array_equal(kept.float().numpy(), state.astype(f32))
    views = {n: gdn.Tensor(x.view(np.uint16), type="bf16") for n, x in narrow.items()}
    for arguments in (tensors, views):
        out_2, state_2 = gdn.gated_delta_net(**arguments, head_map="tiled")
        assert equal(out_2, out) and equal(state_2, state)
    half = torch.from_numpy(narrow["state"].astype(f16))
    gdn.gated_delta_net_inplace(*(c[n] for n in NAMES), half, [0, 1], head_map="tiled")
    assert np.isfinite(half.numpy()).all() and not np.array_equal(half.numpy(), narrow["state"].astype(f16))


@pytest.mark.parametrize("form", ["planes", "log"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_rings(rng, name, form):
    """Rings of narrow rows: rows in half the bytes, steps, rollback, copies, folds, saved bytes; windows stay float32."""
    dtype = {"f16": f16, "bf16": bf16}[name]
    extents = {"n_layers": 1, "H_k": 1, "H_v": 2, "S_k": 5, "S_v": 3, "conv_channels": 3, "conv_width": 4, "form": form,
               "head_map": "tiled"}
    ring, wide = (gdn.StateRing.create(3, 2, dtype=d, **extents) for d in (name, "f32"))
    assert ring.dtype == name and ring.ssm(0).type == name and ring.conv(0).type == "f32" and wide.dtype == "f32"
    big = {**extents, "S_k": 128, "S_v": 128, "H_v": 8, "n_rollback": 0}
    assert gdn.StateRing.nbytes_for(4, dtype=name, **big) < 0.7 * gdn.StateRing.nbytes_for(4, **big)
    outs = []
    for r in (ring, wide):
        r.acquire(7)
        log, generator = r.log(0) if form == "log" else None, np.random.default_rng(5)
        for t in range(30):
            c = case(generator, 1, 1, 1, 2, 5, 3, gates="-1e-3", state=False)
            with r.begin([7], [1]) as step:
                step.conv(0)
                out = gdn.gated_delta_net_inplace(*(c[n] for n in NAMES), step.ssm(0), step.rows_in, step.rows_out, log=log,
                                                  log_in=step.log_in, log_out=step.log_out, checkpoints=step.checkpoints,
                                                  head_map="tiled")
            if t % 7 == 3:
                r.rollback(7, 1)
        outs.append(out)
    assert 0 < np.abs(outs[0] - outs[1]).max() < 0.02 * np.abs(outs[1]).max()
    other = gdn.StateRing.create(3, 2, dtype=name, **extents)
    for depth in (True, False):
        data = ring.save(7, depth=depth)
        other.load(8 + depth, data)
        assert other.save(8 + depth, depth=depth) == data
        with pytest.raises(ValueError, match="its states are of type"):
            wide.load(9, data)
    ring.copy(7, 9, depth=False)
    assert ring.save(9, depth=False) == ring.save(7, depth=False)
    state, state_32 = (np.frombuffer(r.save(7, depth=False), np.uint8)[-r.conv(0).ne[0] * 3 * 4 - n:-3 * 3 * 4].view(d)[:30]
                       for r, d, n in ((ring, dtype, 60), (wide, f32, 120)))
    assert np.abs(state.astype(f32) - state_32).max() < 0.02 * np.abs(state_32).max()


@pytest.mark.parametrize("form", ["planes", "log"])
def test_layers_on_narrow_rings(form):
    """The type of a layer's states is its ring's."""
    recorded = Case("qwen3next")
    outs = {dtype: one_sequence(recorded.ring(dtype=dtype, form=form), recorded, [70, 1, 1, 3])
            for dtype in ("f32", "bf16", "f16")}
    assert all(0 < np.abs(outs[d] - outs["f32"]).max() < 0.05 * np.abs(outs["f32"]).max() for d in ("bf16", "f16"))


def test_out_is_v(rng):
    """In place on v of its own type; another type over the same bytes is an overlap."""
    c = {n: x.astype(f16) for n, x in case(rng, 1, 5, 1, 2, 16, 16).items()}
    expected, _ = gdn.gated_delta_net(**c, head_map="tiled")
    with pytest.raises(ValueError, match="out overlaps v"):
        gdn.gated_delta_net(**c, head_map="tiled", out=c["v"].view(bf16))
    assert equal(gdn.gated_delta_net(**c, head_map="tiled", out=c["v"])[0], expected)


@pytest.mark.parametrize("options, error, said", [
    ({"rounding": "up"}, ValueError, "rounding"), ({"rounding": "stochastic"}, ValueError, "seed"),
    ({"seed": 1}, ValueError, "seed"), ({"rounding": "stochastic", "seed": -1}, ValueError, "seed"),
    ({"rounding": "stochastic", "seed": 2**64}, ValueError, "seed"), ({"rounding": "stochastic", "seed": 1.0}, TypeError, "seed"),
    ({"rounding": "stochastic", "seed": True}, TypeError, "seed")])
def test_rounding_is_refused(rng, options, error, said):
    c = case(rng, 1, 2, 1, 1, 4, 4)
    with pytest.raises(error, match=said):
        gdn.gated_delta_net(**c, **options)
    with pytest.raises(error, match=said):
        gdn.causal_conv1d(np.ones((1, 2, 3), f32), np.ones((3, 4), f32), **options)


def test_addresses():
    """Multiples of two bytes, no more."""
    raw = np.zeros(2 * 40 + 3, np.uint8)
    x = raw[2:82].view(f16).reshape(1, 4, 10)
    assert gdn.causal_conv1d(x, np.ones((10, 4), f32))[0].dtype == f16
    with pytest.raises(ValueError, match="x must have an address and strides that are multiples of 2"):
        gdn.causal_conv1d(raw[1:81].view(f16).reshape(1, 4, 10), np.ones((10, 4), f32))


def test_in_c(rng, api):
    c = case(rng, 2, 5, 1, 2, 16, 16)
    narrow = {n: x.astype(f16) for n, x in c.items()}
    out, state = gdn.gated_delta_net(**narrow, head_map="tiled", rounding="stochastic", seed=9)
    call = DeltaCall(narrow, kept := np.empty(state.shape, f16), head_map=1, rounding=1, seed=9)
    call.a.out = tensor(mine := np.empty(out.shape, f16))
    for name in (*NAMES, "out", "state", "state_out"):
        getattr(call.a, name).type = 1
    assert call.with_scratch(api).call(api) == OK and equal(mine, out) and equal(kept, state)
    for spoil, expected in (({"rounding": 2}, VALUE), ({"rounding": -1}, VALUE), ({"rounding": 0, "seed": 9}, VALUE)):
        call.set(**{"rounding": 1, "seed": 9, **spoil})
        call.refused(api, expected, mine, kept)
    call.set(rounding=1, seed=9)
    call.a.q.type = 2
    call.refused(api, TYPE, mine, kept)
