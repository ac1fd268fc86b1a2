# Doors of the row-wise kernels and of the triangular solve.

cdef void run_job(gdn_item_fn fn, const void *job, int64_t n_items, int n_workers, bint flush) noexcept nogil:
    """Items that need no scratch."""
    cdef run r
    r.fn = fn
    r.job = job
    r.n_items = n_items
    r.claimed = 0
    r.claim = 0
    r.scratch = NULL
    r.scratch_per_worker = 0
    r.flush = flush
    run_items(&r, n_workers)


cdef void run_rows(gdn_item_fn fn, gdn_rows_job *job, int32_t n_threads, bint flush) noexcept nogil:
    """All rows of job.out, split into blocks of some thousand values."""
    cdef int64_t n = job.out.ne[0], n_items
    job.n_rows = job.out.ne[1] * job.out.ne[2] * job.out.ne[3]
    if n == 0 or job.n_rows == 0:
        return
    job.rows_per_item = max(<int64_t>1, 16384 // n)
    n_items = (job.n_rows + job.rows_per_item - 1) // job.rows_per_item
    run_job(fn, job, n_items, choose_threads(n_threads, n_items), flush)


cdef gdn_status check_like(char *message, size_t size, const char *name, const gdn_tensor *t, const gdn_tensor *x,
                           bint writable) noexcept nogil:
    return check_tensor(message, size, name, t, x.ne[0], x.ne[1], x.ne[2], x.ne[3], writable)


cdef gdn_status check_eps(char *message, size_t size, float eps) noexcept nogil:
    if not (eps >= 0 and isfinite(eps)):
        return fail(message, size, GDN_ERR_VALUE, "eps must be finite and not negative, got %g", <double>eps)
    return GDN_OK


cdef gdn_status do_l2_norm(const gdn_tensor *x, float eps, int32_t form, const gdn_tensor *out, int32_t n_threads,
                           bint dry, char *message, size_t size) noexcept nogil:
    """Check, and unless dry run."""
    cdef gdn_rows_job job
    cdef gdn_status status = check_eps(message, size, eps)
    if status == GDN_OK and form not in (GDN_L2_FORM_SUM, GDN_L2_FORM_MAX):
        status = fail(message, size, GDN_ERR_VALUE, "form: unknown value %d", form)
    if status == GDN_OK:
        status = check_like(message, size, "x", x, x, False)
    if status == GDN_OK:
        status = check_like(message, size, "out", out, x, True)
    if status == GDN_OK and not dry:
        job.x = x[0]
        job.out = out[0]
        job.eps = eps
        job.form = form
        run_rows(level.l2_norm, &job, n_threads, True)
    return status


cdef gdn_status do_rms_norm_gated(const gdn_tensor *x, const gdn_tensor *gate, const gdn_tensor *weight, float eps,
                                  int32_t activation, const gdn_tensor *out, int32_t n_threads, bint dry,
                                  char *message, size_t size) noexcept nogil:
    cdef gdn_rows_job job
    cdef gdn_status status = check_eps(message, size, eps)
    if status == GDN_OK and activation not in (GDN_ACT_SILU, GDN_ACT_SIGMOID):
        status = fail(message, size, GDN_ERR_VALUE, "activation: unknown value %d", activation)
    if status == GDN_OK:
        status = check_like(message, size, "x", x, x, False)
    if status == GDN_OK:
        status = check_like(message, size, "gate", gate, x, False)
    if status == GDN_OK:
        status = check_tensor(message, size, "weight", weight, x.ne[0], 1, 1, 1, False)
    if status == GDN_OK:
        status = check_like(message, size, "out", out, x, True)
    if status == GDN_OK and not dry:
        job.x = x[0]
        job.y = gate[0]
        job.w = weight[0]
        job.out = out[0]
        job.eps = eps
        job.activation = activation
        run_rows(level.rms_norm_gated, &job, n_threads, True)
    return status


cdef gdn_status do_decay_gate(const gdn_tensor *a, const gdn_tensor *A, const gdn_tensor *dt_bias,
                              const float *lower_bound, const gdn_tensor *out, int32_t n_threads, bint dry,
                              char *message, size_t size) noexcept nogil:
    cdef gdn_rows_job job
    cdef gdn_status status = check_like(message, size, "a", a, a, False)
    if status == GDN_OK and lower_bound != NULL and not isfinite(lower_bound[0]):
        status = fail(message, size, GDN_ERR_VALUE, "lower_bound must be finite, got %g", <double>lower_bound[0])
    if status == GDN_OK:
        status = check_tensor(message, size, "A", A, a.ne[1], 1, 1, 1, False)
    if status == GDN_OK:
        status = check_tensor(message, size, "dt_bias", dt_bias, a.ne[0], a.ne[1], 1, 1, False)
    if status == GDN_OK:
        status = check_like(message, size, "out", out, a, True)
    if status == GDN_OK and not dry:
        job.x = a[0]
        job.y = A[0]
        job.w = dt_bias[0]
        job.out = out[0]
        job.y.nb[1] = A.nb[0]                    # A has one value a head: axis 1
        job.y.nb[0] = 0
        if a.ne[0] == 1:                         # scalar gate: vectors run over the heads
            swap_first_axes(&job.x)
            swap_first_axes(&job.y)
            swap_first_axes(&job.w)
            swap_first_axes(&job.out)
        job.bounded = lower_bound != NULL
        job.lower_bound = lower_bound[0] if lower_bound != NULL else 0
        run_rows(level.decay_gate, &job, n_threads, False)       # subnormal decays are results, not to be flushed
    return status


cdef void swap_first_axes(gdn_tensor *t) noexcept nogil:
    t.ne[0], t.ne[1] = t.ne[1], t.ne[0]
    t.nb[0], t.nb[1] = t.nb[1], t.nb[0]


cdef gdn_status do_solve_tri(const gdn_tensor *a, const gdn_tensor *b, int32_t lower, int32_t unit,
                             const gdn_tensor *out, int32_t n_threads, bint dry, char *message,
                             size_t size) noexcept nogil:
    cdef gdn_solve_job job
    cdef int64_t n_batch, n_parts, unit_columns = 4 * level.vl
    cdef int n_workers
    cdef gdn_status status = check_like(message, size, "b", b, b, False)
    if status == GDN_OK:
        status = check_tensor(message, size, "a", a, b.ne[1], b.ne[1], b.ne[2], b.ne[3], False)
    if status == GDN_OK:
        status = check_like(message, size, "out", out, b, True)
    if status == GDN_OK and not dry and b.ne[0] > 0:
        job.a = a[0]
        job.b = b[0]
        job.out = out[0]
        job.lower = lower
        job.unit = unit
        n_batch = b.ne[2] * b.ne[3]
        n_parts = (b.ne[0] + unit_columns - 1) // unit_columns
        n_workers = choose_threads(n_threads, n_batch * n_parts)
        job.n_parts = 1 if n_workers <= n_batch else n_parts
        job.part_columns = b.ne[0] if job.n_parts == 1 else unit_columns
        run_job(level.solve_tri, &job, n_batch * job.n_parts, n_workers, False)
    return status


# ---- the C face ------------------------------------------------------------------------------------------------

cdef gdn_status c_l2_norm(const gdn_tensor *x, float eps, int32_t form, const gdn_tensor *out,
                          int32_t n_threads) noexcept nogil:
    if x == NULL or out == NULL:
        return GDN_ERR_NULL
    if n_threads < 0:
        return GDN_ERR_VALUE
    return do_l2_norm(x, eps, form, out, n_threads, False, NULL, 0)


cdef gdn_status c_rms_norm_gated(const gdn_tensor *x, const gdn_tensor *gate, const gdn_tensor *weight, float eps,
                                 int32_t activation, const gdn_tensor *out, int32_t n_threads) noexcept nogil:
    if x == NULL or gate == NULL or weight == NULL or out == NULL:
        return GDN_ERR_NULL
    if n_threads < 0:
        return GDN_ERR_VALUE
    return do_rms_norm_gated(x, gate, weight, eps, activation, out, n_threads, False, NULL, 0)


cdef gdn_status c_decay_gate(const gdn_tensor *a, const gdn_tensor *A, const gdn_tensor *dt_bias,
                             const float *lower_bound, const gdn_tensor *out, int32_t n_threads) noexcept nogil:
    if a == NULL or A == NULL or dt_bias == NULL or out == NULL:
        return GDN_ERR_NULL
    if n_threads < 0:
        return GDN_ERR_VALUE
    return do_decay_gate(a, A, dt_bias, lower_bound, out, n_threads, False, NULL, 0)


cdef gdn_status c_solve_tri(const gdn_tensor *a, const gdn_tensor *b, int32_t lower, int32_t unit,
                            const gdn_tensor *out, int32_t n_threads) noexcept nogil:
    if a == NULL or b == NULL or out == NULL:
        return GDN_ERR_NULL
    if n_threads < 0:
        return GDN_ERR_VALUE
    return do_solve_tri(a, b, lower, unit, out, n_threads, False, NULL, 0)


# ---- the Python faces: a dry call checks, then overlaps are looked for, then it runs ------------------------------

ACTIVATIONS = {"silu": GDN_ACT_SILU, "sigmoid": GDN_ACT_SIGMOID}
FORMS = {"sum": GDN_L2_FORM_SUM, "max": GDN_L2_FORM_MAX}


cdef ndarray rows_array(obj, str name, bint writable):
    """An array of 1 to 4 axes."""
    cdef ndarray x = as_array(obj, name, writable)
    if not 1 <= x.ndim <= 4:
        raise ValueError(f"{name} must have 1 to 4 axes, got shape {(<object>x).shape}")
    return x


cdef ndarray output_like(ndarray x, out, str name="out"):
    cdef ndarray y
    if out is None:
        return np.empty((<object>x).shape, np.float32)
    y = rows_array(out, name, True)
    if (<object>y).shape != (<object>x).shape and not isinstance(out, Tensor):
        raise ValueError(f"{name} has shape {(<object>y).shape}, the input {(<object>x).shape}")
    return y


def l2_norm(x, eps=1e-6, *, form="sum", out=None, n_threads=None):
    """``x / sqrt(sum x^2 + eps)`` (form "sum", as FLA and transformers) or ``x / max(||x||, eps)`` ("max", as
    ggml_l2_norm), along the last axis of x, 1 to 4 axes, float32, any strides.  out may be exactly x.

    Raises ValueError (shape, stride, overlap, option) and TypeError (anything but float32) before anything is written.
    """
    cdef ndarray x_ = rows_array(x, "x", False)
    cdef ndarray y = output_like(x_, out)
    cdef gdn_tensor c_x, c_out
    cdef char message[256]
    cdef gdn_status status
    cdef float c_eps = float_argument(eps, "eps")
    cdef int32_t c_form = choice(FORMS, form, "form"), threads = threads_argument(n_threads)
    message[0] = 0
    to_c(x_, &c_x)
    to_c(y, &c_out)
    status = do_l2_norm(&c_x, c_eps, c_form, &c_out, threads, True, message, sizeof(message))
    if status != GDN_OK:
        raise_status(status, message)
    check_overlap("out", y, (("x", x_, True),))
    with nogil:
        do_l2_norm(&c_x, c_eps, c_form, &c_out, threads, False, NULL, 0)
    return y if out is None else out


def rms_norm_gated(x, gate, weight, eps=1e-6, *, activation="silu", out=None, n_threads=None):
    """``x / sqrt(mean x^2 + eps) * weight * act(gate)`` along the last axis.

    x, gate, out  the same shape, 1 to 4 axes, float32, any strides; weight (n,).  activation "silu" (GDN) or
    "sigmoid" (KDA).  out may be exactly x or exactly gate.

    Raises ValueError (shape, stride, overlap, option) and TypeError (anything but float32) before anything is written.
    """
    cdef ndarray x_ = rows_array(x, "x", False)
    cdef ndarray z = rows_array(gate, "gate", False)
    cdef ndarray w = fit(weight, "weight", 1, False)
    cdef ndarray y = output_like(x_, out)
    cdef gdn_tensor c_x, c_gate, c_weight, c_out
    cdef char message[256]
    cdef gdn_status status
    cdef float c_eps = float_argument(eps, "eps")
    cdef int32_t c_act = choice(ACTIVATIONS, activation, "activation"), threads = threads_argument(n_threads)
    message[0] = 0
    to_c(x_, &c_x)
    to_c(z, &c_gate)
    to_c(w, &c_weight)
    to_c(y, &c_out)
    status = do_rms_norm_gated(&c_x, &c_gate, &c_weight, c_eps, c_act, &c_out, threads, True, message, sizeof(message))
    if status != GDN_OK:
        raise_status(status, message)
    check_overlap("out", y, (("x", x_, True), ("gate", z, True), ("weight", w, False)))
    with nogil:
        do_rms_norm_gated(&c_x, &c_gate, &c_weight, c_eps, c_act, &c_out, threads, False, NULL, 0)
    return y if out is None else out


def decay_gate(a, A, dt_bias, *, lower_bound=None, out=None, n_threads=None):
    """The log decay g: ``softplus(a + dt_bias) * A``, or ``lower_bound * sigmoid(-A * (a + dt_bias))``.

    a, out      (n_seqs, n_tokens, H) with dt_bias (H,): scalar gate; or (n_seqs, n_tokens, H, S_k) with dt_bias
                (H, S_k) or (H * S_k,): per key channel.  float32, any strides; out may be exactly a
    A           (H,): -exp(A_log) (GGUF's ssm_a is A already); 0 * -inf counts as 0, a decay of exactly 1
    lower_bound a number (FLA's KDA), or None

    softplus keeps a relative accuracy of 1e-6 for any argument, results below float32's normal range included.
    Raises ValueError (shape, stride, overlap, option) and TypeError (anything but float32) before anything is written.
    """
    cdef ndarray a_ = as_array(a, "a", False)
    cdef ndarray A_ = fit(A, "A", 1, False)
    cdef ndarray bias = as_array(dt_bias, "dt_bias", False)
    cdef ndarray y
    cdef gate_tensors c
    cdef char message[256]
    cdef gdn_status status
    cdef float c_bound = 0
    cdef const float *bound = NULL
    cdef int32_t threads = threads_argument(n_threads)
    message[0] = 0
    if not 3 <= a_.ndim <= 4:
        raise ValueError(f"a must have 3 axes (n_seqs, n_tokens, H) or 4, got shape {(<object>a_).shape}")
    if isinstance(dt_bias, Tensor):
        bias = fit(dt_bias, "dt_bias", 1 if a_.ndim == 3 else 2, False)
    if lower_bound is not None:
        c_bound = float_argument(lower_bound, "lower_bound")
        bound = &c_bound
    y = output_like(a_, out)
    bias = fill_gate(&c, a_, A_, bias, y)
    status = do_decay_gate(&c.a, &c.A, &c.dt_bias, bound, &c.out, threads, True, message, sizeof(message))
    if status != GDN_OK:
        raise_status(status, message)
    check_overlap("out", y, (("a", a_, True), ("A", A_, False), ("dt_bias", bias, False)))
    with nogil:
        do_decay_gate(&c.a, &c.A, &c.dt_bias, bound, &c.out, threads, False, NULL, 0)
    return y if out is None else out


cdef struct gate_tensors:
    gdn_tensor a, A, dt_bias, out


cdef ndarray fill_gate(gate_tensors *c, ndarray a, ndarray A, ndarray bias, ndarray out):
    """The C form of a gate's arrays; returns dt_bias as it is read."""
    bias = per_channel_bias(bias, a)
    to_c(a, &c.a)
    to_c(A, &c.A)
    to_c(bias, &c.dt_bias)
    to_c(out, &c.out)
    if a.ndim == 3:
        add_unit_axis(&c.a)
        add_unit_axis(&c.dt_bias)
        add_unit_axis(&c.out)
    return bias


cdef ndarray per_channel_bias(ndarray bias, ndarray a):
    """dt_bias as (H,) for a scalar gate, as (H, S_k) per channel: a flat one is split without a copy."""
    if a.ndim == 4 and bias.ndim == 1 and bias.shape[0] == a.shape[2] * a.shape[3]:
        return np.lib.stride_tricks.as_strided(
            bias, (a.shape[2], a.shape[3]), (bias.strides[0] * a.shape[3], bias.strides[0]), writeable=False)
    if bias.ndim != a.ndim - 2:
        raise ValueError(f"dt_bias must have shape {(<object>a).shape[2:]}, got {(<object>bias).shape}")
    return bias


cdef void add_unit_axis(gdn_tensor *t) noexcept:
    t.ne = [1, t.ne[0], t.ne[1], t.ne[2]]
    t.nb = [4, t.nb[0], t.nb[1], t.nb[2]]


def solve_tri(a, b, *, lower=True, unit=False, out=None, n_threads=None):
    """X of ``A X = B`` with A triangular, batched: ggml_solve_tri's meaning.

    a (..., n, n), b and out (..., n, m), up to two equal batch axes, float32, any strides.  Only the triangle asked
    for is read, with ``unit`` not its diagonal either.  A zero on the diagonal divides by zero as float32 does.
    out may be exactly b.

    Raises ValueError (shape, stride, overlap) and TypeError (anything but float32) before anything is written.
    """
    cdef ndarray a_ = rows_array(a, "a", False)
    cdef ndarray b_ = rows_array(b, "b", False)
    cdef ndarray y = output_like(b_, out)
    cdef gdn_tensor c_a, c_b, c_out
    cdef char message[256]
    cdef gdn_status status
    cdef int32_t c_lower = flag_argument(lower, "lower"), c_unit = flag_argument(unit, "unit")
    cdef int32_t threads = threads_argument(n_threads)
    message[0] = 0
    if a_.ndim < 2 or b_.ndim < 2:
        raise ValueError(f"a and b must have at least 2 axes, got shapes {(<object>a_).shape} and {(<object>b_).shape}")
    to_c(a_, &c_a)
    to_c(b_, &c_b)
    to_c(y, &c_out)
    status = do_solve_tri(&c_a, &c_b, c_lower, c_unit, &c_out, threads, True, message, sizeof(message))
    if status != GDN_OK:
        raise_status(status, message)
    check_overlap("out", y, (("a", a_, False), ("b", b_, True)))
    with nogil:
        do_solve_tri(&c_a, &c_b, c_lower, c_unit, &c_out, threads, False, NULL, 0)
    return y if out is None else out
