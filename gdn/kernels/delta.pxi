# A work item of the delta rule: one sequence, one group of value heads, one part of their columns.
#
# A sequence runs in up to two stretches: chunked, then token by token.  A snapshot must be the state that was there,
# so the last tokens whose states are kept run token by token, whatever the mode.  Calls with a token log, a tree or
# checkpoints go another way.
#
# Needs: simd.pxi, few_rows.pxi (PANELS), item.pxi, stretches.pxi (run_chunked, run_recurrent), log.pxi (log_item), level.pxd
# (gdn_delta_job).


cdef size_t delta_scratch(const gdn_delta_job *job) noexcept nogil:
    cdef delta_buffers buf
    return carve_delta_buffers(&buf, job, NULL)


cdef void delta_plan(gdn_delta_job *job) noexcept nogil:
    """How a checked call runs on this level: where recurrent turns into chunked, heads to an item.  A state
    of one key channel never runs chunked: where all keys are one direction, a chunk's sums cancel to the few numbers
    there are, and its products cost more than they save."""
    cdef const int64_t *cu_seqlens = job.args.call.cu_seqlens
    cdef int64_t i, n
    if job.args.mode == GDN_MODE_RECURRENT or job.S_k == 1:
        job.chunked_from = INT64_MAX
    elif job.args.mode == GDN_MODE_CHUNKED:
        job.chunked_from = 1
    else:
        job.chunked_from = CHUNKED_FROM
    job.part_unit = NV * VL
    job.few_tokens = 0
    if job.has_lists:
        for i in range(job.n_seqs):
            n = job.args.q.ne[2] if cu_seqlens == NULL else cu_seqlens[i + 1] - cu_seqlens[i]
            if few_rows_take(job, n):
                job.few_tokens = max(job.few_tokens, n)
    # Packing a key is shared by its value heads, but of single tokens it costs less than leaving their order in memory.
    job.n_groups = job.H_v if job.single_tokens else job.H_k


cdef void delta_item(const void *job, int64_t i, void *scratch) noexcept nogil:
    cdef delta_work_item item
    cdef int64_t m, kept, n_chunked
    cdef int order
    carve_delta_buffers(&item.buf, <const gdn_delta_job *>job, <char *>scratch)
    place_item(&item, <const gdn_delta_job *>job, i)
    if item.job.has_lists:
        log_item(&item)
        return
    if item.n_tokens == 0:
        for m in range(item.n_heads):
            pass_state_on(&item, m)
        return
    kept = oldest_kept(&item)
    n_chunked = item.n_tokens - kept if item.n_tokens >= item.job.chunked_from else 0
    order = state_order(&item) if n_chunked == 0 else PANELS
    if item.n_tokens > 1 and type_in_place(&item) != GDN_TYPE_F32:
        order = PANELS               # a state is rounded once a call
    if order == PANELS:
        for m in range(item.n_heads):
            load_head(&item, m)
    if n_chunked > 0:
        run_chunked(&item, 0, n_chunked, CHUNK_MAX)
        for m in range(item.n_heads):
            keep_head(&item, m, n_chunked - 1)
    run_recurrent(&item, n_chunked, order)
