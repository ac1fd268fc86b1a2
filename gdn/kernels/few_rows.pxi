# Few rows on a head's state where it lies: its products with them, and its update by a few outer products.
#
# A state is seen as rows of memory, contiguous along one index.  KEYS: a row a value column, so that products are dot
# products along it.  VALUES: a row a key, so that products are sums of rows.  Both walk the state once, in blocks that
# stay in the first-level cache while every product is taken and a fold, if there is one, is written.  Two rows are taken in
# one ascending stream, which hardware's prefetchers follow best when nothing else is fetched; with more of them, and folds,
# the stream pauses, and what comes next is fetched.
#
# Needs: simd.pxi, pack.pxi (fetch_rows), recurrent.pxi (pairs_dots, row_dots), storage.pxi (type_size, v_load_ordered_type,
# v_load_type, v_split_even_odd, v_store_state).

cdef enum:
    PANELS = 0                   # an order: packed panels in scratch (pack.pxi), each in turn as VALUES;
    KEYS = 1                     # in place, rows along the key index (ggml's order);
    VALUES = 2                   # in place, rows along the value index (FLA's)
    SIDE = 4                     # rows of memory side by side in a tile
    AHEAD_OF_FOLD = 16           # rows of memory from a fold to what is fetched meanwhile
    BLOCK_FLOATS = 2048          # of a state in VALUES order that meet all rows before the next are read
    STREAM = 4096                # bytes from a tile to what is fetched meanwhile; less comes late, more brings nothing


cdef struct fold:                # S <- decay S + sum_e key_e value_e^T
    int64_t n                    # outer products
    const float *keys            # [n][keys_ld]
    const float *values          # [n][values_ld]
    int64_t keys_ld, values_ld
    const float *whole           # [S_k] decay as whole + part (recurrent.pxi)
    const float *part


# ---- products --------------------------------------------------------------------------------------------------

cdef inline void dots_tile(float *y, int64_t y_ld, const float *rows, int64_t ld, const char *src, int64_t nb, int64_t n_src,
                           int64_t w, const int n_rows, const bint fetch, const int type) noexcept nogil:
    """y[m][j] = rows[m] . src[j] for n_rows rows and SIDE rows of memory, w vectors each; from n_src on src[j] is the last."""
    cdef vf acc[FEW_ACC]
    cdef vf s[SIDE]
    cdef const char *at_j[SIDE]
    cdef vf row
    cdef int64_t c
    cdef int m, j
    for j in range(SIDE):
        at_j[j] = src + min(<int64_t>j, n_src - 1) * nb
    for m in range(n_rows):
        for j in range(SIDE):
            acc[m * SIDE + j] = v_set(0)
    for c in range(w):
        if fetch:
            for j in range(SIDE):
                v_prefetch(<const float *>(at_j[j] + STREAM + c * VL * type_size(type)), VL)
        for j in range(SIDE):
            s[j] = v_load_type(at_j[j] + c * VL * type_size(type), type)
        for m in range(n_rows):
            row = v_load(rows + m * ld + c * VL)
            for j in range(SIDE):
                acc[m * SIDE + j] += row * s[j]
    v_store_sums(y, y_ld, acc, n_rows * SIDE)


cdef inline void dots_of_two(float *y, int64_t y_ld, const float *rows, int64_t ld, const char *src, int64_t nb, int64_t n_src,
                             int64_t w, const int held, const int type) noexcept nogil:
    """y[m][j] = rows[m] . src[j] for two rows, memory being read in one ascending stream.  held is w where that is a
    constant: the rows then stay in registers; else 0."""
    cdef vf a_held[HELD_MAX]
    cdef vf b_held[HELD_MAX]
    cdef const vf *a = &a_held[0] if held > 0 else <const vf *>rows
    cdef const vf *b = &b_held[0] if held > 0 else <const vf *>(rows + ld)
    cdef float split[2 * HELD_MAX * VL]
    cdef int64_t j
    cdef int c
    if held > 1 and type == GDN_TYPE_BF16:
        v_split_even_odd(split, rows, held * VL)
        v_split_even_odd(split + held * VL, rows + ld, held * VL)
        for c in range(held):
            a_held[c] = v_load(split + c * VL)
            b_held[c] = v_load(split + (held + c) * VL)
        for j in range(n_src):
            pairs_dots(a_held, b_held, src + j * nb, held, y + j, y + y_ld + j)
        return
    if held > 0:
        w = held
    for c in range(held):
        a_held[c] = v_load(rows + c * VL)
        b_held[c] = v_load(rows + ld + c * VL)
    for j in range(n_src):
        row_dots(a, b, <const vf *>(src + j * nb), w, True, type, y + j, y + y_ld + j)


