# A worker's scratch and the work item it holds: where the item's tensors lie, and what passes between them and scratch.

cdef enum:
    TOKENS = 4                   # tokens prepared together in token-by-token stretches
    GAP = 64                     # floats
    PANELS = 0                   # where a token-by-token stretch works: on a packed copy in scratch,
    KEYS = 1                     # or in place, on rows along the key index (ggml's order),
    VALUES = 2                   # or on rows along the value index (FLA's)

cdef struct plane:               # one head's state: address and byte strides over key, value column
    char *p
    int64_t nb[2]

cdef struct space:               # a worker's scratch, and the item it works on
    const gdn_delta_job *job
    int64_t seq, key_head
    int64_t head_0, head_step, n_heads       # the value heads: head_0, head_0 + head_step, ...
    int64_t batch, start, n_tokens           # where the sequence's tokens lie
    int64_t column, n_columns                # this part's columns of every head
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
    token tokens[TOKENS]


cdef char *lay_out(space *sp, const gdn_delta_job *job, char *scratch) noexcept nogil:
    """Every buffer behind `scratch`; returns the end.  Nothing is touched, so that the size is this from NULL."""
    cdef int64_t t
    cdef char *at = scratch
    sp.job = job
    sp.n_heads = job.H_v // job.n_groups
    sp.state_rows = round_up(job.S_k, MR)
    sp.ld = round_up(sp.state_rows, VL)
    sp.columns_ld = round_up(job.part_columns, NV * VL)
    sp.state_size = sp.state_rows * sp.columns_ld
    sp.q = carve(&at, CHUNK_MAX * sp.ld)
    sp.k = carve(&at, CHUNK_MAX * sp.ld)
    sp.whole = carve(&at, sp.ld)
    sp.part = carve(&at, sp.ld)
    sp.rows.k_in = carve(&at, CHUNK_MAX * sp.ld)
    sp.rows.q_in = carve(&at, CHUNK_MAX * sp.ld)
    if job.per_channel:
        sp.rows.a = carve(&at, CHUNK_MAX * sp.ld)
        sp.rows.k_out = carve(&at, CHUNK_MAX * sp.ld)
    else:
        sp.KK = carve(&at, CHUNK_MAX * PAIR_LD)
        sp.QK = carve(&at, CHUNK_MAX * PAIR_LD)
    sp.v = carve(&at, CHUNK_MAX * sp.columns_ld)
    sp.out = carve(&at, CHUNK_MAX * sp.columns_ld)
    sp.X = carve(&at, CHUNK_MAX * NV * VL)
    sp.X_end = carve(&at, CHUNK_MAX * NV * VL)
    # Arrays read side by side need a gap: where one ends as the next begins, the prefetchers run on from one into the
    # other instead of ahead in the state.
    for t in range(TOKENS):
        sp.tokens[t].k = sp.k + t * sp.ld
        sp.tokens[t].kd = carve(&at, sp.ld + GAP) if job.per_channel else sp.k + t * sp.ld
        sp.tokens[t].qd = carve(&at, sp.ld + GAP) if job.per_channel else sp.q + t * sp.ld
        sp.tokens[t].whole = carve(&at, sp.ld + GAP)
        sp.tokens[t].part = carve(&at, sp.ld + GAP)
        sp.tokens[t].decay = 1
    sp.states = carve(&at, sp.n_heads * sp.state_size)
    return at


cdef void place_item(space *sp, int64_t item) noexcept nogil:
    cdef const gdn_delta_job *job = sp.job
    cdef const int64_t *cu_seqlens = job.args.cu_seqlens
    cdef int64_t part = item % job.n_parts
    item //= job.n_parts
    place_heads(sp, item % job.n_groups)
    sp.seq = item // job.n_groups
    sp.column = part * job.part_columns
    sp.n_columns = min(job.part_columns, job.S_v - sp.column)
    if cu_seqlens != NULL:
        sp.batch = 0
        sp.start = cu_seqlens[sp.seq]
        sp.n_tokens = cu_seqlens[sp.seq + 1] - sp.start
    else:
        sp.batch = sp.seq
        sp.start = 0
        sp.n_tokens = job.args.q.ne[2]


