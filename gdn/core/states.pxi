# Python's states, rows and packed lengths: what the faces of the delta rule and of the convolution share.

cdef class CallArrays:
    """The arrays of one call, kept alive while C holds their addresses."""
    cdef ndarray out, state, state_out, cu_seqlens, rows_in, rows_out


cdef int64_t fill_lengths(CallArrays c, cu_seqlens, int64_t n_batch, const int64_t **c_cu_seqlens) except -1:
    """The number of sequences: those packed, or those of the arrays."""
    if cu_seqlens is None:
        return n_batch
    c.cu_seqlens = integers(cu_seqlens, "cu_seqlens", ValueError)
    if c.cu_seqlens.ndim != 1 or c.cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape (n_seqs + 1,), got {(<object>c.cu_seqlens).shape}")
    c_cu_seqlens[0] = <const int64_t *>PyArray_DATA(c.cu_seqlens)
    return c.cu_seqlens.shape[0] - 1


cdef int64_t fill_states(CallArrays c, state, state_out, snapshots, tuple shape, int64_t longest, gdn_tensor *c_state,
                         gdn_tensor *c_state_out, int64_t *snapshot_nb) except -1:
    """The states given and wanted, `shape` a slot; the number of slots to fill."""
    cdef int64_t n_snapshots = 1 if snapshots is None else count_argument(snapshots, "snapshots")
    if state is not None:
        c.state = fit(state, "state", len(shape), False)
        to_c(c.state, c_state)
        if c.state.shape[0] != shape[0]:
            raise ValueError(f"state holds {c.state.shape[0]} sequences, the call has {shape[0]}")
        if (<object>c.state).shape != shape:
            raise ValueError(f"state has shape {(<object>c.state).shape}, the call needs {shape}")
    n_snapshots = max(<int64_t>1, min(n_snapshots, longest))
    c.state_out = state_target(shape, n_snapshots, c.state, state_out, snapshots is not None, c_state_out, snapshot_nb)
    return n_snapshots


cdef int64_t fill_cache(CallArrays c, cache, int ndim, rows_in, rows_out, int64_t n_seqs, gdn_tensor *c_state,
                        gdn_tensor *c_state_out, const int64_t **c_rows_in, const int64_t **c_rows_out) except -1:
    """The cache of a call in place and its rows; the number of slots."""
    c.state = c.state_out = fit(cache, "cache", ndim, True)
    to_c(c.state, c_state)
    c_state_out[0] = c_state[0]
    c.rows_in = rows_argument(rows_in, "rows_in", n_seqs, 1)
    c.rows_out = c.rows_in if rows_out is None else rows_argument(rows_out, "rows_out", n_seqs, 2)
    c_rows_in[0] = <const int64_t *>PyArray_DATA(c.rows_in)
    c_rows_out[0] = <const int64_t *>PyArray_DATA(c.rows_out)
    return 1 if c.rows_out.ndim == 1 else c.rows_out.shape[1]


cdef int check_outputs(CallArrays c, tuple inputs, str x_name, ndarray x, str state, str state_out) except -1:
    """No output overlaps anything, but out may be exactly x and the new state exactly the old."""
    inputs += (("cu_seqlens", c.cu_seqlens, False), ("rows_in", c.rows_in, False), ("rows_out", c.rows_out, False))
    check_overlap("out", c.out, inputs)
    check_overlap("out", c.out, ((x_name, x, True), (state, c.state, False)))
    if c.state_out is not None:
        check_overlap(state_out, c.state_out, inputs)
        check_overlap(state_out, c.state_out, ((x_name, x, False), (state, c.state, True), ("out", c.out, False)))
    return 0


