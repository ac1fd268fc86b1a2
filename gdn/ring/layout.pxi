# The buffer's layout: header, records, rows; making a ring, attaching to one, its layers' rows as tensors.

cdef gdn_status lay_out(const gdn_ring_params *p, gdn_ring_header *h) noexcept nogil:
    """The header of a ring with these extents whose rows follow the tables without padding."""
    cdef int64_t spare, n_planes, n_rows, ssm_bytes = 0, conv_bytes = 0, n_hints = 16
    cdef bint bad
    if p == NULL:
        return GDN_ERR_NULL
    if p.size != sizeof(gdn_ring_params):
        return GDN_ERR_ABI
    spare = p.spare if p.spare >= 0 else (1 if p.n_rollback > 0 else 0)
    n_planes = <int64_t>p.n_rollback + 1 + spare
    n_rows = n_planes * p.n_slots
    if (p.spare < -1 or p.n_rollback < 0 or p.conv_channels < 0 or n_planes > INT32_MAX or p.n_slots > MAX_SLOTS
            or min(p.n_slots, p.n_layers, p.H_v, p.S_k, p.S_v, p.conv_width) < 1):
        return GDN_ERR_VALUE
    while n_hints < 4 * <int64_t>p.n_slots:
        n_hints *= 2
    memset(h, 0, HEADER_BYTES)
    memcpy(h.magic, b"GDNRING", 8)
    h.abi, h.header_size = GDN_RING_ABI, HEADER_BYTES
    h.n_slots, h.n_rollback, h.n_planes, h.n_layers = p.n_slots, p.n_rollback, <int32_t>n_planes, p.n_layers
    h.H_v, h.S_k, h.S_v, h.conv_channels, h.conv_width = p.H_v, p.S_k, p.S_v, p.conv_channels, p.conv_width
    h.n_hints = <int32_t>n_hints
    bad = multiply(<int64_t>p.S_k * p.S_v, p.H_v, &h.n_embd_s)
    h.n_embd_r = <int64_t>(p.conv_width - 1) * p.conv_channels
    bad |= row_bytes(h.n_embd_s, &h.ssm_row_nb) or row_bytes(h.n_embd_r, &h.conv_row_nb)
    bad |= multiply(n_rows, h.ssm_row_nb, &ssm_bytes) or multiply(n_rows, h.conv_row_nb, &conv_bytes)
    bad |= add(ssm_bytes, conv_bytes, &h.layer_nb) or multiply(h.layer_nb, p.n_layers, &h.nbytes)
    h.slots_offset = HEADER_BYTES
    h.journal_offset = h.slots_offset + SLOT_BYTES * <int64_t>p.n_slots
    h.hints_offset = h.journal_offset + ENTRY_BYTES * <int64_t>p.n_slots
    h.ssm_offset = h.hints_offset + 4 * n_hints
    bad |= add(h.nbytes, h.ssm_offset + MAX_PADDING, &h.nbytes)
    if bad:
        return GDN_ERR_VALUE
    h.conv_offset = h.ssm_offset + ssm_bytes
    return GDN_OK


