# A work item of a call with a token log, a tree or checkpoints.  The columns of the chunk form are the log's entries,
# whose X is known, and then the call's tokens; a column's path is what it sees: from the oldest entry over its ancestors
# to itself.  With e_i the decay along the whole path of i and Gamma_ij that from j (exclusive) on,
#
#     X_i = beta_i (v_i - e_i S0^T k_i - sum_j (k_i k_j Gamma_ij) X_j)          j on i's path before i
#     o_i = scale (e_i S0^T q_i + sum_j (q_i k_j Gamma_ij) X_j)                 j on i's path
#
# Few tokens, and every tree, take S0 where it lies (few_rows.pxi) and write none of it but what is asked for.  Long inputs
# take the entries into packed states as an update of them, and then run chunked, which ends where a state is asked for.
#
# Needs: simd.pxi, pack.pxi (pack_row, round_up), pairs.pxi (pairs_of_path), few_rows.pxi (KEYS, PANELS, VALUES, fold, walk_keys,
# walk_values), item.pxi, stretches.pxi (is_direct, run_chunked), storage.pxi (load_type, move_state, pack_typed, rounding_at,
# state_view, store_panels, unpack_typed).

cdef enum:
    SOLVE_X_NV = 4               # vectors of columns that go through the sums of a token together


cdef struct state_target:        # the state after n tokens, of the log's if n <= 0, goes to a row; NULL is nowhere
    int64_t n
    char *row


cdef void log_item(delta_work_item *item) noexcept nogil:
    cdef int64_t p
    for p in range(item.n_entries):
        item.buf.log.up[p] = p - 1
    if few_rows_take(item.job, item.n_tokens):
        run_few_rows(item)
    else:
        run_long(item)


cdef state_target target_of(const delta_work_item *item, int64_t i) noexcept nogil:
    """The i-th state asked for: snapshots, then checkpoints; row NULL if it is not."""
    cdef const gdn_state_rows *rows = &item.job.rows
    cdef int64_t n_snapshots = item.job.n_snapshots
    cdef const gdn_checkpoint *c
    cdef state_target target
    if i < n_snapshots:
        target.n = item.n_tokens - i
        target.row = rows.state_out[item.seq * n_snapshots + i] if i == 0 or i < item.n_tokens else NULL
    else:
        c = rows.checkpoints + rows.checkpoint_first[item.seq] + (i - n_snapshots)
        target.n = c.n
        target.row = c.row
    return target


cdef inline int64_t n_targets(const delta_work_item *item) noexcept nogil:
    cdef const int64_t *first = item.job.rows.checkpoint_first + item.seq
    return item.job.n_snapshots + first[1] - first[0]


cdef inline bint starts_there(const delta_work_item *item, const char *row) noexcept nogil:
    return row == item.job.rows.state_in[item.seq]


# ---- columns from and to the log -------------------------------------------------------------------------------

cdef inline void fetch_entries(const delta_work_item *item, int64_t m) noexcept nogil:
    """k and d of the entries for head m, towards the cache; k with the first head.  Inline: a function that does nothing but
    fetch is none to the compiler, which leaves its calls out."""
    cdef const gdn_tensor *k = &item.job.args.log_k
    cdef const gdn_tensor *d = &item.job.args.log_d
    cdef int64_t head = value_head(item, m), p
    for p in range(item.n_entries):
        if m == 0:
            v_prefetch(<const float *>entry_of(item, k, item.key_head, item.log_in[p]), item.job.S_k)
        v_prefetch(<const float *>(entry_of(item, d, head, item.log_in[p]) + item.column * d.nb[0]), item.n_columns)


cdef inline bint lies_whole(const gdn_tensor *x, int64_t n) noexcept nogil:
    """Whether n numbers of its rows are whole vectors where they lie."""
    return is_direct(x) and n % VL == 0


