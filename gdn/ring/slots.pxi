# Making and attaching to a ring; sequences: acquire and release, rollback, questions.
#
# Needs: _ring.pyx (gdn_fence, gdn_me, gdn_nonce), layout.pxi, lock.pxi, crc.h.

cdef enum:                        # what `enter` lets pass
    LOST_TOO = 1
    TREE_TOO = 2


# ---------------------------------------------------------------- making and attaching

cdef gdn_status ring_size(const gdn_ring_params *params, size_t *nbytes) noexcept nogil:
    cdef gdn_ring_header h
    cdef gdn_status status = plan_layout(params, &h) if nbytes != NULL else GDN_ERR_NULL
    if status == GDN_OK:
        nbytes[0] = h.nbytes
    return status


cdef gdn_status ring_init(const gdn_ring_params *params, void *buffer, size_t nbytes) noexcept nogil:
    cdef gdn_ring_header h
    cdef gdn_ring_header *ring = <gdn_ring_header *>buffer
    cdef gdn_status status = plan_layout(params, &h) if buffer != NULL else GDN_ERR_NULL
    cdef int64_t slot, i
    if status != GDN_OK:
        return status
    if <uintptr_t>buffer & 3:
        return GDN_ERR_STRIDE
    if <size_t>h.nbytes > nbytes:
        return GDN_ERR_SHAPE
    memset(buffer, 0, h.ssm_offset)
    shift_rows(&h, <int64_t>(-(<uintptr_t>buffer + <uintptr_t>h.ssm_offset) % ROW_ALIGN))
    h.nonce = gdn_nonce()
    h.checksum = crc32(&h, LAYOUT_BYTES)
    memcpy(<char *>buffer + 8, <char *>&h + 8, HEADER_BYTES - 8)
    for slot in range(h.n_slots):
        record(ring, slot).row = <int32_t>slot
        record(ring, slot).id_at = NOWHERE
        clear(ring, slot)
        for i in range(h.n_entries):
            list_of(ring, slot, 0)[i] = list_of(ring, slot, 1)[i] = <int32_t>i
    make_tables(ring)
    gdn_fence()
    memcpy(ring.magic, h.magic, 8)           # last: a buffer that is half a ring is none
    return GDN_OK


cdef bint layout_is_sound(const gdn_ring_header *ring, size_t nbytes) noexcept nogil:
    """Whether the header is the one that its own extents give, unchanged since ring_init."""
    cdef gdn_ring_params p
    cdef gdn_ring_header h
    cdef int64_t spare, padding
    if memcmp(ring.magic, b"GDNRING", 8) or ring.abi != GDN_RING_ABI:
        return False
    spare = <int64_t>ring.n_planes - ring.n_rollback - 1 if ring.form == GDN_FORM_PLANES else -1
    if (ring.form == GDN_FORM_PLANES and spare < 0) or spare > INT32_MAX:
        return False
    memset(&p, 0, sizeof(p))
    p.size = sizeof(gdn_ring_params)
    p.n_slots, p.n_rollback, p.n_layers, p.spare = ring.n_slots, ring.n_rollback, ring.n_layers, <int32_t>spare
    p.H_k, p.H_v, p.S_k, p.S_v, p.per_channel = ring.H_k, ring.H_v, ring.S_k, ring.S_v, ring.per_channel
    p.conv_channels, p.conv_width, p.form, p.dtype = ring.conv_channels, ring.conv_width, ring.form, ring.dtype
    p.log_capacity, p.n_spare, p.head_map, p.tag = ring.log_capacity, ring.n_spare, ring.head_map, ring.tag
    if plan_layout(&p, &h) != GDN_OK or <size_t>h.nbytes > nbytes:
        return False
    padding = ring.ssm_offset - h.ssm_offset if ring.ssm_offset >= h.ssm_offset else -1
    if padding < 0 or padding > MAX_PADDING or padding & 3:
        return False
    shift_rows(&h, padding)
    h.nonce = ring.nonce
    return memcmp(&h, ring, LAYOUT_BYTES) == 0 and ring.checksum == crc32(ring, LAYOUT_BYTES)


