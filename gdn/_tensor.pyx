"""gdn.Tensor: a pointer, a type, four extents and four byte strides over memory that somebody else may own."""

cimport cython
from cpython.buffer cimport (PyBUF_ANY_CONTIGUOUS, PyBUF_C_CONTIGUOUS, PyBUF_F_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND,
                             PyBUF_RECORDS_RO, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release,
                             PyObject_CheckBuffer, PyObject_GetBuffer)
from cpython.object cimport PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New, PyCapsule_SetName
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from numpy cimport (NPY_ARRAY_WRITEABLE, NPY_FLOAT16, NPY_FLOAT32, NPY_INT32, NPY_UINT16, PyArray_Check,
                    PyArray_DATA, PyArray_DIM, PyArray_DIMS, PyArray_IS_C_CONTIGUOUS, PyArray_ISBYTESWAPPED, PyArray_ISWRITEABLE,
                    PyArray_ITEMSIZE, PyArray_NDIM, PyArray_SetBaseObject, PyArray_SIZE, PyArray_STRIDE, PyArray_STRIDES,
                    PyArray_TYPE, import_array, ndarray, npy_intp)

from gdn._checked cimport multiply, span_of
from gdn._c cimport GDN_TYPE_BF16, GDN_TYPE_F16, GDN_TYPE_F32, GDN_TYPE_I32, gdn_tensor

import numpy

from gdn._arguments import integer

cdef extern from "Python.h":
    bint Py_IsInitialized() nogil

cdef extern from "numpy/arrayobject.h":
    enum: NPY_USERDEF             # the first number of types that numpy does not bring itself
    ndarray PyArray_New(PyTypeObject *, int, const int64_t *, int, const int64_t *, void *, int, int, PyObject *)

import_array()

cdef object BARE = object()       # makes an empty Tensor; not reachable from Python
cdef dict TYPES = {"f32": GDN_TYPE_F32, "f16": GDN_TYPE_F16, "bf16": GDN_TYPE_BF16, "i32": GDN_TYPE_I32}


cdef enum:
    MAX_AXES = 8
    OTHER = -1                    # kinds of element beside the GDN_TYPE_*: anything else, bytes, 16-bit words
    BYTES = -2
    WORDS = -3

cdef struct block:                # described memory, axes in numpy's order, strides in bytes
    char *data
    int kind
    const char *format            # a buffer's element format, or NULL: then the DLPack type
    int dl_code
    int dl_bits
    int64_t itemsize
    int ndim
    int64_t shape[MAX_AXES]
    int64_t strides[MAX_AXES]


cdef inline int64_t item_size(int32_t type) noexcept nogil:
    return 4 if type == GDN_TYPE_F32 or type == GDN_TYPE_I32 else 2


cdef str type_name(int32_t type):
    for name, value in TYPES.items():
        if value == type:
            return name


# ---------------------------------------------------------------- extents

cdef int span(int n, const int64_t *ne, const int64_t *nb, int64_t size, str name, int64_t *low,
              int64_t *high) except -1:
    """Bytes before and behind the first element's address that the elements reach; both 0 without elements."""
    if span_of(n, ne, nb, size, low, high):
        raise ValueError(f"{name} spans more than 2^63 bytes: extents {[ne[i] for i in range(n)]}, "
                         f"byte strides {[nb[i] for i in range(n)]}")
    return 0


cdef tuple integers(object values, str name):
    """Up to four Python ints within int64."""
    try:
        values = tuple(values)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}") from None
    if len(values) > 4:
        raise ValueError(f"{name} may have at most 4 entries, got {values}")
    return tuple([integer(value, name, -INT64_MAX) for value in values])


cdef int fill(gdn_tensor *t, object ne, object nb) except -1:
    """Extents and strides; strides not given are those of contiguous memory, unit axes are appended."""
    cdef int i, n
    extents = integers(ne, "ne")
    n = len(extents)
    strides = None if nb is None else integers(nb, "nb")
    if strides is not None and len(strides) != n:
        raise ValueError(f"nb must have one stride per extent, got nb {strides} for ne {extents}")
    for i in range(4):
        t.ne[i] = extents[i] if i < n else 1
        if t.ne[i] < 0:
            raise ValueError(f"ne must not be negative, got {extents}")
        if strides is not None and i < n:
            t.nb[i] = strides[i]
        elif i == 0:
            t.nb[i] = item_size(t.type)
        elif multiply(t.ne[i - 1], t.nb[i - 1], &t.nb[i]):
            raise ValueError(f"ne {extents} with nb {strides} spans more than 2^63 bytes")
    return 0


include "tensor/dlpack.pxi"
include "tensor/memory.pxi"


# ---------------------------------------------------------------- Tensor

