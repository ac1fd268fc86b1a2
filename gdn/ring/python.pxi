# The ring as Python objects: arguments in, statuses out as exceptions.

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from numpy cimport NPY_INT64, PyArray_DATA, PyArray_EMPTY, import_array, ndarray, npy_intp

import numpy

from gdn._tensor cimport tensor_over

import_array()


class RingFullError(RuntimeError):
    """Every slot of the ring holds a sequence."""


class StateLostError(RuntimeError):
    """The sequence's state was overwritten by a step that never committed; reset, load or release it."""


cdef int64_t as_int64(object value, str name) except? -1:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = value.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if not -INT64_MAX - 1 <= number <= INT64_MAX:
        raise ValueError(f"{name} must fit into 64 bits, got {number}")
    return number


cdef ndarray as_int64s(object values, str name, int64_t n):
    """A fresh contiguous int64 array of n entries (-1: any number)."""
    try:
        array = numpy.array(values, ndmin=1)
    except ValueError as error:
        raise ValueError(f"{name} must be a list of integers: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{name} must be a list of integers, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        if array.dtype.kind == "O":           # Python integers over 64 bits, or no numbers
            for value in array:
                as_int64(value, name)
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.dtype == numpy.uint64 and array.size and array.max() > INT64_MAX:
        raise ValueError(f"{name} must fit into 64 bits, got {array.max()}")
    if n >= 0 and array.size != n:
        raise ValueError(f"{name} must have one entry per sequence: {array.size} for {n} sequences")
    return array if array.dtype == numpy.int64 else array.astype(numpy.int64)


cdef gdn_ring_params ring_params(object extents) except *:
    cdef gdn_ring_params p
    cdef dict numbers = {}
    for name, value in extents.items():
        number = -1 if name == "spare" and value is None else as_int64(value, name)
        least = 0 if name in ("n_rollback", "conv_channels", "spare") else 1
        if not (least <= number <= INT32_MAX or (name == "spare" and value is None)):
            raise ValueError(f"{name} must be {least} to {INT32_MAX}, got {number}")
        numbers[name] = number
    p.size = sizeof(gdn_ring_params)
    p.n_slots, p.n_rollback, p.n_layers = numbers["n_slots"], numbers["n_rollback"], numbers["n_layers"]
    p.H_v, p.S_k, p.S_v = numbers["H_v"], numbers["S_k"], numbers["S_v"]
    p.conv_channels, p.conv_width, p.spare = numbers["conv_channels"], numbers["conv_width"], numbers["spare"]
    return p


def nbytes_for(extents):
    cdef gdn_ring_params p = ring_params(extents)
    cdef size_t nbytes
    if ring_size(&p, &nbytes) != GDN_OK:
        raise ValueError(f"a ring of {extents} spans more than 2^63 bytes, or more than {MAX_SLOTS} slots")
    return nbytes


def init(extents, buffer):
    cdef gdn_ring_params p = ring_params(extents)
    cdef Py_buffer view
    cdef gdn_status status
    needed = nbytes_for(extents)
    open_ring_memory(buffer, &view)
    status = ring_init(&p, view.buf, view.len)
    have, address = view.len, <uintptr_t>view.buf
    PyBuffer_Release(&view)
    if status == GDN_ERR_STRIDE:
        raise ValueError(f"buffer must lie at a multiple of 4 bytes, got address {address:#x}")
    if status != GDN_OK:
        raise ValueError(f"buffer has {have} bytes, this ring needs {needed}")


cdef int open_ring_memory(object buffer, Py_buffer *view) except -1:
    if not PyObject_CheckBuffer(buffer):
        raise TypeError(f"buffer must support the buffer protocol, got {type(buffer).__name__}")
    try:
        PyObject_GetBuffer(buffer, view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    except (BufferError, ValueError) as error:
        raise ValueError(f"buffer must be writable and contiguous: {error}") from error
    return 0


cdef class Ring:
    """An attached ring; `gdn.StateRing` adds the documentation and the constructors."""
    cdef object __weakref__
    cdef Py_buffer view
    cdef gdn_ring_header *ring
    cdef readonly int32_t n_slots, n_rollback, n_planes, n_layers, H_v, S_k, S_v, conv_channels, conv_width

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
            raise ValueError(f"buffer of {self.view.len} bytes holds no ring, a ring of another abi than "
                             f"{GDN_RING_ABI}, or a damaged one")
        self.ring = <gdn_ring_header *>self.view.buf
        self.n_slots, self.n_rollback = self.ring.n_slots, self.ring.n_rollback
        self.n_planes, self.n_layers = self.ring.n_planes, self.ring.n_layers
        self.H_v, self.S_k, self.S_v = self.ring.H_v, self.ring.S_k, self.ring.S_v
        self.conv_channels, self.conv_width = self.ring.conv_channels, self.ring.conv_width

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    @property
    def extents(self):
        return {"H_v": self.H_v, "S_k": self.S_k, "S_v": self.S_v, "conv_channels": self.conv_channels,
                "conv_width": self.conv_width}

    @property
    def nbytes(self):
        return self.ring.nbytes

    @property
    def address(self):
        return <uintptr_t>self.ring

    def acquire(self, seq_id, slot=None):
        cdef int64_t id = as_int64(seq_id, "seq_id"), chosen = NOWHERE
        cdef gdn_status status
        if slot is not None:
            chosen = as_int64(slot, "slot")
            if not 0 <= chosen < self.ring.n_slots:
                raise IndexError(f"slot {chosen} is outside the ring's {self.ring.n_slots} slots")
        with nogil:
            status = ring_acquire(self.ring, id, &chosen)
        if status == GDN_ERR_BUSY and slot is not None and id not in self.seq_ids:
            raise ValueError(f"slot {slot} holds another sequence than {id}")
        refuse(self, status, id, "acquired")
        return chosen

    def release(self, seq_id):
        cdef int64_t id = as_int64(seq_id, "seq_id")
        cdef gdn_status status
        with nogil:
            status = ring_release(self.ring, id)
        refuse(self, status, id)

    def reset(self, seq_id):
        cdef int64_t id = as_int64(seq_id, "seq_id")
        cdef gdn_status status
        with nogil:
            status = ring_reset(self.ring, id)
        refuse(self, status, id)

    def rollback(self, seq_id, n):
        cdef int64_t id = as_int64(seq_id, "seq_id"), count = as_int64(n, "n")
        cdef gdn_status status
        with nogil:
            status = ring_rollback(self.ring, id, count)
        if status == GDN_ERR_VALUE:
            raise ValueError(f"n must not be negative, got {count}")
        if status == GDN_ERR_ROLLBACK:
            raise ValueError(f"sequence {id} can be rolled back by {self.max_rollback(id)} tokens, not by {count}")
        refuse(self, status, id)

    def copy(self, src_seq, dst_seq):
        cdef int64_t src = as_int64(src_seq, "src_seq"), dst = as_int64(dst_seq, "dst_seq")
        cdef gdn_status status
        with nogil:
            status = ring_copy(self.ring, src, dst)
        if status == GDN_ERR_BUSY and dst in self.seq_ids:
            raise ValueError(f"sequence {dst} is already acquired")
        refuse(self, status, dst if status in (GDN_ERR_VALUE, GDN_ERR_FULL) else src)
        return self.slot(dst)

    cdef gdn_ring_slot committed(self, seq_id, int64_t *slot, bint lost) except *:
        """The sequence's record as `query` gives it; a lost one only where `lost` allows it."""
        cdef int64_t id = as_int64(seq_id, "seq_id")
        cdef gdn_ring_slot r
        cdef gdn_status status
        with nogil:
            status = query(self.ring, id, &r, slot)
        if not (lost and status == GDN_ERR_LOST):
            refuse(self, status, id)
        return r

    def position(self, seq_id):
        cdef int64_t slot
        return self.committed(seq_id, &slot, False).position

    def max_rollback(self, seq_id):
        cdef int64_t slot
        return self.committed(seq_id, &slot, False).valid

    def slot(self, seq_id):
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
        return [id for id, state in self.states() if state in (GDN_SLOT_LIVE, GDN_SLOT_LOST)]

    @property
    def n_free(self):
        return sum([state == GDN_SLOT_FREE for id, state in self.states()])

    def save(self, seq_id):
        cdef int64_t id = as_int64(seq_id, "seq_id")
        cdef size_t nbytes
        cdef gdn_status status = GDN_ERR_SCRATCH
        cdef char *to
        while status == GDN_ERR_SCRATCH:      # it may gain depth between the two calls
            with nogil:
                status = ring_save_size(self.ring, id, &nbytes)
            refuse(self, status, id)
            data = PyBytes_FromStringAndSize(NULL, nbytes)
            to = PyBytes_AS_STRING(data)
            with nogil:
                status = ring_save(self.ring, id, to, nbytes, &nbytes)
        refuse(self, status, id)
        return data if <size_t>len(data) == nbytes else data[:nbytes]

    def load(self, seq_id, data):
        cdef int64_t id = as_int64(seq_id, "seq_id")
        cdef gdn_status status
        cdef Py_buffer view
        if not PyObject_CheckBuffer(data):
            raise TypeError(f"data must be bytes, got {type(data).__name__}")
        try:
            PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        except (BufferError, ValueError) as error:
            raise ValueError(f"data must be contiguous: {error}") from error
        with nogil:
            status = ring_load(self.ring, id, view.buf, view.len)
        why = self.why_not(<const uint8_t *>view.buf, view.len) if status == GDN_ERR_DAMAGED else ""
        PyBuffer_Release(&view)
        if status == GDN_ERR_DAMAGED:
            raise ValueError(f"data is no intact saved sequence of this ring: {why}")
        refuse(self, status, id, "acquired")
        return self.slot(id)

    cdef str why_not(self, const uint8_t *given, size_t size):
        """What is wrong with bytes that load refused."""
        cdef gdn_saved h
        if size < sizeof(gdn_saved):
            return f"{size} bytes are fewer than its header has"
        memcpy(&h, given, sizeof(gdn_saved))
        if memcmp(h.magic, b"GDNSEQ\0", 8) or h.abi != GDN_RING_ABI:
            return f"it does not begin as one of abi {GDN_RING_ABI} does"
        if <size_t>h.nbytes != size:
            return f"it says it has {h.nbytes} bytes and has {size}"
        if crc32(&given[CRC_START], h.nbytes - CRC_START) != h.crc:
            return "its checksum does not fit"
        if h.valid > self.ring.n_rollback:
            return f"it can be rolled back by {h.valid} tokens, the ring keeps {self.ring.n_rollback}"
        saved = (h.n_layers, h.H_v, h.S_k, h.S_v, h.conv_channels, h.conv_width)
        mine = (self.n_layers, self.H_v, self.S_k, self.S_v, self.conv_channels, self.conv_width)
        if saved == mine:
            return f"its header contradicts itself: position {h.position}, depth {h.valid}"
        return f"(n_layers, H_v, S_k, S_v, conv_channels, conv_width) are {saved} there and {mine} here"

    def ssm(self, layer):
        cdef gdn_tensor t
        return self.view_of(layer, ring_ssm(self.ring, as_int64(layer, "layer"), &t), &t)

    def conv(self, layer):
        cdef gdn_tensor t
        return self.view_of(layer, ring_conv(self.ring, as_int64(layer, "layer"), &t), &t)

    cdef object view_of(self, object layer, gdn_status status, gdn_tensor *t):
        if status != GDN_OK:
            raise IndexError(f"layer {layer} is outside the ring's {self.ring.n_layers} layers")
        return tensor_over(t, self)

    def begin(self, seq_ids, n_tokens=None):
        cdef Step step
        if n_tokens is None:
            if not hasattr(seq_ids, "unique_ids"):
                raise TypeError("begin takes seq_ids and n_tokens, or a Batch")
            step = start_step(self, seq_ids.unique_ids, seq_ids.lengths, seq_ids.first_positions)
            step.batch = seq_ids
            return step
        return start_step(self, seq_ids, n_tokens, None)


cdef Step start_step(Ring ring, object seq_ids, object n_tokens, object positions):
    cdef Step step = Step.__new__(Step)
    cdef gdn_ring_step *s = &step.s
    cdef ndarray ids = as_int64s(seq_ids, "seq_ids", -1), at = None
    cdef npy_intp shape[2]
    cdef gdn_status status
    cdef int64_t i, most = 1
    s.size, s.n_seqs = sizeof(gdn_ring_step), ids.shape[0]
    step.seq_ids, step.n_tokens = ids, as_int64s(n_tokens, "n_tokens", s.n_seqs)
    s.seq_ids, s.n_tokens = <int64_t *>PyArray_DATA(ids), <int64_t *>PyArray_DATA(step.n_tokens)
    if positions is not None:
        at = as_int64s(positions, "positions", s.n_seqs)
        s.positions = <int64_t *>PyArray_DATA(at)
    for i in range(s.n_seqs):
        most = max(most, s.n_tokens[i])
    s.n_snapshots = kept(ring.ring, most)
    shape[0], shape[1] = s.n_seqs, s.n_snapshots
    step.rows_in, step.rows_out = PyArray_EMPTY(1, shape, NPY_INT64, 0), PyArray_EMPTY(2, shape, NPY_INT64, 0)
    s.rows_in, s.rows_out = <int64_t *>PyArray_DATA(step.rows_in), <int64_t *>PyArray_DATA(step.rows_out)
    with nogil:
        status = ring_begin(ring.ring, s)
    if status == GDN_ERR_VALUE:
        refuse_entry(ring, step)
    refuse(ring, status, s.seq_ids[s.failed] if s.failed >= 0 else NOWHERE)
    step.ring = ring
    return step


cdef int refuse_entry(Ring ring, Step step) except -1:
    cdef int64_t i = step.s.failed, id = step.s.seq_ids[i], n = step.s.n_tokens[i]
    if n < 0 or n > MAX_TOKENS:
        raise ValueError(f"n_tokens must be 0 to {MAX_TOKENS}, got {n} for sequence {id}")
    at = step.s.positions[i] if step.s.positions != NULL else NOWHERE
    stands = ring.position(id)
    if stands > MAX_TOKENS and at in (NOWHERE, stands):
        raise ValueError(f"sequence {id} stands at position {stands}, beyond {MAX_TOKENS} none can be continued")
    raise ValueError(f"sequence {id} stands at position {stands}, the step begins at {at}")


@cython.no_gc_clear                # a step in a dying cycle is aborted too
cdef class Step:
    """A step under way (from `StateRing.begin`): commit it, abort it, or leave it to `with`, which commits at the end
    and aborts on an exception.

    seq_ids, n_tokens (n,); rows_in (n,): the row of every layer's cache that holds a sequence's state, -1 where it
    starts from zeros; rows_out (n, K): the row that the state s tokens before its end goes to, -1 where there is none.
    ring: the ring it is of.  batch: the Batch it began with, or None.  is_open: neither committed nor aborted.
    A step that is dropped without either is aborted.
    """
    cdef readonly Ring ring
    cdef gdn_ring_step s
    cdef readonly ndarray seq_ids, n_tokens, rows_in, rows_out
    cdef readonly object batch

    def __init__(self):
        raise TypeError("steps come from StateRing.begin")

    def __dealloc__(self):
        if self.ring is not None and self.s.step != 0:
            with nogil:
                ring_abort(self.ring.ring, &self.s)

    @property
    def is_open(self):
        return self.s.step != 0

    def commit(self):
        """Publish the new states of all sequences at once.  ValueError if the step is over."""
        self.finish(True)

    def abort(self):
        """Leave all sequences as they were; without a spare plane they are lost.  ValueError if the step is over."""
        self.finish(False)

    cdef int finish(self, bint commit) except -1:
        cdef gdn_status status
        if self.s.step == 0:
            raise ValueError("the step is already committed or aborted")
        with nogil:
            status = close_step(self.ring.ring, &self.s, commit)
        if status == GDN_ERR_VALUE:
            raise ValueError("the step belongs to another process, or its ring was made anew")
        refuse(self.ring, status, NOWHERE)
        return 0

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.s.step != 0:
            self.finish(kind is None)


cdef str BUSY = "in a step (this or another), or being copied, saved or filled"


cdef int refuse(Ring ring, gdn_status status, int64_t seq_id, str busy=BUSY) except -1:
    """The exception for a status other than GDN_OK."""
    if status == GDN_OK:
        return 0
    if status == GDN_ERR_UNKNOWN:
        raise KeyError(f"sequence {seq_id} is not in the ring")
    if status == GDN_ERR_FULL:
        raise RingFullError(f"no slot for sequence {seq_id}: all {ring.ring.n_slots} slots of the ring are taken")
    if status == GDN_ERR_LOST:
        raise StateLostError(f"the state of sequence {seq_id} was lost in a step that did not commit: "
                             f"reset, load or release it")
    if status == GDN_ERR_LOCKED:
        raise ValueError("the ring's lock is held by a process that does not let go")
    if status == GDN_ERR_BUSY:
        raise ValueError(f"sequence {seq_id} is already {busy}")
    if status == GDN_ERR_VALUE:
        raise ValueError("seq_id -1 is reserved for padding")
    raise ValueError(f"the ring refused with status {<int>status}")
