# The convolution: a call checked and planned, and its Python faces.
#
# Needs: status.pxi (check_counts, check_option, check_tensor, check_typed, choice), parallel.pxi (choose_threads,
# threads_argument), dispatch.pxi (level), cache_rows.pxi, states.pxi (CallArrays, call_on_states, fill_cache, fill_call,
# fill_rounding, fill_states, longest_sequence), log.pxi (TokenLog, check_lists, check_log_tensor, fill_log, fill_log_tensor).

cdef gdn_status check_conv(const gdn_conv_args *a, state_call *c, bint in_place) noexcept nogil:
    """Every check of a call but its rows."""
    cdef int64_t channels = a.x.ne[0], n_tokens = a.x.ne[1], n_batch = a.x.ne[2], width = a.weight.ne[0]
    cdef const error_buffer *error = &c.error
    if width < 1:
        return fail(error, GDN_ERR_SHAPE, "weight: width must be at least 1, got %lld", width)
    return (check_option(error, "activation", a.activation, GDN_ACT_NONE, GDN_ACT_SILU)
            or check_counts(error, a.n_threads, a.reserved, a.call.n_snapshots)
            or check_typed(error, "x", &a.x, channels, n_tokens, n_batch, 1, False)
            or check_tensor(error, "weight", &a.weight, width, channels, 1, 1, False)
            or (check_tensor(error, "bias", &a.bias, channels, 1, 1, 1, False) if a.bias.data != NULL else GDN_OK)
            or check_typed(error, "out", &a.out, channels, n_tokens, n_batch, 1, True)
            or check_states(c, width - 1, channels, 1, in_place)
            or check_log_tensor(c, "log_x", &a.log_x, channels, a.log_x.ne[1], 1))


cdef void rows_last(gdn_tensor *t) noexcept nogil:
    """Windows' rows along ne[3], where they may be along ne[2] too."""
    if t.ne[2] != 1 and t.ne[3] == 1:
        t.ne[3], t.nb[3], t.ne[2] = t.ne[2], t.nb[2], 1