@cython.final
@cython.no_gc_clear
cdef class Tensor:
    """Tensor(data, ne=None, nb=None, *, type="f32", offset=0, owner=None)

    Four extents and four byte strides over existing memory, as in ggml: ne[0] is the fastest axis by convention, numpy
    sees the same memory with the axes reversed.  Nothing is ever copied except by cont().

    data    an object with the buffer protocol (numpy, bytearray, mmap, ctypes arrays, ...), a DLPack object in CPU
            memory, another Tensor, or an int address.  Its elements must be of the type named or be bytes (for bf16
            also 16-bit words); anything else is a TypeError, nothing is reinterpreted.
    ne      up to 4 extents, unit axes are appended.  None takes data's own shape, reversed (flat for bytes).  An
            address needs it.
    nb      byte strides, one per extent, of any sign or 0.  None: contiguous ones, and data must be contiguous itself.
    type    "f32", "f16", "bf16" or "i32"
    offset  bytes from data's first element
    owner   kept alive as long as this Tensor and everything made from it

    A Tensor that would leave the memory of data is a ValueError; an address has no known end and is trusted.  Any
    alignment can be viewed; the kernels need multiples of 4.  Read-only data gives a read-only Tensor.  Views, arrays,
    buffers and capsules made from a Tensor keep its memory alive.
    """

    def __cinit__(self, data, ne=None, nb=None, *, str type="f32", offset=0, owner=None):
        cdef block b
        cdef Tensor other
        if data is BARE:
            return
        if type not in TYPES:
            raise ValueError(f"type must be one of {', '.join(TYPES)}, got {type!r}")
        if nb is not None and ne is None:
            raise ValueError("nb needs ne")
        self.t.type = TYPES[type]
        offset, = integers((offset,), "offset")
        if isinstance(data, (int, numpy.integer)) and not isinstance(data, bool):
            self.memory = Memory.__new__(Memory)
            self.memory.owner = owner
            b.data = <char *>address_of(data)
            if ne is None:
                raise ValueError("an address needs ne")
        elif isinstance(data, Tensor):
            other = <Tensor>data
            self.memory = other.memory if owner is None else share_memory(other.memory, owner)
            describe_tensor(other, &b)
            ne, nb = extents_over(&b, self.t.type, ne, nb, offset)
        else:
            if is_scalar(data):
                raise TypeError(f"data must name memory, got the scalar {data!r}")
            self.memory = open_memory(data, "data", &b)
            self.memory.owner = owner
            ne, nb = extents_over(&b, self.t.type, ne, nb, offset)
        fill(&self.t, ne, nb)
        place(self, b.data, offset)

    # ---- what it is

    @property
    def ne(self):
        """The four extents, fastest first."""
        return (self.t.ne[0], self.t.ne[1], self.t.ne[2], self.t.ne[3])

    @property
    def nb(self):
        """The four strides in bytes."""
        return (self.t.nb[0], self.t.nb[1], self.t.nb[2], self.t.nb[3])

    @property
    def type(self):
        """"f32", "f16", "bf16" or "i32"."""
        return type_name(self.t.type)

    @property
    def data(self):
        """The address of element (0, 0, 0, 0)."""
        return <uintptr_t>self.t.data

    @property
    def nbytes(self):
        """Bytes of all elements, gaps not counted."""
        return self.t.ne[0] * self.t.ne[1] * self.t.ne[2] * self.t.ne[3] * item_size(self.t.type)

    def is_contiguous(self):
        """Whether the elements lie without gaps, ne[0] fastest; the strides of unit axes do not matter."""
        return bool(PyArray_IS_C_CONTIGUOUS(tensor_array(self)))

    def __repr__(self):
        return (f"gdn.Tensor(ne={self.ne}, nb={self.nb}, type={self.type!r}, data={self.data:#x}"
                f"{', read-only' if self.memory.readonly else ''})")

    # ---- views, all over the same memory

    def view(self, ne, nb=None, offset=0):
        """Other extents and byte strides (contiguous ones if None), offset bytes from the first element.

        This Tensor's own extents do not matter; leaving the memory it lies in is a ValueError."""
        cdef Tensor t = sibling(self)
        fill(&t.t, ne, nb)
        place(t, <char *>self.t.data, integers((offset,), "offset")[0])
        return t

    def reshape(self, ne):
        """The same elements with other extents; ValueError unless contiguous and as many."""
        cdef Tensor t = sibling(self)
        fill(&t.t, ne, None)
        if t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3] != self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]:
            raise ValueError(f"reshape from ne {self.ne} to {t.ne} changes the number of elements")
        if not self.is_contiguous():
            raise ValueError(f"reshape needs a contiguous Tensor, got ne {self.ne}, nb {self.nb}")
        place(t, <char *>self.t.data, 0)
        return t

    def permute(self, a0, a1, a2, a3):
        """Axis i goes to position a_i."""
        cdef Tensor t = sibling(self)
        cdef int i, to
        axes = integers((a0, a1, a2, a3), "permute's axes")
        if sorted(axes) != [0, 1, 2, 3]:
            raise ValueError(f"permute needs each of 0, 1, 2, 3 once, got {axes}")
        for i in range(4):
            to = axes[i]
            t.t.ne[to], t.t.nb[to] = self.t.ne[i], self.t.nb[i]
        place(t, <char *>self.t.data, 0)
        return t

    def transpose(self):
        """Axes 0 and 1 swapped."""
        return self.permute(1, 0, 2, 3)

    def slice(self, dim, start, stop):
        """Elements start to stop (0 <= start <= stop <= ne[dim]) along axis dim."""
        cdef Tensor t = sibling(self)
        dim, start, stop = integers((dim, start, stop), "slice's arguments")
        if not 0 <= dim <= 3:
            raise ValueError(f"slice along axis {dim} of 0 to 3")
        if not 0 <= start <= stop <= self.ne[dim]:
            raise ValueError(f"slice {start}:{stop} leaves axis {dim}, which has {self.ne[dim]} elements")
        t.t.ne[<int>dim] = stop - start
        # An empty Tensor has no address of its own; the start of what it was cut from is always inside.
        place(t, <char *>self.t.data, start * self.nb[dim] if stop > start and 0 not in self.ne else 0)
        return t

    def cont(self):
        """A contiguous copy in memory of its own, always."""
        return Tensor(self.numpy().copy("C"), type=self.type)

    # ---- out

    def numpy(self):
        """The same memory as an array of shape ne reversed, 4 axes.  bf16, which numpy lacks, comes as uint16 bits."""
        return tensor_array(self)

    def __array__(self, dtype=None, copy=None):
        array = tensor_array(self)
        if dtype is not None and numpy.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"{self.type} cannot become {numpy.dtype(dtype)} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule of 4 axes, shape ne reversed.  BufferError for what DLPack cannot say: an address or stride
        that is no multiple of the element size, read-only memory before version 1.0."""
        if stream is not None:
            raise BufferError(f"CPU memory has no stream, got {stream!r}")
        if dl_device is not None and tuple(dl_device) != (DL_CPU, 0):
            raise BufferError(f"the Tensor is on DLPack device (1, 0), asked for {tuple(dl_device)}")
        with_version = max_version is not None and max_version[0] >= 1
        return export_dlpack(self.cont() if copy else self, with_version, bool(copy))

    def __dlpack_device__(self):
        return (DL_CPU, 0)

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef bint strided = flags & PyBUF_STRIDES == PyBUF_STRIDES
        if flags & PyBUF_WRITABLE and self.memory.readonly:
            raise BufferError("the Tensor is read-only")
        view.obj = None           # set last: whoever asks sees nothing half-filled
        view.buf, view.len, view.itemsize = self.t.data, self.nbytes, item_size(self.t.type)
        view.readonly, view.ndim = self.memory.readonly, 4
        view.format, view.suboffsets, view.internal = NULL, NULL, NULL
        view.shape, view.strides = <Py_ssize_t *>self.shape, <Py_ssize_t *>self.strides
        if not strided and not PyBuffer_IsContiguous(view, b"C"):
            raise BufferError("the Tensor is not contiguous")
        if flags & PyBUF_C_CONTIGUOUS == PyBUF_C_CONTIGUOUS and not PyBuffer_IsContiguous(view, b"C"):
            raise BufferError("the Tensor is not C-contiguous")
        if flags & PyBUF_F_CONTIGUOUS == PyBUF_F_CONTIGUOUS and not PyBuffer_IsContiguous(view, b"F"):
            raise BufferError("the Tensor is not Fortran-contiguous")
        if flags & PyBUF_ANY_CONTIGUOUS == PyBUF_ANY_CONTIGUOUS and not PyBuffer_IsContiguous(view, b"A"):
            raise BufferError("the Tensor is not contiguous")
        if flags & PyBUF_FORMAT:
            view.format = buffer_format(self.t.type)
        if not strided:
            view.strides = NULL
        if not flags & PyBUF_ND:
            view.shape, view.ndim = NULL, 1
        view.obj = self


cdef tuple extents_over(const block *b, int32_t type, object ne, object nb, object offset):
    """ne and nb over b: as given, else b's own; refuses another element type and implied strides over gaps."""
    cdef int64_t size = item_size(type), total = 1, dense = b.itemsize
    cdef bint contiguous = True
    cdef int i
    if b.kind != BYTES and b.kind != type and not (b.kind == WORDS and type == GDN_TYPE_BF16):
        raise TypeError(f"data holds {block_type_name(b)}, type says {type_name(type)}: "
                        f"give the type it holds, or its bytes")
    for i in range(b.ndim - 1, -1, -1):
        contiguous &= b.shape[i] == 1 or b.strides[i] == dense
        dense *= b.shape[i]
        total *= b.shape[i]
    contiguous |= total == 0
    if not contiguous and nb is None and (ne is not None or b.kind == BYTES):
        raise ValueError("data is not contiguous: nb must be given")
    if ne is not None:
        return ne, nb
    if b.kind == BYTES:
        if (total - offset) % size:
            raise ValueError(f"data has {total - offset} bytes from offset {offset}, no multiple of {size}: give ne")
        return ((total - offset) // size,), None
    if b.ndim > 4:
        raise ValueError(f"data has {b.ndim} axes, a Tensor has 4")
    return ([b.shape[i] for i in range(b.ndim - 1, -1, -1)], [b.strides[i] for i in range(b.ndim - 1, -1, -1)])


cdef int place(Tensor tensor, char *base, object offset) except -1:
    """Set the address, check that all elements lie in the memory, keep the reversed axes."""
    cdef int64_t low, high
    span(4, tensor.t.ne, tensor.t.nb, item_size(tensor.t.type), "the Tensor", &low, &high)
    start = <uintptr_t>base + offset
    if tensor.memory.bounded:
        if start + low < <uintptr_t>tensor.memory.start or start + high > <uintptr_t>tensor.memory.stop:
            raise ValueError(f"ne {tensor.ne}, nb {tensor.nb}, offset {offset} reach bytes {offset + low} to "
                             f"{offset + high} of a memory that has bytes "
                             f"{tensor.memory.start - base} to {tensor.memory.stop - base}")
    elif start + low < 0 or start + high >= 1 << 64 or (start + low == 0 and high > low):
        raise ValueError(f"no memory at address {start:#x} with ne {tensor.ne}, nb {tensor.nb}")
    tensor.t.data = <void *><uintptr_t>start
    set_axes(tensor)
    return 0


cdef void set_axes(Tensor tensor) noexcept:
    cdef int i
    for i in range(4):
        tensor.shape[i], tensor.strides[i] = tensor.t.ne[3 - i], tensor.t.nb[3 - i]


cdef Tensor sibling(Tensor tensor):
    """A Tensor to be: the same memory, type and extents, not yet placed."""
    cdef Tensor t = Tensor.__new__(Tensor, BARE)
    t.memory, t.t = tensor.memory, tensor.t
    return t


cdef Tensor tensor_over(const gdn_tensor *t, object owner):
    cdef Tensor tensor = Tensor.__new__(Tensor, BARE)
    tensor.memory = Memory.__new__(Memory)
    tensor.memory.owner = owner
    tensor.t = t[0]
    set_axes(tensor)
    return tensor


cdef char *buffer_format(int32_t type) noexcept:
    if type == GDN_TYPE_F32:
        return b"f"
    if type == GDN_TYPE_F16:
        return b"e"
    return b"i" if type == GDN_TYPE_I32 else b"H"


cdef void *address_of(object value) except? NULL:
    if not 0 <= value < 1 << 64:
        raise ValueError(f"no memory at address {value}")
    return <void *><uintptr_t>value


cdef Memory share_memory(Memory memory, object owner):
    """The same memory with one more thing kept alive."""
    cdef Memory shared = Memory.__new__(Memory)
    shared.owner = (memory, owner)
    shared.start, shared.stop = memory.start, memory.stop
    shared.bounded, shared.readonly = memory.bounded, memory.readonly
    return shared


cdef void describe_tensor(Tensor tensor, block *b) noexcept:
    cdef int i
    b.data, b.kind, b.itemsize, b.ndim = <char *>tensor.t.data, tensor.t.type, item_size(tensor.t.type), 4
    b.format = buffer_format(tensor.t.type)
    for i in range(4):
        b.shape[i], b.strides[i] = tensor.shape[i], tensor.strides[i]


cdef ndarray new_array(object base, bint readonly, int32_t type, void *data, int ndim, const int64_t *shape,
                       const int64_t *strides):
    """An array over memory that base keeps alive."""
    cdef int number = NPY_FLOAT32
    if type == GDN_TYPE_F16:
        number = NPY_FLOAT16
    elif type == GDN_TYPE_I32:
        number = NPY_INT32
    elif type == GDN_TYPE_BF16:
        number = NPY_UINT16
    cdef ndarray array = PyArray_New(<PyTypeObject *>ndarray, ndim, shape, number, strides, data, 0,
                                     0 if readonly else NPY_ARRAY_WRITEABLE, NULL)
    Py_INCREF(base)               # the array takes a reference
    PyArray_SetBaseObject(array, base)
    return array


cdef ndarray tensor_array(Tensor tensor):
    return new_array(tensor, tensor.memory.readonly, tensor.t.type, tensor.t.data, 4, tensor.shape, tensor.strides)


include "tensor/convert.pxi"
include "tensor/overlap.pxi"
