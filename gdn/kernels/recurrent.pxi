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
    AHEAD = 8                    # groups of rows between use and prefetch


cdef inline void rows_dots(const token *t, vf *dots_k, vf *dots_q, int64_t S_k, const char *src, int64_t src_nb,
                           const int n) noexcept nogil:
    """Lanewise S^T kd and S^T qd of n <= QUAD rows."""
    cdef vf acc_k[QUAD]                      # registers; in the caller's array every pass would be stored
    cdef vf acc_q[QUAD]
    cdef vf kd, qd, s
    cdef int64_t c
    cdef int m
    for m in range(n):
        acc_k[m] = v_set(0)
        acc_q[m] = v_set(0)
    for c from 0 <= c < S_k by VL:
        kd = v_load(t.kd + c)
        qd = v_load(t.qd + c)
        for m in range(n):
            v_prefetch(<const float *>(src + (m + AHEAD * VL // 2) * src_nb) + c, VL)
            s = v_load_once(<const float *>(src + m * src_nb) + c)
            acc_k[m] += kd * s
            acc_q[m] += qd * s
    for m in range(n):
        dots_k[m] = acc_k[m]
        dots_q[m] = acc_q[m]


cdef inline void rows_update(const token *t, const vf *d, int64_t S_k, char *dst, int64_t dst_nb, const char *src,
                             int64_t src_nb, const int n) noexcept nogil:
    """S <- decay S + k d^T on n <= QUAD rows."""
    cdef const float *t_k = t.k              # held: a store to the state could change t, for all C knows
    cdef const float *t_hi = t.hi
    cdef const float *t_lo = t.lo
    cdef vf hi, lo, k, s
    cdef int64_t c
    cdef int m
    for c from 0 <= c < S_k by VL:
        k = v_load(t_k + c)
        hi = v_load(t_hi + c)
        lo = v_load(t_lo + c)
        for m in range(n):
            s = v_load_once(<const float *>(src + m * src_nb) + c)
            v_store(<float *>(dst + m * dst_nb) + c, s * hi + (s * lo + k * d[m]))


cdef inline void rows_step(const token *t, int64_t S_k, char *dst, int64_t dst_nb, const char *src, int64_t src_nb,
                           int64_t j0, const int n) noexcept nogil:
    """Value columns [j0, j0 + n) of a state whose key index is contiguous (ggml's order); n is VL / 2 or 1."""
    cdef vf acc[VL]
    cdef vf d_m[VL]
    cdef vf dots, d
    cdef int m
    src += j0 * src_nb
    dst += j0 * dst_nb
    for m in range(VL):
        acc[m] = v_set(0)
    for m from 0 <= m < n by QUAD:
        rows_dots(t, acc + m, acc + VL // 2 + m, S_k, src + m * src_nb, src_nb, 1 if n == 1 else QUAD)
    dots = v_sums(acc)                       # lanes m: S^T kd of row j0 + m; lanes VL/2 + m: S^T qd
    d = t.beta * (v_load(t.v + j0) - dots)
    v_store_head(t.out + j0, t.scale * (v_swap_halves(dots) + t.kq * d), n)
    for m in range(n):
        d_m[m] = v_lane(d, m)
    for m from 0 <= m < n by QUAD:
        rows_update(t, d_m + m, S_k, dst + m * dst_nb, dst_nb, src + m * src_nb, src_nb, 1 if n == 1 else QUAD)


cdef inline void columns_step(const token *t, int64_t S_k, char *dst, int64_t dst_nb, const char *src,
                              int64_t src_nb, const char *next_src, int64_t j0, const int n) noexcept nogil:
    """Value columns [j0, j0 + n * VL) of a state whose value index is contiguous (FLA's order, and packed panels).
    Both passes fetch half of next_src, the state that comes after, so that memory is busy all the time."""
    cdef vf acc_k[NC]
    cdef vf acc_q[NC]
    cdef vf s
    cdef float kd, qd, hi, lo, k
    cdef const float *t_k = t.k
    cdef const float *t_hi = t.hi
    cdef const float *t_lo = t.lo
    cdef int64_t c
    cdef int j
    for j in range(n):
        acc_k[j] = v_set(0)
        acc_q[j] = v_set(0)
    for c in range(S_k):
        v_prefetch(<const float *>(next_src + c * src_nb) + j0, n * VL // 2)
        kd = t.kd[c]
        qd = t.qd[c]
        for j in range(n):
            s = v_load_once(<const float *>(src + c * src_nb) + j0 + j * VL)
            acc_k[j] += kd * s
            acc_q[j] += qd * s
    for j in range(n):
        acc_k[j] = t.beta * (v_load(t.v + j0 + j * VL) - acc_k[j])
        v_store(t.out + j0 + j * VL, t.scale * (acc_q[j] + t.kq * acc_k[j]))
    for c in range(S_k):
        v_prefetch(<const float *>(next_src + c * src_nb) + j0 + n * VL // 2, n * VL // 2)
        hi = t_hi[c]
        lo = t_lo[c]
        k = t_k[c]
        for j in range(n):
            s = v_load_once(<const float *>(src + c * src_nb) + j0 + j * VL)
            v_store(<float *>(dst + c * dst_nb) + j0 + j * VL, s * hi + (s * lo + k * acc_k[j]))
