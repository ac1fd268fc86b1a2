"""Any memory: permuted, padded, reversed, broadcast, unaligned; both state orders; arrays, Tensors, buffers, DLPack."""

import numpy as np
import pytest
from helpers import (
    GATES,
    Carved,
    assert_close,
    broadcastable,
    case,
    head_map,
    random_layout,
    run,
    same_bits,
    snapshot_truth,
    truth,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import gdn

NAMES = ("q", "k", "v", "g", "beta", "state")


@st.composite
def layouts(draw, ndim, output=False):
    axes = list(range(ndim))
    return {
        "order": draw(st.permutations(axes)),
        "gaps": draw(st.lists(st.sampled_from([0, 0, 0, 1, 3, 16]), min_size=ndim, max_size=ndim)),
        "flips": draw(st.lists(st.sampled_from(axes), unique=True, max_size=ndim)),
        "zeros": [] if output else draw(st.sampled_from([[]] * 6 + [[a] for a in axes])),
        "lead": draw(st.integers(0, 40)),
    }


@settings(max_examples=250)
@given(st.data())
def test_any_strides_on_every_argument(data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    H_k = draw(st.integers(1, 3))
    c = case(rng, draw(st.integers(0, 3)), draw(st.integers(0, 70)), H_k, H_k * draw(st.integers(1, 3)),
             draw(st.integers(1, 40)), draw(st.integers(1, 70)), draw(st.sampled_from(GATES)), draw(st.booleans()),
             draw(st.booleans()))
    if draw(st.booleans()):
        c["beta"] = c["beta"][..., None]
    if c["g"].ndim == 3 and draw(st.booleans()):
        c["g"] = c["g"][..., None]
    carved = {}
    for name, x in list(c.items()):
        if x is not None:
            layout = draw(layouts(x.ndim))
            c[name] = broadcastable(name, x, layout)
            carved[name] = Carved(c[name], **layout)
    given_ = {name: carved[name].array if name in carved else None for name in NAMES}
    options = {"head_map": head_map(c, draw(st.integers(0, 1)))}
    expected, final, states = truth(c, **options)
    K = draw(st.sampled_from([None, None, 1, 2, 5]))
    shape = final.shape if K is None else (min(K, max(1, c["v"].shape[1])) + draw(st.integers(0, 1)), *final.shape)
    in_place = K is None and c["state"] is not None and not carved["state"].array.strides.count(0) and draw(
        st.booleans())
    state_out = carved["state"] if in_place else Carved(shape=shape, **draw(layouts(len(shape), True)))
    over_v = 0 not in carved["v"].array.strides and draw(st.booleans())
    out = carved["v"] if over_v else Carved(shape=c["v"].shape, **draw(layouts(4, True)))
    before = state_out.array.copy()
    got = run(given_, **options, mode=draw(st.sampled_from(["auto", "recurrent", "chunked"])), snapshots=K,
              out=out.array, state_out=state_out.array, n_threads=draw(st.integers(1, 3)))
    assert got[0] is out.array and got[1] is state_out.array
    assert all(x.intact() for x in (out, state_out, *carved.values()))
    for name, x in carved.items():
        assert x is out or x is state_out or same_bits(x.array, c[name])
    assert_close(out.array, expected, "out")
    if K is None:
        assert_close(state_out.array, final, "state")
    else:
        kept = max(1, min(K, c["v"].shape[1]))
        slots = snapshot_truth(c, states, kept)
        # the call's states together: one slot of a tiny head may be a single number that cancelled
        assert_close(state_out.array[:kept], slots, "snapshots")
        assert same_bits(state_out.array[kept:], before[kept:]), "a slot that does not exist was written"


# ---- each argument in turn, with a reason a user would have ----------------------------------------------------

def transposed(x):
    return Carved(x, order=list(reversed(range(x.ndim)))).array


def reversed_(x):
    return Carved(x, flips=range(x.ndim)).array


def stepped(x):
    return Carved(x, gaps=[1] * x.ndim).array


def heads_first(x):
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def fused(x):
    """A slice of a wider row, as projections hand them out."""
    flat = x.reshape(*x.shape[:2], -1)
    wide = np.full((*flat.shape[:2], 2 * flat.shape[2] + 3), np.nan, np.float32)
    part = wide[..., 3:3 + flat.shape[2]]
    part[...] = flat
    out = np.lib.stride_tricks.as_strided(part, x.shape, (*part.strides[:2], *x.strides[2:]))
    assert np.shares_memory(out, wide)
    return out


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def unaligned(x):
    """At byte 4 of a 64-byte line."""
    raw = np.empty(x.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 4
    y = raw[start:start + x.nbytes].view(np.float32).reshape(x.shape)
    y[...] = x
    return y


LAYOUTS = (transposed, reversed_, stepped, heads_first, fused, read_only, unaligned)


@pytest.mark.parametrize("mode", ["recurrent", "chunked"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_each_argument_in_turn(rng, mode, per_channel, name):
    c = case(rng, 2, 35, 2, 4, 32, 48, "mix", per_channel)
    expected, final, _ = truth(c, "tiled")
    for layout in LAYOUTS:
        out, state = run({**c, name: layout(c[name])}, head_map="tiled", mode=mode)
        assert_close(out, expected, f"out, {name} {layout.__name__}")
        assert_close(state, final, f"state, {name} {layout.__name__}")


@pytest.mark.parametrize("mode", ["recurrent", "chunked"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_each_argument_broadcast(rng, mode, per_channel, name):
    whole = case(rng, 2, 35, 2, 4, 32, 48, "mix", per_channel)
    for axis in range(whole[name].ndim):
        x = whole[name].take([0], axis)
        c = {**whole, name: np.broadcast_to(x, whole[name].shape)}
        if name == "k" and axis == 3:
            c["k"] = np.broadcast_to(np.float32(32**-0.5), c["k"].shape)
        expected, final, _ = truth(c, "tiled")
        out, state = run(c, head_map="tiled", mode=mode)
        assert_close(out, expected, f"out, {name} broadcast along {axis}")
        assert_close(state, final, f"state, {name} broadcast along {axis}")


STATE_LAYOUTS = {
    "ggml": {},
    "FLA": {"order": [0, 1, 3, 2]},
    "heads last": {"order": [0, 2, 3, 1]},
    "sequences last": {"order": [1, 2, 3, 0]},
    "padded keys": {"gaps": [0, 0, 5, 0]},
    "padded FLA": {"order": [0, 1, 3, 2], "gaps": [0, 0, 0, 5]},
    "stepped keys": {"gaps": [0, 0, 0, 1]},
    "reversed": {"flips": [0, 1, 2, 3]},
    "odd start": {"lead": 1},
}


@pytest.mark.parametrize("n_tokens", [1, 3, 40])
@pytest.mark.parametrize("sizes", [(32, 64), (20, 33), (128, 16)])
@pytest.mark.parametrize("source", STATE_LAYOUTS)
def test_state_orders(rng, n_tokens, sizes, source):
    c = case(rng, 2, n_tokens, 1, 2, *sizes, "mix", sizes[0] == 20)
    expected, final, states = truth(c, "tiled")
    state = Carved(c["state"], **STATE_LAYOUTS[source])
    for target in STATE_LAYOUTS:
        to = Carved(shape=c["state"].shape, **STATE_LAYOUTS[target])
        out, _ = run({**c, "state": state.array}, head_map="tiled", state_out=to.array)
        assert_close(out, expected, f"out, to {target}")
        assert_close(to.array, final, f"state, to {target}")
        assert to.intact() and state.intact() and same_bits(state.array, c["state"])
    out, same = run({**c, "state": state.array}, head_map="tiled", state_out=state.array)
    assert same is state.array and state.intact()
    assert_close(out, expected, "out, in place")
    assert_close(state.array, final, "state, in place")


def test_snapshots_in_fla_order_and_as_planes_of_a_cache(rng):
    c = case(rng, 3, 6, 2, 2, 16, 32)
    expected, _, states = truth(c)
    slots = snapshot_truth(c, states, 4)
    fla = np.full((4, 3, 2, 16, 32), np.nan, np.float32)
    by_sequence = np.full((3, 4, 2, 32, 16), np.nan, np.float32)       # a sequence's slots side by side
    for target in (fla.swapaxes(-1, -2), by_sequence.swapaxes(0, 1), by_sequence.swapaxes(0, 1)[::-1, ::-1]):
        target[...] = np.nan
        out, state = run(c, snapshots=4, state_out=target)
        assert state is target
        assert_close(out, expected, "out")
        for s in range(4):
            assert_close(target[s], slots[s], f"snapshot {s}")


# ---- objects other than arrays ---------------------------------------------------------------------------------

class OnlyDLPack:
    """What a framework's tensor is to us: the protocol and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def as_torch(x):
    import torch
    return torch.from_numpy(x)


def as_ggml_tensor(x):
    return gdn.Tensor(x)


def as_address(x):
    ne = list(x.shape[::-1])
    nb = list(x.strides[::-1])
    return gdn.Tensor(x.ctypes.data, ne, nb, owner=x)


def as_ctypes(x):
    return np.ctypeslib.as_ctypes(x)


OBJECTS = {"memoryview": memoryview, "dlpack": OnlyDLPack, "tensor": as_ggml_tensor, "address": as_address,
           "ctypes": as_ctypes, "torch": as_torch}


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", OBJECTS)
def test_objects(rng, kind, per_channel):
    c = case(rng, 2, 21, 2, 4, 16, 24, "mix", per_channel)
    expected, final, _ = truth(c, "interleaved")
    wrap = OBJECTS[kind]
    out, state = np.empty_like(c["v"]), np.empty_like(c["state"])
    given_out, given_state = wrap(out), wrap(state)
    got = run({n: wrap(x) for n, x in c.items()}, head_map="interleaved", out=given_out, state_out=given_state)
    assert got[0] is given_out and got[1] is given_state
    assert_close(out, expected, "out")
    assert_close(state, final, "state")
    cache = np.zeros((5, *state.shape[1:]), np.float32)
    cache[[4, 2]] = c["state"]
    inputs = {n: wrap(c[n]) for n in ("q", "k", "v", "g", "beta")}
    out[...] = np.nan
    assert gdn.gated_delta_net_inplace(**inputs, cache=wrap(cache), rows_in=[4, 2], head_map="interleaved",
                                       out=given_out) is given_out
    assert_close(out, expected, "out")
    assert_close(cache[[4, 2]], final, "cache")


def test_snapshots_into_a_tensor(rng):
    """A Tensor has four axes: slots and sequences share the last, slot-major."""
    c = case(rng, 2, 5, 2, 2, 8, 8)
    _, _, states = truth(c)
    x = np.full((3 * 2, 2, 8, 8), np.nan, np.float32)
    state_out = gdn.Tensor(x)
    assert run(c, snapshots=3, state_out=state_out)[1] is state_out
    assert_close(x.reshape(3, 2, 2, 8, 8), snapshot_truth(c, states, 3), "snapshots")


def test_interleaved_outputs_do_not_overlap(rng):
    """Slices that alternate in one buffer share no element: exact, not by address range."""
    c = case(rng, 1, 9, 1, 1, 4, 8)
    expected, final, _ = truth(c)
    buffer = np.full((1, 9, 1, 16), np.nan, np.float32)
    buffer[..., ::2] = c["v"]
    out, _ = run({**c, "v": buffer[..., ::2]}, out=buffer[..., 1::2])
    assert_close(out, expected, "out")
    assert same_bits(buffer[..., ::2], c["v"])


def test_random_layouts_reach_every_kind():
    """The generator of the grid draws what it promises."""
    rng = np.random.default_rng(0)
    drawn = [random_layout(rng, 4) for _ in range(200)]
    assert any(x["flips"] for x in drawn) and any(x["zeros"] for x in drawn) and any(any(x["gaps"]) for x in drawn)
    assert len({tuple(x["order"]) for x in drawn}) == 24
