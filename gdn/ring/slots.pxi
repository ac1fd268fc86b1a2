# Sequences: finding them, acquire and release, rollback, reset, copy.

cdef enum:
    PROBES = 4                    # places of the id table in which a sequence may be noted
    NOWHERE = -1


# ---------------------------------------------------------------- finding, with the lock held

cdef int64_t find(gdn_ring_header *ring, int64_t seq_id) noexcept nogil:
    """The sequence's slot or -1.  The id table hints: what it says is checked, what it lacks is searched."""
    cdef int32_t *hints = <int32_t *>(<char *>ring + ring.hints_offset)
    cdef uint32_t mask = <uint32_t>ring.n_hints - 1
    cdef uint32_t start = <uint32_t>((<uint64_t>seq_id * <uint64_t>0x9E3779B97F4A7C15) >> 32)
    cdef int i
    cdef int64_t slot
    if seq_id == NOWHERE:
        return NOWHERE
    for i in range(PROBES):
        slot = hints[(start + i) & mask]
        if 0 <= slot < ring.n_slots and record(ring, slot).seq_id == seq_id:
            return slot
    for slot in range(ring.n_slots):
        if record(ring, slot).seq_id == seq_id:
            note(ring, hints, mask, start, <int32_t>slot)
            return slot
    return NOWHERE


cdef void note(gdn_ring_header *ring, int32_t *hints, uint32_t mask, uint32_t start, int32_t slot) noexcept nogil:
    """Hint at the slot, in a place that hints at no sequence if there is one."""
    cdef int32_t old
    cdef int i
    for i in range(PROBES):
        old = hints[(start + i) & mask]
        if not 0 <= old < ring.n_slots or record(ring, old).state == GDN_SLOT_FREE or old == slot:
            hints[(start + i) & mask] = slot
            return
    hints[start & mask] = slot


cdef gdn_status visit(gdn_ring_header *ring, int64_t seq_id, int64_t *slot) noexcept nogil:
    """Find a sequence, put back what a dead process left of it, and say whether it is whole and nobody else's."""
    cdef gdn_ring_slot *r
    slot[0] = find(ring, seq_id)
    if slot[0] == NOWHERE:
        return GDN_ERR_UNKNOWN
    resolve(ring, slot[0])
    r = record(ring, slot[0])
    if r.state == GDN_SLOT_FREE:
        return GDN_ERR_UNKNOWN
    if r.mark != GDN_MARK_NONE:
        return GDN_ERR_BUSY
    return GDN_ERR_LOST if r.state == GDN_SLOT_LOST else GDN_OK


cdef inline int32_t depth(const gdn_ring_header *ring, const gdn_ring_slot *r) noexcept nogil:
    """Tokens that can be taken back."""
    return min(r.valid, ring.n_rollback)


cdef inline void mark(gdn_ring_slot *r, int32_t kind, int64_t touched, int64_t n_tokens, uint32_t step) noexcept nogil:
    cdef gdn_process me = gdn_me()
    r.mark, r.touched, r.n_tokens, r.step, r.next = kind, <int32_t>touched, n_tokens, step, NOWHERE
    r.owner, r.owner_start = me.pid, me.start


cdef inline int64_t kept(gdn_ring_header *ring, int64_t n_tokens) noexcept nogil:
    """States of a step that stay: the newest, and what can be rolled back to."""
    return min(n_tokens, <int64_t>ring.n_rollback + 1)


cdef inline bint needs_zeros(gdn_ring_header *ring, int64_t n_tokens) noexcept nogil:
    """Whether a sequence started afresh can be rolled back to its start, which then needs a plane."""
    return n_tokens <= ring.n_rollback


cdef void publish(gdn_ring_header *ring, gdn_ring_slot *r) noexcept nogil:
    """Make what the marked slot's step wrote its state."""
    cdef int64_t n_kept = kept(ring, r.n_tokens)
    if r.mark == GDN_MARK_FRESH:
        r.position, r.valid = 0, 0
    r.position += r.n_tokens
    if n_kept < r.n_tokens or (r.mark == GDN_MARK_FRESH and not needs_zeros(ring, r.n_tokens)):
        r.valid = <int32_t>(n_kept - 1)      # the planes before these are of older states, not of the one before
    else:
        r.valid = <int32_t>min(r.valid + n_kept, ring.n_planes - 1)
    r.head += r.touched
    if r.head >= ring.n_planes:
        r.head -= ring.n_planes
    r.state, r.mark = GDN_SLOT_LIVE, GDN_MARK_NONE


