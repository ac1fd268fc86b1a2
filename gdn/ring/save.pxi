# A sequence copied, or as bytes: a header, then rows, each the recurrent and convolution row of every layer: planes, oldest
# first, or a log's row; then a log's entries, oldest first, each its k, d, g and x of every layer.
#
# Needs: layout.pxi (conv_row, entry_at, load_type, log_entry, record, rounding_of, row_of, ssm_row, ssm_size, store_rounded,
# type_size), lock.pxi (begin_read, end_read, lock, resolve_dead, unlock), slots.pxi, crc.h.

cdef extern from *:
    """
    #pragma pack(push, 4)
    typedef struct gdn_saved {
        char     magic[8];
        uint32_t abi, crc;                  /* crc32 of everything behind it */
        int64_t  nbytes, position;
        uint64_t tag;
        int32_t  n_layers, H_k, H_v, S_k, S_v, per_channel, conv_channels, conv_width, dtype, valid, n_log, reserved;
    } gdn_saved;
    #pragma pack(pop)
    """
    ctypedef struct gdn_saved:
        char magic[8]
        uint32_t abi, crc
        int64_t nbytes, position
        uint64_t tag
        int32_t n_layers, H_k, H_v, S_k, S_v, per_channel, conv_channels, conv_width, dtype, valid, n_log, reserved

cdef enum:
    CRC_START = 16                # bytes in front of what the checksum covers
    FOLD_KEYS = 64                # keys and values of a head that are in scratch while entries are added
    FOLD_VALUES = 32


# ---------------------------------------------------------------- reading a sequence

cdef gdn_status open_read(gdn_ring_header *ring, int64_t seq_id, int64_t *slot, gdn_ring_slot *copy,
                          uint32_t **count) noexcept nogil:
    """Count the caller among a sequence's readers; its record as it stands until end_read(*count)."""
    cdef gdn_status status
    cdef int round
    for round in range(2):
        status = lock(ring)
        if status != GDN_OK:
            return status
        status = look(ring, seq_id, 0, slot)
        if status == GDN_OK:
            copy[0] = record(ring, slot[0])[0]
            count[0] = begin_read(ring, slot[0])
            if count[0] == NULL:
                status = GDN_ERR_BUSY
        unlock(ring)
        if status != GDN_ERR_BUSY or not resolve_dead(ring):
            break
    return status


cdef void read_row(gdn_ring_header *ring, int64_t layer, int64_t row, char *ssm, char *conv, bint zero) noexcept nogil:
    if zero:
        memset(ssm, 0, ssm_size(ring))
        memset(conv, 0, 4 * ring.n_embd_r)
    else:
        memcpy(ssm, ssm_row(ring, layer, row), ssm_size(ring))
        memcpy(conv, conv_row(ring, layer, row), 4 * ring.n_embd_r)


cdef void fold(gdn_ring_header *ring, int64_t layer, int64_t slot, const gdn_ring_slot *r, char *ssm,
               float *conv) noexcept nogil:
    """Add the slot's entries to a copy of its row: ssm [H_v][S_v][S_k], conv [channels][width - 1]."""
    cdef int64_t h, first, j, e, w = ring.conv_width - 1, c
    cdef const float *x
    for e in range(r.n_log):
        x = <const float *>(log_entry(ring, layer, entry_at(ring, slot, r, e)) + ring.entry_x)
        for c in range(ring.conv_channels if w > 0 else 0):
            memmove(conv + c * w, conv + c * w + 1, 4 * (w - 1))
            conv[c * w + w - 1] = x[c]
    for h in range(ring.H_v):
        for first from 0 <= first < ring.S_k by FOLD_KEYS:
            for j from 0 <= j < ring.S_v by FOLD_VALUES:
                fold_block(ring, layer, slot, r, h, first, j, ssm)


cdef inline int64_t key_head(gdn_ring_header *ring, int64_t h) noexcept nogil:
    return h // (ring.H_v // ring.H_k) if ring.head_map == GDN_HEAD_INTERLEAVED else h % ring.H_k


cdef inline bint can_fold(gdn_ring_header *ring) noexcept nogil:
    return ring.head_map != GDN_HEAD_NONE or ring.H_k == ring.H_v or ring.H_k == 1


