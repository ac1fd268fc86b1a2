# Where a refused call explains itself, what becomes of it in Python, and the checks that several calls share.
#
# Needs: _checked.pxd (span_of).

cdef extern from *:
    """
    #include <stdio.h>
    typedef struct { char *text; size_t size; } gdn_error_buffer;
    static char gdn_error_text[256];
    static const gdn_error_buffer gdn_no_buffer = { NULL, 0 };
    static const gdn_error_buffer gdn_python_buffer = { gdn_error_text, sizeof gdn_error_text };
    /* Writes why, where there is a buffer for it, and passes the status on. */
    #define gdn_fail(error, status, ...) \
        ((error)->text != NULL && (error)->size > 0 ? (void)snprintf((error)->text, (error)->size, __VA_ARGS__) : (void)0, \
         (status))
    static const char *const gdn_status_strings[] = {
        "ok", "a required pointer is NULL", "a tensor's type is none that the call takes", "extents disagree or are negative",
        "a stride or address is no multiple of its element's size, or an output is broadcast",
        "an option is unknown, missing or out of range", "a row is outside the cache",
        "scratch is too small", "a struct's size is unknown to this library", "the ring has no free slot",
        "unknown sequence", "the sequence's state was lost in a step that never committed",
        "already acquired, or already in a step", "rollback deeper than the planes hold",
        "bytes are no ring, truncated, of another abi or shape, or fail their checksum",
        "a living process holds the ring's lock and does not let go", "a row is written twice",
        "a committed tree waits for ring_accept", "a step needs more spare rows than the ring has" };
    static const char *gdn_status_string(gdn_status status)
    {
        const int known = sizeof gdn_status_strings / sizeof *gdn_status_strings;
        return (int)status >= 0 && (int)status < known ? gdn_status_strings[status] : "unknown status";
    }
    """
    ctypedef struct error_buffer "gdn_error_buffer":      # where a refused call says why; text NULL: nowhere
        char *text
        size_t size
    const error_buffer no_buffer "gdn_no_buffer"
    const error_buffer python_buffer "gdn_python_buffer"
    char error_text "gdn_error_text"[256]     # of a call from Python, on its way to the exception, else empty; guarded by the GIL
    gdn_status fail "gdn_fail"(const error_buffer *error, gdn_status status, const char *format, ...) noexcept nogil
    const char *c_status_string "gdn_status_string"(gdn_status status) noexcept nogil


# Of a status, in calls and in rings; any other is a ValueError.
EXCEPTIONS = {GDN_ERR_TYPE: TypeError, GDN_ERR_ROW: IndexError, GDN_ERR_UNKNOWN: KeyError, GDN_ERR_FULL: RingFullError,
              GDN_ERR_LOST: StateLostError, GDN_ERR_BUSY: RingBusyError, GDN_ERR_LOCKED: RingBusyError}


cdef int check(gdn_status status) except -1:
    """The exception of a refused call, whose text is in error_text if it has one."""
    if status == GDN_OK:
        return 0
    text = (<bytes>(error_text if error_text[0] else c_status_string(status))).decode()
    error_text[0] = 0
    raise EXCEPTIONS.get(status, ValueError)(text)


cdef int32_t choice(dict values, value, str name) except? -1:
    """The C value of a named option."""
    try:
        return values[value]
    except (KeyError, TypeError):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}, got {value!r}") from None


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

cdef gdn_status check_option(const error_buffer *error, const char *name, int32_t value, int32_t least,
                             int32_t most) noexcept nogil:
    return GDN_OK if least <= value <= most else fail(error, GDN_ERR_VALUE, "%s: unknown value %d", name, value)


cdef gdn_status check_eps(const error_buffer *error, const char *name, float eps) noexcept nogil:
    if eps >= 0 and isfinite(eps):
        return GDN_OK
    return fail(error, GDN_ERR_VALUE, "%s must be finite and not negative, got %g", name, <double>eps)


cdef gdn_status check_counts(const error_buffer *error, int32_t n_threads, int32_t reserved, int64_t n_snapshots) noexcept nogil:
    if n_threads < 0 or reserved != 0:
        return fail(error, GDN_ERR_VALUE, "n_threads is %d, reserved %d", n_threads, reserved)
    if n_snapshots < 1:
        return fail(error, GDN_ERR_VALUE, "snapshots must be at least 1, got %lld", n_snapshots)
    return GDN_OK


cdef gdn_status check_tensor(const error_buffer *error, const char *name, const gdn_tensor *t, int64_t ne0, int64_t ne1,
                             int64_t ne2, int64_t ne3, bint writable) noexcept nogil:
    """A float32 tensor's type, extents and alignment; nothing is dereferenced."""
    if t.type != GDN_TYPE_F32:
        return fail(error, GDN_ERR_TYPE, "%s must be float32, got type %d", name, t.type)
    return check_typed(error, name, t, ne0, ne1, ne2, ne3, writable)


cdef inline int64_t type_size(int32_t type) noexcept nogil:
    return 4 if type == GDN_TYPE_F32 else 2


cdef gdn_status check_typed(const error_buffer *error, const char *name, const gdn_tensor *t, int64_t ne0, int64_t ne1,
                            int64_t ne2, int64_t ne3, bint writable) noexcept nogil:
    """The same of an activation or a state: float32, float16 or bfloat16."""
    cdef int64_t want[4]
    cdef int64_t low, high, size = type_size(t.type)
    cdef int i
    cdef bint empty = False
    want[:] = [ne0, ne1, ne2, ne3]
    if t.type != GDN_TYPE_F32 and t.type != GDN_TYPE_F16 and t.type != GDN_TYPE_BF16:
        return fail(error, GDN_ERR_TYPE, "%s must be float32, float16 or bfloat16, got type %d", name, t.type)
    for i in range(4):
        if want[i] < 0:
            return fail(error, GDN_ERR_SHAPE, "%s: extent %lld is negative", name, want[i])
        if t.ne[i] != want[i]:
            return fail(error, GDN_ERR_SHAPE,
                        "%s has extents [%lld, %lld, %lld, %lld], the call needs [%lld, %lld, %lld, %lld]", name,
                        t.ne[3], t.ne[2], t.ne[1], t.ne[0], ne3, ne2, ne1, ne0)
        empty = empty or want[i] == 0
    if empty:
        return GDN_OK
    if t.data == NULL:
        return fail(error, GDN_ERR_NULL, "%s: data is NULL", name)
    if <uintptr_t>t.data & (size - 1):
        return fail(error, GDN_ERR_STRIDE, "%s: address %p is no multiple of %lld", name, t.data, size)
    for i in range(4):
        if t.ne[i] > 1 and t.nb[i] & (size - 1):
            return fail(error, GDN_ERR_STRIDE, "%s: stride %lld is no multiple of %lld", name, t.nb[i], size)
        if writable and t.ne[i] > 1 and t.nb[i] == 0:
            return fail(error, GDN_ERR_STRIDE, "%s is written, but an axis of extent %lld has stride 0", name,
                        t.ne[i])
    if span_of(4, t.ne, t.nb, size, &low, &high):
        return fail(error, GDN_ERR_SHAPE,
                    "%s spans more than 2^63 bytes: extents [%lld, %lld, %lld, %lld], byte strides [%lld, %lld, %lld, %lld]",
                    name, t.ne[3], t.ne[2], t.ne[1], t.ne[0], t.nb[3], t.nb[2], t.nb[1], t.nb[0])
    return GDN_OK
