# The tokens of a work item in a row: chunked on packed states, or token by token, there or in place.
#
# Needs: simd.pxi, pack.pxi (dot, fetch_rows), tile.pxi (pack_blocks), pairs.pxi (pair_products), decay.pxi (operands,
# prepare_channels, prepare_scalar), chunked.pxi (chunk_panel_narrow, chunk_panel_wide), recurrent.pxi (DECAY_ONE_PLUS_PART,
# DECAY_PART, DECAY_PER_CHANNEL, columns_step, pairs_step, rows_step, token), few_rows.pxi (KEYS, PANELS), item.pxi, storage.pxi
# (move_state, pack_typed, state_view, type_size, unpack_typed).

# ---- the chunked stretch ---------------------------------------------------------------------------------------

cdef void run_chunked(delta_work_item *item, int64_t t_first, int64_t t_stop, int64_t chunk) noexcept nogil:
    """Tokens [t_first, t_stop) of every head on the packed states, [n_heads][state_size], `chunk` at a time."""
    cdef operands op
    cdef int64_t t0, m
    op.S_k = item.job.S_k
    op.ld = item.buf.ld
    op.state_rows = item.buf.state_rows
    op.k_in = item.buf.rows.k_in
    op.q_in = item.buf.rows.q_in
    op.k_out = item.buf.rows.k_out if item.job.per_channel else item.buf.k
    op.whole = item.buf.whole
    op.part = item.buf.part
    op.X = item.buf.X
    op.X_end = item.buf.X_end
    for t0 from t_first <= t0 < t_stop by chunk:
        op.n = min(chunk, t_stop - t0)
        load_keys(item, t0, op.n)
        keep_keys(item, item.buf.k, t0, op.n)
        if not item.job.per_channel:
            pack_blocks(item.buf.rows.k_in, item.buf.k, op.n, item.buf.ld)
            pack_blocks(item.buf.rows.q_in, item.buf.q, op.n, item.buf.ld)
            pair_products(item.buf.KK, item.buf.QK, item.buf.q, item.buf.k, item.buf.ld, op.n)
        for m in range(item.n_heads):
            prepare_head(item, &op, value_head(item, m), t0)
            chunk_head(item, &op, m, t0)


cdef void prepare_head(delta_work_item *item, operands *op, int64_t head, int64_t t0) noexcept nogil:
    """What the gate of a value head does to the chunk from token t0 on, whose keys are packed."""
    cdef const gdn_tensor *g = &item.job.args.g
    cdef float g_scalar[PAIR_LD]
    cdef int64_t i
    load_scalars(item, op.beta, g_scalar, head, t0, op.n)
    if item.job.per_channel:
        for i in range(op.n):
            pack_typed(item.buf.rows.a + i * item.buf.ld, row_of(item, g, head, t0 + i), g.nb[0], g.type, item.job.S_k,
                       item.buf.ld)
        prepare_channels(op, &item.buf.rows, item.buf.q, item.buf.k, item.job.scale)
    else:
        prepare_scalar(op, g_scalar, item.buf.KK, item.buf.QK, item.job.scale)


cdef inline void fetch_ahead(const delta_work_item *item, int64_t m, int64_t t_first, int64_t t_stop) noexcept nogil:
    """What value head m reads and writes at tokens [t_first, t_stop), towards the cache; q and k with the first head."""
    cdef const gdn_delta_net_args *args = item.job.args
    cdef int64_t head = value_head(item, m), n = min(t_stop, item.n_tokens) - t_first
    if m == 0:
        fetch_tokens(row_of(item, &args.q, item.key_head, t_first), &args.q, n, item.job.S_k)
        fetch_tokens(row_of(item, &args.k, item.key_head, t_first), &args.k, n, item.job.S_k)
    if item.job.per_channel:
        fetch_tokens(row_of(item, &args.g, head, t_first), &args.g, n, item.job.S_k)
    fetch_tokens(columns_of(item, &args.v, head, t_first), &args.v, n, item.n_columns)
    fetch_tokens(columns_of(item, &args.out, head, t_first), &args.out, n, item.n_columns)


