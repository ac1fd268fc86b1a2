# The delta rule: a call checked and planned, and its Python faces.
#
# Needs: status.pxi (check_counts, check_eps, check_option, check_typed, choice, float_argument, type_size), parallel.pxi
# (choose_threads, threads_argument), dispatch.pxi (level), cache_rows.pxi, states.pxi (CallArrays, call_on_states, fill_cache,
# fill_call, fill_rounding, fill_states), log.pxi.

cdef gdn_status check_delta(const gdn_delta_net_args *a, state_call *c, bint in_place) noexcept nogil:
    """Every check of a call but its rows; fills the job's extents and options."""
    cdef gdn_delta_job *job = &c.delta
    cdef const error_buffer *error = &c.error
    cdef int64_t n_batch = a.q.ne[3], n_tokens = a.q.ne[2]
    job.args = a
    job.S_k = a.q.ne[0]
    job.H_k = a.q.ne[1]
    job.S_v = a.v.ne[0]
    job.H_v = a.v.ne[1]
    job.n_seqs = a.call.n_seqs
    job.n_snapshots = a.call.n_snapshots
    job.per_channel = a.g.ne[0] != 1
    job.tiled = a.head_map == GDN_HEAD_TILED
    job.single_tokens = n_tokens * n_batch <= job.n_seqs
    job.scale = a.scale if a.flags & GDN_SCALE_GIVEN else 1 / sqrtf(<float>job.S_k)
    return (check_delta_options(a, job, error)
            or check_typed(error, "q", &a.q, job.S_k, job.H_k, n_tokens, n_batch, False)
            or check_typed(error, "k", &a.k, job.S_k, job.H_k, n_tokens, n_batch, False)
            or check_typed(error, "v", &a.v, job.S_v, job.H_v, n_tokens, n_batch, False)
            or check_typed(error, "g", &a.g, job.S_k if job.per_channel else 1, job.H_v, n_tokens, n_batch, False)
            or check_typed(error, "beta", &a.beta, 1, job.H_v, n_tokens, n_batch, False)
            or check_typed(error, "out", &a.out, job.S_v, job.H_v, n_tokens, n_batch, True)
            or check_states(c, job.S_k, job.S_v, job.H_v, in_place)
            or check_log_tensor(c, "log_k", &a.log_k, job.S_k, job.H_k, a.log_k.ne[2])
            or check_log_tensor(c, "log_d", &a.log_d, job.S_v, job.H_v, a.log_k.ne[2])
            or check_log_tensor(c, "log_g", &a.log_g, a.g.ne[0], job.H_v, a.log_k.ne[2]))


cdef gdn_status check_delta_options(const gdn_delta_net_args *a, const gdn_delta_job *job,
                                    const error_buffer *error) noexcept nogil:
    if job.S_k < 1 or job.S_v < 1 or job.H_k < 1 or job.H_v < 1:
        return fail(error, GDN_ERR_SHAPE,
                    "q and v must have at least one head of size one, got S_k = %lld, H_k = %lld, S_v = %lld, H_v = %lld",
                    job.S_k, job.H_k, job.S_v, job.H_v)
    if job.H_v % job.H_k != 0:
        return fail(error, GDN_ERR_SHAPE, "v: H_v = %lld is no multiple of q's H_k = %lld", job.H_v, job.H_k)
    if a.head_map == GDN_HEAD_NONE and job.H_v != job.H_k:
        return fail(error, GDN_ERR_VALUE,
                    "head_map must be \"tiled\" or \"interleaved\" when H_v (%lld) differs from H_k (%lld)",
                    job.H_v, job.H_k)
    if a.flags & ~<uint32_t>(GDN_QK_L2NORM | GDN_L2_MAX | GDN_BETA_LOGIT | GDN_SCALE_GIVEN):
        return fail(error, GDN_ERR_VALUE, "flags: unknown bits in %u", a.flags)
    if not isfinite(job.scale):
        return fail(error, GDN_ERR_VALUE, "scale must be finite, got %g", <double>job.scale)
    return (check_option(error, "head_map", a.head_map, GDN_HEAD_NONE, GDN_HEAD_INTERLEAVED)
            or check_option(error, "mode", a.mode, GDN_MODE_AUTO, GDN_MODE_RECURRENT)
            or check_eps(error, "l2_eps", a.l2_eps) or check_counts(error, a.n_threads, a.reserved, job.n_snapshots))


cdef enum:
    LEAST_UPDATES = 1 << 17      # state elements a worker must have to update, by default: some 15 us of one thread


