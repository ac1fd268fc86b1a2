# Python's states, rows, packed lengths and scratch: what the faces of the delta rule and of the convolution share.
#
# Needs: status.pxi (check, choice), scratch.pxi (arena, arena_give, arena_take), cache_rows.pxi (plan_fn, run_call,
# scratch_bytes, state_call).

cdef class CallArrays:
    """The arrays of one call, kept alive while C holds their addresses."""
    cdef ndarray out, state, state_out, cu_seqlens, rows_in, rows_out
    cdef str x_name               # of the input that out may be
    cdef ndarray x
    cdef tuple inputs             # the others, for check_overlap
    cdef ndarray log_in, log_out, parents, checkpoints
    cdef tuple log_tensors        # of a log that is written

    def __cinit__(self):
        self.log_tensors = ()


cdef int call_on_states(plan_fn plan, const void *args, CallArrays arrays, bint in_place) except -1:
    """Check, then run without the GIL in scratch of the pool."""
    cdef state_call c
    cdef arena *scratch
    check(plan(args, &c, in_place))
    check_outputs(arrays, in_place)
    scratch = arena_take(scratch_bytes(&c))
    with nogil:
        run_call(&c, scratch.data)
    arena_give(scratch)
    return 0


cdef int fill_call(gdn_call *c, CallArrays arrays, cu_seqlens, int64_t n_batch) except -1:
    """The number of sequences, those packed or those of the arrays, and what is the same in every call from Python."""
    c.n_snapshots = 1
    c.message, c.message_size = python_buffer.text, python_buffer.size
    c.n_seqs = n_batch
    if cu_seqlens is not None:
        arrays.cu_seqlens = integers(cu_seqlens, "cu_seqlens", ValueError)
        if arrays.cu_seqlens.ndim != 1 or arrays.cu_seqlens.shape[0] < 1:
            raise ValueError(f"cu_seqlens must have shape (n_seqs + 1,), got {(<object>arrays.cu_seqlens).shape}")
        c.cu_seqlens = <const int64_t *>PyArray_DATA(arrays.cu_seqlens)
        c.n_seqs = arrays.cu_seqlens.shape[0] - 1
    return 0


ROUNDINGS = {"nearest": GDN_ROUND_NEAREST, "stochastic": GDN_ROUND_STOCHASTIC}


cdef int fill_rounding(gdn_call *c, rounding, seed) except -1:
    """How states narrower than float32 are rounded; a seed is of stochastic rounding, which needs one."""
    if seed is None and rounding == "nearest":
        return 0
    c.rounding = choice(ROUNDINGS, rounding, "rounding")
    if (seed is None) != (c.rounding == GDN_ROUND_NEAREST):
        raise ValueError(f"rounding {rounding!r} needs a seed" if seed is None else f"seed is {seed!r}, which rounding "
                         f"{rounding!r} does not use")
    if seed is not None:
        c.seed = integer(seed, "seed", 0, 2**64 - 1)
    return 0


cdef int fill_states(gdn_call *c, CallArrays arrays, state, state_out, snapshots, tuple shape, int64_t n_tokens) except -1:
    """The states given and wanted, `shape` those of one snapshot of all sequences."""
    cdef int64_t n_snapshots = 1 if snapshots is None else integer(snapshots, "snapshots", 1)
    if state is not None:
        arrays.state = fit_typed(state, "state", len(shape), False)
        to_c(arrays.state, &c.state)
        if arrays.state.shape[0] != shape[0]:
            raise ValueError(f"state holds {arrays.state.shape[0]} sequences, the call has {shape[0]}")
        if (<object>arrays.state).shape != shape:
            raise ValueError(f"state has shape {(<object>arrays.state).shape}, the call needs {shape}")
    c.n_snapshots = max(<int64_t>1, min(n_snapshots, longest_sequence(c.cu_seqlens, c.n_seqs, n_tokens)))
    arrays.state_out = state_target(c, shape, arrays.state, state_out, snapshots is not None)
    return 0


cdef int fill_cache(gdn_call *c, CallArrays arrays, cache, int ndim, rows_in, rows_out, bint keeps_none) except -1:
    """The cache of a call in place and its rows; keeps_none: without rows_out nothing is kept, else rows_in's rows."""
    cdef ndarray x = fit_typed(cache, "cache", ndim, True)
    to_c(x, &c.state)
    if rows_out is None and keeps_none:
        rows_out = np.full(c.n_seqs, -1, np.int64)
    fill_rows(c, arrays, rows_argument(rows_in, "rows_in", c.n_seqs, 1),
              None if rows_out is None else rows_argument(rows_out, "rows_out", c.n_seqs, 2))
    c.state_out, arrays.state, arrays.state_out = c.state, x, x
    return 0


cdef void fill_rows(gdn_call *c, CallArrays arrays, ndarray rows_in, ndarray rows_out) noexcept:
    """Checked rows: rows_in (n_seqs,); rows_out (n_seqs,) or (n_seqs, K), None is rows_in."""
    arrays.rows_in, arrays.rows_out = rows_in, rows_in if rows_out is None else rows_out
    c.rows_in = <const int64_t *>PyArray_DATA(arrays.rows_in)
    c.rows_out = <const int64_t *>PyArray_DATA(arrays.rows_out)
    c.n_snapshots = 1 if arrays.rows_out.ndim == 1 else arrays.rows_out.shape[1]