cdef void fold_block(gdn_ring_header *ring, int64_t layer, int64_t slot, const gdn_ring_slot *r, int64_t h, int64_t first,
                     int64_t j_0, char *ssm) noexcept nogil:
    """S <- exp(g) S + k d^T for every entry, of some keys and values of one head; the state is rounded once."""
    cdef int64_t n = min(<int64_t>FOLD_KEYS, ring.S_k - first), m = min(<int64_t>FOLD_VALUES, ring.S_v - j_0), i, j, e
    cdef int64_t size = type_size(ring.dtype), row = size * ring.S_k
    cdef float s[FOLD_VALUES * FOLD_KEYS]
    cdef float decay[FOLD_KEYS]
    cdef gdn_rounding nearest = rounding_of(0, 0, 0, 0)
    cdef const char *entry
    cdef const float *k
    cdef const float *d
    cdef const float *g
    ssm += (h * ring.S_v + j_0) * row + first * size
    for j in range(m):
        for i in range(n):
            s[j * FOLD_KEYS + i] = load_type(ssm + j * row + i * size, ring.dtype)
    for e in range(r.n_log):
        entry = log_entry(ring, layer, entry_at(ring, slot, r, e))
        k = <const float *>entry + key_head(ring, h) * ring.S_k + first
        d = <const float *>(entry + ring.entry_d) + h * ring.S_v + j_0
        g = <const float *>(entry + ring.entry_g) + (h * ring.S_k + first if ring.per_channel else h)
        for i in range(n):
            decay[i] = <float>exp(<double>g[i if ring.per_channel else 0])
        for j in range(m):
            for i in range(n):
                s[j * FOLD_KEYS + i] = decay[i] * s[j * FOLD_KEYS + i] + k[i] * d[j]
    for j in range(m):
        for i in range(n):
            store_rounded(ssm + j * row + i * size, s[j * FOLD_KEYS + i], ring.dtype, &nearest, 0)


# ---------------------------------------------------------------- copy

cdef gdn_status copy_sequence(gdn_ring_header *ring, int64_t src, int64_t dst, bint deep) noexcept nogil:
    cdef gdn_ring_slot r
    cdef int64_t source, target = NOWHERE, layer
    cdef uint32_t *count
    cdef gdn_status status = open_read(ring, src, &source, &r, &count)
    cdef bint folds = not deep and r.n_log > 0
    if status != GDN_OK:
        return status
    status = fill_slot(ring, dst, &target) if not folds or can_fold(ring) else GDN_ERR_VALUE
    if status == GDN_OK and ring.form == GDN_FORM_PLANES:
        r.valid = depth(ring, &r) if deep else 0
        copy_planes(ring, source, r.head, target, r.valid)
    elif status == GDN_OK:
        copy_log(ring, source, &r, target, folds)
    end_read(count)
    if status != GDN_OK:
        return status
    return end_fill(ring, target, r.position, r.valid, 0 if folds else r.n_log, r.zero and not folds)


cdef void copy_planes(gdn_ring_header *ring, int64_t source, int64_t head, int64_t target, int64_t n) noexcept nogil:
    """The plane at head and n planes behind it to the target's planes n to 0."""
    cdef int64_t back, layer, a, b
    for back in range(n + 1):
        a, b = row_of(ring, source, head - back), row_of(ring, target, n - back)
        for layer in range(ring.n_layers):
            read_row(ring, layer, a, ssm_row(ring, layer, b), conv_row(ring, layer, b), False)


cdef void copy_log(gdn_ring_header *ring, int64_t source, const gdn_ring_slot *r, int64_t target,
                   bint folds) noexcept nogil:
    """A row, unless it counts as zeros, and the entries on it; or what they come to."""
    cdef gdn_ring_slot *to = record(ring, target)
    cdef int64_t layer, i
    cdef char *ssm
    cdef char *conv
    for layer in range(ring.n_layers):
        ssm, conv = ssm_row(ring, layer, to.row), conv_row(ring, layer, to.row)
        if folds or not r.zero:
            read_row(ring, layer, r.row, ssm, conv, r.zero)
        if folds:
            fold(ring, layer, source, r, ssm, <float *>conv)
        for i in range(0 if folds else r.n_log):
            memcpy(log_entry(ring, layer, entry_at(ring, target, to, i)),
                   log_entry(ring, layer, entry_at(ring, source, r, i)), ring.entry_nb)


cdef gdn_status ring_copy(gdn_ring_header *ring, int64_t src, int64_t dst) noexcept nogil:
    return copy_sequence(ring, src, dst, True)


cdef gdn_status ring_copy_state(gdn_ring_header *ring, int64_t src, int64_t dst) noexcept nogil:
    return copy_sequence(ring, src, dst, False)


# ---------------------------------------------------------------- save

cdef inline int64_t entry_floats(const gdn_ring_header *ring) noexcept nogil:
    return (<int64_t>ring.H_k * ring.S_k + <int64_t>ring.H_v * ring.S_v + ring.conv_channels
            + <int64_t>ring.H_v * (ring.S_k if ring.per_channel else 1))