cdef inline void fetch_tokens(const char *row, const gdn_tensor *x, int64_t n_rows, int64_t n) noexcept nogil:
    fetch_rows(row, x.nb[2], n_rows, n * type_size(x.type) // 4)


cdef inline bint is_direct(const gdn_tensor *x) noexcept nogil:
    """Whether rows of v or out are floats side by side, which are used where they lie."""
    return x.type == GDN_TYPE_F32 and x.nb[0] == 4


cdef void chunk_head(delta_work_item *item, const operands *op, int64_t m, int64_t t0) noexcept nogil:
    """All panels of one head's chunk.  v and out are used where they lie if their rows are whole vectors.  While a panel
    computes, its share of the next chunk's rows is on the way."""
    cdef const gdn_tensor *v = &item.job.args.v
    cdef const gdn_tensor *out = &item.job.args.out
    cdef int64_t head = value_head(item, m), i, j
    cdef int64_t n_panels = (item.n_columns + NV * VL - 1) // (NV * VL)
    cdef int64_t share = (CHUNK_MAX + n_panels - 1) // n_panels, t_ahead = t0 + CHUNK_MAX
    cdef bint whole = item.n_columns % VL == 0
    cdef char *v_0 = columns_of(item, v, head, t0)
    cdef char *out_0 = columns_of(item, out, head, t0)
    cdef bint direct_v = whole and is_direct(v), direct_out = whole and is_direct(out)
    cdef const float *v_rows = <const float *>v_0 if direct_v else item.buf.v
    cdef float *out_rows = <float *>out_0 if direct_out else item.buf.out
    cdef int64_t v_ld = v.nb[2] // 4 if direct_v else item.buf.columns_ld
    cdef int64_t out_ld = out.nb[2] // 4 if direct_out else item.buf.columns_ld
    cdef float *state = item.buf.states + m * item.buf.state_size
    if not direct_v:
        for i in range(op.n):
            pack_typed(item.buf.v + i * item.buf.columns_ld, v_0 + i * v.nb[2], v.nb[0], v.type, item.n_columns,
                       item.buf.columns_ld)
    for j from 0 <= j < item.n_columns by NV * VL:
        fetch_ahead(item, m, t_ahead, t_ahead + share)
        t_ahead += share
        if item.n_columns - j > VL:
            chunk_panel_wide(op, state, v_rows + j, v_ld, out_rows + j, out_ld)
        else:
            chunk_panel_narrow(op, state, v_rows + j, v_ld, out_rows + j, out_ld)
        state += item.buf.state_rows * NV * VL
        if item.log_out != NULL:
            for i in range(op.n):
                keep_delta(item, op.X + i * NV * VL, head, t0 + i, j, min(<int64_t>(NV * VL), item.n_columns - j))
    if not direct_out:
        for i in range(op.n):
            unpack_typed(out_0 + i * out.nb[2], out.nb[0], out.type, item.buf.out + i * item.buf.columns_ld, item.n_columns)


# ---- the token-by-token stretch --------------------------------------------------------------------------------

cdef void run_recurrent(delta_work_item *item, int64_t t_first, int order) noexcept nogil:
    """Tokens [t_first, n_tokens) of every head, TOKENS at a time: q, k packed to [n][ld], v and out where they lie or
    [n][columns_ld].  order: PANELS on the packed states [n_heads][state_size], else in place on the caller's."""
    cdef const gdn_tensor *out = &item.job.args.out
    cdef float beta[PAIR_LD]
    cdef float g[PAIR_LD]
    cdef int64_t t0, n, m, i, head
    cdef char *out_i
    for t0 from t_first <= t0 < item.n_tokens by TOKENS:
        n = min(<int64_t>TOKENS, item.n_tokens - t0)
        load_keys(item, t0, n)
        for m in range(item.n_heads):
            head = value_head(item, m)
            load_scalars(item, beta, g, head, t0, n)
            for i in range(n):
                prepare_token(item, i, head, t0 + i, beta[i], g[i])
                place_columns(item, i, head, t0 + i, order != PANELS)
            if order == PANELS:
                steps_in_panels(item, m, t0, n)
            else:
                steps_in_place(item, m, t0, n, order)
            for i in range(n):
                out_i = columns_of(item, out, head, t0 + i)
                if <char *>item.buf.tokens[i].out != out_i:
                    unpack_typed(out_i, out.nb[0], out.type, item.buf.tokens[i].out, item.n_columns)


cdef void prepare_token(delta_work_item *item, int64_t i, int64_t head, int64_t t, float beta, float g) noexcept nogil:
    """Token t, whose q and k are packed in row i, as token i of the block."""
    cdef const gdn_delta_net_args *args = item.job.args
    cdef token *tok = &item.buf.tokens[i]
    cdef const float *q = item.buf.q + i * item.buf.ld
    cdef vf whole, part, decay
    cdef float one
    cdef int64_t c
    tok.beta = beta
    tok.out_d = item.job.scale * dot(tok.k, q, item.buf.ld)
    if not item.job.per_channel:
        v_store_head(&tok.decay, v_exp_whole_part(v_set(g), &whole, &part), 1)
        tok.out_q = item.job.scale * tok.decay
        v_store_head(&one, v_and(v_set(1), whole), 1)
        tok.gate = DECAY_ONE_PLUS_PART if one == 1 else DECAY_PART
        v_store(tok.part, part)
        return
    tok.gate = DECAY_PER_CHANNEL
    tok.out_q = item.job.scale
    pack_typed(tok.part, row_of(item, &args.g, head, t), args.g.nb[0], args.g.type, item.job.S_k, item.buf.ld)
    for c from 0 <= c < item.buf.ld by VL:
        decay = v_exp_whole_part(v_load(tok.part + c), &whole, &part)
        v_store(tok.whole + c, whole)
        v_store(tok.part + c, part)
        v_store(tok.kd + c, decay * v_load(tok.k + c))
        v_store(tok.qd + c, decay * v_load(q + c))


cdef inline void place_columns(delta_work_item *item, int64_t i, int64_t head, int64_t t, bint direct) noexcept nogil:
    """Token i's v and out: where they lie if they are contiguous and a step reads no column past the last (direct), else
    in scratch."""
    cdef const gdn_tensor *v = &item.job.args.v
    cdef const gdn_tensor *out = &item.job.args.out
    cdef token *tok = &item.buf.tokens[i]
    tok.v = item.buf.v + i * item.buf.columns_ld
    tok.out = item.buf.out + i * item.buf.columns_ld
    if direct and is_direct(v):
        tok.v = <float *>columns_of(item, v, head, t)
    else:
        pack_typed(tok.v, columns_of(item, v, head, t), v.nb[0], v.type, item.n_columns, item.buf.columns_ld)
    if direct and is_direct(out):
        tok.out = <float *>columns_of(item, out, head, t)


cdef void steps_in_place(delta_work_item *item, int64_t m, int64_t t0, int64_t n, int order) noexcept nogil:
    """Tokens [t0, t0 + n) on caller memory: each reads the state before it and writes its own."""
    cdef int type = type_in_place(item)
    if type == GDN_TYPE_F32:
        steps_on_floats(item, m, t0, n, order)
    elif type == GDN_TYPE_BF16:
        steps_on_bf16(item, m, t0, n, order)
    else:
        steps_on_f16(item, m, t0, n, order)


cdef void steps_on_floats(delta_work_item *item, int64_t m, int64_t t0, int64_t n, int order) noexcept nogil:
    steps(item, m, t0, n, order, GDN_TYPE_F32)


cdef void steps_on_bf16(delta_work_item *item, int64_t m, int64_t t0, int64_t n, int order) noexcept nogil:
    steps(item, m, t0, n, order, GDN_TYPE_BF16)


cdef void steps_on_f16(delta_work_item *item, int64_t m, int64_t t0, int64_t n, int order) noexcept nogil:
    steps(item, m, t0, n, order, GDN_TYPE_F16)


cdef inline void steps(delta_work_item *item, int64_t m, int64_t t0, int64_t n, int order, const int type) noexcept nogil:
    cdef state_view target, source = view_after(item, m, t0 - 1, order) if t0 > 0 else view_in(item, m)
    cdef int64_t i
    for i in range(n):
        target = view_after(item, m, t0 + i, order)
        if source.p == NULL:
            move_state(&target, &source, NULL, item.job.S_k, item.n_columns)
            source = target
        if item.buf.tokens[i].gate == DECAY_PER_CHANNEL:
            step(item, &item.buf.tokens[i], target, source, order, DECAY_PER_CHANNEL, type)
        elif item.buf.tokens[i].gate == DECAY_ONE_PLUS_PART:
            step(item, &item.buf.tokens[i], target, source, order, DECAY_ONE_PLUS_PART, type)
        else:
            step(item, &item.buf.tokens[i], target, source, order, DECAY_PART, type)
        source = target


cdef inline void step(const delta_work_item *item, const token *t, state_view y, state_view x, int order,
                      const int gate, const int type) noexcept nogil:
    if order == KEYS:
        step_rows(item, t, y, x, gate, type)
    else:
        step_columns(item, t, y, x, gate, type)


cdef inline void step_rows(const delta_work_item *item, const token *t, state_view y, state_view x,
                           const int gate, const int type) noexcept nogil:
    cdef int64_t w = item.job.S_k // VL
    if type == GDN_TYPE_BF16 and HELD_MAX > 1 and w == HELD_MAX:
        pairs_step(t, y.p, y.nb[1], x.p, x.nb[1], item.n_columns, HELD_MAX, gate)
    elif type == GDN_TYPE_BF16 and HELD_MAX > 1 and w == HELD_MAX // 2:
        pairs_step(t, y.p, y.nb[1], x.p, x.nb[1], item.n_columns, HELD_MAX // 2, gate)
    elif w == HELD_MAX:
        rows_step(t, w, y.p, y.nb[1], x.p, x.nb[1], item.n_columns, HELD_MAX, gate, type)
    elif w == HELD_MAX // 2:
        rows_step(t, w, y.p, y.nb[1], x.p, x.nb[1], item.n_columns, HELD_MAX // 2, gate, type)
    else:
        rows_step(t, w, y.p, y.nb[1], x.p, x.nb[1], item.n_columns, 0, gate, type)


cdef inline void step_columns(const delta_work_item *item, const token *t, state_view y, state_view x,
                              const int gate, const int type) noexcept nogil:
    cdef int64_t n = item.n_columns, n_ahead = n if n > NC * VL else 0, j = 0
    while j + NC * VL <= n:
        columns_step(t, item.job.S_k, y.p, y.nb[0], x.p, x.nb[0], j, n_ahead if j == 0 else 0, NC, True, gate, type)
        j += NC * VL
    while j + NC // 2 * VL <= n:
        columns_step(t, item.job.S_k, y.p, y.nb[0], x.p, x.nb[0], j, 0, NC // 2, True, gate, type)
        j += NC // 2 * VL
    while j < n:
        columns_step(t, item.job.S_k, y.p, y.nb[0], x.p, x.nb[0], j, 0, 1, True, gate, type)
        j += VL


cdef void steps_in_panels(delta_work_item *item, int64_t m, int64_t t0, int64_t n) noexcept nogil:
    """Tokens [t0, t0 + n) on the packed state, each kept if its snapshot has a row."""
    cdef int64_t panel = item.buf.state_rows * NV * VL
    cdef token tok
    cdef int64_t i, j
    cdef char *state
    for i in range(n):
        tok = item.buf.tokens[i]
        state = <char *>(item.buf.states + m * item.buf.state_size)
        for j from 0 <= j < item.n_columns by NV * VL:
            if tok.gate == DECAY_PER_CHANNEL:
                columns_step(&tok, item.job.S_k, state, 4 * NV * VL, state, 4 * NV * VL, 0, 0, NV, False, DECAY_PER_CHANNEL,
                             GDN_TYPE_F32)
            elif tok.gate == DECAY_ONE_PLUS_PART:
                columns_step(&tok, item.job.S_k, state, 4 * NV * VL, state, 4 * NV * VL, 0, 0, NV, False, DECAY_ONE_PLUS_PART,
                             GDN_TYPE_F32)
            else:
                columns_step(&tok, item.job.S_k, state, 4 * NV * VL, state, 4 * NV * VL, 0, 0, NV, False, DECAY_PART,
                             GDN_TYPE_F32)
            tok.v += NV * VL
            tok.out += NV * VL
            state += 4 * panel
        keep_head(item, m, t0 + i)
