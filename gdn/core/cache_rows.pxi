# A call on states - the delta rule, the convolution - from its check to its run: rows of caches and packed sequences.
#
# Needs: status.pxi (check_option, check_typed, type_size), parallel.pxi (run_items).
#
# A call works as if every row of rows_in were read before any row is written.  Within a sequence the kernels read
# before they write; a row that another sequence writes is copied to scratch first ("staged").

cdef struct state_call:
    error_buffer error
    const gdn_call *args
    gdn_tensor state, state_out      # args' own, rows along ne[3]
    int64_t n_tokens, n_batch        # extents of the arrays
    int64_t staged_nb[3]             # strides of a staged row
    gdn_item_fn item                 # what runs, n_items times, and the job it reads: delta or conv
    const void *job
    gdn_state_rows *rows             # of that job
    bint claim                       # workers claim items; else each has a fixed share
    int n_workers
    int32_t asked                 # threads the caller asked for; 0 or less: the default
    int64_t n_items
    size_t rows_bytes, worker_bytes
    gdn_delta_job delta
    gdn_conv_job conv
    gdn_delta_net_args delta_args    # a shorter struct than this library's, zeros behind
    gdn_conv_args conv_args


# Checks a call of the C face and fills all but `rows`; the states are called "cache" in messages if in_place.
ctypedef gdn_status (*plan_fn)(const void *args, state_call *c, bint in_place) noexcept nogil


cdef enum:
    MOST_SIZE = 4096                 # of a caller's struct: more is no size


cdef gdn_status read_size(const void **args, size_t least, size_t known, void *copy) noexcept nogil:
    """Accept a struct whose first member is its size; a shorter one than `known` is completed in `copy`."""
    cdef size_t size, i
    if args[0] == NULL:
        return GDN_ERR_NULL
    size = (<const uint32_t *>args[0])[0]
    if not least <= size <= MOST_SIZE:
        return GDN_ERR_ABI
    for i in range(known, size):
        if (<const char *>args[0])[i] != 0:
            return GDN_ERR_ABI
    if size < known:
        memcpy(copy, args[0], size)
        memset(<char *>copy + size, 0, known - size)
        args[0] = copy
    return GDN_OK


cdef void begin_call(state_call *c, const gdn_call *args, int64_t n_tokens, int64_t n_batch) noexcept nogil:
    c.args, c.n_tokens, c.n_batch = args, n_tokens, n_batch
    c.error.text, c.error.size = args.message, args.message_size
    c.state, c.state_out = args.state, args.state_out


cdef gdn_status check_states(const state_call *c, int64_t ne0, int64_t ne1, int64_t ne2, bint in_place) noexcept nogil:
    """States, if given, of any number of rows."""
    cdef const gdn_tensor *x = &c.state
    cdef const gdn_tensor *y = &c.state_out
    cdef gdn_status status = GDN_OK
    if x.data != NULL:
        status = check_typed(&c.error, "cache" if in_place else "state", x, ne0, ne1, ne2, x.ne[3], False)
    if y.data != NULL and status == GDN_OK:
        status = check_typed(&c.error, "cache" if in_place else "state_out", y, ne0, ne1, ne2, y.ne[3], True)
    return status


cdef gdn_status check_rounding(const state_call *c) noexcept nogil:
    cdef const gdn_call *a = c.args
    if a.reserved != 0:
        return fail(&c.error, GDN_ERR_VALUE, "reserved is %d", a.reserved)
    if a.rounding == GDN_ROUND_NEAREST and a.seed != 0:
        return fail(&c.error, GDN_ERR_VALUE, "seed is given, which only stochastic rounding uses")
    return check_option(&c.error, "rounding", a.rounding, GDN_ROUND_NEAREST, GDN_ROUND_STOCHASTIC)


cdef void finish_plan(state_call *c, int64_t n_items, size_t worker_bytes) noexcept nogil:
    c.n_items, c.worker_bytes = n_items, worker_bytes
    c.n_workers = <int>max(<int64_t>1, min(<int64_t>c.n_workers, n_items))
    c.rows_bytes = rows_size(c)


cdef size_t scratch_bytes(const state_call *c) noexcept nogil:
    """Scratch of any alignment."""
    return 64 + c.rows_bytes + c.n_workers * c.worker_bytes


