# Steps: begin, commit, abort; reset, a step of no tokens; and what becomes of a committed tree.
#
# Needs: layout.pxi, lock.pxi, slots.pxi (claim, enter, fields_are_sound, leave, look, occupy, open_change).

cdef enum:
    AHEAD = 64                    # steps that early folding looks ahead

cdef struct fold_plan:            # what a step does to a sequence's log
    bint folds, borrows           # all but kept + new entries go into a row; which is not the slot's own
    int64_t kept, new             # entries that stay of those it had, and that it writes
    int64_t at                    # tokens of the step that the folded state has seen; negative: entries it lacks

cdef struct fold_demand:          # rows that the folds of a step need
    int64_t must                  # ... whose logs are full
    int64_t by_left[AHEAD]        # sequences that fit k more steps but no further one
    int64_t early                 # ... to be folded early, nearest full first
    int64_t last, of_last         # those that fit fewer than `last` more steps, and so many that fit that


# ---------------------------------------------------------------- planes

cdef inline int64_t snapshots_kept(gdn_ring_header *ring, int64_t n_tokens) noexcept nogil:
    """States of a step that stay: the newest, and what can be rolled back to."""
    return 1 if ring.form == GDN_FORM_LOG else min(n_tokens, <int64_t>ring.n_rollback + 1)


cdef inline bint needs_zeros(gdn_ring_header *ring, int64_t n_tokens) noexcept nogil:
    """Whether a sequence started afresh can be rolled back to its start, which then needs a plane."""
    return ring.form == GDN_FORM_PLANES and n_tokens <= ring.n_rollback


cdef void enlist_planes(gdn_ring_header *ring, gdn_ring_step *step, int64_t i, int64_t slot, bint fresh,
                        uint32_t id) noexcept nogil:
    """Mark entry i's slot and say which rows it reads and writes."""
    cdef gdn_ring_slot *r = change(ring, slot)
    cdef int64_t n = snapshots_kept(ring, step.n_tokens[i]), s, newest
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


cdef void publish_planes(gdn_ring_header *ring, gdn_ring_slot *r) noexcept nogil:
    cdef int64_t n_kept = snapshots_kept(ring, r.n_tokens)
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


# ---------------------------------------------------------------- logs

cdef fold_plan plan_fold(gdn_ring_header *ring, const gdn_ring_slot *r, int64_t n_tokens, bint fresh, bint tree,
                         bint early) noexcept nogil:
    cdef fold_plan p
    cdef int64_t most = ring.log_capacity, n = 0 if fresh else r.n_log
    p.kept, p.new, p.at = n, n_tokens, 0
    p.folds = n_tokens > 0 and (early or n + n_tokens > most or r.n_log + n_tokens > ring.n_entries)
    p.borrows = p.folds and not r.zero
    if p.folds:
        if tree:
            p.kept = min(n, <int64_t>ring.n_rollback, most - n_tokens)
        else:
            p.new = min(n_tokens, <int64_t>ring.n_rollback)
            p.kept = min(n, ring.n_rollback - p.new)
        p.at = n_tokens - p.new - p.kept
    return p


cdef void foresee(gdn_ring_header *ring, const gdn_ring_slot *r, int64_t n_tokens, bint fresh, bint tree,
                  fold_demand *demand) noexcept nogil:
    """Count a sequence of the step among those that need a row now, or some steps ahead."""
    cdef int64_t left
    if plan_fold(ring, r, n_tokens, fresh, tree, False).borrows:
        demand.must += 1
    elif ring.n_spare < ring.n_slots and can_wait(ring, r, n_tokens, fresh, tree, &left):
        demand.by_left[left] += 1


cdef bint can_wait(gdn_ring_header *ring, const gdn_ring_slot *r, int64_t n_tokens, bint fresh, bint tree,
                   int64_t *left) noexcept nogil:
    """Whether a sequence could be folded early; *left: further steps like this one that its log has room for."""
    cdef fold_plan p = plan_fold(ring, r, n_tokens, fresh, tree, True)
    if not p.borrows or fresh or p.kept + p.new >= r.n_log + n_tokens:
        return False
    left[0] = (ring.log_capacity - r.n_log - n_tokens) // n_tokens
    return 0 <= left[0] < AHEAD


