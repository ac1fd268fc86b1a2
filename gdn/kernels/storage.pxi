# storage.h as Cython sees it, and rows and states of any type between caller memory and scratch.
#
# Needs: simd.pxi, pack.pxi.

from libc.stdint cimport uint32_t, uint64_t

cdef extern from "storage.h" nogil:
    ctypedef struct gdn_rounding:
        int stochastic
    int64_t type_size(int type)
    vf v_load_type(const char *p, const int type)
    vf v_load_ordered_type(const char *p, const int type)
    void v_store_type(char *p, vf x, const int type)
    void v_store_state(char *p, vf x, const int type)
    void v_store_rounded(char *p, vf x, const int type, const gdn_rounding *r, uint32_t e, uint32_t gap)
    void v_load_even_odd(const char *p, vf *even, vf *odd)
    void v_store_even_odd(char *p, vf even, vf odd, const int numbers)
    void v_split_even_odd(float *to, const float *from_, int64_t n)
    float load_type(const char *p, int type)
    void store_type(char *p, float x, int type)
    void store_rounded(char *p, float x, int type, const gdn_rounding *r, uint32_t e)
    gdn_rounding rounding_of(int stochastic, uint64_t seed, int64_t seq, int64_t position)


cdef inline gdn_rounding rounding_at(const gdn_call *call, int64_t seq, int64_t position) noexcept nogil:
    """How a call rounds the state of a sequence that has seen so many of its tokens."""
    return rounding_of(call.rounding == GDN_ROUND_STOCHASTIC, call.seed, seq, position)


# ---- rows of activations ---------------------------------------------------------------------------------------

cdef inline void pack_typed(float *row, const char *src, int64_t nb, int type, int64_t n, int64_t ld) noexcept nogil:
    """pack_row of any type."""
    if type == GDN_TYPE_F32:
        pack_row(row, src, nb, n, ld)
    elif type == GDN_TYPE_BF16:
        pack_bf16(row, src, nb, n, ld)
    else:
        pack_f16(row, src, nb, n, ld)


cdef void pack_bf16(float *row, const char *src, int64_t nb, int64_t n, int64_t ld) noexcept nogil:
    pack_narrow(row, src, nb, n, ld, GDN_TYPE_BF16)


cdef void pack_f16(float *row, const char *src, int64_t nb, int64_t n, int64_t ld) noexcept nogil:
    pack_narrow(row, src, nb, n, ld, GDN_TYPE_F16)


cdef inline void pack_narrow(float *row, const char *src, int64_t nb, int64_t n, int64_t ld, const int type) noexcept nogil:
    cdef int64_t i = 0
    if nb == 2:
        while i + VL <= n:
            v_store(row + i, v_load_type(src + 2 * i, type))
            i += VL
    while i < n:
        row[i] = load_type(src + i * nb, type)
        i += 1
    while i < ld:
        row[i] = 0
        i += 1


cdef inline void unpack_typed(char *dst, int64_t nb, int type, const float *row, int64_t n) noexcept nogil:
    """unpack_row of any type."""
    if type == GDN_TYPE_F32:
        unpack_row(dst, nb, row, n)
    elif type == GDN_TYPE_BF16:
        unpack_bf16(dst, nb, row, n)
    else:
        unpack_f16(dst, nb, row, n)


cdef void unpack_bf16(char *dst, int64_t nb, const float *row, int64_t n) noexcept nogil:
    unpack_narrow(dst, nb, row, n, GDN_TYPE_BF16)


cdef void unpack_f16(char *dst, int64_t nb, const float *row, int64_t n) noexcept nogil:
    unpack_narrow(dst, nb, row, n, GDN_TYPE_F16)


cdef inline void unpack_narrow(char *dst, int64_t nb, const float *row, int64_t n, const int type) noexcept nogil:
    cdef int64_t i = 0
    if nb == 2:
        while i + VL <= n:
            v_store_type(dst + 2 * i, v_load(row + i), type)
            i += VL
    while i < n:
        store_type(dst + i * nb, row[i], type)
        i += 1


cdef inline vf lanes_load_typed(const char *p, int64_t nb, int type, int64_t lanes) noexcept nogil:
    """lanes_load of any type."""
    cdef float x[VL]
    if type == GDN_TYPE_F32:
        return lanes_load(p, nb, lanes)
    pack_typed(x, p, nb, type, lanes, VL)
    return v_load(x)


cdef inline void lanes_store_typed(char *p, int64_t nb, int type, vf v, int64_t lanes) noexcept nogil:
    cdef float x[VL]
    if type == GDN_TYPE_F32:
        lanes_store(p, nb, v, lanes)
    else:
        v_store(x, v)
        unpack_typed(p, nb, type, x, lanes)


# ---- states ----------------------------------------------------------------------------------------------------

cdef struct state_view:          # one head's state: address, type and byte strides over key, value column
    char *p
    int64_t nb[2]
    int type
    uint32_t element             # the first one's index in its row, for rounding


