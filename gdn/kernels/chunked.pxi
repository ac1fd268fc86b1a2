# One chunk of one value head, panel by panel of value columns:
#
#     (I + A) X = diag(beta) (V - diag(e) K S0)        blocked forward substitution, MR rows at a time
#     O = diag(scale e) Q S0 + P X                      P lower triangular, scale included
#     S <- decay * S0 + K_out^T (diag(to_end) X)
#
# A block of MR rows goes through the first two lines in registers: the state is read twice per block, X once.
#
# Needs: simd.pxi, tile.pxi, decay.pxi (operands).


cdef inline void chunk_rows(const operands *op, int64_t i0, const float *S, const float *v, int64_t v_row, float *out,
                            int64_t out_row, const int nv) noexcept nogil:
    """Tokens [i0, i0 + MR) of a panel.  v, out: this panel's columns of the chunk's rows, strides in floats."""
    cdef vf acc[MR * NV]
    cdef const float *A = op.A + i0 * PAIR_LD
    cdef const float *P = op.P + i0 * PAIR_LD
    cdef float *X = op.X + i0 * NV * VL
    cdef float *X_end = op.X_end + i0 * NV * VL
    cdef int64_t i
    cdef int m, j
    # Rows behind the last token are computed from whatever lies there; nobody reads them.
    tile_clear(acc, nv)
    tile_mul_block(acc, op.k_in + i0 * op.ld, S, op.S_k, nv)
    for m in range(MR):
        i = i0 + m
        for j in range(nv):
            acc[m * NV + j] = op.beta[i] * (
                v_load(v + min(i, op.n - 1) * v_row + j * VL) - op.e[i] * acc[m * NV + j])
    tile_mul_sub(acc, A, PAIR_LD, op.X, i0, nv)
    tile_solve_unit_lower(acc, A + i0, PAIR_LD, nv)
    tile_store(acc, X, NV * VL, MR, nv)
    for m in range(MR):
        for j in range(nv):
            acc[m * NV + j] = acc[m * NV + j] * op.to_end[i0 + m]
    tile_store(acc, X_end, NV * VL, MR, nv)

    tile_clear(acc, nv)
    tile_mul_block(acc, op.q_in + i0 * op.ld, S, op.S_k, nv)
    for m in range(MR):
        for j in range(nv):
            acc[m * NV + j] = acc[m * NV + j] * op.scale_e[i0 + m]
    tile_mul(acc, P, PAIR_LD, 1, op.X, i0, nv)
    tile_mul_lower(acc, P + i0, PAIR_LD, X, nv)
    tile_store(acc, out + i0 * out_row, out_row, op.n - i0, nv)


cdef inline void chunk_state(const operands *op, float *S, const int nv) noexcept nogil:
    """The panel's state after the chunk, MR keys at a time."""
    cdef vf acc[MR * NV]
    cdef vf s
    cdef int64_t c
    cdef int m, j
    for c from 0 <= c < op.state_rows by MR:
        for m in range(MR):
            for j in range(nv):
                s = v_load(S + (c + m) * NV * VL + j * VL)
                acc[m * NV + j] = v_and(s, v_set(op.whole[c + m])) + s * op.part[c + m]
        tile_mul(acc, op.k_out + c, 1, op.ld, op.X_end, op.n, nv)
        tile_store(acc, S + c * NV * VL, NV * VL, MR, nv)


cdef inline void chunk_panel(const operands *op, float *S, const float *v, int64_t v_row, float *out, int64_t out_row,
                             const int nv) noexcept nogil:
    cdef int64_t i0
    for i0 from 0 <= i0 < op.n by MR:
        chunk_rows(op, i0, S, v, v_row, out, out_row, nv)
    chunk_state(op, S, nv)


cdef void chunk_panel_wide(const operands *op, float *S, const float *v, int64_t v_row, float *out,
                           int64_t out_row) noexcept nogil:
    """A panel of more than one vector of columns."""
    chunk_panel(op, S, v, v_row, out, out_row, NV)


cdef void chunk_panel_narrow(const operands *op, float *S, const float *v, int64_t v_row, float *out,
                             int64_t out_row) noexcept nogil:
    """A panel of one vector of columns or less."""
    chunk_panel(op, S, v, v_row, out, out_row, 1)