cdef bint row_bytes(int64_t n_floats, int64_t *nb) noexcept nogil:
    """Bytes from a row of so many floats to the next; True on overflow."""
    if n_floats > INT64_MAX // 8:
        return True
    nb[0] = (4 * n_floats + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN
    return False


cdef inline gdn_ring_slot *record(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    return <gdn_ring_slot *>(<char *>ring + ring.slots_offset) + slot


cdef inline int64_t row_of(gdn_ring_header *ring, int64_t slot, int64_t plane) noexcept nogil:
    """Row of a slot's plane; planes count around the ring from either side."""
    if plane < 0:
        plane += ring.n_planes
    elif plane >= ring.n_planes:
        plane -= ring.n_planes
    return plane * ring.n_slots + slot


cdef inline char *ssm_row(gdn_ring_header *ring, int64_t layer, int64_t row) noexcept nogil:
    return <char *>ring + ring.ssm_offset + layer * ring.layer_nb + row * ring.ssm_row_nb


cdef inline char *conv_row(gdn_ring_header *ring, int64_t layer, int64_t row) noexcept nogil:
    return <char *>ring + ring.conv_offset + layer * ring.layer_nb + row * ring.conv_row_nb


cdef void zero_row(gdn_ring_header *ring, int64_t row) noexcept nogil:
    cdef int64_t layer
    for layer in range(ring.n_layers):
        memset(ssm_row(ring, layer, row), 0, 4 * ring.n_embd_s)
        memset(conv_row(ring, layer, row), 0, 4 * ring.n_embd_r)


cdef gdn_status ring_size(const gdn_ring_params *params, size_t *nbytes) noexcept nogil:
    cdef gdn_ring_header h
    cdef gdn_status status = lay_out(params, &h) if nbytes != NULL else GDN_ERR_NULL
    if status == GDN_OK:
        nbytes[0] = h.nbytes
    return status


cdef gdn_status ring_init(const gdn_ring_params *params, void *buffer, size_t nbytes) noexcept nogil:
    cdef gdn_ring_header h
    cdef gdn_ring_header *ring = <gdn_ring_header *>buffer
    cdef gdn_status status = lay_out(params, &h) if buffer != NULL else GDN_ERR_NULL
    cdef int64_t i, padding
    if status != GDN_OK:
        return status
    if <uintptr_t>buffer & 3:
        return GDN_ERR_STRIDE
    if <size_t>h.nbytes > nbytes:
        return GDN_ERR_SHAPE
    padding = <int64_t>(-(<uintptr_t>buffer + <uintptr_t>h.ssm_offset) % ROW_ALIGN)
    memset(buffer, 0, h.ssm_offset)
    memset(<char *>buffer + h.hints_offset, 0xff, 4 * <int64_t>h.n_hints)     # -1: seen nowhere
    h.ssm_offset += padding
    h.conv_offset += padding
    h.checksum = crc32(<uint8_t *>&h, LAYOUT_BYTES)
    memcpy(<char *>buffer + 8, <char *>&h + 8, HEADER_BYTES - 8)
    for i in range(h.n_slots):
        clear(record(ring, i))
    gdn_fence()
    memcpy(ring.magic, h.magic, 8)           # last: a buffer that is half a ring is none
    return GDN_OK


cdef void clear(gdn_ring_slot *r) noexcept nogil:
    memset(r, 0, sizeof(gdn_ring_slot))
    r.seq_id = r.next = -1


cdef bint layout_is_sound(const gdn_ring_header *ring, size_t nbytes) noexcept nogil:
    """Whether the header is the one that its own extents give, unchanged since ring_init."""
    cdef gdn_ring_params p
    cdef gdn_ring_header h
    cdef int64_t spare, padding
    if memcmp(ring.magic, b"GDNRING", 8) or ring.abi != GDN_RING_ABI:
        return False
    spare = <int64_t>ring.n_planes - ring.n_rollback - 1
    if spare < 0 or spare > INT32_MAX:
        return False
    p.size = sizeof(gdn_ring_params)
    p.n_slots, p.n_rollback, p.n_layers, p.spare = ring.n_slots, ring.n_rollback, ring.n_layers, <int32_t>spare
    p.H_v, p.S_k, p.S_v = ring.H_v, ring.S_k, ring.S_v
    p.conv_channels, p.conv_width = ring.conv_channels, ring.conv_width
    if lay_out(&p, &h) != GDN_OK or <size_t>h.nbytes > nbytes:
        return False
    padding = ring.ssm_offset - h.ssm_offset if ring.ssm_offset >= h.ssm_offset else -1
    if padding < 0 or padding > MAX_PADDING or padding & 3:
        return False
    h.ssm_offset += padding
    h.conv_offset += padding
    return memcmp(&h, ring, LAYOUT_BYTES) == 0 and ring.checksum == crc32(<const uint8_t *>ring, LAYOUT_BYTES)


cdef bint record_is_sound(gdn_ring_header *ring, const gdn_ring_slot *r) noexcept nogil:
    return (0 <= r.state <= GDN_SLOT_FILLING and 0 <= r.mark <= GDN_MARK_READ
            and (r.state != GDN_SLOT_FREE or r.mark == GDN_MARK_NONE) and (r.state == GDN_SLOT_FREE) == (r.seq_id == -1)
            and (r.state == GDN_SLOT_FILLING) == (r.mark == GDN_MARK_FILL)
            and 0 <= r.head < ring.n_planes and 0 <= r.valid < ring.n_planes and r.position >= 0
            and 0 <= r.touched <= ring.n_planes and r.n_tokens >= 0 and -1 <= r.next < ring.n_slots)


cdef gdn_status ring_attach(void *buffer, size_t nbytes) noexcept nogil:
    cdef gdn_ring_header *ring = <gdn_ring_header *>buffer
    cdef gdn_status status
    cdef int64_t i
    if buffer == NULL:
        return GDN_ERR_NULL
    if <uintptr_t>buffer & 3:
        return GDN_ERR_STRIDE
    if nbytes < HEADER_BYTES or not layout_is_sound(ring, nbytes):
        return GDN_ERR_DAMAGED
    status = lock(ring)
    if status != GDN_OK:
        return status
    if ring.n_journal != 0 or ring.sequence & 1:     # an image of the ring taken in the middle of a change
        status = recover(ring)
    for i in range(ring.n_slots):
        if status == GDN_OK and not record_is_sound(ring, record(ring, i)):
            status = GDN_ERR_DAMAGED
    if status == GDN_OK:
        resolve_all(ring)
    unlock(ring)
    return status


cdef gdn_status rows(gdn_ring_header *ring, int64_t layer, gdn_tensor *t) noexcept nogil:
    if ring == NULL or t == NULL:
        return GDN_ERR_NULL
    if layer < 0 or layer >= ring.n_layers:
        return GDN_ERR_ROW
    t.type = GDN_TYPE_F32
    t.nb[0], t.ne[3] = 4, <int64_t>ring.n_planes * ring.n_slots
    return GDN_OK


cdef gdn_status ring_ssm(gdn_ring_header *ring, int64_t layer, gdn_tensor *t) noexcept nogil:
    cdef gdn_status status = rows(ring, layer, t)
    if status == GDN_OK:
        t.data, t.nb[3] = ssm_row(ring, layer, 0), ring.ssm_row_nb
        t.ne[0], t.ne[1], t.ne[2] = ring.S_k, ring.S_v, ring.H_v
        t.nb[1], t.nb[2] = 4 * t.ne[0], 4 * t.ne[0] * t.ne[1]
    return status


cdef gdn_status ring_conv(gdn_ring_header *ring, int64_t layer, gdn_tensor *t) noexcept nogil:
    cdef gdn_status status = rows(ring, layer, t)
    if status == GDN_OK:
        t.data, t.nb[3] = conv_row(ring, layer, 0), ring.conv_row_nb
        t.ne[0], t.ne[1], t.ne[2] = ring.conv_width - 1, ring.conv_channels, 1
        t.nb[1] = 4 * t.ne[0]
        t.nb[2] = t.nb[1] * t.ne[1]
    return status
