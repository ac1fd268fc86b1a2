"""gdn.Tensor against numpy's own answers, and the conversions that every function's arguments go through."""

import array
import ctypes
import gc
import hashlib
import io
import mmap
import sys
import weakref
from functools import partial

import numpy as np
import pytest
from helpers import optional
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import gdn
from gdn import _tensor

# ---------------------------------------------------------------- the C functions, through the module's own table


class CTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("type", ctypes.c_int32), ("ne", ctypes.c_int64 * 4),
                ("nb", ctypes.c_int64 * 4)]


def c_function(name, result, *arguments):
    capsule = _tensor.__pyx_capi__[name]
    get_name, get = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.PYFUNCTYPE(result, *arguments)(get(capsule, get_name(capsule)))


class FitOptions(ctypes.Structure):       # Cython's optional arguments: how many are given, then each
    _fields_ = [("n", ctypes.c_int), ("axes", ctypes.py_object)]


obj = ctypes.py_object
c_as_array = c_function("as_array", obj, obj, obj, ctypes.c_int)
c_fit = c_function("fit", obj, obj, obj, ctypes.c_int, ctypes.c_int, ctypes.POINTER(FitOptions))
c_to_c = c_function("to_c", ctypes.c_int, obj, ctypes.POINTER(CTensor))
c_check_overlap = c_function("check_overlap", ctypes.c_int, obj, obj, obj)


def as_array(data, writable=False):
    return c_as_array(data, "q", writable)


def fit(data, ndim, axes=None, writable=False):
    return c_fit(data, "q", ndim, writable, None if axes is None else ctypes.byref(FitOptions(1, axes)))


def to_c(data):
    result = CTensor()
    c_to_c(data, ctypes.byref(result))
    return result


def ramp(*shape):
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


def same_memory(tensor, expected):
    """The tensor is the very view that expected (up to 4 axes, numpy order) is."""
    got = tensor.numpy()
    want = expected[(None,) * (4 - expected.ndim)]
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)
    if want.size:
        assert tensor.data == want.__array_interface__["data"][0] == got.__array_interface__["data"][0]
        assert all(n == 1 or a == b for n, a, b in zip(got.shape, got.strides, want.strides, strict=True))


class Legacy:
    """A DLPack producer from before version 1.0."""

    def __init__(self, data):
        self.data = data

    def __dlpack__(self, stream=None):
        return self.data.__dlpack__()

    def __dlpack_device__(self):
        return (1, 0)


class Modern(Legacy):
    device = (1, 0)

    def __dlpack__(self, **options):
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


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


SOURCES = {
    "bytearray": lambda: bytearray(ramp(6).tobytes()),
    "bytes": lambda: ramp(6).tobytes(),
    "memoryview": lambda: memoryview(ramp(6)),
    "memoryview of bytes": lambda: memoryview(bytearray(ramp(6).tobytes())),
    "array.array": lambda: array.array("f", range(6)),
    "ctypes floats": lambda: (ctypes.c_float * 6)(*range(6)),
    "ctypes bytes": lambda: (ctypes.c_ubyte * 24).from_buffer_copy(ramp(6)),
    "ctypes chars": lambda: ctypes.create_string_buffer(ramp(6).tobytes(), 24),
    "numpy": lambda: ramp(6),
    "numpy bytes": lambda: ramp(6).view(np.uint8),
    "DLPack": lambda: Modern(ramp(6)),
    "DLPack before 1.0": lambda: Legacy(ramp(6)),
    "DLPack bytes": lambda: Modern(ramp(6).view(np.uint8)),
    "Tensor": lambda: gdn.Tensor(ramp(6)),
}


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


# ---------------------------------------------------------------- life and death


class Block(bytearray):
    """Memory that can be watched."""


