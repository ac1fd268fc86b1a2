# A work item of the delta rule: one sequence, the value heads that share one key head, one part of their columns.
#
# A sequence runs in up to two stretches: chunked, then token by token.  A snapshot must be the state that was there,
# so the last tokens whose states are kept run token by token, whatever the mode.

include "tile.pxi"
include "decay.pxi"
include "chunked.pxi"
include "recurrent.pxi"

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
    channel_rows rows
    float *q                                 # [PAIR_LD][ld]
    float *k
    float *k_transposed
    float *KK                                # [PAIR_LD][PAIR_LD]
    float *QK
    float *decay_hi
    float *decay_lo
    float *v                                 # [PAIR_LD][columns_ld]
    float *out
    float *X                                 # [PAIR_LD][NV * VL]
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
    sp.q = carve(&at, PAIR_LD * sp.ld)
    sp.k = carve(&at, PAIR_LD * sp.ld)
    sp.decay_hi = carve(&at, sp.ld)
    sp.decay_lo = carve(&at, sp.ld)
    if job.per_channel:
        sp.rows.a = carve(&at, PAIR_LD * sp.ld)
        sp.rows.k_in = carve(&at, PAIR_LD * sp.ld)
        sp.rows.q_in = carve(&at, PAIR_LD * sp.ld)
        sp.rows.k_out = carve(&at, PAIR_LD * sp.ld)
    else:
        sp.k_transposed = carve(&at, PAIR_LD * sp.ld)
        sp.KK = carve(&at, PAIR_LD * PAIR_LD)
        sp.QK = carve(&at, PAIR_LD * PAIR_LD)
    sp.v = carve(&at, PAIR_LD * sp.columns_ld)
    sp.out = carve(&at, PAIR_LD * sp.columns_ld)
    sp.X = carve(&at, PAIR_LD * NV * VL)
    sp.X_end = carve(&at, PAIR_LD * NV * VL)
    # Arrays read side by side need a gap: where one ends as the next begins, the prefetchers run on from one into the
    # other instead of ahead in the state.
    for t in range(TOKENS):
        sp.tokens[t].k = sp.k + t * sp.ld
        sp.tokens[t].kd = carve(&at, sp.ld + GAP) if job.per_channel else sp.k + t * sp.ld
        sp.tokens[t].qd = carve(&at, sp.ld + GAP) if job.per_channel else sp.q + t * sp.ld
        sp.tokens[t].whole = carve(&at, sp.ld + GAP)
        sp.tokens[t].part = carve(&at, sp.ld + GAP)
        sp.tokens[t].v = sp.v + t * sp.columns_ld
        sp.tokens[t].out = sp.out + t * sp.columns_ld
        sp.tokens[t].decay = 1
        sp.tokens[t].scale = job.scale
    sp.states = carve(&at, sp.n_heads * sp.state_size)
    return at


cdef size_t delta_scratch(const gdn_delta_job *job) noexcept nogil:
    cdef space sp
    return lay_out(&sp, job, NULL) - <char *>NULL


cdef void delta_plan(gdn_delta_job *job) noexcept nogil:
    """How a checked call runs on this level: chunk length, the switch from recurrent to chunked, column parts."""
    job.chunk = CHUNK_MAX
    if job.args.mode == GDN_MODE_RECURRENT:
        job.chunked_from = INT64_MAX
    elif job.args.mode == GDN_MODE_CHUNKED:
        job.chunked_from = 1
    else:
        job.chunked_from = 8             # where the two cross, both gates, v3 and v4: 6 to 8 tokens
    job.part_unit = NV * VL
    # Packing a key is shared by its value heads, but of single tokens it costs less than leaving their order in memory.
    job.n_groups = job.H_v if job.args.q.ne[2] * job.args.q.ne[3] <= job.n_seqs else job.H_k