cdef inline int64_t saved_ssm(const gdn_ring_header *ring) noexcept nogil:
    """Bytes of a recurrent row, up to a multiple of 4, behind which floats lie."""
    return (ssm_size(ring) + 3) // 4 * 4


cdef size_t saved_bytes(const gdn_ring_header *ring, int64_t valid, int64_t n_log) noexcept nogil:
    cdef int64_t rows = 1 if ring.form == GDN_FORM_LOG else valid + 1
    return sizeof(gdn_saved) + <size_t>ring.n_layers * <size_t>(
        rows * (saved_ssm(ring) + 4 * ring.n_embd_r) + 4 * n_log * entry_floats(ring))


cdef void describe(const gdn_ring_header *ring, int64_t position, int32_t valid, int32_t n_log, gdn_saved *h) noexcept nogil:
    memset(h, 0, sizeof(gdn_saved))
    memcpy(h.magic, b"GDNSEQ\0", 8)
    h.abi, h.nbytes, h.position, h.valid, h.n_log = GDN_RING_ABI, saved_bytes(ring, valid, n_log), position, valid, n_log
    h.n_layers, h.H_k, h.H_v, h.S_k, h.S_v = ring.n_layers, ring.H_k, ring.H_v, ring.S_k, ring.S_v
    h.per_channel, h.conv_channels, h.conv_width = ring.per_channel, ring.conv_channels, ring.conv_width
    h.dtype, h.tag = ring.dtype, ring.tag


cdef inline void keep(const gdn_ring_header *ring, gdn_ring_slot *r, bint deep) noexcept nogil:
    """What of a sequence is saved: planes behind the head and entries."""
    r.valid, r.n_log = depth(ring, r) if deep else 0, r.n_log if deep else 0


cdef gdn_status save_size(gdn_ring_header *ring, int64_t seq_id, bint deep, size_t *nbytes) noexcept nogil:
    cdef gdn_ring_slot r
    cdef int64_t slot
    cdef gdn_status status = query(ring, seq_id, &r, &slot) if nbytes != NULL else GDN_ERR_NULL
    if status == GDN_OK:
        keep(ring, &r, deep)
        nbytes[0] = saved_bytes(ring, r.valid, r.n_log)
    return status


cdef gdn_status save(gdn_ring_header *ring, int64_t seq_id, bint deep, void *data, size_t size, size_t *nbytes) noexcept nogil:
    cdef gdn_ring_slot r, saved
    cdef gdn_saved h
    cdef int64_t slot
    cdef uint32_t *count
    cdef gdn_status status
    if data == NULL or nbytes == NULL:
        return GDN_ERR_NULL
    status = open_read(ring, seq_id, &slot, &r, &count)
    if status != GDN_OK:
        return status
    saved = r
    keep(ring, &saved, deep)
    if saved_bytes(ring, saved.valid, saved.n_log) > size:
        status = GDN_ERR_SCRATCH
    elif saved.n_log < r.n_log and not can_fold(ring):
        status = GDN_ERR_VALUE
    elif saved.n_log < r.n_log and <uintptr_t>data & 3:
        status = GDN_ERR_STRIDE
    if status == GDN_OK:
        describe(ring, saved.position, saved.valid, saved.n_log, &h)
        move_rows(ring, slot, &r, saved.valid, <char *>data + sizeof(gdn_saved), saved.n_log < r.n_log, False)
        move_entries(ring, slot, &saved, <char *>data + h.nbytes, False)
    end_read(count)
    if status != GDN_OK:
        return status
    memcpy(data, &h, sizeof(gdn_saved))
    h.crc = crc32(<char *>data + CRC_START, h.nbytes - CRC_START)
    memcpy(data, &h, sizeof(gdn_saved))
    nbytes[0] = h.nbytes
    return GDN_OK


cdef void move_rows(gdn_ring_header *ring, int64_t slot, const gdn_ring_slot *r, int64_t valid, char *data, bint folds,
                    bint load) noexcept nogil:
    """Planes head - valid to head, or a log's row, to data, or from it."""
    cdef int64_t back, layer, row, n_s = saved_ssm(ring), n_r = 4 * ring.n_embd_r
    cdef bint log = ring.form == GDN_FORM_LOG
    for back in range(0 if log else valid, -1, -1):
        row = r.row if log else row_of(ring, slot, r.head - back)
        for layer in range(ring.n_layers):
            if load:
                memcpy(ssm_row(ring, layer, row), data, ssm_size(ring))
                memcpy(conv_row(ring, layer, row), data + n_s, n_r)
            else:
                memset(data + n_s - 4, 0, 4)
                read_row(ring, layer, row, data, data + n_s, log and r.zero)
            if folds:
                fold(ring, layer, slot, r, data, <float *>(data + n_s))
            data += n_s + n_r