def test_views_keep_the_memory_alive():
    block = Block(ramp(12).tobytes())
    alive = weakref.ref(block)
    t = gdn.Tensor(block)
    views = [t.view((3, 4)).transpose().slice(0, 1, 3), memoryview(t), np.from_dlpack(t), t.numpy(),
             np.asarray(t)[..., ::2], t.__dlpack__(), t.__dlpack__(max_version=(1, 0)), gdn.Tensor(t, owner=[]),
             as_array(t), fit(t, 1)]
    del block, t
    while views:
        gc.collect()
        assert alive() is not None
        assert bytes(alive()[4:8]) == np.float32(1).tobytes()
        view = views.pop(0)
        if isinstance(view, gdn.Tensor) and view.ne[0] == 2:
            np.testing.assert_array_equal(view.numpy()[0, 0], ramp(4, 3).T[:, 1:3])
        del view
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("wrap", [Modern, Legacy])
def test_dlpack_memory_is_sourceback(wrap):
    a = ramp(12).view()
    base = a.base
    del a
    before = sys.getrefcount(base)
    t = gdn.Tensor(wrap(base))
    held = t.slice(0, 1, 3).numpy()
    del t
    assert sys.getrefcount(base) == before + 1
    np.testing.assert_array_equal(held.ravel(), [1, 2])
    del held
    assert sys.getrefcount(base) == before


def test_owner_of_an_address_lives_as_long_as_the_last_view():
    class Owner:
        pass
    owner, a = Owner(), ramp(4)
    gone = []
    weakref.finalize(owner, gone.append, True)
    t = gdn.Tensor(a.ctypes.data, (4,), owner=owner)
    view = t.slice(0, 1, 2).numpy()
    owner.cycle = t
    del owner, t
    gc.collect()
    assert not gone
    del view
    gc.collect()
    assert gone


def test_a_buffer_in_use_cannot_be_resized():
    block = bytearray(16)
    t = gdn.Tensor(block).slice(0, 0, 1)
    with pytest.raises(BufferError):
        block.append(1)
    del t
    block.append(1)


def test_refusals_hold_nothing():
    block = bytearray(18)
    for arguments in [dict(), dict(ne=(5,)), dict(ne=(-1,)), dict(ne=(4,), offset=4), dict(ne=(4,), nb=())]:
        with pytest.raises(ValueError):
            gdn.Tensor(block, **arguments)
    with pytest.raises(TypeError):
        as_array(block)
    t = gdn.Tensor(block, (4,), owner=block)
    refusals = [(t.view, (5,), ()), (t.slice, 0, 1, 9), (t.reshape, (5,)), (t.permute, 0, 0, 0, 0), (fit, t, 0),
                (hashlib.md5, t.view((2, 2)).transpose()), (partial(t.__dlpack__, stream=1),)]
    before = sys.getrefcount(t)
    for refused, *arguments in refusals:
        with pytest.raises((ValueError, BufferError, TypeError)):
            refused(*arguments)
    assert sys.getrefcount(t) == before
    del t, refused, arguments, refusals
    gc.collect()
    block.append(1)


def test_tensors_can_be_weakly_referenced_but_not_pickled():
    t = gdn.Tensor(ramp(4))
    assert weakref.ref(t)() is t
    with pytest.raises(TypeError):
        t.__reduce__()
    with pytest.raises(TypeError):
        gdn.Tensor.__new__(gdn.Tensor)


# ---------------------------------------------------------------- read-only, unaligned, huge


def read_only(a):
    a.flags.writeable = False
    return a


@pytest.mark.parametrize("data", [
    ramp(4).tobytes(), read_only(ramp(4)), memoryview(ramp(4)).toreadonly(), Modern(gdn.Tensor(read_only(ramp(4))))],
    ids=["bytes", "array", "memoryview", "DLPack"])
def test_read_only_data(data):
    t = gdn.Tensor(data).view((2, 2)).transpose()
    a = t.numpy()
    assert not a.flags.writeable
    with pytest.raises(ValueError):
        a.flags.writeable = True
    with pytest.raises(ValueError):
        a[...] = 1
    assert memoryview(t).readonly
    with pytest.raises(TypeError):
        (ctypes.c_float * 4).from_buffer(t.permute(1, 0, 2, 3))
    with pytest.raises(BufferError, match="read-only"):
        t.__dlpack__()
    assert "read-only" in repr(t)
    assert not gdn.Tensor(Modern(t)).numpy().flags.writeable
    assert gdn.Tensor(Legacy(t.cont())).numpy().flags.writeable
    assert t.__dlpack__(copy=True)
    for source in (data, t) if not isinstance(data, bytes) else (t,):
        as_array(source)
        with pytest.raises(ValueError, match="q .*read-only"):
            as_array(source, writable=True)