cdef void place_entries(const delta_work_item *item, int64_t m, bint packed) noexcept nogil:
    """Where k and d of the entries lie for head m, k with the first head: there, or packed."""
    cdef const log_buffers *log = &item.buf.log
    cdef const gdn_tensor *k = &item.job.args.log_k
    cdef const gdn_tensor *d = &item.job.args.log_d
    cdef bint k_there = not packed and lies_whole(k, item.job.S_k), d_there = not packed and lies_whole(d, item.n_columns)
    cdef int64_t head = value_head(item, m), p
    if not (k_there and d_there):
        load_entries(item, m)
    for p in range(item.n_entries):
        log.k_at[p] = <const float *>entry_of(item, k, item.key_head, item.log_in[p]) if k_there else log.k + p * item.buf.ld
        log.X_at[p] = log.X + p * item.buf.columns_ld
        if d_there:
            log.X_at[p] = <const float *>(entry_of(item, d, head, item.log_in[p]) + item.column * d.nb[0])


cdef void load_entries(const delta_work_item *item, int64_t m) noexcept nogil:
    """k and d of the entries for head m; k with the first head."""
    cdef const log_buffers *log = &item.buf.log
    cdef const gdn_tensor *k = &item.job.args.log_k
    cdef const gdn_tensor *d = &item.job.args.log_d
    cdef int64_t head = value_head(item, m), p
    for p in range(item.n_entries):
        if m == 0:
            pack_row(log.k + p * item.buf.ld, entry_of(item, k, item.key_head, item.log_in[p]), k.nb[0], item.job.S_k,
                     item.buf.ld)
        pack_row(log.X + p * item.buf.columns_ld, entry_of(item, d, head, item.log_in[p]) + item.column * d.nb[0], d.nb[0],
                 item.n_columns, item.buf.columns_ld)


cdef void load_decays(const delta_work_item *item, int64_t m) noexcept nogil:
    """g of the entries for head m."""
    cdef const gdn_tensor *g = &item.job.args.log_g
    cdef int64_t p
    for p in range(item.n_entries):
        load_decay(item, p, entry_of(item, g, value_head(item, m), item.log_in[p]), g)


cdef inline void load_decay(const delta_work_item *item, int64_t p, const char *src, const gdn_tensor *g) noexcept nogil:
    """g of column p: one, or one a channel."""
    cdef const log_buffers *log = &item.buf.log
    if item.job.per_channel:
        pack_typed(log.g + p * item.buf.ld, src, g.nb[0], g.type, item.job.S_k, item.buf.ld)
    else:
        log.g[p] = load_type(src, g.type)


cdef void keep_decays(const delta_work_item *item, int64_t m) noexcept nogil:
    """g of all tokens for head m."""
    cdef const gdn_tensor *to = &item.job.args.log_g
    cdef const gdn_tensor *g = &item.job.args.g
    cdef int64_t head = value_head(item, m), t, c
    cdef char *entry
    if item.log_out == NULL or item.column != 0:
        return
    for t in range(item.n_tokens):
        if item.log_out[t] >= 0:
            entry = entry_of(item, to, head, item.log_out[t])
            for c in range(to.ne[0]):
                (<float *>(entry + c * to.nb[0]))[0] = load_type(row_of(item, g, head, t) + c * g.nb[0], g.type)


# ---- states after some columns ---------------------------------------------------------------------------------