cdef void choose_early(gdn_ring_header *ring, fold_demand *demand) noexcept nogil:
    """How many must fold before they are full, so that no coming step needs more rows than there are."""
    cdef int64_t k, so_far = 0
    for k in range(AHEAD):
        so_far += demand.by_left[k]
        demand.early = max(demand.early, so_far - (k + 1) * ring.n_spare)
    demand.early = max(0, min(demand.early, ring.n_spare_free - demand.must))
    demand.last, demand.of_last = 0, demand.early
    while demand.last < AHEAD and demand.of_last > demand.by_left[demand.last]:
        demand.of_last -= demand.by_left[demand.last]
        demand.last += 1


cdef bint is_early(gdn_ring_header *ring, const gdn_ring_slot *r, int64_t n_tokens, bint fresh, bint tree,
                   fold_demand *demand) noexcept nogil:
    cdef int64_t left
    if demand.early == 0 or not can_wait(ring, r, n_tokens, fresh, tree, &left) or left > demand.last:
        return False
    if left == demand.last:
        demand.of_last -= 1
        return demand.of_last >= 0
    return True


cdef void enlist_log(gdn_ring_header *ring, gdn_ring_step *step, int64_t i, int64_t slot, bint fresh, uint32_t id,
                     const int64_t *parents, fold_demand *demand) noexcept nogil:
    """Mark entry i's slot and say which row and entries it reads, which entries it writes and what is folded."""
    cdef gdn_ring_slot *r = change(ring, slot)
    cdef int64_t n_tokens = step.n_tokens[i], t
    cdef bint tree = parents != NULL and n_tokens > 0
    cdef fold_plan p = plan_fold(ring, r, n_tokens, fresh, tree, is_early(ring, r, n_tokens, fresh, tree, demand))
    cdef int64_t *log_in = step.log_in + i * step.n_log_in
    cdef int64_t *log_out = step.log_out + i * step.n_log_out
    mark(r, GDN_MARK_FRESH if fresh else GDN_MARK_STEP, 0, n_tokens, id)
    r.n_kept, r.n_new, r.tree = <int32_t>p.kept, <int32_t>p.new, tree
    for t in range(step.n_log_in):
        log_in[t] = entry_at(ring, slot, r, t) if t < r.n_log and not fresh else NOWHERE
    for t in range(step.n_log_out):
        log_out[t] = NOWHERE
    for t in range(p.new):
        log_out[n_tokens - p.new + t] = entry_at(ring, slot, r, r.n_log + t)
    for t in range(n_tokens if tree else 0):
        parents_of(ring, slot)[t] = <int32_t>parents[t]
    step.rows_in[i] = NOWHERE if fresh or r.zero else r.row
    if p.folds:
        r.new_row = r.row
        if p.borrows and ring.n_spare_free > 0:      # else begin gives up
            ring.n_spare_free -= 1
            r.new_row = spares(ring)[ring.n_spare_free]
        add_checkpoint(step, i, p.at, r.new_row)
    for t in range(step.n_snapshots):
        step.rows_out[i * step.n_snapshots + t] = NOWHERE


cdef inline void add_checkpoint(gdn_ring_step *step, int64_t i, int64_t n, int64_t row) noexcept nogil:
    cdef int64_t *c = step.checkpoints + 3 * step.n_checkpoints
    c[0], c[1], c[2] = i, n, row
    step.n_checkpoints += 1


cdef void publish_log(gdn_ring_header *ring, gdn_ring_slot *r) noexcept nogil:
    cdef int32_t gone = r.n_log if r.mark == GDN_MARK_FRESH else r.n_log - r.n_kept
    if r.mark == GDN_MARK_FRESH:
        r.position, r.zero = 0, 1
    r.first = (r.first + gone) % ring.n_entries
    r.n_log -= gone
    if r.new_row != NOWHERE:
        if borrows(r):
            give_back(ring, r.row)
        r.row, r.zero = r.new_row, 0
    if r.tree:
        r.n_tree = r.n_new
    else:
        r.n_log += r.n_new
        r.position += r.n_tokens


# ---------------------------------------------------------------- begin