cdef int check_outputs(CallArrays c, bint in_place) except -1:
    """No output overlaps anything, but out may be exactly x and the new state exactly the old."""
    cdef str state = "cache" if in_place else "state"
    cdef tuple inputs = c.inputs + (("cu_seqlens", c.cu_seqlens, False), ("rows_in", c.rows_in, False),
                                    ("rows_out", c.rows_out, False))
    check_overlap("out", c.out, inputs)
    for name, x, _ in c.log_tensors:               # what is written of a log overlaps nothing else
        check_overlap(name, x, inputs + ((c.x_name, c.x, False), (state, c.state, False), ("out", c.out, False)))
        inputs += ((name, x, False),)
    check_overlap("out", c.out, ((c.x_name, c.x, True), (state, c.state, False)))
    if c.state_out is not None:
        state_out = "cache" if in_place else "state_out"
        check_overlap(state_out, c.state_out, inputs)
        check_overlap(state_out, c.state_out, ((c.x_name, c.x, False), (state, c.state, True), ("out", c.out, False)))
    return 0


cdef ndarray integers(obj, str name, error):
    """An int64 contiguous array of at least one axis, the object's own memory where that is one already."""
    cdef ndarray x
    if type(obj) is not ndarray or PyArray_TYPE(obj) != NPY_INT64 or not PyArray_ISCARRAY_RO(obj):
        if isinstance(obj, Tensor) and (<Tensor>obj).t.type != GDN_TYPE_I32:
            raise TypeError(f"{name} must hold integers, got a Tensor of {obj.type}")
        x = _arguments.integers(obj, name, error)
        while isinstance(obj, Tensor) and x.ndim > 1 and x.shape[0] == 1:
            x = x[0]
    else:
        x = obj
    if x.ndim == 0:
        raise ValueError(f"{name} must be an array, got {obj!r}")
    return x


cdef ndarray rows_argument(obj, str name, int64_t n_seqs, int max_ndim):
    """rows_in (n_seqs,), or rows_out (n_seqs,) or (n_seqs, K)."""
    cdef ndarray x = integers(obj, name, IndexError)
    if max_ndim == 2 and n_seqs == 1 and isinstance(obj, Tensor):        # its snapshots; the unit axis of sequences went
        x = x.reshape(1, -1)
    if not 1 <= x.ndim <= max_ndim or x.shape[0] != n_seqs:
        raise ValueError(f"{name} must have shape ({n_seqs},){' or (%d, K)' % n_seqs if max_ndim == 2 else ''}, "
                         f"got {(<object>x).shape}")
    if x.ndim == 2 and x.shape[1] < 1:
        raise ValueError(f"{name} must have at least one snapshot, got shape {(<object>x).shape}")
    return x


cdef int64_t longest_sequence(const int64_t *cu_seqlens, int64_t n_seqs, int64_t n_tokens) noexcept nogil:
    """Lengths that are not checked yet: at most n_tokens."""
    cdef int64_t i, longest = 0
    if cu_seqlens == NULL:
        return n_tokens
    for i in range(n_seqs):
        if 0 <= cu_seqlens[i] <= cu_seqlens[i + 1] <= n_tokens:
            longest = max(longest, cu_seqlens[i + 1] - cu_seqlens[i])
    return longest


cdef ndarray state_target(gdn_call *c, tuple shape, ndarray state, state_out, bint with_snapshots):
    """Allocate or check state_out, `shape` one snapshot's, its snapshots c.snapshot_nb bytes apart.  Allocated in the order
    of the state given, or with zeros for snapshots that will not exist."""
    cdef ndarray x, first
    cdef int ndim = len(shape)
    if state_out is None:
        dtype = np.float32 if state is None else result_type(state)
        if with_snapshots:
            x = np.zeros((c.n_snapshots, *shape), dtype)
        else:
            x = np.empty(shape, dtype) if state is None else np.empty_like(state, dtype=dtype, subok=False)
    elif not with_snapshots:
        x = fit_typed(state_out, "state_out", ndim, True)
    elif isinstance(state_out, Tensor):
        x = split_snapshots(fit_typed(state_out, "state_out", ndim, True), shape[0])
    else:
        x = fit_typed(state_out, "state_out", ndim + 1, True)
    first = x
    if with_snapshots:
        if x.shape[0] < c.n_snapshots:
            raise ValueError(f"state_out has room for {x.shape[0]} snapshots, {c.n_snapshots} are to be kept")
        c.snapshot_nb = x.strides[0] if x.strides[0] != 0 else x.itemsize      # empty snapshots have no distance, 0 has a meaning
        first = x[0]
    if (<object>first).shape != shape:
        raise ValueError(f"state_out holds states of shape {(<object>first).shape}, the call makes {shape}")
    to_c(first, &c.state_out)
    return x


cdef ndarray split_snapshots(ndarray x, int64_t n_seqs):
    """(K * n_seqs, ...) snapshot-major as (K, n_seqs, ...), the same memory."""
    if n_seqs == 0:
        return x.reshape(1, *(<object>x).shape)
    if x.shape[0] % n_seqs != 0:
        raise ValueError(f"state_out has {x.shape[0]} rows, no multiple of the call's {n_seqs} sequences")
    return x.reshape(x.shape[0] // n_seqs, n_seqs, *(<object>x).shape[1:])
