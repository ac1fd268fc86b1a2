# The convolution's door.

cdef struct conv_call:
    gdn_conv_job job
    row_call rows
    int n_workers
    int64_t n_items
    size_t rows_bytes, worker_bytes


cdef gdn_status check_conv(const gdn_conv_args *a, const char *state, const char *state_out) noexcept nogil:
    cdef int64_t channels = a.x.ne[0], n_tokens = a.x.ne[1], n_batch = a.x.ne[2], width = a.weight.ne[0]
    cdef gdn_status status
    if width < 1:
        return fail(a.message, a.message_size, GDN_ERR_SHAPE, "weight: width must be at least 1, got %lld", width)
    if a.activation not in (GDN_ACT_NONE, GDN_ACT_SILU):
        return fail(a.message, a.message_size, GDN_ERR_VALUE, "activation: unknown value %d", a.activation)
    if a.n_threads < 0 or a.reserved != 0:
        return fail(a.message, a.message_size, GDN_ERR_VALUE, "n_threads is %d, reserved %d", a.n_threads, a.reserved)
    if a.n_slots < 1:
        return fail(a.message, a.message_size, GDN_ERR_VALUE, "snapshots must be at least 1, got %lld", a.n_slots)
    status = check_tensor(a.message, a.message_size, "x", &a.x, channels, n_tokens, n_batch, 1, False)
    if status == GDN_OK:
        status = check_tensor(a.message, a.message_size, "weight", &a.weight, width, channels, 1, 1, False)
    if status == GDN_OK and a.bias.data != NULL:
        status = check_tensor(a.message, a.message_size, "bias", &a.bias, channels, 1, 1, 1, False)
    if status == GDN_OK:
        status = check_tensor(a.message, a.message_size, "out", &a.out, channels, n_tokens, n_batch, 1, True)
    if status == GDN_OK and a.state.data != NULL:
        status = check_tensor(a.message, a.message_size, state, &a.state, width - 1, channels, a.state.ne[2],
                              a.state.ne[3] if a.state.ne[2] == 1 else 1, False)
    if status == GDN_OK and a.state_out.data != NULL:
        status = check_tensor(a.message, a.message_size, state_out, &a.state_out, width - 1, channels,
                              a.state_out.ne[2], a.state_out.ne[3] if a.state_out.ne[2] == 1 else 1, True)
    return status


cdef gdn_tensor with_rows(const gdn_tensor *t) noexcept nogil:
    """The tensor with its rows along ne[2], where they may be along ne[3] too."""
    cdef gdn_tensor result = t[0]
    if t.ne[2] == 1:
        result.ne[2], result.nb[2], result.ne[3] = t.ne[3], t.nb[3], 1
    return result


