# From arguments to arrays: float32 only, at any strides, zero-copy, or an error that names the argument.

cdef bint is_masked(object obj):
    return PyArray_Check(obj) and type(obj) is not ndarray and isinstance(obj, numpy.ma.MaskedArray)


cdef ndarray as_array(object obj, str name, bint writable):
    cdef ndarray array
    cdef int i
    if PyArray_Check(obj):
        if is_masked(obj):
            raise TypeError(f"{name} must not be a masked array")
        array = <ndarray>obj
    elif isinstance(obj, Tensor):
        array = tensor_array(<Tensor>obj)
        if (<Tensor>obj).t.type == GDN_TYPE_BF16:
            raise TypeError(f"{name} must be float32, got bfloat16")
    else:
        array = foreign_array(obj, name)
    if PyArray_TYPE(array) != NPY_FLOAT32 or PyArray_ISBYTESWAPPED(array):
        raise TypeError(f"{name} must be float32, got {array.dtype}")
    cdef npy_intp low = <npy_intp>PyArray_DATA(array)
    for i in range(PyArray_NDIM(array)):
        if PyArray_DIM(array, i) > 1:
            low |= PyArray_STRIDE(array, i)
    if low & 3:
        refuse_alignment(array, name)
    if writable and not PyArray_ISWRITEABLE(array):
        raise ValueError(f"{name} is written, but the array given is read-only")
    return array


cdef int refuse_alignment(ndarray array, str name) except -1:
    if PyArray_SIZE(array) == 0:          # nothing is ever read there
        return 0
    raise ValueError(f"{name} must have an address and strides that are multiples of 4 bytes, got address "
                     f"{<uintptr_t>PyArray_DATA(array):#x} and strides {(<object>array).strides}")


cdef ndarray foreign_array(object obj, str name):
    """An array over a buffer or DLPack object."""
    cdef block b
    cdef Memory memory
    if is_scalar(obj) or not (PyObject_CheckBuffer(obj) or hasattr(obj, "__dlpack__")):
        raise TypeError(f"{name} must be a float32 array, a gdn.Tensor, a buffer or a DLPack object, "
                        f"got {obj.__class__.__name__}")
    memory = open_memory(obj, name, &b)
    if b.kind != GDN_TYPE_F32:
        raise TypeError(f"{name} must be float32, got {block_type_name(&b)}")
    return new_array(memory, memory.readonly, GDN_TYPE_F32, b.data, b.ndim, b.shape, b.strides)


cdef ndarray fit(object obj, str name, int ndim, bint writable):
    cdef ndarray array = as_array(obj, name, writable)
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
            return new_array(obj, not PyArray_ISWRITEABLE(array), GDN_TYPE_F32, PyArray_DATA(array), ndim,
                             <int64_t *>PyArray_DIMS(array) + i, <int64_t *>PyArray_STRIDES(array) + i)
        if ndim == 3 and PyArray_DIM(array, 1) == 1:      # rows along ne[3], as a ring gives them
            for i in range(3):
                shape[i] = PyArray_DIM(array, i + (i > 0))
                strides[i] = PyArray_STRIDE(array, i + (i > 0))
            return new_array(obj, not PyArray_ISWRITEABLE(array), GDN_TYPE_F32, PyArray_DATA(array), 3, shape, strides)
    raise ValueError(f"{name} must have {ndim} {'axis' if ndim == 1 else 'axes'}, "
                     f"got shape {(<object>array).shape}")


cdef int to_c(ndarray array, gdn_tensor *out) except -1:
    cdef int n = PyArray_NDIM(array), i
    if n > 4:
        raise ValueError(f"at most 4 axes are possible, got shape {(<object>array).shape}")
    out.data = PyArray_DATA(array)
    out.type = GDN_TYPE_F32
    for i in range(n):
        out.ne[i] = PyArray_DIM(array, n - 1 - i)
        out.nb[i] = PyArray_STRIDE(array, n - 1 - i)
    for i in range(n, 4):
        out.ne[i] = 1
        out.nb[i] = out.ne[i - 1] * out.nb[i - 1] if i > 0 else 4
    return 0


# ---------------------------------------------------------------- overlap

cdef bint array_range(ndarray array, uintptr_t *start, uintptr_t *stop) noexcept:
    """The addresses from the array's first to behind its last byte; False when it has no elements."""
    cdef uintptr_t data = <uintptr_t>PyArray_DATA(array)
    cdef int64_t low, high
    span_of(PyArray_NDIM(array), <int64_t *>PyArray_DIMS(array), <int64_t *>PyArray_STRIDES(array), 4, &low, &high)
    start[0], stop[0] = data + <uintptr_t>low, data + <uintptr_t>high
    return high > low


cdef bint same_view(ndarray a, ndarray b) noexcept:
    cdef int i
    if PyArray_DATA(a) != PyArray_DATA(b) or PyArray_NDIM(a) != PyArray_NDIM(b):
        return False
    for i in range(PyArray_NDIM(a)):
        if PyArray_DIM(a, i) != PyArray_DIM(b, i):
            return False
        if PyArray_DIM(a, i) > 1 and PyArray_STRIDE(a, i) != PyArray_STRIDE(b, i):
            return False
    return True


cdef bint surely_disjoint(ndarray array) noexcept:
    """Sufficient for no two elements to share an address: every stride steps over all that shorter strides reach."""
    cdef npy_intp size[MAX_AXES]
    cdef npy_intp stride[MAX_AXES]
    cdef npy_intp n, s, reach = 4
    cdef int i, j, m = 0
    if PyArray_NDIM(array) > MAX_AXES:
        return False
    for i in range(PyArray_NDIM(array) - 1, -1, -1):
        n = PyArray_DIM(array, i)
        if n == 1:
            continue
        s = PyArray_STRIDE(array, i)
        s = -s if s < 0 else s
        j = m
        while j > 0 and stride[j - 1] > s:
            size[j], stride[j] = size[j - 1], stride[j - 1]
            j -= 1
        size[j], stride[j] = n, s
        m += 1
    for i in range(m):
        if stride[i] < reach:
            return False
        reach += (size[i] - 1) * stride[i]
    return True


cdef bint overlaps_itself(ndarray array) except -1:
    """Exact.  Two elements that share an address differ first along some axis: shifting both along that axis and the
    axes before it puts one of them at index 0 there, so it is enough to compare index 0 with the rest, axis by axis."""
    head = array
    while head.ndim:
        if head.shape[0] > 1 and shares_memory(head[:1], head[1:]):
            return True
        head = head[0]
    return False


cdef int check_overlap(str out_name, ndarray out, tuple others) except -1:
    cdef uintptr_t start, stop, other_start, other_stop
    cdef ndarray other
    if not array_range(out, &start, &stop):
        return 0
    if not surely_disjoint(out) and overlaps_itself(out):
        raise ValueError(f"{out_name} overlaps itself: shape {(<object>out).shape}, "
                         f"strides {(<object>out).strides}")
    for name, array, may_be_same in others:
        if array is None:
            continue
        other = <ndarray>array
        if not array_range(other, &other_start, &other_stop) or other_start >= stop or start >= other_stop:
            continue
        if may_be_same and same_view(out, other):
            continue
        if shares_memory(out, other):
            raise ValueError(f"{out_name} overlaps {name}" + (f" without being exactly {name}" if may_be_same else ""))
    return 0