cdef gdn_status inspect(gdn_ring_header *ring, gdn_ring_step *step, int64_t i, const int64_t *parents) noexcept nogil:
    """Whether entry i can be stepped.  Leaves its slot in rows_in."""
    cdef int64_t n_tokens = step.n_tokens[i], at = step.positions[i] if step.positions != NULL else NOWHERE, t
    cdef gdn_status status = look(ring, step.seq_ids[i], LOST_TOO if at == 0 else 0, &step.rows_in[i])
    cdef gdn_ring_slot *r
    if status == GDN_OK and is_read(ring, step.rows_in[i]):
        status = GDN_ERR_BUSY
    if status != GDN_OK:
        return status
    r = record(ring, step.rows_in[i])
    if n_tokens < 0 or n_tokens > MAX_TOKENS or at < NOWHERE:
        return GDN_ERR_VALUE
    if snapshots_kept(ring, n_tokens) > step.n_snapshots or (ring.form == GDN_FORM_LOG and (
            n_tokens > step.n_log_out or (r.n_log > step.n_log_in and at != 0))):
        return GDN_ERR_SHAPE
    if (at > 0 and at != r.position) or (at != 0 and r.position > MAX_TOKENS):
        return GDN_ERR_VALUE
    for t in range(n_tokens if parents != NULL else 0):
        if t > ring.n_rollback or parents[t] < NOWHERE or parents[t] >= t:
            return GDN_ERR_VALUE
    return GDN_OK


cdef gdn_status check_step(const gdn_ring_header *ring, const gdn_ring_step *s) noexcept nogil:
    """Extents and pointers of a step that is to begin."""
    cdef bint log = ring.form == GDN_FORM_LOG
    if s.n_seqs < 0 or s.n_snapshots < 1 or s.n_forks < 0:
        return GDN_ERR_SHAPE
    if log and (s.n_log_in < 0 or s.n_log_out < 0):
        return GDN_ERR_SHAPE
    if s.n_seqs and (s.seq_ids == NULL or s.n_tokens == NULL or s.rows_in == NULL or s.rows_out == NULL):
        return GDN_ERR_NULL
    if s.n_seqs and log and ((s.n_log_in and s.log_in == NULL) or (s.n_log_out and s.log_out == NULL)):
        return GDN_ERR_NULL
    if s.n_forks and s.forks == NULL:
        return GDN_ERR_NULL
    if s.max_checkpoints < s.n_forks + (s.n_seqs if log else 0):
        return GDN_ERR_SHAPE if s.checkpoints != NULL else GDN_ERR_NULL
    if s.max_checkpoints and s.checkpoints == NULL:
        return GDN_ERR_NULL
    return GDN_ERR_VALUE if s.parents != NULL and not log else GDN_OK


cdef gdn_status ring_begin(gdn_ring_header *ring, gdn_ring_step *given) noexcept nogil:
    cdef gdn_ring_step s
    cdef gdn_status status
    cdef int round
    if ring == NULL or given == NULL:
        return GDN_ERR_NULL
    status = read_struct(given, STEP_LEAST, sizeof(gdn_ring_step), &s)
    if status != GDN_OK:
        return status
    given.step, given.failed, given.first = 0, NOWHERE, NOWHERE
    status = check_step(ring, &s)
    for round in range(2):
        if status != GDN_OK:
            return status
        s.step, s.failed, s.first, s.n_checkpoints = 0, NOWHERE, NOWHERE, 0
        status = lock(ring)
        if status != GDN_OK:
            return status
        status = begin_locked(ring, &s)
        unlock(ring)
        given.step, given.failed, given.first, given.nonce = s.step, s.failed, s.first, ring.nonce
        if given.size >= sizeof(gdn_ring_step):
            given.n_checkpoints = s.n_checkpoints
        if status not in (GDN_ERR_BUSY, GDN_ERR_FULL) or not resolve_dead(ring):
            break
        status = GDN_OK
    if status == GDN_OK and s.positions != NULL:
        zero_starts(ring, &s)
    return status


