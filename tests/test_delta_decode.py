"""Token by token, in each of the three ways a state is walked: rows along the key index (ggml's order), rows along the
value index (FLA's), and a packed copy for any other strides."""

import itertools

import numpy as np
import pytest
from helpers import Carved, assert_close, case, covering, error, run, same_bits, snapshot_truth, truth

import gdn

GATE = pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channel"])
ORDERS = {"ggml": {}, "fla": {"order": [0, 1, 3, 2]}, "neither": {"gaps": [0, 0, 0, 1]}}
ORDER = pytest.mark.parametrize("order", ORDERS)
LN2 = np.log(2)


def carve(values, order, snapshots=None):
    """A state in this order; with snapshots a blank array for them."""
    layout = dict(ORDERS[order])
    if snapshots is None:
        return Carved(values, **layout)
    layout["order"] = [0, *(1 + i for i in layout.get("order", range(4)))]
    layout["gaps"] = [0, *layout.get("gaps", ())]
    return Carved(shape=(snapshots, *values.shape), **layout)


def decode(c, order, **options):
    """(out, state) of the case token by token, in place, on a state in this order."""
    state, out = carve(c["state"], order), Carved(shape=c["v"].shape)
    run({**c, "state": state.array}, mode="recurrent", out=out.array, state_out=state.array, **options)
    assert out.intact() and state.intact(), "memory around an output was written"
    return out.array, state.array


def check_decode(c, order, head_map=None):
    expected, final, _ = truth(c, head_map)
    out, state = decode(c, order, head_map=head_map)
    assert_close(out, expected, "out")
    assert_close(state, final, "state")


# ---- extents: row lengths of any number of vectors, column counts with any rest ---------------------------------

FACTORS = ((4, 8, 12, 16, 20, 24, 32, 48, 64, 80, 96, 112, 128, 144, 192, 240, 256), (1, 5, 6, 7, 8, 16, 33, 40, 48, 128, 144),
           tuple(ORDERS), (False, True), (1, 2, 3, 4, 5, 9), (1, 2, 4))


@pytest.mark.parametrize("row", covering(FACTORS, 3), ids=lambda row: "-".join(map(str, row)))
def test_extents(rng, row):
    """Values, snapshots, and the same bits whether one worker takes all columns or each a part of them."""
    S_k, S_v, order, per_channel, n_tokens, K = row
    c = case(rng, 1, n_tokens, 1, 1, S_k, S_v, "mix", per_channel)
    expected, _, states = truth(c)
    kept = min(K, n_tokens)
    start = carve(c["state"], order)
    results = []
    for n_threads in (1, 3, 64):
        out, slots = Carved(shape=c["v"].shape), carve(c["state"], order, K)
        run({**c, "state": start.array}, mode="recurrent", snapshots=K, out=out.array, state_out=slots.array, n_threads=n_threads)
        assert out.intact() and slots.intact(), "memory around an output was written"
        assert_close(out.array, expected, "out")
        assert_close(slots.array[:kept], snapshot_truth(c, states, kept), "snapshots")
        results.append((out.array, slots.array))
    assert all(same_bits(out, results[0][0]) and same_bits(slots, results[0][1]) for out, slots in results), "threads differ"
    assert same_bits(start.array, c["state"])


@GATE
@pytest.mark.parametrize("orders", list(itertools.permutations(ORDERS, 2)), ids="-".join)
def test_from_one_order_to_another(rng, per_channel, orders):
    c = case(rng, 2, 6, 1, 2, 48, 64, "mix", per_channel)
    expected, _, states = truth(c, "tiled")
    slots = carve(c["state"], orders[1], 3)
    out, _ = run({**c, "state": carve(c["state"], orders[0]).array}, mode="recurrent", head_map="tiled", snapshots=3,
                 state_out=slots.array)
    assert slots.intact()
    assert_close(out, expected, "out")
    assert_close(slots.array, snapshot_truth(c, states, 3), "snapshots")


@GATE
@ORDER
def test_rows_without_a_place(rng, per_channel, order):
    """Tokens whose state nobody keeps work in scratch, or in the row the last token overwrites."""
    c = case(rng, 1, 6, 1, 2, 48, 64, "-1e-3", per_channel)
    expected, _, states = truth(c, "tiled")
    inputs = {name: c[name] for name in ("q", "k", "v", "g", "beta")}
    for rows_in, rows_out in ((1, [-1, -1, -1]), (1, [-1, 2, -1]), (1, [1, -1, 0]), (1, [2, 1, 0]), (1, [0, -1, 1])):
        start = rng.standard_normal((3, *c["state"].shape[1:])).astype(np.float32)
        start[1] = c["state"][0]
        cache = carve(start, order)
        out = gdn.gated_delta_net_inplace(**inputs, cache=cache.array, rows_in=[rows_in], rows_out=[rows_out], head_map="tiled",
                                          mode="recurrent")
        assert cache.intact()
        assert_close(out, expected, "out")
        for row in range(3):
            if row in rows_out:
                assert_close(cache.array[row], states[5 - rows_out.index(row)][0], f"row {row} of {rows_out}")
            else:
                assert same_bits(cache.array[row], start[row]), f"row {row} of {rows_out} was written"


# ---- one decay: exp(g) S, nothing added ------------------------------------------------------------------------

def decayed(rng, g, order, per_channel, S_k=64, S_v=48):
    """(state, state before) of one token that adds nothing, every head with a g of its own."""
    g = np.asarray(g, np.float32)
    c = case(rng, 1, 1, 1, g.size, S_k, S_v, per_channel=per_channel)
    c["k"][...] = 0
    c["g"][...] = g.reshape(1, 1, -1, 1) if per_channel else g
    return decode(c, order, head_map="tiled")[1], c["state"]