# ---------------------------------------------------------------- acquire, release, reset

cdef gdn_status claim(gdn_ring_header *ring, int64_t seq_id, int64_t *slot) noexcept nogil:
    """Find the slot for a new sequence: *slot, or any if that is -1.  With the lock held."""
    cdef int64_t i = find(ring, seq_id)
    if seq_id == NOWHERE:
        return GDN_ERR_VALUE
    if slot[0] < NOWHERE or slot[0] >= ring.n_slots:
        return GDN_ERR_ROW
    if i != NOWHERE:
        resolve(ring, i)
        if record(ring, i).state != GDN_SLOT_FREE:
            return GDN_ERR_BUSY
    if slot[0] != NOWHERE:
        resolve(ring, slot[0])
        return GDN_OK if record(ring, slot[0]).state == GDN_SLOT_FREE else GDN_ERR_BUSY
    slot[0] = first_free(ring)
    if slot[0] == NOWHERE:
        resolve_all(ring)
        slot[0] = first_free(ring)
    return GDN_ERR_FULL if slot[0] == NOWHERE else GDN_OK


cdef int64_t first_free(gdn_ring_header *ring) noexcept nogil:
    cdef int64_t i
    for i in range(ring.n_slots):
        if record(ring, i).state == GDN_SLOT_FREE:
            return i
    return NOWHERE


cdef void fill(gdn_ring_header *ring, int64_t slot, int64_t seq_id) noexcept nogil:
    """Mark a free slot as being filled for a sequence.  Inside a change."""
    cdef gdn_ring_slot *r = touch(ring, slot)
    clear(r)
    r.seq_id, r.state = seq_id, GDN_SLOT_FILLING
    mark(r, GDN_MARK_FILL, 0, 0, 0)


