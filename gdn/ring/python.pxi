# The ring as a Python object: arguments in, statuses out as exceptions.
#
# Needs: layout.pxi (record, ring_conv, ring_log, ring_ssm), lock.pxi (lock, unlock), slots.pxi (query, ring_acquire,
# ring_attach, ring_release, ring_rollback), steps.pxi (ring_accept, ring_reset), save.pxi (copy_sequence, ring_load, save,
# save_size), arguments.pxi, step.pxi (Step, start_step).

cdef class StateRing:
    """StateRing(buffer): attach to the ring that a buffer holds.

    buffer    any writable, contiguous buffer of bytes or numbers at a multiple of 4 bytes: bytearray, mmap, shared memory,
              array, Tensor.  The ring keeps it alive (and open) until the ring and its views are gone.

    TypeError: no buffer, or one of objects.  ValueError: it holds no ring, is too short, damaged, or of another abi.

    A ring holds n_slots sequences: for each a recurrent and a convolution state of every layer, and what it takes to take
    the last n_rollback tokens back without moving a byte of state.  `create` makes one in either of two forms, planes (a
    state a token) or log (one state and a log of tokens); gdn.h tells the buffer's layout, docs/EMBEDDING.md draws it.
    Any thread of any process may call any method on the same ring.  Errors, unless a method says otherwise: KeyError for
    an unknown sequence, RingBusyError (a ValueError) for one that somebody else has, StateLostError for a lost one,
    TypeError for anything but an integer where one is meant.  A refused call changes nothing.

    n_slots, n_rollback, n_planes, n_layers, H_k (None: not told), H_v, S_k, S_v, per_channel, conv_channels, conv_width,
    form, log_capacity, n_spare, head_map, dtype, tag, nbytes, address: what the ring was made of, and where it lies.
    """
    def __cinit__(self, buffer):
        cdef gdn_status status
        open_ring_memory(buffer, &self.view)
        with nogil:
            status = ring_attach(self.view.buf, self.view.len)
        if status == GDN_ERR_STRIDE:
            raise ValueError(f"buffer must lie at a multiple of 4 bytes, got address {<uintptr_t>self.view.buf:#x}")
        if status == GDN_ERR_LOCKED:
            refuse(self, status, NOWHERE)
        if status != GDN_OK:
            raise ValueError(no_ring(<const gdn_ring_header *>self.view.buf, self.view.len))
        self.ring = <gdn_ring_header *>self.view.buf
        self.n_slots, self.n_rollback = self.ring.n_slots, self.ring.n_rollback
        self.n_planes, self.n_layers = self.ring.n_planes, self.ring.n_layers
        self.H_v, self.S_k, self.S_v = self.ring.H_v, self.ring.S_k, self.ring.S_v
        self.conv_channels, self.conv_width = self.ring.conv_channels, self.ring.conv_width
        self.log_capacity, self.n_spare, self.per_channel = self.ring.log_capacity, self.ring.n_spare, self.ring.per_channel

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    @classmethod
    def create(cls, n_slots, n_rollback=0, *, n_layers, H_v, S_k, S_v, conv_channels=0, conv_width=1, spare=None,
               buffer=None, path=None, form="planes", log_capacity=None, n_spare=None, H_k=None, per_channel=False,
               head_map=None, dtype="f32", tag=0):
        """Make a ring, in the given buffer (what it held is gone), in a new file, or in memory of its own.

        n_slots      sequences.  n_rollback: tokens that can be taken back
        form         "planes": n_rollback + 1 + spare states a slot.  With spare 1 (the default if n_rollback > 0) a step
                     that fails leaves the committed state intact; with 0 (the default otherwise) a failed step of more
                     than n_rollback tokens loses it, at n_rollback 0 because states are updated in place.
                     "log": one state a slot, log_capacity (default max(16, 2 n_rollback)) + n_rollback + 1 log entries a
                     slot, and n_spare further states (default n_slots) for all; a failed step never loses anything.
                     A step that folds the logs of more than n_spare sequences is refused
        n_layers, H_v, S_k, S_v, conv_channels, conv_width    extents of a layer's states
        H_k, per_channel    of a log's entries: heads of k, and whether the gate has S_k values a head; form "log" needs H_k
        head_map     "tiled" or "interleaved", as the delta rule is told; only save and copy without depth ask for it, in
                     form "log" where 1 < H_k < H_v
        dtype        of the recurrent rows: "f32", "bf16" or "f16"; windows and log entries are float32
        tag          a number of 64 bits for what the states are of (`layer.tag`); saved sequences carry it, and another one
                     is refused
        buffer, path    where it lies: see StateRing; or a file that is not there yet, whose bytes are reserved

        ValueError: extents out of range or of the other form, or a buffer that is too short, read-only or misaligned.
        FileExistsError; OSError: the file's bytes cannot be had (disk full).
        """
        extents = {"n_slots": n_slots, "n_rollback": n_rollback, "n_layers": n_layers, "H_v": H_v, "S_k": S_k, "S_v": S_v,
                   "conv_channels": conv_channels, "conv_width": conv_width, "spare": spare, "log_capacity": log_capacity,
                   "n_spare": n_spare, "H_k": H_k}
        cdef gdn_ring_params p = ring_params(extents, form, per_channel, head_map, dtype, tag)
        cdef size_t nbytes = ring_bytes(&p)
        if path is not None:
            if buffer is not None:
                raise ValueError("a ring lies in a buffer or in a file: give buffer or path")
            buffer = new_file(path, nbytes)
        elif buffer is None:
            memory = numpy.zeros(nbytes + 64, numpy.uint8)      # untouched pages cost nothing
            buffer = memory[-memory.ctypes.data % 64:][:nbytes]
        make_ring(&p, nbytes, buffer)
        return cls(buffer)

    @staticmethod
    def nbytes_for(n_slots, n_rollback=0, *, n_layers, H_v, S_k, S_v, conv_channels=0, conv_width=1, spare=None,
                   form="planes", log_capacity=None, n_spare=None, H_k=None, per_channel=False, head_map=None, dtype="f32",
                   tag=0):
        """Bytes that `create` needs for the same arguments, wherever the buffer lies.  ValueError as there."""
        extents = {"n_slots": n_slots, "n_rollback": n_rollback, "n_layers": n_layers, "H_v": H_v, "S_k": S_k, "S_v": S_v,
                   "conv_channels": conv_channels, "conv_width": conv_width, "spare": spare, "log_capacity": log_capacity,
                   "n_spare": n_spare, "H_k": H_k}
        cdef gdn_ring_params p = ring_params(extents, form, per_channel, head_map, dtype, tag)
        return ring_bytes(&p)

    def __repr__(self):
        depth = f"log_capacity={self.log_capacity}, n_spare={self.n_spare}" if self.form == "log" else f"n_planes={self.n_planes}"
        return (f"gdn.StateRing(form={self.form!r}, n_slots={self.n_slots}, n_rollback={self.n_rollback}, {depth}, "
                f"n_layers={self.n_layers}, H_v={self.H_v}, S_k={self.S_k}, S_v={self.S_v}, "
                f"conv_channels={self.conv_channels}, conv_width={self.conv_width}, nbytes={self.nbytes})")

    @property
    def form(self):
        """ "planes" or "log"."""
        return "log" if self.ring.form == GDN_FORM_LOG else "planes"

    @property
    def H_k(self):
        """Heads of q and k, or None if the ring was not told."""
        return self.ring.H_k or None

    @property
    def head_map(self):
        """ "tiled", "interleaved", or None if the ring was not told."""
        return (None, "tiled", "interleaved")[self.ring.head_map]

    @property
    def dtype(self):
        """ "f32", "bf16" or "f16": of the recurrent rows."""
        return {value: name for name, value in DTYPES.items()}[self.ring.dtype]

    @property
    def tag(self):
        """The number that `create` was given for what the states are of; 0: none."""
        return self.ring.tag

    @property
    def extents(self):
        """Of one layer, as `create` takes them: H_k, H_v, S_k, S_v, per_channel, head_map, conv_channels, conv_width."""
        return {"H_k": self.H_k, "H_v": self.H_v, "S_k": self.S_k, "S_v": self.S_v, "per_channel": self.per_channel,
                "head_map": self.head_map, "conv_channels": self.conv_channels, "conv_width": self.conv_width}

    @property
    def nbytes(self):
        """Bytes of the whole buffer."""
        return self.ring.nbytes

    @property
    def address(self):
        """Where the buffer begins: what C calls the ring."""
        return <uintptr_t>self.ring

    def acquire(self, seq_id, slot=None):
        """Give a slot (None: any) to a new sequence of zero state and position 0; returns the slot.

        RingFullError: no slot is free.  RingBusyError: seq_id is acquired already, or the slot taken.  IndexError: no such
        slot.  ValueError: seq_id is -1 (padding's) or needs more than 64 bits.
        """
        cdef int64_t id = integer(seq_id, "seq_id"), chosen = NOWHERE
        cdef gdn_status status
        if slot is not None:
            chosen = integer(slot, "slot")
            if not 0 <= chosen < self.ring.n_slots:
                raise IndexError(f"slot {chosen} is outside the ring's {self.ring.n_slots} slots")
        with nogil:
            status = ring_acquire(self.ring, id, &chosen)
        if status == GDN_ERR_BUSY and slot is not None and id not in self.seq_ids:
            raise RingBusyError(f"slot {slot} holds another sequence than {id}")
        refuse(self, status, id, "acquired")
        return chosen

    def release(self, seq_id):
        """Give the sequence's slot back.  A lost sequence may be released, and one whose tree waits."""
        cdef int64_t id = integer(seq_id, "seq_id")
        cdef gdn_status status
        with nogil:
            status = ring_release(self.ring, id)
        refuse(self, status, id)

    def reset(self, seq_id):
        """Zero state, position 0, nothing to roll back.  A lost sequence may be reset, and one whose tree waits."""
        cdef int64_t id = integer(seq_id, "seq_id")
        cdef gdn_status status
        with nogil:
            status = ring_reset(self.ring, id)
        refuse(self, status, id)

    def begin(self, seq_ids, n_tokens=None, *, forks=None):
        """begin(seq_ids, n_tokens) or begin(batch): a `Step` of n_tokens[i] tokens of sequence seq_ids[i].

        seq_ids     (n,) different sequences; n_tokens (n,) tokens of each, 0 and more
        batch       a `Batch`; sequences whose first position is 0 start afresh.  With parents (form "log") its tokens are
                    trees of drafts: once committed, each sequence waits for `accept`
        forks       [(seq_id, n, new_id), ...]: when the step commits, new_id is a sequence of its own that has seen the
                    first n tokens (of a tree: 0) that this step gives seq_id; it is acquired now, and gone if the step aborts

        ValueError: n_tokens out of range, a position that does not continue its sequence, a tree of more than n_rollback +
        1 tokens or in plane form, a sequence whose tree waits, forks of what the step has not; logs of more than n_spare
        sequences to fold at once.  RingBusyError: a sequence is named twice or somebody else's, a new_id is acquired
        already, spare rows are in others' steps.  RingFullError: no slot for a fork.
        """
        cdef Step step
        if n_tokens is not None:
            return start_step(self, seq_ids, n_tokens, None, None, forks)
        if not hasattr(seq_ids, "unique_ids"):
            raise TypeError("begin takes seq_ids and n_tokens, or a Batch")
        step = start_step(self, seq_ids.unique_ids, seq_ids.lengths, seq_ids.first_positions,
                          getattr(seq_ids, "parents", None), forks)
        step.batch = seq_ids
        return step

    def accept(self, seq_id, tokens):
        """Keep a path of the tree that the sequence's last step committed (form "log").

        tokens    indices of that sequence's tokens in the step, ascending, each the parent of the next, the first one's
                  parent -1; [] takes all back.  Any process may accept.

        Until then position is the one before the step, and begin, rollback, copy and save of the sequence are ValueErrors.
        ValueError: no such path, or no tree waits.
        """
        cdef int64_t id = integer(seq_id, "seq_id")
        cdef ndarray path = int64s(tokens, "tokens", -1)
        cdef const int64_t *p = <const int64_t *>PyArray_DATA(path)
        cdef int64_t n = path.shape[0]
        cdef gdn_status status
        with nogil:
            status = ring_accept(self.ring, id, p, n)
        if status == GDN_ERR_VALUE:
            raise ValueError(f"{path.tolist()} is no path of a tree of sequence {id} that waits for accept")
        refuse(self, status, id)

    def rollback(self, seq_id, n):
        """Take the last n tokens back; no state is moved.  ValueError: n is negative, above `max_rollback`, or a tree waits."""
        cdef int64_t id = integer(seq_id, "seq_id"), count = integer(n, "n")
        cdef gdn_status status
        with nogil:
            status = ring_rollback(self.ring, id, count)
        if status == GDN_ERR_VALUE:
            raise ValueError(f"n must not be negative, got {count}")
        if status == GDN_ERR_ROLLBACK:
            raise ValueError(f"sequence {id} can be rolled back by {self.max_rollback(id)} tokens, not by {count}")
        refuse(self, status, id)

    def copy(self, src_seq, dst_seq, depth=True):
        """Acquire dst_seq as an independent sequence of the same state; returns its slot.

        depth    False leaves out what can be rolled back: faster, and a log is folded

        Any number of threads, of up to 8 processes, may copy or save one sequence at once.  RingBusyError: dst_seq is
        acquired already, or src_seq in a step.  RingFullError: no slot is free.  ValueError: a tree of src_seq waits, or the
        ring was not told the head_map that folding needs.
        """
        cdef int64_t src = integer(src_seq, "src_seq"), dst = integer(dst_seq, "dst_seq")
        cdef bint deep = flag(depth, "depth")
        cdef gdn_status status
        with nogil:
            status = copy_sequence(self.ring, src, dst, deep)
        if status == GDN_ERR_BUSY and dst in self.seq_ids:
            raise RingBusyError(f"sequence {dst} is already acquired")
        self.refuse_fold(status, dst)
        refuse(self, status, dst if status in (GDN_ERR_VALUE, GDN_ERR_FULL) else src)
        return self.slot(dst)

    cdef int refuse_fold(self, gdn_status status, int64_t seq_id) except -1:
        if status == GDN_ERR_VALUE and seq_id != NOWHERE:
            raise ValueError(f"without depth a log is folded, and H_k = {self.ring.H_k} with H_v = {self.ring.H_v} needs a "
                             f"head_map, which this ring was not told")
        return 0

    cdef gdn_ring_slot committed(self, seq_id, int64_t *slot, bint lost) except *:
        """The sequence's record as `query` gives it; a lost one only where `lost` allows it."""
        cdef int64_t id = integer(seq_id, "seq_id")
        cdef gdn_ring_slot r
        cdef gdn_status status
        with nogil:
            status = query(self.ring, id, &r, slot)
        if not (lost and status == GDN_ERR_LOST):
            refuse(self, status, id)
        return r

    def position(self, seq_id):
        """Tokens that the committed state has seen."""
        cdef int64_t slot
        return self.committed(seq_id, &slot, False).position

    def max_rollback(self, seq_id):
        """Tokens that can be taken back: after a committed step at least min(n_rollback, its tokens + what a rollback left)."""
        cdef int64_t slot
        return self.committed(seq_id, &slot, False).valid

    def slot(self, seq_id):
        """The sequence's slot, 0 to n_slots - 1."""
        cdef int64_t slot
        self.committed(seq_id, &slot, True)
        return slot

    cdef list states(self):
        """(seq_id, state) of every slot, as one committed moment."""
        cdef gdn_status status
        cdef ndarray copy = numpy.empty(self.ring.n_slots * sizeof(gdn_ring_slot), numpy.uint8)
        cdef gdn_ring_slot *r = <gdn_ring_slot *>PyArray_DATA(copy)
        with nogil:           # all of it: a holder of the lock that waits for the GIL would wait for who waits for the lock
            status = lock(self.ring)
            if status == GDN_OK:
                memcpy(r, record(self.ring, 0), self.ring.n_slots * sizeof(gdn_ring_slot))
                unlock(self.ring)
        refuse(self, status, NOWHERE)
        return [(r[i].seq_id, r[i].state) for i in range(self.ring.n_slots)]

    @property
    def seq_ids(self):
        """The sequences in the ring, by slot."""
        return [id for id, state in self.states() if state in (GDN_SLOT_LIVE, GDN_SLOT_LOST)]

    @property
    def n_free(self):
        """Slots without a sequence."""
        return sum([state == GDN_SLOT_FREE for id, state in self.states()])

    def save(self, seq_id, depth=True):
        """A sequence as bytes, with its extents, its tag and a checksum.

        depth    False leaves out what can be rolled back: such bytes load into a ring of any n_rollback and either form

        Errors as of `copy`.
        """
        cdef int64_t id = integer(seq_id, "seq_id")
        cdef bint deep = flag(depth, "depth")
        cdef size_t nbytes
        cdef gdn_status status = GDN_ERR_SCRATCH
        cdef char *to
        while status == GDN_ERR_SCRATCH:      # it may gain depth between the two calls
            with nogil:
                status = save_size(self.ring, id, deep, &nbytes)
            refuse(self, status, id)
            data = PyBytes_FromStringAndSize(NULL, nbytes)
            to = PyBytes_AS_STRING(data)
            with nogil:
                status = save(self.ring, id, deep, to, nbytes, &nbytes)
        self.refuse_fold(status, id)
        refuse(self, status, id)
        return data if <size_t>len(data) == nbytes else data[:nbytes]

    def load(self, seq_id, data):
        """Acquire seq_id (or repair it, if lost) with what `save` gave, here or elsewhere; returns its slot.

        data    bytes of a ring with the same layers and tag (0 fits all); with depth, of the same form and no more of it
                than this ring keeps.  ValueError if not, or damaged.

        RingBusyError: seq_id is acquired already.  RingFullError: no slot is free.
        """
        cdef int64_t id = integer(seq_id, "seq_id")
        cdef gdn_status status
        cdef Py_buffer view
        open_buffer(data, &view, PyBUF_SIMPLE, "data")
        with nogil:
            status = ring_load(self.ring, id, view.buf, view.len)
        why = why_not(self.ring, view.buf, view.len) if status == GDN_ERR_DAMAGED else ""
        PyBuffer_Release(&view)
        if status == GDN_ERR_DAMAGED:
            raise ValueError(f"data is no intact saved sequence of this ring: {why}")
        refuse(self, status, id, "acquired")
        return self.slot(id)

    def ssm(self, layer):
        """A layer's recurrent states, zero-copy: a Tensor of ne (S_k, S_v, H_v, rows), of the ring's dtype.

        Rows: plane * n_slots + slot, or in form "log" a row for each slot and n_spare more.  IndexError: no such layer.
        """
        cdef gdn_tensor t
        return self.view_of(layer, ring_ssm(self.ring, integer(layer, "layer"), &t), &t)

    def conv(self, layer):
        """A layer's convolution states, zero-copy: a Tensor of ne (conv_width - 1, conv_channels, 1, rows); rows as of ssm."""
        cdef gdn_tensor t
        return self.view_of(layer, ring_conv(self.ring, integer(layer, "layer"), &t), &t)

    def log(self, layer):
        """A layer's `TokenLog` (form "log"), zero-copy: n_slots * (log_capacity + n_rollback + 1) entries, float32.

        IndexError: no such layer.  ValueError: a ring in plane form.
        """
        cdef gdn_tensor k, d, g, x
        cdef gdn_status status = ring_log(self.ring, integer(layer, "layer"), &k, &d, &g, &x)
        if status == GDN_ERR_VALUE:
            raise ValueError("a ring of form 'planes' has no log")
        keys, values, gates = (part.numpy()[0] for part in (self.view_of(layer, status, &k), self.view_of(layer, status, &d),
                                                            self.view_of(layer, status, &g)))
        inputs = self.view_of(layer, status, &x).numpy()[0, 0] if self.conv_channels else None
        return TokenLog(keys, values, gates if self.per_channel else gates[..., 0], inputs)

    cdef object view_of(self, object layer, gdn_status status, gdn_tensor *t):
        if status != GDN_OK:
            raise IndexError(f"layer {layer} is outside the ring's {self.ring.n_layers} layers")
        return tensor_over(t, self)
