# Between caller memory of any strides (bytes) and packed scratch (floats, full vectors, zero padding).
#
# Needs: simd.pxi.


cdef inline int64_t round_up(int64_t n, int64_t unit) noexcept nogil:
    return (n + unit - 1) // unit * unit


cdef struct scratch_cursor:
    char *base                   # NULL to count only
    size_t used


cdef inline float *carve(scratch_cursor *at, int64_t n_floats) noexcept nogil:
    """The next n_floats of scratch, rounded to cache lines; NULL where only bytes are counted."""
    cdef size_t used = at.used
    at.used += round_up(n_floats * <int64_t>sizeof(float), 64)
    return NULL if at.base == NULL else <float *>(at.base + used)


cdef inline float at(const char *p) noexcept nogil:
    return (<const float *>p)[0]


cdef inline void pack_row(float *row, const char *src, int64_t nb, int64_t n, int64_t ld) noexcept nogil:
    """row[0..ld) = n floats of src, nb bytes apart, then zeros."""
    cdef int64_t i = 0
    if nb == 4:
        while i + VL <= n:
            v_store(row + i, v_load(<const float *>src + i))
            i += VL
        if i < n:
            v_store(row + i, v_load_head(<const float *>src + i, n - i))
            i += VL
    else:
        while i < n:
            row[i] = at(src + i * nb)
            i += 1
    while i < ld:
        row[i] = 0
        i += 1


cdef inline void unpack_row(char *dst, int64_t nb, const float *row, int64_t n) noexcept nogil:
    cdef int64_t i = 0
    if nb == 4:
        while i + VL <= n:
            v_store(<float *>dst + i, v_load(row + i))
            i += VL
        if i < n:
            v_store_head(<float *>dst + i, v_load(row + i), n - i)
    else:
        for i in range(n):
            (<float *>(dst + i * nb))[0] = row[i]


cdef inline vf lanes_load(const char *p, int64_t nb, int64_t lanes) noexcept nogil:
    """lanes <= VL floats nb bytes apart, zeros behind."""
    cdef float x[VL]
    cdef int64_t i
    if nb == 4 and lanes == VL:
        return v_load(<const float *>p)
    memset(x, 0, sizeof(x))
    for i in range(lanes):
        x[i] = at(p + i * nb)
    return v_load(x)


cdef inline void lanes_store(char *p, int64_t nb, vf v, int64_t lanes) noexcept nogil:
    cdef float x[VL]
    cdef int64_t i
    if nb == 4 and lanes == VL:
        v_store(<float *>p, v)
        return
    v_store(x, v)
    for i in range(lanes):
        (<float *>(p + i * nb))[0] = x[i]


cdef inline float dot(const float *a, const float *b, int64_t ld) noexcept nogil:
    cdef vf sum = v_set(0)
    cdef int64_t i
    for i from 0 <= i < ld by VL:
        sum += v_load(a + i) * v_load(b + i)
    return v_sum(sum)


cdef inline void scale_row(float *row, float s, int64_t ld) noexcept nogil:
    cdef int64_t i
    for i from 0 <= i < ld by VL:
        v_store(row + i, v_load(row + i) * s)


cdef inline void fetch_rows(const char *row, int64_t nb, int64_t n_rows, int64_t n) noexcept nogil:
    """n floats of each of n_rows rows, towards the second-level cache."""
    cdef int64_t i
    for i in range(n_rows):
        v_prefetch(<const float *>(row + i * nb), n)


# The working state of a head: panels of NV * VL value columns, each [key][column] and contiguous, so that a panel
# never falls on a few sets of the L1 cache.  Keys are padded to `rows` (zeros), columns to whole panels.
# Caller memory is seen through nb = byte strides over key, value column.

cdef inline float *panel_of(float *panels, int64_t rows, int64_t column) noexcept nogil:
    return panels + column // (NV * VL) * (rows * NV * VL)


cdef void load_state(float *panels, int64_t rows, const char *src, const int64_t *nb, int64_t S_k,
                     int64_t n_columns) noexcept nogil:
    """Columns [0, n_columns) of a head's state, [S_k][n_columns] by the strides nb, to its panels of `rows` padded keys,
    [panel][rows][NV * VL]; src NULL is a state of zeros."""
    cdef int64_t n_panels = (n_columns + NV * VL - 1) // (NV * VL)
    cdef int64_t i, j, width
    cdef float *block
    memset(panels, 0, n_panels * rows * NV * VL * sizeof(float))
    if src == NULL:
        return
    for j from 0 <= j < n_columns by VL:
        block = panel_of(panels, rows, j) + j % (NV * VL)
        width = min(n_columns - j, <int64_t>VL)
        if nb[1] == 4 or width < VL:
            for i in range(S_k):
                copy_columns(block + i * NV * VL, src + i * nb[0] + j * nb[1], nb[1], width)
        else:
            i = 0
            while i + VL <= S_k and nb[0] == 4:
                v_transpose(<char *>(block + i * NV * VL), 4 * NV * VL, src + i * 4 + j * nb[1], nb[1])
                i += VL
            while i < S_k:
                copy_columns(block + i * NV * VL, src + i * nb[0] + j * nb[1], nb[1], width)
                i += 1


cdef void store_state(char *dst, const int64_t *nb, const float *panels, int64_t rows, int64_t S_k,
                      int64_t n_columns) noexcept nogil:
    """The reverse: panels [panel][rows][NV * VL] to columns [0, n_columns) of a head's state by the strides nb."""
    cdef int64_t i, j, width
    cdef const float *block
    for j from 0 <= j < n_columns by VL:
        block = panel_of(<float *>panels, rows, j) + j % (NV * VL)
        width = min(n_columns - j, <int64_t>VL)
        i = 0
        while i + VL <= S_k and nb[0] == 4 and nb[1] != 4 and width == VL:
            v_transpose(dst + i * 4 + j * nb[1], nb[1], <const char *>(block + i * NV * VL), 4 * NV * VL)
            i += VL
        while i < S_k:
            unpack_row(dst + i * nb[0] + j * nb[1], nb[1], block + i * NV * VL, width)
            i += 1


cdef inline void copy_columns(float *row, const char *src, int64_t nb, int64_t n) noexcept nogil:
    cdef int64_t j
    if nb == 4 and n == VL:
        v_store(row, v_load(<const float *>src))
    else:
        for j in range(n):
            row[j] = at(src + j * nb)


cdef void copy_state(char *dst, const int64_t *dst_nb, const char *src, const int64_t *src_nb, int64_t S_k,
                     int64_t n_columns) noexcept nogil:
    """A head's state from caller memory to caller memory; src NULL is zeros.  dst may be src."""
    cdef int64_t i, j
    if dst == src:
        return
    for j in range(n_columns):
        for i in range(S_k):
            (<float *>(dst + i * dst_nb[0] + j * dst_nb[1]))[0] = 0 if src == NULL else at(
                src + i * src_nb[0] + j * src_nb[1])