cdef inline void dots(float *y, int64_t y_ld, const float *rows, int64_t n_rows, int64_t ld, const char *src, int64_t nb,
                      int64_t n_src, int64_t w, const int type) noexcept nogil:
    """y[m][j] = rows[m] . src[j] for an even number of rows and n_src rows of memory; y is written up to a multiple of SIDE."""
    cdef int64_t j, m
    if n_rows == 2:
        if w == HELD_MAX:
            dots_of_two(y, y_ld, rows, ld, src, nb, n_src, w, HELD_MAX, type)
        else:
            dots_of_two(y, y_ld, rows, ld, src, nb, n_src, w, 0, type)
        return
    for j from 0 <= j < n_src by SIDE:
        dots_tile(y + j, y_ld, rows, ld, src + j * nb, nb, n_src - j, w, FEW_ROWS, True, type)
        m = FEW_ROWS
        while m + FEW_ROWS <= n_rows:
            dots_tile(y + m * y_ld + j, y_ld, rows + m * ld, ld, src + j * nb, nb, n_src - j, w, FEW_ROWS, False, type)
            m += FEW_ROWS
        while m < n_rows:
            dots_tile(y + m * y_ld + j, y_ld, rows + m * ld, ld, src + j * nb, nb, n_src - j, w, 2, False, type)
            m += 2


