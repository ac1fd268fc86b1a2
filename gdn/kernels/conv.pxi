# Depthwise causal convolution: one sequence, one part of the channels.  A vector of channels walks over a few tokens
# with its last width - 1 inputs in registers; between token blocks they wait in scratch, so that out may be x.
#
# Needs: simd.pxi, pack.pxi (carve, pack_row, round_up, scratch_cursor), level.pxd (gdn_conv_job), storage.pxi (lanes_load_typed,
# lanes_store_typed, load_type, pack_typed, rounding_at, store_rounded, type_size, v_store_rounded).

cdef enum:
    BLOCK = 16                   # tokens a vector of channels walks over before the next vector's turn


cdef struct conv_buffers:        # a worker's scratch
    int64_t ld                   # channels of a part, whole vectors
    float *history               # [width - 1][ld] inputs before the next token, oldest first; at first those of the row
    float *weight                # [width][ld]
    float *bias                  # [ld]
    vf *window                   # [2 * width], for widths without a kernel of their own
    vf *tokens                   # [tree_tokens] inputs of a tree

cdef struct conv_work_item:
    const gdn_conv_job *job
    int64_t seq, batch, start, n_tokens
    int64_t channel, n_channels
    int64_t n_entries            # of the log that the sequence stands on: log_in[0..n_entries)
    const int64_t *log_in
    const int64_t *log_out       # [n_tokens] entries of the tokens, NULL if none are kept
    conv_buffers buf


cdef size_t carve_conv_buffers(conv_buffers *buf, const gdn_conv_job *job, char *scratch) noexcept nogil:
    """Every buffer's place in scratch; returns the bytes they take.  With scratch NULL that alone."""
    cdef scratch_cursor at
    at.base = scratch
    at.used = 0
    buf.ld = round_up(job.part_channels, VL)
    buf.history = carve(&at, (job.width - 1) * buf.ld)
    buf.weight = carve(&at, job.width * buf.ld)
    buf.bias = carve(&at, buf.ld)
    buf.window = <vf *>carve(&at, 2 * job.width * VL)
    buf.tokens = <vf *>carve(&at, job.tree_tokens * VL)
    return at.used


cdef size_t conv_scratch(const gdn_conv_job *job) noexcept nogil:
    cdef conv_buffers buf
    return carve_conv_buffers(&buf, job, NULL)


cdef void conv_item(const void *job, int64_t i, void *scratch) noexcept nogil:
    cdef conv_work_item item
    carve_conv_buffers(&item.buf, <const gdn_conv_job *>job, <char *>scratch)
    conv_place(&item, <const gdn_conv_job *>job, i)
    conv_load(&item)
    conv_keep(&item)             # before any output: out may be x, and state_out the state
    if item.n_entries > 0:
        conv_skip_log(&item)
    if item.job.args.call.parents != NULL:
        conv_tree(&item)
    else:
        conv_run(&item)


cdef void conv_place(conv_work_item *item, const gdn_conv_job *job, int64_t i) noexcept nogil:
    cdef const int64_t *cu_seqlens = job.args.call.cu_seqlens
    item.job = job
    item.seq = i // job.n_parts
    item.channel = i % job.n_parts * job.part_channels
    item.n_channels = min(job.part_channels, job.channels - item.channel)
    item.batch = 0 if cu_seqlens != NULL else item.seq
    item.start = cu_seqlens[item.seq] if cu_seqlens != NULL else 0
    item.n_tokens = cu_seqlens[item.seq + 1] - item.start if cu_seqlens != NULL else job.args.x.ne[1]
    conv_place_log(item, &job.args.call)


cdef void conv_place_log(conv_work_item *item, const gdn_call *call) noexcept nogil:
    """The sequence's lists."""
    item.log_in = item.log_out = NULL
    item.n_entries = 0
    if call.log_in != NULL:
        item.log_in = call.log_in + item.seq * call.n_log_in
        while item.n_entries < call.n_log_in and item.log_in[item.n_entries] >= 0:
            item.n_entries += 1
    if call.log_out != NULL:
        item.log_out = call.log_out + item.seq * call.n_log_out


