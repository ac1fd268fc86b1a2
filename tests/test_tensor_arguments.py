"""How the kernels see their arguments: any array as a tensor, and which outputs overlap."""

import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from tensor_tools import SOURCES, Modern, as_array, c_check_overlap, fit, ramp, to_c

import gdn

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
    with pytest.raises(ValueError, match=r"q must have 4 axes, got shape \(2, 3\)"):
        fit(a, 4)
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
    square = ramp(4, 4)
    with pytest.raises(ValueError, match="out overlaps v without being exactly v"):
        overlap(square, ("v", square.T, True))
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