cdef gdn_status begin_locked(gdn_ring_header *ring, gdn_ring_step *s) noexcept nogil:
    cdef gdn_status status = GDN_OK
    cdef fold_demand demand
    cdef int64_t i, slot, last = NOWHERE
    cdef const int64_t *parents = s.parents
    cdef uint32_t id = ring.last_step + 1 if ring.last_step + 1 != 0 else 1
    cdef bint fresh
    memset(&demand, 0, sizeof(demand))
    for i in range(s.n_seqs):
        status = inspect(ring, s, i, parents)
        if status != GDN_OK:
            s.failed = i
            return status
        if ring.form == GDN_FORM_LOG:
            foresee(ring, record(ring, s.rows_in[i]), s.n_tokens[i], s.positions != NULL and s.positions[i] == 0,
                    parents != NULL, &demand)
        if parents != NULL:
            parents += s.n_tokens[i]
    if not 0 <= ring.n_spare_free <= ring.n_spare:
        return GDN_ERR_DAMAGED
    if demand.must > ring.n_spare_free:
        status = GDN_ERR_SPARE if demand.must > ring.n_spare else GDN_ERR_BUSY
    choose_early(ring, &demand)
    parents = s.parents
    begin_change(ring)
    for i in range(s.n_seqs):
        slot, fresh = s.rows_in[i], s.positions != NULL and s.positions[i] == 0
        if record(ring, slot).mark != GDN_MARK_NONE:      # named twice
            return give_up(ring, s, i, GDN_ERR_BUSY)
        if ring.form == GDN_FORM_LOG:
            enlist_log(ring, s, i, slot, fresh, id, parents, &demand)
        else:
            enlist_planes(ring, s, i, slot, fresh, id)
        if parents != NULL:
            parents += s.n_tokens[i]
        last = chain(ring, s, last, slot)
    if status != GDN_OK:
        return give_up(ring, s, NOWHERE, status)
    for i in range(s.n_forks):
        status = fork(ring, s, i, id, &last)
        if status != GDN_OK:
            return give_up(ring, s, s.n_seqs + i, status)
    ring.last_step = s.step = id
    s.nonce = ring.nonce
    end_change(ring)
    return GDN_OK


cdef gdn_status give_up(gdn_ring_header *ring, gdn_ring_step *s, int64_t failed, gdn_status status) noexcept nogil:
    """Undo what begin has changed."""
    s.failed, s.first, s.n_checkpoints = failed, NOWHERE, 0
    recover(ring)
    return status


cdef inline int64_t chain(gdn_ring_header *ring, gdn_ring_step *s, int64_t last, int64_t slot) noexcept nogil:
    """The step's slots are a list; they are in its change already."""
    if last == NOWHERE:
        s.first = <int32_t>slot
    else:
        record(ring, last).next = <int32_t>slot
    return slot


cdef gdn_status fork(gdn_ring_header *ring, gdn_ring_step *s, int64_t i, uint32_t id, int64_t *last) noexcept nogil:
    """Take a slot for a sequence that starts within the step.  Inside its change."""
    cdef int64_t source = s.forks[3 * i], n = s.forks[3 * i + 1], slot = NOWHERE
    cdef gdn_ring_slot *r
    cdef gdn_status status
    if source < 0 or source >= s.n_seqs or n < 0 or n > (0 if s.parents != NULL else s.n_tokens[source]):
        return GDN_ERR_VALUE
    status = claim(ring, s.forks[3 * i + 2], &slot)
    if status != GDN_OK:
        return status
    occupy(ring, slot, s.forks[3 * i + 2], id)
    r = record(ring, slot)
    r.position = n
    if s.positions == NULL or s.positions[source] != 0:
        r.position += record(ring, find(ring, s.seq_ids[source])).position
    add_checkpoint(s, source, n, r.row if ring.form == GDN_FORM_LOG else row_of(ring, slot, 0))
    last[0] = chain(ring, s, last[0], slot)
    return GDN_OK


cdef void zero_starts(gdn_ring_header *ring, gdn_ring_step *step) noexcept nogil:
    """Clear the plane before the first token of sequences that start afresh and can be rolled back to their start."""
    cdef int64_t i, slot = step.first
    for i in range(step.n_seqs):
        if not 0 <= slot < ring.n_slots:          # overwritten meanwhile
            return
        if step.positions[i] == 0 and needs_zeros(ring, step.n_tokens[i]):
            zero_row(ring, row_of(ring, slot, record(ring, slot).head + 1))
        slot = record(ring, slot).next


# ---------------------------------------------------------------- commit, abort, reset, accept

cdef void publish(gdn_ring_header *ring, gdn_ring_slot *r) noexcept nogil:
    """Make what the marked slot's step wrote its state.  Inside a change."""
    if r.mark == GDN_MARK_FILL:
        r.zero = 0
    elif ring.form == GDN_FORM_LOG:
        publish_log(ring, r)
    else:
        publish_planes(ring, r)
    r.state, r.mark, r.new_row = GDN_SLOT_LIVE, GDN_MARK_NONE, NOWHERE