@GATE
@ORDER
def test_every_decay_is_exact_to_the_last_bits(rng, per_channel, order):
    """Around the halves of ln 2, where the decay changes from 1 + part to part alone, and to the ends of the range."""
    edges = [s * (i / 2 * LN2) for i in range(1, 5) for s in (-1, 1)]
    g = np.concatenate([np.linspace(-2, 1, 301), np.linspace(-0.71, -0.33, 77), -np.logspace(-8, 1.9, 60),
                        *([np.nextafter(np.float32(e), np.float32(s * 9)) for s in (-1, 1)] + [e] for e in edges),
                        [-87, -87.3, 20, 60, 80, -np.inf]]).astype(np.float32)
    state, before = decayed(rng, g, order, per_channel, 16, 16)
    wanted = before * np.exp(g.astype(np.float64))[None, :, None, None]
    big = np.abs(wanted) > 1e-36
    assert np.isfinite(state).all()
    assert (np.abs(state - wanted)[big] / np.abs(wanted[big])).max() < 3e-7
    assert (np.abs(state - wanted)[~big] <= np.finfo(np.float32).tiny).all() and not state[0, -1].any()


@GATE
@ORDER
def test_no_decay_leaves_every_bit(rng, per_channel, order):
    state, before = decayed(rng, [0, -0.0, -1e-45, 1e-45, -1e-30], order, per_channel)
    assert same_bits(state, before)


@GATE
@ORDER
def test_decays_out_of_range(rng, per_channel, order):
    """Below the normal numbers a decay is nothing or next to it; above the largest nothing is finite; NaN is NaN."""
    state, _ = decayed(rng, [-88, -89, -100, -103.9, -104, -150, -1e8, -3.4e38, -np.inf], order, per_channel)
    assert (np.abs(state) <= 1e-37).all() and not state[0, 4:].any()
    assert not np.isfinite(decayed(rng, [89, 150, 1e8, 3.4e38, np.inf], order, per_channel)[0]).any()
    assert np.isnan(decayed(rng, [np.nan, -np.nan], order, per_channel)[0]).all()


# ---- thousands of tokens ---------------------------------------------------------------------------------------

@GATE
@ORDER
@pytest.mark.parametrize("g", [0, -1e-4, -3e-4, -1e-3, -1e-2, -0.34, -0.35, -0.7])
def test_slow_decays_do_not_drift(rng, per_channel, order, g):
    c = case(rng, 1, 4096, 1, 1, 16, 16, per_channel=per_channel)
    c["g"][...] = g
    c["beta"][...] = 0.02
    check_decode(c, order)


@GATE
@ORDER
def test_a_decay_alone_does_not_drift(rng, per_channel, order):
    """No key refreshes anything: what a decay is off by would add up 4096 times."""
    c = case(rng, 1, 4096, 1, 1, 16, 16, per_channel=per_channel)
    c["g"][...] = -1e-3
    c["k"][...] = 0
    check_decode(c, order)


@GATE
@ORDER
def test_mixed_decays_of_long_texts(rng, per_channel, order):
    c = case(rng, 1, 3000, 1, 2, 32, 48, "mix", per_channel)
    check_decode(c, order, head_map="tiled")


@GATE
@ORDER
def test_growing_states(rng, per_channel, order):
    c = case(rng, 1, 200, 1, 1, 32, 48, per_channel=per_channel)
    c["g"][...] = rng.uniform(0.1, 0.5, c["g"].shape)
    expected, final, _ = truth(c)
    out, state = decode(c, order)
    assert error(state, final) < 1e-5 and np.abs(final).max() > 1e15
    assert_close(out, expected, "out")


# ---- poison ----------------------------------------------------------------------------------------------------

@GATE
@ORDER
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state"])
def test_poison_stays_in_its_head_and_future(rng, per_channel, order, poison, name):
    """Of a value or a state even in its column."""
    if name == "g" and poison < 0:
        poison = np.float32(3e38)
    c = case(rng, 1, 6, 1, 3, 48, 64, "-1e-3", per_channel)
    clean_out, clean_state = decode(c, order, head_map="tiled")
    bad = {**c, name: c[name].copy()}
    at = {"q": (0, 2, 0, 5), "k": (0, 2, 0, 5), "v": (0, 2, 1, 37), "beta": (0, 2, 1), "state": (0, 1, 37, 5)}
    bad[name][at.get(name, (0, 2, 1, 5)[:c["g"].ndim])] = poison
    out, state = decode(bad, order, head_map="tiled")
    heads = slice(None) if name in ("q", "k") else 1
    columns = slice(37, 38) if name in ("v", "state") else slice(None)
    hit = np.zeros(out.shape, bool)
    hit[:, slice(2, 3) if name == "q" else slice(0 if name == "state" else 2, None), heads, columns] = True
    assert same_bits(out[~hit], clean_out[~hit]), "clean outputs changed"
    assert not np.isfinite(out[hit]).all()
    hit = np.zeros(state.shape, bool)
    if name != "q":
        hit[:, heads, columns] = True
        assert not np.isfinite(state[hit]).all()
    assert same_bits(state[~hit], clean_state[~hit]), "clean states changed"


@GATE
@ORDER
def test_minus_infinity_forgets(rng, per_channel, order):
    """The state before the token leaves no trace."""
    c = case(rng, 1, 9, 1, 1, 48, 64, "-1e-3", per_channel)
    c["g"][0, 5] = -np.inf
    one = decode(c, order)
    other = decode({**c, "state": 3 - c["state"]}, order)
    assert same_bits(one[0][:, 5:], other[0][:, 5:]) and same_bits(one[1], other[1])
    assert not same_bits(one[0][:, :5], other[0][:, :5])
