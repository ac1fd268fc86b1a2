# Depthwise causal convolution: one sequence, one part of the channels.  A vector of channels walks over a few tokens
# with its last width - 1 inputs in registers; between token blocks they wait in scratch, so that out may be x.

cdef enum:
    BLOCK = 16                   # tokens a vector of channels walks over before the next vector's turn


cdef struct conv_space:
    const gdn_conv_job *job
    int64_t seq, batch, start, n_tokens
    int64_t channel, n_channels, ld
    float *history               # [width - 1][ld] inputs before the next token, oldest first
    float *weight                # [width][ld]
    float *bias                  # [ld]
    vf *window                   # [2 * width], for widths without a kernel of their own


cdef char *conv_lay_out(conv_space *sp, const gdn_conv_job *job, char *scratch) noexcept nogil:
    cdef char *at = scratch
    sp.job = job
    sp.ld = round_up(job.part_channels, VL)
    sp.history = carve(&at, (job.width - 1) * sp.ld)
    sp.weight = carve(&at, job.width * sp.ld)
    sp.bias = carve(&at, sp.ld)
    sp.window = <vf *>carve(&at, 2 * job.width * VL)
    return at


cdef size_t conv_scratch(const gdn_conv_job *job) noexcept nogil:
    cdef conv_space sp
    return conv_lay_out(&sp, job, NULL) - <char *>NULL


cdef void conv_item(const void *job, int64_t item, void *scratch) noexcept nogil:
    cdef conv_space sp
    conv_lay_out(&sp, <const gdn_conv_job *>job, <char *>scratch)
    conv_place(&sp, item)
    conv_load(&sp)
    conv_keep(&sp)               # before any output: out may be x, and state_out the state
    conv_run(&sp)


cdef void conv_place(conv_space *sp, int64_t item) noexcept nogil:
    cdef const gdn_conv_job *job = sp.job
    cdef const int64_t *cu_seqlens = job.args.cu_seqlens
    sp.seq = item // job.n_parts
    sp.channel = item % job.n_parts * job.part_channels
    sp.n_channels = min(job.part_channels, job.channels - sp.channel)
    sp.batch = 0 if cu_seqlens != NULL else sp.seq
    sp.start = cu_seqlens[sp.seq] if cu_seqlens != NULL else 0
    sp.n_tokens = cu_seqlens[sp.seq + 1] - sp.start if cu_seqlens != NULL else job.args.x.ne[1]


cdef void conv_load(conv_space *sp) noexcept nogil:
    """Weights, bias and the carried inputs of this part, channels contiguous."""
    cdef const gdn_tensor *w = &sp.job.args.weight
    cdef const gdn_tensor *b = &sp.job.args.bias
    cdef const char *state = sp.job.rows.state_in[sp.seq]
    cdef const int64_t *nb = sp.job.rows.state_in_nb[sp.seq]
    load_rows(sp, sp.weight, <const char *>w.data, w.nb, sp.job.width)
    if state != NULL:
        load_rows(sp, sp.history, state, nb, sp.job.width - 1)
    else:
        memset(sp.history, 0, (sp.job.width - 1) * sp.ld * sizeof(float))
    if b.data != NULL:
        pack_row(sp.bias, <const char *>b.data + sp.channel * b.nb[0], b.nb[0], sp.n_channels, sp.ld)
    else:
        memset(sp.bias, 0, sp.ld * sizeof(float))


cdef void load_rows(const conv_space *sp, float *rows, const char *src, const int64_t *nb, int64_t n) noexcept nogil:
    """n rows of this part's channels; nb: byte strides over rows and channels."""
    cdef int64_t p
    src += sp.channel * nb[1]
    if interleaved(nb, n) and n == 4:
        load_interleaved(sp, rows, <const float *>src, 4)
    elif interleaved(nb, n):
        load_interleaved(sp, rows, <const float *>src, 3)
    else:
        for p in range(n):
            pack_row(rows + p * sp.ld, src + p * nb[0], nb[1], sp.n_channels, sp.ld)


cdef inline bint interleaved(const int64_t *nb, int64_t n) noexcept nogil:
    """Whether every channel's n numbers lie side by side, for the n that have code of their own: width 4 and its state."""
    return (n == 3 or n == 4) and nb[0] == 4 and nb[1] == 4 * n


cdef inline void load_interleaved(const conv_space *sp, float *rows, const float *src, const int n) noexcept nogil:
    cdef vf block[4]
    cdef int64_t c = 0
    cdef int p
    while c + VL <= sp.n_channels:
        v_load_interleaved(block, src + n * c, n)
        for p in range(n):
            v_store(rows + p * sp.ld + c, block[p])
        c += VL
    for p in range(n):
        pack_row(rows + p * sp.ld + c, <const char *>(src + n * c + p), 4 * n, sp.n_channels - c, sp.ld - c)


