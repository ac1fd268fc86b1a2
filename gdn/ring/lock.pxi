# The ring's lock, and changes to slot records that a process killed anywhere in them cannot leave half made.
#
# Needs: _ring.pyx, layout.pxi, process.h.

cdef enum:
    LOCK_SPINS = 200
    LOCK_YIELDS = 50              # rounds of spinning and yielding before sleeping
    LOCK_PATIENCE = 10000         # milliseconds to wait for a living holder
    OWNERS = 16                   # processes whose liveness one pass remembers
    SWEEP = 64                    # slots that a pass looks at under one lock

cdef struct holding:              # what a process holds of a slot
    gdn_process owner
    int64_t slot
    int reader                    # its place among the slot's readers; -1: the slot's mark


cdef gdn_status lock(gdn_ring_header *ring) noexcept nogil:
    cdef gdn_process me = gdn_me()
    cdef uint32_t token = gdn_token(me.pid, me.start)
    if ring == NULL:
        return GDN_ERR_NULL
    if gdn_swap(&ring.lock, 0, token):
        return GDN_OK
    return lock_contended(ring, token)


cdef gdn_status lock_contended(gdn_ring_header *ring, uint32_t token) noexcept nogil:
    cdef int64_t start = gdn_milliseconds(), rounds = 0
    cdef uint32_t holder
    cdef gdn_status status
    cdef int i
    while True:
        for i in range(LOCK_SPINS):
            holder = gdn_load(&ring.lock)
            if holder == 0 and gdn_swap(&ring.lock, 0, token):
                return GDN_OK
            gdn_pause()
        rounds += 1
        if rounds < LOCK_YIELDS:
            sched_yield()
            continue
        if holder != 0 and holder != token and not gdn_token_runs(holder) and gdn_swap(&ring.lock, holder, token):
            status = recover(ring)
            if status != GDN_OK:
                unlock(ring)
            return status
        if gdn_milliseconds() - start > LOCK_PATIENCE:
            return GDN_ERR_LOCKED
        gdn_sleep(200000)


cdef inline void unlock(gdn_ring_header *ring) noexcept nogil:
    gdn_store(&ring.lock, 0)


# ---------------------------------------------------------------- changes, whole or not at all
#
# Before a record is changed it is copied to the journal; a change ends when the journal is emptied by one store.
# Whoever takes the lock over from a dead holder puts back what the journal holds.  What can be told from the records
# (ids, free slots, spare rows) is not journalled but made anew then.

cdef inline void begin_change(gdn_ring_header *ring) noexcept nogil:
    gdn_store(&ring.sequence, ring.sequence + 1)
    gdn_fence()


