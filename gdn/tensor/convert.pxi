# From arguments to arrays: float32, or one of the types of activations and states, at any strides, zero-copy, or an error
# that names the argument.
#
# Needs: _tensor.pyx (NPY_USERDEF, Tensor, block, new_array, tensor_array), memory.pxi (Memory, is_scalar, open_memory).

cdef str TYPED = "float32, float16 or bfloat16"


cdef bint is_masked(object obj):
    return PyArray_Check(obj) and type(obj) is not ndarray and isinstance(obj, numpy.ma.MaskedArray)


cdef int storage_type(ndarray array):
    """The GDN_TYPE_* of what an array holds, -1 for others.  uint16 are the words of bfloat16 (`new_array`)."""
    cdef int number = PyArray_TYPE(array)
    if PyArray_ISBYTESWAPPED(array):
        return -1
    if number == NPY_FLOAT32:
        return GDN_TYPE_F32
    if number == NPY_FLOAT16:
        return GDN_TYPE_F16
    return GDN_TYPE_BF16 if number == NPY_UINT16 or is_bfloat16(array) else -1


cdef bint is_bfloat16(ndarray array):
    """Whether the array's type is ml_dtypes.bfloat16, which numpy knows by a number of its own."""
    if PyArray_TYPE(array) < NPY_USERDEF or PyArray_ITEMSIZE(array) != 2:
        return False
    kind = array.dtype.type
    return kind.__name__ == "bfloat16" and kind.__module__.startswith("ml_dtypes")


cdef object result_type(ndarray array):
    cdef int type = storage_type(array)
    if type != GDN_TYPE_BF16:
        return numpy.float16 if type == GDN_TYPE_F16 else numpy.float32
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError("an array of bfloat16 needs the package ml_dtypes: install it or give where results go") from None
    return bfloat16


cdef ndarray as_array(object obj, str name, bint writable):
    return array_over(obj, name, writable, False)


cdef ndarray as_typed(object obj, str name, bint writable):
    return array_over(obj, name, writable, True)


cdef ndarray array_over(object obj, str name, bint writable, bint narrow):
    cdef ndarray array
    cdef int i, type
    if PyArray_Check(obj):
        if is_masked(obj):
            raise TypeError(f"{name} must not be a masked array")
        array = <ndarray>obj
        type = storage_type(array) if PyArray_TYPE(array) != NPY_UINT16 else -1
    elif isinstance(obj, Tensor):
        array = tensor_array(<Tensor>obj)
        type = (<Tensor>obj).t.type
        if type == GDN_TYPE_BF16 and not narrow:
            raise TypeError(f"{name} must be float32, got bfloat16")
    else:
        array = foreign_array(obj, name, narrow)
        type = storage_type(array)
    if type != GDN_TYPE_F32 and not (narrow and (type == GDN_TYPE_F16 or type == GDN_TYPE_BF16)):
        raise TypeError(f"{name} must be {TYPED if narrow else 'float32'}, got {array.dtype}")
    cdef npy_intp low = <npy_intp>PyArray_DATA(array)
    for i in range(PyArray_NDIM(array)):
        if PyArray_DIM(array, i) > 1:
            low |= PyArray_STRIDE(array, i)
    if low & (PyArray_ITEMSIZE(array) - 1):
        refuse_alignment(array, name)
    if writable and not PyArray_ISWRITEABLE(array):
        raise ValueError(f"{name} is written, but the array given is read-only")
    return array


cdef int refuse_alignment(ndarray array, str name) except -1:
    if PyArray_SIZE(array) == 0:          # nothing is ever read there
        return 0
    raise ValueError(f"{name} must have an address and strides that are multiples of {PyArray_ITEMSIZE(array)} bytes, "
                     f"got address {<uintptr_t>PyArray_DATA(array):#x} and strides {(<object>array).strides}")


cdef ndarray foreign_array(object obj, str name, bint narrow):
    """An array over a buffer or DLPack object."""
    cdef block b
    cdef Memory memory
    if is_scalar(obj) or not (PyObject_CheckBuffer(obj) or hasattr(obj, "__dlpack__")):
        raise TypeError(f"{name} must be a {TYPED if narrow else 'float32'} array, a gdn.Tensor, a buffer or a DLPack object, "
                        f"got {obj.__class__.__name__}")
    memory = open_memory(obj, name, &b)
    if b.kind != GDN_TYPE_F32 and not (narrow and (b.kind == GDN_TYPE_F16 or b.kind == GDN_TYPE_BF16)):
        raise TypeError(f"{name} must be {TYPED if narrow else 'float32'}, got {block_type_name(&b)}")
    return new_array(memory, memory.readonly, b.kind, b.data, b.ndim, b.shape, b.strides)


cdef ndarray fit(object obj, str name, int ndim, bint writable):
    return fit_over(obj, name, ndim, writable, False)


cdef ndarray fit_typed(object obj, str name, int ndim, bint writable):
    return fit_over(obj, name, ndim, writable, True)


cdef ndarray fit_over(object obj, str name, int ndim, bint writable, bint narrow):
    cdef ndarray array = array_over(obj, name, writable, narrow)
    cdef int have = PyArray_NDIM(array), i
    cdef int64_t shape[3]
    cdef int64_t strides[3]
    if have == ndim:
        return array
    if isinstance(obj, Tensor) and ndim < 4:
        i = 0
        while i < 4 - ndim and PyArray_DIM(array, i) == 1:
            i += 1
        if i == 4 - ndim:
            return new_array(obj, not PyArray_ISWRITEABLE(array), storage_type(array), PyArray_DATA(array), ndim,
                             <int64_t *>PyArray_DIMS(array) + i, <int64_t *>PyArray_STRIDES(array) + i)
        if ndim == 3 and PyArray_DIM(array, 1) == 1:      # rows along ne[3], as a ring gives them
            for i in range(3):
                shape[i] = PyArray_DIM(array, i + (i > 0))
                strides[i] = PyArray_STRIDE(array, i + (i > 0))
            return new_array(obj, not PyArray_ISWRITEABLE(array), storage_type(array), PyArray_DATA(array), 3, shape,
                             strides)
    raise ValueError(f"{name} must have {ndim} {'axis' if ndim == 1 else 'axes'}, "
                     f"got shape {(<object>array).shape}")


cdef int to_c(ndarray array, gdn_tensor *out) except -1:
    cdef int n = PyArray_NDIM(array), i
    if n > 4:
        raise ValueError(f"at most 4 axes are possible, got shape {(<object>array).shape}")
    out.data = PyArray_DATA(array)
    out.type = storage_type(array)
    for i in range(n):
        out.ne[i] = PyArray_DIM(array, n - 1 - i)
        out.nb[i] = PyArray_STRIDE(array, n - 1 - i)
    for i in range(n, 4):
        out.ne[i] = 1
        out.nb[i] = out.ne[i - 1] * out.nb[i - 1] if i > 0 else PyArray_ITEMSIZE(array)
    return 0
