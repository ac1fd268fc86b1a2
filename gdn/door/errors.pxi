# One place where a refused call explains itself, and one where that becomes an exception.

cdef extern from *:
    """
    #include <stdio.h>
    /* Fills the caller's message buffer, if there is one, and passes the status on. */
    #define gdn_fail(message, size, status, ...) \
        (((message) != NULL && (size) > 0) ? (void)snprintf((message), (size), __VA_ARGS__) : (void)0, (status))
    """
    gdn_status fail "gdn_fail"(char *message, size_t size, gdn_status status, const char *format, ...) noexcept nogil

cdef const char *STATUS_STRINGS[17]
STATUS_STRINGS[:] = [
    b"ok", b"a required pointer is NULL", b"a tensor is not float32", b"extents disagree or are negative",
    b"a stride or address is no multiple of 4, or an output is broadcast",
    b"an option is unknown, missing or out of range", b"a row is outside the cache or written twice",
    b"scratch is too small", b"a struct's size is unknown to this library", b"the ring has no free slot",
    b"unknown sequence", b"the sequence's state was lost in a step that never committed",
    b"already acquired, or already in a step", b"rollback deeper than the planes hold",
    b"bytes are no ring, truncated, of another abi or shape, or fail their checksum",
    b"a living process holds the ring's lock and does not let go", b"unknown status"]


cdef const char *c_status_string(gdn_status status) noexcept nogil:
    return STATUS_STRINGS[<int>status if 0 <= <int>status < 16 else 16]


cdef int raise_status(gdn_status status, const char *message) except -1:
    """The exception of a refused call."""
    text = (<bytes>(message if message[0] else c_status_string(status))).decode()
    if status == GDN_ERR_TYPE:
        raise TypeError(text)
    if status == GDN_ERR_ROW and "twice" not in text:
        raise IndexError(text)
    raise ValueError(text)


cdef int32_t choice(dict values, value, str name) except? -1:
    """The C value of a named option."""
    try:
        return values[value]
    except (KeyError, TypeError):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}, got {value!r}") from None


cdef int64_t count_argument(value, str name) except -1:
    """An integer of at least 1."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return min(value, 2**62)


cdef bint flag_argument(value, str name) except -1:
    """True or False: a word that was meant as an option is not a yes."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


cdef float float_argument(value, str name) except? -1:
    """A finite number."""
    cdef double x
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        x = value
    except TypeError:
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    if not isfinite(x):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return <float>x


cdef gdn_status check_tensor(char *message, size_t size, const char *name, const gdn_tensor *t, int64_t ne0, int64_t ne1,
                             int64_t ne2, int64_t ne3, bint writable) noexcept nogil:
    """Type, extents, alignment of one tensor; nothing is dereferenced."""
    cdef int64_t want[4]
    cdef int64_t low, high
    cdef int i
    cdef bint empty = False
    want[:] = [ne0, ne1, ne2, ne3]
    if t.type != GDN_TYPE_F32:
        return fail(message, size, GDN_ERR_TYPE, "%s must be float32, got type %d", name, t.type)
    for i in range(4):
        if want[i] < 0:
            return fail(message, size, GDN_ERR_SHAPE, "%s: extent %lld is negative", name, want[i])
        if t.ne[i] != want[i]:
            return fail(message, size, GDN_ERR_SHAPE,
                        "%s has extents [%lld, %lld, %lld, %lld], the call needs [%lld, %lld, %lld, %lld]", name,
                        t.ne[3], t.ne[2], t.ne[1], t.ne[0], ne3, ne2, ne1, ne0)
        empty = empty or want[i] == 0
    if empty:
        return GDN_OK
    if t.data == NULL:
        return fail(message, size, GDN_ERR_NULL, "%s: data is NULL", name)
    if <uintptr_t>t.data & 3:
        return fail(message, size, GDN_ERR_STRIDE, "%s: address %p is no multiple of 4", name, t.data)
    for i in range(4):
        if t.ne[i] > 1 and t.nb[i] & 3:
            return fail(message, size, GDN_ERR_STRIDE, "%s: stride %lld is no multiple of 4", name, t.nb[i])
        if writable and t.ne[i] > 1 and t.nb[i] == 0:
            return fail(message, size, GDN_ERR_STRIDE, "%s is written, but an axis of extent %lld has stride 0", name,
                        t.ne[i])
    if span_of(4, t.ne, t.nb, sizeof(float), &low, &high):
        return fail(message, size, GDN_ERR_SHAPE,
                    "%s spans more than 2^63 bytes: extents [%lld, %lld, %lld, %lld], byte strides [%lld, %lld, %lld, %lld]",
                    name, t.ne[3], t.ne[2], t.ne[1], t.ne[0], t.nb[3], t.nb[2], t.nb[1], t.nb[0])
    return GDN_OK