cdef void delta_item(const void *job, int64_t item, void *scratch) noexcept nogil:
    cdef space sp
    cdef int64_t m, kept, n_chunked
    cdef int order
    lay_out(&sp, <const gdn_delta_job *>job, <char *>scratch)
    place_item(&sp, item)
    if sp.n_tokens == 0:
        for m in range(sp.n_heads):
            pass_state_on(&sp, m)
        return
    kept = oldest_kept(&sp)
    n_chunked = sp.n_tokens - kept if sp.n_tokens >= sp.job.chunked_from else 0
    order = state_order(&sp) if n_chunked == 0 else PANELS
    if order == PANELS:
        for m in range(sp.n_heads):
            load_head(&sp, m)
    if n_chunked > 0:
        run_chunked(&sp, n_chunked)
        for m in range(sp.n_heads):
            keep_head(&sp, m, n_chunked - 1)
    run_recurrent(&sp, n_chunked, order)


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


cdef inline char *slot_of(const space *sp, int64_t t) noexcept nogil:
    """The row that keeps the state after token t, NULL if none does."""
    cdef int64_t slot = sp.n_tokens - 1 - t
    return sp.job.state_out[sp.seq * sp.job.n_slots + slot] if slot < sp.job.n_slots else NULL


cdef plane plane_in(const space *sp, int64_t m) noexcept nogil:
    """Where head m starts from; p NULL is zeros."""
    cdef plane x
    cdef const int64_t *nb = sp.job.state_in_nb[sp.seq]
    x.p = <char *>sp.job.state_in[sp.seq]
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
    cdef const int64_t *nb_in = sp.job.state_in_nb[sp.seq]
    cdef const int64_t *nb_out = sp.job.args.state_out.nb
    cdef bint reads = sp.job.state_in[sp.seq] != NULL, writes = sp.job.args.state_out.data != NULL
    if sp.job.S_k % VL == 0 and (not reads or nb_in[0] == 4) and (not writes or nb_out[0] == 4):
        return KEYS
    if sp.n_columns % VL == 0 and (not reads or nb_in[1] == 4) and (not writes or nb_out[1] == 4):
        return VALUES
    return PANELS


cdef int64_t oldest_kept(const space *sp) noexcept nogil:
    """The largest s > 0 whose slot exists and has a row; 0 if only the final state is kept."""
    cdef int64_t slot = min(sp.job.n_slots, sp.n_tokens) - 1
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
    cdef char *row = sp.job.state_out[sp.seq * sp.job.n_slots]
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
        v_prefetch(<const float *>row_of(sp, &args.q, sp.key_head, t0 + i + n), sp.job.S_k)
        v_prefetch(<const float *>row_of(sp, &args.k, sp.key_head, t0 + i + n), sp.job.S_k)
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
    """beta and (scalar gate) g of tokens [t0, t0 + n), zeros behind up to whole vectors; n <= PAIR_LD."""
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


# ---- the chunked stretch ---------------------------------------------------------------------------------------

cdef void run_chunked(space *sp, int64_t n_tokens) noexcept nogil:
    cdef operands op
    cdef int64_t t0, m
    op.chunk = sp.job.chunk
    op.decay_hi = sp.decay_hi
    op.decay_lo = sp.decay_lo
    for t0 from 0 <= t0 < n_tokens by sp.job.chunk:
        op.n = min(sp.job.chunk, n_tokens - t0)
        load_keys(sp, t0, op.n)
        if not sp.job.per_channel:
            pack_transposed(sp.k_transposed, sp.k, sp.ld, op.n)
            pair_products(sp.KK, sp.QK, sp.k, sp.q, sp.k_transposed, sp.ld, op.n)
        for m in range(sp.n_heads):
            prepare_head(sp, &op, value_head(sp, m), t0)
            chunk_head(sp, &op, m, t0)


cdef void prepare_head(space *sp, operands *op, int64_t head, int64_t t0) noexcept nogil:
    cdef const gdn_tensor *g = &sp.job.args.g
    cdef float g_scalar[PAIR_LD + VL]
    cdef int64_t i
    load_scalars(sp, op.beta, g_scalar, head, t0, op.n)
    if sp.job.per_channel:
        for i in range(op.n):
            pack_row(sp.rows.a + i * sp.ld, row_of(sp, g, head, t0 + i), g.nb[0], sp.job.S_k, sp.ld)
        prepare_channels(op, &sp.rows, sp.q, sp.k, sp.job.scale, sp.ld)
    else:
        op.k_in = op.k_out = sp.k
        op.q_in = sp.q
        prepare_scalar(op, g_scalar, sp.KK, sp.QK, sp.job.scale, sp.ld)