cdef void prepare_fold(const delta_work_item *item, fold *f, int64_t n) noexcept nogil:
    """The update by columns [0, n), each the next one's parent: keys times the decay behind them, and the whole decay."""
    cdef const log_buffers *log = &item.buf.log
    cdef int64_t ld = item.buf.ld, p, c
    cdef double total = 0
    cdef vf behind, sum, whole = v_set(0), part = v_set(0)
    f.n = n
    f.keys, f.keys_ld = log.keys, ld
    f.values, f.values_ld = log.X, item.buf.columns_ld
    f.whole, f.part = item.buf.whole, item.buf.part
    if not item.job.per_channel:
        for p in range(n - 1, -1, -1):
            log.A[p] = <float>total
            total += log.g[p]
        exp_rows(log.A, n)
        v_exp_whole_part(v_set(<float>total), &whole, &part)
    for c from 0 <= c < ld by VL:
        behind = v_set(1)
        sum = v_set(0)
        for p in range(n - 1, -1, -1):
            if item.job.per_channel:
                v_store(log.keys + p * ld + c, v_load(log.k + p * ld + c) * behind)
                sum += v_load(log.g + p * ld + c)
                behind = behind * v_exp(v_load(log.g + p * ld + c))
            else:
                v_store(log.keys + p * ld + c, v_load(log.k + p * ld + c) * log.A[p])
        if item.job.per_channel:
            v_exp_whole_part(sum, &whole, &part)
        v_store(item.buf.whole + c, whole)
        v_store(item.buf.part + c, part)


cdef inline void exp_rows(float *x, int64_t n) noexcept nogil:
    """x = exp(x) for n floats, up to whole vectors."""
    cdef int64_t i
    for i from 0 <= i < n by VL:
        v_store(x + i, v_exp(v_load(x + i)))


