"""gdn.Tensor's C functions, through the module's own table, and sources of many kinds."""

import array
import ctypes

import numpy as np
from c_tools import Tensor

import gdn
from gdn import _tensor


def c_function(name, result, *arguments):
    capsule = _tensor.__pyx_capi__[name]
    get_name, get = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.PYFUNCTYPE(result, *arguments)(get(capsule, get_name(capsule)))


obj = ctypes.py_object
c_as_array = c_function("as_array", obj, obj, obj, ctypes.c_int)
c_fit = c_function("fit", obj, obj, obj, ctypes.c_int, ctypes.c_int)
c_to_c = c_function("to_c", ctypes.c_int, obj, ctypes.POINTER(Tensor))
c_check_overlap = c_function("check_overlap", ctypes.c_int, obj, obj, obj)


def as_array(data, writable=False):
    return c_as_array(data, "q", writable)


def fit(data, ndim, writable=False):
    return c_fit(data, "q", ndim, writable)


def to_c(data):
    result = Tensor()
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


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p)]


class Crafted(Legacy):
    """A producer that says what numpy and torch never do: an offset, no strides, elements of several lanes, no deleter."""

    alive = []

    def __init__(self, data, shape, lanes=1):
        super().__init__(data)
        self.alive.append(self)
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.managed = DLTensor(data.ctypes.data, (1, 0), len(shape), 2, 32, lanes, self.shape, None, 4)

    def __dlpack__(self, stream=None):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor", None)


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