cdef void move_entries(gdn_ring_header *ring, int64_t slot, const gdn_ring_slot *r, char *end, bint load) noexcept nogil:
    """The slot's entries to the bytes that end at `end`, or from them."""
    cdef int64_t i, layer, part, n_g = <int64_t>ring.H_v * (ring.S_k if ring.per_channel else 1)
    cdef int64_t[4] at, n
    cdef char *data = end - 4 * entry_floats(ring) * ring.n_layers * r.n_log
    cdef char *entry
    at[0], at[1], at[2], at[3] = 0, ring.entry_d, ring.entry_g, ring.entry_x
    n[0], n[1], n[2], n[3] = <int64_t>ring.H_k * ring.S_k, <int64_t>ring.H_v * ring.S_v, n_g, ring.conv_channels
    for i in range(r.n_log):
        for layer in range(ring.n_layers):
            entry = log_entry(ring, layer, entry_at(ring, slot, r, i))
            for part in range(4):
                if load:
                    memcpy(entry + at[part], data, 4 * n[part])
                else:
                    memcpy(data, entry + at[part], 4 * n[part])
                data += 4 * n[part]


cdef gdn_status ring_save_size(gdn_ring_header *ring, int64_t seq_id, size_t *nbytes) noexcept nogil:
    return save_size(ring, seq_id, True, nbytes)


cdef gdn_status ring_save(gdn_ring_header *ring, int64_t seq_id, void *data, size_t size, size_t *nbytes) noexcept nogil:
    return save(ring, seq_id, True, data, size, nbytes)


cdef gdn_status ring_save_state_size(gdn_ring_header *ring, int64_t seq_id, size_t *nbytes) noexcept nogil:
    return save_size(ring, seq_id, False, nbytes)


cdef gdn_status ring_save_state(gdn_ring_header *ring, int64_t seq_id, void *data, size_t size,
                                size_t *nbytes) noexcept nogil:
    return save(ring, seq_id, False, data, size, nbytes)


# ---------------------------------------------------------------- load

cdef bint saved_is_sound(const gdn_ring_header *ring, const void *data, size_t size, gdn_saved *h) noexcept nogil:
    """Whether the bytes are a whole sequence that this ring can hold.  Fills h."""
    cdef gdn_saved wanted
    if size < sizeof(gdn_saved):
        return False
    memcpy(h, data, sizeof(gdn_saved))
    if h.valid < 0 or h.n_log < 0 or h.position < max(h.valid, h.n_log) or h.position > MAX_TOKENS:
        return False
    if h.valid > ring.n_rollback or h.n_log > ring.log_capacity:
        return False
    if ring.form == GDN_FORM_LOG and h.valid > h.n_log:
        return False                          # planes
    describe(ring, h.position, h.valid, h.n_log, &wanted)
    wanted.crc = h.crc
    if h.tag == 0 or ring.tag == 0:
        wanted.tag = h.tag
    if h.n_log == 0 and (h.H_k == 0 or ring.H_k == 0):
        wanted.H_k, wanted.per_channel = h.H_k, h.per_channel
    return (memcmp(h, &wanted, sizeof(gdn_saved)) == 0 and <size_t>h.nbytes == size
            and crc32(<const char *>data + CRC_START, size - CRC_START) == h.crc)


cdef gdn_status ring_load(gdn_ring_header *ring, int64_t seq_id, const void *data, size_t size) noexcept nogil:
    cdef gdn_status status
    cdef gdn_ring_slot r
    cdef gdn_saved h
    cdef int64_t slot
    if ring == NULL or data == NULL:
        return GDN_ERR_NULL
    if not saved_is_sound(ring, data, size, &h):
        return GDN_ERR_DAMAGED
    status = enter(ring, seq_id, LOST_TOO | TREE_TOO, &slot)
    if status == GDN_OK and record(ring, slot).state == GDN_SLOT_LOST:
        mark(open_change(ring, slot), GDN_MARK_FRESH, 0, 0, 0)      # stays lost until it is whole
        leave(ring)
    elif status == GDN_OK:
        unlock(ring)
        return GDN_ERR_BUSY
    else:
        slot = NOWHERE
        status = fill_slot(ring, seq_id, &slot)
    if status != GDN_OK:
        return status
    r = record(ring, slot)[0]
    r.head, r.n_log = h.valid, h.n_log
    move_rows(ring, slot, &r, h.valid, <char *>data + sizeof(gdn_saved), False, True)
    move_entries(ring, slot, &r, <char *>data + size, True)
    return end_fill(ring, slot, h.position, 0 if ring.form == GDN_FORM_LOG else h.valid, h.n_log, False)