cdef gdn_status close_step(gdn_ring_header *ring, gdn_ring_step *step, bint commit) noexcept nogil:
    cdef gdn_status status
    cdef gdn_ring_slot *r
    cdef gdn_ring_step s
    cdef int64_t i, slot, next
    if ring == NULL or step == NULL:
        return GDN_ERR_NULL
    status = read_struct(step, STEP_LEAST, sizeof(gdn_ring_step), &s)
    if status != GDN_OK:
        return status
    if s.step == 0 or s.nonce != ring.nonce or s.n_seqs < 0 or s.n_forks < 0:
        return GDN_ERR_VALUE
    status = lock(ring)
    if status != GDN_OK:
        return status
    slot = s.first
    for i in range(s.n_seqs + s.n_forks):
        r = record(ring, slot) if 0 <= slot < ring.n_slots and i < ring.n_slots else NULL
        if r == NULL or r.mark == GDN_MARK_NONE or r.step != s.step or not mine(r):
            unlock(ring)
            return GDN_ERR_VALUE
        if not fields_are_sound(ring, r):
            unlock(ring)
            return GDN_ERR_DAMAGED
        slot = r.next
    begin_change(ring)
    slot = s.first
    for i in range(s.n_seqs + s.n_forks):
        r = change(ring, slot)
        next = r.next
        if commit:
            publish(ring, r)
        else:
            put_back(ring, slot)
        slot = next
    step.step = 0
    return leave(ring)


cdef gdn_status ring_commit(gdn_ring_header *ring, gdn_ring_step *step) noexcept nogil:
    return close_step(ring, step, True)


cdef gdn_status ring_abort(gdn_ring_header *ring, gdn_ring_step *step) noexcept nogil:
    return close_step(ring, step, False)


cdef gdn_status ring_reset(gdn_ring_header *ring, int64_t seq_id) noexcept nogil:
    """A log is forgotten; a plane is zeroed as by a fresh step of no tokens."""
    cdef int64_t slot
    cdef gdn_ring_slot *r
    cdef gdn_status status = enter(ring, seq_id, LOST_TOO | TREE_TOO, &slot)
    if status != GDN_OK:
        return status
    r = open_change(ring, slot)
    if ring.form == GDN_FORM_LOG:
        r.position, r.zero, r.n_log, r.n_tree = 0, 1, 0, 0
        return leave(ring)
    mark(r, GDN_MARK_FRESH, 1, 0, 0)
    leave(ring)
    zero_row(ring, row_of(ring, slot, r.head + 1))
    status = lock(ring)
    if status != GDN_OK:
        r.owner = 0
        return status
    publish(ring, open_change(ring, slot))
    return leave(ring)


cdef gdn_status ring_accept(gdn_ring_header *ring, int64_t seq_id, const int64_t *tokens, int64_t n) noexcept nogil:
    cdef int64_t slot, i, a, b, before = NOWHERE
    cdef int32_t *now
    cdef int32_t *then
    cdef gdn_ring_slot *r
    cdef bint sound
    cdef gdn_status status = enter(ring, seq_id, TREE_TOO, &slot) if tokens != NULL or n == 0 else GDN_ERR_NULL
    if status != GDN_OK:
        return status
    r = record(ring, slot)
    sound = 0 <= n <= r.n_tree and r.n_tree > 0
    for i in range(n if sound else 0):
        sound &= before < tokens[i] < r.n_tree and parents_of(ring, slot)[tokens[i]] == before
        if not sound:
            break
        before = tokens[i]
    if not sound:
        unlock(ring)
        return GDN_ERR_VALUE
    # The list that does not count becomes the new one: a process killed here leaves the old one whole.
    now, then = list_of(ring, slot, r.order), list_of(ring, slot, 1 - r.order)
    memcpy(then, now, 4 * <int64_t>ring.n_entries)
    for i in range(n):                        # ascending: what is swapped away is never needed again
        a, b = (r.first + r.n_log + i) % ring.n_entries, (r.first + r.n_log + tokens[i]) % ring.n_entries
        then[a], then[b] = then[b], then[a]
    r = open_change(ring, slot)
    r.order, r.n_tree = 1 - r.order, 0
    r.n_log += <int32_t>n
    r.position += n
    return leave(ring)
