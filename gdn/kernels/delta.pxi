# A work item of the delta rule: one sequence, one group of value heads, one part of their columns.
#
# A sequence runs in up to two stretches: chunked, then token by token.  A snapshot must be the state that was there,
# so the last tokens whose states are kept run token by token, whatever the mode.

include "tile.pxi"
include "pairs.pxi"
include "decay.pxi"
include "chunked.pxi"
include "recurrent.pxi"
include "item.pxi"


cdef size_t delta_scratch(const gdn_delta_job *job) noexcept nogil:
    cdef space sp
    return lay_out(&sp, job, NULL) - <char *>NULL


cdef void delta_plan(gdn_delta_job *job) noexcept nogil:
    """How a checked call runs on this level: where recurrent turns into chunked, heads to an item.  A state
    of one key channel never runs chunked: where all keys are one direction, a chunk's sums cancel to the few numbers
    there are, and its products cost more than they save."""
    if job.args.mode == GDN_MODE_RECURRENT or job.S_k == 1:
        job.chunked_from = INT64_MAX
    elif job.args.mode == GDN_MODE_CHUNKED:
        job.chunked_from = 1
    else:
        job.chunked_from = CHUNKED_FROM
    job.part_unit = NV * VL
    # Packing a key is shared by its value heads, but of single tokens it costs less than leaving their order in memory.
    job.n_groups = job.H_v if job.single_tokens else job.H_k


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


# ---- the chunked stretch ---------------------------------------------------------------------------------------

cdef void run_chunked(space *sp, int64_t n_tokens) noexcept nogil:
    cdef operands op
    cdef int64_t t0, m
    op.S_k = sp.job.S_k
    op.ld = sp.ld
    op.state_rows = sp.state_rows
    op.k_in = sp.rows.k_in
    op.q_in = sp.rows.q_in
    op.k_out = sp.rows.k_out if sp.job.per_channel else sp.k
    op.whole = sp.whole
    op.part = sp.part
    op.X = sp.X
    op.X_end = sp.X_end
    for t0 from 0 <= t0 < n_tokens by CHUNK_MAX:
        op.n = min(<int64_t>CHUNK_MAX, n_tokens - t0)
        load_keys(sp, t0, op.n)
        if not sp.job.per_channel:
            pack_blocks(sp.rows.k_in, sp.k, op.n, sp.ld)
            pack_blocks(sp.rows.q_in, sp.q, op.n, sp.ld)
            pair_products(sp.KK, sp.QK, sp.q, sp.k, sp.ld, op.n)
        for m in range(sp.n_heads):
            prepare_head(sp, &op, value_head(sp, m), t0)
            chunk_head(sp, &op, m, t0)


cdef void prepare_head(space *sp, operands *op, int64_t head, int64_t t0) noexcept nogil:
    cdef const gdn_tensor *g = &sp.job.args.g
    cdef float g_scalar[PAIR_LD]
    cdef int64_t i
    load_scalars(sp, op.beta, g_scalar, head, t0, op.n)
    if sp.job.per_channel:
        for i in range(op.n):
            pack_row(sp.rows.a + i * sp.ld, row_of(sp, g, head, t0 + i), g.nb[0], sp.job.S_k, sp.ld)
        prepare_channels(op, &sp.rows, sp.q, sp.k, sp.job.scale)
    else:
        prepare_scalar(op, g_scalar, sp.KK, sp.QK, sp.job.scale)


cdef inline void fetch_ahead(const space *sp, int64_t m, int64_t t_first, int64_t t_stop) noexcept nogil:
    """What value head m reads and writes at tokens [t_first, t_stop), towards the cache; q and k with the first head."""
    cdef const gdn_delta_net_args *args = sp.job.args
    cdef int64_t head = value_head(sp, m), n = min(t_stop, sp.n_tokens) - t_first
    if m == 0:
        fetch_rows(row_of(sp, &args.q, sp.key_head, t_first), args.q.nb[2], n, sp.job.S_k)
        fetch_rows(row_of(sp, &args.k, sp.key_head, t_first), args.k.nb[2], n, sp.job.S_k)
    if sp.job.per_channel:
        fetch_rows(row_of(sp, &args.g, head, t_first), args.g.nb[2], n, sp.job.S_k)
    fetch_rows(columns_of(sp, &args.v, head, t_first), args.v.nb[2], n, sp.n_columns)
    fetch_rows(columns_of(sp, &args.out, head, t_first), args.out.nb[2], n, sp.n_columns)