cdef bint fields_are_sound(const gdn_ring_header *ring, const gdn_ring_slot *r) noexcept nogil:
    """Whether every field of a record is in its range and none contradicts another.  Asked again whenever a record is used:
    another process may have overwritten it."""
    cdef int64_t n_back = ring.n_planes if ring.form == GDN_FORM_PLANES else 1, n_tree = ring.n_rollback + 1
    if not (0 <= r.state <= GDN_SLOT_FILLING and 0 <= r.mark <= GDN_MARK_FILL
            and (r.state != GDN_SLOT_FREE or r.mark == GDN_MARK_NONE) and (r.state == GDN_SLOT_FREE) == (r.seq_id == -1)
            and (r.state == GDN_SLOT_FILLING) == (r.mark == GDN_MARK_FILL)
            and 0 <= r.head < ring.n_planes and 0 <= r.valid < n_back and r.valid <= r.position
            and 0 <= r.touched <= ring.n_planes and r.n_tokens >= 0 and -1 <= r.next < ring.n_slots):
        return False
    if ring.form == GDN_FORM_PLANES:
        return r.n_log == 0 and r.n_tree == 0 and r.new_row == NOWHERE
    if not (0 <= r.row < ring.n_rows and -1 <= r.new_row < ring.n_rows and 0 <= r.zero <= 1 and 0 <= r.order <= 1
            and 0 <= r.first < ring.n_entries and 0 <= r.n_log <= ring.log_capacity and r.n_log <= r.position
            and 0 <= r.n_tree <= n_tree and r.n_log + r.n_tree <= ring.log_capacity and 0 <= r.tree <= 1):
        return False
    return r.new_row == NOWHERE if r.mark == GDN_MARK_NONE else (
        0 <= r.n_kept <= r.n_log and 0 <= r.n_new <= ring.n_entries - r.n_log)


