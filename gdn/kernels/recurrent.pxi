# One token of one value head on a state in place, in either order.  With kd = decay * k and qd = decay * q,
#
#     d = beta (v - S^T kd)         o = scale (S^T qd + (k.q) d)         S <- decay S + k d^T
#
# so both dots are taken in the first pass over the old state, and the state is read and written once.  The scalar
# gate scales the dots with k and q instead, and keeps its decay in registers.
#
# Either order walks its memory in one ascending stream, which the hardware's prefetchers follow; two rows side by side
# take twice the time.  They pause with the stream, though, while a block of rows is updated from the first-level cache:
# the update fetches what is to be written FETCH bytes on, into the second level.  Nearer, or into the first level, or
# while rows of ggml's order are read, costs more than it brings.
#
# decay = whole + part, whole being 1 where the decay is above 2^-1.5 = 0.354, where n = round(g / ln 2) is 0 or -1 (and
# below sqrt(2)), else 0: rounded to one float, a slow decay would be off the same way at every token.  Per channel, whole
# is a mask of bits; of one decay for all channels it makes two gates.
#
# Needs: simd.pxi, storage.pxi (type_size, v_load_even_odd, v_load_ordered_type, v_split_even_odd, v_store_even_odd,
# v_store_state).


cdef struct token:               # prepared once per token and value head; zero padded
    float *k                     # [ld]
    float *kd                    # [ld]; scalar gate: k itself, and q
    float *qd
    float *whole                 # [ld]; scalar gate: not used
    float *part                  # [ld]; scalar gate: one vector
    float *v                     # this part's columns; on panels padded to whole vectors, like out
    float *out
    float decay                  # per channel: 1
    float beta
    float out_q                  # out = out_q (S^T q) + out_d d: scale and decay, scale and k.q
    float out_d
    int gate                     # DECAY_...


cdef enum:
    DECAY_PER_CHANNEL = 0        # a decay per key channel;
    DECAY_ONE_PLUS_PART = 1      # one for all, whole 1;
    DECAY_PART = 2               # one for all, whole 0
    AHEAD = 8                    # rows of a columns_step from use to fetch
    FETCH = 16384                # bytes from update to fetch: a line with each vector that is one (VL 16), else a row's
    NEAR = 4096                  # the same of a columns_step that writes another place than it read
    ROWS = 4                     # rows whose dots are taken before the first is updated: their reductions overlap


cdef inline vf row_vector(const vf *row, int64_t c, const bint in_memory, const int type) noexcept nogil:
    """Vector c of a row, in memory of that type, or held."""
    return v_load_ordered_type(<const char *>row + c * VL * type_size(type), type) if in_memory else row[c]


cdef inline void row_dots(const vf *kd, const vf *qd, const vf *row, int64_t w, const bint in_memory, const int type,
                          float *dot_k, float *dot_q) noexcept nogil:
    """The dots of kd and qd with one row of w vectors, even and odd vectors apart: two chains of additions each."""
    cdef vf k_even = v_set(0), k_odd = v_set(0), q_even = v_set(0), q_odd = v_set(0)
    cdef vf even, odd
    cdef int64_t c
    for c from 0 <= c < w - 1 by 2:
        even = row_vector(row, c, in_memory, type)
        odd = row_vector(row, c + 1, in_memory, type)
        k_even += kd[c] * even
        q_even += qd[c] * even
        k_odd += kd[c + 1] * odd
        q_odd += qd[c + 1] * odd
    if w % 2:
        even = row_vector(row, w - 1, in_memory, type)
        k_even += kd[w - 1] * even
        q_even += qd[w - 1] * even
    v_two_sums(k_even + k_odd, q_even + q_odd, dot_k, dot_q)


cdef inline vf decayed(const int gate, vf s, vf whole, vf part, vf kd) noexcept nogil:
    """decay s + kd"""
    if gate == DECAY_PER_CHANNEL:
        return v_and(s, whole) + (s * part + kd)
    return s + (s * part + kd) if gate == DECAY_ONE_PLUS_PART else s * part + kd


