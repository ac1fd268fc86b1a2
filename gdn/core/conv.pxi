# The convolution: one checked, planned and run call, and its Python faces.

cdef struct conv_call:
    gdn_conv_job job
    call_plan plan


cdef gdn_status check_conv(const gdn_conv_args *a, const char *state, const char *state_out,
                           const refusal *why) noexcept nogil:
    cdef int64_t channels = a.x.ne[0], n_tokens = a.x.ne[1], n_batch = a.x.ne[2], width = a.weight.ne[0]
    if width < 1:
        return fail(why, GDN_ERR_SHAPE, "weight: width must be at least 1, got %lld", width)
    return (check_option(why, "activation", a.activation, GDN_ACT_NONE, GDN_ACT_SILU)
            or check_counts(why, a.n_threads, a.reserved, a.n_snapshots)
            or check_tensor(why, "x", &a.x, channels, n_tokens, n_batch, 1, False)
            or check_tensor(why, "weight", &a.weight, width, channels, 1, 1, False)
            or (check_tensor(why, "bias", &a.bias, channels, 1, 1, 1, False) if a.bias.data != NULL else GDN_OK)
            or check_tensor(why, "out", &a.out, channels, n_tokens, n_batch, 1, True)
            or check_windows(why, state, &a.state, width, channels, False)
            or check_windows(why, state_out, &a.state_out, width, channels, True))


cdef gdn_status check_windows(const refusal *why, const char *name, const gdn_tensor *t, int64_t width,
                              int64_t channels, bint writable) noexcept nogil:
    """Windows, if given, of any number of rows along ne[2] or ne[3]."""
    if t.data == NULL:
        return GDN_OK
    return check_tensor(why, name, t, width - 1, channels, t.ne[2], t.ne[3] if t.ne[2] == 1 else 1, writable)


cdef gdn_tensor with_rows(const gdn_tensor *t) noexcept nogil:
    """The tensor with its rows along ne[3], where they may be along ne[2] too."""
    cdef gdn_tensor result = t[0]
    if t.ne[2] != 1:
        result.ne[3], result.nb[3], result.ne[2] = t.ne[2], t.nb[2], 1
    return result


