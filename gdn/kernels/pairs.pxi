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
    pairs_of_row(KK_i, QK_i, kk, qk, q + i * ld, k, NULL, a, NULL, i, scale_k, scale_q, ld, ld, decayed, False)


cdef void pairs_of_path(float *KK_i, float *QK_i, vf *kk, vf *qk, const float *q_i, const float **k_at, const float *a,
                        const int64_t *path, int64_t n, float scale_k, float scale_q, int64_t n_channels,
                        int64_t ld) noexcept nogil:
    """The same of the last of n columns of a path with each of them, KK_i[p] for column path[p], whose k is at k_at[path[p]];
    decayed unless a is NULL.  kk, qk: room for n vectors and up to VL more.  q_i [n_channels], whole vectors."""
    if a == NULL:
        pairs_of_row(KK_i, QK_i, kk, qk, q_i, NULL, k_at, a, path, n - 1, scale_k, scale_q, n_channels, ld, False, True)
    else:
        pairs_of_row(KK_i, QK_i, kk, qk, q_i, NULL, k_at, a, path, n - 1, scale_k, scale_q, n_channels, ld, True, True)


cdef inline void pairs_of_row(float *KK_i, float *QK_i, vf *kk, vf *qk, const float *q_i, const float *k, const float **k_at,
                              const float *a, const int64_t *path, int64_t i, float scale_k, float scale_q,
                              int64_t n_channels, int64_t ld, const bint decayed, const bint along) noexcept nogil:
    """along a path, or of columns 0 to i, whose keys are k [i + 1][ld]."""
    cdef int64_t c, j
    for c from 0 <= c < n_channels by NPAIR * VL:
        if c + NPAIR * VL <= n_channels:
            pairs_of_channels(kk, qk, q_i, k, k_at, a, path, i, ld, c, NPAIR, decayed, along)
        elif c + 3 * VL == n_channels:
            pairs_of_channels(kk, qk, q_i, k, k_at, a, path, i, ld, c, 3, decayed, along)
        elif c + 2 * VL == n_channels:
            pairs_of_channels(kk, qk, q_i, k, k_at, a, path, i, ld, c, 2, decayed, along)
        else:
            pairs_of_channels(kk, qk, q_i, k, k_at, a, path, i, ld, c, 1, decayed, along)
    for j from 0 <= j < i + 1 by VL:
        v_store(KK_i + j, v_sums(kk + j) * scale_k)
        v_store(QK_i + j, v_sums(qk + j) * scale_q)


cdef inline void pairs_of_channels(vf *kk, vf *qk, const float *q_i, const float *k, const float **k_at, const float *a,
                                   const int64_t *path, int64_t i, int64_t ld, int64_t c0, const int n,
                                   const bint decayed, const bint along) noexcept nogil:
    """kk[p], qk[p] (+)= lanewise products of token i with column p of its path, over n vectors of channels from c0 on."""
    cdef vf k_i[NPAIR]
    cdef vf q_n[NPAIR]
    cdef vf sum_k, sum_q
    cdef const float *k_p = k_at[path[i]] if along else k + i * ld
    cdef const float *a_p
    cdef int64_t p
    cdef int c
    for c in range(n):
        k_i[c] = v_load(k_p + c0 + c * VL)
        q_n[c] = v_load(q_i + c0 + c * VL)
    for p in range(i, -1, -1):
        k_p = k_at[path[p]] if along else k + p * ld
        sum_k = v_set(0) if c0 == 0 else kk[p]
        sum_q = v_set(0) if c0 == 0 else qk[p]
        for c in range(n):
            sum_k += k_i[c] * v_load(k_p + c0 + c * VL)
            sum_q += q_n[c] * v_load(k_p + c0 + c * VL)
        kk[p] = sum_k
        qk[p] = sum_q
        if decayed:
            a_p = a + (path[p] if along else p) * ld + c0
            for c in range(n):
                k_i[c] = k_i[c] * v_load(a_p + c * VL)
                q_n[c] = q_n[c] * v_load(a_p + c * VL)