cdef inline void place_heads(space *sp, int64_t group) noexcept nogil:
    """Group i of H_k is the value heads of key head i; group i of H_v is value head i alone."""
    cdef const gdn_delta_job *job = sp.job
    cdef int64_t r = job.H_v // job.H_k
    if job.n_groups == job.H_k:
        sp.key_head = group
        sp.head_0 = group if job.tiled else group * r
    else:
        sp.key_head = group % job.H_k if job.tiled else group // r
        sp.head_0 = group
    sp.head_step = job.H_k if job.tiled else 1


# ---- where things lie ------------------------------------------------------------------------------------------

cdef inline int64_t value_head(const space *sp, int64_t m) noexcept nogil:
    return sp.head_0 + m * sp.head_step


cdef inline char *row_of(const space *sp, const gdn_tensor *x, int64_t head, int64_t t) noexcept nogil:
    """Token t of the sequence in q, k, v, g, beta or out."""
    return <char *>x.data + head * x.nb[1] + (sp.start + t) * x.nb[2] + sp.batch * x.nb[3]


cdef inline char *columns_of(const space *sp, const gdn_tensor *x, int64_t head, int64_t t) noexcept nogil:
    """This part's columns of a row of v or out."""
    return row_of(sp, x, head, t) + sp.column * x.nb[0]


cdef inline char *slot_of(const space *sp, int64_t t) noexcept nogil:
    """The row that keeps the state after token t, NULL if none does."""
    cdef int64_t slot = sp.n_tokens - 1 - t
    return sp.job.rows.state_out[sp.seq * sp.job.n_snapshots + slot] if slot < sp.job.n_snapshots else NULL


cdef plane plane_in(const space *sp, int64_t m) noexcept nogil:
    """Where head m starts from; p NULL is zeros."""
    cdef plane x
    cdef const int64_t *nb = sp.job.rows.state_in_nb[sp.seq]
    x.p = <char *>sp.job.rows.state_in[sp.seq]
    x.nb[0] = nb[0]
    x.nb[1] = nb[1]
    if x.p != NULL:
        x.p += value_head(sp, m) * nb[2] + sp.column * nb[1]
    return x


cdef plane plane_in_slot(const space *sp, char *row, int64_t m) noexcept nogil:
    cdef const int64_t *nb = sp.job.args.state_out.nb
    cdef plane x
    x.p = row + value_head(sp, m) * nb[2] + sp.column * nb[1]
    x.nb[0] = nb[0]
    x.nb[1] = nb[1]
    return x


cdef plane plane_after(const space *sp, int64_t m, int64_t t, int order) noexcept nogil:
    """Where the state after token t goes in place: its slot, else the newest slot's row (which the last token
    overwrites anyway), else scratch."""
    cdef plane x
    cdef char *row = slot_of(sp, t)
    if row == NULL:
        row = slot_of(sp, sp.n_tokens - 1)
    if row != NULL:
        return plane_in_slot(sp, row, m)
    x.p = <char *>(sp.states + m * sp.state_size)
    x.nb[0] = 4 if order == KEYS else 4 * sp.n_columns
    x.nb[1] = 4 * sp.job.S_k if order == KEYS else 4
    return x


cdef int state_order(const space *sp) noexcept nogil:
    """Whether every row this item reads or writes can be worked on in place, and along which index."""
    cdef const int64_t *nb_in = sp.job.rows.state_in_nb[sp.seq]
    cdef const int64_t *nb_out = sp.job.args.state_out.nb
    cdef bint reads = sp.job.rows.state_in[sp.seq] != NULL, writes = sp.job.args.state_out.data != NULL
    if sp.job.S_k % VL == 0 and (not reads or nb_in[0] == 4) and (not writes or nb_out[0] == 4):
        return KEYS
    if sp.n_columns % VL == 0 and (not reads or nb_in[1] == 4) and (not writes or nb_out[1] == 4):
        return VALUES
    return PANELS


