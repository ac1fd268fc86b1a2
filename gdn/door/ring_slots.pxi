# Sequences: finding them, acquire and release, steps, rollback, reset, copy.

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


cdef void filled(gdn_ring_header *ring, int64_t slot, int64_t position, int32_t valid) noexcept nogil:
    """Planes 0 to valid hold the states up to position.  Inside a change."""
    cdef gdn_ring_slot *r = touch(ring, slot)
    r.position, r.head, r.valid = position, valid, valid
    r.state, r.mark = GDN_SLOT_LIVE, GDN_MARK_NONE


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
    status = lock(ring)
    if status != GDN_OK:
        return status
    change(ring)
    filled(ring, chosen, 0, 0)
    done(ring)
    unlock(ring)
    if slot != NULL:
        slot[0] = chosen
    return GDN_OK


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
    if status == GDN_OK:
        change(ring)
        publish(ring, touch(ring, slot))
        done(ring)
        unlock(ring)
    return status


# ---------------------------------------------------------------- steps

cdef gdn_status inspect(gdn_ring_header *ring, gdn_ring_step *step, int64_t i) noexcept nogil:
    """Whether entry i can be stepped.  Leaves its slot in rows_in."""
    cdef gdn_status status = visit(ring, step.seq_ids[i], &step.rows_in[i])
    cdef int64_t n_tokens = step.n_tokens[i], at = step.positions[i] if step.positions != NULL else NOWHERE, stands
    if status != GDN_OK and (status != GDN_ERR_LOST or at != 0):
        return status
    if n_tokens < 0 or n_tokens > MAX_TOKENS or at < NOWHERE:
        return GDN_ERR_VALUE
    if kept(ring, n_tokens) > step.n_columns:
        return GDN_ERR_SHAPE
    stands = record(ring, step.rows_in[i]).position
    if at > 0 and at != stands:
        return GDN_ERR_VALUE
    return GDN_ERR_VALUE if at != 0 and stands > MAX_TOKENS else GDN_OK


cdef void enlist(gdn_ring_header *ring, gdn_ring_step *step, int64_t i, int64_t slot, uint32_t id) noexcept nogil:
    """Mark entry i's slot and say which rows it reads and writes."""
    cdef gdn_ring_slot *r = touch(ring, slot)
    cdef bint fresh = step.positions != NULL and step.positions[i] == 0
    cdef int64_t n = kept(ring, step.n_tokens[i]), s, newest
    cdef int64_t *out = step.rows_out + i * step.n_columns
    newest = n + 1 if fresh and needs_zeros(ring, step.n_tokens[i]) else n
    mark(r, GDN_MARK_FRESH if fresh else GDN_MARK_STEP, newest, step.n_tokens[i], id)
    step.rows_in[i] = NOWHERE if fresh else row_of(ring, slot, r.head)
    newest += r.head
    if newest >= ring.n_planes:
        newest -= ring.n_planes
    for s in range(n):
        out[s] = row_of(ring, slot, newest - s)
    for s in range(n, step.n_columns):
        out[s] = NOWHERE


cdef gdn_status ring_begin(gdn_ring_header *ring, gdn_ring_step *step) noexcept nogil:
    cdef gdn_status status
    cdef int64_t i, slot, last = NOWHERE
    cdef uint32_t id
    if ring == NULL or step == NULL:
        return GDN_ERR_NULL
    if step.size != sizeof(gdn_ring_step):
        return GDN_ERR_ABI
    step.step, step.failed, step.first = 0, NOWHERE, NOWHERE
    if step.n_seqs < 0 or step.n_columns < 1:
        return GDN_ERR_SHAPE
    if step.n_seqs and (step.seq_ids == NULL or step.n_tokens == NULL or step.rows_in == NULL or step.rows_out == NULL):
        return GDN_ERR_NULL
    status = lock(ring)
    if status != GDN_OK:
        return status
    for i in range(step.n_seqs):
        status = inspect(ring, step, i)
        if status != GDN_OK:
            step.failed = i
            unlock(ring)
            return status
    id = ring.last_step + 1 if ring.last_step + 1 != 0 else 1
    change(ring)
    for i in range(step.n_seqs):
        slot = step.rows_in[i]
        if record(ring, slot).mark != GDN_MARK_NONE:      # named twice
            step.failed = i
            undo(ring)
            unlock(ring)
            return GDN_ERR_BUSY
        enlist(ring, step, i, slot, id)
        if last == NOWHERE:
            step.first = <int32_t>slot
        else:
            record(ring, last).next = <int32_t>slot
        last = slot
    ring.last_step = step.step = id
    done(ring)
    unlock(ring)
    if step.positions != NULL:
        zero_starts(ring, step)
    return GDN_OK


cdef void zero_starts(gdn_ring_header *ring, gdn_ring_step *step) noexcept nogil:
    """Clear the plane before the first token of sequences that start afresh and can be rolled back to their start."""
    cdef int64_t i, slot = step.first
    for i in range(step.n_seqs):
        if step.positions[i] == 0 and needs_zeros(ring, step.n_tokens[i]):
            zero_row(ring, row_of(ring, slot, record(ring, slot).head + 1))
        slot = record(ring, slot).next


cdef gdn_status close_step(gdn_ring_header *ring, gdn_ring_step *step, bint commit) noexcept nogil:
    cdef gdn_status status
    cdef gdn_ring_slot *r
    cdef int64_t i, slot
    if ring == NULL or step == NULL:
        return GDN_ERR_NULL
    if step.size != sizeof(gdn_ring_step):
        return GDN_ERR_ABI
    if step.step == 0 or step.n_seqs < 0 or step.n_seqs > ring.n_slots:
        return GDN_ERR_VALUE
    status = lock(ring)
    if status != GDN_OK:
        return status
    change(ring)
    slot = step.first
    for i in range(step.n_seqs):
        r = record(ring, slot) if 0 <= slot < ring.n_slots else NULL
        if r == NULL or r.mark not in (GDN_MARK_STEP, GDN_MARK_FRESH) or r.step != step.step or not mine(r):
            undo(ring)
            unlock(ring)
            return GDN_ERR_VALUE
        touch(ring, slot)
        slot = r.next
        if commit:
            publish(ring, r)
        else:
            put_back(ring, r)
    done(ring)
    unlock(ring)
    step.step = 0
    return GDN_OK


cdef gdn_status ring_commit(gdn_ring_header *ring, gdn_ring_step *step) noexcept nogil:
    return close_step(ring, step, True)


cdef gdn_status ring_abort(gdn_ring_header *ring, gdn_ring_step *step) noexcept nogil:
    return close_step(ring, step, False)


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
    status = lock(ring)
    if status == GDN_OK:
        change(ring)
        touch(ring, source).mark = GDN_MARK_NONE
        filled(ring, target, r.position, r.valid)
        done(ring)
        unlock(ring)
    return status


cdef void copy_planes(gdn_ring_header *ring, int64_t source, int64_t head, int64_t target, int64_t n) noexcept nogil:
    """The plane at head and n planes behind it to the target's planes n to 0."""
    cdef int64_t back, layer, a, b
    for back in range(n + 1):
        a, b = row_of(ring, source, head - back), row_of(ring, target, n - back)
        for layer in range(ring.n_layers):
            memcpy(ssm_row(ring, layer, b), ssm_row(ring, layer, a), 4 * ring.n_embd_s)
            memcpy(conv_row(ring, layer, b), conv_row(ring, layer, a), 4 * ring.n_embd_r)