def test_unaligned_memory_can_be_viewed_but_not_computed_on():
    block = bytearray(64)
    block[1:17] = ramp(4).tobytes()
    t = gdn.Tensor(block, (4,), offset=1)
    np.testing.assert_array_equal(t.numpy().ravel(), ramp(4))
    np.testing.assert_array_equal(t.cont().numpy().ravel(), ramp(4))
    assert not t.numpy().flags.aligned
    with pytest.raises(ValueError, match="q must have an address"):
        as_array(t)
    with pytest.raises(BufferError, match="address"):
        t.__dlpack__()
    four = gdn.Tensor(block, (4,), offset=4)
    assert as_array(four).ctypes.data == four.data
    for a in (np.frombuffer(bytes(17), np.uint8)[1:].view(np.float32), np.zeros(4, "f4,u1")["f0"]):
        with pytest.raises(ValueError, match="q must have an address"):
            as_array(a)
    with pytest.raises(BufferError, match="strides"):
        gdn.Tensor(block, (4,), (6,)).__dlpack__()
    with pytest.raises(ValueError, match="strides"):
        as_array(gdn.Tensor(block, (4,), (6,)))
    as_array(gdn.Tensor(block, (1,), (6,)))               # a stride nobody takes
    assert np.from_dlpack(gdn.Tensor(block, (1,), (6,))).size == 1


def test_beyond_two_to_the_31_elements(tmp_path):
    n = (1 << 31) + 3
    with open(tmp_path / "sparse", "w+b") as file:
        file.truncate(4 * n)
        memory = mmap.mmap(file.fileno(), 4 * n)
    t = gdn.Tensor(memory)
    assert t.ne == (n, 1, 1, 1) and t.nbytes == 4 * n
    memory[4 * (n - 1):] = np.float32(5).tobytes()
    assert t.numpy()[0, 0, 0, n - 1] == 5
    assert t.slice(0, n - 1, n).numpy().item() == 5
    rows = t.view((1 << 16, (1 << 15)), offset=12).slice(1, (1 << 15) - 1, 1 << 15)
    assert rows.numpy()[0, 0, 0, -1] == 5 and rows.data == t.data + 4 * (n - (1 << 16))
    assert t.view((2,), (4 * (n - 1),)).numpy()[0, 0, 0].tolist() == [0, 5]
    assert np.from_dlpack(t)[0, 0, 0, -1] == 5 and memoryview(t)[0, 0, 0, n - 1] == 5
    c = to_c(fit(t, 1))
    assert (c.ne[0], c.nb[1]) == (n, 4 * n)
    with pytest.raises(ValueError, match="memory"):
        t.view((n + 1,))


# ---------------------------------------------------------------- array, buffer and DLPack out


