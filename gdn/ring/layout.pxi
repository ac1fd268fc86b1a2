# The buffer's layout: header, records, rows and entries; their extents from what a ring is made of, and where each lies.
#
# Needs: _checked.pxd, crc.h.

cdef extern from "storage.h" nogil:       # states' types, of the kernels
    ctypedef struct gdn_rounding:
        pass
    int64_t type_size(int type)
    float load_type(const char *p, int type)
    void store_rounded(char *p, float x, int type, const gdn_rounding *r, uint32_t e)
    gdn_rounding rounding_of(int stochastic, uint64_t seed, int64_t seq, int64_t position)

cdef enum:
    HEADER_BYTES = 512            # gdn_ring_header
    LAYOUT_BYTES = 380            # its fields in front of their checksum
    MAX_SLOTS = 1 << 28
    ROW_ALIGN = 64
    MAX_PADDING = 60              # rows on 64-byte addresses from any address that is a multiple of 4
    READERS = 8                   # processes that may read a slot at once
    NOWHERE = -1


cdef gdn_status read_struct(const void *given, uint32_t least, uint32_t known, void *copy) noexcept nogil:
    """A caller's struct of his size, as one of ours: members that he lacks are zero; what we lack must be."""
    cdef uint32_t size = (<const uint32_t *>given)[0], i
    if size < least or size > 65536:
        return GDN_ERR_ABI
    for i in range(known, size):
        if (<const char *>given)[i] != 0:
            return GDN_ERR_ABI
    memset(copy, 0, known)
    memcpy(copy, given, min(size, known))
    return GDN_OK


cdef gdn_status read_params(const gdn_ring_params *given, gdn_ring_params *p) noexcept nogil:
    """The parameters with their defaults filled in and every extent in range."""
    cdef gdn_status status
    cdef int64_t n_planes
    if given == NULL:
        return GDN_ERR_NULL
    status = read_struct(given, PARAMS_LEAST, sizeof(gdn_ring_params), p)
    if status != GDN_OK:
        return status
    if p.dtype != GDN_TYPE_F32 and p.dtype != GDN_TYPE_F16 and p.dtype != GDN_TYPE_BF16:
        return GDN_ERR_TYPE
    if (min(p.n_slots, p.n_layers, p.H_v, p.S_k, p.S_v, p.conv_width) < 1 or p.n_slots > MAX_SLOTS or p.spare < -1
            or min(p.n_rollback, p.conv_channels, p.H_k, p.log_capacity, p.n_spare) < 0
            or p.per_channel not in (0, 1) or not GDN_HEAD_NONE <= p.head_map <= GDN_HEAD_INTERLEAVED):
        return GDN_ERR_VALUE
    if p.form == GDN_FORM_PLANES:
        if p.log_capacity != 0 or p.n_spare != 0:
            return GDN_ERR_VALUE
        if p.spare < 0:
            p.spare = 1 if p.n_rollback > 0 else 0
    elif p.form == GDN_FORM_LOG:
        if p.spare != -1 or p.H_k < 1 or p.H_v % p.H_k != 0:
            return GDN_ERR_VALUE
        if p.log_capacity == 0:
            p.log_capacity = <int32_t>min(max(16, 2 * <int64_t>p.n_rollback), INT32_MAX)
        if p.n_spare == 0:
            p.n_spare = p.n_slots
        if p.log_capacity <= p.n_rollback or p.n_spare > p.n_slots or <int64_t>p.log_capacity + p.n_rollback >= INT32_MAX:
            return GDN_ERR_VALUE
    else:
        return GDN_ERR_VALUE
    n_planes = <int64_t>p.n_rollback + 1 + p.spare
    return GDN_ERR_VALUE if n_planes > INT32_MAX else GDN_OK


