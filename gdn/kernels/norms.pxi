# Row-wise kernels: rows of any stride along ne[0], VL lanes at a time; nothing past a row's end is read.
#
# Needs: simd.pxi, pack.pxi (lanes_load), level.pxd (gdn_rowwise_job), storage.pxi (lanes_load_typed, lanes_store_typed).


cdef inline char *row_at(const gdn_tensor *x, const gdn_tensor *shape, int64_t row) noexcept nogil:
    """Row number `row` of x, counted over axes 1, 2, 3 of `shape`, axis 1 fastest."""
    cdef int64_t i1 = row % shape.ne[1], i2 = row // shape.ne[1] % shape.ne[2]
    cdef int64_t i3 = row // (shape.ne[1] * shape.ne[2])
    return <char *>x.data + i1 * x.nb[1] + i2 * x.nb[2] + i3 * x.nb[3]


cdef enum:
    SUM_BLOCK = 32               # vectors summed before their sum joins the total: rounding does not add up in long rows


cdef inline float sum_of_squares(const char *x, int64_t nb, int type, int64_t n) noexcept nogil:
    cdef vf total = v_set(0), sum, v
    cdef int64_t i = 0, stop
    while i < n:
        sum = v_set(0)
        stop = min(n, i + SUM_BLOCK * VL)
        while i < stop:
            v = lanes_load_typed(x + i * nb, nb, type, min(<int64_t>VL, n - i))
            sum += v * v
            i += VL
        total += sum
    return v_sum(total)


cdef void l2_norm_item(const void *job_, int64_t item, void *scratch) noexcept nogil:
    """out = x / sqrt(sum x^2 + eps), or x / max(||x||, eps), over rows of ne[0] floats; x is shaped as out is."""
    cdef const gdn_rowwise_job *job = <const gdn_rowwise_job *>job_
    cdef int64_t row, i, n = job.out.ne[0], lanes
    cdef int64_t nb_x = job.x.nb[0], nb_out = job.out.nb[0]
    cdef const char *x
    cdef char *out
    cdef float scale
    for row in range(item * job.rows_per_item, min((item + 1) * job.rows_per_item, job.n_rows)):
        x = row_at(&job.x, &job.out, row)
        out = row_at(&job.out, &job.out, row)
        scale = sum_of_squares(x, nb_x, job.x.type, n)
        scale = 1 / (max(sqrtf(scale), job.eps) if job.form == GDN_L2_FORM_MAX else sqrtf(scale + job.eps))
        for i from 0 <= i < n by VL:
            lanes = min(<int64_t>VL, n - i)
            lanes_store_typed(out + i * nb_out, nb_out, job.out.type,
                              lanes_load_typed(x + i * nb_x, nb_x, job.x.type, lanes) * scale, lanes)


cdef void rms_norm_gated_item(const void *job_, int64_t item, void *scratch) noexcept nogil:
    """out = x / sqrt(mean x^2 + eps) * w * act(y) over rows of ne[0] floats; x and the gate y are shaped as out is, the
    weight w has ne[0] floats for all rows."""
    cdef const gdn_rowwise_job *job = <const gdn_rowwise_job *>job_
    cdef int64_t row, i, n = job.out.ne[0], lanes
    cdef int64_t nb_x = job.x.nb[0], nb_gate = job.y.nb[0], nb_out = job.out.nb[0]
    cdef const char *x
    cdef const char *gate
    cdef char *out
    cdef float scale
    cdef vf z
    for row in range(item * job.rows_per_item, min((item + 1) * job.rows_per_item, job.n_rows)):
        x = row_at(&job.x, &job.out, row)
        gate = row_at(&job.y, &job.out, row)
        out = row_at(&job.out, &job.out, row)
        scale = 1 / sqrtf(sum_of_squares(x, nb_x, job.x.type, n) / n + job.eps)
        for i from 0 <= i < n by VL:
            lanes = min(<int64_t>VL, n - i)
            z = lanes_load_typed(gate + i * nb_gate, nb_gate, job.y.type, lanes)
            z = v_silu(z) if job.activation == GDN_ACT_SILU else v_sigmoid(z)
            z = lanes_load_typed(x + i * nb_x, nb_x, job.x.type, lanes) * scale * lanes_load(
                <const char *>job.w.data + i * job.w.nb[0], job.w.nb[0], lanes) * z
            lanes_store_typed(out + i * nb_out, nb_out, job.out.type, z, lanes)


cdef void decay_gate_item(const void *job_, int64_t item, void *scratch) noexcept nogil:
    """x = a, y = A, w = dt_bias; _core has put a scalar gate's heads on axis 0, and A and dt_bias likewise."""
    cdef const gdn_rowwise_job *job = <const gdn_rowwise_job *>job_
    cdef int64_t row, i, n = job.out.ne[0], lanes, i1
    cdef const char *a
    cdef const char *A_row
    cdef const char *bias
    cdef char *out
    cdef vf x, A
    for row in range(item * job.rows_per_item, min((item + 1) * job.rows_per_item, job.n_rows)):
        i1 = row % job.out.ne[1]
        a = row_at(&job.x, &job.out, row)
        out = row_at(&job.out, &job.out, row)
        A_row = <const char *>job.y.data + i1 * job.y.nb[1]
        bias = <const char *>job.w.data + i1 * job.w.nb[1]
        for i from 0 <= i < n by VL:
            lanes = min(<int64_t>VL, n - i)
            A = lanes_load(A_row + i * job.y.nb[0], job.y.nb[0], lanes)
            x = lanes_load_typed(a + i * job.x.nb[0], job.x.nb[0], job.x.type, lanes) + lanes_load(
                bias + i * job.w.nb[0], job.w.nb[0], lanes)
            if job.gate == GDN_GATE_BOUNDED:
                x = v_sigmoid(v_mul_zero(-A, x)) * job.lower_bound
            else:
                x = v_mul_zero(A, v_softplus(x))
                if job.gate == GDN_GATE_CLAMPED:
                    x = v_max(v_set(job.lower_bound), x)
            lanes_store_typed(out + i * job.out.nb[0], job.out.nb[0], job.out.type, x, lanes)
