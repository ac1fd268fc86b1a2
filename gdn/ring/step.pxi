# A step as a Python object.
#
# Needs: layout.pxi (NOWHERE), slots.pxi (mark), steps.pxi (close_step, ring_abort, ring_begin, snapshots_kept), arguments.pxi
# (int64s, refuse), python.pxi (StateRing).

cdef enum:                        # what of a layer a step has handed out
    SSM_MARKED = 1
    CONV_MARKED = 2


cdef ndarray new_int64s(int64_t n, int64_t m):
    cdef npy_intp shape[2]
    shape[0], shape[1] = n, m
    return PyArray_EMPTY(2, shape, NPY_INT64, 0)


cdef Step start_step(StateRing ring, object seq_ids, object n_tokens, object positions, object parents, object forks):
    cdef Step step = Step.__new__(Step)
    cdef gdn_ring_step *s = &step.s
    cdef ndarray ids = int64s(seq_ids, "seq_ids", -1), at = None, tree = None, rows
    cdef gdn_status status
    cdef int64_t i, most = 1
    memset(s, 0, sizeof(s[0]))
    s.size, s.n_seqs = sizeof(gdn_ring_step), ids.shape[0]
    step.seq_ids, step.n_tokens = ids, int64s(n_tokens, "n_tokens", s.n_seqs)
    s.seq_ids, s.n_tokens = <int64_t *>PyArray_DATA(ids), <int64_t *>PyArray_DATA(step.n_tokens)
    if positions is not None:
        at = int64s(positions, "positions", s.n_seqs)
        s.positions = <int64_t *>PyArray_DATA(at)
    for i in range(s.n_seqs):
        most = max(most, s.n_tokens[i])
    s.n_snapshots = snapshots_kept(ring.ring, most)
    rows = new_int64s(1, s.n_seqs)
    step.rows_in, step.rows_out = rows[0], new_int64s(s.n_seqs, s.n_snapshots)
    s.rows_in, s.rows_out = <int64_t *>PyArray_DATA(rows), <int64_t *>PyArray_DATA(step.rows_out)
    if forks is not None:
        read_forks(step, list(forks))
    if parents is not None:
        if ring.ring.form != GDN_FORM_LOG:
            raise ValueError("a tree (parents) needs a ring of form 'log'")
        step.parents = tree = int64s(parents, "parents", -1)
        if tree.shape[0] != step.n_tokens.sum():
            raise ValueError(f"parents has {tree.shape[0]} entries for {step.n_tokens.sum()} tokens")
        s.parents = <int64_t *>PyArray_DATA(tree)
    if ring.ring.form == GDN_FORM_LOG:
        add_lists(ring, step, most)
    with nogil:
        status = ring_begin(ring.ring, s)
    if status != GDN_OK:
        refuse_step(ring, step, status)
    step.ring = ring
    step.marks = bytearray(ring.n_layers)
    step.checkpoints = step.checkpoints[:s.n_checkpoints] if s.n_checkpoints else None
    return step


cdef int add_lists(StateRing ring, Step step, int64_t most) except -1:
    """Arrays for the lists of a log, as many tokens as there may be."""
    cdef gdn_ring_step *s = &step.s
    if most > INT32_MAX:
        raise ValueError(f"n_tokens must be 0 to {INT32_MAX}, got {most}: a step of form 'log' lists its tokens")
    s.n_log_in, s.n_log_out, s.max_checkpoints = ring.ring.log_capacity, most, s.n_seqs + s.n_forks
    step.log_in, step.log_out = new_int64s(s.n_seqs, s.n_log_in), new_int64s(s.n_seqs, s.n_log_out)
    step.checkpoints = new_int64s(s.max_checkpoints, 3)
    s.log_in, s.log_out = <int64_t *>PyArray_DATA(step.log_in), <int64_t *>PyArray_DATA(step.log_out)
    s.checkpoints = <int64_t *>PyArray_DATA(step.checkpoints)
    return 0


cdef int read_forks(Step step, list forks) except -1:
    """Forks as C takes them: the entry of the step in place of its sequence."""
    cdef dict entries = {id: i for i, id in enumerate(step.seq_ids.tolist())}
    step.forks = new_int64s(len(forks), 3)
    for i, one in enumerate(forks):
        if not isinstance(one, (tuple, list)) or len(one) != 3:
            raise ValueError(f"forks must be (seq_id, n, new_id) each, got {one!r}")
        seq_id, n, new_id = (integer(value, name) for value, name in zip(one, ("seq_id", "n", "new_id"), strict=True))
        if seq_id not in entries:
            raise ValueError(f"forks: sequence {seq_id} is not in the step")
        step.forks[i] = entries[seq_id], n, new_id
    step.checkpoints = new_int64s(len(forks), 3)
    step.s.forks, step.s.n_forks = <int64_t *>PyArray_DATA(step.forks), len(forks)
    step.s.checkpoints, step.s.max_checkpoints = <int64_t *>PyArray_DATA(step.checkpoints), len(forks)
    return 0