def test_array_protocol():
    t = gdn.Tensor(ramp(2, 3))
    assert np.shares_memory(np.asarray(t), t.numpy())
    assert np.shares_memory(t.__array__(), t.numpy())
    assert np.shares_memory(t.__array__(np.float32, copy=False), t.numpy())
    assert not np.shares_memory(t.__array__(copy=True), t.numpy())
    assert t.__array__(np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        t.__array__(np.float64, copy=False)


def test_buffer_requests():
    t = gdn.Tensor(ramp(2, 3))
    view = memoryview(t)
    assert (view.shape, view.strides, view.format, view.readonly) == ((1, 1, 2, 3), (24, 24, 12, 4), "f", False)
    assert bytes(t) == ramp(2, 3).tobytes()
    assert bytes(t.transpose()) == ramp(2, 3).T.tobytes()
    (ctypes.c_float * 6).from_buffer(t)[5] = 50
    assert t.numpy()[0, 0, 1, 2] == 50
    assert hashlib.md5(t).digest() == hashlib.md5(bytes(t)).digest()          # a plain request for bytes
    with pytest.raises(BufferError, match="contiguous"):
        hashlib.md5(t.transpose())
    assert io.BytesIO(bytes(24)).readinto(t) == 24 and not t.numpy().any()


def test_dlpack_out():
    a = ramp(4, 5, 6)[::-1, 1:, ::2]
    t = gdn.Tensor(a)
    assert t.__dlpack_device__() == (1, 0)
    for source in (t, Legacy(t)):
        back = np.from_dlpack(source)
        np.testing.assert_array_equal(back[0], a)
        assert np.shares_memory(back, a)
        same_memory(gdn.Tensor(source), a)
    assert '"dltensor"' in repr(t.__dlpack__()) and '"dltensor"' in repr(t.__dlpack__(max_version=(0, 8)))
    assert "dltensor_versioned" in repr(t.__dlpack__(max_version=(1, 1), dl_device=(1, 0), copy=False))
    assert np.from_dlpack(gdn.Tensor(np.arange(3, dtype="i4"), type="i32")).dtype == np.int32
    assert np.from_dlpack(gdn.Tensor(np.zeros(3, "f2"), type="f16")).dtype == np.float16
    for options in [dict(dl_device=(2, 0)), dict(dl_device=(1, 1)), dict(stream=3)]:
        with pytest.raises(BufferError):
            t.__dlpack__(**options)


class Copied(Modern):
    def __dlpack__(self, **options):
        return self.data.__dlpack__(**options, copy=True)


def test_dlpack_copy_is_independent():
    a = ramp(5)
    t = gdn.Tensor(Copied(gdn.Tensor(a)))
    t.numpy()[...] = 0
    np.testing.assert_array_equal(a, ramp(5))


def test_dlpack_on_another_device():
    there = Modern(ramp(4))
    there.device = (2, 0)
    with pytest.raises(ValueError, match="CPU"):
        gdn.Tensor(there)
    with pytest.raises(ValueError, match="q must be in CPU"):
        as_array(there)


def test_dlpack_that_cannot_be_shared():
    with pytest.raises(ValueError, match="q cannot be shared through DLPack"):
        as_array(Legacy(gdn.Tensor(ramp(4).tobytes())))


def test_dlpack_bf16_round_trip():
    bits = np.array([0x3f80, 0x4000], np.uint16)
    t = gdn.Tensor(bits, type="bf16")
    back = gdn.Tensor(Modern(t), type="bf16")
    assert back.data == t.data and back.type == "bf16"
    with pytest.raises(TypeError, match="bfloat16"):
        as_array(Modern(t))


def test_torch():
    torch = optional("torch")
    x = torch.zeros(2, 3, 4)
    t = gdn.Tensor(x)
    assert t.ne == (4, 3, 2, 1) and t.data == x.data_ptr()
    as_array(x, writable=True)[1, 2, 3] = 7
    assert x[1, 2, 3] == 7 and torch.from_dlpack(t)[0, 1, 2, 3] == 7
    y = x.transpose(0, 2)[1:]
    same_memory(gdn.Tensor(y), np.asarray(y.numpy()))
    same_memory(gdn.Tensor(torch.from_dlpack(t.permute(2, 0, 1, 3))), t.permute(2, 0, 1, 3).numpy())
    assert as_array(torch.zeros(1, 2, 1, 2, 1)).shape == (1, 2, 1, 2, 1)
    assert torch.from_dlpack(gdn.Tensor(np.array([0x3f80], np.uint16), type="bf16")).float().item() == 1
    with pytest.raises(TypeError, match="float64"):
        as_array(x.double())
    with pytest.raises(ValueError, match="q .*grad"):
        as_array(torch.zeros(2, requires_grad=True))


# ---------------------------------------------------------------- arguments of the kernels


@pytest.mark.parametrize("name", [n for n in SOURCES if "byte" not in n and n != "ctypes chars"])
def test_as_array_is_zero_copy(name):
    data = SOURCES[name]()
    a = as_array(data, writable=True)
    np.testing.assert_array_equal(a.ravel(), ramp(6))
    a[...] = 9
    assert (as_array(data) == 9).all()
    if isinstance(data, np.ndarray):
        assert a is data


@pytest.mark.parametrize("data, said", [
    (np.zeros(3), "float64"), (np.zeros(3, "f2"), "float16"), (np.zeros(3, "i4"), "int32"), (np.zeros(3, ">f4"), ">f4"),
    (bytearray(8), "uint8"), (array.array("d", [1]), "float64"), (gdn.Tensor(np.zeros(2, "f2"), type="f16"), "float16"),
    (gdn.Tensor(np.zeros(2, "u2"), type="bf16"), "bfloat16"), (gdn.Tensor(np.zeros(2, "i4"), type="i32"), "int32"),
    (Modern(np.zeros(2)), "float64"), (np.zeros(3, object), "object"), ([1.0], "list"), (None, "NoneType"),
    (1.0, "float"), (np.float32(1), "float32"), (3, "int"), ("q", "str")])
def test_as_array_refuses_other_types(data, said):
    with pytest.raises(TypeError, match="^q ") as error:
        as_array(data)
    assert said in str(error.value)


def test_fit_ranks():
    a = ramp(2, 3)
    assert fit(a, 2) is a
    with pytest.raises(ValueError, match=r"q must have 4 axes \(n_seqs, n_tokens, H, S\), got shape \(2, 3\)"):
        fit(a, 4, "(n_seqs, n_tokens, H, S)")
    with pytest.raises(ValueError, match=r"q must have 1 axis, got shape \(2, 3\)"):
        fit(a, 1)
    with pytest.raises(ValueError, match="q must have 1 axis"):
        fit(a[:1], 1)                                       # only a Tensor's unit axes are fillers
    t = gdn.Tensor(a)
    for ndim in (2, 3, 4):
        got = fit(t, ndim, writable=True)
        assert got.shape == (1,) * (ndim - 2) + (2, 3) and np.shares_memory(got, a)
    with pytest.raises(ValueError, match=r"got shape \(1, 1, 2, 3\)"):
        fit(t, 1)
    with pytest.raises(ValueError, match="5 axes"):
        fit(t, 5)
    assert fit(gdn.Tensor(ramp(1)), 0).shape == ()


def test_to_c():
    a = ramp(2, 3, 4)[::-1, :, ::2]
    c = to_c(a)
    assert (c.data, c.type) == (a.ctypes.data, 0)
    assert list(c.ne) == [2, 3, 2, 1] and list(c.nb) == [8, 16, -48, -96]
    assert list(to_c(np.zeros((), np.float32)).ne) == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="4 axes"):
        to_c(np.zeros((1,) * 5, np.float32))


