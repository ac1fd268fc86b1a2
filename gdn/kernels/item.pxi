# A work item and its worker's scratch: where the item's tensors lie, and what passes between them and scratch.
#
# Needs: simd.pxi, pack.pxi, decay.pxi (gated_rows), recurrent.pxi (token), few_rows.pxi (KEYS, PANELS, VALUES), level.pxd
# (gdn_delta_job), storage.pxi (load_panels, load_type, move_state, pack_typed, rounding_at, state_view, store_panels,
# type_size).

cdef enum:
    TOKENS = 4                   # tokens prepared together in token-by-token stretches
    GAP = 64                     # floats
    FEW_TOKENS = 16              # tokens that a call with lists takes to a state in place; more run chunked

cdef struct path_sums:           # one token's row of the chunk form, for one head; itself is the last that it sees
    const int64_t *path          # [n + 1] columns, oldest first
    int64_t n
    const float *A               # [n] times beta
    const float *P               # [n + 1] times scale
    const float *y_k             # [columns_ld] S0^T k, S0^T q: of rows with their decay e, or of k and q (then e is here)
    const float *y_q
    const float *v               # [n_columns] there, or log.v
    float *out                   # [n_columns] there, or log.out
    float *X
    float beta, e, scale_e

cdef struct log_buffers:         # of a call with a token log, a tree or checkpoints (log.pxi): n columns, T tokens
    int64_t n_ld                 # columns, padded
    int64_t *up                  # [n] a column's parent, -1 for the first
    int64_t *path                # [T][n_ld] columns that a token sees
    path_sums *sums              # [T]
    const float **k_at           # [n] k of each column: packed, or an entry where it lies
    const float **X_at           # [n] its X
    float *k                     # [n][ld]
    float *q                     # [T][ld]
    float *g                     # [n], per channel [n][ld]
    float *a                     # per channel: [n][ld] exp(g)
    float *sum                   # per channel: [T + 1][ld] of g along a token's path, of the entries first
    float *X                     # [n][columns_ld]
    float *rows                  # [2 T][ld] k and q of each token, per channel times e
    float *y                     # [2 T][columns_ld] the state's products with them
    float *KK                    # [T][n_ld] along a token's path
    float *QK
    float *A                     # [T][n_ld] the same decayed and scaled, for one head
    float *P
    vf *kk                       # [n_ld]
    vf *qk
    float *keys                  # [n][ld] a fold's
    float *v                     # [columns_ld]
    float *out
    float *state                 # [state_size] a folded state's panels

cdef struct delta_buffers:       # a worker's scratch
    int64_t ld, state_rows, columns_ld, state_size       # padded extents, floats
    gated_rows rows
    float *q                                 # [CHUNK_MAX][ld]
    float *k
    float *KK                                # [CHUNK_MAX][PAIR_LD]
    float *QK
    float *whole                             # [ld]
    float *part
    float *v                                 # [CHUNK_MAX][columns_ld]
    float *out
    float *X                                 # [CHUNK_MAX][NV * VL]
    float *X_end
    float *states                            # [n_heads][state_size]
    log_buffers log
    token tokens[TOKENS]

cdef struct delta_work_item:
    const gdn_delta_job *job
    int64_t seq, key_head
    int64_t head_0, head_step, n_heads       # the value heads: head_0, head_0 + head_step, ...
    int64_t batch, start, n_tokens           # where the sequence's tokens lie
    int64_t column, n_columns                # this part's columns of every head
    int64_t n_entries                        # of the log that the sequence stands on: log_in[0..n_entries)
    const int64_t *log_in
    const int64_t *log_out                   # [n_tokens] entries of the tokens, NULL if none are kept
    delta_buffers buf


