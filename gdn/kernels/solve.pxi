# A X = B, A triangular, by forward substitution (backward for upper) on a few vectors of columns at a time.
#
# Needs: simd.pxi, pack.pxi (at, lanes_load, lanes_store), level.pxd (gdn_solve_job).

cdef enum:
    SOLVE_NV = 4                 # vectors of columns that share a scalar of A


cdef void solve_tri_item(const void *job_, int64_t item, void *scratch) noexcept nogil:
    cdef const gdn_solve_job *job = <const gdn_solve_job *>job_
    cdef int64_t part = item % job.n_parts, batch = item // job.n_parts
    cdef int64_t i2 = batch % job.out.ne[2], i3 = batch // job.out.ne[2], c
    cdef int64_t stop = min(job.out.ne[0], (part + 1) * job.part_columns)
    cdef const char *a = <const char *>job.a.data + i2 * job.a.nb[2] + i3 * job.a.nb[3]
    cdef const char *b = <const char *>job.b.data + i2 * job.b.nb[2] + i3 * job.b.nb[3]
    cdef char *out = <char *>job.out.data + i2 * job.out.nb[2] + i3 * job.out.nb[3]
    c = part * job.part_columns
    while c + SOLVE_NV * VL <= stop:
        solve_columns(job, a, b, out, c, VL, SOLVE_NV)
        c += SOLVE_NV * VL
    while c < stop:
        solve_columns(job, a, b, out, c, min(<int64_t>VL, stop - c), 1)
        c += VL


cdef inline void solve_columns(const gdn_solve_job *job, const char *a, const char *b, char *out, int64_t c,
                               int64_t lanes, const int nv) noexcept nogil:
    """nv vectors of columns from c on; the triangle that is not A's is never read."""
    cdef vf acc[SOLVE_NV]
    cdef vf diagonal
    cdef float a_ij
    cdef int64_t n = job.out.ne[1], row, i, j, step, nb_b = job.b.nb[0], nb_out = job.out.nb[0]
    cdef int v
    for row in range(n):
        i = row if job.lower else n - 1 - row
        for v in range(nv):
            acc[v] = lanes_load(b + i * job.b.nb[1] + (c + v * VL) * nb_b, nb_b, lanes)
        for step in range(row):
            j = step if job.lower else n - 1 - step
            a_ij = at(a + i * job.a.nb[1] + j * job.a.nb[0])
            for v in range(nv):
                acc[v] -= a_ij * lanes_load(out + j * job.out.nb[1] + (c + v * VL) * nb_out, nb_out, lanes)
        diagonal = v_set(1 if job.unit else at(a + i * (job.a.nb[1] + job.a.nb[0])))
        for v in range(nv):
            lanes_store(out + i * job.out.nb[1] + (c + v * VL) * nb_out, nb_out, acc[v] / diagonal, lanes)
