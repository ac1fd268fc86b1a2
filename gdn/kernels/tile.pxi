# The microkernel: an MR x nv block of vectors held in registers.
#
# Contract of every function here: acc is MR rows of NV vectors, row m at acc[m * NV], of which nv (1..NV, a constant
# where it is inlined) are in use.  A is read as scalars a[m * a_row + k * a_k] (tile_mul_block: a block, see the end), B as
# vectors b[k * NV * VL + j * VL]: B is always a packed panel, NV * VL floats a row.  Strides are in floats.  Rows of A up
# to MR and the whole panel width of B are read, so both are padded; with n_k = 0 neither is read.
#
# Needs: simd.pxi.


cdef inline void tile_clear(vf *acc, const int nv) noexcept nogil:
    cdef int m, j
    for m in range(MR):
        for j in range(nv):
            acc[m * NV + j] = v_set(0)


cdef inline void tile_mul(vf *acc, const float *a, int64_t a_row, int64_t a_k, const float *b, int64_t n_k,
                          const int nv) noexcept nogil:
    """acc += A B, A being MR x n_k."""
    cdef int64_t k
    cdef int m, j
    for k in range(n_k):
        for m in range(MR):
            for j in range(nv):
                acc[m * NV + j] += a[m * a_row + k * a_k] * v_load(b + k * NV * VL + j * VL)


cdef inline void tile_mul_block(vf *acc, const float *a, const float *b, int64_t n_k, const int nv) noexcept nogil:
    """acc += A B, A's rows a block (block_vector)."""
    cdef int64_t c, k
    cdef int m, j
    for c from 0 <= c < n_k by VL:
        for k in range(min(<int64_t>VL, n_k - c)):
            for m in range(MR):
                for j in range(nv):
                    acc[m * NV + j] += a[c * MR + m * VL + k] * v_load(b + (c + k) * NV * VL + j * VL)


cdef inline void tile_mul_sub(vf *acc, const float *a, int64_t a_row, const float *b, int64_t n_k,
                              const int nv) noexcept nogil:
    """acc -= A B, A's rows contiguous."""
    cdef int64_t k
    cdef int m, j
    for k in range(n_k):
        for m in range(MR):
            for j in range(nv):
                acc[m * NV + j] -= a[m * a_row + k] * v_load(b + k * NV * VL + j * VL)


cdef inline void tile_solve_unit_lower(vf *acc, const float *a, int64_t a_row, const int nv) noexcept nogil:
    """acc <- (I + strict_lower(A))^-1 acc for the MR x MR block A; nothing on or above A's diagonal is read."""
    cdef int k, m, j
    for k in range(MR):
        for m in range(k + 1, MR):
            for j in range(nv):
                acc[m * NV + j] -= a[m * a_row + k] * acc[k * NV + j]


cdef inline void tile_mul_lower(vf *acc, const float *a, int64_t a_row, const float *b, const int nv) noexcept nogil:
    """acc += lower(A) B for the MR x MR block A, diagonal included; nothing above it is read or multiplied."""
    cdef int k, m, j
    for k in range(MR):
        for m in range(k, MR):
            for j in range(nv):
                acc[m * NV + j] += a[m * a_row + k] * v_load(b + k * NV * VL + j * VL)


cdef inline void tile_store(const vf *acc, float *x, int64_t x_row, int64_t n_rows, const int nv) noexcept nogil:
    """The first n_rows rows of acc to x."""
    cdef int64_t m
    cdef int j
    if n_rows >= MR:
        for m in range(MR):
            for j in range(nv):
                v_store(x + m * x_row + j * VL, acc[m * NV + j])
    else:
        for m in range(n_rows):
            for j in range(nv):
                v_store(x + m * x_row + j * VL, acc[m * NV + j])


# Rows that meet the whole state lie in blocks of MR rows, [block][vector of columns][row][VL]: within a block every row
# is a constant offset away, while MR multiples of a stride would not fit into the integer registers.

cdef inline float *block_vector(float *blocks, int64_t i, int64_t c, int64_t ld) noexcept nogil:
    """Columns [c, c + VL) of row i of rows of ld floats."""
    return blocks + i // MR * (MR * ld) + c * MR + i % MR * VL


cdef void pack_blocks(float *blocks, const float *rows, int64_t n, int64_t ld) noexcept nogil:
    """rows [n][ld] as blocks."""
    cdef int64_t i, c
    for i in range(n):
        for c from 0 <= c < ld by VL:
            v_store(block_vector(blocks, i, c, ld), v_load(rows + i * ld + c))
