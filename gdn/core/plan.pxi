# What a checked call on states - the delta rule, the convolution - holds until it runs.

cdef struct call_plan:
    refusal why
    cache_rows rows
    int n_workers
    int64_t n_items
    size_t rows_bytes, worker_bytes


cdef size_t plan_bytes(const call_plan *p) noexcept nogil:
    """Scratch of any alignment."""
    return 64 + p.rows_bytes + p.n_workers * p.worker_bytes


cdef gdn_status check_scratch(const call_plan *p, const void *scratch, size_t size) noexcept nogil:
    if scratch != NULL and size >= plan_bytes(p):
        return GDN_OK
    return fail(&p.why, GDN_ERR_SCRATCH, "scratch of %llu bytes is needed, got %llu", <uint64_t>plan_bytes(p),
                <uint64_t>size)


cdef void run_plan(call_plan *p, gdn_item_fn fn, const void *job, gdn_state_rows *rows, bint claim,
                   void *scratch) noexcept nogil:
    """Run a planned job, whose `rows` are filled here, in scratch of plan_bytes(p)."""
    cdef char *at = <char *>scratch + (-<intptr_t>scratch & 63)
    rows_resolve(&p.rows, at, rows)
    run_items(fn, job, p.n_items, p.n_workers, True, claim, at + p.rows_bytes, p.worker_bytes)