cdef void conv_load(conv_work_item *item) noexcept nogil:
    """Weights, bias and the carried inputs of this part, channels contiguous."""
    cdef const gdn_tensor *w = &item.job.args.weight
    cdef const gdn_tensor *b = &item.job.args.bias
    cdef const char *state = item.job.rows.state_in[item.seq]
    cdef const int64_t *nb = item.job.rows.state_in_nb[item.seq]
    load_rows(item, item.buf.weight, <const char *>w.data, w.nb, item.job.width, GDN_TYPE_F32)
    if state != NULL:
        load_rows(item, item.buf.history, state, nb, item.job.width - 1, item.job.args.call.state.type)
    else:
        memset(item.buf.history, 0, (item.job.width - 1) * item.buf.ld * sizeof(float))
    if b.data != NULL:
        pack_row(item.buf.bias, <const char *>b.data + item.channel * b.nb[0], b.nb[0], item.n_channels, item.buf.ld)
    else:
        memset(item.buf.bias, 0, item.buf.ld * sizeof(float))


cdef void load_rows(const conv_work_item *item, float *rows, const char *src, const int64_t *nb, int64_t n,
                    int type) noexcept nogil:
    """n rows of this part's channels; nb: byte strides over rows and channels."""
    cdef int64_t p
    src += item.channel * nb[1]
    if interleaved(nb, n, type) and n == 4:
        load_interleaved(item, rows, src, 4, type)
    elif interleaved(nb, n, type):
        load_interleaved(item, rows, src, 3, type)
    else:
        for p in range(n):
            pack_typed(rows + p * item.buf.ld, src + p * nb[0], nb[1], type, item.n_channels, item.buf.ld)


cdef inline bint interleaved(const int64_t *nb, int64_t n, int type) noexcept nogil:
    """Whether every channel's n numbers lie side by side, for the n that have code of their own: width 4 and its state."""
    return (n == 3 or n == 4) and nb[0] == type_size(type) and nb[1] == n * nb[0]


cdef inline void load_interleaved(const conv_work_item *item, float *rows, const char *src, const int n, int type) noexcept nogil:
    cdef vf block[4]
    cdef float widened[4 * VL]
    cdef int64_t c = 0, size = type_size(type)
    cdef int p
    while type == GDN_TYPE_F32 and c + VL <= item.n_channels:
        v_load_interleaved(block, <const float *>src + n * c, n)
        for p in range(n):
            v_store(rows + p * item.buf.ld + c, block[p])
        c += VL
    while c + VL <= item.n_channels:
        pack_typed(widened, src + n * c * size, size, type, n * VL, n * VL)
        v_load_interleaved(block, widened, n)
        for p in range(n):
            v_store(rows + p * item.buf.ld + c, block[p])
        c += VL
    for p in range(n):
        pack_typed(rows + p * item.buf.ld + c, src + (n * c + p) * size, n * size, type, item.n_channels - c, item.buf.ld - c)


cdef inline char *token_at(const conv_work_item *item, const gdn_tensor *x, int64_t t) noexcept nogil:
    """This part's channels of token t in x or out."""
    return <char *>x.data + item.channel * x.nb[0] + (item.start + t) * x.nb[1] + item.batch * x.nb[2]


cdef inline const char *input_at(const conv_work_item *item, int64_t t, int64_t *nb, int *type) noexcept nogil:
    """This part's channels of token t, t < 0: the log's, and before its oldest entry the row's; nb: bytes between
    them."""
    type[0] = item.job.args.x.type if t >= 0 else GDN_TYPE_F32
    if t >= 0:
        nb[0] = item.job.args.x.nb[0]
        return token_at(item, &item.job.args.x, t)
    if t >= -item.n_entries:
        nb[0] = item.job.args.log_x.nb[0]
        return entry_at(item, item.log_in[t + item.n_entries])
    nb[0] = 4
    return <const char *>(item.buf.history + (t + item.n_entries + item.job.width - 1) * item.buf.ld)


cdef inline char *entry_at(const conv_work_item *item, int64_t entry) noexcept nogil:
    """This part's channels of an entry of the log."""
    cdef const gdn_tensor *x = &item.job.args.log_x
    return <char *>x.data + item.channel * x.nb[0] + entry * x.nb[1]