cdef bint record_is_sound(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    """Whether the record and its lists are."""
    cdef const gdn_ring_slot *r = record(ring, slot)
    cdef int32_t *places = list_of(ring, slot, 0)
    cdef int64_t i
    if not fields_are_sound(ring, r):
        return False
    if ring.form == GDN_FORM_PLANES:
        return True
    for i in range(2 * <int64_t>ring.n_entries):
        if not 0 <= places[i] < ring.n_entries:
            return False
    for i in range(r.n_tree):
        if not -1 <= parents_of(ring, slot)[i] < i:
            return False
    return list_is_sound(ring, list_of(ring, slot, r.order))


cdef bint list_is_sound(gdn_ring_header *ring, int32_t *places) noexcept nogil:
    """Whether it names every entry once.  The id table, made anew next, marks them meanwhile."""
    cdef int64_t i
    memset(ids(ring), 0, 4 * <int64_t>ring.n_entries)
    for i in range(ring.n_entries):
        ids(ring)[places[i]] += 1
    for i in range(ring.n_entries):
        if ids(ring)[i] != 1:
            return False
    return True


cdef gdn_status ring_attach(void *buffer, size_t nbytes) noexcept nogil:
    cdef gdn_ring_header *ring = <gdn_ring_header *>buffer
    cdef gdn_status status, tables
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
    if ring.n_journal != 0 or ring.sequence & 1:         # an image of the ring taken in the middle of a change
        status = put_records_back(ring)
    for i in range(ring.n_slots):
        if status == GDN_OK and not record_is_sound(ring, i):
            status = GDN_ERR_DAMAGED
    tables = make_tables(ring)                  # also where it is refused: others may go on with what is whole
    status = status if status != GDN_OK else tables
    unlock(ring)
    if status == GDN_OK:
        resolve_dead(ring)
    return status


# ---------------------------------------------------------------- the way in and out of a change

cdef gdn_status look(gdn_ring_header *ring, int64_t seq_id, int allowed, int64_t *slot) noexcept nogil:
    """Find a sequence, with the lock held, and say whether it is whole and nobody else's."""
    cdef gdn_ring_slot *r
    slot[0] = find(ring, seq_id)
    if slot[0] == NOWHERE:
        return GDN_ERR_UNKNOWN
    r = record(ring, slot[0])
    if not fields_are_sound(ring, r):
        return GDN_ERR_DAMAGED
    if r.mark != GDN_MARK_NONE:
        return GDN_ERR_BUSY
    if r.state == GDN_SLOT_LOST and not allowed & LOST_TOO:
        return GDN_ERR_LOST
    return GDN_ERR_PENDING if r.n_tree != 0 and not allowed & TREE_TOO else GDN_OK


cdef gdn_status enter(gdn_ring_header *ring, int64_t seq_id, int allowed, int64_t *slot) noexcept nogil:
    """Take the lock and find a sequence that is to be changed; what a dead process holds of it is put back first.
    With anything but GDN_OK the lock is not held."""
    cdef gdn_status status
    cdef int round
    for round in range(2):
        status = lock(ring)
        if status != GDN_OK:
            return status
        status = look(ring, seq_id, allowed, slot)
        if status == GDN_OK and is_read(ring, slot[0]):
            status = GDN_ERR_BUSY
        if status == GDN_OK:
            return status
        unlock(ring)
        if status != GDN_ERR_BUSY or not resolve_dead(ring):
            break
    return status


cdef inline gdn_ring_slot *open_change(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    begin_change(ring)
    return change(ring, slot)


cdef inline gdn_status leave(gdn_ring_header *ring) noexcept nogil:
    """End the change and give the lock back."""
    end_change(ring)
    unlock(ring)
    return GDN_OK


cdef inline int32_t depth(const gdn_ring_header *ring, const gdn_ring_slot *r) noexcept nogil:
    """Tokens that can be taken back."""
    return min(r.n_log if ring.form == GDN_FORM_LOG else r.valid, ring.n_rollback)


cdef inline void mark(gdn_ring_slot *r, int32_t kind, int64_t touched, int64_t n_tokens, uint32_t step) noexcept nogil:
    cdef gdn_process me = gdn_me()
    r.mark, r.touched, r.n_tokens, r.step, r.next = kind, <int32_t>touched, n_tokens, step, NOWHERE
    r.owner, r.owner_start = me.pid, me.start
    r.new_row, r.n_kept, r.n_new, r.tree = NOWHERE, r.n_log, 0, 0


# ---------------------------------------------------------------- acquire, release, reset

cdef gdn_status claim(gdn_ring_header *ring, int64_t seq_id, int64_t *slot) noexcept nogil:
    """Find the slot for a new sequence: *slot, or any if that is -1.  With the lock held."""
    if seq_id == NOWHERE:
        return GDN_ERR_VALUE
    if slot[0] < NOWHERE or slot[0] >= ring.n_slots:
        return GDN_ERR_ROW
    if find(ring, seq_id) != NOWHERE:
        return GDN_ERR_BUSY
    if slot[0] != NOWHERE:
        if record(ring, slot[0]).state != GDN_SLOT_FREE:
            return GDN_ERR_BUSY
    else:
        slot[0] = first_free(ring)
        if slot[0] == NOWHERE:
            return GDN_ERR_FULL
        if slot[0] >= ring.n_slots or record(ring, slot[0]).state != GDN_SLOT_FREE:
            return GDN_ERR_DAMAGED
    return GDN_OK if fields_are_sound(ring, record(ring, slot[0])) else GDN_ERR_DAMAGED


cdef gdn_status fill_slot(gdn_ring_header *ring, int64_t seq_id, int64_t *slot) noexcept nogil:
    """Take a free slot for a new sequence and mark it as being filled; slots of the dead are free too.  The lock is
    held neither before nor after."""
    cdef int64_t wanted = slot[0]
    cdef gdn_status status
    cdef int round
    for round in range(2):
        slot[0] = wanted
        status = lock(ring)
        if status != GDN_OK:
            return status
        status = claim(ring, seq_id, slot)
        if status == GDN_OK:
            begin_change(ring)
            occupy(ring, slot[0], seq_id, 0)
            return leave(ring)
        unlock(ring)
        if status not in (GDN_ERR_BUSY, GDN_ERR_FULL) or not resolve_dead(ring):
            break
    return status


cdef void occupy(gdn_ring_header *ring, int64_t slot, int64_t seq_id, uint32_t step) noexcept nogil:
    """A free slot is being filled for a sequence.  Inside a change."""
    cdef gdn_ring_slot *r = change(ring, slot)
    r.seq_id, r.state, r.zero = seq_id, GDN_SLOT_FILLING, 1
    mark(r, GDN_MARK_FILL, 0, 0, step)
    free_bits(ring)[slot >> 5] &= ~(<uint32_t>1 << (slot & 31))
    note_id(ring, slot)


cdef gdn_status end_fill(gdn_ring_header *ring, int64_t slot, int64_t position, int32_t valid, int32_t n_log,
                         bint zero) noexcept nogil:
    """What the slot was marked for is written: planes 0 to valid, or row and n_log entries, up to position."""
    cdef gdn_status status = lock(ring)
    cdef gdn_ring_slot *r
    if status != GDN_OK:
        record(ring, slot).owner = 0          # nobody's: whoever comes next puts it back
        return status
    r = open_change(ring, slot)
    r.position, r.head, r.valid, r.n_log, r.zero, r.n_tree = position, valid, valid, n_log, zero, 0
    r.state, r.mark = GDN_SLOT_LIVE, GDN_MARK_NONE
    return leave(ring)


cdef gdn_status ring_acquire(gdn_ring_header *ring, int64_t seq_id, int64_t *slot) noexcept nogil:
    cdef gdn_status status
    cdef int64_t chosen = slot[0] if slot != NULL else NOWHERE
    if ring == NULL:
        return GDN_ERR_NULL
    status = fill_slot(ring, seq_id, &chosen)
    if status != GDN_OK:
        return status
    if ring.form == GDN_FORM_PLANES:
        zero_row(ring, row_of(ring, chosen, 0))
    status = end_fill(ring, chosen, 0, 0, 0, True)
    if status == GDN_OK and slot != NULL:
        slot[0] = chosen
    return status


cdef gdn_status ring_release(gdn_ring_header *ring, int64_t seq_id) noexcept nogil:
    cdef int64_t slot
    cdef gdn_status status = enter(ring, seq_id, LOST_TOO | TREE_TOO, &slot)
    if status != GDN_OK:
        return status
    open_change(ring, slot)
    clear(ring, slot)
    return leave(ring)


# ---------------------------------------------------------------- rollback, questions

cdef gdn_status ring_rollback(gdn_ring_header *ring, int64_t seq_id, int64_t n) noexcept nogil:
    cdef int64_t slot
    cdef gdn_ring_slot *r
    cdef gdn_status status = enter(ring, seq_id, 0, &slot)
    if status != GDN_OK:
        return status
    if n < 0 or n > depth(ring, record(ring, slot)):
        unlock(ring)
        return GDN_ERR_VALUE if n < 0 else GDN_ERR_ROLLBACK
    r = open_change(ring, slot)
    r.position -= n
    if ring.form == GDN_FORM_LOG:
        r.n_log -= <int32_t>n
    else:
        r.head -= <int32_t>n
        if r.head < 0:
            r.head += ring.n_planes
        r.valid -= <int32_t>n
    return leave(ring)


cdef gdn_status query(gdn_ring_header *ring, int64_t seq_id, gdn_ring_slot *copy, int64_t *at) noexcept nogil:
    """The sequence's record, also while it is in somebody's step: what is committed, less the planes being written.
    Its valid is the tokens that can be taken back."""
    cdef gdn_status status
    cdef int round
    for round in range(2):
        status = lock(ring)
        if status != GDN_OK:
            return status
        status = look(ring, seq_id, LOST_TOO | TREE_TOO, at)
        if at[0] != NOWHERE:
            copy[0] = record(ring, at[0])[0]
        unlock(ring)
        if status != GDN_ERR_BUSY or mine(copy) or not resolve_dead(ring):
            break
    if status in (GDN_ERR_UNKNOWN, GDN_ERR_DAMAGED) or (status == GDN_ERR_BUSY and copy.state == GDN_SLOT_FILLING):
        return status
    if copy.state == GDN_SLOT_LOST:
        return GDN_ERR_LOST
    if status == GDN_ERR_BUSY and ring.form == GDN_FORM_PLANES:
        copy.valid = max(0, min(copy.valid, ring.n_planes - 1 - copy.touched))
    copy.valid = depth(ring, copy)
    return GDN_OK


cdef gdn_status ring_position(gdn_ring_header *ring, int64_t seq_id, int64_t *position) noexcept nogil:
    cdef gdn_ring_slot r
    cdef int64_t slot
    cdef gdn_status status = query(ring, seq_id, &r, &slot) if position != NULL else GDN_ERR_NULL
    if status == GDN_OK:
        position[0] = r.position
    return status


cdef gdn_status ring_max_rollback(gdn_ring_header *ring, int64_t seq_id, int64_t *n) noexcept nogil:
    cdef gdn_ring_slot r
    cdef int64_t slot
    cdef gdn_status status = query(ring, seq_id, &r, &slot) if n != NULL else GDN_ERR_NULL
    if status == GDN_OK:
        n[0] = r.valid
    return status