cdef void walk_state(const delta_work_item *item, int64_t m, int order, int64_t n_rows, const fold *f, char *row,
                     int64_t n_tokens) noexcept nogil:
    """Products of head m's first state with n_rows of log.rows, to log.y, and the folded state, which is that after n_tokens,
    to a row unless f is NULL."""
    cdef const log_buffers *log = &item.buf.log
    cdef int64_t S_k = item.job.S_k, ld = item.buf.ld, columns_ld = item.buf.columns_ld, j, panel = item.buf.state_rows * NV * VL
    cdef state_view x = view_in(item, m), y = view_in_row(item, row, m) if f != NULL else x
    cdef const float *states = item.buf.states + m * item.buf.state_size
    cdef gdn_rounding r
    cdef fold panel_fold
    if order == KEYS:
        walk_keys(type_in_place(item), log.y, columns_ld, log.rows, n_rows, ld, x.p, x.nb[1], S_k, item.n_columns, f, y.p,
                  y.nb[1])
    elif order == VALUES:
        walk_values(type_in_place(item), log.y, columns_ld, log.rows, n_rows, ld, x.p, x.nb[0], S_k, item.n_columns, f, y.p,
                    y.nb[0])
    else:
        if f != NULL:
            panel_fold = f[0]
        for j from 0 <= j < item.n_columns by NV * VL:
            walk_values(GDN_TYPE_F32, log.y + j, columns_ld, log.rows, n_rows, ld,
                        NULL if x.p == NULL else <const char *>(states + j // (NV * VL) * panel), 4 * NV * VL, S_k, NV * VL,
                        NULL if f == NULL else &panel_fold, <char *>(log.state + j // (NV * VL) * panel), 4 * NV * VL)
            if f != NULL:
                panel_fold.values += NV * VL
        if f != NULL:
            r = rounding_at(&item.job.args.call, item.seq, n_tokens)
            store_panels(&y, &r, log.state, item.buf.state_rows, S_k, item.n_columns)


cdef void write_state(const delta_work_item *item, int64_t m, int order, state_target target) noexcept nogil:
    """Head m's state after all entries and target.n tokens."""
    cdef state_view x = view_in(item, m), y = view_in_row(item, target.row, m)
    cdef gdn_rounding r = rounding_at(&item.job.args.call, item.seq, target.n)
    cdef fold f
    if item.n_entries + target.n == 0:
        move_state(&y, &x, &r, item.job.S_k, item.n_columns)                       # bit for bit
    else:
        prepare_fold(item, &f, item.n_entries + target.n)
        walk_state(item, m, order, 0, &f, target.row, target.n)


cdef void write_states(const delta_work_item *item, int64_t m, int order, int64_t n, int64_t skip) noexcept nogil:
    """Every target of at most n tokens but number `skip`; the row that all of them are made of comes last."""
    cdef int64_t i, own
    cdef state_target target
    for own in range(2):
        for i in range(n_targets(item)):
            target = target_of(item, i)
            if target.row != NULL and target.n <= n and i != skip and starts_there(item, target.row) == own:
                write_state(item, m, order, target)


# ---- few tokens on a state in place ----------------------------------------------------------------------------

cdef void run_few_rows(delta_work_item *item) noexcept nogil:
    cdef const gdn_delta_net_args *args = item.job.args
    cdef const log_buffers *log = &item.buf.log
    cdef const int64_t *parents = args.call.parents
    cdef int64_t L = item.n_entries, T = item.n_tokens, ld = item.buf.ld, t, m, parent
    if parents != NULL:
        parents += item.batch * args.q.ne[2] + item.start
    for t in range(T):
        parent = t - 1 if parents == NULL else parents[t]
        log.up[L + t] = L - 1 if parent < 0 else L + parent
        log.k_at[L + t] = log.k + (L + t) * ld
        log.X_at[L + t] = log.X + (L + t) * item.buf.columns_ld
        log.sums[t].n = find_path(log, log.path + t * log.n_ld, L + t) - 1
        load_key(item, log.q + t * ld, row_of(item, &args.q, item.key_head, t), &args.q)
        load_key(item, log.k + (L + t) * ld, row_of(item, &args.k, item.key_head, t), &args.k)
        if not item.job.per_channel:
            memcpy(log.rows + 2 * t * ld, log.k + (L + t) * ld, ld * sizeof(float))
            memcpy(log.rows + (2 * t + 1) * ld, log.q + t * ld, ld * sizeof(float))
    keep_keys(item, log.k + L * ld, 0, T)
    for m in range(item.n_heads):
        few_rows_head(item, m, state_order(item))


cdef inline int64_t find_path(const log_buffers *log, int64_t *path, int64_t column) noexcept nogil:
    """The columns that a column sees, oldest first, itself the last; their number."""
    cdef int64_t n = 0, i, j = column
    while j >= 0:
        n += 1
        j = log.up[j]
    j = column
    for i in range(n - 1, -1, -1):
        path[i] = j
        j = log.up[j]
    return n


cdef void few_rows_head(delta_work_item *item, int64_t m, int order) noexcept nogil:
    cdef const gdn_delta_net_args *args = item.job.args
    cdef int64_t L = item.n_entries, T = item.n_tokens, head = value_head(item, m), t, i, first = -1
    cdef bint writes = False
    cdef state_target target
    cdef fold f
    cdef fold *first_fold = NULL
    fetch_entries(item, m)
    load_decays(item, m)
    for t in range(T):
        load_decay(item, L + t, row_of(item, &args.g, head, t), &args.g)
    if item.job.per_channel:
        decay_rows(item)
    if order == PANELS:
        load_head(item, m)
    for i in range(n_targets(item)):            # one fold of the log's entries goes with the products
        target = target_of(item, i)
        writes = writes or target.row != NULL
        if target.row != NULL and -L < target.n <= 0 and not starts_there(item, target.row):
            first = i
            break
    place_entries(item, m, writes)
    if first >= 0:
        prepare_fold(item, &f, L + target.n)
        first_fold = &f
    walk_state(item, m, order, 2 * T, first_fold, target.row, target.n)
    prepare_sums(item, m)                       # of entries which have come while the state was read
    solve_tokens(item, m)
    keep_decays(item, m)
    write_states(item, m, order, T, first)


cdef void prepare_sums(delta_work_item *item, int64_t m) noexcept nogil:
    """Every token's products with the keys of its path, shared by heads unless decays are per channel, then what head m makes
    of them."""
    cdef const log_buffers *log = &item.buf.log
    cdef const float *a = log.a if item.job.per_channel else NULL
    cdef int64_t t, head = value_head(item, m)
    cdef float scale_k = 1, scale_q = 1
    if item.job.rows.state_in[item.seq] == NULL:
        memset(log.y, 0, 2 * item.n_tokens * item.buf.columns_ld * sizeof(float))
    for t in range(item.n_tokens):
        if item.job.per_channel:
            scale_k, scale_q = beta_of(item, head, t), item.job.scale
        if item.job.per_channel or m == 0:
            pairs_of_path(log.KK + t * log.n_ld, log.QK + t * log.n_ld, log.kk, log.qk, log.q + t * item.buf.ld, log.k_at, a,
                          log.path + t * log.n_ld, log.sums[t].n + 1, scale_k, scale_q, round_up(item.job.S_k, VL),
                          item.buf.ld)
        prepare_sums_of(item, log.sums + t, head, t)


cdef void decay_rows(const delta_work_item *item) noexcept nogil:
    """Per channel: e * K and e * Q as rows.  e is exp of the path's sum: a total needs no subtraction."""
    cdef const log_buffers *log = &item.buf.log
    cdef int64_t L = item.n_entries, T = item.n_tokens, ld = item.buf.ld, t, c, p, before
    cdef vf sum, e
    for c from 0 <= c < ld by VL:
        sum = v_set(0)
        for p in range(L):
            sum += v_load(log.g + p * ld + c)
            v_store(log.a + p * ld + c, v_exp(v_load(log.g + p * ld + c)))
        v_store(log.sum + c, sum)
        for t in range(T):
            before = max(log.up[L + t] - L + 1, <int64_t>0)
            sum = v_load(log.sum + before * ld + c) + v_load(log.g + (L + t) * ld + c)
            v_store(log.sum + (t + 1) * ld + c, sum)
            v_store(log.a + (L + t) * ld + c, v_exp(v_load(log.g + (L + t) * ld + c)))
            e = v_exp(sum)
            v_store(log.rows + 2 * t * ld + c, e * v_load(log.k + (L + t) * ld + c))
            v_store(log.rows + (2 * t + 1) * ld + c, e * v_load(log.q + t * ld + c))


cdef inline float beta_of(const delta_work_item *item, int64_t head, int64_t t) noexcept nogil:
    cdef float beta = load_type(row_of(item, &item.job.args.beta, head, t), item.job.args.beta.type)
    if item.job.args.flags & GDN_BETA_LOGIT:
        v_store_head(&beta, v_sigmoid(v_set(beta)), 1)
    return beta


cdef void prepare_sums_of(const delta_work_item *item, path_sums *s, int64_t head, int64_t t) noexcept nogil:
    """Token t's row of the chunk form; s.n is there."""
    cdef const gdn_tensor *v = &item.job.args.v
    cdef const gdn_tensor *out = &item.job.args.out
    cdef const log_buffers *log = &item.buf.log
    cdef int64_t at = t * log.n_ld, p
    cdef float *A = log.A + at
    cdef float scale = item.job.scale
    cdef double total = 0
    s.path = log.path + at
    s.y_k = log.y + 2 * t * item.buf.columns_ld
    s.y_q = s.y_k + item.buf.columns_ld
    s.v = <const float *>columns_of(item, v, head, t) if lies_whole(v, item.n_columns) else log.v
    s.out = <float *>columns_of(item, out, head, t) if lies_whole(out, item.n_columns) else log.out
    s.X = log.X + (item.n_entries + t) * item.buf.columns_ld
    s.beta = beta_of(item, head, t)
    s.A, s.P, s.e = log.KK + at, log.QK + at, 1
    if not item.job.per_channel:
        for p in range(s.n, -1, -1):             # sums along the path: no subtraction, so nothing cancels
            A[p] = <float>total
            total += log.g[s.path[p]]
        exp_rows(A, s.n + 1)
        v_store_head(&s.e, v_exp(v_set(<float>total)), 1)
        for p from 0 <= p <= s.n by VL:
            v_store(log.P + at + p, v_load(s.P + p) * v_load(A + p) * scale)
            v_store(A + p, v_load(s.A + p) * v_load(A + p) * s.beta)
        s.A, s.P = A, log.P + at
    s.scale_e = scale * s.e


cdef void solve_tokens(const delta_work_item *item, int64_t m) noexcept nogil:
    """X and out of every token, from its products with the state and its path."""
    cdef const gdn_tensor *v = &item.job.args.v
    cdef const gdn_tensor *out = &item.job.args.out
    cdef const log_buffers *log = &item.buf.log
    cdef const path_sums *s
    cdef int64_t head = value_head(item, m), n = item.n_columns, t, j
    for t in range(item.n_tokens):
        s = log.sums + t
        if s.v == log.v:
            pack_typed(log.v, columns_of(item, v, head, t), v.nb[0], v.type, n, item.buf.columns_ld)
        j = 0
        while j + SOLVE_X_NV * VL <= n:
            solve_token(s, log.X_at, j, SOLVE_X_NV)
            j += SOLVE_X_NV * VL
        while j < n:
            solve_token(s, log.X_at, j, 1)
            j += VL
        if s.out == log.out:
            unpack_typed(columns_of(item, out, head, t), out.nb[0], out.type, log.out, n)
        keep_delta(item, s.X, head, t, 0, n)


cdef inline void solve_token(const path_sums *s, const float **X_at, int64_t c, const int nv) noexcept nogil:
    """Columns [c, c + nv * VL) of one token's X and out."""
    cdef vf x[SOLVE_X_NV]
    cdef vf o[SOLVE_X_NV]
    cdef vf x_j
    cdef const float *row
    cdef float A, P
    cdef int64_t p
    cdef int j
    for j in range(nv):
        x[j] = s.beta * (v_load(s.v + c + j * VL) - s.e * v_load(s.y_k + c + j * VL))
        o[j] = v_load(s.y_q + c + j * VL) * s.scale_e
    for p in range(s.n):
        row = X_at[s.path[p]] + c
        A = s.A[p]
        P = s.P[p]
        for j in range(nv):
            x_j = v_load(row + j * VL)
            x[j] -= A * x_j
            o[j] += P * x_j
    P = s.P[s.n]
    for j in range(nv):
        v_store(s.X + c + j * VL, x[j])
        v_store(s.out + c + j * VL, o[j] + P * x[j])


# ---- long inputs on packed states ------------------------------------------------------------------------------

cdef void run_long(delta_work_item *item) noexcept nogil:
    """The entries into the packed states, then the tokens, to every place where a state is asked for."""
    cdef int64_t t = 0, stop, i, m, chunk = CHUNK_MAX if item.job.chunked_from < INT64_MAX else 1
    cdef state_target target
    for m in range(item.n_heads):
        load_head(item, m)
        load_entries(item, m)
        load_decays(item, m)
        write_states(item, m, PANELS, 0, -1)
        if item.n_entries > 0:
            absorb(item, m)
        keep_decays(item, m)
    while t < item.n_tokens:
        stop = item.n_tokens
        for i in range(n_targets(item)):
            target = target_of(item, i)
            if target.row != NULL and t < target.n < stop:
                stop = target.n
        run_chunked(item, t, stop, chunk)
        t = stop
        for i in range(n_targets(item)):
            target = target_of(item, i)
            if target.row != NULL and target.n == t:
                for m in range(item.n_heads):
                    store_head(item, m, target.row, t)


cdef void absorb(const delta_work_item *item, int64_t m) noexcept nogil:
    """All entries into head m's packed state."""
    cdef fold f
    cdef int64_t j
    cdef char *panel = <char *>(item.buf.states + m * item.buf.state_size)
    prepare_fold(item, &f, item.n_entries)
    for j from 0 <= j < item.n_columns by NV * VL:
        walk_values(GDN_TYPE_F32, NULL, 0, NULL, 0, 0, panel, 4 * NV * VL, item.job.S_k, NV * VL, &f, panel, 4 * NV * VL)
        f.values += NV * VL
        panel += 4 * item.buf.state_rows * NV * VL
