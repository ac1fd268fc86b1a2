# Scratch of Python calls: arenas that grow and are reused, so that a call in steady state allocates nothing.

from libc.stdlib cimport free, malloc

cdef struct arena:
    char *data
    size_t size
    arena *next

cdef arena *idle = NULL              # guarded by the GIL: calls take one before they release it


cdef arena *arena_take(size_t n_bytes) except NULL:
    """An arena of at least n_bytes, this caller's own until arena_give."""
    global idle
    cdef arena *a = idle
    if a != NULL:
        idle = a.next
    else:
        a = <arena *>malloc(sizeof(arena))
        if a == NULL:
            raise MemoryError("scratch")
        a.data = NULL
        a.size = 0
    if a.size < n_bytes:
        free(a.data)
        a.data = <char *>malloc(n_bytes)
        a.size = n_bytes if a.data != NULL else 0
        if a.data == NULL:
            arena_give(a)
            raise MemoryError(f"scratch of {n_bytes} bytes")
    return a


cdef void arena_give(arena *a) noexcept:
    global idle
    a.next = idle
    idle = a