cdef void conv_keep(const conv_work_item *item) noexcept nogil:
    """Windows to snapshots and checkpoints, inputs to the log."""
    cdef const gdn_state_rows *rows = &item.job.rows
    cdef int64_t s, t, i, c
    cdef char *entry
    for s in range(item.job.n_snapshots):
        keep_window(item, rows.state_out[item.seq * item.job.n_snapshots + s], item.n_tokens - s)
    if not item.job.has_lists:
        return
    for i in range(rows.checkpoint_first[item.seq], rows.checkpoint_first[item.seq + 1]):
        keep_window(item, rows.checkpoints[i].row, rows.checkpoints[i].n)
    if item.log_out != NULL:
        for t in range(item.n_tokens):
            if item.log_out[t] >= 0:
                entry = entry_at(item, item.log_out[t])
                for c in range(item.n_channels):
                    (<float *>(entry + c * item.job.args.log_x.nb[0]))[0] = load_type(
                        token_at(item, &item.job.args.x, t) + c * item.job.args.x.nb[0], item.job.args.x.type)


cdef void keep_window(const conv_work_item *item, char *row, int64_t stop) noexcept nogil:
    """The last width - 1 inputs before token `stop`; row NULL is nowhere."""
    cdef const int64_t *nb = item.job.args.call.state_out.nb
    cdef int64_t n = item.job.width - 1, first = stop - n, p, c, src_nb
    cdef int type = item.job.args.call.state_out.type, src_type
    cdef gdn_rounding r = rounding_at(&item.job.args.call, item.seq, stop)
    cdef const char *src
    if row == NULL:
        return
    row += item.channel * nb[1]
    if interleaved(nb, n, type) and n == 4:
        keep_interleaved(item, row, &r, first, 4, type)
    elif interleaved(nb, n, type):
        keep_interleaved(item, row, &r, first, 3, type)
    else:
        for p in range(n):
            src = input_at(item, first + p, &src_nb, &src_type)
            for c in range(item.n_channels):
                store_rounded(row + p * nb[0] + c * nb[1], load_type(src + c * src_nb, src_type), type, &r,
                              <uint32_t>((item.channel + c) * n + p))


cdef inline void keep_interleaved(const conv_work_item *item, char *row, const gdn_rounding *r, int64_t first, const int n,
                                  int type) noexcept nogil:
    """n inputs from the first on, each channel's side by side."""
    cdef const char *x[4]
    cdef int64_t nb[4]
    cdef int types[4]
    cdef vf block[4]
    cdef float rounded[4 * VL]
    cdef int64_t c = 0, size = type_size(type)
    cdef uint32_t e
    cdef int p
    cdef bint floats = type == GDN_TYPE_F32
    for p in range(n):
        x[p] = input_at(item, first + p, nb + p, types + p)
        floats = floats and types[p] == GDN_TYPE_F32 and nb[p] == 4
    while floats and c + VL <= item.n_channels:
        for p in range(n):
            block[p] = v_load(<const float *>x[p] + c)
        v_store_interleaved(<float *>row + n * c, block, n)
        c += VL
    while c + VL <= item.n_channels:
        for p in range(n):
            block[p] = lanes_load_typed(x[p] + c * nb[p], nb[p], types[p], VL)
        if type == GDN_TYPE_F32:
            v_store_interleaved(<float *>row + n * c, block, n)
        else:
            v_store_interleaved(rounded, block, n)
            for p in range(n):
                e = <uint32_t>((item.channel + c) * n + p * VL)
                if type == GDN_TYPE_BF16:
                    v_store_rounded(row + (n * c + p * VL) * 2, v_load(rounded + p * VL), GDN_TYPE_BF16, r, e, 1)
                else:
                    v_store_rounded(row + (n * c + p * VL) * 2, v_load(rounded + p * VL), GDN_TYPE_F16, r, e, 1)
        c += VL
    while c < item.n_channels:
        for p in range(n):
            store_rounded(row + (n * c + p) * size, load_type(x[p] + c * nb[p], types[p]), type, r,
                          <uint32_t>((item.channel + c) * n + p))
        c += 1