cdef gdn_status plan_conv(const gdn_conv_args *a, conv_call *c, const char *state,
                          const char *state_out) noexcept nogil:
    """Check a call and decide how it is split and how much scratch it needs; the states are called so in messages."""
    cdef gdn_status status
    cdef int64_t n_parts, unit = 4 * level.vl
    if a == NULL:
        return GDN_ERR_NULL
    if a.size != sizeof(gdn_conv_args):
        return GDN_ERR_ABI
    status = check_conv(a, state, state_out)
    if status != GDN_OK:
        return status
    c.rows.n_seqs = a.n_seqs
    c.rows.n_slots = a.n_slots
    c.rows.state = with_rows(&a.state)
    c.rows.state_out = with_rows(&a.state_out)
    c.rows.row_axis = 2
    c.rows.slot_nb = a.slot_nb
    c.rows.rows_in = a.rows_in
    c.rows.rows_out = a.rows_out
    c.rows.cu_seqlens = a.cu_seqlens
    c.rows.n_tokens = a.x.ne[1]
    c.rows.n_batch = a.x.ne[2]
    status = rows_check(&c.rows, a.message, a.message_size)
    if status != GDN_OK:
        return status
    c.job.args = a
    c.job.channels = a.x.ne[0]
    c.job.width = a.weight.ne[0]
    c.job.n_seqs = a.n_seqs
    c.job.n_slots = a.n_slots
    n_parts = max(<int64_t>1, (c.job.channels + unit - 1) // unit)
    # Threads are worth their start from some tens of thousands of values on.
    c.n_workers = choose_threads(a.n_threads, min(a.n_seqs * n_parts, 1 + a.x.ne[1] * a.x.ne[2] * a.x.ne[0] // 16384))
    c.job.n_parts = 1
    if 0 < a.n_seqs < c.n_workers:
        c.job.n_parts = min(n_parts, (c.n_workers + a.n_seqs - 1) // a.n_seqs)
    c.job.part_channels = max(unit, (n_parts + c.job.n_parts - 1) // c.job.n_parts * unit)
    c.job.n_parts = max(<int64_t>1, (c.job.channels + c.job.part_channels - 1) // c.job.part_channels)
    c.n_items = a.n_seqs * c.job.n_parts
    c.n_workers = <int>max(<int64_t>1, min(<int64_t>c.n_workers, c.n_items))
    c.rows_bytes = rows_scratch_size(&c.rows)
    c.worker_bytes = level.conv_scratch(&c.job)
    return GDN_OK


cdef size_t conv_bytes(const conv_call *c) noexcept nogil:
    return 64 + c.rows_bytes + c.n_workers * c.worker_bytes


cdef gdn_status c_causal_conv1d_scratch_size(const gdn_conv_args *a, size_t *n_bytes) noexcept nogil:
    cdef conv_call c
    cdef gdn_status status = plan_conv(a, &c, "state", "state_out") if n_bytes != NULL else GDN_ERR_NULL
    if status == GDN_OK:
        n_bytes[0] = conv_bytes(&c)
    return status


cdef gdn_status c_causal_conv1d(const gdn_conv_args *a) noexcept nogil:
    cdef conv_call c
    cdef gdn_status status = plan_conv(a, &c, "state", "state_out")
    if status == GDN_OK:
        if a.scratch == NULL or a.scratch_size < conv_bytes(&c):
            return fail(a.message, a.message_size, GDN_ERR_SCRATCH, "scratch of %llu bytes is needed, got %llu",
                        <uint64_t>conv_bytes(&c), <uint64_t>a.scratch_size)
        run_conv(&c, <char *>a.scratch)
    return status


cdef void run_conv(conv_call *c, char *scratch) noexcept nogil:
    cdef run r
    scratch += -<intptr_t>scratch & 63
    rows_resolve(&c.rows, scratch, &c.job.state_in, &c.job.state_in_nb, &c.job.state_out)
    r.fn = level.conv
    r.job = &c.job
    r.n_items = c.n_items
    r.claimed = 0
    r.claim = 0
    r.scratch = scratch + c.rows_bytes
    r.scratch_per_worker = c.worker_bytes
    r.flush = True
    run_items(&r, c.n_workers)


# ---- the Python faces ------------------------------------------------------------------------------------------

CONV_ACTIVATIONS = {None: GDN_ACT_NONE, "silu": GDN_ACT_SILU}


cdef class ConvArrays:
    """The arrays of one call, kept alive while C holds their addresses."""
    cdef ndarray x, weight, bias, out, state, state_out
    cdef ndarray cu_seqlens, rows_in, rows_out


cdef int fill_conv(gdn_conv_args *a, ConvArrays arrays, x, weight, bias, activation, cu_seqlens, out,
                   n_threads) except -1:
    a.size = sizeof(gdn_conv_args)
    a.activation = choice(CONV_ACTIVATIONS, activation, "activation")
    a.n_threads = threads_argument(n_threads)
    a.n_slots = 1
    arrays.x = fit(x, "x", 3, False)
    to_c(arrays.x, &a.x)
    arrays.weight = fit(weight, "weight", 2, False)
    to_c(arrays.weight, &a.weight)
    if bias is not None:
        arrays.bias = fit(bias, "bias", 1, False)
        to_c(arrays.bias, &a.bias)
    if cu_seqlens is not None:
        arrays.cu_seqlens = cu_seqlens_argument(cu_seqlens)
        a.cu_seqlens = <const int64_t *>PyArray_DATA(arrays.cu_seqlens)
        a.n_seqs = arrays.cu_seqlens.shape[0] - 1
    else:
        a.n_seqs = a.x.ne[2]
    arrays.out = np.empty((<object>arrays.x).shape, np.float32) if out is None else fit(out, "out", 3, True)
    to_c(arrays.out, &a.out)
    return 0


cdef int call_conv(gdn_conv_args *a, ConvArrays x, str state, str state_out) except -1:
    cdef conv_call c
    cdef char message[256]
    cdef gdn_status status
    cdef arena *scratch
    cdef bytes state_name = state.encode(), state_out_name = state_out.encode()
    cdef tuple inputs = (("weight", x.weight, False), ("bias", x.bias, False), ("cu_seqlens", x.cu_seqlens, False),
                         ("rows_in", x.rows_in, False), ("rows_out", x.rows_out, False))
    message[0] = 0
    a.message = message
    a.message_size = sizeof(message)
    status = plan_conv(a, &c, state_name, state_out_name)
    if status != GDN_OK:
        raise_status(status, message)
    check_overlap("out", x.out, inputs)
    check_overlap("out", x.out, (("x", x.x, True), (state, x.state, False)))
    if x.state_out is not None:
        check_overlap(state_out, x.state_out, inputs)
        check_overlap(state_out, x.state_out, (("x", x.x, False), (state, x.state, True), ("out", x.out, False)))
    scratch = arena_take(conv_bytes(&c))
    with nogil:
        run_conv(&c, scratch.data)
    arena_give(scratch)
    return 0


def causal_conv1d(x, weight, bias=None, state=None, *, activation="silu", snapshots=None, cu_seqlens=None, out=None,
                  state_out=None, n_threads=None):
    """Depthwise causal convolution with carried state: (out, state).

    ``y[t, c] = act(bias[c] + sum_w weight[c, w] * x[t - width + 1 + w, c])``, inputs before the first token from state.

    x, out      (n_seqs, n_tokens, channels) float32, any strides; out may be exactly x
    weight      (channels, width), width >= 1;  bias (channels,) or None
    state       (n_seqs, channels, width - 1): the last inputs, oldest first (ggml's layout); None is zeros
    activation  "silu" or None
    snapshots   K >= 1: the returned state has a leading axis of min(K, longest sequence), at least 1; slot s is the
                window s tokens before the end.  Slots older than their sequence are zeros in an allocated array and
                left untouched in a given state_out, which may have more slots.
    cu_seqlens  (n_seqs + 1,) integers from 0 to the total: the sequences lie packed in arrays of n_seqs = 1
    state_out   may be exactly state; nothing else may overlap

    Raises ValueError (shape, stride, overlap, option) and TypeError (anything but float32) before anything is
    written.  Same result for any n_threads.  Meaning of ggml_concat + ggml_ssm_conv (+ ggml_silu) in llama.cpp.
    """
    cdef gdn_conv_args a
    cdef ConvArrays arrays = ConvArrays()
    cdef int64_t n_slots
    memset(&a, 0, sizeof(a))
    fill_conv(&a, arrays, x, weight, bias, activation, cu_seqlens, out, n_threads)
    if state is not None:
        arrays.state = fit(state, "state", 3, False)
        to_c(arrays.state, &a.state)
        if a.state.ne[2] != a.n_seqs:
            raise ValueError(f"state holds {a.state.ne[2]} sequences, the call has {a.n_seqs}")
    n_slots = 1 if snapshots is None else count_argument(snapshots, "snapshots")
    a.n_slots = max(<int64_t>1, min(n_slots, longest_sequence(a.cu_seqlens, a.n_seqs, a.x.ne[1])))
    arrays.state_out = state_target(
        (a.n_seqs, a.x.ne[0], max(a.weight.ne[0] - 1, <int64_t>0)), a.n_slots, arrays.state, state_out,
        snapshots is not None, &a.state_out, &a.slot_nb)
    call_conv(&a, arrays, "state", "state_out")
    return arrays.out if out is None else out, arrays.state_out if state_out is None else state_out


def causal_conv1d_inplace(x, weight, bias, cache, rows_in, rows_out=None, *, activation="silu", cu_seqlens=None,
                          out=None, n_threads=None):
    """:func:`causal_conv1d` on rows of a window cache, in place; returns out.

    cache       (n_rows, channels, width - 1) float32, any strides, written in place
    rows_in     (n_seqs,) integers: the row every sequence starts from, -1 = zeros
    rows_out    (n_seqs,) or (n_seqs, K): where slot s, the window s tokens before the end, goes; -1 = nowhere; slots
                older than their sequence leave their row untouched.  Default: rows_in.

    Works as if every row of rows_in were read before any row is written.  Raises IndexError for a row outside the
    cache, ValueError for a row written twice, and what causal_conv1d raises, before anything is written.
    """
    cdef gdn_conv_args a
    cdef ConvArrays arrays = ConvArrays()
    memset(&a, 0, sizeof(a))
    fill_conv(&a, arrays, x, weight, bias, activation, cu_seqlens, out, n_threads)
    arrays.state = arrays.state_out = fit(cache, "cache", 3, True)
    to_c(arrays.state, &a.state)
    a.state_out = a.state
    arrays.rows_in = rows_argument(rows_in, "rows_in", a.n_seqs, 1)
    arrays.rows_out = arrays.rows_in if rows_out is None else rows_argument(rows_out, "rows_out", a.n_seqs, 2)
    a.rows_in = <const int64_t *>PyArray_DATA(arrays.rows_in)
    a.rows_out = <const int64_t *>PyArray_DATA(arrays.rows_out)
    a.n_slots = 1 if arrays.rows_out.ndim == 1 else arrays.rows_out.shape[1]
    call_conv(&a, arrays, "cache", "cache")
    return arrays.out if out is None else out