cdef void chunk_head(space *sp, const operands *op, int64_t m, int64_t t0) noexcept nogil:
    """All panels of one head's chunk.  v and out are used where they lie if their rows are whole vectors."""
    cdef const gdn_tensor *v = &sp.job.args.v
    cdef const gdn_tensor *out = &sp.job.args.out
    cdef int64_t head = value_head(sp, m), i, j
    cdef bint whole = sp.n_columns % VL == 0
    cdef char *v_0 = row_of(sp, v, head, t0) + sp.column * v.nb[0]
    cdef char *out_0 = row_of(sp, out, head, t0) + sp.column * out.nb[0]
    cdef bint direct_v = whole and v.nb[0] == 4, direct_out = whole and out.nb[0] == 4
    cdef const float *v_rows = <const float *>v_0 if direct_v else sp.v
    cdef float *out_rows = <float *>out_0 if direct_out else sp.out
    cdef int64_t v_ld = v.nb[2] // 4 if direct_v else sp.columns_ld
    cdef int64_t out_ld = out.nb[2] // 4 if direct_out else sp.columns_ld
    cdef float *state = sp.states + m * sp.state_size
    if not direct_v:
        for i in range(op.n):
            pack_row(sp.v + i * sp.columns_ld, v_0 + i * v.nb[2], v.nb[0], sp.n_columns, sp.columns_ld)
    for j from 0 <= j < sp.n_columns by NV * VL:
        if sp.n_columns - j > VL:
            chunk_panel(op, sp.ld, sp.job.S_k, sp.state_rows, state, v_rows + j, v_ld, out_rows + j, out_ld, sp.X,
                        sp.X_end, NV)
        else:
            chunk_panel(op, sp.ld, sp.job.S_k, sp.state_rows, state, v_rows + j, v_ld, out_rows + j, out_ld, sp.X,
                        sp.X_end, 1)
        state += sp.state_rows * NV * VL
    if not direct_out:
        for i in range(op.n):
            unpack_row(out_0 + i * out.nb[2], out.nb[0], sp.out + i * sp.columns_ld, sp.n_columns)


# ---- the token-by-token stretch --------------------------------------------------------------------------------

cdef void run_recurrent(space *sp, int64_t t_first, int order) noexcept nogil:
    cdef const gdn_tensor *out = &sp.job.args.out
    cdef float beta[PAIR_LD]
    cdef float g[PAIR_LD]
    cdef int64_t t0, n, m, i, head
    for t0 from t_first <= t0 < sp.n_tokens by TOKENS:
        n = min(<int64_t>TOKENS, sp.n_tokens - t0)
        load_keys(sp, t0, n)
        for m in range(sp.n_heads):
            head = value_head(sp, m)
            load_scalars(sp, beta, g, head, t0, n)
            for i in range(n):
                prepare_token(sp, i, head, t0 + i, beta[i], g[i])
            if order == PANELS:
                steps_in_panels(sp, m, t0, n)
            else:
                steps_in_place(sp, m, t0, n, order)
            for i in range(n):
                unpack_row(row_of(sp, out, head, t0 + i) + sp.column * out.nb[0], out.nb[0], sp.tokens[i].out,
                           sp.n_columns)