cdef gdn_status plan_delta(const void *args, state_call *c, bint in_place) noexcept nogil:
    """Check a call and decide how it is split and how much scratch it needs."""
    cdef const gdn_delta_net_args *a
    cdef gdn_delta_job *job = &c.delta
    cdef gdn_status status = read_size(&args, GDN_DELTA_NET_ARGS_LEAST, sizeof(gdn_delta_net_args), &c.delta_args)
    cdef int64_t n_items, most
    cdef double n_updates
    if status != GDN_OK:
        return status
    a = <const gdn_delta_net_args *>args
    begin_call(c, &a.call, a.q.ne[2], a.q.ne[3])
    status = check_delta(a, c, in_place) or check_rows(c) or check_lists(
        c, "log_k, log_d or log_g", a.log_k.data != NULL and a.log_d.data != NULL and a.log_g.data != NULL, a.log_k.ne[2])
    if status != GDN_OK:
        return status
    job.has_lists, job.n_entries = has_lists(&a.call), most_entries(&a.call)
    level.delta_plan(job)
    n_items = job.n_seqs * job.n_groups
    n_updates = <double>(a.q.ne[2] * a.q.ne[3]) * job.H_v * job.S_k * job.S_v
    most = n_items * ((job.S_v - 1) // job.part_unit + 1)
    if a.n_threads <= 0:
        most = 1 + <int64_t>min(<double>(most - 1), n_updates / LEAST_UPDATES)
    c.asked = a.n_threads
    c.n_workers = choose_threads(a.n_threads, most)
    split_columns(job, n_items, c.n_workers)
    # Long items are claimed; single tokens go to the same worker every time, whose cache has the state.
    c.item, c.job, c.rows, c.claim = level.delta, job, &job.rows, not job.single_tokens
    finish_plan(c, n_items * job.n_parts, level.delta_scratch(job))
    return GDN_OK


cdef void split_columns(gdn_delta_job *job, int64_t n_items, int n_workers) noexcept nogil:
    """Parts of the value columns, more than one only when heads and sequences are fewer than workers."""
    cdef int64_t units = (job.S_v - 1) // job.part_unit + 1
    cdef int64_t n_parts = 1
    if 0 < n_items < n_workers:
        n_parts = min(units, (n_workers + n_items - 1) // n_items)
    job.part_columns = job.S_v if n_parts == 1 else (units + n_parts - 1) // n_parts * job.part_unit
    job.n_parts = (job.S_v - 1) // job.part_columns + 1


cdef gdn_status c_gated_delta_net_scratch_size(const gdn_delta_net_args *a, size_t *n_bytes) noexcept nogil:
    return c_scratch_size(plan_delta, a, n_bytes)


cdef gdn_status c_gated_delta_net(const gdn_delta_net_args *a) noexcept nogil:
    return c_call(plan_delta, a)


# ---- the Python faces ------------------------------------------------------------------------------------------

HEAD_MAPS = {None: GDN_HEAD_NONE, "tiled": GDN_HEAD_TILED, "interleaved": GDN_HEAD_INTERLEAVED}
MODES = {"auto": GDN_MODE_AUTO, "chunked": GDN_MODE_CHUNKED, "recurrent": GDN_MODE_RECURRENT}
L2_FORMS = {"sum": 0, "max": GDN_L2_MAX}


cdef int fill_options(gdn_delta_net_args *a, scale, head_map, mode, qk_l2norm, l2_eps, l2_form, beta_logit,
                      n_threads) except -1:
    a.size = sizeof(gdn_delta_net_args)
    a.head_map = choice(HEAD_MAPS, head_map, "head_map")
    a.mode = choice(MODES, mode, "mode")
    a.flags = choice(L2_FORMS, l2_form, "l2_form")
    if qk_l2norm is True or qk_l2norm is not False and flag(qk_l2norm, "qk_l2norm"):
        a.flags |= GDN_QK_L2NORM
    if beta_logit is True or beta_logit is not False and flag(beta_logit, "beta_logit"):
        a.flags |= GDN_BETA_LOGIT
    if scale is not None:
        a.flags |= GDN_SCALE_GIVEN
        a.scale = float_argument(scale, "scale")
    a.l2_eps = float_argument(l2_eps, "l2_eps")
    a.n_threads = threads_argument(n_threads)
    return 0


cdef int fill_inputs(gdn_delta_net_args *a, CallArrays arrays, q, k, v, g, beta, out, cu_seqlens) except -1:
    """q, k (n_seqs, n_tokens, H_k, S_k), v, out (n_seqs, n_tokens, H_v, S_v), g, beta (n_seqs, n_tokens, H_v[, S_k or 1])."""
    cdef ndarray q_ = fit_typed(q, "q", 4, False), k_ = fit_typed(k, "k", 4, False), g_, beta_
    arrays.x_name, arrays.x = "v", fit_typed(v, "v", 4, False)
    to_c(q_, &a.q)
    to_c(k_, &a.k)
    to_c(arrays.x, &a.v)
    g_ = gate_rows(g, "g", &a.q, &a.v, &a.g)
    beta_ = gate_rows(beta, "beta", &a.q, &a.v, &a.beta)
    arrays.inputs = (("q", q_, False), ("k", k_, False), ("g", g_, False), ("beta", beta_, False))
    fill_call(&a.call, arrays, cu_seqlens, a.q.ne[3])
    arrays.out = np.empty((<object>arrays.x).shape, result_type(arrays.x)) if out is None else fit_typed(out, "out", 4, True)
    to_c(arrays.out, &a.out)
    return 0


cdef ndarray gate_rows(obj, str name, const gdn_tensor *q, const gdn_tensor *v, gdn_tensor *t):
    """g or beta as ne = (1 or S_k, H_v, n_tokens, n_seqs): a scalar a head may lack the last (numpy) axis, and a
    Tensor, which always shows four, has then a leading unit axis instead."""
    cdef ndarray x = as_typed(obj, name, False)
    cdef bint bare = x.ndim == 3
    if x.ndim == 4 and isinstance(obj, Tensor) and not (
            x.shape[2] == v.ne[1] and x.shape[1] == v.ne[2] and x.shape[0] == v.ne[3]
            and (x.shape[3] == 1 or x.shape[3] == q.ne[0])):
        bare = x.shape[0] == 1
        x = x[0] if bare else x
    if not bare and x.ndim != 4:
        raise ValueError(f"{name} must have 3 axes (n_seqs, n_tokens, H_v) or 4, got shape {(<object>x).shape}")
    to_c(x, t)
    if bare:
        add_unit_axis(t)
    return x


cdef void add_unit_axis(gdn_tensor *t) noexcept:
    """Axis 0 of a tensor with at most three."""
    t.ne = [1, t.ne[0], t.ne[1], t.ne[2]]
    t.nb = [type_size(t.type), t.nb[0], t.nb[1], t.nb[2]]


def gated_delta_net(q, k, v, g, beta, state=None, *, scale=None, head_map=None, mode="auto", snapshots=None,
                    cu_seqlens=None, qk_l2norm=False, l2_eps=1e-6, l2_form="sum", beta_logit=False, out=None,
                    state_out=None, n_threads=None, rounding="nearest", seed=None):
    """The gated delta rule (GDN, arXiv 2412.06464; KDA, arXiv 2510.26692) over whole sequences: (out, state).

    Per value head, with S (S_k, S_v) the state and for every token t::

        S   <- exp(g_t) * S;    d = beta_t * (v_t - S^T k_t);    S <- S + k_t d^T;    o_t = scale * S^T q_t

    Shapes (numpy order; every array float32, float16 or bfloat16 and none the same type as another needs be, any strides,
    read-only is fine; float32 is computed):

    q, k        (n_seqs, n_tokens, H_k, S_k)
    v, out      (n_seqs, n_tokens, H_v, S_v), H_v a multiple of H_k
    g           (n_seqs, n_tokens, H_v) scalar gate, or (n_seqs, n_tokens, H_v, S_k) per key channel: natural log of
                the decay, -inf forgets everything
    beta        (n_seqs, n_tokens, H_v), or with a last axis of 1; already in (0, 1) or (0, 2) unless beta_logit
    state       (n_seqs, H_v, S_v, S_k), ggml's layout; None starts from zeros.  States kept [key][value] (FLA,
                transformers, ik_llama.cpp) are passed as ``state.swapaxes(-1, -2)``: both stride orders are fast.

    scale       of the outputs, 1 / sqrt(S_k) if None
    head_map    which key head value head h reads: "tiled" h % H_k (ggml, GGUF qwen35), "interleaved" h // (H_v // H_k)
                (transformers, FLA, ik_llama.cpp); required when H_v != H_k
    mode        "chunked", "recurrent" (token by token) or "auto", the faster one
    snapshots   K >= 1: the returned state has a leading axis of min(K, longest sequence), at least 1; snapshot s is
                the state s tokens before the end.  Snapshots older than their sequence are zeros in an allocated array and
                left untouched in a given state_out, which may have more of them.
    cu_seqlens  (n_seqs + 1,) integers from 0 to the total: the sequences lie packed in arrays of n_seqs = 1
    qk_l2norm   divide q and k rows by sqrt(sum x^2 + l2_eps) first (l2_form="sum"), or by max(||x||, l2_eps) ("max")
    beta_logit  beta holds logits: sigmoid is applied
    out, state_out    where results go; out may be exactly v, state_out exactly state, and nothing else may overlap
    n_threads   largest number of threads; results have the same bits for any number
    rounding    of states narrower than float32, once a call: "nearest", ties to even, or "stochastic", up or down by chance so
                that the mean is right; float16 saturates at 65504
    seed        of "stochastic", 0 <= seed < 2^64: the same seed, sequence index, number of tokens and element give the same
                bits whatever the threads and rows, so give every call its own
    An allocated out has v's type, an allocated state the given one's, else float32; arrays of bfloat16 are ml_dtypes'.

    Raises ValueError (shape, stride, overlap, option), TypeError (other types), before anything is written.
    """
    cdef gdn_delta_net_args a
    cdef CallArrays arrays = CallArrays()
    memset(&a, 0, sizeof(a))
    fill_options(&a, scale, head_map, mode, qk_l2norm, l2_eps, l2_form, beta_logit, n_threads)
    fill_inputs(&a, arrays, q, k, v, g, beta, out, cu_seqlens)
    fill_rounding(&a.call, rounding, seed)
    fill_states(&a.call, arrays, state, state_out, snapshots, (a.call.n_seqs, a.v.ne[1], a.v.ne[0], a.q.ne[0]), a.q.ne[2])
    call_on_states(plan_delta, &a, arrays, False)
    return arrays.out if out is None else out, arrays.state_out if state_out is None else state_out


cdef int fill_delta_log(gdn_delta_net_args *a, CallArrays arrays, TokenLog log) except -1:
    fill_log_tensor(log.k, "k", arrays, &a.log_k)
    fill_log_tensor(log.d, "d", arrays, &a.log_d)
    fill_log_tensor(log.g, "g", arrays, &a.log_g)
    if log.g.ndim == 2:
        add_unit_axis(&a.log_g)
    return 0


def gated_delta_net_inplace(q, k, v, g, beta, cache, rows_in, rows_out=None, *, scale=None, head_map=None,
                            mode="auto", cu_seqlens=None, qk_l2norm=False, l2_eps=1e-6, l2_form="sum",
                            beta_logit=False, out=None, n_threads=None, log=None, log_in=None, log_out=None,
                            parents=None, checkpoints=None, rounding="nearest", seed=None):
    """The gated delta rule on rows of a state cache, in place: gather, reset, update, snapshots and scatter in one.

    q, k, v, g, beta, out and the options are those of :func:`gated_delta_net`; returns out.

    cache       (n_rows, H_v, S_v, S_k) float32, float16 or bfloat16, any strides (``swapaxes(-1, -2)`` of a [key][value]
                cache), written in place
    rows_in     (n_seqs,) integers: the row every sequence starts from, -1 = zeros
    rows_out    (n_seqs,) or (n_seqs, K): the row where snapshot s, the state s tokens before the end, goes; -1 = nowhere.
                A snapshot older than its sequence leaves its row untouched.  Default: rows_in.

    log         a :class:`TokenLog`, whose entries stand for states that were never written
    log_in      (n_seqs, any number) integers: entries on top of the row in rows_in, oldest first, -1 behind the last.
                The sequence stands at row + entries, with row -1 at zeros + entries.
    log_out     (n_seqs, at least the longest length) integers: where token t's entry goes, -1 = nowhere.  No entry is
                read or written twice, or both.  With a log rows_out's default is nowhere: nothing but entries is written.
    parents     (n_seqs, n_tokens), packed (n_tokens,) integers: a tree; index within the sequence's tokens of the one that
                this token continues, smaller than its own, -1 = where the sequence stands.  A token sees its ancestors
                alone.  Then nothing goes to rows_out, and checkpoints are at n <= 0.
    checkpoints (sequence, n, row) each, (any number, 3): the state of a sequence after n tokens of this call also goes to
                row; -(its entries) <= n <= its length, so that n < 0 folds the oldest entries into a state.

    Works as if every row of rows_in were read before any row is written: forks, swaps and rollback groups need no
    care.  Raises IndexError for a row, an entry or a sequence out of range, ValueError for a row or an entry named
    twice and for lists that mean nothing, and what gated_delta_net raises, before anything is written.
    """
    cdef gdn_delta_net_args a
    cdef CallArrays arrays = CallArrays()
    memset(&a, 0, sizeof(a))
    fill_options(&a, scale, head_map, mode, qk_l2norm, l2_eps, l2_form, beta_logit, n_threads)
    fill_inputs(&a, arrays, q, k, v, g, beta, out, cu_seqlens)
    fill_rounding(&a.call, rounding, seed)
    fill_cache(&a.call, arrays, cache, 4, rows_in, rows_out, log is not None or parents is not None)
    fill_log(&a.call, arrays, log, log_in, log_out, parents, checkpoints, a.q.ne[2])
    if log is not None:
        fill_delta_log(&a, arrays, log)
    call_on_states(plan_delta, &a, arrays, True)
    return arrays.out if out is None else out