cdef inline void sums_tile(float *y, int64_t y_ld, const float *rows, int64_t ld, const char *src, int64_t nb, int64_t n_src,
                           bint first, int64_t n_ahead, const int n_rows, const int nv,
                           const int type) noexcept nogil:
    """y[m] (+)= sum_c rows[m][c] src[c] over n_src rows of memory, nv vectors of each.  n_ahead elements of each of the
    next n_src rows are fetched."""
    cdef vf acc[FEW_ACC]
    cdef vf s[FEW_ACC]
    cdef int64_t c
    cdef int m, j
    for m in range(n_rows):
        for j in range(nv):
            acc[m * nv + j] = v_set(0) if first else v_load(y + m * y_ld + j * VL)
    for c in range(n_src):
        v_prefetch(<const float *>(src + (c + n_src) * nb), n_ahead * type_size(type) // 4)
        for j in range(nv):
            s[j] = v_load_ordered_type(src + c * nb + j * VL * type_size(type), type)
        for m in range(n_rows):
            for j in range(nv):
                acc[m * nv + j] += rows[m * ld + c] * s[j]
    for m in range(n_rows):
        for j in range(nv):
            v_store(y + m * y_ld + j * VL, acc[m * nv + j])


cdef inline void sums_of(float *y, int64_t y_ld, const float *rows, int64_t ld, const char *src, int64_t nb, int64_t n_src,
                         int64_t n, bint first, bint fetch, const int n_rows, const int type) noexcept nogil:
    """sums_tile over n elements of every row of memory, a multiple of VL."""
    cdef int64_t j = 0
    while j + FEW_ACC // n_rows * VL <= n:
        sums_tile(y + j, y_ld, rows, ld, src + type_size(type) * j, nb, n_src, first, n if fetch and j == 0 else 0, n_rows,
                  FEW_ACC // n_rows, type)
        j += FEW_ACC // n_rows * VL
    while j < n:
        sums_tile(y + j, y_ld, rows, ld, src + type_size(type) * j, nb, n_src, first,
                  n if fetch and j == 0 else 0, n_rows, 1, type)
        j += VL


cdef inline void sums(float *y, int64_t y_ld, const float *rows, int64_t n_rows, int64_t ld, const char *src, int64_t nb,
                      int64_t n_src, int64_t n, bint first, const int type) noexcept nogil:
    """y[m] (+)= sum_c rows[m][c] src[c] for an even number of rows, c over n_src rows of memory of n elements."""
    cdef int64_t m = 0
    while m + 8 <= n_rows and FEW_ACC >= 16:
        sums_of(y + m * y_ld, y_ld, rows + m * ld, ld, src, nb, n_src, n, first, m == 0, 8, type)
        m += 8
    while m + 4 <= n_rows:
        sums_of(y + m * y_ld, y_ld, rows + m * ld, ld, src, nb, n_src, n, first, m == 0, 4, type)
        m += 4
    if m < n_rows:
        sums_of(y + m * y_ld, y_ld, rows + m * ld, ld, src, nb, n_src, n, first, False, 2, type)


# ---- folds -----------------------------------------------------------------------------------------------------

cdef inline void fold_tile(char *dst, int64_t dst_nb, const char *src, int64_t src_nb, const float *a, int64_t a_ld,
                           const float *b, int64_t b_ld, const float *whole, const float *part, int64_t n, const int n_side,
                           const int nv, const int order, const int type) noexcept nogil:
    """dst[m] = decay src[m] + sum_e a[e][m] b[e] for n_side rows of memory, nv vectors of each; src NULL is zeros.  The
    decay's elements go with a row's vectors (KEYS) or with the rows (VALUES)."""
    cdef vf acc[SIDE * FEW_NV]
    cdef vf b_e[FEW_NV]
    cdef vf s
    cdef int64_t e
    cdef int m, j
    for m in range(n_side):
        for j in range(nv):
            if src == NULL:
                acc[m * nv + j] = v_set(0)
            elif order == KEYS:
                s = v_load_type(src + m * src_nb + j * VL * type_size(type), type)
                acc[m * nv + j] = v_and(s, v_load(whole + j * VL)) + s * v_load(part + j * VL)
            else:
                s = v_load_type(src + m * src_nb + j * VL * type_size(type), type)
                acc[m * nv + j] = v_and(s, v_set(whole[m])) + s * part[m]
    for e in range(n):
        for j in range(nv):
            b_e[j] = v_load(b + e * b_ld + j * VL)
        for m in range(n_side):
            for j in range(nv):
                acc[m * nv + j] += a[e * a_ld + m] * b_e[j]
    for m in range(n_side):
        for j in range(nv):
            v_store_state(dst + m * dst_nb + j * VL * type_size(type), acc[m * nv + j], type)


cdef inline void fold_rows(const fold *f, char *dst, int64_t dst_nb, const char *src, int64_t src_nb, int64_t row,
                           int64_t n_src, int64_t n, const int order, const int type) noexcept nogil:
    """Rows of memory [row, row + n_src) of n elements, a multiple of VL: dst and src are the first of them."""
    cdef const float *a = f.values if order == KEYS else f.keys
    cdef const float *b = f.keys if order == KEYS else f.values
    cdef int64_t a_ld = f.values_ld if order == KEYS else f.keys_ld, b_ld = f.keys_ld if order == KEYS else f.values_ld
    cdef int64_t i, j, at_i, size = type_size(type)
    cdef const char *s
    for i from 0 <= i < n_src by SIDE:
        j = 0
        while j < n:
            s = NULL if src == NULL else src + i * src_nb + size * j
            at_i = j if order == KEYS else row + i
            if i + SIDE <= n_src and j + FEW_NV * VL <= n:
                fold_tile(dst + i * dst_nb + size * j, dst_nb, s, src_nb, a + row + i, a_ld, b + j, b_ld, f.whole + at_i,
                          f.part + at_i, f.n, SIDE, FEW_NV, order, type)
                j += FEW_NV * VL
            else:
                fold_edge(f, dst + i * dst_nb + size * j, dst_nb, s, src_nb, a + row + i, a_ld, b + j, b_ld, at_i,
                          min(<int64_t>SIDE, n_src - i), order, type)
                j += VL


cdef inline void fold_edge(const fold *f, char *dst, int64_t dst_nb, const char *src, int64_t src_nb, const float *a,
                           int64_t a_ld, const float *b, int64_t b_ld, int64_t at_i, int64_t n_side,
                           const int order, const int type) noexcept nogil:
    """fold_tile of fewer rows than SIDE or of one vector."""
    cdef int64_t m
    for m in range(n_side):
        fold_tile(dst + m * dst_nb, dst_nb, NULL if src == NULL else src + m * src_nb, src_nb, a + m, a_ld, b, b_ld,
                  f.whole + at_i + (0 if order == KEYS else m), f.part + at_i + (0 if order == KEYS else m), f.n, 1, 1, order,
                  type)


# ---- both in one walk over a state ------------------------------------------------------------------------------

cdef inline void walk_keys_of(float *y, int64_t y_ld, const float *rows, int64_t n_rows, int64_t ld, const char *src,
                              int64_t src_nb,
                              int64_t S_k, int64_t n_columns, const fold *f,
                              char *dst, int64_t dst_nb, const int type) noexcept nogil:
    """y[m][j] = rows[m] . state column j, and the folded state to dst unless f is NULL; KEYS.  src NULL is zeros: no y."""
    cdef int64_t j, n, step = n_columns if f == NULL else SIDE
    for j from 0 <= j < n_columns by step:
        n = min(step, n_columns - j)
        if f != NULL:
            fetch_rows(dst + (j + AHEAD_OF_FOLD) * dst_nb, dst_nb, n, S_k * type_size(type) // 4)
            if src != NULL:
                fetch_rows(src + (j + AHEAD_OF_FOLD) * src_nb, src_nb, n, S_k * type_size(type) // 4)
        if src != NULL and n_rows > 0:
            dots(y + j, y_ld, rows, n_rows, ld, src + j * src_nb, src_nb, n, S_k // VL, type)
        if f != NULL:
            fold_rows(f, dst + j * dst_nb, dst_nb, NULL if src == NULL else src + j * src_nb, src_nb, j, n, S_k, KEYS, type)


cdef inline void walk_values_of(float *y, int64_t y_ld, const float *rows, int64_t n_rows, int64_t ld, const char *src,
                                int64_t src_nb,
                                int64_t S_k, int64_t n_columns, const fold *f,
                                char *dst, int64_t dst_nb, const int type) noexcept nogil:
    """The same of a state in VALUES order."""
    cdef int64_t c, n, step = max(<int64_t>8, BLOCK_FLOATS // n_columns)
    if f != NULL:
        step = 2 * SIDE
    elif n_rows == 2:
        step = S_k
    for c from 0 <= c < S_k by step:
        n = min(step, S_k - c)
        if f != NULL:
            fetch_rows(dst + (c + AHEAD_OF_FOLD) * dst_nb, dst_nb, n, n_columns * type_size(type) // 4)
            if src != NULL:
                fetch_rows(src + (c + AHEAD_OF_FOLD) * src_nb, src_nb, n, n_columns * type_size(type) // 4)
        if src != NULL and n_rows > 0:
            sums(y, y_ld, rows + c, n_rows, ld, src + c * src_nb, src_nb, n, n_columns, c == 0, type)
        if f != NULL:
            fold_rows(f, dst + c * dst_nb, dst_nb, NULL if src == NULL else src + c * src_nb, src_nb, c, n, n_columns, VALUES,
                      type)


cdef void walk_keys_floats(float *y, int64_t y_ld, const float *rows, int64_t n_rows, int64_t ld, const char *src,
                           int64_t src_nb, int64_t S_k, int64_t n_columns, const fold *f,
                           char *dst, int64_t dst_nb) noexcept nogil:
    walk_keys_of(y, y_ld, rows, n_rows, ld, src, src_nb, S_k, n_columns, f, dst, dst_nb, GDN_TYPE_F32)


cdef void walk_keys_bf16(float *y, int64_t y_ld, const float *rows, int64_t n_rows, int64_t ld, const char *src,
                         int64_t src_nb, int64_t S_k, int64_t n_columns, const fold *f, char *dst, int64_t dst_nb) noexcept nogil:
    walk_keys_of(y, y_ld, rows, n_rows, ld, src, src_nb, S_k, n_columns, f, dst, dst_nb, GDN_TYPE_BF16)


cdef void walk_keys_f16(float *y, int64_t y_ld, const float *rows, int64_t n_rows, int64_t ld, const char *src,
                        int64_t src_nb, int64_t S_k, int64_t n_columns, const fold *f, char *dst, int64_t dst_nb) noexcept nogil:
    walk_keys_of(y, y_ld, rows, n_rows, ld, src, src_nb, S_k, n_columns, f, dst, dst_nb, GDN_TYPE_F16)


cdef inline void walk_keys(int type, float *y, int64_t y_ld, const float *rows, int64_t n_rows, int64_t ld, const char *src,
                           int64_t src_nb, int64_t S_k, int64_t n_columns, const fold *f,
                           char *dst, int64_t dst_nb) noexcept nogil:
    if type == GDN_TYPE_F32:
        walk_keys_floats(y, y_ld, rows, n_rows, ld, src, src_nb, S_k, n_columns, f, dst, dst_nb)
    elif type == GDN_TYPE_BF16:
        walk_keys_bf16(y, y_ld, rows, n_rows, ld, src, src_nb, S_k, n_columns, f, dst, dst_nb)
    else:
        walk_keys_f16(y, y_ld, rows, n_rows, ld, src, src_nb, S_k, n_columns, f, dst, dst_nb)


cdef void walk_values_floats(float *y, int64_t y_ld, const float *rows, int64_t n_rows, int64_t ld, const char *src,
                             int64_t src_nb, int64_t S_k, int64_t n_columns, const fold *f,
                             char *dst, int64_t dst_nb) noexcept nogil:
    walk_values_of(y, y_ld, rows, n_rows, ld, src, src_nb, S_k, n_columns, f, dst, dst_nb, GDN_TYPE_F32)


cdef void walk_values_bf16(float *y, int64_t y_ld, const float *rows, int64_t n_rows, int64_t ld, const char *src,
                           int64_t src_nb, int64_t S_k, int64_t n_columns, const fold *f,
                           char *dst, int64_t dst_nb) noexcept nogil:
    walk_values_of(y, y_ld, rows, n_rows, ld, src, src_nb, S_k, n_columns, f, dst, dst_nb, GDN_TYPE_BF16)


cdef void walk_values_f16(float *y, int64_t y_ld, const float *rows, int64_t n_rows, int64_t ld, const char *src,
                          int64_t src_nb, int64_t S_k, int64_t n_columns, const fold *f,
                          char *dst, int64_t dst_nb) noexcept nogil:
    walk_values_of(y, y_ld, rows, n_rows, ld, src, src_nb, S_k, n_columns, f, dst, dst_nb, GDN_TYPE_F16)


cdef inline void walk_values(int type, float *y, int64_t y_ld, const float *rows, int64_t n_rows, int64_t ld, const char *src,
                             int64_t src_nb, int64_t S_k, int64_t n_columns, const fold *f,
                             char *dst, int64_t dst_nb) noexcept nogil:
    if type == GDN_TYPE_F32:
        walk_values_floats(y, y_ld, rows, n_rows, ld, src, src_nb, S_k, n_columns, f, dst, dst_nb)
    elif type == GDN_TYPE_BF16:
        walk_values_bf16(y, y_ld, rows, n_rows, ld, src, src_nb, S_k, n_columns, f, dst, dst_nb)
    else:
        walk_values_f16(y, y_ld, rows, n_rows, ld, src, src_nb, S_k, n_columns, f, dst, dst_nb)
