"""gdn.Tensor against numpy's own answers, and the conversions that every function's arguments go through."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from tensor_tools import SOURCES, Modern, ramp, same_memory

import gdn

# ---------------------------------------------------------------- sources


def test_array_without_ne_maps_to_reversed_axes():
    a = ramp(2, 3, 5)
    t = gdn.Tensor(a)
    assert (t.ne, t.nb, t.type, t.nbytes) == ((5, 3, 2, 1), (4, 20, 60, 120), "f32", 120)
    same_memory(t, a)
    assert repr(t).startswith("gdn.Tensor(ne=(5, 3, 2, 1)")
    assert gdn.Tensor(np.ones((), np.float32)).ne == (1, 1, 1, 1)


@pytest.mark.parametrize("cut", [np.s_[::2], np.s_[:, ::-1], np.s_[::-1, 1:3, ::-2], np.s_[:0], np.s_[1:1, 2]])
def test_strided_arrays_keep_their_strides(cut):
    a = ramp(4, 5, 6)[cut]
    same_memory(gdn.Tensor(a), a)
    same_memory(gdn.Tensor(a.T), a.T)


def test_broadcast_array_is_read_only():
    a = np.broadcast_to(ramp(3), (2, 3))
    t = gdn.Tensor(a)
    assert t.nb[:2] == (4, 0)
    assert not t.numpy().flags.writeable
    same_memory(t, a)


@pytest.mark.parametrize("name", SOURCES)
def test_sources(name):
    data = SOURCES[name]()
    np.testing.assert_array_equal(gdn.Tensor(data).numpy().ravel(), ramp(6))
    t = gdn.Tensor(data, (2, 2), (4, 8), offset=8)
    np.testing.assert_array_equal(t.numpy()[0, 0], ramp(6)[2:].reshape(2, 2))
    assert gdn.Tensor(data, (0,), offset=24).nbytes == 0
    for ne, nb, offset in [((7,), None, 0), ((6,), None, 4), ((1,), None, -4), ((2,), (24,), 0), ((2,), (-4,), 0),
                           ((0,), None, 28)]:
        with pytest.raises(ValueError, match="memory"):
            gdn.Tensor(data, ne, nb, offset=offset)


@pytest.mark.parametrize("name", [n for n in SOURCES if n not in ("bytes",)])
def test_writes_arrive(name):
    data = SOURCES[name]()
    gdn.Tensor(data).numpy()[..., 3] = 77
    assert gdn.Tensor(data).numpy()[0, 0, 0, 3] == 77


def test_types():
    for type_, dtype in [("f32", "f4"), ("f16", "f2"), ("i32", "i4"), ("bf16", "u2")]:
        a = np.arange(12).astype(dtype).reshape(3, 4)
        t = gdn.Tensor(a, type=type_)
        assert t.type == type_ and t.numpy().dtype == np.dtype(dtype) and np.asarray(memoryview(t)).dtype == dtype
        same_memory(t, a)
        assert t.transpose().cont().type == type_
        np.testing.assert_array_equal(t.transpose().cont().numpy()[0, 0], a.T)
        assert gdn.Tensor(t, type=type_).ne == t.ne


@pytest.mark.parametrize("data, type_, said", [
    (np.zeros(4), "f32", "float64"), (np.zeros(4, "i4"), "f32", "int32"), (np.zeros(4, "f4"), "i32", "float32"),
    (np.zeros(4, ">f4"), "f32", ">f4"), (np.zeros(4, "f2"), "bf16", "float16"), (np.zeros(4, "u2"), "f16", "uint16"),
    (np.zeros(4, "c8"), "f32", "Zf"), (np.zeros(4, "u4"), "i32", "uint32"), (np.zeros(4, "f4,i4"), "f32", "T{"),
    (ctypes.c_void_p(0), "f32", "pointer"), (Modern(np.zeros(4)), "f32", "float64"),
    (Modern(np.zeros(4, bool)), "f32", "bool"), (np.zeros(4, "M8[s]"), "f32", "buffer")])
def test_other_element_types_are_refused(data, type_, said):
    for ne in (None, (1,)):
        with pytest.raises(TypeError, match="data.*") as error:
            gdn.Tensor(data, ne, type=type_)
        assert said in str(error.value)


def test_pointer_is_not_its_own_target():
    pointer = ctypes.pointer(ctypes.c_float(1))
    with pytest.raises(TypeError, match="data"):
        gdn.Tensor(pointer, (1,))


@pytest.mark.parametrize("data", [None, [1.0, 2.0], (1.0,), 1.5, "text", np.float32(1), True, object(), {}])
def test_objects_without_memory(data):
    with pytest.raises(TypeError, match="data"):
        gdn.Tensor(data, (1,))


def test_address():
    a = ramp(3, 4)
    address = a.ctypes.data
    for value in (address, np.uint64(address)):
        t = gdn.Tensor(value, (4, 3), owner=a)
        same_memory(t, a)
        same_memory(gdn.Tensor(type(value)(address + 4), (3, 3), (4, 16)), a[:, 1:])
        same_memory(gdn.Tensor(address + 44, (12,), (-4,)), a.ravel()[::-1])
    with pytest.raises(ValueError, match="ne"):
        gdn.Tensor(address)
    for bad, ne in [(0, (1,)), (-8, (1,)), (1 << 64, (1,)), ((1 << 64) - 4, (2,))]:
        with pytest.raises(ValueError, match="address"):
            gdn.Tensor(bad, ne)
    with pytest.raises(ValueError, match="address"):
        gdn.Tensor(64, (2,), (-128,))
    assert gdn.Tensor(0, (0,)).numpy().size == 0


@pytest.mark.parametrize("error, arguments", [(ValueError, a) for a in [
    dict(ne=(-1,)), dict(ne=(2, -3)), dict(ne=(1,) * 5), dict(ne=(1 << 64,)), dict(ne=(1 << 62, 4)),
    dict(ne=(1 << 40, 1 << 40)), dict(ne=(1 << 31,) * 4), dict(ne=(2,), nb=(1 << 62,)), dict(ne=(3,), nb=(1 << 62,)),
    dict(ne=(2,), nb=(-(1 << 63),)), dict(ne=(1 << 32, 1 << 32), nb=(0, 0)), dict(ne=(2,), nb=()),
    dict(ne=(2,), nb=(4, 8)), dict(ne=(2, 2), nb=(4,)), dict(nb=(4,)), dict(type="f64"), dict(type=""), dict(type=None),
    dict(offset=1 << 70), dict(offset=-(1 << 70)), dict(offset=4),
    dict(ne=(1,), offset=65)]] + [(TypeError, a) for a in [
        dict(ne=3), dict(ne="12"), dict(ne=(1.0,)), dict(ne=(None,)), dict(ne=(2,), nb=(4.0,)), dict(type=7),
        dict(offset=1.0), dict(bogus=1)]])
def test_hostile_arguments(error, arguments):
    with pytest.raises(error):
        gdn.Tensor(ramp(16), **arguments)
    with pytest.raises(error):
        gdn.Tensor(gdn.Tensor(ramp(16)), **arguments)


def test_too_many_axes():
    with pytest.raises(ValueError, match="axes"):
        gdn.Tensor(np.zeros((1,) * 5, np.float32))
    with pytest.raises(ValueError, match="axes"):
        gdn.Tensor(np.zeros((1,) * 9, np.float32))


def test_gaps_need_explicit_strides():
    a = ramp(4, 6)[:, ::2]
    with pytest.raises(ValueError, match="nb"):
        gdn.Tensor(a, (3, 4))
    same_memory(gdn.Tensor(a, (3, 4), (8, 24)), a)
    with pytest.raises(ValueError, match="nb"):
        gdn.Tensor(ramp(8).view(np.uint8)[::2])
    empty = gdn.Tensor(ramp(4, 5, 6)).slice(1, 0, 0)
    assert gdn.Tensor(empty, (0, 5)).ne == (0, 5, 1, 1)                            # nothing lies in gaps
    with pytest.raises(ValueError, match="multiple"):
        gdn.Tensor(bytearray(7))


def test_memory_ends_where_the_array_ends():
    a = ramp(8)
    part = gdn.Tensor(a[2:6])
    with pytest.raises(ValueError, match="memory"):
        part.view((4,), offset=4)
    with pytest.raises(ValueError, match="memory"):
        part.view((1,), offset=-4)
    backwards = gdn.Tensor(a[5:1:-1])          # starts at its memory's highest element
    same_memory(backwards.view((4,), offset=-12), a[2:6])


# ---------------------------------------------------------------- view operations


def test_permute_sends_axis_i_to_position_a_i():
    t = gdn.Tensor(ramp(5, 4, 3, 2))           # ne 2, 3, 4, 5
    p = t.permute(2, 0, 3, 1)
    assert p.ne == (3, 5, 2, 4)
    assert p.nb == (t.nb[1], t.nb[3], t.nb[0], t.nb[2])
    assert t.transpose().ne == (3, 2, 4, 5)
    same_memory(p.permute(1, 3, 0, 2), t.numpy())         # the inverse
    for bad in [(0, 1, 2, 2), (0, 1, 2, 4), (-1, 0, 1, 2)]:
        with pytest.raises(ValueError, match="permute"):
            t.permute(*bad)
    with pytest.raises(TypeError):
        t.permute(0, 1, 2, "3")


def test_reshape():
    t = gdn.Tensor(ramp(4, 6))
    same_memory(t.reshape((3, 8)), t.numpy().reshape(8, 3))
    same_memory(t.reshape((24,)), t.numpy().reshape(24))
    for ne in [(5,), (-1,), (24, 0), (1 << 62, 4, 6), (1 << 32, 1 << 32, 24)]:
        with pytest.raises(ValueError):
            t.reshape(ne)
    with pytest.raises(ValueError, match="contiguous"):
        t.transpose().reshape((24,))
    with pytest.raises(ValueError, match="contiguous"):
        t.slice(0, 0, 3).reshape((12,))
    assert t.slice(1, 2, 2).reshape((0, 7)).ne == (0, 7, 1, 1)


def test_is_contiguous():
    t = gdn.Tensor(ramp(4, 6))
    assert t.is_contiguous() and not t.transpose().is_contiguous()
    assert t.slice(1, 1, 3).is_contiguous() and not t.slice(0, 1, 3).is_contiguous()
    assert t.view((6, 1, 4), (4, 999, 24)).is_contiguous()          # a unit axis has no stride
    assert t.slice(0, 2, 2).is_contiguous()
    assert not t.view((6,), (-4,), 20).is_contiguous()


def test_slice_bounds():
    t = gdn.Tensor(ramp(4, 6))
    for dim, start, stop in [(0, -1, 2), (0, 0, 7), (0, 3, 2), (4, 0, 1), (-1, 0, 1), (1, 5, 5), (0, 0, 1 << 80)]:
        with pytest.raises(ValueError, match="slice"):
            t.slice(dim, start, stop)
    with pytest.raises(TypeError):
        t.slice(0, None, 2)
    assert t.slice(1, 4, 4).numpy().shape == (1, 1, 0, 6)


def test_nothing_is_cut_from_nothing():
    """Where there are no elements, no address leaves the memory."""
    assert gdn.Tensor(bytearray(), (0, 4), (4, 24)).slice(1, 3, 4).ne == (0, 1, 1, 1)


def test_cont_is_a_copy_in_new_memory():
    a = ramp(3, 4)
    t = gdn.Tensor(a)
    c = t.cont()
    assert c.data != t.data and c.is_contiguous()
    c.numpy()[...] = 0
    np.testing.assert_array_equal(a, ramp(3, 4))
    assert gdn.Tensor(a.tobytes()).cont().numpy().flags.writeable


def model_view(flat, element, ne, nb):
    """numpy's answer to a view: element is the index into flat of the first element."""
    if 0 in ne:
        return np.zeros(ne[::-1], np.float32)
    return as_strided(flat[element:], ne[::-1], nb[::-1])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_chains_of_views_equal_numpy(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=4, max_size=4))
    flat = ramp(int(np.prod(shape)) + 7)
    first = data.draw(st.integers(0, 7))
    want = flat[first:first + int(np.prod(shape))].reshape(shape)
    t = gdn.Tensor(flat.view(np.uint8), shape[::-1], offset=4 * first)
    ops = st.sampled_from(["permute", "transpose", "slice", "view", "reshape", "cont"])
    for op in data.draw(st.lists(ops, max_size=6)):
        if op == "permute":
            axes = data.draw(st.permutations(range(4)))
            t = t.permute(*axes)
            source = [axes.index(position) for position in range(4)]           # the axis that lands at each position
            want = want.transpose([3 - source[3 - axis] for axis in range(4)])
        elif op == "transpose":
            t, want = t.transpose(), want.swapaxes(2, 3)
        elif op == "slice":
            dim = data.draw(st.integers(0, 3))
            start = data.draw(st.integers(0, t.ne[dim]))
            stop = data.draw(st.integers(start, t.ne[dim]))
            t = t.slice(dim, start, stop)
            want = want[(slice(None),) * (3 - dim) + (slice(start, stop),)]
        elif op == "view":
            element = data.draw(st.integers(0, flat.size - 1))
            ne = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
            nb = [4 * s for s in data.draw(st.lists(st.integers(-6, 6), min_size=len(ne), max_size=len(ne)))]
            reach = [(n - 1) * b // 4 for n, b in zip(ne, nb, strict=True)]
            low, high = element + sum(r for r in reach if r < 0), element + sum(r for r in reach if r > 0)
            offset = flat.ctypes.data + 4 * element - t.data
            inside = low >= 0 and high < flat.size
            if 0 not in ne and not inside:
                with pytest.raises(ValueError, match="memory"):
                    t.view(ne, nb, offset)
                continue
            t, want = t.view(ne, nb, offset), model_view(flat, element, ne, nb)
            want = want[(None,) * (4 - want.ndim)]
        elif op == "reshape":
            ne = data.draw(st.permutations([want.size, 1, 1, 1]))
            if not t.is_contiguous():
                with pytest.raises(ValueError, match="contiguous"):
                    t.reshape(ne)
                continue
            t, want = t.reshape(ne), want.reshape(ne[::-1])
        else:
            copy = t.cont()
            np.testing.assert_array_equal(copy.numpy(), want)
            assert copy.is_contiguous()
            continue
        assert t.is_contiguous() == want.flags.c_contiguous
        assert t.nbytes == want.nbytes
        same_memory(t, want)
        np.testing.assert_array_equal(np.asarray(memoryview(t)), want)