cdef void load_panels(float *panels, int64_t rows, const state_view *x, int64_t S_k, int64_t n_columns) noexcept nogil:
    """load_state of any type."""
    if x.type == GDN_TYPE_F32 or x.p == NULL:
        load_state(panels, rows, x.p, x.nb, S_k, n_columns)
    elif x.type == GDN_TYPE_BF16:
        load_narrow(panels, rows, x, S_k, n_columns, GDN_TYPE_BF16)
    else:
        load_narrow(panels, rows, x, S_k, n_columns, GDN_TYPE_F16)


cdef inline void load_narrow(float *panels, int64_t rows, const state_view *x, int64_t S_k, int64_t n_columns,
                             const int type) noexcept nogil:
    cdef float block[VL * VL]
    cdef int64_t n_panels = (n_columns + NV * VL - 1) // (NV * VL), i, j, c, width
    cdef float *to
    cdef const char *src
    memset(panels, 0, n_panels * rows * NV * VL * sizeof(float))
    for j from 0 <= j < n_columns by VL:
        to = panel_of(panels, rows, j) + j % (NV * VL)
        src = x.p + j * x.nb[1]
        width = min(n_columns - j, <int64_t>VL)
        i = 0
        while i + VL <= S_k and x.nb[0] == 2 and x.nb[1] != 2 and width == VL:
            for c in range(VL):
                v_store(block + c * VL, v_load_type(src + 2 * i + c * x.nb[1], type))
            v_transpose(<char *>(to + i * NV * VL), 4 * NV * VL, <const char *>block, 4 * VL)
            i += VL
        while i < S_k:
            pack_narrow(to + i * NV * VL, src + i * x.nb[0], x.nb[1], width, width, type)
            i += 1


cdef void store_panels(const state_view *x, const gdn_rounding *r, const float *panels, int64_t rows, int64_t S_k,
                       int64_t n_columns) noexcept nogil:
    """store_state of any type."""
    if x.type == GDN_TYPE_F32:
        store_state(x.p, x.nb, panels, rows, S_k, n_columns)
    elif x.type == GDN_TYPE_BF16:
        store_narrow(x, r, panels, rows, S_k, n_columns, GDN_TYPE_BF16)
    else:
        store_narrow(x, r, panels, rows, S_k, n_columns, GDN_TYPE_F16)


cdef inline void store_narrow(const state_view *x, const gdn_rounding *r, const float *panels, int64_t rows, int64_t S_k,
                              int64_t n_columns, const int type) noexcept nogil:
    cdef float block[VL * VL]
    cdef int64_t i, j, c, width
    cdef uint32_t e
    cdef const float *src
    cdef char *dst
    for j from 0 <= j < n_columns by VL:
        src = panel_of(<float *>panels, rows, j) + j % (NV * VL)
        dst = x.p + j * x.nb[1]
        width = min(n_columns - j, <int64_t>VL)
        e = x.element + <uint32_t>(j * S_k)
        i = 0
        while i + VL <= S_k and x.nb[0] == 2 and x.nb[1] != 2 and width == VL:
            v_transpose(<char *>block, 4 * VL, <const char *>(src + i * NV * VL), 4 * NV * VL)
            for c in range(VL):
                v_store_rounded(dst + 2 * i + c * x.nb[1], v_load(block + c * VL), type, r, e + <uint32_t>(c * S_k + i), 1)
            i += VL
        while i < S_k:
            if x.nb[1] == 2 and width == VL:
                v_store_rounded(dst + i * x.nb[0], v_load(src + i * NV * VL), type, r, e + <uint32_t>i, <uint32_t>S_k)
            else:
                for c in range(width):
                    store_rounded(dst + i * x.nb[0] + c * x.nb[1], src[i * NV * VL + c], type, r, e + <uint32_t>(c * S_k + i))
            i += 1


cdef void move_state(const state_view *y, const state_view *x, const gdn_rounding *r, int64_t S_k,
                     int64_t n_columns) noexcept nogil:
    """A head's state from x to y, bit for bit if they are of one type; x.p NULL is zeros.  y may be x."""
    cdef int64_t i, j, size = type_size(y.type)
    cdef const char *src
    cdef char *dst
    if y.type == GDN_TYPE_F32 and (x.type == GDN_TYPE_F32 or x.p == NULL):
        copy_state(y.p, y.nb, x.p, x.nb, S_k, n_columns)
        return
    if y.p == x.p:
        return
    for j in range(n_columns):
        for i in range(S_k):
            dst = y.p + i * y.nb[0] + j * y.nb[1]
            src = x.p + i * x.nb[0] + j * x.nb[1]
            if x.p == NULL:
                memset(dst, 0, size)
            elif x.type == y.type:
                memcpy(dst, src, size)
            else:
                store_rounded(dst, load_type(src, x.type), y.type, r, y.element + <uint32_t>(j * S_k + i))