cdef void conv_skip_log(conv_work_item *item) noexcept nogil:
    """The history from before the log to behind it."""
    cdef int64_t n = item.job.width - 1, p, nb
    cdef int type
    cdef const char *src
    for p in range(n):                       # ascending: what is read of the old history lies ahead
        src = input_at(item, p - n, &nb, &type)
        pack_row(item.buf.history + p * item.buf.ld, src, nb, item.n_channels, item.buf.ld)


cdef void conv_tree(conv_work_item *item) noexcept nogil:
    """Tokens whose window is their last width - 1 ancestors, then what is before the tree."""
    cdef const gdn_conv_args *args = item.job.args
    cdef const int64_t *parents = args.call.parents + item.batch * args.x.ne[1] + item.start
    cdef int64_t width = item.job.width, c, t, p, j, lanes
    cdef vf *window = item.buf.window
    cdef vf y
    for c from 0 <= c < item.n_channels by VL:
        lanes = min(<int64_t>VL, item.n_channels - c)
        for t in range(item.n_tokens):
            item.buf.tokens[t] = lanes_load_typed(token_at(item, &args.x, t) + c * args.x.nb[0], args.x.nb[0], args.x.type,
                                                  lanes)
        for t in range(item.n_tokens):
            j = t
            for p in range(width - 1, -1, -1):
                window[p] = item.buf.tokens[j] if j >= 0 else v_load(item.buf.history + (j + width - 1) * item.buf.ld + c)
                j = parents[j] if j >= 0 else j - 1
            y = v_load(item.buf.bias + c)
            for p in range(width):
                y += v_load(item.buf.weight + p * item.buf.ld + c) * window[p]
            if args.activation == GDN_ACT_SILU:
                y = v_silu(y)
            lanes_store_typed(token_at(item, &args.out, t) + c * args.out.nb[0], args.out.nb[0], args.out.type, y, lanes)


cdef void conv_run(conv_work_item *item) noexcept nogil:
    cdef vf window[8]
    cdef int64_t t0, c, n
    cdef bint floats = item.job.args.x.type == GDN_TYPE_F32 and item.job.args.out.type == GDN_TYPE_F32
    for t0 from 0 <= t0 < item.n_tokens by BLOCK:
        n = min(<int64_t>BLOCK, item.n_tokens - t0)
        for c from 0 <= c < item.n_channels by VL:
            if item.job.width == 4 and floats:
                conv_walk(item, window, t0, n, c, 4, True)
            elif item.job.width == 4:
                conv_walk(item, window, t0, n, c, 4, False)
            else:
                conv_walk(item, item.buf.window, t0, n, c, <int>item.job.width, False)


cdef inline void conv_walk(const conv_work_item *item, vf *window, int64_t t0, int64_t n, int64_t c,
                           const int width, const bint floats) noexcept nogil:
    """Tokens [t0, t0 + n) of channels [c, c + VL).  window: room for width inputs and width weights; floats: x and out
    are known to be float32."""
    cdef const gdn_tensor *x = &item.job.args.x
    cdef const gdn_tensor *out = &item.job.args.out
    cdef vf *weight = window + width
    cdef vf y
    cdef int64_t t, lanes = min(<int64_t>VL, item.n_channels - c)
    cdef const char *x_t = token_at(item, x, t0) + c * x.nb[0]
    cdef char *out_t = token_at(item, out, t0) + c * out.nb[0]
    cdef bint silu = item.job.args.activation == GDN_ACT_SILU
    cdef int p
    for p in range(width):
        weight[p] = v_load(item.buf.weight + p * item.buf.ld + c)
    for p in range(width - 1):
        window[p] = v_load(item.buf.history + p * item.buf.ld + c)
    for t in range(n):
        window[width - 1] = lanes_load_typed(x_t, x.nb[0], GDN_TYPE_F32 if floats else x.type, lanes)
        y = v_load(item.buf.bias + c)
        for p in range(width):
            y += weight[p] * window[p]
        if silu:
            y = v_silu(y)
        lanes_store_typed(out_t, out.nb[0], GDN_TYPE_F32 if floats else out.type, y, lanes)
        for p in range(width - 1):
            window[p] = window[p + 1]
        x_t += x.nb[1]
        out_t += out.nb[1]
    for p in range(width - 1):
        v_store(item.buf.history + p * item.buf.ld + c, window[p])
