# Whether an output shares memory with another array, or with itself: exact, or an error where that takes too long.
#
# Needs: _tensor.pyx (MAX_AXES), _checked.pxd (span_of), convert.pxi (storage_type).

cdef object shares_memory = numpy.shares_memory
cdef object TooHardError = numpy.exceptions.TooHardError

cdef enum:
    MOST_WORK = 1000000           # candidates that one test may look at, some 0.1 s: hostile strides have exponentially many


cdef bint meet(object a, object b, str a_name, str b_name) except -1:
    """Whether two arrays have an address in common."""
    try:
        return shares_memory(a, b, MOST_WORK)
    except TooHardError:
        raise ValueError(f"{a_name}, of shape {a.shape} and strides {a.strides}, may overlap {b_name}, of shape {b.shape} and "
                         f"strides {b.strides}: finding out takes too long") from None


cdef bint array_range(ndarray array, uintptr_t *start, uintptr_t *stop) noexcept:
    """The addresses from the array's first to behind its last byte; False when it has no elements."""
    cdef uintptr_t data = <uintptr_t>PyArray_DATA(array)
    cdef int64_t low, high
    span_of(PyArray_NDIM(array), <int64_t *>PyArray_DIMS(array), <int64_t *>PyArray_STRIDES(array),
            PyArray_ITEMSIZE(array), &low, &high)
    start[0], stop[0] = data + <uintptr_t>low, data + <uintptr_t>high
    return high > low


cdef bint same_view(ndarray a, ndarray b) noexcept:
    cdef int i
    if PyArray_DATA(a) != PyArray_DATA(b) or PyArray_NDIM(a) != PyArray_NDIM(b) or storage_type(a) != storage_type(b):
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
    cdef npy_intp n, s, reach = PyArray_ITEMSIZE(array)
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


cdef bint overlaps_itself(ndarray array, str name) except -1:
    """Exact.  Two elements that share an address differ first along some axis: shifting both along that axis and the
    axes before it puts one of them at index 0 there, so it is enough to compare index 0 with the rest, axis by axis."""
    head = array
    while head.ndim:
        if head.shape[0] > 1 and meet(head[:1], head[1:], name, "itself"):
            return True
        head = head[0]
    return False


cdef int check_overlap(str out_name, ndarray out, tuple others) except -1:
    cdef uintptr_t start, stop, other_start, other_stop
    cdef ndarray other
    if not array_range(out, &start, &stop):
        return 0
    if not surely_disjoint(out) and overlaps_itself(out, out_name):
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
        if meet(out, other, out_name, name):
            raise ValueError(f"{out_name} overlaps {name}" + (f" without being exactly {name}" if may_be_same else ""))
    return 0
