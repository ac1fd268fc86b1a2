# Scratch of Python calls: kept for the next call up to a bound, so that one in steady state allocates nothing.
#
# Needs: nothing.

from libc.stdlib cimport free, malloc

cdef enum:
    MOST_IDLE = 64 << 20             # bytes kept between calls; more goes back to the system

cdef struct arena:
    size_t size                      # of data
    arena *next
    char *data                       # behind this struct

cdef arena *idle = NULL              # all of these are guarded by the GIL: calls take and give while they hold it
cdef size_t idle_bytes = 0


cdef arena *arena_take(size_t n_bytes) except NULL:
    """An arena of at least n_bytes, this caller's own until arena_give."""
    global idle, idle_bytes
    cdef arena *a = idle
    if a != NULL:
        idle = a.next
        idle_bytes -= a.size
        if a.size >= n_bytes:
            return a
        free(a)
    a = <arena *>malloc(sizeof(arena) + n_bytes)
    if a == NULL:
        raise MemoryError(f"scratch of {n_bytes} bytes")
    a.size, a.data = n_bytes, <char *>(a + 1)
    return a


cdef void arena_give(arena *a) noexcept:
    global idle, idle_bytes
    if idle_bytes + a.size > MOST_IDLE:
        free(a)
        return
    idle_bytes += a.size
    a.next = idle
    idle = a


def scratch_kept():
    """Bytes of scratch that wait for the next call."""
    return idle_bytes