def overlap(out, *others):
    return c_check_overlap("out", out, others)


def test_overlap_with_others():
    a = ramp(4, 6)
    overlap(a, ("q", ramp(4, 6), False), ("state", None, True))
    overlap(a, ("v", a, True))
    overlap(a, ("v", a.view(), True))
    for other in (a.T, a[1:], a[:, ::-1], a.reshape(2, 12), a[:1]):
        with pytest.raises(ValueError, match="out overlaps v without being exactly v"):
            overlap(a, ("q", ramp(2), False), ("v", other, True))
    with pytest.raises(ValueError, match="out overlaps q$"):
        overlap(a, ("q", a, False))
    overlap(a[:, ::2], ("q", a[:, 1::2], False))            # interleaved, nothing shared
    overlap(a[:, :3], ("q", a[:, 3:], False))
    overlap(a[:2], ("q", a[2:], False))
    overlap(a[:, 5::-2], ("q", a[:, 4::-2], False))
    with pytest.raises(ValueError, match="out overlaps q"):
        overlap(a[:, 5::-2], ("q", a[:, 5:], False))
    overlap(a[:0], ("q", a, False))
    overlap(a, ("q", a[:, :0], False))
    one = a[:1]                                             # the stride of a unit axis says nothing
    overlap(one, ("v", as_strided(one, one.shape, (4000, 4)), True))


def test_output_must_not_overlap_itself():
    flat = ramp(64)
    overlap(ramp(3, 4, 5).transpose(2, 0, 1)[::-1])
    overlap(as_strided(flat, (2, 3), (8, 12)))              # strides too short to be sure, yet all addresses differ
    for shape, strides in [((2, 3), (0, 4)), ((3, 4), (8, 4)), ((4, 3), (8, 12)), ((3, 2), (4, -4))]:
        with pytest.raises(ValueError, match="out overlaps itself"):
            overlap(as_strided(flat[32:], shape, strides))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-7, 7)), max_size=4))
def test_self_overlap_is_exact(axes):
    flat = np.zeros(256, np.float32)
    view = as_strided(flat[128:], [n for n, _ in axes], [4 * s for _, s in axes])
    index = np.zeros((), np.int64)
    for n, s in axes:
        index = index[..., None] + np.arange(n) * s
    if np.unique(index).size < index.size:
        with pytest.raises(ValueError, match="itself"):
            overlap(view)
    else:
        overlap(view)
