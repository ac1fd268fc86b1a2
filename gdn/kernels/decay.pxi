# What the two gates prepare for one chunk of one value head.  Both fill the same `operands`, so that the chunk
# itself (chunked.pxi) is one body: the scalar gate scales rows and columns of products, the per-channel gate scales
# the elements of Q and K.
#
# Decays between tokens are running products of exp(g_t); nothing is ever exp of a difference.
#
# Needs: simd.pxi, tile.pxi (block_vector), pairs.pxi (pairs_of_token).


cdef struct gated_rows:          # scratch; the per-channel gate alone has the last two
    float *k_in                  # blocks
    float *q_in
    float *k_out                 # [CHUNK_MAX][ld]
    float *a                     # [CHUNK_MAX][ld] exp(g)


cdef struct operands:            # of one chunk
    int64_t n                    # tokens of this chunk
    int64_t S_k, ld, state_rows  # keys, and padded: in rows here, in the state
    const float *k_in            # blocks (tile.pxi) of rows that meet the initial state: K, or e * K per channel
    const float *q_in            # likewise for Q
    const float *k_out           # [n][ld] rows that build the final state: K, or Gamma[C] * K per channel
    float e[CHUNK_MAX]           # e_i = decay of tokens 1..i of the chunk; 1 where k_in has it already
    float scale_e[CHUNK_MAX]     # scale * e_i
    float to_end[CHUNK_MAX]      # decay of tokens i+1..C; 1 where k_out has it already
    float beta[PAIR_LD]
    float A[CHUNK_MAX * PAIR_LD]     # beta_i (k_i k_j Gamma_ij), defined for j < i
    float P[CHUNK_MAX * PAIR_LD]     # scale (q_i k_j Gamma_ij), defined for j <= i
    float *whole                 # [ld] decay of the whole chunk per key, as whole + part (recurrent.pxi)
    float *part
    float *X                     # [CHUNK_MAX][NV * VL] a panel's solution, and the same times to_end
    float *X_end


cdef inline void exp_row(float *y, const float *x) noexcept nogil:
    """y = exp(x), PAIR_LD floats; y may be x."""
    cdef int64_t i
    for i from 0 <= i < PAIR_LD by VL:
        v_store(y + i, v_exp(v_load(x + i)))


cdef void prepare_scalar(operands *op, const float *g, const float *KK, const float *QK, float scale) noexcept nogil:
    """Scalar gate.  g [PAIR_LD], zero behind n; KK, QK [n][PAIR_LD] the products K K^T, Q K^T (j <= i)."""
    cdef float a[PAIR_LD]
    cdef float before[PAIR_LD]
    cdef float after[PAIR_LD]
    cdef vf gamma[PAIR_NV]
    cdef double total = 0
    cdef vf whole, part
    cdef int64_t i, j
    for i in range(op.n):                                       # sums: no subtraction, so nothing cancels
        total += g[i]
        before[i] = <float>total
    v_exp_whole_part(v_set(<float>total), &whole, &part)
    total = 0
    for i in range(op.n - 1, -1, -1):
        after[i] = <float>total
        total += g[i]
    for i in range(op.n, PAIR_LD):
        before[i] = after[i] = 0
    exp_row(a, g)
    exp_row(before, before)
    exp_row(after, after)
    for i from 0 <= i < op.ld by VL:
        v_store(op.whole + i, whole)
        v_store(op.part + i, part)
    for j in range(PAIR_NV):
        gamma[j] = v_set(0)
    for i in range(op.n):
        op.e[i] = before[i]
        op.scale_e[i] = scale * before[i]
        op.to_end[i] = after[i]
        for j in range(PAIR_NV):                          # row i of Gamma is row i-1 times exp(g_i)
            gamma[j] = v_with_lane(gamma[j] * a[i], i - j * VL, 1)
            v_store(op.A + i * PAIR_LD + j * VL, v_load(KK + i * PAIR_LD + j * VL) * gamma[j] * op.beta[i])
            v_store(op.P + i * PAIR_LD + j * VL, v_load(QK + i * PAIR_LD + j * VL) * gamma[j] * scale)


cdef void prepare_channels(operands *op, const gated_rows *rows, const float *q, const float *k,
                           float scale) noexcept nogil:
    """Per-channel gate.  rows.a holds g [n][ld] on entry and exp(g) on return; q, k [n][ld]."""
    cdef int64_t ld = op.ld, c, i, at_i
    cdef vf e, total, g, whole, part
    for c from 0 <= c < ld by VL:
        e = v_set(1)
        total = v_set(0)
        for i in range(op.n):
            at_i = i * ld + c
            g = v_load(rows.a + at_i)
            total += g
            g = v_exp(g)
            v_store(rows.a + at_i, g)
            e = e * g
            v_store(block_vector(rows.k_in, i, c, ld), e * v_load(k + at_i))
            v_store(block_vector(rows.q_in, i, c, ld), e * v_load(q + at_i))
        v_exp_whole_part(total, &whole, &part)
        v_store(op.whole + c, whole)
        v_store(op.part + c, part)
        e = v_set(1)
        for i in range(op.n - 1, -1, -1):
            at_i = i * ld + c
            v_store(rows.k_out + at_i, e * v_load(k + at_i))
            e = e * v_load(rows.a + at_i)
    for i in range(op.n):
        op.e[i] = 1
        op.scale_e[i] = scale
        op.to_end[i] = 1
        pairs_of_token(op.A + i * PAIR_LD, op.P + i * PAIR_LD, q, k, rows.a, i, op.beta[i], scale, ld, True)