cdef int refuse_step(StateRing ring, Step step, gdn_status status) except -1:
    """The exception of a refused begin, which says what it is about."""
    cdef gdn_ring_step *s = &step.s
    cdef int64_t i = s.failed, id, n, at
    if status == GDN_ERR_SPARE:
        raise ValueError(f"the step folds the logs of more sequences than the ring has spare rows: n_spare = {ring.n_spare}")
    if status == GDN_ERR_BUSY and i == NOWHERE:
        raise RingBusyError(f"the step needs spare rows that other steps hold: n_spare = {ring.n_spare}")
    if i >= s.n_seqs:
        source, count, id = step.forks[i - s.n_seqs].tolist()
        if status == GDN_ERR_VALUE and id != NOWHERE:
            raise ValueError(f"forks: {count} tokens of sequence {s.seq_ids[source]} are not in the step, which has "
                             f"{s.n_tokens[source]} of it{' in a tree' if s.parents != NULL else ''}")
        refuse(ring, status, id, "acquired")
    id = s.seq_ids[i] if i != NOWHERE else NOWHERE
    if status == GDN_ERR_VALUE and i != NOWHERE:
        n, at = s.n_tokens[i], s.positions[i] if s.positions != NULL else NOWHERE
        if n < 0 or n > MAX_TOKENS:
            raise ValueError(f"n_tokens must be 0 to {MAX_TOKENS}, got {n} for sequence {id}")
        stands = ring.position(id)
        if stands > MAX_TOKENS and at in (NOWHERE, stands):
            raise ValueError(f"sequence {id} stands at position {stands}, beyond {MAX_TOKENS} none can be continued")
        if at in (NOWHERE, 0, stands):
            raise ValueError(f"a tree has at most n_rollback + 1 = {ring.n_rollback + 1} tokens, each behind its parent; "
                             f"sequence {id} has {n}")
        raise ValueError(f"sequence {id} stands at position {stands}, the step begins at {at}")
    return refuse(ring, status, id)


@cython.no_gc_clear                # a step in a dying cycle is aborted too
cdef class Step:
    """A step under way (from `StateRing.begin`): commit it, abort it, or leave it to `with`, which commits at the end
    and aborts on an exception.  A step that is dropped without either is aborted.

    What the in-place calls take, for every layer:
    rows_in      (n,) the row that holds a sequence's state, -1 where it starts from zeros
    rows_out     (n, K) the row that the state s tokens before its end goes to, -1 where there is none
    log_in, log_out, parents    the lists of a log (form "log", else None): entries on top of rows_in, oldest first; where
                 each token's entry goes; a tree's parents (None: no tree)
    checkpoints  (m, 3) states that also go to a row, (sequence of the step, tokens, row), or None

    seq_ids, n_tokens (n,); ring: the ring it is of; batch: the Batch it began with, or None; is_open: neither committed
    nor aborted.
    """
    cdef readonly StateRing ring
    cdef gdn_ring_step s
    cdef readonly ndarray seq_ids, n_tokens, rows_in, rows_out, log_in, log_out, parents
    cdef readonly object batch, checkpoints
    cdef ndarray forks
    cdef bytearray marks              # of every layer

    def __init__(self):
        raise TypeError("steps come from StateRing.begin")

    def __dealloc__(self):
        if self.ring is not None and self.s.step != 0:
            with nogil:
                ring_abort(self.ring.ring, &self.s)

    @property
    def is_open(self):
        """Whether the step is neither committed nor aborted."""
        return self.s.step != 0

    def ssm(self, layer):
        """`StateRing.ssm(layer)`, and the layer's recurrent states count as worked on.  IndexError: no such layer."""
        states = self.ring.ssm(layer)
        self.marks[layer] |= SSM_MARKED
        return states

    def conv(self, layer):
        """`StateRing.conv(layer)`, and the layer's convolution states count as worked on.  IndexError: no such layer."""
        states = self.ring.conv(layer)
        self.marks[layer] |= CONV_MARKED
        return states

    def mark(self, layer):
        """Both kinds of the layer's states count as worked on: for who reaches the rows by other means."""
        if type(layer) is not int or not 0 <= layer < self.ring.ring.n_layers:
            self.ring.ssm(layer)                          # says what is wrong with it
        self.marks[layer] |= SSM_MARKED | CONV_MARKED

    def commit(self, written=False):
        """Publish the new states of all sequences at once.

        written    True: the caller wrote every layer's rows by other means than `ssm`, `conv` and layers

        ValueError: the step is over, or another process's, or of a ring that was made anew; or its tokens' states of some
        layer were never worked on: then the step is aborted.
        """
        self.finish(True, flag(written, "written"))

    def abort(self):
        """Leave all sequences as they were; in plane form without a spare plane they are lost.  ValueError if the step is
        over."""
        self.finish(False, False)

    cdef str idle_layers(self):
        """Layers that nobody worked on, in words; None if there are none or the step writes nothing."""
        cdef int needed = SSM_MARKED | (CONV_MARKED if self.ring.ring.n_embd_r else 0)
        cdef list idle = []
        if self.n_tokens.any():
            for layer, done in enumerate(self.marks):
                if done & needed != needed:
                    idle.append(f"{layer}" + ("" if done & needed == 0 else " (ssm)" if done & CONV_MARKED else " (conv)"))
        return ", ".join(idle) if idle else None

    cdef int finish(self, bint commit, bint written) except -1:
        cdef gdn_status status
        cdef str idle
        if self.s.step == 0:
            raise ValueError("the step is already committed or aborted")
        idle = self.idle_layers() if commit and not written else None
        commit = commit and idle is None
        with nogil:
            status = close_step(self.ring.ring, &self.s, commit)
        if status == GDN_ERR_VALUE:
            raise ValueError("the step belongs to another process, or its ring was made anew")
        refuse(self.ring, status, NOWHERE)
        if idle is not None:
            raise ValueError(f"the step is aborted: nobody worked on the states of layers {idle}; take them from step.ssm "
                             f"and step.conv, or commit(written=True)")
        return 0

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.s.step != 0:
            self.finish(kind is None, False)
