# One token of one value head on a state in place, in either order.  With kd = decay * k and qd = decay * q,
#
#     d = beta (v - S^T kd)         o = scale (S^T qd + (k.q) d)         S <- decay S + k d^T
#
# so both dots are taken in the first pass over the old state, and the state is read and written once.  The decay is
# applied as hi + lo: rounded to one float it would be off the same way at every token.


cdef struct token:               # prepared once per token and value head; [ld] each, zero padded, but v and out [S_v]
    float *k
    float *kd
    float *qd
    float *hi
    float *lo
    float *v                     # this part's columns, padded to whole vectors
    float *out
    float beta
    float kq
    float scale


cdef enum:
    AHEAD = 2                    # groups of rows between use and prefetch


cdef inline void rows_step(const token *t, int64_t S_k, char *dst, int64_t dst_nb, const char *src, int64_t src_nb,
                           int64_t j0, const int n) noexcept nogil:
    """Value columns [j0, j0 + n) of a state whose key index is contiguous (ggml's order); n <= VL / 2."""
    cdef vf acc[VL]
    cdef vf kd, qd, hi, lo, k, s, dots, d, o
    cdef int64_t c
    cdef int m
    for m in range(VL):
        acc[m] = v_set(0)
    for c from 0 <= c < S_k by VL:
        kd = v_load(t.kd + c)
        qd = v_load(t.qd + c)
        for m in range(n):
            s = v_load(<const float *>(src + (j0 + m) * src_nb) + c)
            v_prefetch(<const float *>(src + (j0 + m + AHEAD * n) * src_nb) + c, VL)
            acc[m] += kd * s
            acc[VL // 2 + m] += qd * s
    dots = v_sums(acc)                       # lanes m: S^T kd of row j0 + m; lanes VL/2 + m: S^T qd
    d = t.beta * (v_load(t.v + j0) - dots)
    o = t.scale * (v_swap_halves(dots) + t.kq * d)
    v_store_head(t.out + j0, o, n)
    for c from 0 <= c < S_k by VL:
        k = v_load(t.k + c)
        hi = v_load(t.hi + c)
        lo = v_load(t.lo + c)
        for m in range(n):
            s = v_load(<const float *>(src + (j0 + m) * src_nb) + c)
            v_store(<float *>(dst + (j0 + m) * dst_nb) + c, s * hi + (s * lo + k * v_lane(d, m)))


cdef inline void columns_step(const token *t, int64_t S_k, char *dst, int64_t dst_nb, const char *src,
                              int64_t src_nb, const char *next_src, int64_t j0, const int n) noexcept nogil:
    """Value columns [j0, j0 + n * VL) of a state whose value index is contiguous (FLA's order, and packed panels).
    The second pass finds its rows in cache and fetches those of next_src, the state that comes after, meanwhile."""
    cdef vf acc_k[NC]
    cdef vf acc_q[NC]
    cdef vf s
    cdef int64_t c
    cdef int j
    for j in range(n):
        acc_k[j] = v_set(0)
        acc_q[j] = v_set(0)
    for c in range(S_k):
        for j in range(n):
            s = v_load(<const float *>(src + c * src_nb) + j0 + j * VL)
            acc_k[j] += t.kd[c] * s
            acc_q[j] += t.qd[c] * s
    for j in range(n):
        acc_k[j] = t.beta * (v_load(t.v + j0 + j * VL) - acc_k[j])
        v_store(t.out + j0 + j * VL, t.scale * (acc_q[j] + t.kq * acc_k[j]))
    for c in range(S_k):
        v_prefetch(<const float *>(next_src + c * src_nb) + j0, n * VL)
        for j in range(n):
            s = v_load(<const float *>(src + c * src_nb) + j0 + j * VL)
            v_store(<float *>(dst + c * dst_nb) + j0 + j * VL, s * t.hi[c] + (s * t.lo[c] + t.k[c] * acc_k[j]))