cdef gdn_status plan_conv(const void *args, state_call *c, bint in_place) noexcept nogil:
    """Check a call and decide how it is split and how much scratch it needs."""
    cdef const gdn_conv_args *a
    cdef gdn_conv_job *job = &c.conv
    cdef gdn_status status = read_size(&args, GDN_CONV_ARGS_LEAST, sizeof(gdn_conv_args), &c.conv_args)
    cdef int64_t n_parts, unit = 4 * level.vl
    if status != GDN_OK:
        return status
    a = <const gdn_conv_args *>args
    begin_call(c, &a.call, a.x.ne[1], a.x.ne[2])
    rows_last(&c.state)
    rows_last(&c.state_out)
    status = check_conv(a, c, in_place) or check_rows(c) or check_lists(c, "log_x", a.log_x.data != NULL, a.log_x.ne[1])
    if status != GDN_OK:
        return status
    job.has_lists = has_lists(&a.call)
    job.tree_tokens = 0 if a.call.parents == NULL else longest_sequence(a.call.cu_seqlens, a.call.n_seqs, a.x.ne[1])
    job.args = a
    job.channels = a.x.ne[0]
    job.width = a.weight.ne[0]
    job.n_seqs = a.call.n_seqs
    job.n_snapshots = a.call.n_snapshots
    n_parts = max(<int64_t>1, (job.channels + unit - 1) // unit)
    # Threads are worth their start from some tens of thousands of values on.
    c.asked = a.n_threads
    c.n_workers = choose_threads(a.n_threads, min(job.n_seqs * n_parts, 1 + a.x.ne[1] * a.x.ne[2] * a.x.ne[0] // 16384))
    job.n_parts = 1
    if 0 < job.n_seqs < c.n_workers:
        job.n_parts = min(n_parts, (c.n_workers + job.n_seqs - 1) // job.n_seqs)
    job.part_channels = max(unit, (n_parts + job.n_parts - 1) // job.n_parts * unit)
    job.n_parts = max(<int64_t>1, (job.channels + job.part_channels - 1) // job.part_channels)
    c.item, c.job, c.rows, c.claim = level.conv, job, &job.rows, False
    finish_plan(c, job.n_seqs * job.n_parts, level.conv_scratch(job))
    return GDN_OK


cdef gdn_status c_causal_conv1d_scratch_size(const gdn_conv_args *a, size_t *n_bytes) noexcept nogil:
    return c_scratch_size(plan_conv, a, n_bytes)


cdef gdn_status c_causal_conv1d(const gdn_conv_args *a) noexcept nogil:
    return c_call(plan_conv, a)


# ---- the Python faces ------------------------------------------------------------------------------------------

CONV_ACTIVATIONS = {None: GDN_ACT_NONE, "silu": GDN_ACT_SILU}


cdef int fill_conv(gdn_conv_args *a, CallArrays arrays, x, weight, bias, activation, cu_seqlens, out,
                   n_threads) except -1:
    """x, out (n_seqs, n_tokens, channels), weight (channels, width), bias (channels,) or None."""
    cdef ndarray weight_ = fit(weight, "weight", 2, False), bias_ = None
    a.size = sizeof(gdn_conv_args)
    a.activation = choice(CONV_ACTIVATIONS, activation, "activation")
    a.n_threads = threads_argument(n_threads)
    arrays.x_name, arrays.x = "x", fit_typed(x, "x", 3, False)
    to_c(arrays.x, &a.x)
    to_c(weight_, &a.weight)
    if bias is not None:
        bias_ = fit(bias, "bias", 1, False)
        to_c(bias_, &a.bias)
    arrays.inputs = (("weight", weight_, False), ("bias", bias_, False))
    fill_call(&a.call, arrays, cu_seqlens, a.x.ne[2])
    arrays.out = np.empty((<object>arrays.x).shape, result_type(arrays.x)) if out is None else fit_typed(out, "out", 3, True)
    to_c(arrays.out, &a.out)
    return 0


def causal_conv1d(x, weight, bias=None, state=None, *, activation="silu", snapshots=None, cu_seqlens=None, out=None,
                  state_out=None, n_threads=None, rounding="nearest", seed=None):
    """Depthwise causal convolution with carried state: (out, state).

    ``y[t, c] = act(bias[c] + sum_w weight[c, w] * x[t - width + 1 + w, c])``, inputs before the first token from state.

    x, out      (n_seqs, n_tokens, channels) float32, float16 or bfloat16, any strides; out may be exactly x
    weight      (channels, width), width >= 1;  bias (channels,) or None; float32
    state       (n_seqs, channels, width - 1), of any of x's types: the last inputs, oldest first (ggml's layout); None is zeros
    activation  "silu" or None
    snapshots   K >= 1: the returned state has a leading axis of min(K, longest sequence), at least 1; snapshot s is
                the window s tokens before the end.  Snapshots older than their sequence are zeros in an allocated array and
                left untouched in a given state_out, which may have more of them.
    cu_seqlens  (n_seqs + 1,) integers from 0 to the total: the sequences lie packed in arrays of n_seqs = 1
    state_out   may be exactly state; nothing else may overlap
    rounding, seed    of a state, as in :func:`gated_delta_net`, which says what types allocated results have

    Raises ValueError (shape, stride, overlap, option) and TypeError (other types) before anything is
    written.  Same result for any n_threads.  Meaning of ggml_concat + ggml_ssm_conv (+ ggml_silu) in llama.cpp.
    """
    cdef gdn_conv_args a
    cdef CallArrays arrays = CallArrays()
    memset(&a, 0, sizeof(a))
    fill_conv(&a, arrays, x, weight, bias, activation, cu_seqlens, out, n_threads)
    fill_rounding(&a.call, rounding, seed)
    fill_states(&a.call, arrays, state, state_out, snapshots,
                (a.call.n_seqs, a.x.ne[0], max(a.weight.ne[0] - 1, <int64_t>0)), a.x.ne[1])
    call_on_states(plan_conv, &a, arrays, False)
    return arrays.out if out is None else out, arrays.state_out if state_out is None else state_out


cdef int fill_conv_log(gdn_conv_args *a, CallArrays arrays, TokenLog log) except -1:
    if log.x is None:
        raise ValueError("log has no x, the convolution's inputs")
    return fill_log_tensor(log.x, "x", arrays, &a.log_x)


def causal_conv1d_inplace(x, weight, bias, cache, rows_in, rows_out=None, *, activation="silu", cu_seqlens=None,
                          out=None, n_threads=None, log=None, log_in=None, log_out=None, parents=None,
                          checkpoints=None, rounding="nearest", seed=None):
    """:func:`causal_conv1d` on rows of a window cache, in place; returns out.

    cache       (n_rows, channels, width - 1) float32, float16 or bfloat16, any strides, written in place
    rows_in     (n_seqs,) integers: the row every sequence starts from, -1 = zeros
    rows_out    (n_seqs,) or (n_seqs, K): where snapshot s, the window s tokens before the end, goes; -1 = nowhere; those
                older than their sequence leave their row untouched.  Default: rows_in.

    log, log_in, log_out, parents, checkpoints    as in :func:`gated_delta_net_inplace`, on the log's x: a token's window
                is its last width - 1 ancestors, the log's entries, and before them the row's window

    Works as if every row of rows_in were read before any row is written.  Raises IndexError for a row or an entry out of
    range, ValueError for one named twice, and what causal_conv1d raises, before anything is written.
    """
    cdef gdn_conv_args a
    cdef CallArrays arrays = CallArrays()
    memset(&a, 0, sizeof(a))
    fill_conv(&a, arrays, x, weight, bias, activation, cu_seqlens, out, n_threads)
    fill_rounding(&a.call, rounding, seed)
    fill_cache(&a.call, arrays, cache, 3, rows_in, rows_out, log is not None or parents is not None)
    fill_log(&a.call, arrays, log, log_in, log_out, parents, checkpoints, a.x.ne[1])
    if log is not None:
        fill_conv_log(&a, arrays, log)
    call_on_states(plan_conv, &a, arrays, True)
    return arrays.out if out is None else out
