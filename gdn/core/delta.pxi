# The delta rule: one checked, planned and run call, and its Python faces.

# ---- the C face ------------------------------------------------------------------------------------------------

cdef struct delta_call:          # a call on its way: the job, and how it is split
    gdn_delta_job job
    call_plan plan


cdef gdn_status check_delta(const gdn_delta_net_args *a, delta_call *c, const char *state,
                            const char *state_out) noexcept nogil:
    """Every check of a call but its rows; fills the job's extents and options."""
    cdef gdn_delta_job *job = &c.job
    cdef const refusal *why = &c.plan.why
    cdef int64_t n_batch = a.q.ne[3], n_tokens = a.q.ne[2]
    job.args = a
    job.S_k = a.q.ne[0]
    job.H_k = a.q.ne[1]
    job.S_v = a.v.ne[0]
    job.H_v = a.v.ne[1]
    job.n_seqs = a.n_seqs
    job.n_snapshots = a.n_snapshots
    job.per_channel = a.g.ne[0] != 1
    job.tiled = a.head_map == GDN_HEAD_TILED
    job.single_tokens = n_tokens * n_batch <= a.n_seqs
    job.scale = a.scale if a.flags & GDN_SCALE_GIVEN else 1 / sqrtf(<float>job.S_k)
    return (check_delta_options(a, job, why)
            or check_tensor(why, "q", &a.q, job.S_k, job.H_k, n_tokens, n_batch, False)
            or check_tensor(why, "k", &a.k, job.S_k, job.H_k, n_tokens, n_batch, False)
            or check_tensor(why, "v", &a.v, job.S_v, job.H_v, n_tokens, n_batch, False)
            or check_tensor(why, "g", &a.g, job.S_k if job.per_channel else 1, job.H_v, n_tokens, n_batch, False)
            or check_tensor(why, "beta", &a.beta, 1, job.H_v, n_tokens, n_batch, False)
            or check_tensor(why, "out", &a.out, job.S_v, job.H_v, n_tokens, n_batch, True)
            or check_states(why, state, &a.state, job, False) or check_states(why, state_out, &a.state_out, job, True))


cdef gdn_status check_states(const refusal *why, const char *name, const gdn_tensor *t, const gdn_delta_job *job,
                             bint writable) noexcept nogil:
    """States, if given, of any number of rows."""
    return GDN_OK if t.data == NULL else check_tensor(why, name, t, job.S_k, job.S_v, job.H_v, t.ne[3], writable)


cdef gdn_status check_delta_options(const gdn_delta_net_args *a, const gdn_delta_job *job,
                                    const refusal *why) noexcept nogil:
    if job.S_k < 1 or job.S_v < 1 or job.H_k < 1 or job.H_v < 1:
        return fail(why, GDN_ERR_SHAPE,
                    "q and v must have at least one head of size one, got S_k = %lld, H_k = %lld, S_v = %lld, H_v = %lld",
                    job.S_k, job.H_k, job.S_v, job.H_v)
    if job.H_v % job.H_k != 0:
        return fail(why, GDN_ERR_SHAPE, "v: H_v = %lld is no multiple of q's H_k = %lld", job.H_v, job.H_k)
    if a.head_map == GDN_HEAD_NONE and job.H_v != job.H_k:
        return fail(why, GDN_ERR_VALUE,
                    "head_map must be \"tiled\" or \"interleaved\" when H_v (%lld) differs from H_k (%lld)",
                    job.H_v, job.H_k)
    if a.flags & ~<uint32_t>(GDN_QK_L2NORM | GDN_L2_MAX | GDN_BETA_LOGIT | GDN_SCALE_GIVEN):
        return fail(why, GDN_ERR_VALUE, "flags: unknown bits in %u", a.flags)
    if not isfinite(job.scale):
        return fail(why, GDN_ERR_VALUE, "scale must be finite, got %g", <double>job.scale)
    return (check_option(why, "head_map", a.head_map, GDN_HEAD_NONE, GDN_HEAD_INTERLEAVED)
            or check_option(why, "mode", a.mode, GDN_MODE_AUTO, GDN_MODE_RECURRENT)
            or check_eps(why, "l2_eps", a.l2_eps) or check_counts(why, a.n_threads, a.reserved, a.n_snapshots))


cdef enum:
    LEAST_WORK = 1 << 17         # state elements a worker must have to update, by default: some 15 us of one thread