cdef inline void fetch_rows(const char *row, int64_t nb, int64_t n_rows, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n_rows):
        v_prefetch(<const float *>(row + i * nb), n)


cdef void chunk_head(space *sp, const operands *op, int64_t m, int64_t t0) noexcept nogil:
    """All panels of one head's chunk.  v and out are used where they lie if their rows are whole vectors.  While a panel
    computes, its share of the next chunk's rows is on the way."""
    cdef const gdn_tensor *v = &sp.job.args.v
    cdef const gdn_tensor *out = &sp.job.args.out
    cdef int64_t head = value_head(sp, m), i, j
    cdef int64_t n_panels = (sp.n_columns + NV * VL - 1) // (NV * VL)
    cdef int64_t share = (CHUNK_MAX + n_panels - 1) // n_panels, t_ahead = t0 + CHUNK_MAX
    cdef bint whole = sp.n_columns % VL == 0
    cdef char *v_0 = columns_of(sp, v, head, t0)
    cdef char *out_0 = columns_of(sp, out, head, t0)
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
        fetch_ahead(sp, m, t_ahead, t_ahead + share)
        t_ahead += share
        if sp.n_columns - j > VL:
            chunk_panel_wide(op, state, v_rows + j, v_ld, out_rows + j, out_ld)
        else:
            chunk_panel_narrow(op, state, v_rows + j, v_ld, out_rows + j, out_ld)
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
    cdef char *out_i
    for t0 from t_first <= t0 < sp.n_tokens by TOKENS:
        n = min(<int64_t>TOKENS, sp.n_tokens - t0)
        load_keys(sp, t0, n)
        for m in range(sp.n_heads):
            head = value_head(sp, m)
            load_scalars(sp, beta, g, head, t0, n)
            for i in range(n):
                prepare_token(sp, i, head, t0 + i, beta[i], g[i])
                place_columns(sp, i, head, t0 + i, order != PANELS)
            if order == PANELS:
                steps_in_panels(sp, m, t0, n)
            else:
                steps_in_place(sp, m, t0, n, order)
            for i in range(n):
                out_i = columns_of(sp, out, head, t0 + i)
                if <char *>sp.tokens[i].out != out_i:
                    unpack_row(out_i, out.nb[0], sp.tokens[i].out, sp.n_columns)


cdef void prepare_token(space *sp, int64_t i, int64_t head, int64_t t, float beta, float g) noexcept nogil:
    """Token t, whose q and k are packed in row i, as token i of the block."""
    cdef const gdn_delta_net_args *args = sp.job.args
    cdef token *tok = &sp.tokens[i]
    cdef const float *q = sp.q + i * sp.ld
    cdef vf whole, part, decay
    cdef float one
    cdef int64_t c
    tok.beta = beta
    tok.out_d = sp.job.scale * dot(tok.k, q, sp.ld)
    if not sp.job.per_channel:
        v_store_head(&tok.decay, v_exp_whole_part(v_set(g), &whole, &part), 1)
        tok.out_q = sp.job.scale * tok.decay
        v_store_head(&one, v_and(v_set(1), whole), 1)
        tok.gate = SLOW if one == 1 else FAST
        v_store(tok.part, part)
        return
    tok.gate = PER_CHANNEL
    tok.out_q = sp.job.scale
    pack_row(tok.part, row_of(sp, &args.g, head, t), args.g.nb[0], sp.job.S_k, sp.ld)
    for c from 0 <= c < sp.ld by VL:
        decay = v_exp_whole_part(v_load(tok.part + c), &whole, &part)
        v_store(tok.whole + c, whole)
        v_store(tok.part + c, part)
        v_store(tok.kd + c, decay * v_load(tok.k + c))
        v_store(tok.qd + c, decay * v_load(q + c))