cdef inline void row_update(char *to, const vf *row, const vf *whole, const vf *part, const vf *k, float d, int64_t w,
                            const bint in_memory, const int gate, const int type) noexcept nogil:
    """to = decay row + k d, w vectors."""
    cdef vf part_0 = part[0]
    cdef int64_t c, nb = VL * type_size(type)
    for c from 0 <= c < w - 1 by 2:
        if VL == 16:
            v_prefetch(<const float *>(to + c * nb + FETCH), VL)
        vector_update(to + c * nb, row_vector(row, c, in_memory, type), whole + c, part + c, part_0, k[c] * d, gate, type)
        if VL == 16 and type == GDN_TYPE_F32:
            v_prefetch(<const float *>(to + (c + 1) * nb + FETCH), VL)
        vector_update(to + (c + 1) * nb, row_vector(row, c + 1, in_memory, type), whole + c + 1, part + c + 1, part_0,
                      k[c + 1] * d, gate, type)
    if w % 2:
        c = w - 1
        if VL == 16:
            v_prefetch(<const float *>(to + c * nb + FETCH), VL)
        vector_update(to + c * nb, row_vector(row, c, in_memory, type), whole + c, part + c, part_0, k[c] * d, gate, type)


cdef inline void vector_update(char *to, vf s, const vf *whole, const vf *part, vf part_0, vf kd, const int gate,
                               const int type) noexcept nogil:
    if gate == DECAY_PER_CHANNEL:
        v_store_state(to, decayed(gate, s, whole[0], part[0], kd), type)
    else:
        v_store_state(to, decayed(gate, s, part_0, part_0, kd), type)


cdef inline void rows_step(const token *t, int64_t w, char *dst, int64_t dst_nb, const char *src, int64_t src_nb,
                           int64_t n_columns, const int held, const int gate, const int type) noexcept nogil:
    """A state whose key index is contiguous (ggml's order), one row of w vectors a value column.  held is w where that is
    a constant: kd and qd then stay in registers; else 0."""
    cdef token T = t[0]                      # a copy: a store to the state could change t, for all C knows
    cdef vf kd_held[HELD_MAX]
    cdef vf qd_held[HELD_MAX]
    cdef const vf *kd = &kd_held[0] if held > 0 else <const vf *>T.kd
    cdef const vf *qd = &qd_held[0] if held > 0 else <const vf *>T.qd
    cdef const vf *k = <const vf *>T.k if gate == DECAY_PER_CHANNEL else kd
    cdef int64_t j = 0
    cdef int c
    if held > 0:
        w = held
    for c in range(held):
        kd_held[c] = v_load(T.kd + c * VL)
        qd_held[c] = v_load(T.qd + c * VL)
    if gate != DECAY_PER_CHANNEL:
        while j + ROWS <= n_columns:
            rows_block(&T, kd, qd, k, w, dst + j * dst_nb, dst_nb, src + j * src_nb, src_nb, j, 0, gate, ROWS, type)
            j += ROWS
    while j < n_columns:
        rows_block(&T, kd, qd, k, w, dst + j * dst_nb, dst_nb, src + j * src_nb, src_nb, j,
                   held if gate == DECAY_PER_CHANNEL else 0, gate, 1, type)
        j += 1