cdef ndarray integers(obj, str name, error):
    """An int64 contiguous array of integers, the object's own memory where that is one already."""
    cdef ndarray x
    if is_masked(obj):
        raise TypeError(f"{name} must not be a masked array")
    x = obj if type(obj) is ndarray else np.asarray(obj)
    if isinstance(obj, Tensor):
        if (<Tensor>obj).t.type != GDN_TYPE_I32:
            raise TypeError(f"{name} must hold integers, got a Tensor of {obj.type}")
        while x.ndim > 1 and x.shape[0] == 1:
            x = x[0]
    if x.ndim == 0:
        raise (ValueError if (<object>x).dtype.kind in "iu" else TypeError)(f"{name} must be an array, got {obj!r}")
    if PyArray_TYPE(x) == NPY_INT64 and PyArray_ISCARRAY_RO(x):
        return x
    if (<object>x).dtype.kind == "O" and all([type(i) is int for i in (<object>x).flat]):
        raise error(f"{name} holds integers beyond int64")
    if (<object>x).dtype.kind not in "iu" and x.size > 0:
        raise TypeError(f"{name} must hold integers, got {(<object>x).dtype}")
    if (<object>x).dtype == np.uint64 and x.size > 0 and (<object>x).max() > 2**63 - 1:
        raise error(f"{name}: {(<object>x).max()} is beyond int64")
    return np.ascontiguousarray(x, np.int64)


cdef ndarray rows_argument(obj, str name, int64_t n_seqs, int max_ndim):
    """rows_in (n_seqs,), or rows_out (n_seqs,) or (n_seqs, K)."""
    cdef ndarray x = integers(obj, name, IndexError)
    if max_ndim == 2 and n_seqs == 1 and isinstance(obj, Tensor):        # its slots; the unit axis of sequences went
        x = x.reshape(1, -1)
    if not 1 <= x.ndim <= max_ndim or x.shape[0] != n_seqs:
        raise ValueError(f"{name} must have shape ({n_seqs},){' or (%d, K)' % n_seqs if max_ndim == 2 else ''}, "
                         f"got {(<object>x).shape}")
    if x.ndim == 2 and x.shape[1] < 1:
        raise ValueError(f"{name} must have at least one slot, got shape {(<object>x).shape}")
    return x


cdef int64_t longest_sequence(const int64_t *cu_seqlens, int64_t n_seqs, int64_t n_tokens) noexcept:
    """Lengths that are not checked yet: at most n_tokens."""
    cdef int64_t i, longest = 0
    if cu_seqlens == NULL:
        return n_tokens
    for i in range(n_seqs):
        if 0 <= cu_seqlens[i] <= cu_seqlens[i + 1] <= n_tokens:
            longest = max(longest, cu_seqlens[i + 1] - cu_seqlens[i])
    return longest


cdef ndarray state_target(tuple shape, int64_t n_snapshots, ndarray state, state_out, bint with_snapshots, gdn_tensor *c_out,
                          int64_t *snapshot_nb):
    """Allocate or check state_out, `shape` a slot, its slots snapshot_nb bytes apart.  Allocated in the order of the state
    given, or with zeros for slots that will not exist."""
    cdef ndarray x, first
    cdef int ndim = len(shape)
    if state_out is None:
        if with_snapshots:
            x = np.zeros((n_snapshots, *shape), np.float32)
        else:
            x = np.empty(shape, np.float32) if state is None else np.empty_like(state, subok=False)
    elif not with_snapshots:
        x = fit(state_out, "state_out", ndim, True)
    elif isinstance(state_out, Tensor):
        x = split_snapshots(fit(state_out, "state_out", ndim, True), shape[0])
    else:
        x = fit(state_out, "state_out", ndim + 1, True)
    first = x
    if with_snapshots:
        if x.shape[0] < n_snapshots:
            raise ValueError(f"state_out has {x.shape[0]} slots, {n_snapshots} snapshots are to be kept")
        snapshot_nb[0] = x.strides[0] if x.strides[0] != 0 else 4         # empty slots have no distance, 0 has a meaning
        first = x[0]
    if (<object>first).shape != shape:
        raise ValueError(f"state_out holds states of shape {(<object>first).shape}, the call makes {shape}")
    to_c(first, c_out)
    return x


cdef ndarray split_snapshots(ndarray x, int64_t n_seqs):
    """(K * n_seqs, ...) slot-major as (K, n_seqs, ...), the same memory."""
    if n_seqs == 0:
        return x.reshape(1, *(<object>x).shape)
    if x.shape[0] % n_seqs != 0:
        raise ValueError(f"state_out has {x.shape[0]} rows, no multiple of the call's {n_seqs} sequences")
    return x.reshape(x.shape[0] // n_seqs, n_seqs, *(<object>x).shape[1:])
