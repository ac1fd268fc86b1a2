# Products of a chunk's tokens with each other, k_i k_j and q_i k_j for j <= i: dot products, lane by lane over the key
# channels, so that a decay between i and j may be there for every channel.  A product of tiles would compute a whole
# square, of a transposed K.  A token of a tree, or after a log's entries, goes along its path: the columns it sees, itself
# the last.
#
# Needs: simd.pxi.

cdef enum:
    NPAIR = 4                    # vectors of key channels whose k_i and q_i stay in registers


cdef void pair_products(float *KK, float *QK, const float *q, const float *k, int64_t ld, int64_t n) noexcept nogil:
    """K K^T and Q K^T of a chunk, [n][PAIR_LD], for j <= i.  Shared by value heads.  q, k [n][ld]."""
    cdef int64_t i
    for i in range(n):
        pairs_of_token(KK + i * PAIR_LD, QK + i * PAIR_LD, q, k, k, i, 1, 1, ld, False)


cdef inline void pairs_of_token(float *KK_i, float *QK_i, const float *q, const float *k, const float *a, int64_t i,
                                float scale_k, float scale_q, int64_t ld, const bint decayed) noexcept nogil:
    """KK_i[j] = scale_k k_i k_j, QK_i[j] = scale_q q_i k_j for j <= i, undefined behind up to whole vectors.  decayed: of
    k and q of token i as tokens i down to j + 1 decay them, by their rows of a [n][ld]; else a is not read."""
    cdef vf kk[PAIR_LD]
    cdef vf qk[PAIR_LD]
    pairs_of_row(KK_i, QK_i, kk, qk, q + i * ld, k, a, NULL, i, scale_k, scale_q, ld, decayed, False)


cdef void pairs_of_path(float *KK_i, float *QK_i, vf *kk, vf *qk, const float *q_i, const float *k, const float *a,
                        const int64_t *path, int64_t n, float scale_k, float scale_q, int64_t ld) noexcept nogil:
    """The same of the last of n columns of a path with each of them, KK_i[p] for column path[p]; decayed unless a is NULL.
    kk, qk: room for n vectors and up to VL more.  q_i [ld]."""
    if a == NULL:
        pairs_of_row(KK_i, QK_i, kk, qk, q_i, k, k, path, n - 1, scale_k, scale_q, ld, False, True)
    else:
        pairs_of_row(KK_i, QK_i, kk, qk, q_i, k, a, path, n - 1, scale_k, scale_q, ld, True, True)


cdef inline void pairs_of_row(float *KK_i, float *QK_i, vf *kk, vf *qk, const float *q_i, const float *k, const float *a,
                              const int64_t *path, int64_t i, float scale_k, float scale_q, int64_t ld,
                              const bint decayed, const bint along) noexcept nogil:
    cdef int64_t c, j
    for c from 0 <= c < ld by NPAIR * VL:
        if c + NPAIR * VL <= ld:
            pairs_of_channels(kk, qk, q_i + c, k + c, a + c, path, i, ld, c == 0, NPAIR, decayed, along)
        elif c + 3 * VL == ld:
            pairs_of_channels(kk, qk, q_i + c, k + c, a + c, path, i, ld, c == 0, 3, decayed, along)
        elif c + 2 * VL == ld:
            pairs_of_channels(kk, qk, q_i + c, k + c, a + c, path, i, ld, c == 0, 2, decayed, along)
        else:
            pairs_of_channels(kk, qk, q_i + c, k + c, a + c, path, i, ld, c == 0, 1, decayed, along)
    for j from 0 <= j < i + 1 by VL:
        v_store(KK_i + j, v_sums(kk + j) * scale_k)
        v_store(QK_i + j, v_sums(qk + j) * scale_q)


cdef inline void pairs_of_channels(vf *kk, vf *qk, const float *q_i, const float *k, const float *a, const int64_t *path,
                                   int64_t i, int64_t ld, bint first, const int n, const bint decayed,
                                   const bint along) noexcept nogil:
    """kk[p], qk[p] (+)= lanewise products of token i with token p, or with column path[p] (along), over n vectors of
    channels."""
    cdef vf k_i[NPAIR]
    cdef vf q_n[NPAIR]
    cdef vf sum_k, sum_q
    cdef int64_t p, j
    cdef int c
    j = path[i] if along else i
    for c in range(n):
        k_i[c] = v_load(k + j * ld + c * VL)
        q_n[c] = v_load(q_i + c * VL)
    for p in range(i, -1, -1):
        j = path[p] if along else p
        sum_k = v_set(0) if first else kk[p]
        sum_q = v_set(0) if first else qk[p]
        for c in range(n):
            sum_k += k_i[c] * v_load(k + j * ld + c * VL)
            sum_q += q_n[c] * v_load(k + j * ld + c * VL)
            if decayed:
                k_i[c] = k_i[c] * v_load(a + j * ld + c * VL)
                q_n[c] = q_n[c] * v_load(a + j * ld + c * VL)
        kk[p] = sum_k
        qk[p] = sum_q