cdef inline char *token_at(const conv_space *sp, const gdn_tensor *x, int64_t t) noexcept nogil:
    """This part's channels of token t in x or out."""
    return <char *>x.data + sp.channel * x.nb[0] + (sp.start + t) * x.nb[1] + sp.batch * x.nb[2]


cdef inline const char *input_at(const conv_space *sp, int64_t t, int64_t *nb) noexcept nogil:
    """This part's channels of token t, t < 0: a carried one; nb: bytes between them."""
    nb[0] = 4 if t < 0 else sp.job.args.x.nb[0]
    return <const char *>(sp.history + (t + sp.job.width - 1) * sp.ld) if t < 0 else token_at(sp, &sp.job.args.x, t)


cdef void conv_keep(const conv_space *sp) noexcept nogil:
    """Slot s: the last width - 1 inputs as of s tokens before the end."""
    cdef const int64_t *nb = sp.job.args.state_out.nb
    cdef int64_t n = sp.job.width - 1, slot, first, p, c, src_nb
    cdef char *row
    cdef const char *src
    for slot in range(sp.job.n_snapshots):
        row = sp.job.rows.state_out[sp.seq * sp.job.n_snapshots + slot]
        if row == NULL:
            continue
        row += sp.channel * nb[1]
        first = sp.n_tokens - slot - n
        if interleaved(nb, n) and sp.job.args.x.nb[0] == 4:
            if n == 4:
                keep_interleaved(sp, <float *>row, first, 4)
            else:
                keep_interleaved(sp, <float *>row, first, 3)
            continue
        for p in range(n):
            src = input_at(sp, first + p, &src_nb)
            for c in range(sp.n_channels):
                (<float *>(row + p * nb[0] + c * nb[1]))[0] = at(src + c * src_nb)


cdef inline void keep_interleaved(const conv_space *sp, float *row, int64_t first, const int n) noexcept nogil:
    """n inputs from the first on, each channel's side by side."""
    cdef const float *x[4]
    cdef vf block[4]
    cdef int64_t c = 0, nb
    cdef int p
    for p in range(n):
        x[p] = <const float *>input_at(sp, first + p, &nb)
    while c + VL <= sp.n_channels:
        for p in range(n):
            block[p] = v_load(x[p] + c)
        v_store_interleaved(row + n * c, block, n)
        c += VL
    while c < sp.n_channels:
        for p in range(n):
            row[n * c + p] = x[p][c]
        c += 1


cdef void conv_run(conv_space *sp) noexcept nogil:
    cdef vf window[8]
    cdef int64_t t0, c, n
    for t0 from 0 <= t0 < sp.n_tokens by BLOCK:
        n = min(<int64_t>BLOCK, sp.n_tokens - t0)
        for c from 0 <= c < sp.n_channels by VL:
            if sp.job.width == 4:
                conv_walk(sp, window, t0, n, c, 4)
            else:
                conv_walk(sp, sp.window, t0, n, c, <int>sp.job.width)


cdef inline void conv_walk(const conv_space *sp, vf *window, int64_t t0, int64_t n, int64_t c,
                           const int width) noexcept nogil:
    """Tokens [t0, t0 + n) of channels [c, c + VL).  window: room for width inputs and width weights."""
    cdef const gdn_tensor *x = &sp.job.args.x
    cdef const gdn_tensor *out = &sp.job.args.out
    cdef vf *weight = window + width
    cdef vf y
    cdef int64_t t, lanes = min(<int64_t>VL, sp.n_channels - c)
    cdef const char *x_t = token_at(sp, x, t0) + c * x.nb[0]
    cdef char *out_t = token_at(sp, out, t0) + c * out.nb[0]
    cdef bint silu = sp.job.args.activation == GDN_ACT_SILU
    cdef int p
    for p in range(width):
        weight[p] = v_load(sp.weight + p * sp.ld + c)
    for p in range(width - 1):
        window[p] = v_load(sp.history + p * sp.ld + c)
    for t in range(n):
        window[width - 1] = lanes_load(x_t, x.nb[0], lanes)
        y = v_load(sp.bias + c)
        for p in range(width):
            y += weight[p] * window[p]
        if silu:
            y = v_silu(y)
        lanes_store(out_t, out.nb[0], y, lanes)
        for p in range(width - 1):
            window[p] = window[p + 1]
        x_t += x.nb[1]
        out_t += out.nb[1]
    for p in range(width - 1):
        v_store(sp.history + p * sp.ld + c, window[p])
