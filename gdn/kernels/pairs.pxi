# Products of a chunk's tokens with each other, k_i k_j and q_i k_j for j <= i: dot products, lane by lane over the key
# channels, so that a decay between i and j may be there for every channel.  A product of tiles would compute a whole
# square, of a transposed K.
#
# Needs: simd.pxi.

cdef enum:
    NPAIR = 4                    # vectors of key channels whose k_i and q_i stay in registers


cdef void pair_products(float *KK, float *QK, const float *q, const float *k, int64_t ld, int64_t n) noexcept nogil:
    """K K^T and Q K^T of a chunk, [n][PAIR_LD], for j <= i.  Shared by value heads.  q, k [n][ld]."""
    cdef int64_t i
    for i in range(n):
        pairs_of_row(KK + i * PAIR_LD, QK + i * PAIR_LD, q, k, k, i, 1, 1, ld, False)


cdef inline void pairs_of_row(float *KK_i, float *QK_i, const float *q, const float *k, const float *a, int64_t i,
                              float scale_k, float scale_q, int64_t ld, const bint decayed) noexcept nogil:
    """KK_i[j] = scale_k k_i k_j, QK_i[j] = scale_q q_i k_j for j <= i, undefined behind up to whole vectors.  decayed: of
    k and q of token i as tokens i down to j + 1 decay them, by their rows of a [n][ld]; else a is not read."""
    cdef vf kk[PAIR_LD]
    cdef vf qk[PAIR_LD]
    cdef int64_t c, j
    for c from 0 <= c < ld by NPAIR * VL:
        if c + NPAIR * VL <= ld:
            pairs_of_channels(kk, qk, q + c, k + c, a + c, i, ld, c == 0, NPAIR, decayed)
        elif c + 3 * VL == ld:
            pairs_of_channels(kk, qk, q + c, k + c, a + c, i, ld, c == 0, 3, decayed)
        elif c + 2 * VL == ld:
            pairs_of_channels(kk, qk, q + c, k + c, a + c, i, ld, c == 0, 2, decayed)
        else:
            pairs_of_channels(kk, qk, q + c, k + c, a + c, i, ld, c == 0, 1, decayed)
    for j from 0 <= j < i + 1 by VL:
        v_store(KK_i + j, v_sums(kk + j) * scale_k)
        v_store(QK_i + j, v_sums(qk + j) * scale_q)


cdef inline void pairs_of_channels(vf *kk, vf *qk, const float *q, const float *k, const float *a, int64_t i, int64_t ld,
                                   bint first, const int n, const bint decayed) noexcept nogil:
    """kk[j], qk[j] (+)= lanewise products of token i with token j over n vectors of channels."""
    cdef vf k_i[NPAIR]
    cdef vf q_i[NPAIR]
    cdef vf sum_k, sum_q
    cdef int64_t j
    cdef int c
    for c in range(n):
        k_i[c] = v_load(k + i * ld + c * VL)
        q_i[c] = v_load(q + i * ld + c * VL)
    for j in range(i, -1, -1):
        sum_k = v_set(0) if first else kk[j]
        sum_q = v_set(0) if first else qk[j]
        for c in range(n):
            sum_k += k_i[c] * v_load(k + j * ld + c * VL)
            sum_q += q_i[c] * v_load(k + j * ld + c * VL)
            if decayed:
                k_i[c] = k_i[c] * v_load(a + j * ld + c * VL)
                q_i[c] = q_i[c] * v_load(a + j * ld + c * VL)
        kk[j] = sum_k
        qk[j] = sum_q