cdef inline void rows_block(const token *T, const vf *kd, const vf *qd, const vf *k, int64_t w, char *dst, int64_t dst_nb,
                            const char *src, int64_t src_nb, int64_t j, const int held, const int gate,
                            const int n, const int type) noexcept nogil:
    """Value columns [j, j + n), whose state rows are at src and dst.  A single row of held > 0 vectors is read once:
    loads are what the per-channel gate, with three more of them a vector, would run out of."""
    cdef vf row_held[HELD_MAX]
    cdef const vf *row
    cdef float d[ROWS]
    cdef float dot_k, dot_q
    cdef int c, m
    for c in range(held):
        row_held[c] = v_load_ordered_type(src + c * VL * type_size(type), type)
    for m in range(n):
        row = &row_held[0] if held > 0 else <const vf *>(src + m * src_nb)
        row_dots(kd, qd, row, w, held == 0, type, &dot_k, &dot_q)
        d[m] = T.beta * (T.v[j + m] - T.decay * dot_k)
        T.out[j + m] = T.out_q * dot_q + T.out_d * d[m]
    for m in range(n):
        row = &row_held[0] if held > 0 else <const vf *>(src + m * src_nb)
        if VL < 16:
            v_prefetch(<const float *>(dst + m * dst_nb + FETCH), w * VL * type_size(type) // 4)
        row_update(dst + m * dst_nb, row, <const vf *>T.whole, <const vf *>T.part, k, d[m], w, held == 0, gate, type)


cdef struct even_odd:            # k, q and decay of a token, elements of even and of odd index apart
    float k[HELD_MAX * VL]
    float kd[HELD_MAX * VL]
    float qd[HELD_MAX * VL]
    float whole[HELD_MAX * VL]
    float part[HELD_MAX * VL]


cdef inline void pairs_step(const token *t, char *dst, int64_t dst_nb, const char *src, int64_t src_nb, int64_t n_columns,
                            const int held, const int gate) noexcept nogil:
    """rows_step of bfloat16 rows of held vectors, an even number: elements of even and of odd index are apart, here and in
    k, q and the decay, so that none moves to another lane."""
    cdef token T = t[0]
    cdef even_odd split
    cdef vf kd_held[HELD_MAX]
    cdef vf qd_held[HELD_MAX]
    # Sixteen registers hold what a row needs and no more: there k and q are read from memory.
    cdef const vf *kd = &kd_held[0] if VL == 16 else <const vf *>&split.kd[0]
    cdef const vf *qd = &qd_held[0] if VL == 16 else <const vf *>&split.qd[0]
    cdef int64_t j = 0
    cdef int c
    v_split_even_odd(split.kd, T.kd, held * VL)
    v_split_even_odd(split.qd, T.qd, held * VL)
    if gate == DECAY_PER_CHANNEL:
        v_split_even_odd(split.k, T.k, held * VL)
        v_split_even_odd(split.whole, T.whole, held * VL)
        v_split_even_odd(split.part, T.part, held * VL)
    for c in range(held):
        kd_held[c] = v_load(split.kd + c * VL)
        qd_held[c] = v_load(split.qd + c * VL)
    while VL == 16 and j + ROWS <= n_columns:
        pairs_block(&T, &split, kd, qd, dst + j * dst_nb, dst_nb, src + j * src_nb, src_nb, j, held, gate, ROWS)
        j += ROWS
    while j < n_columns:
        pairs_block(&T, &split, kd, qd, dst + j * dst_nb, dst_nb, src + j * src_nb, src_nb, j, held, gate, 1)
        j += 1


cdef inline void pairs_block(const token *T, const even_odd *split, const vf *kd, const vf *qd, char *dst, int64_t dst_nb,
                             const char *src, int64_t src_nb, int64_t j, const int held, const int gate,
                             const int n) noexcept nogil:
    cdef float d[ROWS]
    cdef float dot_k, dot_q
    cdef int m
    for m in range(n):
        pairs_dots(kd, qd, src + m * src_nb, held, &dot_k, &dot_q)
        d[m] = T.beta * (T.v[j + m] - T.decay * dot_k)
        T.out[j + m] = T.out_q * dot_q + T.out_d * d[m]
    for m in range(n):
        # A row, k or decay with what is no number makes d none; numbers give numbers or infinities.
        if d[m] - d[m] == 0:
            pairs_update(T, split, kd, dst + m * dst_nb, src + m * src_nb, d[m], held, gate, True)
        else:
            pairs_update(T, split, kd, dst + m * dst_nb, src + m * src_nb, d[m], held, gate, False)


cdef inline void pairs_dots(const vf *kd, const vf *qd, const char *row, const int held, float *dot_k,
                            float *dot_q) noexcept nogil:
    """The dots with one row of bfloat16, all with elements of even and of odd index apart."""
    cdef vf k_even = v_set(0), k_odd = v_set(0), q_even = v_set(0), q_odd = v_set(0)
    cdef vf even, odd
    cdef int c
    for c from 0 <= c < held by 2:
        v_load_even_odd(row + 2 * c * VL, &even, &odd)
        k_even += kd[c] * even
        q_even += qd[c] * even
        k_odd += kd[c + 1] * odd
        q_odd += qd[c + 1] * odd
    v_two_sums(k_even + k_odd, q_even + q_odd, dot_k, dot_q)


cdef inline void pairs_update(const token *T, const even_odd *split, const vf *kd, char *dst, const char *src, float d,
                              const int held, const int gate, const int numbers) noexcept nogil:
    cdef vf even, odd, part = v_load(T.part)
    cdef int c
    for c from 0 <= c < held by 2:
        v_load_even_odd(src + 2 * c * VL, &even, &odd)
        if gate == DECAY_PER_CHANNEL:
            even = decayed(gate, even, v_load(split.whole + c * VL), v_load(split.part + c * VL), v_load(split.k + c * VL) * d)
            odd = decayed(gate, odd, v_load(split.whole + (c + 1) * VL), v_load(split.part + (c + 1) * VL),
                          v_load(split.k + (c + 1) * VL) * d)
        else:
            even = decayed(gate, even, part, part, kd[c] * d)
            odd = decayed(gate, odd, part, part, kd[c + 1] * d)
        v_store_even_odd(dst + 2 * c * VL, even, odd, numbers)


cdef inline void columns_step(const token *t, int64_t S_k, char *dst, int64_t dst_nb, const char *src, int64_t src_nb,
                              int64_t j0, int64_t n_ahead, const int n, const bint in_stream, const int gate,
                              const int type) noexcept nogil:
    """Value columns [j0, j0 + n * VL) of a state whose value index is contiguous (FLA's order, and packed panels).
    Where rows are longer than that, the first step on them fetches all n_ahead elements of each: pieces of rows are no
    stream that hardware would follow.  A state updated in caller memory (in_stream) is mostly followed by the next
    head's, of which the update fetches as much as it has time for; in another place it first needs that."""
    cdef token T = t[0]
    cdef vf acc_k[NC]
    cdef vf acc_q[NC]
    cdef vf s, whole = v_set(0), part = v_load(T.part)
    cdef float kd, qd, k
    cdef int64_t c, size = type_size(type)
    cdef int j
    for j in range(n):
        acc_k[j] = v_set(0)
        acc_q[j] = v_set(0)
    for c in range(S_k):
        v_prefetch(<const float *>(src + (c + AHEAD) * src_nb), n_ahead * size // 4)
        kd = T.kd[c]
        qd = T.qd[c]
        for j in range(n):
            s = v_load_ordered_type(src + c * src_nb + j0 * size + j * VL * size, type)
            acc_k[j] += kd * s
            acc_q[j] += qd * s
    for j in range(n):
        acc_k[j] = T.beta * (v_load(T.v + j0 + j * VL) - T.decay * acc_k[j])
        v_store(T.out + j0 + j * VL, T.out_q * acc_q[j] + T.out_d * acc_k[j])
    for c in range(S_k):
        if gate == DECAY_PER_CHANNEL:
            whole = v_set(T.whole[c])
            part = v_set(T.part[c])
        k = T.k[c]
        if in_stream and dst != src:
            v_prefetch(<const float *>(dst + c * dst_nb + NEAR + j0 * size), n * VL * size // 4)
        elif in_stream:
            v_prefetch(<const float *>(dst + S_k * dst_nb + (j0 * S_k + c * n * VL) // FETCH_SHARE * size),
                       n * VL * size // 4 // FETCH_SHARE)
        for j in range(n):
            s = v_load_ordered_type(src + c * src_nb + j0 * size + j * VL * size, type)
            v_store_state(dst + c * dst_nb + j0 * size + j * VL * size, decayed(gate, s, whole, part, k * acc_k[j]), type)
