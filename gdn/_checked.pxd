# Arithmetic that notices overflow, and which bytes a tensor's elements reach.

from libc.stdint cimport int64_t

cdef extern from *:
    """
    static inline int gdn_multiply(int64_t a, int64_t b, int64_t *c) { return __builtin_mul_overflow(a, b, c); }
    static inline int gdn_add(int64_t a, int64_t b, int64_t *c) { return __builtin_add_overflow(a, b, c); }
    """
    bint multiply "gdn_multiply"(int64_t a, int64_t b, int64_t *c) nogil      # True on overflow
    bint add "gdn_add"(int64_t a, int64_t b, int64_t *c) nogil


cdef inline bint span_of(int n, const int64_t *ne, const int64_t *nb, int64_t size, int64_t *low,
                         int64_t *high) noexcept nogil:
    """Bytes before and behind the first element's address that the elements reach; both 0 without elements.  True if
    they, or the elements of `size` bytes together, are more than 2^63."""
    cdef int64_t total = size, reach
    cdef bint bad = False, empty = False
    cdef int i
    low[0], high[0] = 0, size
    for i in range(n):
        if ne[i] == 0:
            empty = True
            continue
        bad |= multiply(total, ne[i], &total)
        bad |= multiply(ne[i] - 1, nb[i], &reach)
        bad |= add(low[0], reach, low) if reach < 0 else add(high[0], reach, high)
    if empty:
        low[0] = high[0] = 0
    return bad