cdef inline void place_columns(space *sp, int64_t i, int64_t head, int64_t t, bint direct) noexcept nogil:
    """Token i's v and out: where they lie if they are contiguous and a step reads no column past the last (direct), else
    in scratch."""
    cdef const gdn_tensor *v = &sp.job.args.v
    cdef const gdn_tensor *out = &sp.job.args.out
    cdef token *tok = &sp.tokens[i]
    tok.v = sp.v + i * sp.columns_ld
    tok.out = sp.out + i * sp.columns_ld
    if direct and v.nb[0] == 4:
        tok.v = <float *>columns_of(sp, v, head, t)
    else:
        pack_row(tok.v, columns_of(sp, v, head, t), v.nb[0], sp.n_columns, sp.columns_ld)
    if direct and out.nb[0] == 4:
        tok.out = <float *>columns_of(sp, out, head, t)


cdef void steps_in_place(space *sp, int64_t m, int64_t t0, int64_t n, int order) noexcept nogil:
    """Tokens [t0, t0 + n) on caller memory: each reads the plane before it and writes its own."""
    cdef plane target, source = plane_after(sp, m, t0 - 1, order) if t0 > 0 else plane_in(sp, m)
    cdef int64_t i
    for i in range(n):
        target = plane_after(sp, m, t0 + i, order)
        if source.p == NULL:
            copy_state(target.p, target.nb, NULL, NULL, sp.job.S_k, sp.n_columns)
            source = target
        if sp.tokens[i].gate == PER_CHANNEL:
            step(sp, &sp.tokens[i], target, source, order, PER_CHANNEL)
        elif sp.tokens[i].gate == SLOW:
            step(sp, &sp.tokens[i], target, source, order, SLOW)
        else:
            step(sp, &sp.tokens[i], target, source, order, FAST)
        source = target


cdef inline void step(const space *sp, const token *t, plane y, plane x, int order, const int gate) noexcept nogil:
    if order == KEYS:
        step_rows(sp, t, y, x, gate)
    else:
        step_columns(sp, t, y, x, gate)


cdef inline void step_rows(const space *sp, const token *t, plane y, plane x, const int gate) noexcept nogil:
    cdef int64_t w = sp.job.S_k // VL
    if w == HELD_MAX:
        rows_step(t, w, y.p, y.nb[1], x.p, x.nb[1], sp.n_columns, HELD_MAX, gate)
    elif w == HELD_MAX // 2:
        rows_step(t, w, y.p, y.nb[1], x.p, x.nb[1], sp.n_columns, HELD_MAX // 2, gate)
    else:
        rows_step(t, w, y.p, y.nb[1], x.p, x.nb[1], sp.n_columns, 0, gate)


cdef inline void step_columns(const space *sp, const token *t, plane y, plane x, const int gate) noexcept nogil:
    cdef int64_t n = sp.n_columns, n_ahead = n if n > NC * VL else 0, j = 0
    while j + NC * VL <= n:
        columns_step(t, sp.job.S_k, y.p, y.nb[0], x.p, x.nb[0], j, n_ahead if j == 0 else 0, NC, True, gate)
        j += NC * VL
    while j + NC // 2 * VL <= n:
        columns_step(t, sp.job.S_k, y.p, y.nb[0], x.p, x.nb[0], j, 0, NC // 2, True, gate)
        j += NC // 2 * VL
    while j < n:
        columns_step(t, sp.job.S_k, y.p, y.nb[0], x.p, x.nb[0], j, 0, 1, True, gate)
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
            if tok.gate == PER_CHANNEL:
                columns_step(&tok, sp.job.S_k, state, 4 * NV * VL, state, 4 * NV * VL, 0, 0, NV, False, PER_CHANNEL)
            elif tok.gate == SLOW:
                columns_step(&tok, sp.job.S_k, state, 4 * NV * VL, state, 4 * NV * VL, 0, 0, NV, False, SLOW)
            else:
                columns_step(&tok, sp.job.S_k, state, 4 * NV * VL, state, 4 * NV * VL, 0, 0, NV, False, FAST)
            tok.v += NV * VL
            tok.out += NV * VL
            state += 4 * panel
        keep_head(sp, m, t0 + i)