cdef size_t carve_delta_buffers(delta_buffers *buf, const gdn_delta_job *job, char *scratch) noexcept nogil:
    """Every buffer's place in scratch; returns the bytes they take.  With scratch NULL that alone."""
    cdef int64_t t, n_heads = job.H_v // job.n_groups
    cdef scratch_cursor at
    at.base = scratch
    at.used = 0
    buf.state_rows = round_up(job.S_k, MR)
    buf.ld = round_up(buf.state_rows, VL)
    buf.columns_ld = round_up(job.part_columns, NV * VL)
    buf.state_size = buf.state_rows * buf.columns_ld
    buf.q = carve(&at, CHUNK_MAX * buf.ld)
    buf.k = carve(&at, CHUNK_MAX * buf.ld)
    buf.whole = carve(&at, buf.ld)
    buf.part = carve(&at, buf.ld)
    buf.rows.k_in = carve(&at, CHUNK_MAX * buf.ld)
    buf.rows.q_in = carve(&at, CHUNK_MAX * buf.ld)
    if job.per_channel:
        buf.rows.a = carve(&at, CHUNK_MAX * buf.ld)
        buf.rows.k_out = carve(&at, CHUNK_MAX * buf.ld)
    else:
        buf.KK = carve(&at, CHUNK_MAX * PAIR_LD)
        buf.QK = carve(&at, CHUNK_MAX * PAIR_LD)
    buf.v = carve(&at, CHUNK_MAX * buf.columns_ld)
    buf.out = carve(&at, CHUNK_MAX * buf.columns_ld)
    buf.X = carve(&at, CHUNK_MAX * NV * VL)
    buf.X_end = carve(&at, CHUNK_MAX * NV * VL)
    # Arrays read side by side need a gap: where one ends as the next begins, the prefetchers run on from one into the
    # other instead of ahead in the state.
    for t in range(TOKENS):
        buf.tokens[t].k = buf.k + t * buf.ld
        buf.tokens[t].kd = carve(&at, buf.ld + GAP) if job.per_channel else buf.k + t * buf.ld
        buf.tokens[t].qd = carve(&at, buf.ld + GAP) if job.per_channel else buf.q + t * buf.ld
        buf.tokens[t].whole = carve(&at, buf.ld + GAP)
        buf.tokens[t].part = carve(&at, buf.ld + GAP)
        buf.tokens[t].decay = 1
    buf.states = carve(&at, n_heads * buf.state_size)
    if job.has_lists:
        carve_log_buffers(buf, job, &at)
    return at.used