cdef void run_call(state_call *c, void *scratch) noexcept nogil:
    """Run a planned call in scratch_bytes(c)."""
    cdef char *at = <char *>scratch + (-<intptr_t>scratch & 63)
    resolve_rows(c, at, c.rows)
    run_items(c.item, c.job, c.n_items, c.n_workers, c.asked, True, c.claim, at + c.rows_bytes, c.worker_bytes)


# ---- the C face ------------------------------------------------------------------------------------------------

cdef gdn_status c_scratch_size(plan_fn plan, const void *args, size_t *n_bytes) noexcept nogil:
    cdef state_call c
    cdef gdn_status status = plan(args, &c, False) if n_bytes != NULL else GDN_ERR_NULL
    if status == GDN_OK:
        n_bytes[0] = scratch_bytes(&c)
    return status


cdef gdn_status c_call(plan_fn plan, const void *args) noexcept nogil:
    cdef state_call c
    cdef gdn_status status = plan(args, &c, False)
    if status != GDN_OK:
        return status
    if c.args.scratch == NULL or c.args.scratch_size < scratch_bytes(&c):
        return fail(&c.error, GDN_ERR_SCRATCH, "scratch of %llu bytes is needed, got %llu", <uint64_t>scratch_bytes(&c),
                    <uint64_t>c.args.scratch_size)
    run_call(&c, c.args.scratch)
    return GDN_OK


# ---- rows and lengths --------------------------------------------------------------------------------------------

cdef inline int64_t sequence_length(const state_call *c, int64_t i) noexcept nogil:
    return c.n_tokens if c.args.cu_seqlens == NULL else c.args.cu_seqlens[i + 1] - c.args.cu_seqlens[i]


cdef inline int64_t row_in(const state_call *c, int64_t i) noexcept nogil:
    """Row sequence i starts from; -1 is zeros."""
    if c.state.data == NULL:
        return -1
    return i if c.args.rows_in == NULL else c.args.rows_in[i]


cdef inline bint keeps_nothing(const gdn_call *a) noexcept nogil:
    """Whether a call without rows_out has a log or a tree: then no snapshot is kept."""
    return a.log_in != NULL or a.log_out != NULL or a.parents != NULL


cdef inline int64_t entries_of(const gdn_call *a, int64_t i) noexcept nogil:
    """Entries of the log that sequence i stands on."""
    cdef int64_t n = 0
    while a.log_in != NULL and n < a.n_log_in and a.log_in[i * a.n_log_in + n] >= 0:
        n += 1
    return n


cdef inline int64_t row_out(const state_call *c, int64_t i, int64_t snapshot) noexcept nogil:
    """Row of snapshot s of sequence i; -1 where there is none or the snapshot does not exist."""
    if c.state_out.data == NULL or (snapshot > 0 and snapshot >= sequence_length(c, i)):
        return -1
    if c.args.rows_out == NULL and keeps_nothing(c.args):
        return -1
    return snapshot * c.args.n_seqs + i if c.args.rows_out == NULL else c.args.rows_out[i * c.args.n_snapshots + snapshot]


