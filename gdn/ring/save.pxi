# A sequence as bytes: a header, then its planes, oldest first, each the recurrent and convolution row of every layer.

cdef extern from *:
    """
    #pragma pack(push, 4)
    typedef struct gdn_saved {
        char     magic[8];
        uint32_t abi, crc;                  /* crc32 of everything behind it */
        int64_t  nbytes, position;
        int32_t  n_layers, H_v, S_k, S_v, conv_channels, conv_width, valid, reserved;
    } gdn_saved;
    #pragma pack(pop)
    """
    ctypedef struct gdn_saved:
        char magic[8]
        uint32_t abi, crc
        int64_t nbytes, position
        int32_t n_layers, H_v, S_k, S_v, conv_channels, conv_width, valid, reserved

cdef enum:
    CRC_START = 16                # bytes in front of what the checksum covers

cdef size_t saved_bytes(gdn_ring_header *ring, int64_t valid) noexcept nogil:
    return sizeof(gdn_saved) + <size_t>((valid + 1) * ring.n_layers * 4 * (ring.n_embd_s + ring.n_embd_r))


cdef void describe(gdn_ring_header *ring, int64_t position, int32_t valid, gdn_saved *h) noexcept nogil:
    memset(h, 0, sizeof(gdn_saved))
    memcpy(h.magic, b"GDNSEQ\0", 8)
    h.abi, h.nbytes, h.position, h.valid = GDN_RING_ABI, saved_bytes(ring, valid), position, valid
    h.n_layers, h.H_v, h.S_k, h.S_v = ring.n_layers, ring.H_v, ring.S_k, ring.S_v
    h.conv_channels, h.conv_width = ring.conv_channels, ring.conv_width


cdef gdn_status ring_save_size(gdn_ring_header *ring, int64_t seq_id, size_t *nbytes) noexcept nogil:
    cdef gdn_ring_slot r
    cdef int64_t slot
    cdef gdn_status status = query(ring, seq_id, &r, &slot) if nbytes != NULL else GDN_ERR_NULL
    if status == GDN_OK:
        nbytes[0] = saved_bytes(ring, r.valid)
    return status


cdef gdn_status ring_save(gdn_ring_header *ring, int64_t seq_id, void *data, size_t size,
                          size_t *nbytes) noexcept nogil:
    cdef gdn_status status = lock(ring) if data != NULL and nbytes != NULL else GDN_ERR_NULL
    cdef gdn_ring_slot r
    cdef gdn_saved h
    cdef int64_t slot
    if status != GDN_OK:
        return status
    status = visit(ring, seq_id, &slot)
    if status == GDN_OK and saved_bytes(ring, depth(ring, record(ring, slot))) > size:
        status = GDN_ERR_SCRATCH
    if status == GDN_OK:
        r = record(ring, slot)[0]
        r.valid = depth(ring, &r)
        change(ring)
        mark(touch(ring, slot), GDN_MARK_READ, 0, 0, 0)
        done(ring)
    unlock(ring)
    if status != GDN_OK:
        return status
    describe(ring, r.position, r.valid, &h)
    move_planes(ring, slot, r.head, r.valid, <char *>data + sizeof(gdn_saved), False)
    memcpy(data, &h, sizeof(gdn_saved))
    h.crc = crc32(<uint8_t *>data + CRC_START, h.nbytes - CRC_START)
    memcpy(data, &h, sizeof(gdn_saved))
    nbytes[0] = h.nbytes
    return conclude(ring, slot, NOWHERE, 0, 0)


cdef void move_planes(gdn_ring_header *ring, int64_t slot, int64_t head, int64_t valid, char *data,
                      bint load) noexcept nogil:
    """Planes head - valid to head of a slot to data, or from it."""
    cdef int64_t back, layer, row, kind
    cdef size_t n
    cdef char *state
    for back in range(valid, -1, -1):
        row = row_of(ring, slot, head - back)
        for layer in range(ring.n_layers):
            for kind in range(2):
                state = ssm_row(ring, layer, row) if kind == 0 else conv_row(ring, layer, row)
                n = 4 * (ring.n_embd_s if kind == 0 else ring.n_embd_r)
                if load:
                    memcpy(state, data, n)
                else:
                    memcpy(data, state, n)
                data += n


cdef bint saved_is_sound(gdn_ring_header *ring, const void *data, size_t size, gdn_saved *h) noexcept nogil:
    """Whether the bytes are a whole sequence of this ring's extents.  Fills h."""
    cdef gdn_saved wanted
    if size < sizeof(gdn_saved):
        return False
    memcpy(h, data, sizeof(gdn_saved))
    if h.valid < 0 or h.valid > ring.n_rollback or h.position < h.valid:
        return False
    describe(ring, h.position, h.valid, &wanted)
    wanted.crc = h.crc
    return (memcmp(h, &wanted, sizeof(gdn_saved)) == 0 and <size_t>h.nbytes == size
            and crc32(<const uint8_t *>data + CRC_START, size - CRC_START) == h.crc)


cdef gdn_status ring_load(gdn_ring_header *ring, int64_t seq_id, const void *data, size_t size) noexcept nogil:
    cdef gdn_status status
    cdef gdn_saved h
    cdef int64_t slot
    if ring == NULL or data == NULL:
        return GDN_ERR_NULL
    if not saved_is_sound(ring, data, size, &h):
        return GDN_ERR_DAMAGED
    status = lock(ring)
    if status != GDN_OK:
        return status
    if visit(ring, seq_id, &slot) == GDN_ERR_LOST:
        change(ring)
        mark(touch(ring, slot), GDN_MARK_FRESH, 0, 0, 0)      # stays lost until it is whole
        done(ring)
    else:
        slot = NOWHERE
        status = claim(ring, seq_id, &slot)
        if status == GDN_OK:
            change(ring)
            fill(ring, slot, seq_id)
            done(ring)
    unlock(ring)
    if status != GDN_OK:
        return status
    move_planes(ring, slot, h.valid, h.valid, <char *>data + sizeof(gdn_saved), True)
    return conclude(ring, NOWHERE, slot, h.position, h.valid)
