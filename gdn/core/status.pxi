# One place where a refused call explains itself, and one where that becomes an exception.

cdef extern from *:
    """
    #include <stdio.h>
    /* Says why, where somebody listens, and passes the status on. */
    #define gdn_fail(why, status, ...) \
        ((why)->text != NULL && (why)->size > 0 ? (void)snprintf((why)->text, (why)->size, __VA_ARGS__) : (void)0, (status))
    """
    gdn_status fail "gdn_fail"(const refusal *why, gdn_status status, const char *format, ...) noexcept nogil

cdef struct refusal:              # where a refused call says why; text NULL: nowhere
    char *text
    size_t size

cdef char TOLD[256]               # a refusal on its way to its exception, else empty; guarded by the GIL
cdef refusal told = [TOLD, sizeof(TOLD)]

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


cdef int check(gdn_status status) except -1:
    """The exception of a refused call, whose text is in TOLD if it has one."""
    if status == GDN_OK:
        return 0
    text = (<bytes>(TOLD if TOLD[0] else c_status_string(status))).decode()
    TOLD[0] = 0
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
    if isinstance(value, (str, bytes, bool, np.bool_)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        x = value
    except TypeError:
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an integer beyond float64") from None
    if not isfinite(x):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return <float>x


# ---- what the checks of several calls share ----------------------------------------------------------------------

cdef gdn_status check_option(const refusal *why, const char *name, int32_t value, int32_t least,
                             int32_t most) noexcept nogil:
    return GDN_OK if least <= value <= most else fail(why, GDN_ERR_VALUE, "%s: unknown value %d", name, value)


cdef gdn_status check_eps(const refusal *why, const char *name, float eps) noexcept nogil:
    if eps >= 0 and isfinite(eps):
        return GDN_OK
    return fail(why, GDN_ERR_VALUE, "%s must be finite and not negative, got %g", name, <double>eps)


cdef gdn_status check_counts(const refusal *why, int32_t n_threads, int32_t reserved, int64_t n_snapshots) noexcept nogil:
    if n_threads < 0 or reserved != 0:
        return fail(why, GDN_ERR_VALUE, "n_threads is %d, reserved %d", n_threads, reserved)
    if n_snapshots < 1:
        return fail(why, GDN_ERR_VALUE, "snapshots must be at least 1, got %lld", n_snapshots)
    return GDN_OK


cdef gdn_status check_tensor(const refusal *why, const char *name, const gdn_tensor *t, int64_t ne0, int64_t ne1,
                             int64_t ne2, int64_t ne3, bint writable) noexcept nogil:
    """Type, extents, alignment of one tensor; nothing is dereferenced."""
    cdef int64_t want[4]
    cdef int64_t low, high
    cdef int i
    cdef bint empty = False
    want[:] = [ne0, ne1, ne2, ne3]
    if t.type != GDN_TYPE_F32:
        return fail(why, GDN_ERR_TYPE, "%s must be float32, got type %d", name, t.type)
    for i in range(4):
        if want[i] < 0:
            return fail(why, GDN_ERR_SHAPE, "%s: extent %lld is negative", name, want[i])
        if t.ne[i] != want[i]:
            return fail(why, GDN_ERR_SHAPE,
                        "%s has extents [%lld, %lld, %lld, %lld], the call needs [%lld, %lld, %lld, %lld]", name,
                        t.ne[3], t.ne[2], t.ne[1], t.ne[0], ne3, ne2, ne1, ne0)
        empty = empty or want[i] == 0
    if empty:
        return GDN_OK
    if t.data == NULL:
        return fail(why, GDN_ERR_NULL, "%s: data is NULL", name)
    if <uintptr_t>t.data & 3:
        return fail(why, GDN_ERR_STRIDE, "%s: address %p is no multiple of 4", name, t.data)
    for i in range(4):
        if t.ne[i] > 1 and t.nb[i] & 3:
            return fail(why, GDN_ERR_STRIDE, "%s: stride %lld is no multiple of 4", name, t.nb[i])
        if writable and t.ne[i] > 1 and t.nb[i] == 0:
            return fail(why, GDN_ERR_STRIDE, "%s is written, but an axis of extent %lld has stride 0", name,
                        t.ne[i])
    if span_of(4, t.ne, t.nb, sizeof(float), &low, &high):
        return fail(why, GDN_ERR_SHAPE,
                    "%s spans more than 2^63 bytes: extents [%lld, %lld, %lld, %lld], byte strides [%lld, %lld, %lld, %lld]",
                    name, t.ne[3], t.ne[2], t.ne[1], t.ne[0], t.nb[3], t.nb[2], t.nb[1], t.nb[0])
    return GDN_OK