cdef void carve_log_buffers(delta_buffers *buf, const gdn_delta_job *job, scratch_cursor *at) noexcept nogil:
    cdef log_buffers *log = &buf.log
    cdef int64_t T = job.few_tokens, n = job.n_entries + T, per_column = buf.ld if job.per_channel else 1
    log.n_ld = round_up(n + 1, VL)
    log.up = <int64_t *>carve(at, 2 * log.n_ld)
    log.path = <int64_t *>carve(at, 2 * T * log.n_ld)
    log.sums = <path_sums *>carve(at, T * <int64_t>sizeof(path_sums) // 4)
    log.k_at = <const float **>carve(at, 2 * n)
    log.X_at = <const float **>carve(at, 2 * n)
    log.k = carve(at, n * buf.ld)
    log.q = carve(at, T * buf.ld)
    log.g = carve(at, n * per_column)
    log.a = carve(at, n * buf.ld if job.per_channel else 0)
    log.sum = carve(at, (T + 1) * buf.ld if job.per_channel else 0)
    log.X = carve(at, n * buf.columns_ld)
    log.rows = carve(at, 2 * T * buf.ld)
    log.y = carve(at, 2 * T * buf.columns_ld)
    log.KK = carve(at, T * log.n_ld)
    log.QK = carve(at, T * log.n_ld)
    log.A = carve(at, T * log.n_ld)
    log.P = carve(at, T * log.n_ld)
    log.kk = <vf *>carve(at, log.n_ld * VL)
    log.qk = <vf *>carve(at, log.n_ld * VL)
    log.keys = carve(at, n * buf.ld)
    log.v = carve(at, buf.columns_ld)
    log.out = carve(at, buf.columns_ld)
    log.state = carve(at, buf.state_size)


cdef void place_item(delta_work_item *item, const gdn_delta_job *job, int64_t i) noexcept nogil:
    cdef const int64_t *cu_seqlens = job.args.call.cu_seqlens
    cdef int64_t part = i % job.n_parts, group = i // job.n_parts % job.n_groups
    item.job = job
    item.n_heads = job.H_v // job.n_groups
    place_heads(item, group)
    item.seq = i // job.n_parts // job.n_groups
    place_log(item)
    item.column = part * job.part_columns
    item.n_columns = min(job.part_columns, job.S_v - item.column)
    if cu_seqlens != NULL:
        item.batch = 0
        item.start = cu_seqlens[item.seq]
        item.n_tokens = cu_seqlens[item.seq + 1] - item.start
    else:
        item.batch = item.seq
        item.start = 0
        item.n_tokens = job.args.q.ne[2]


cdef inline void place_heads(delta_work_item *item, int64_t group) noexcept nogil:
    """Group i of H_k is the value heads of key head i; group i of H_v is value head i alone."""
    cdef const gdn_delta_job *job = item.job
    cdef int64_t r = job.H_v // job.H_k
    if job.n_groups == job.H_k:
        item.key_head = group
        item.head_0 = group if job.tiled else group * r
    else:
        item.key_head = group % job.H_k if job.tiled else group // r
        item.head_0 = group
    item.head_step = job.H_k if job.tiled else 1


cdef inline bint first_of_key(const delta_work_item *item) noexcept nogil:
    """Whether this item has the first of the value heads that share its key head."""
    return item.head_0 == (item.key_head if item.job.tiled else item.key_head * (item.job.H_v // item.job.H_k))


cdef void place_log(delta_work_item *item) noexcept nogil:
    """The sequence's lists."""
    cdef const gdn_call *call = &item.job.args.call
    item.log_in = item.log_out = NULL
    item.n_entries = 0
    if call.log_in != NULL:
        item.log_in = call.log_in + item.seq * call.n_log_in
        while item.n_entries < call.n_log_in and item.log_in[item.n_entries] >= 0:
            item.n_entries += 1
    if call.log_out != NULL:
        item.log_out = call.log_out + item.seq * call.n_log_out


cdef bint few_rows_take(const gdn_delta_job *job, int64_t n_tokens) noexcept nogil:
    """Whether a call with lists takes the state of a sequence of so many tokens where it lies."""
    if job.args.call.parents != NULL or n_tokens <= 1:
        return True
    return n_tokens <= FEW_TOKENS and job.chunked_from < INT64_MAX


# ---- where things lie ------------------------------------------------------------------------------------------

cdef inline int64_t value_head(const delta_work_item *item, int64_t m) noexcept nogil:
    return item.head_0 + m * item.head_step


cdef inline char *row_of(const delta_work_item *item, const gdn_tensor *x, int64_t head, int64_t t) noexcept nogil:
    """Token t of the sequence in q, k, v, g, beta or out."""
    return <char *>x.data + head * x.nb[1] + (item.start + t) * x.nb[2] + item.batch * x.nb[3]


cdef inline char *columns_of(const delta_work_item *item, const gdn_tensor *x, int64_t head, int64_t t) noexcept nogil:
    """This part's columns of a row of v or out."""
    return row_of(item, x, head, t) + item.column * x.nb[0]


cdef inline char *entry_of(const delta_work_item *item, const gdn_tensor *x, int64_t head, int64_t entry) noexcept nogil:
    """A head's row of an entry of the log."""
    return <char *>x.data + head * x.nb[1] + entry * x.nb[2]


cdef inline char *snapshot_row(const delta_work_item *item, int64_t t) noexcept nogil:
    """The row that keeps the state after token t, NULL if none does."""
    cdef int64_t s = item.n_tokens - 1 - t
    return item.job.rows.state_out[item.seq * item.job.n_snapshots + s] if s < item.job.n_snapshots else NULL


cdef state_view view_in(const delta_work_item *item, int64_t m) noexcept nogil:
    """Where head m starts from; p NULL is zeros."""
    cdef state_view x
    cdef const int64_t *nb = item.job.rows.state_in_nb[item.seq]
    x.p = <char *>item.job.rows.state_in[item.seq]
    x.type, x.element = item.job.args.call.state.type, 0
    x.nb[0] = nb[0]
    x.nb[1] = nb[1]
    if x.p != NULL:
        x.p += value_head(item, m) * nb[2] + item.column * nb[1]
    return x


cdef state_view view_in_row(const delta_work_item *item, char *row, int64_t m) noexcept nogil:
    cdef const int64_t *nb = item.job.args.call.state_out.nb
    cdef state_view x
    x.p = row + value_head(item, m) * nb[2] + item.column * nb[1]
    x.type = item.job.args.call.state_out.type
    x.element = <uint32_t>((value_head(item, m) * item.job.S_v + item.column) * item.job.S_k)
    x.nb[0] = nb[0]
    x.nb[1] = nb[1]
    return x


cdef state_view view_after(const delta_work_item *item, int64_t m, int64_t t, int order) noexcept nogil:
    """Where the state after token t goes in place: its snapshot's row, else the newest's (which the last token
    overwrites anyway), else scratch."""
    cdef state_view x
    cdef char *row = snapshot_row(item, t)
    if row == NULL:
        row = snapshot_row(item, item.n_tokens - 1)
    if row != NULL:
        return view_in_row(item, row, m)
    x.p = <char *>(item.buf.states + m * item.buf.state_size)
    x.type, x.element = type_in_place(item), 0
    x.nb[0] = type_size(x.type) * (1 if order == KEYS else item.n_columns)
    x.nb[1] = type_size(x.type) * (item.job.S_k if order == KEYS else 1)
    return x


cdef inline int type_in_place(const delta_work_item *item) noexcept nogil:
    """Of the rows that this item reads and writes, where that is one."""
    cdef const gdn_call *call = &item.job.args.call
    return call.state.type if call.state_out.data == NULL else call.state_out.type


cdef int state_order(const delta_work_item *item) noexcept nogil:
    """Whether every row this item reads or writes can be worked on in place, and along which index."""
    cdef const gdn_call *call = &item.job.args.call
    cdef const int64_t *nb_in = item.job.rows.state_in_nb[item.seq]
    cdef const int64_t *nb_out = call.state_out.nb
    cdef bint reads = item.job.rows.state_in[item.seq] != NULL, writes = call.state_out.data != NULL
    cdef int64_t size = type_size(type_in_place(item))
    if (reads and call.state.type != type_in_place(item)) or (size != 4 and call.rounding != GDN_ROUND_NEAREST):
        return PANELS
    if item.job.S_k % VL == 0 and (not reads or nb_in[0] == size) and (not writes or nb_out[0] == size):
        return KEYS
    if item.n_columns % VL == 0 and (not reads or nb_in[1] == size) and (not writes or nb_out[1] == size):
        return VALUES
    return PANELS


cdef int64_t oldest_kept(const delta_work_item *item) noexcept nogil:
    """The largest s > 0 whose snapshot exists and has a row; 0 if only the final state is kept."""
    cdef int64_t s = min(item.job.n_snapshots, item.n_tokens) - 1
    while s > 0 and snapshot_row(item, item.n_tokens - 1 - s) == NULL:
        s -= 1
    return max(s, <int64_t>0)


# ---- states between caller memory and scratch ------------------------------------------------------------------

cdef void load_head(const delta_work_item *item, int64_t m) noexcept nogil:
    cdef state_view x = view_in(item, m)
    load_panels(item.buf.states + m * item.buf.state_size, item.buf.state_rows, &x, item.job.S_k, item.n_columns)


cdef void keep_head(const delta_work_item *item, int64_t m, int64_t t) noexcept nogil:
    """The packed state after token t to its snapshot, if that has a row."""
    cdef char *row = snapshot_row(item, t)
    if row != NULL:
        store_head(item, m, row, t + 1)


cdef void store_head(const delta_work_item *item, int64_t m, char *row, int64_t n) noexcept nogil:
    """The packed state, which is that after n tokens, to a row."""
    cdef state_view x = view_in_row(item, row, m)
    cdef gdn_rounding r = rounding_at(&item.job.args.call, item.seq, n)
    store_panels(&x, &r, item.buf.states + m * item.buf.state_size, item.buf.state_rows, item.job.S_k, item.n_columns)


cdef void pass_state_on(const delta_work_item *item, int64_t m) noexcept nogil:
    """A sequence without tokens: its state, bit for bit where the types are one."""
    cdef char *row = item.job.rows.state_out[item.seq * item.job.n_snapshots]
    cdef gdn_rounding r = rounding_at(&item.job.args.call, item.seq, 0)
    cdef state_view source = view_in(item, m), target
    if row != NULL:
        target = view_in_row(item, row, m)
        move_state(&target, &source, &r, item.job.S_k, item.n_columns)


# ---- tokens from caller memory ---------------------------------------------------------------------------------

cdef void load_keys(delta_work_item *item, int64_t t0, int64_t n) noexcept nogil:
    """q and k of tokens [t0, t0 + n), normalised if asked: shared by the value heads."""
    cdef const gdn_delta_net_args *args = item.job.args
    cdef int64_t i
    for i in range(n):
        load_key(item, item.buf.q + i * item.buf.ld, row_of(item, &args.q, item.key_head, t0 + i), &args.q)
        load_key(item, item.buf.k + i * item.buf.ld, row_of(item, &args.k, item.key_head, t0 + i), &args.k)


cdef inline void load_key(const delta_work_item *item, float *row, const char *src, const gdn_tensor *x) noexcept nogil:
    cdef const gdn_delta_net_args *args = item.job.args
    cdef float squares
    pack_typed(row, src, x.nb[0], x.type, item.job.S_k, item.buf.ld)
    if args.flags & GDN_QK_L2NORM:
        squares = dot(row, row, item.buf.ld)
        if args.flags & GDN_L2_MAX:
            scale_row(row, 1 / max(sqrtf(squares), args.l2_eps), item.buf.ld)
        else:
            scale_row(row, 1 / sqrtf(squares + args.l2_eps), item.buf.ld)


cdef void load_scalars(const delta_work_item *item, float *beta, float *g, int64_t head, int64_t t0, int64_t n) noexcept nogil:
    """beta and (scalar gate) g of tokens [t0, t0 + n), zeros behind up to PAIR_LD."""
    cdef const gdn_delta_net_args *args = item.job.args
    cdef int64_t i
    memset(beta, 0, PAIR_LD * sizeof(float))
    memset(g, 0, PAIR_LD * sizeof(float))
    for i in range(n):
        beta[i] = load_type(row_of(item, &args.beta, head, t0 + i), args.beta.type)
        if not item.job.per_channel:
            g[i] = load_type(row_of(item, &args.g, head, t0 + i), args.g.type)
    if args.flags & GDN_BETA_LOGIT:
        for i from 0 <= i < n by VL:
            v_store(beta + i, v_sigmoid(v_load(beta + i)))


# ---- tokens to the log -----------------------------------------------------------------------------------------

cdef void keep_keys(const delta_work_item *item, const float *k, int64_t t0, int64_t n) noexcept nogil:
    """k [n][ld] of tokens [t0, t0 + n) to the entries that want it; by one of the items that share a key head."""
    cdef const gdn_tensor *to = &item.job.args.log_k
    cdef int64_t i
    if item.log_out == NULL or item.column != 0 or not first_of_key(item):
        return
    for i in range(n):
        if item.log_out[t0 + i] >= 0:
            unpack_row(entry_of(item, to, item.key_head, item.log_out[t0 + i]), to.nb[0], k + i * item.buf.ld, item.job.S_k)


cdef inline void keep_delta(const delta_work_item *item, const float *x, int64_t head, int64_t t, int64_t j,
                            int64_t n) noexcept nogil:
    """X of token t for columns [j, j + n) of this part to its entry, if it has one."""
    cdef const gdn_tensor *to = &item.job.args.log_d
    if item.log_out != NULL and item.log_out[t] >= 0:
        unpack_row(entry_of(item, to, head, item.log_out[t]) + (item.column + j) * to.nb[0], to.nb[0], x, n)
