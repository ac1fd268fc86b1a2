# Rows of a state cache and packed sequences: what the delta rule and the convolution share.
#
# A call works as if every row of rows_in were read before any row is written.  Within a sequence the kernels read
# before they write; a row that another sequence writes is copied to scratch first ("staged").

cdef struct cache_rows:
    int64_t n_seqs, n_snapshots, snapshot_nb
    gdn_tensor state, state_out      # rows along ne[3]
    const int64_t *rows_in
    const int64_t *rows_out
    const int64_t *cu_seqlens
    int64_t n_tokens, n_batch
    int64_t staged_nb[3]             # strides of a staged row


cdef inline int64_t sequence_length(const cache_rows *r, int64_t i) noexcept nogil:
    return r.n_tokens if r.cu_seqlens == NULL else r.cu_seqlens[i + 1] - r.cu_seqlens[i]


cdef inline int64_t row_in(const cache_rows *r, int64_t i) noexcept nogil:
    """Row sequence i starts from; -1 is zeros."""
    if r.state.data == NULL:
        return -1
    return i if r.rows_in == NULL else r.rows_in[i]


cdef inline int64_t row_out(const cache_rows *r, int64_t i, int64_t slot) noexcept nogil:
    """Row of slot s of sequence i; -1 where there is none or the slot does not exist."""
    if r.state_out.data == NULL or (slot > 0 and slot >= sequence_length(r, i)):
        return -1
    return slot * r.n_seqs + i if r.rows_out == NULL else r.rows_out[i * r.n_snapshots + slot]