cdef inline void disown(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    """Without the lock: a slot (or -1) that this caller has marked is nobody's, so that whoever comes next puts it back."""
    if slot != NOWHERE:
        record(ring, slot).owner = 0


cdef gdn_status conclude(gdn_ring_header *ring, int64_t source, int64_t target, int64_t position,
                         int32_t valid) noexcept nogil:
    """The source (or -1) was read; planes 0 to valid of the target (or -1) hold its states up to position."""
    cdef gdn_status status = lock(ring)
    cdef gdn_ring_slot *r
    if status != GDN_OK:
        disown(ring, source)
        disown(ring, target)
        return status
    change(ring)
    if source != NOWHERE:
        touch(ring, source).mark = GDN_MARK_NONE
    if target != NOWHERE:
        r = touch(ring, target)
        r.position, r.head, r.valid = position, valid, valid
        r.state, r.mark = GDN_SLOT_LIVE, GDN_MARK_NONE
    done(ring)
    unlock(ring)
    return GDN_OK


cdef gdn_status ring_acquire(gdn_ring_header *ring, int64_t seq_id, int64_t *slot) noexcept nogil:
    cdef gdn_status status = lock(ring)
    cdef int64_t chosen
    if status != GDN_OK:
        return status
    chosen = slot[0] if slot != NULL else NOWHERE
    status = claim(ring, seq_id, &chosen)
    if status == GDN_OK:
        change(ring)
        fill(ring, chosen, seq_id)
        done(ring)
    unlock(ring)
    if status != GDN_OK:
        return status
    zero_row(ring, row_of(ring, chosen, 0))
    status = conclude(ring, NOWHERE, chosen, 0, 0)
    if status == GDN_OK and slot != NULL:
        slot[0] = chosen
    return status


cdef gdn_status ring_release(gdn_ring_header *ring, int64_t seq_id) noexcept nogil:
    cdef gdn_status status = lock(ring)
    cdef int64_t slot
    if status != GDN_OK:
        return status
    status = visit(ring, seq_id, &slot)
    if status == GDN_OK or status == GDN_ERR_LOST:
        change(ring)
        clear(touch(ring, slot))
        done(ring)
        status = GDN_OK
    unlock(ring)
    return status


cdef gdn_status ring_reset(gdn_ring_header *ring, int64_t seq_id) noexcept nogil:
    """A fresh step of no tokens."""
    cdef gdn_status status = lock(ring)
    cdef int64_t slot
    if status != GDN_OK:
        return status
    status = visit(ring, seq_id, &slot)
    if status == GDN_OK or status == GDN_ERR_LOST:
        change(ring)
        mark(touch(ring, slot), GDN_MARK_FRESH, 1, 0, 0)
        done(ring)
        status = GDN_OK
    unlock(ring)
    if status != GDN_OK:
        return status
    zero_row(ring, row_of(ring, slot, record(ring, slot).head + 1))
    status = lock(ring)
    if status != GDN_OK:
        disown(ring, slot)
        return status
    change(ring)
    publish(ring, touch(ring, slot))
    done(ring)
    unlock(ring)
    return GDN_OK


# ---------------------------------------------------------------- rollback, questions, copy

cdef gdn_status ring_rollback(gdn_ring_header *ring, int64_t seq_id, int64_t n) noexcept nogil:
    cdef gdn_status status = lock(ring)
    cdef gdn_ring_slot *r
    cdef int64_t slot
    if status != GDN_OK:
        return status
    status = visit(ring, seq_id, &slot)
    if status == GDN_OK and n < 0:
        status = GDN_ERR_VALUE
    if status == GDN_OK and n > depth(ring, record(ring, slot)):
        status = GDN_ERR_ROLLBACK
    if status == GDN_OK:
        change(ring)
        r = touch(ring, slot)
        r.head -= <int32_t>n
        if r.head < 0:
            r.head += ring.n_planes
        r.valid -= <int32_t>n
        r.position -= n
        done(ring)
    unlock(ring)
    return status


cdef gdn_status query(gdn_ring_header *ring, int64_t seq_id, gdn_ring_slot *copy, int64_t *at) noexcept nogil:
    """The sequence's record, also while it is in somebody's step: what is committed, less the planes being written."""
    cdef gdn_status status = lock(ring)
    cdef int64_t slot
    if status != GDN_OK:
        return status
    status = visit(ring, seq_id, &slot)
    if status == GDN_ERR_BUSY and record(ring, slot).state != GDN_SLOT_FILLING:
        status = GDN_OK if record(ring, slot).state == GDN_SLOT_LIVE else GDN_ERR_LOST
    if status == GDN_OK or status == GDN_ERR_LOST:
        copy[0] = record(ring, slot)[0]
        at[0] = slot
    unlock(ring)
    if status == GDN_OK and copy.mark in (GDN_MARK_STEP, GDN_MARK_FRESH):
        copy.valid = max(0, min(copy.valid, ring.n_planes - 1 - copy.touched))
    if status == GDN_OK:
        copy.valid = depth(ring, copy)
    return status


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


cdef gdn_status ring_copy(gdn_ring_header *ring, int64_t src, int64_t dst) noexcept nogil:
    cdef gdn_status status = lock(ring)
    cdef gdn_ring_slot r
    cdef int64_t source, target = NOWHERE
    if status != GDN_OK:
        return status
    status = visit(ring, src, &source)
    if status == GDN_OK:
        status = claim(ring, dst, &target)
    if status == GDN_OK:
        r = record(ring, source)[0]
        r.valid = depth(ring, &r)
        change(ring)
        mark(touch(ring, source), GDN_MARK_READ, 0, 0, 0)
        fill(ring, target, dst)
        done(ring)
    unlock(ring)
    if status != GDN_OK:
        return status
    copy_planes(ring, source, r.head, target, r.valid)
    return conclude(ring, source, target, r.position, r.valid)


cdef void copy_planes(gdn_ring_header *ring, int64_t source, int64_t head, int64_t target, int64_t n) noexcept nogil:
    """The plane at head and n planes behind it to the target's planes n to 0."""
    cdef int64_t back, layer, a, b
    for back in range(n + 1):
        a, b = row_of(ring, source, head - back), row_of(ring, target, n - back)
        for layer in range(ring.n_layers):
            memcpy(ssm_row(ring, layer, b), ssm_row(ring, layer, a), 4 * ring.n_embd_s)
            memcpy(conv_row(ring, layer, b), conv_row(ring, layer, a), 4 * ring.n_embd_r)