cdef inline gdn_ring_slot *change(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    """The slot's record, to be changed.  Once per slot and change."""
    cdef gdn_ring_slot *r = record(ring, slot)
    cdef gdn_ring_undo *u = undo_of(ring, ring.n_journal if ring.n_journal < <uint32_t>ring.n_slots else 0)
    u.slot = <int32_t>slot
    u.old = r[0]
    gdn_store(&ring.n_journal, ring.n_journal + 1)
    gdn_fence()
    return r


cdef inline void end_change(gdn_ring_header *ring) noexcept nogil:
    gdn_store(&ring.n_journal, 0)
    gdn_fence()
    gdn_store(&ring.sequence, ring.sequence + 1)


cdef gdn_status put_records_back(gdn_ring_header *ring) noexcept nogil:
    """Undo the change under way, or nothing if it was over but for the journal.  Tables are to be made anew."""
    cdef int64_t i
    if ring.n_journal > <uint32_t>ring.n_slots:
        return GDN_ERR_DAMAGED
    for i in range(ring.n_journal):
        if undo_of(ring, i).slot < 0 or undo_of(ring, i).slot >= ring.n_slots:
            return GDN_ERR_DAMAGED
    if ring.sequence & 1:
        for i in range(<int64_t>ring.n_journal - 1, -1, -1):
            record(ring, undo_of(ring, i).slot)[0] = undo_of(ring, i).old
        gdn_store(&ring.sequence, ring.sequence + 1)
    gdn_store(&ring.n_journal, 0)
    return GDN_OK


cdef gdn_status recover(gdn_ring_header *ring) noexcept nogil:
    """Undo the change that the dead holder of the lock was making, or that this one gives up."""
    cdef gdn_status status = put_records_back(ring)
    return make_tables(ring) if status == GDN_OK else status


# ---------------------------------------------------------------- tables that follow from the records

cdef gdn_status make_tables(gdn_ring_header *ring) noexcept nogil:
    """Ids, free slots and spare rows, from the records.  GDN_ERR_DAMAGED: two slots have one id or one row."""
    cdef int64_t slot
    cdef gdn_ring_slot *r
    cdef bint sound = ring.form != GDN_FORM_LOG or make_spares(ring)
    memset(ids(ring), 0xff, 4 * <int64_t>ring.n_ids)
    memset(free_bits(ring), 0, (<int64_t>ring.n_slots + 31) // 32 * 4)
    for slot in range(ring.n_slots):
        r = record(ring, slot)
        r.id_at = NOWHERE
        if r.state == GDN_SLOT_FREE:
            set_free(ring, slot)
        else:
            sound &= find(ring, r.seq_id) == NOWHERE
            note_id(ring, slot)
    return GDN_OK if sound else GDN_ERR_DAMAGED


cdef bint make_spares(gdn_ring_header *ring) noexcept nogil:
    """The spare rows' table; False if a row is anybody's twice.  The id table, made anew next, marks rows meanwhile."""
    cdef int32_t *taken = ids(ring)
    cdef gdn_ring_slot *r
    cdef int64_t slot, row
    cdef bint sound = True
    memset(taken, 0, 4 * ring.n_rows)
    for slot in range(ring.n_slots):
        r = record(ring, slot)
        if not 0 <= r.row < ring.n_rows or not NOWHERE <= r.new_row < ring.n_rows:
            sound = False
            continue
        taken[r.row] += 1
        if borrows(r):
            taken[r.new_row] += 1
    ring.n_spare_free = 0
    for row in range(ring.n_rows):
        sound &= taken[row] <= 1
        if taken[row] == 0 and ring.n_spare_free < ring.n_spare:
            spares(ring)[ring.n_spare_free] = <int32_t>row
            ring.n_spare_free += 1
    return sound


cdef inline bint borrows(const gdn_ring_slot *r) noexcept nogil:
    """Whether the slot's step folds into a row that is not the slot's own."""
    return r.new_row != NOWHERE and r.new_row != r.row


cdef inline void give_back(gdn_ring_header *ring, int32_t row) noexcept nogil:
    if 0 <= ring.n_spare_free < ring.n_spare:
        spares(ring)[ring.n_spare_free] = row
        ring.n_spare_free += 1


cdef inline void set_free(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    free_bits(ring)[slot >> 5] |= <uint32_t>1 << (slot & 31)


cdef int64_t first_free(gdn_ring_header *ring) noexcept nogil:
    cdef int64_t i, bit
    for i in range((<int64_t>ring.n_slots + 31) // 32):
        if free_bits(ring)[i] != 0:
            for bit in range(32):
                if free_bits(ring)[i] >> bit & 1:
                    return 32 * i + bit
    return NOWHERE


cdef int64_t find(gdn_ring_header *ring, int64_t seq_id) noexcept nogil:
    """The sequence's slot or -1."""
    cdef uint32_t mask = <uint32_t>ring.n_ids - 1, at = <uint32_t>gdn_mix(<uint64_t>seq_id)
    cdef int32_t i, slot
    if seq_id == NOWHERE:
        return NOWHERE
    for i in range(ring.n_ids):
        slot = ids(ring)[at & mask]
        if not 0 <= slot < ring.n_slots:
            return NOWHERE
        if record(ring, slot).seq_id == seq_id:
            return slot
        at += 1
    return NOWHERE


cdef inline bint is_stale(gdn_ring_header *ring, uint32_t at) noexcept nogil:
    """Whether the place of the id table names a slot that is no longer noted there."""
    cdef int32_t slot = ids(ring)[at]
    return slot != NOWHERE and not (0 <= slot < ring.n_slots and record(ring, slot).id_at == <int32_t>at)


cdef void note_id(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    """Note the slot under its id, which is not there yet."""
    cdef uint32_t mask = <uint32_t>ring.n_ids - 1, at = <uint32_t>gdn_mix(<uint64_t>record(ring, slot).seq_id) & mask
    while ids(ring)[at] != NOWHERE and not is_stale(ring, at):
        at = (at + 1) & mask
    ids(ring)[at] = <int32_t>slot
    record(ring, slot).id_at = <int32_t>at


cdef void forget_id(gdn_ring_header *ring, gdn_ring_slot *r) noexcept nogil:
    """The slot is no longer noted; places that end no search any more are emptied."""
    cdef uint32_t mask = <uint32_t>ring.n_ids - 1, at = <uint32_t>r.id_at & mask
    if r.id_at == NOWHERE:
        return
    r.id_at = NOWHERE
    while ids(ring)[(at + 1) & mask] == NOWHERE and is_stale(ring, at):
        ids(ring)[at] = NOWHERE
        at = (at - 1) & mask


cdef void clear(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    """The slot is free.  Its row and its list stay."""
    cdef gdn_ring_slot *r = record(ring, slot)
    cdef gdn_ring_slot old = r[0]
    forget_id(ring, r)
    memset(r, 0, sizeof(gdn_ring_slot))
    r.seq_id = r.next = r.id_at = r.new_row = NOWHERE
    r.row, r.zero, r.order, r.first = old.row, 1, old.order, old.first
    set_free(ring, slot)


# ---------------------------------------------------------------- marks of the living and of the dead

cdef inline bint mine(const gdn_ring_slot *r) noexcept nogil:
    cdef gdn_process me = gdn_me()
    return r.owner == me.pid and (r.owner_start == me.start or r.owner_start == 0 or me.start == 0)


cdef bint is_read(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    cdef uint32_t *count = readers_of(ring, slot).count
    cdef uint32_t any = 0
    cdef int i
    for i in range(READERS):
        any |= gdn_load(&count[i])
    return any != 0


cdef uint32_t *begin_read(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    """Count this process among the slot's readers, with the lock held.  What end_read takes; NULL: there are too many."""
    cdef gdn_ring_readers *by = readers_of(ring, slot)
    cdef gdn_process me = gdn_me()
    cdef int i, place = -1
    for i in range(READERS - 1, -1, -1):
        if gdn_load(&by.count[i]) == 0:
            place = i
        elif by.owner[i] == me.pid and by.owner_start[i] == me.start:
            gdn_add_to(&by.count[i], 1)
            return &by.count[i]
    if place < 0:
        return NULL
    by.owner[place], by.owner_start[place] = me.pid, me.start
    gdn_store(&by.count[place], 1)
    return &by.count[place]


cdef inline void end_read(uint32_t *count) noexcept nogil:
    """Without the lock: a reader that cannot get it must not keep writers off."""
    gdn_add_to(count, <uint32_t>-1)


cdef void put_back(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    """End what the slot is marked for without its result.  Inside a change."""
    cdef gdn_ring_slot *r = record(ring, slot)
    if borrows(r):
        give_back(ring, r.new_row)
    if r.mark == GDN_MARK_FILL:
        clear(ring, slot)
        return
    if ring.form == GDN_FORM_PLANES:
        if r.touched >= ring.n_planes:
            r.state, r.valid = GDN_SLOT_LOST, 0
        else:
            r.valid = min(r.valid, ring.n_planes - 1 - r.touched)
    r.mark, r.new_row = GDN_MARK_NONE, NOWHERE


cdef bint resolve_dead(gdn_ring_header *ring) noexcept nogil:
    """Put back what dead processes left; whether there was anything.  Called without the lock: it is held for some slots at
    a time, not while the system is asked who lives.  Each owner is asked for once."""
    cdef gdn_process owners[OWNERS]
    cdef bint dead[OWNERS]
    cdef holding held[SWEEP * (READERS + 1)]
    cdef int64_t first
    cdef int i, n, n_known = 0
    cdef bint found = False
    for first from 0 <= first < ring.n_slots by SWEEP:
        if lock(ring) != GDN_OK:
            return found
        n = list_holdings(ring, first, held)
        unlock(ring)
        for i in range(n):
            if is_dead(held[i].owner, owners, dead, &n_known):
                found |= resolve(ring, &held[i])
    return found


cdef int list_holdings(gdn_ring_header *ring, int64_t first, holding *held) noexcept nogil:
    """What the slots from `first` on are marked for and who reads them, with the lock held."""
    cdef int64_t slot
    cdef gdn_ring_readers *by
    cdef int i, n = 0
    for slot in range(first, min(first + SWEEP, <int64_t>ring.n_slots)):
        by = readers_of(ring, slot)
        for i in range(-1, READERS):
            if i < 0 and record(ring, slot).mark != GDN_MARK_NONE:
                held[n].owner.pid, held[n].owner.start = record(ring, slot).owner, record(ring, slot).owner_start
            elif i >= 0 and gdn_load(&by.count[i]) != 0:
                held[n].owner.pid, held[n].owner.start = by.owner[i], by.owner_start[i]
            else:
                continue
            held[n].slot, held[n].reader = slot, i
            n += 1
    return n


cdef bint is_dead(gdn_process who, gdn_process *owners, bint *dead, int *n) noexcept nogil:
    """Whether that process is gone; owners and dead remember the last n % OWNERS answers."""
    cdef gdn_process me = gdn_me()
    cdef int i
    if who.pid == me.pid and (who.start == me.start or who.start == 0 or me.start == 0):
        return False
    for i in range(min(n[0], OWNERS)):
        if owners[i].pid == who.pid and owners[i].start == who.start:
            return dead[i]
    i = n[0] % OWNERS
    owners[i] = who
    dead[i] = not gdn_process_is(who.pid, who.start)
    n[0] += 1
    return dead[i]


cdef bint resolve(gdn_ring_header *ring, const holding *held) noexcept nogil:
    """End what a dead process holds, if it still does; whether it did."""
    cdef gdn_ring_slot *r = record(ring, held.slot)
    cdef gdn_ring_readers *by = readers_of(ring, held.slot)
    cdef bint found
    if lock(ring) != GDN_OK:
        return False
    if held.reader < 0:
        found = r.mark != GDN_MARK_NONE and r.owner == held.owner.pid and r.owner_start == held.owner.start
    else:
        found = (gdn_load(&by.count[held.reader]) != 0 and by.owner[held.reader] == held.owner.pid
                 and by.owner_start[held.reader] == held.owner.start)
    if found and held.reader >= 0:
        gdn_store(&by.count[held.reader], 0)
    elif found:
        begin_change(ring)
        change(ring, held.slot)
        put_back(ring, held.slot)
        end_change(ring)
    unlock(ring)
    return found
