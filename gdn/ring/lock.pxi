# The ring's lock, and changes to slot records that a process killed anywhere in them cannot leave half made.

cdef extern from "process.h" nogil:
    ctypedef struct gdn_process:
        uint32_t pid
        uint64_t start
    gdn_process gdn_me()
    void gdn_watch_self()
    bint gdn_process_is(uint32_t pid, uint64_t start)
    uint32_t gdn_token(uint32_t pid, uint64_t start)
    bint gdn_token_runs(uint32_t token)
    bint gdn_swap(uint32_t *word, uint32_t old, uint32_t new)
    uint32_t gdn_load(const uint32_t *word)
    void gdn_store(uint32_t *word, uint32_t value)
    void gdn_fence()
    void gdn_pause()
    void gdn_sleep(long nanoseconds)
    int64_t gdn_milliseconds()
    int sched_yield()

cdef enum:
    LOCK_SPINS = 200
    LOCK_YIELDS = 50              # rounds of spinning and yielding before sleeping
    LOCK_PATIENCE = 10000         # milliseconds to wait for a living holder

gdn_watch_self()


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
# Whoever takes the lock over from a dead holder puts back what the journal holds.

cdef inline gdn_ring_entry *entry(gdn_ring_header *ring, int64_t i) noexcept nogil:
    return <gdn_ring_entry *>(<char *>ring + ring.journal_offset) + i


cdef inline void change(gdn_ring_header *ring) noexcept nogil:
    gdn_store(&ring.sequence, ring.sequence + 1)
    gdn_fence()


cdef inline gdn_ring_slot *touch(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    """The slot's record, to be changed.  Once per slot and change."""
    cdef gdn_ring_slot *r = record(ring, slot)
    cdef gdn_ring_entry *e = entry(ring, ring.n_journal)
    e.slot = <int32_t>slot
    e.old = r[0]
    gdn_store(&ring.n_journal, ring.n_journal + 1)
    gdn_fence()
    return r


cdef inline void done(gdn_ring_header *ring) noexcept nogil:
    gdn_store(&ring.n_journal, 0)
    gdn_fence()
    gdn_store(&ring.sequence, ring.sequence + 1)


cdef void undo(gdn_ring_header *ring) noexcept nogil:
    cdef int64_t i
    for i in range(<int64_t>ring.n_journal - 1, -1, -1):
        record(ring, entry(ring, i).slot)[0] = entry(ring, i).old
    done(ring)


cdef gdn_status recover(gdn_ring_header *ring) noexcept nogil:
    """Undo the change that the dead holder of the lock was making."""
    cdef int64_t i
    if ring.n_journal > <uint32_t>ring.n_slots:
        return GDN_ERR_DAMAGED
    for i in range(ring.n_journal):
        if entry(ring, i).slot < 0 or entry(ring, i).slot >= ring.n_slots:
            return GDN_ERR_DAMAGED
    if ring.sequence & 1:
        undo(ring)
    gdn_store(&ring.n_journal, 0)
    return GDN_OK


# ---------------------------------------------------------------- marks of the dead

cdef inline bint mine(const gdn_ring_slot *r) noexcept nogil:
    cdef gdn_process me = gdn_me()
    return r.owner == me.pid and r.owner_start == me.start


cdef bint abandoned(const gdn_ring_slot *r) noexcept nogil:
    return r.mark != GDN_MARK_NONE and not mine(r) and not gdn_process_is(r.owner, r.owner_start)


cdef void put_back(gdn_ring_header *ring, gdn_ring_slot *r) noexcept nogil:
    """End what the slot is marked for without its result."""
    if r.mark == GDN_MARK_FILL:
        clear(r)
    elif r.mark != GDN_MARK_READ:
        if r.touched >= ring.n_planes:
            r.state, r.valid = GDN_SLOT_LOST, 0
        else:
            r.valid = min(r.valid, ring.n_planes - 1 - r.touched)
    r.mark = GDN_MARK_NONE


cdef void resolve(gdn_ring_header *ring, int64_t slot) noexcept nogil:
    """Put the slot back if its owner is dead.  With the lock held, outside a change."""
    if abandoned(record(ring, slot)):
        change(ring)
        put_back(ring, touch(ring, slot))
        done(ring)


cdef void resolve_all(gdn_ring_header *ring) noexcept nogil:
    cdef int64_t i
    for i in range(ring.n_slots):
        resolve(ring, i)