cdef gdn_status check_rows(const state_call *c) noexcept nogil:
    """Packed lengths, rows in range, no row written twice."""
    cdef const gdn_call *a = c.args
    cdef gdn_status status = check_rounding(c) or check_lengths(c)
    cdef int64_t n_in = c.state.ne[3], n_out = c.state_out.ne[3]
    cdef int64_t i
    if status != GDN_OK:
        return status
    if a.n_snapshots > (<int64_t>1 << 40) // max(a.n_seqs, <int64_t>1):    # their product is a size
        return fail(&c.error, GDN_ERR_VALUE, "%lld sequences cannot keep %lld snapshots each", a.n_seqs, a.n_snapshots)
    if c.state.data != NULL and a.rows_in == NULL and n_in < a.n_seqs:
        return fail(&c.error, GDN_ERR_SHAPE, "state has %lld rows, the call has %lld sequences", n_in, a.n_seqs)
    if a.rows_in != NULL and c.state.data != NULL:
        for i in range(a.n_seqs):
            if not -1 <= a.rows_in[i] < n_in:
                return fail(&c.error, GDN_ERR_ROW, "rows_in[%lld] is %lld, the cache has %lld rows", i,
                            a.rows_in[i], n_in)
    if c.state_out.data == NULL:
        return GDN_OK
    if a.rows_out == NULL:
        if keeps_nothing(a):
            return GDN_OK
        if a.n_snapshots > 1 and a.snapshot_nb != 0 and a.rows_in != NULL and c.state.data == c.state_out.data:
            return fail(&c.error, GDN_ERR_VALUE, "snapshot_nb names no rows: a cache with rows_in needs rows_out")
        if a.n_snapshots > 1 and a.snapshot_nb & (type_size(c.state_out.type) - 1):
            return fail(&c.error, GDN_ERR_STRIDE, "snapshot_nb is %lld, no multiple of %lld", a.snapshot_nb,
                        type_size(c.state_out.type))
        if snapshots_meet(c):
            return fail(&c.error, GDN_ERR_TWICE, "snapshot_nb is %lld: with rows %lld bytes apart one is written twice",
                        a.snapshot_nb, c.state_out.nb[3])
        if n_out < a.n_seqs * (a.n_snapshots if a.snapshot_nb == 0 else 1):
            return fail(&c.error, GDN_ERR_SHAPE, "state_out has %lld rows, %lld sequences keep %lld snapshots", n_out,
                        a.n_seqs, a.n_snapshots)
        return GDN_OK
    for i in range(a.n_seqs * a.n_snapshots):
        if not -1 <= a.rows_out[i] < n_out:
            return fail(&c.error, GDN_ERR_ROW, "rows_out[%lld, %lld] is %lld, the cache has %lld rows",
                        i // a.n_snapshots, i % a.n_snapshots, a.rows_out[i], n_out)
    return check_written_once(c)


cdef bint snapshots_meet(const state_call *c) noexcept nogil:
    """Whether i nb[3] = s snapshot_nb for some sequence i and snapshot s: two of them share a row."""
    cdef int64_t nb = abs_64(c.args.snapshot_nb), row_nb = abs_64(c.state_out.nb[3]), divisor = row_nb, b = nb, rest
    if nb == 0 or row_nb == 0:
        return False
    while b != 0:                    # the greatest common divisor
        rest = divisor % b
        divisor, b = b, rest
    return nb // divisor < c.args.n_seqs and row_nb // divisor < c.args.n_snapshots


cdef inline int64_t abs_64(int64_t x) noexcept nogil:
    return -x if x < 0 else x


cdef gdn_status check_lengths(const state_call *c) noexcept nogil:
    cdef const gdn_call *a = c.args
    cdef int64_t i
    if a.n_seqs < 0:
        return fail(&c.error, GDN_ERR_SHAPE, "n_seqs is %lld", a.n_seqs)
    if a.cu_seqlens == NULL:
        if c.n_batch != a.n_seqs:
            return fail(&c.error, GDN_ERR_SHAPE, "n_seqs is %lld, the arrays hold %lld", a.n_seqs, c.n_batch)
        return GDN_OK
    if c.n_batch != 1:
        return fail(&c.error, GDN_ERR_SHAPE, "with cu_seqlens the arrays have n_seqs = 1, got %lld", c.n_batch)
    if a.cu_seqlens[0] != 0:
        return fail(&c.error, GDN_ERR_VALUE, "cu_seqlens must start at 0, got %lld", a.cu_seqlens[0])
    for i in range(a.n_seqs):
        if a.cu_seqlens[i + 1] < a.cu_seqlens[i]:
            return fail(&c.error, GDN_ERR_VALUE, "cu_seqlens must not decrease, got %lld after %lld",
                        a.cu_seqlens[i + 1], a.cu_seqlens[i])
    if a.cu_seqlens[a.n_seqs] != c.n_tokens:
        return fail(&c.error, GDN_ERR_VALUE, "cu_seqlens ends at %lld, the arrays hold %lld tokens",
                    a.cu_seqlens[a.n_seqs], c.n_tokens)
    return GDN_OK


# ---- which rows are written --------------------------------------------------------------------------------------
#
# A set of rows without memory of the call's size: WINDOW rows at a time as bits on the stack.  Windows without a
# written row are skipped, so that a call costs a few passes over its sequences and snapshots unless they lie far apart.

cdef enum:
    WINDOW = 32768               # 64 * WORDS
    WORDS = 512


cdef struct row_window:
    int64_t first, stop          # rows of this window; a first call starts at stop = 0
    int64_t twice                # a row of it that is written twice, or -1
    uint64_t written[WORDS]


cdef void open_window(row_window *w, int64_t lowest, int64_t highest) noexcept nogil:
    """An empty window from the lowest row on."""
    w.first = lowest
    w.stop = lowest + min(<int64_t>WINDOW, highest - lowest + 1)
    w.twice = -1
    memset(w.written, 0, ((w.stop - w.first + 63) >> 6) * sizeof(uint64_t))


cdef inline void mark_row(row_window *w, int64_t row) noexcept nogil:
    cdef uint64_t bit
    if w.first <= row < w.stop:
        bit = <uint64_t>1 << ((row - w.first) & 63)
        if w.written[(row - w.first) >> 6] & bit:
            w.twice = row
        w.written[(row - w.first) >> 6] |= bit


cdef bint next_window(const state_call *c, row_window *w) noexcept nogil:
    """The window from the lowest written row at or after w.stop on; False if there is none."""
    cdef const gdn_call *a = c.args
    cdef int64_t i, snapshot, row, lowest = INT64_MAX, highest = -1
    for i in range(a.n_seqs):
        for snapshot in range(a.n_snapshots):
            row = row_out(c, i, snapshot)
            if row >= w.stop:
                lowest = min(lowest, row)
                highest = max(highest, row)
    for i in range(a.n_checkpoints):
        row = a.checkpoints[3 * i + 2]
        if row >= w.stop:
            lowest = min(lowest, row)
            highest = max(highest, row)
    if highest < 0:
        return False
    open_window(w, lowest, highest)
    for i in range(a.n_seqs):
        for snapshot in range(a.n_snapshots):
            mark_row(w, row_out(c, i, snapshot))
    for i in range(a.n_checkpoints):
        mark_row(w, a.checkpoints[3 * i + 2])
    return True


cdef inline bint is_written(const row_window *w, int64_t row) noexcept nogil:
    return w.first <= row < w.stop and (w.written[(row - w.first) >> 6] >> ((row - w.first) & 63)) & 1


cdef gdn_status check_written_once(const state_call *c) noexcept nogil:
    """Only snapshots that exist are written."""
    cdef row_window w
    w.stop = 0
    while next_window(c, &w):
        if w.twice >= 0:
            return fail(&c.error, GDN_ERR_TWICE, "rows_out%s: row %lld is written twice",
                        ", checkpoints" if c.args.n_checkpoints > 0 else "", w.twice)
    return GDN_OK


# ---- staging ---------------------------------------------------------------------------------------------------

cdef bint is_own(const state_call *c, int64_t i, int64_t row) noexcept nogil:
    """Whether sequence i itself writes the row."""
    cdef int64_t snapshot, i_checkpoint
    for snapshot in range(c.args.n_snapshots):
        if row_out(c, i, snapshot) == row:
            return True
    for i_checkpoint in range(c.args.n_checkpoints):
        if c.args.checkpoints[3 * i_checkpoint] == i and c.args.checkpoints[3 * i_checkpoint + 2] == row:
            return True
    return False


cdef int64_t stage_conflicts(const state_call *c, char *staged, gdn_state_rows *rows) noexcept nogil:
    """How many sequences start from a row that another one writes; copies those rows unless staged is NULL."""
    cdef const gdn_call *a = c.args
    cdef row_window w
    cdef int64_t i, row, n = 0
    cdef bint rows_given = a.rows_in != NULL or a.rows_out != NULL or a.n_checkpoints > 0
    if c.state.data == NULL or c.state.data != c.state_out.data or not rows_given:
        return 0
    w.stop = 0
    while next_window(c, &w):
        for i in range(a.n_seqs):
            row = row_in(c, i)
            if is_written(&w, row) and not is_own(c, i, row):      # own rows are unique: no row is written twice
                if staged != NULL:
                    stage(c, staged, rows.state_in[i])
                    rows.state_in[i] = staged
                    rows.state_in_nb[i] = c.staged_nb
                    staged += staged_size(c)
                n += 1
    return n


cdef inline int64_t staged_size(const state_call *c) noexcept nogil:
    """Bytes of a staged row, which keeps its type."""
    return round_up_64(c.state.ne[0] * c.state.ne[1] * c.state.ne[2] * type_size(c.state.type))


cdef size_t tables_size(const state_call *c) noexcept nogil:
    """Bytes of the address tables: of rows, and of checkpoints."""
    cdef const gdn_call *a = c.args
    return round_up_64(a.n_seqs * (2 + a.n_snapshots) * sizeof(void *) + (a.n_seqs + 2) * sizeof(int64_t)
                       + a.n_checkpoints * sizeof(gdn_checkpoint))


cdef inline size_t round_up_64(size_t n) noexcept nogil:
    return (n + 63) & ~<size_t>63


cdef size_t rows_size(const state_call *c) noexcept nogil:
    """Bytes resolve_rows needs."""
    return tables_size(c) + stage_conflicts(c, NULL, NULL) * staged_size(c)


cdef void resolve_rows(state_call *c, char *scratch, gdn_state_rows *rows) noexcept nogil:
    """The address tables of a checked call, in scratch; rows in conflict are copied there too."""
    cdef const gdn_call *a = c.args
    cdef int64_t i, snapshot, row, size = type_size(c.state.type)
    cdef char *target
    rows.state_in = <const char **>scratch
    rows.state_in_nb = <const int64_t **>(scratch + a.n_seqs * sizeof(void *))
    rows.state_out = <char **>(scratch + 2 * a.n_seqs * sizeof(void *))
    c.staged_nb[:] = [size, size * c.state.ne[0], size * c.state.ne[0] * c.state.ne[1]]
    for i in range(a.n_seqs):
        row = row_in(c, i)
        rows.state_in[i] = NULL if row < 0 else <char *>c.state.data + row * c.state.nb[3]
        rows.state_in_nb[i] = c.state.nb
        for snapshot in range(a.n_snapshots):
            row = row_out(c, i, snapshot)
            target = <char *>c.state_out.data
            if a.rows_out == NULL and a.snapshot_nb != 0:
                target += i * c.state_out.nb[3] + snapshot * a.snapshot_nb
            else:
                target += row * c.state_out.nb[3]
            rows.state_out[i * a.n_snapshots + snapshot] = NULL if row < 0 else target
    resolve_checkpoints(c, scratch + a.n_seqs * (2 + a.n_snapshots) * sizeof(void *), rows)
    stage_conflicts(c, scratch + tables_size(c), rows)


cdef void resolve_checkpoints(const state_call *c, char *scratch, gdn_state_rows *rows) noexcept nogil:
    """Checkpoints sorted by sequence, and where each sequence's begin."""
    cdef const gdn_call *a = c.args
    cdef int64_t *first = <int64_t *>scratch
    cdef gdn_checkpoint *sorted_ = <gdn_checkpoint *>(first + a.n_seqs + 2)
    cdef gdn_checkpoint *target
    cdef int64_t i
    memset(first, 0, (a.n_seqs + 2) * sizeof(int64_t))
    for i in range(a.n_checkpoints):                     # first[i + 2]: how many sequence i has, then where i + 1 begins
        first[a.checkpoints[3 * i] + 2] += 1
    for i in range(a.n_seqs):
        first[i + 2] += first[i + 1]
    for i in range(a.n_checkpoints):                     # first[i + 1] goes from where sequence i begins to its end
        target = sorted_ + first[a.checkpoints[3 * i] + 1]
        first[a.checkpoints[3 * i] + 1] += 1
        target.n = a.checkpoints[3 * i + 1]
        target.row = <char *>c.state_out.data + a.checkpoints[3 * i + 2] * c.state_out.nb[3]
    rows.checkpoint_first, rows.checkpoints = first, sorted_


cdef void stage(const state_call *c, char *target, const char *row) noexcept nogil:
    cdef int64_t i0, i1, i2, size = type_size(c.state.type)
    for i2 in range(c.state.ne[2]):
        for i1 in range(c.state.ne[1]):
            for i0 in range(c.state.ne[0]):
                memcpy(target, row + i0 * c.state.nb[0] + i1 * c.state.nb[1] + i2 * c.state.nb[2], size)
                target += size