cdef void prepare_token(space *sp, int64_t i, int64_t head, int64_t t, float beta, float g) noexcept nogil:
    """Token t, whose q and k are packed in row i, as token i of the block."""
    cdef const gdn_delta_net_args *args = sp.job.args
    cdef token *tok = &sp.tokens[i]
    cdef const float *q = sp.q + i * sp.ld
    cdef vf whole, part, decay
    cdef int64_t c
    tok.beta = beta
    tok.kq = dot(tok.k, q, sp.ld)
    pack_row(tok.v, row_of(sp, &args.v, head, t) + sp.column * args.v.nb[0], args.v.nb[0], sp.n_columns, sp.columns_ld)
    if not sp.job.per_channel:
        v_exp_whole_part(v_set(g), &whole, &part)
        v_store(tok.whole, whole)
        v_store(tok.part, part)
        v_store_head(&tok.decay, v_exp(v_set(g)), 1)
        return
    pack_row(tok.part, row_of(sp, &args.g, head, t), args.g.nb[0], sp.job.S_k, sp.ld)
    for c from 0 <= c < sp.ld by VL:
        decay = v_exp(v_load(tok.part + c))
        v_exp_whole_part(v_load(tok.part + c), &whole, &part)
        v_store(tok.whole + c, whole)
        v_store(tok.part + c, part)
        v_store(tok.kd + c, decay * v_load(tok.k + c))
        v_store(tok.qd + c, decay * v_load(q + c))


cdef void steps_in_place(space *sp, int64_t m, int64_t t0, int64_t n, int order) noexcept nogil:
    """Tokens [t0, t0 + n) on caller memory: each reads the plane before it and writes its own."""
    cdef plane target, source = plane_after(sp, m, t0 - 1, order) if t0 > 0 else plane_in(sp, m)
    cdef int64_t i
    for i in range(n):
        target = plane_after(sp, m, t0 + i, order)
        if source.p == NULL:
            copy_state(target.p, target.nb, NULL, NULL, sp.job.S_k, sp.n_columns)
            source = target
        if order == KEYS and sp.job.per_channel:
            step_rows(sp, &sp.tokens[i], target, source, True)
        elif order == KEYS:
            step_rows(sp, &sp.tokens[i], target, source, False)
        elif sp.job.per_channel:
            step_columns(sp, &sp.tokens[i], target, source, True)
        else:
            step_columns(sp, &sp.tokens[i], target, source, False)
        source = target


cdef inline void step_rows(const space *sp, const token *t, plane y, plane x, const bint per_channel) noexcept nogil:
    cdef int64_t w = sp.job.S_k // VL
    if w == HELD_MAX:
        rows_step(t, w, y.p, y.nb[1], x.p, x.nb[1], sp.n_columns, HELD_MAX, per_channel)
    elif w == HELD_MAX // 2:
        rows_step(t, w, y.p, y.nb[1], x.p, x.nb[1], sp.n_columns, HELD_MAX // 2, per_channel)
    else:
        rows_step(t, w, y.p, y.nb[1], x.p, x.nb[1], sp.n_columns, 0, per_channel)


cdef inline void step_columns(const space *sp, const token *t, plane y, plane x, const bint per_channel) noexcept nogil:
    cdef int64_t n = sp.n_columns, n_ahead = n if n > NC * VL else 0, j = 0
    while j + NC * VL <= n:
        columns_step(t, sp.job.S_k, y.p, y.nb[0], x.p, x.nb[0], j, n_ahead if j == 0 else 0, NC, per_channel)
        j += NC * VL
    while j < n:
        columns_step(t, sp.job.S_k, y.p, y.nb[0], x.p, x.nb[0], j, 0, 1, per_channel)
        j += VL


cdef void steps_in_panels(space *sp, int64_t m, int64_t t0, int64_t n) noexcept nogil:
    """Tokens [t0, t0 + n) on the packed state, each kept if its slot has a row."""
    cdef int64_t panel = sp.state_rows * NV * VL
    cdef token tok
    cdef int64_t i, j
    cdef char *state
    for i in range(n):
        tok = sp.tokens[i]
        state = <char *>(sp.states + m * sp.state_size)
        for j from 0 <= j < sp.n_columns by NV * VL:
            if sp.job.per_channel:
                columns_step(&tok, sp.job.S_k, state, 4 * NV * VL, state, 4 * NV * VL, 0, 0, NV, True)
            else:
                columns_step(&tok, sp.job.S_k, state, 4 * NV * VL, state, 4 * NV * VL, 0, 0, NV, False)
            tok.v += NV * VL
            tok.out += NV * VL
            state += 4 * panel
        keep_head(sp, m, t0 + i)