cdef gdn_status rows_check(const cache_rows *r, const refusal *why) noexcept nogil:
    """Packed lengths, rows in range, no row written twice."""
    cdef gdn_status status = check_lengths(r, why)
    cdef int64_t n_in = r.state.ne[3], n_out = r.state_out.ne[3]
    cdef int64_t i
    if status != GDN_OK:
        return status
    if r.n_snapshots > (<int64_t>1 << 40) // max(r.n_seqs, <int64_t>1):                    # their product is a size
        return fail(why, GDN_ERR_VALUE, "%lld sequences cannot keep %lld slots each", r.n_seqs, r.n_snapshots)
    if r.state.data != NULL and r.rows_in == NULL and n_in < r.n_seqs:
        return fail(why, GDN_ERR_SHAPE, "state has %lld rows, the call has %lld sequences", n_in, r.n_seqs)
    if r.rows_in != NULL and r.state.data != NULL:
        for i in range(r.n_seqs):
            if not -1 <= r.rows_in[i] < n_in:
                return fail(why, GDN_ERR_ROW, "rows_in[%lld] is %lld, the cache has %lld rows", i,
                            r.rows_in[i], n_in)
    if r.state_out.data == NULL:
        return GDN_OK
    if r.rows_out == NULL:
        if r.n_snapshots > 1 and r.snapshot_nb != 0 and r.rows_in != NULL and r.state.data == r.state_out.data:
            return fail(why, GDN_ERR_VALUE, "snapshot_nb names no rows: a cache with rows_in needs rows_out")
        if r.n_snapshots > 1 and r.snapshot_nb & 3:
            return fail(why, GDN_ERR_STRIDE, "snapshot_nb is %lld, no multiple of 4", r.snapshot_nb)
        if snapshots_meet(r):
            return fail(why, GDN_ERR_ROW, "snapshot_nb is %lld: with rows %lld bytes apart one is written twice", r.snapshot_nb,
                        r.state_out.nb[3])
        if n_out < r.n_seqs * (r.n_snapshots if r.snapshot_nb == 0 else 1):
            return fail(why, GDN_ERR_SHAPE, "state_out has %lld rows, %lld sequences keep %lld slots", n_out,
                        r.n_seqs, r.n_snapshots)
        return GDN_OK
    for i in range(r.n_seqs * r.n_snapshots):
        if not -1 <= r.rows_out[i] < n_out:
            return fail(why, GDN_ERR_ROW, "rows_out[%lld, %lld] is %lld, the cache has %lld rows",
                        i // r.n_snapshots, i % r.n_snapshots, r.rows_out[i], n_out)
    return check_written_once(r, why)


cdef bint snapshots_meet(const cache_rows *r) noexcept nogil:
    """Whether slots snapshot_nb apart of sequences nb[3] apart share a row: i nb[3] = s snapshot_nb for some i, s in range."""
    cdef int64_t a = abs_64(r.state_out.nb[3]), b = abs_64(r.snapshot_nb), rest
    if r.snapshot_nb == 0 or a == 0:
        return False
    while b != 0:                    # a becomes the greatest common divisor
        rest = a % b
        a, b = b, rest
    return abs_64(r.snapshot_nb) // a < r.n_seqs and abs_64(r.state_out.nb[3]) // a < r.n_snapshots


cdef inline int64_t abs_64(int64_t x) noexcept nogil:
    return -x if x < 0 else x


cdef gdn_status check_lengths(const cache_rows *r, const refusal *why) noexcept nogil:
    cdef int64_t i
    if r.n_seqs < 0:
        return fail(why, GDN_ERR_SHAPE, "n_seqs is %lld", r.n_seqs)
    if r.cu_seqlens == NULL:
        if r.n_batch != r.n_seqs:
            return fail(why, GDN_ERR_SHAPE, "n_seqs is %lld, the arrays hold %lld", r.n_seqs, r.n_batch)
        return GDN_OK
    if r.n_batch != 1:
        return fail(why, GDN_ERR_SHAPE, "with cu_seqlens the arrays have n_seqs = 1, got %lld", r.n_batch)
    if r.cu_seqlens[0] != 0:
        return fail(why, GDN_ERR_VALUE, "cu_seqlens must start at 0, got %lld", r.cu_seqlens[0])
    for i in range(r.n_seqs):
        if r.cu_seqlens[i + 1] < r.cu_seqlens[i]:
            return fail(why, GDN_ERR_VALUE, "cu_seqlens must not decrease, got %lld after %lld",
                        r.cu_seqlens[i + 1], r.cu_seqlens[i])
    if r.cu_seqlens[r.n_seqs] != r.n_tokens:
        return fail(why, GDN_ERR_VALUE, "cu_seqlens ends at %lld, the arrays hold %lld tokens",
                    r.cu_seqlens[r.n_seqs], r.n_tokens)
    return GDN_OK


# ---- which rows are written --------------------------------------------------------------------------------------
#
# A set of rows without memory of the call's size: WINDOW rows at a time as bits on the stack.  Windows without a
# written row are skipped, so that a call costs a few passes over its sequences and slots unless they lie far apart.

cdef enum:
    WINDOW = 32768               # 64 * WORDS
    WORDS = 512


cdef struct row_window:
    int64_t first, stop          # rows of this window; a first call starts at stop = 0
    int64_t twice                # a row of it that is written twice, or -1
    uint64_t written[WORDS]


cdef bint next_window(const cache_rows *r, row_window *w) noexcept nogil:
    """The window from the lowest written row at or after w.stop on; False if there is none."""
    cdef int64_t i, slot, row, lowest = INT64_MAX, highest = -1
    cdef uint64_t bit
    for i in range(r.n_seqs):
        for slot in range(r.n_snapshots):
            row = row_out(r, i, slot)
            if row >= w.stop:
                lowest = min(lowest, row)
                highest = max(highest, row)
    if highest < 0:
        return False
    w.first = lowest
    w.stop = lowest + min(<int64_t>WINDOW, highest - lowest + 1)
    w.twice = -1
    memset(w.written, 0, ((w.stop - w.first + 63) >> 6) * sizeof(uint64_t))
    for i in range(r.n_seqs):
        for slot in range(r.n_snapshots):
            row = row_out(r, i, slot)
            if w.first <= row < w.stop:
                bit = <uint64_t>1 << ((row - w.first) & 63)
                if w.written[(row - w.first) >> 6] & bit:
                    w.twice = row
                w.written[(row - w.first) >> 6] |= bit
    return True


cdef inline bint is_written(const row_window *w, int64_t row) noexcept nogil:
    return w.first <= row < w.stop and (w.written[(row - w.first) >> 6] >> ((row - w.first) & 63)) & 1


cdef gdn_status check_written_once(const cache_rows *r, const refusal *why) noexcept nogil:
    """Only slots that exist are written."""
    cdef row_window w
    w.stop = 0
    while next_window(r, &w):
        if w.twice >= 0:
            return fail(why, GDN_ERR_ROW, "rows_out: row %lld is written twice", w.twice)
    return GDN_OK


# ---- staging ---------------------------------------------------------------------------------------------------

cdef bint is_own(const cache_rows *r, int64_t i, int64_t row) noexcept nogil:
    """Whether sequence i itself writes the row."""
    cdef int64_t slot
    for slot in range(r.n_snapshots):
        if row_out(r, i, slot) == row:
            return True
    return False


cdef int64_t stage_conflicts(const cache_rows *r, float *staged, gdn_state_rows *rows) noexcept nogil:
    """How many sequences start from a row that another one writes; copies those rows unless staged is NULL."""
    cdef row_window w
    cdef int64_t i, row, n = 0
    if r.state.data == NULL or r.state.data != r.state_out.data or (r.rows_in == NULL and r.rows_out == NULL):
        return 0
    w.stop = 0
    while next_window(r, &w):
        for i in range(r.n_seqs):
            row = row_in(r, i)
            if is_written(&w, row) and not is_own(r, i, row):      # own rows are unique: no row is written twice
                if staged != NULL:
                    stage(r, staged, rows.state_in[i])
                    rows.state_in[i] = <const char *>staged
                    rows.state_in_nb[i] = r.staged_nb
                    staged += row_elements(r)
                n += 1
    return n


cdef inline int64_t row_elements(const cache_rows *r) noexcept nogil:
    return r.state.ne[0] * r.state.ne[1] * r.state.ne[2]


cdef size_t tables_size(const cache_rows *r) noexcept nogil:
    return round_up_64(r.n_seqs * (2 + r.n_snapshots) * sizeof(void *))


cdef inline size_t round_up_64(size_t n) noexcept nogil:
    return (n + 63) & ~<size_t>63


cdef size_t rows_scratch_size(const cache_rows *r) noexcept nogil:
    """Bytes rows_resolve needs."""
    return tables_size(r) + round_up_64(stage_conflicts(r, NULL, NULL) * row_elements(r) * sizeof(float))


cdef void rows_resolve(cache_rows *r, char *scratch, gdn_state_rows *rows) noexcept nogil:
    """The address tables of a checked call, in scratch; rows in conflict are copied there too."""
    cdef int64_t i, slot, row
    cdef char *target
    rows.state_in = <const char **>scratch
    rows.state_in_nb = <const int64_t **>(scratch + r.n_seqs * sizeof(void *))
    rows.state_out = <char **>(scratch + 2 * r.n_seqs * sizeof(void *))
    r.staged_nb[:] = [4, 4 * r.state.ne[0], 4 * r.state.ne[0] * r.state.ne[1]]
    for i in range(r.n_seqs):
        row = row_in(r, i)
        rows.state_in[i] = NULL if row < 0 else <char *>r.state.data + row * r.state.nb[3]
        rows.state_in_nb[i] = r.state.nb
        for slot in range(r.n_snapshots):
            row = row_out(r, i, slot)
            target = <char *>r.state_out.data
            if r.rows_out == NULL and r.snapshot_nb != 0:
                target += i * r.state_out.nb[3] + slot * r.snapshot_nb
            else:
                target += row * r.state_out.nb[3]
            rows.state_out[i * r.n_snapshots + slot] = NULL if row < 0 else target
    stage_conflicts(r, <float *>(scratch + tables_size(r)), rows)


cdef void stage(const cache_rows *r, float *target, const char *row) noexcept nogil:
    cdef int64_t i0, i1, i2
    for i2 in range(r.state.ne[2]):
        for i1 in range(r.state.ne[1]):
            for i0 in range(r.state.ne[0]):
                target[0] = (<const float *>(row + i0 * r.state.nb[0] + i1 * r.state.nb[1] + i2 * r.state.nb[2]))[0]
                target += 1