cdef int64_t oldest_kept(const space *sp) noexcept nogil:
    """The largest s > 0 whose slot exists and has a row; 0 if only the final state is kept."""
    cdef int64_t slot = min(sp.job.n_snapshots, sp.n_tokens) - 1
    while slot > 0 and slot_of(sp, sp.n_tokens - 1 - slot) == NULL:
        slot -= 1
    return max(slot, <int64_t>0)


# ---- states between caller memory and scratch ------------------------------------------------------------------

cdef void load_head(const space *sp, int64_t m) noexcept nogil:
    cdef plane x = plane_in(sp, m)
    load_state(sp.states + m * sp.state_size, sp.state_rows, x.p, x.nb, sp.job.S_k, sp.n_columns)


cdef void keep_head(const space *sp, int64_t m, int64_t t) noexcept nogil:
    """The packed state after token t to its slot, if that has a row."""
    cdef char *row = slot_of(sp, t)
    cdef plane x
    if row != NULL:
        x = plane_in_slot(sp, row, m)
        store_state(x.p, x.nb, sp.states + m * sp.state_size, sp.state_rows, sp.job.S_k, sp.n_columns)


cdef void pass_state_on(const space *sp, int64_t m) noexcept nogil:
    """A sequence without tokens: its state, bit for bit."""
    cdef char *row = sp.job.rows.state_out[sp.seq * sp.job.n_snapshots]
    cdef plane source = plane_in(sp, m), target
    if row != NULL:
        target = plane_in_slot(sp, row, m)
        copy_state(target.p, target.nb, source.p, source.nb, sp.job.S_k, sp.n_columns)


# ---- tokens from caller memory ---------------------------------------------------------------------------------

cdef void load_keys(space *sp, int64_t t0, int64_t n) noexcept nogil:
    """q and k of tokens [t0, t0 + n), normalised if asked: shared by the value heads."""
    cdef const gdn_delta_net_args *args = sp.job.args
    cdef int64_t i
    for i in range(n):
        load_key(sp, sp.q + i * sp.ld, row_of(sp, &args.q, sp.key_head, t0 + i), args.q.nb[0])
        load_key(sp, sp.k + i * sp.ld, row_of(sp, &args.k, sp.key_head, t0 + i), args.k.nb[0])


cdef inline void load_key(const space *sp, float *row, const char *src, int64_t nb) noexcept nogil:
    cdef const gdn_delta_net_args *args = sp.job.args
    cdef float squares
    pack_row(row, src, nb, sp.job.S_k, sp.ld)
    if args.flags & GDN_QK_L2NORM:
        squares = dot(row, row, sp.ld)
        if args.flags & GDN_L2_MAX:
            scale_row(row, 1 / max(sqrtf(squares), args.l2_eps), sp.ld)
        else:
            scale_row(row, 1 / sqrtf(squares + args.l2_eps), sp.ld)


cdef void load_scalars(const space *sp, float *beta, float *g, int64_t head, int64_t t0, int64_t n) noexcept nogil:
    """beta and (scalar gate) g of tokens [t0, t0 + n), zeros behind up to PAIR_LD."""
    cdef const gdn_delta_net_args *args = sp.job.args
    cdef int64_t i
    memset(beta, 0, PAIR_LD * sizeof(float))
    memset(g, 0, PAIR_LD * sizeof(float))
    for i in range(n):
        beta[i] = at(row_of(sp, &args.beta, head, t0 + i))
        if not sp.job.per_channel:
            g[i] = at(row_of(sp, &args.g, head, t0 + i))
    if args.flags & GDN_BETA_LOGIT:
        for i from 0 <= i < n by VL:
            v_store(beta + i, v_sigmoid(v_load(beta + i)))