cdef gdn_status plan_delta(const gdn_delta_net_args *a, delta_call *c, const char *state,
                           const char *state_out) noexcept nogil:
    """Check a call and decide how it is split and how much scratch it needs; the states are called so in messages."""
    cdef call_plan *plan = &c.plan
    cdef gdn_status status
    cdef int64_t n_items, most
    cdef double work
    if a == NULL:
        return GDN_ERR_NULL
    if a.size != sizeof(gdn_delta_net_args):
        return GDN_ERR_ABI
    plan.why.text, plan.why.size = a.message, a.message_size
    plan.rows.n_seqs, plan.rows.n_snapshots, plan.rows.snapshot_nb = a.n_seqs, a.n_snapshots, a.snapshot_nb
    plan.rows.state, plan.rows.state_out = a.state, a.state_out
    plan.rows.rows_in, plan.rows.rows_out, plan.rows.cu_seqlens = a.rows_in, a.rows_out, a.cu_seqlens
    plan.rows.n_tokens, plan.rows.n_batch = a.q.ne[2], a.q.ne[3]
    status = check_delta(a, c, state, state_out) or rows_check(&plan.rows, &plan.why)
    if status != GDN_OK:
        return status
    level.delta_plan(&c.job)
    n_items = a.n_seqs * c.job.n_groups
    work = <double>(a.q.ne[2] * a.q.ne[3]) * c.job.H_v * c.job.S_k * c.job.S_v
    most = n_items * ((c.job.S_v - 1) // c.job.part_unit + 1)
    if a.n_threads <= 0:
        most = 1 + <int64_t>min(<double>(most - 1), work / LEAST_WORK)
    plan.n_workers = choose_threads(a.n_threads, most)
    split_columns(&c.job, n_items, plan.n_workers)
    plan.n_items = n_items * c.job.n_parts
    plan.n_workers = <int>min(plan.n_workers, max(plan.n_items, <int64_t>1))
    plan.rows_bytes = rows_scratch_size(&plan.rows)
    plan.worker_bytes = level.delta_scratch(&c.job)
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
    cdef delta_call c
    cdef gdn_status status = plan_delta(a, &c, "state", "state_out") if n_bytes != NULL else GDN_ERR_NULL
    if status == GDN_OK:
        n_bytes[0] = plan_bytes(&c.plan)
    return status


cdef gdn_status c_gated_delta_net(const gdn_delta_net_args *a) noexcept nogil:
    cdef delta_call c
    cdef gdn_status status = (plan_delta(a, &c, "state", "state_out")
                              or check_scratch(&c.plan, a.scratch, a.scratch_size))
    if status == GDN_OK:
        run_delta(&c, a.scratch)
    return status


cdef void run_delta(delta_call *c, void *scratch) noexcept nogil:
    """Long items are claimed; single tokens go to the same worker every time, whose cache has the state."""
    run_plan(&c.plan, level.delta, &c.job, &c.job.rows, not c.job.single_tokens, scratch)


# ---- the Python faces ------------------------------------------------------------------------------------------

HEAD_MAPS = {None: GDN_HEAD_NONE, "tiled": GDN_HEAD_TILED, "interleaved": GDN_HEAD_INTERLEAVED}
MODES = {"auto": GDN_MODE_AUTO, "chunked": GDN_MODE_CHUNKED, "recurrent": GDN_MODE_RECURRENT}
L2_FORMS = {"sum": 0, "max": GDN_L2_MAX}


cdef class DeltaArrays(CallArrays):
    cdef ndarray q, k, v, g, beta


cdef int fill_options(gdn_delta_net_args *a, scale, head_map, mode, qk_l2norm, l2_eps, l2_form, beta_logit,
                      n_threads) except -1:
    a.size = sizeof(gdn_delta_net_args)
    a.head_map = choice(HEAD_MAPS, head_map, "head_map")
    a.mode = choice(MODES, mode, "mode")
    a.flags = choice(L2_FORMS, l2_form, "l2_form")
    if flag_argument(qk_l2norm, "qk_l2norm"):
        a.flags |= GDN_QK_L2NORM
    if flag_argument(beta_logit, "beta_logit"):
        a.flags |= GDN_BETA_LOGIT
    if scale is not None:
        a.flags |= GDN_SCALE_GIVEN
        a.scale = float_argument(scale, "scale")
    a.l2_eps = float_argument(l2_eps, "l2_eps")
    a.n_threads = threads_argument(n_threads)
    a.n_snapshots = 1
    a.message, a.message_size = TOLD, sizeof(TOLD)
    return 0


cdef int fill_inputs(gdn_delta_net_args *a, DeltaArrays arrays, q, k, v, g, beta, out, cu_seqlens) except -1:
    arrays.q = fit(q, "q", 4, False)
    arrays.k = fit(k, "k", 4, False)
    arrays.v = fit(v, "v", 4, False)
    to_c(arrays.q, &a.q)
    to_c(arrays.k, &a.k)
    to_c(arrays.v, &a.v)
    arrays.g = gate_rows(g, "g", &a.q, &a.v, &a.g)
    arrays.beta = gate_rows(beta, "beta", &a.q, &a.v, &a.beta)
    a.n_seqs = fill_lengths(arrays, cu_seqlens, a.q.ne[3], &a.cu_seqlens)
    arrays.out = np.empty((<object>arrays.v).shape, np.float32) if out is None else fit(out, "out", 4, True)
    to_c(arrays.out, &a.out)
    return 0


cdef ndarray gate_rows(obj, str name, const gdn_tensor *q, const gdn_tensor *v, gdn_tensor *t):
    """g or beta as ne = (1 or S_k, H_v, n_tokens, n_seqs): a scalar a head may lack the last (numpy) axis, and a
    Tensor, which always shows four, has then a leading unit axis instead."""
    cdef ndarray x = as_array(obj, name, False)
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
    t.nb = [4, t.nb[0], t.nb[1], t.nb[2]]


cdef int call_delta(gdn_delta_net_args *a, DeltaArrays c, str state, str state_out) except -1:
    """Check, then run without the GIL in scratch of the pool."""
    cdef delta_call call
    cdef arena *scratch
    cdef bytes state_name = state.encode(), state_out_name = state_out.encode()
    check(plan_delta(a, &call, state_name, state_out_name))
    check_outputs(c, (("q", c.q, False), ("k", c.k, False), ("g", c.g, False), ("beta", c.beta, False)), "v", c.v,
                  state, state_out)
    scratch = arena_take(plan_bytes(&call.plan))
    with nogil:
        run_delta(&call, scratch.data)
    arena_give(scratch)
    return 0


def gated_delta_net(q, k, v, g, beta, state=None, *, scale=None, head_map=None, mode="auto", snapshots=None,
                    cu_seqlens=None, qk_l2norm=False, l2_eps=1e-6, l2_form="sum", beta_logit=False, out=None,
                    state_out=None, n_threads=None):
    """The gated delta rule (GDN, arXiv 2412.06464; KDA, arXiv 2510.26692) over whole sequences: (out, state).

    Per value head, with S (S_k, S_v) the state and for every token t::

        S   <- exp(g_t) * S;    d = beta_t * (v_t - S^T k_t);    S <- S + k_t d^T;    o_t = scale * S^T q_t

    Shapes (numpy order; every array float32, any strides, read-only is fine):

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
    snapshots   K >= 1: the returned state has a leading axis of min(K, longest sequence), at least 1; slot s is the
                state s tokens before the end.  Slots older than their sequence are zeros in an allocated array and
                left untouched in a given state_out, which may have more slots.
    cu_seqlens  (n_seqs + 1,) integers from 0 to the total: the sequences lie packed in arrays of n_seqs = 1
    qk_l2norm   divide q and k rows by sqrt(sum x^2 + l2_eps) first (l2_form="sum"), or by max(||x||, l2_eps) ("max")
    beta_logit  beta holds logits: sigmoid is applied
    out, state_out    where results go; out may be exactly v, state_out exactly state, and nothing else may overlap
    n_threads   largest number of threads; results have the same bits for any number

    Raises ValueError (shape, stride, overlap, option), TypeError (anything but float32), before anything is written.
    """
    cdef gdn_delta_net_args a
    cdef DeltaArrays arrays = DeltaArrays()
    memset(&a, 0, sizeof(a))
    fill_options(&a, scale, head_map, mode, qk_l2norm, l2_eps, l2_form, beta_logit, n_threads)
    fill_inputs(&a, arrays, q, k, v, g, beta, out, cu_seqlens)
    a.n_snapshots = fill_states(arrays, state, state_out, snapshots, (a.n_seqs, a.v.ne[1], a.v.ne[0], a.q.ne[0]),
                                longest_sequence(a.cu_seqlens, a.n_seqs, a.q.ne[2]), &a.state, &a.state_out, &a.snapshot_nb)
    call_delta(&a, arrays, "state", "state_out")
    return arrays.out if out is None else out, arrays.state_out if state_out is None else state_out


def gated_delta_net_inplace(q, k, v, g, beta, cache, rows_in, rows_out=None, *, scale=None, head_map=None,
                            mode="auto", cu_seqlens=None, qk_l2norm=False, l2_eps=1e-6, l2_form="sum",
                            beta_logit=False, out=None, n_threads=None):
    """The gated delta rule on rows of a state cache, in place: gather, reset, update, snapshots and scatter in one.

    q, k, v, g, beta, out and the options are those of :func:`gated_delta_net`; returns out.

    cache       (n_rows, H_v, S_v, S_k) float32, any strides (``swapaxes(-1, -2)`` of a [key][value] cache), written
                in place
    rows_in     (n_seqs,) integers: the row every sequence starts from, -1 = zeros
    rows_out    (n_seqs,) or (n_seqs, K): the row where slot s, the state s tokens before the end, goes; -1 = nowhere.
                A slot older than its sequence leaves its row untouched.  Default: rows_in.

    Works as if every row of rows_in were read before any row is written: forks, swaps and rollback groups need no
    care.  Raises IndexError for a row outside the cache, ValueError for a row written twice, and what
    gated_delta_net raises, before anything is written.
    """
    cdef gdn_delta_net_args a
    cdef DeltaArrays arrays = DeltaArrays()
    memset(&a, 0, sizeof(a))
    fill_options(&a, scale, head_map, mode, qk_l2norm, l2_eps, l2_form, beta_logit, n_threads)
    fill_inputs(&a, arrays, q, k, v, g, beta, out, cu_seqlens)
    a.n_snapshots = fill_cache(arrays, cache, 4, rows_in, rows_out, a.n_seqs, &a.state, &a.state_out, &a.rows_in,
                               &a.rows_out)
    call_delta(&a, arrays, "cache", "cache")
    return arrays.out if out is None else out