cdef gdn_status plan_layout(const gdn_ring_params *given, gdn_ring_header *h) noexcept nogil:
    """The header of a ring with these extents whose rows follow the tables without padding."""
    cdef gdn_ring_params p
    cdef gdn_status status = read_params(given, &p)
    cdef bint bad = False
    if status != GDN_OK:
        return status
    memset(h, 0, HEADER_BYTES)
    memcpy(h.magic, b"GDNRING", 8)
    h.abi, h.header_size, h.tag, h.form, h.dtype = GDN_RING_ABI, HEADER_BYTES, p.tag, p.form, p.dtype
    h.n_slots, h.n_rollback, h.n_layers = p.n_slots, p.n_rollback, p.n_layers
    h.H_k, h.H_v, h.S_k, h.S_v, h.per_channel, h.head_map = p.H_k, p.H_v, p.S_k, p.S_v, p.per_channel, p.head_map
    h.conv_channels, h.conv_width = p.conv_channels, p.conv_width
    h.n_planes = 1 if p.form == GDN_FORM_LOG else p.n_rollback + 1 + p.spare
    if p.form == GDN_FORM_LOG:
        h.log_capacity, h.n_spare, h.n_entries = p.log_capacity, p.n_spare, p.log_capacity + p.n_rollback + 1
    h.n_rows = <int64_t>h.n_planes * h.n_slots + h.n_spare
    bad |= multiply(<int64_t>p.S_k * p.S_v, p.H_v, &h.n_embd_s)
    h.n_embd_r = <int64_t>(p.conv_width - 1) * p.conv_channels
    bad |= plan_tables(h)
    bad |= plan_rows(h)
    return GDN_ERR_VALUE if bad else GDN_OK