cdef gdn_status plan_conv(const gdn_conv_args *a, conv_call *c, const char *state,
                          const char *state_out) noexcept nogil:
    """Check a call and decide how it is split and how much scratch it needs; the states are called so in messages."""
    cdef call_plan *plan = &c.plan
    cdef gdn_status status
    cdef int64_t n_parts, unit = 4 * level.vl
    if a == NULL:
        return GDN_ERR_NULL
    if a.size != sizeof(gdn_conv_args):
        return GDN_ERR_ABI
    plan.why.text, plan.why.size = a.message, a.message_size
    plan.rows.n_seqs, plan.rows.n_snapshots, plan.rows.snapshot_nb = a.n_seqs, a.n_snapshots, a.snapshot_nb
    plan.rows.state, plan.rows.state_out = with_rows(&a.state), with_rows(&a.state_out)
    plan.rows.rows_in, plan.rows.rows_out, plan.rows.cu_seqlens = a.rows_in, a.rows_out, a.cu_seqlens
    plan.rows.n_tokens, plan.rows.n_batch = a.x.ne[1], a.x.ne[2]
    status = check_conv(a, state, state_out, &plan.why) or rows_check(&plan.rows, &plan.why)
    if status != GDN_OK:
        return status
    c.job.args = a
    c.job.channels = a.x.ne[0]
    c.job.width = a.weight.ne[0]
    c.job.n_seqs = a.n_seqs
    c.job.n_snapshots = a.n_snapshots
    n_parts = max(<int64_t>1, (c.job.channels + unit - 1) // unit)
    # Threads are worth their start from some tens of thousands of values on.
    plan.n_workers = choose_threads(a.n_threads, min(a.n_seqs * n_parts, 1 + a.x.ne[1] * a.x.ne[2] * a.x.ne[0] // 16384))
    c.job.n_parts = 1
    if 0 < a.n_seqs < plan.n_workers:
        c.job.n_parts = min(n_parts, (plan.n_workers + a.n_seqs - 1) // a.n_seqs)
    c.job.part_channels = max(unit, (n_parts + c.job.n_parts - 1) // c.job.n_parts * unit)
    c.job.n_parts = max(<int64_t>1, (c.job.channels + c.job.part_channels - 1) // c.job.part_channels)
    plan.n_items = a.n_seqs * c.job.n_parts
    plan.n_workers = <int>max(<int64_t>1, min(<int64_t>plan.n_workers, plan.n_items))
    plan.rows_bytes = rows_scratch_size(&plan.rows)
    plan.worker_bytes = level.conv_scratch(&c.job)
    return GDN_OK


cdef gdn_status c_causal_conv1d_scratch_size(const gdn_conv_args *a, size_t *n_bytes) noexcept nogil:
    cdef conv_call c
    cdef gdn_status status = plan_conv(a, &c, "state", "state_out") if n_bytes != NULL else GDN_ERR_NULL
    if status == GDN_OK:
        n_bytes[0] = plan_bytes(&c.plan)
    return status


cdef gdn_status c_causal_conv1d(const gdn_conv_args *a) noexcept nogil:
    cdef conv_call c
    cdef gdn_status status = (plan_conv(a, &c, "state", "state_out")
                              or check_scratch(&c.plan, a.scratch, a.scratch_size))
    if status == GDN_OK:
        run_conv(&c, a.scratch)
    return status


cdef void run_conv(conv_call *c, void *scratch) noexcept nogil:
    run_plan(&c.plan, level.conv, &c.job, &c.job.rows, False, scratch)


# ---- the Python faces ------------------------------------------------------------------------------------------

CONV_ACTIVATIONS = {None: GDN_ACT_NONE, "silu": GDN_ACT_SILU}


cdef class ConvArrays(CallArrays):
    cdef ndarray x, weight, bias


cdef int fill_conv(gdn_conv_args *a, ConvArrays arrays, x, weight, bias, activation, cu_seqlens, out,
                   n_threads) except -1:
    a.size = sizeof(gdn_conv_args)
    a.activation = choice(CONV_ACTIVATIONS, activation, "activation")
    a.n_threads = threads_argument(n_threads)
    a.n_snapshots = 1
    a.message, a.message_size = TOLD, sizeof(TOLD)
    arrays.x = fit(x, "x", 3, False)
    to_c(arrays.x, &a.x)
    arrays.weight = fit(weight, "weight", 2, False)
    to_c(arrays.weight, &a.weight)
    if bias is not None:
        arrays.bias = fit(bias, "bias", 1, False)
        to_c(arrays.bias, &a.bias)
    a.n_seqs = fill_lengths(arrays, cu_seqlens, a.x.ne[2], &a.cu_seqlens)
    arrays.out = np.empty((<object>arrays.x).shape, np.float32) if out is None else fit(out, "out", 3, True)
    to_c(arrays.out, &a.out)
    return 0


cdef int call_conv(gdn_conv_args *a, ConvArrays c, str state, str state_out) except -1:
    cdef conv_call call
    cdef arena *scratch
    cdef bytes state_name = state.encode(), state_out_name = state_out.encode()
    check(plan_conv(a, &call, state_name, state_out_name))
    check_outputs(c, (("weight", c.weight, False), ("bias", c.bias, False)), "x", c.x, state, state_out)
    scratch = arena_take(plan_bytes(&call.plan))
    with nogil:
        run_conv(&call, scratch.data)
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
    memset(&a, 0, sizeof(a))
    fill_conv(&a, arrays, x, weight, bias, activation, cu_seqlens, out, n_threads)
    a.n_snapshots = fill_states(arrays, state, state_out, snapshots,
                                (a.n_seqs, a.x.ne[0], max(a.weight.ne[0] - 1, <int64_t>0)),
                                longest_sequence(a.cu_seqlens, a.n_seqs, a.x.ne[1]), &a.state, &a.state_out,
                                &a.snapshot_nb)
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
    a.n_snapshots = fill_cache(arrays, cache, 3, rows_in, rows_out, a.n_seqs, &a.state, &a.state_out, &a.rows_in,
                               &a.rows_out)
    call_conv(&a, arrays, "cache", "cache")
    return arrays.out if out is None else out
