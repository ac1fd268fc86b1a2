# The row-wise kernels and the triangular solve: `plan_*` checks a call and fills its job, `run_*` runs it.
#
# Needs: status.pxi (check, check_eps, check_option, check_tensor, check_typed, choice, float_argument), parallel.pxi
# (choose_threads, run_items, threads_argument), dispatch.pxi (level), delta.pxi (add_unit_axis).

cdef struct rowwise_call:
    gdn_rowwise_job job
    gdn_item_fn fn
    bint flush


cdef void run_rowwise(rowwise_call *c, int32_t n_threads) noexcept nogil:
    """All rows of job.out, split into blocks of some thousand values."""
    cdef gdn_rowwise_job *job = &c.job
    cdef int64_t n = job.out.ne[0], n_items
    job.n_rows = job.out.ne[1] * job.out.ne[2] * job.out.ne[3]
    if n == 0 or job.n_rows == 0:
        return
    job.rows_per_item = max(<int64_t>1, 16384 // n)
    n_items = (job.n_rows + job.rows_per_item - 1) // job.rows_per_item
    run_items(c.fn, job, n_items, choose_threads(n_threads, n_items), n_threads, c.flush)


cdef gdn_status check_like(const error_buffer *error, const char *name, const gdn_tensor *t, const gdn_tensor *x,
                           bint writable) noexcept nogil:
    return check_typed(error, name, t, x.ne[0], x.ne[1], x.ne[2], x.ne[3], writable)


cdef gdn_status plan_l2_norm(rowwise_call *c, const error_buffer *error, const gdn_tensor *x, float eps, int32_t form,
                             const gdn_tensor *out) noexcept nogil:
    c.fn, c.flush = level.l2_norm, True
    c.job.x, c.job.out, c.job.eps, c.job.form = x[0], out[0], eps, form
    return (check_eps(error, "eps", eps) or check_option(error, "form", form, GDN_L2_FORM_SUM, GDN_L2_FORM_MAX)
            or check_like(error, "x", x, x, False) or check_like(error, "out", out, x, True))


cdef gdn_status plan_rms_norm_gated(rowwise_call *c, const error_buffer *error, const gdn_tensor *x, const gdn_tensor *gate,
                                    const gdn_tensor *weight, float eps, int32_t activation,
                                    const gdn_tensor *out) noexcept nogil:
    c.fn, c.flush = level.rms_norm_gated, True
    c.job.x, c.job.y, c.job.w, c.job.out = x[0], gate[0], weight[0], out[0]
    c.job.eps, c.job.activation = eps, activation
    return (check_eps(error, "eps", eps) or check_option(error, "activation", activation, GDN_ACT_SILU, GDN_ACT_SIGMOID)
            or check_like(error, "x", x, x, False) or check_like(error, "gate", gate, x, False)
            or check_tensor(error, "weight", weight, x.ne[0], 1, 1, 1, False) or check_like(error, "out", out, x, True))


cdef gdn_status plan_decay_gate(rowwise_call *c, const error_buffer *error, const gdn_tensor *a, const gdn_tensor *A,
                                const gdn_tensor *dt_bias, int32_t gate, float lower_bound,
                                const gdn_tensor *out) noexcept nogil:
    cdef gdn_rowwise_job *job = &c.job
    c.fn, c.flush = level.decay_gate, False       # subnormal decays are results, not to be flushed
    job.x, job.y, job.w, job.out = a[0], A[0], dt_bias[0], out[0]
    job.y.nb[0], job.y.nb[1] = 0, A.nb[0]         # A has one value a head: axis 1
    if a.ne[0] == 1:                              # scalar gate: vectors run over the heads
        swap_first_axes(&job.x)
        swap_first_axes(&job.y)
        swap_first_axes(&job.w)
        swap_first_axes(&job.out)
    job.gate, job.lower_bound = gate, lower_bound
    return (check_option(error, "gate", gate, GDN_GATE_SOFTPLUS, GDN_GATE_CLAMPED)
            or check_lower_bound(error, gate, lower_bound)
            or check_like(error, "a", a, a, False) or check_tensor(error, "A", A, a.ne[1], 1, 1, 1, False)
            or check_tensor(error, "dt_bias", dt_bias, a.ne[0], a.ne[1], 1, 1, False)
            or check_like(error, "out", out, a, True) or check_rates(error, A))


cdef gdn_status check_lower_bound(const error_buffer *error, int32_t gate, float bound) noexcept nogil:
    if gate == GDN_GATE_SOFTPLUS and bound != 0:
        return fail(error, GDN_ERR_VALUE, "lower_bound is %g, which gate \"softplus\" does not use: "
                    "name gate \"bounded\" or \"clamped\"", <double>bound)
    if gate != GDN_GATE_SOFTPLUS and not (isfinite(bound) and bound < 0):
        return fail(error, GDN_ERR_VALUE, "lower_bound must be finite and below 0 for this gate, got %g", <double>bound)
    return GDN_OK


cdef gdn_status check_rates(const error_buffer *error, const gdn_tensor *A) noexcept nogil:
    """A rate above 0 is +exp(A_log): in the bounded form finite and wrong."""
    cdef int64_t h
    cdef float rate
    for h in range(A.ne[0]):
        rate = (<const float *>(<const char *>A.data + h * A.nb[0]))[0]
        if not rate <= 0:
            return fail(error, GDN_ERR_VALUE, "A must be -exp(A_log), 0 or less, got %g for head %lld", <double>rate,
                        <long long>h)
    return GDN_OK


cdef void swap_first_axes(gdn_tensor *t) noexcept nogil:
    t.ne[0], t.ne[1] = t.ne[1], t.ne[0]
    t.nb[0], t.nb[1] = t.nb[1], t.nb[0]


cdef gdn_status plan_solve_tri(gdn_solve_job *job, const error_buffer *error, const gdn_tensor *a, const gdn_tensor *b,
                               int32_t lower, int32_t unit, const gdn_tensor *out) noexcept nogil:
    job.a, job.b, job.out, job.lower, job.unit = a[0], b[0], out[0], lower, unit
    return (check_tensor(error, "b", b, b.ne[0], b.ne[1], b.ne[2], b.ne[3], False)
            or check_tensor(error, "a", a, b.ne[1], b.ne[1], b.ne[2], b.ne[3], False)
            or check_tensor(error, "out", out, b.ne[0], b.ne[1], b.ne[2], b.ne[3], True))


cdef void run_solve_tri(gdn_solve_job *job, int32_t n_threads) noexcept nogil:
    cdef int64_t unit_columns = 4 * level.vl, n_columns = job.b.ne[0], n_batch = job.b.ne[2] * job.b.ne[3]
    cdef int64_t n_parts = (n_columns + unit_columns - 1) // unit_columns
    cdef int n_workers = choose_threads(n_threads, n_batch * n_parts)
    job.n_parts = min(n_parts, <int64_t>1) if n_workers <= n_batch else n_parts
    job.part_columns = n_columns if job.n_parts <= 1 else unit_columns
    run_items(level.solve_tri, job, n_batch * job.n_parts, n_workers, n_threads, False)


# ---- the C face ------------------------------------------------------------------------------------------------

cdef gdn_status run_planned(gdn_status status, rowwise_call *c, int32_t n_threads) noexcept nogil:
    if n_threads < 0:
        return GDN_ERR_VALUE
    if status == GDN_OK:
        run_rowwise(c, n_threads)
    return status


cdef gdn_status c_l2_norm(const gdn_tensor *x, float eps, int32_t form, const gdn_tensor *out,
                          int32_t n_threads) noexcept nogil:
    cdef rowwise_call c
    if x == NULL or out == NULL:
        return GDN_ERR_NULL
    return run_planned(plan_l2_norm(&c, &no_buffer, x, eps, form, out), &c, n_threads)


cdef gdn_status c_rms_norm_gated(const gdn_tensor *x, const gdn_tensor *gate, const gdn_tensor *weight, float eps,
                                 int32_t activation, const gdn_tensor *out, int32_t n_threads) noexcept nogil:
    cdef rowwise_call c
    if x == NULL or gate == NULL or weight == NULL or out == NULL:
        return GDN_ERR_NULL
    return run_planned(plan_rms_norm_gated(&c, &no_buffer, x, gate, weight, eps, activation, out), &c, n_threads)


cdef gdn_status c_decay_gate(const gdn_tensor *a, const gdn_tensor *A, const gdn_tensor *dt_bias,
                             int32_t gate, float lower_bound, const gdn_tensor *out,
                             int32_t n_threads) noexcept nogil:
    cdef rowwise_call c
    if a == NULL or A == NULL or dt_bias == NULL or out == NULL:
        return GDN_ERR_NULL
    return run_planned(plan_decay_gate(&c, &no_buffer, a, A, dt_bias, gate, lower_bound, out), &c, n_threads)


cdef gdn_status c_solve_tri(const gdn_tensor *a, const gdn_tensor *b, int32_t lower, int32_t unit,
                            const gdn_tensor *out, int32_t n_threads) noexcept nogil:
    cdef gdn_solve_job job
    cdef gdn_status status
    if a == NULL or b == NULL or out == NULL:
        return GDN_ERR_NULL
    status = plan_solve_tri(&job, &no_buffer, a, b, lower, unit, out) if n_threads >= 0 else GDN_ERR_VALUE
    if status == GDN_OK:
        run_solve_tri(&job, n_threads)
    return status


# ---- the Python faces --------------------------------------------------------------------------------------------

ACTIVATIONS = {"silu": GDN_ACT_SILU, "sigmoid": GDN_ACT_SIGMOID}
GATES = {"softplus": GDN_GATE_SOFTPLUS, "bounded": GDN_GATE_BOUNDED, "clamped": GDN_GATE_CLAMPED}
FORMS = {"sum": GDN_L2_FORM_SUM, "max": GDN_L2_FORM_MAX}


cdef ndarray rows_array(obj, str name, bint writable):
    """An array of 1 to 4 axes."""
    cdef ndarray x = as_typed(obj, name, writable)
    if not 1 <= x.ndim <= 4:
        raise ValueError(f"{name} must have 1 to 4 axes, got shape {(<object>x).shape}")
    return x


cdef ndarray output_like(ndarray x, out, dtype=None):
    """An output shaped as x, in its type unless another is given."""
    cdef ndarray y
    if out is None:
        return np.empty((<object>x).shape, result_type(x) if dtype is None else dtype)
    y = rows_array(out, "out", True)
    if (<object>y).shape != (<object>x).shape and not isinstance(out, Tensor):
        raise ValueError(f"out has shape {(<object>y).shape}, the input {(<object>x).shape}")
    return y


def l2_norm(x, eps=1e-6, *, form="sum", out=None, n_threads=None):
    """``x / sqrt(sum x^2 + eps)`` (form "sum", as FLA and transformers) or ``x / max(||x||, eps)`` ("max", as
    ggml_l2_norm), along the last axis of x, 1 to 4 axes, float32, float16 or bfloat16, any strides.  out may be exactly x;
    allocated it has x's type.

    Raises ValueError (shape, stride, overlap, option) and TypeError (other types) before anything is written.
    """
    cdef ndarray x_ = rows_array(x, "x", False)
    cdef ndarray y = output_like(x_, out)
    cdef gdn_tensor c_x, c_out
    cdef rowwise_call c
    cdef float c_eps = float_argument(eps, "eps")
    cdef int32_t c_form = choice(FORMS, form, "form"), threads = threads_argument(n_threads)
    to_c(x_, &c_x)
    to_c(y, &c_out)
    check(plan_l2_norm(&c, &python_buffer, &c_x, c_eps, c_form, &c_out))
    check_overlap("out", y, (("x", x_, True),))
    with nogil:
        run_rowwise(&c, threads)
    return y if out is None else out


def rms_norm_gated(x, gate, weight, eps=1e-6, *, activation="silu", out=None, n_threads=None):
    """``x / sqrt(mean x^2 + eps) * weight * act(gate)`` along the last axis.

    x, gate, out  the same shape, 1 to 4 axes, float32, float16 or bfloat16, any strides; weight (n,), float32.  activation
    "silu" (GDN) or "sigmoid" (KDA).  out may be exactly x or exactly gate; allocated it has x's type.

    Raises ValueError (shape, stride, overlap, option) and TypeError (other types) before anything is written.
    """
    cdef ndarray x_ = rows_array(x, "x", False)
    cdef ndarray z = rows_array(gate, "gate", False)
    cdef ndarray w = fit(weight, "weight", 1, False)
    cdef ndarray y = output_like(x_, out)
    cdef rowwise_call c
    cdef int32_t threads = threads_argument(n_threads)
    plan_norm_arrays(&c, x_, z, w, float_argument(eps, "eps"), choice(ACTIVATIONS, activation, "activation"), y)
    check_overlap("out", y, (("x", x_, True), ("gate", z, True), ("weight", w, False)))
    with nogil:
        run_rowwise(&c, threads)
    return y if out is None else out


cdef int plan_norm_arrays(rowwise_call *c, ndarray x, ndarray gate, ndarray weight, float eps, int32_t activation,
                          ndarray out) except -1:
    cdef gdn_tensor c_x, c_gate, c_weight, c_out
    to_c(x, &c_x)
    to_c(gate, &c_gate)
    to_c(weight, &c_weight)
    to_c(out, &c_out)
    return check(plan_rms_norm_gated(c, &python_buffer, &c_x, &c_gate, &c_weight, eps, activation, &c_out))


def decay_gate(a, A, dt_bias, *, gate="softplus", lower_bound=None, out=None, n_threads=None):
    """The log decay g of ``x = a + dt_bias``, in the form that gate names.

    a, out      (n_seqs, n_tokens, H) with dt_bias (H,): scalar gate; or (n_seqs, n_tokens, H, S_k) with dt_bias
                (H, S_k) or (H * S_k,): per key channel.  float32, float16 or bfloat16, any strides; out may be exactly a,
                allocated it is float32
    A           (H,), float32 as dt_bias is: -exp(A_log) (GGUF's ssm_a is A already), 0 or less; 0 * -inf counts as 0, a
                decay of exactly 1
    gate        "softplus": A softplus(x), with no lower_bound;  "bounded": lower_bound sigmoid(-A x), as FLA's KDA has it;
                "clamped": max(A softplus(x), lower_bound)
    lower_bound a number below 0, or None.  A bound alone names no form: without gate= it is refused

    softplus keeps a relative accuracy of 1e-6 for any argument, results below float32's normal range included.
    Raises ValueError (shape, stride, overlap, option, a bound that is missing or not used, an A above 0 or NaN) and TypeError
    (other types) before anything is written.
    """
    cdef ndarray a_ = as_typed(a, "a", False)
    cdef ndarray A_ = fit(A, "A", 1, False)
    cdef ndarray bias = as_array(dt_bias, "dt_bias", False)
    cdef ndarray y
    cdef rowwise_call c
    cdef int32_t threads = threads_argument(n_threads)
    if not 3 <= a_.ndim <= 4:
        raise ValueError(f"a must have 3 axes (n_seqs, n_tokens, H) or 4, got shape {(<object>a_).shape}")
    if isinstance(dt_bias, Tensor):
        bias = fit(dt_bias, "dt_bias", 1 if bias.shape[2] == 1 else 2, False)
    if isinstance(a, Tensor) and is_scalar_gate(a_, A_.shape[0], bias.size):
        a_ = fit_typed(a, "a", 3, False)
    y = fit_typed(out, "out", a_.ndim, True) if isinstance(out, Tensor) else output_like(a_, out, np.float32)
    plan_gate_arrays(&c, a_, A_, bias, choice(GATES, gate, "gate"), lower_bound, y)
    check_overlap("out", y, (("a", a_, True), ("A", A_, False), ("dt_bias", bias, False)))
    with nogil:
        run_rowwise(&c, threads)
    return y if out is None else out


cdef bint is_scalar_gate(ndarray a, int64_t H, int64_t n_bias):
    """Whether a Tensor's four axes are (1, n_seqs, n_tokens, H) rather than (n_seqs, n_tokens, H, S_k)."""
    return a.shape[0] == 1 and a.shape[3] == H == n_bias and not (a.shape[2] == H and H == 1)


cdef int plan_gate_arrays(rowwise_call *c, ndarray a, ndarray A, ndarray dt_bias, int32_t gate, lower_bound,
                          ndarray out) except -1:
    cdef gdn_tensor c_a, c_A, c_bias, c_out
    cdef float bound = 0 if lower_bound is None else float_argument(lower_bound, "lower_bound")
    if bound == 0 and lower_bound is not None:    # which the C face takes for none
        raise ValueError(f"lower_bound must be below 0, got {lower_bound!r}")
    to_c(a, &c_a)
    to_c(A, &c_A)
    to_c(per_channel_bias(dt_bias, a), &c_bias)
    to_c(out, &c_out)
    if a.ndim == 3:
        add_unit_axis(&c_a)
        add_unit_axis(&c_bias)
        add_unit_axis(&c_out)
    return check(plan_decay_gate(c, &python_buffer, &c_a, &c_A, &c_bias, gate, bound, &c_out))


cdef ndarray per_channel_bias(ndarray bias, ndarray a):
    """dt_bias as (H,) for a scalar gate, as (H, S_k) per channel: a flat one is split without a copy."""
    if a.ndim == 4 and bias.ndim == 1 and bias.shape[0] == a.shape[2] * a.shape[3]:
        return bias.reshape(a.shape[2], a.shape[3])
    if bias.ndim != a.ndim - 2:
        raise ValueError(f"dt_bias must have shape {(<object>a).shape[2:]}, got {(<object>bias).shape}")
    return bias


def solve_tri(a, b, *, lower=True, unit=False, out=None, n_threads=None):
    """X of ``A X = B`` with A triangular, batched: ggml_solve_tri's meaning.

    a (..., n, n), b and out (..., n, m), up to two equal batch axes, float32, any strides.  Only the triangle asked
    for is read, with ``unit`` not its diagonal either.  A zero on the diagonal divides by zero as float32 does.
    out may be exactly b.

    Raises ValueError (shape, stride, overlap) and TypeError (anything but float32) before anything is written.
    """
    cdef ndarray a_ = rows_array(as_array(a, "a", False), "a", False)
    cdef ndarray b_ = rows_array(as_array(b, "b", False), "b", False)
    cdef ndarray y = output_like(b_, out)
    cdef gdn_tensor c_a, c_b, c_out
    cdef gdn_solve_job job
    cdef int32_t c_lower = flag(lower, "lower"), c_unit = flag(unit, "unit")
    cdef int32_t threads = threads_argument(n_threads)
    if a_.ndim < 2 or b_.ndim < 2:
        raise ValueError(f"a and b must have at least 2 axes, got shapes {(<object>a_).shape} and {(<object>b_).shape}")
    to_c(a_, &c_a)
    to_c(b_, &c_b)
    to_c(y, &c_out)
    check(plan_solve_tri(&job, &python_buffer, &c_a, &c_b, c_lower, c_unit, &c_out))
    check_overlap("out", y, (("a", a_, False), ("b", b_, True)))
    with nogil:
        run_solve_tri(&job, threads)
    return y if out is None else out