cdef bint plan_tables(gdn_ring_header *h) noexcept nogil:
    """Offsets of the tables; ssm_offset is where they end.  True on overflow."""
    cdef int64_t n_ids = 16, n = h.n_slots, lists = 0
    cdef bint bad = False
    while n_ids < max(4 * n, <int64_t>h.n_entries, h.n_rows if h.form == GDN_FORM_LOG else 0):
        n_ids *= 2
    bad |= n_ids > INT32_MAX
    h.n_ids = <int32_t>n_ids
    if h.form == GDN_FORM_LOG:
        h.list_nb = 4 * (2 * <int64_t>h.n_entries + h.n_rollback + 1)
        bad |= multiply(h.list_nb, n, &lists)
    h.slots_offset = HEADER_BYTES
    h.readers_offset = h.slots_offset + <int64_t>sizeof(gdn_ring_slot) * n
    h.journal_offset = h.readers_offset + <int64_t>sizeof(gdn_ring_readers) * n
    h.lists_offset = h.journal_offset + <int64_t>sizeof(gdn_ring_undo) * n
    bad |= add(h.lists_offset, lists, &h.spares_offset)
    bad |= add(h.spares_offset, 4 * <int64_t>h.n_spare, &h.ids_offset)
    bad |= add(h.ids_offset, 4 * n_ids, &h.free_offset)
    bad |= add(h.free_offset, (n + 31) // 32 * 4, &h.ssm_offset)
    return bad


cdef bint plan_rows(gdn_ring_header *h) noexcept nogil:
    """A layer's rows and entries, and the bytes of all.  True on overflow."""
    cdef int64_t ssm_bytes = 0, conv_bytes = 0, log_bytes = 0, n_k = 0, n_d = 0, n_g = 0, n_entry = 0
    cdef bint bad = align(h.n_embd_s, type_size(h.dtype), &h.ssm_row_nb) or align(h.n_embd_r, 4, &h.conv_row_nb)
    if h.form == GDN_FORM_LOG:
        bad |= align(<int64_t>h.H_k * h.S_k, 4, &n_k) or align(<int64_t>h.H_v * h.S_v, 4, &n_d)
        bad |= align(<int64_t>h.H_v * (h.S_k if h.per_channel else 1), 4, &n_g) or align(h.conv_channels, 4, &n_entry)
        bad |= add(n_k, n_d, &h.entry_g) or add(h.entry_g, n_g, &h.entry_x) or add(h.entry_x, n_entry, &h.entry_nb)
        h.entry_d = n_k
    bad |= multiply(h.n_rows, h.ssm_row_nb, &ssm_bytes) or multiply(h.n_rows, h.conv_row_nb, &conv_bytes)
    bad |= multiply(<int64_t>h.n_slots * h.n_entries, h.entry_nb, &log_bytes)
    bad |= add(ssm_bytes, conv_bytes, &h.layer_nb) or add(h.layer_nb, log_bytes, &h.layer_nb)
    bad |= multiply(h.layer_nb, h.n_layers, &h.nbytes) or add(h.nbytes, h.ssm_offset + MAX_PADDING, &h.nbytes)
    if not bad:
        h.conv_offset = h.ssm_offset + ssm_bytes
        h.log_offset = h.conv_offset + conv_bytes
    return bad


cdef bint align(int64_t n, int64_t size, int64_t *nb) noexcept nogil:
    """Bytes of n elements, up to the next aligned address; True on overflow."""
    if n > INT64_MAX // 8:
        return True
    nb[0] = (size * n + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN
    return False


cdef void shift_rows(gdn_ring_header *h, int64_t padding) noexcept nogil:
    h.ssm_offset += padding
    h.conv_offset += padding
    h.log_offset += padding


# ---------------------------------------------------------------- where things lie

cdef inline gdn_ring_slot *record(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    return <gdn_ring_slot *>(<char *>ring + ring.slots_offset) + slot


cdef inline gdn_ring_readers *readers_of(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    return <gdn_ring_readers *>(<char *>ring + ring.readers_offset) + slot


cdef inline gdn_ring_undo *undo_of(gdn_ring_header *ring, int64_t i) noexcept nogil:
    return <gdn_ring_undo *>(<char *>ring + ring.journal_offset) + i


cdef inline int32_t *list_of(gdn_ring_header *ring, int64_t slot, int32_t order) noexcept nogil:
    return <int32_t *>(<char *>ring + ring.lists_offset + slot * ring.list_nb) + <int64_t>order * ring.n_entries


cdef inline int32_t *parents_of(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    return list_of(ring, slot, 2)


cdef inline int32_t *spares(gdn_ring_header *ring) noexcept nogil:
    return <int32_t *>(<char *>ring + ring.spares_offset)


cdef inline int32_t *ids(gdn_ring_header *ring) noexcept nogil:
    return <int32_t *>(<char *>ring + ring.ids_offset)


cdef inline uint32_t *free_bits(gdn_ring_header *ring) noexcept nogil:
    return <uint32_t *>(<char *>ring + ring.free_offset)


cdef inline int64_t row_of(gdn_ring_header *ring, int64_t slot, int64_t plane) noexcept nogil:
    """Row of a slot's plane; planes count around the ring from either side."""
    if plane < 0:
        plane += ring.n_planes
    elif plane >= ring.n_planes:
        plane -= ring.n_planes
    if not 0 <= plane < ring.n_planes:           # only of a record that somebody has overwritten since it was looked at
        plane = 0
    return plane * ring.n_slots + slot


cdef inline int64_t entry_at(gdn_ring_header *ring, int64_t slot, const gdn_ring_slot *r, int64_t i) noexcept nogil:
    """Index, in a layer's log, of a slot's entry i: committed ones first, oldest to newest, then free ones."""
    cdef int64_t place = r.first + i, entry
    if place >= ring.n_entries:
        place -= ring.n_entries
    entry = list_of(ring, slot, r.order)[place]
    return slot * ring.n_entries + (entry if 0 <= entry < ring.n_entries else 0)


cdef inline char *ssm_row(gdn_ring_header *ring, int64_t layer, int64_t row) noexcept nogil:
    return <char *>ring + ring.ssm_offset + layer * ring.layer_nb + row * ring.ssm_row_nb


cdef inline char *conv_row(gdn_ring_header *ring, int64_t layer, int64_t row) noexcept nogil:
    return <char *>ring + ring.conv_offset + layer * ring.layer_nb + row * ring.conv_row_nb


cdef inline char *log_entry(gdn_ring_header *ring, int64_t layer, int64_t entry) noexcept nogil:
    return <char *>ring + ring.log_offset + layer * ring.layer_nb + entry * ring.entry_nb


cdef inline int64_t ssm_size(const gdn_ring_header *ring) noexcept nogil:
    """Bytes of a recurrent row's elements."""
    return type_size(ring.dtype) * ring.n_embd_s


cdef void zero_row(gdn_ring_header *ring, int64_t row) noexcept nogil:
    cdef int64_t layer
    for layer in range(ring.n_layers):
        memset(ssm_row(ring, layer, row), 0, ssm_size(ring))
        memset(conv_row(ring, layer, row), 0, 4 * ring.n_embd_r)


# ---------------------------------------------------------------- rows and entries as tensors

cdef void fill_tensor(gdn_tensor *t, char *data, int64_t ne0, int64_t ne1, int64_t ne2, int64_t n, int64_t nb,
                      int type) noexcept nogil:
    """n contiguous blocks of [ne2][ne1][ne0] elements, nb bytes apart, along the last axis."""
    cdef int64_t size = type_size(type)
    t.data, t.type = data, type
    t.ne[0], t.ne[1], t.ne[2], t.ne[3] = ne0, ne1, ne2, n
    t.nb[0], t.nb[1], t.nb[2], t.nb[3] = size, size * ne0, size * ne0 * ne1, nb


cdef gdn_status ring_ssm(gdn_ring_header *ring, int64_t layer, gdn_tensor *t) noexcept nogil:
    if ring == NULL or t == NULL:
        return GDN_ERR_NULL
    if layer < 0 or layer >= ring.n_layers:
        return GDN_ERR_ROW
    fill_tensor(t, ssm_row(ring, layer, 0), ring.S_k, ring.S_v, ring.H_v, ring.n_rows, ring.ssm_row_nb, ring.dtype)
    return GDN_OK


cdef gdn_status ring_conv(gdn_ring_header *ring, int64_t layer, gdn_tensor *t) noexcept nogil:
    if ring == NULL or t == NULL:
        return GDN_ERR_NULL
    if layer < 0 or layer >= ring.n_layers:
        return GDN_ERR_ROW
    fill_tensor(t, conv_row(ring, layer, 0), ring.conv_width - 1, ring.conv_channels, 1, ring.n_rows, ring.conv_row_nb,
                GDN_TYPE_F32)
    return GDN_OK


cdef gdn_status ring_log(gdn_ring_header *ring, int64_t layer, gdn_tensor *k, gdn_tensor *d, gdn_tensor *g,
                         gdn_tensor *x) noexcept nogil:
    cdef char *entry
    cdef int64_t n, nb
    if ring == NULL or k == NULL or d == NULL or g == NULL or x == NULL:
        return GDN_ERR_NULL
    if ring.form != GDN_FORM_LOG:
        return GDN_ERR_VALUE
    if layer < 0 or layer >= ring.n_layers:
        return GDN_ERR_ROW
    entry, n, nb = log_entry(ring, layer, 0), <int64_t>ring.n_slots * ring.n_entries, ring.entry_nb
    fill_tensor(k, entry, ring.S_k, ring.H_k, n, 1, n * nb, GDN_TYPE_F32)
    fill_tensor(d, entry + ring.entry_d, ring.S_v, ring.H_v, n, 1, n * nb, GDN_TYPE_F32)
    fill_tensor(g, entry + ring.entry_g, ring.S_k if ring.per_channel else 1, ring.H_v, n, 1, n * nb, GDN_TYPE_F32)
    fill_tensor(x, entry + ring.entry_x, ring.conv_channels, n, 1, 1, n * nb, GDN_TYPE_F32)
    k.nb[2] = d.nb[2] = g.nb[2] = x.nb[1] = nb
    x.nb[2] = n * nb
    return GDN_OK
