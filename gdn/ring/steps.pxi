# Steps: begin, commit, abort.

cdef gdn_status inspect(gdn_ring_header *ring, gdn_ring_step *step, int64_t i) noexcept nogil:
    """Whether entry i can be stepped.  Leaves its slot in rows_in."""
    cdef gdn_status status = visit(ring, step.seq_ids[i], &step.rows_in[i])
    cdef int64_t n_tokens = step.n_tokens[i], at = step.positions[i] if step.positions != NULL else NOWHERE, stands
    if status != GDN_OK and (status != GDN_ERR_LOST or at != 0):
        return status
    if n_tokens < 0 or n_tokens > MAX_TOKENS or at < NOWHERE:
        return GDN_ERR_VALUE
    if kept(ring, n_tokens) > step.n_snapshots:
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
    cdef int64_t *out = step.rows_out + i * step.n_snapshots
    newest = n + 1 if fresh and needs_zeros(ring, step.n_tokens[i]) else n
    mark(r, GDN_MARK_FRESH if fresh else GDN_MARK_STEP, newest, step.n_tokens[i], id)
    step.rows_in[i] = NOWHERE if fresh else row_of(ring, slot, r.head)
    newest += r.head
    if newest >= ring.n_planes:
        newest -= ring.n_planes
    for s in range(n):
        out[s] = row_of(ring, slot, newest - s)
    for s in range(n, step.n_snapshots):
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
    if step.n_seqs < 0 or step.n_snapshots < 1:
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
