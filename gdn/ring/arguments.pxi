# Python arguments of the ring: integers, buffers, what a ring is made of; and what is wrong with bytes that were refused.
#
# Needs: slots.pxi (ring_init, ring_size), save.pxi (CRC_START, describe), python.pxi (StateRing).

cdef dict FORMS = {"planes": GDN_FORM_PLANES, "log": GDN_FORM_LOG}
cdef dict HEAD_MAPS = {None: GDN_HEAD_NONE, "tiled": GDN_HEAD_TILED, "interleaved": GDN_HEAD_INTERLEAVED}
cdef dict DTYPES = {"f32": GDN_TYPE_F32, "f16": GDN_TYPE_F16, "bf16": GDN_TYPE_BF16}
cdef dict LEAST = {"n_rollback": 0, "conv_channels": 0, "spare": 0}          # of extents; 1 for the others
cdef tuple OPTIONAL = ("spare", "log_capacity", "n_spare", "H_k")


cdef ndarray int64s(object values, str name, int64_t n):
    """An int64 array of n entries (-1: any number), the ring's own: the caller may go on to change what he gave."""
    array = numpy.array(integers(values, name), ndmin=1)
    if array.ndim != 1:
        raise ValueError(f"{name} must be a list of integers, got shape {array.shape}")
    if n >= 0 and array.size != n:
        raise ValueError(f"{name} must have one entry per sequence: {array.size} for {n} sequences")
    return array


cdef int open_buffer(object buffer, Py_buffer *view, int flags, str name) except -1:
    """A contiguous buffer of bytes or numbers, to be released by the caller."""
    if not PyObject_CheckBuffer(buffer):
        raise TypeError(f"{name} must support the buffer protocol, got {type(buffer).__name__}")
    try:
        PyObject_GetBuffer(buffer, view, flags | PyBUF_FORMAT | PyBUF_ND)
    except (BufferError, ValueError) as error:
        raise ValueError(f"{name} must be {'writable and ' if flags & PyBUF_WRITABLE else ''}contiguous: {error}") from error
    if view.format != NULL and b"O" in <bytes>view.format:
        PyBuffer_Release(view)
        raise TypeError(f"{name} must hold bytes or numbers, not objects")
    return 0


cdef int open_ring_memory(object buffer, Py_buffer *view) except -1:
    return open_buffer(buffer, view, PyBUF_WRITABLE, "buffer")


# ---------------------------------------------------------------- refused calls

cdef str BUSY = "in a step (this or another), or being copied, saved or filled"
cdef dict REFUSALS = {
    GDN_ERR_UNKNOWN: "sequence {id} is not in the ring",
    GDN_ERR_FULL: "no slot for sequence {id}: all {n_slots} slots of the ring are taken",
    GDN_ERR_LOST: "the state of sequence {id} was lost in a step that did not commit: reset, load or release it",
    GDN_ERR_LOCKED: "the ring's lock is held by a process that does not let go",
    GDN_ERR_BUSY: "sequence {id} is already {busy}",
    GDN_ERR_PENDING: "the tree of sequence {id} waits for accept",
    GDN_ERR_VALUE: "seq_id -1 is reserved for padding"}


cdef int refuse(StateRing ring, gdn_status status, int64_t seq_id, str busy=BUSY) except -1:
    """The exception for a status other than GDN_OK."""
    if status == GDN_OK:
        return 0
    text = REFUSALS.get(status, f"the ring refused with status {<int>status}")
    raise EXCEPTIONS.get(status, ValueError)(text.format(id=seq_id, n_slots=ring.n_slots, busy=busy))


# ---------------------------------------------------------------- making a ring

cdef gdn_ring_params ring_params(dict extents, form, per_channel, head_map, dtype, tag) except *:
    cdef gdn_ring_params p
    cdef dict numbers = {}
    if form not in FORMS:
        raise ValueError(f"form must be 'planes' or 'log', got {form!r}")
    if not isinstance(head_map, (str, type(None))) or head_map not in HEAD_MAPS:
        raise ValueError(f"head_map must be 'tiled', 'interleaved' or None, got {head_map!r}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise TypeError(f"dtype must be 'f32', 'bf16' or 'f16', got {dtype!r}")
    for name, value in extents.items():
        if value is None and name in OPTIONAL:
            numbers[name] = -1 if name == "spare" else 0
        else:
            numbers[name] = integer(value, name, LEAST.get(name, 1), INT32_MAX)
    check_form(form, extents, numbers)
    memset(&p, 0, sizeof(p))
    p.size = sizeof(gdn_ring_params)
    p.n_slots, p.n_rollback, p.n_layers = numbers["n_slots"], numbers["n_rollback"], numbers["n_layers"]
    p.H_k, p.H_v, p.S_k, p.S_v = numbers["H_k"], numbers["H_v"], numbers["S_k"], numbers["S_v"]
    p.conv_channels, p.conv_width, p.spare = numbers["conv_channels"], numbers["conv_width"], numbers["spare"]
    p.form, p.log_capacity, p.n_spare = FORMS[form], numbers["log_capacity"], numbers["n_spare"]
    p.per_channel, p.head_map, p.dtype = flag(per_channel, "per_channel"), HEAD_MAPS[head_map], DTYPES[dtype]
    p.tag = integer(tag, "tag", 0, 2**64 - 1)
    return p


cdef int check_form(str form, dict given, dict numbers) except -1:
    """Extents that only one form has, and bounds between them."""
    for name in ("spare",) if form == "log" else ("log_capacity", "n_spare"):
        if given[name] is not None:
            raise ValueError(f"{name} is of the other form than {form!r}, got {given[name]}")
    if form == "planes":
        return 0
    if given["H_k"] is None:
        raise ValueError("form 'log' needs H_k: entries hold k of every head")
    if numbers["H_v"] % numbers["H_k"]:
        raise ValueError(f"H_v = {numbers['H_v']} is no multiple of H_k = {numbers['H_k']}")
    if 0 < numbers["log_capacity"] <= numbers["n_rollback"]:
        raise ValueError(f"log_capacity must be above n_rollback = {numbers['n_rollback']}, got {numbers['log_capacity']}")
    if numbers["n_spare"] > numbers["n_slots"]:
        raise ValueError(f"n_spare must be 1 to n_slots = {numbers['n_slots']}, got {numbers['n_spare']}")
    return 0


cdef size_t ring_bytes(const gdn_ring_params *p) except 0:
    cdef size_t nbytes
    if ring_size(p, &nbytes) != GDN_OK:
        raise ValueError(f"a ring of n_slots = {p.n_slots}, n_layers = {p.n_layers}, n_rollback = {p.n_rollback}, H_v = "
                         f"{p.H_v}, S_k = {p.S_k}, S_v = {p.S_v}, conv_channels = {p.conv_channels}, conv_width = "
                         f"{p.conv_width}, spare = {p.spare} spans more than 2^63 bytes, or more than {MAX_SLOTS} slots")
    return nbytes


cdef int make_ring(const gdn_ring_params *p, size_t needed, object buffer) except -1:
    cdef Py_buffer view
    cdef gdn_status status
    open_ring_memory(buffer, &view)
    status = ring_init(p, view.buf, view.len)
    have, address = view.len, <uintptr_t>view.buf
    PyBuffer_Release(&view)
    if status == GDN_ERR_STRIDE:
        raise ValueError(f"buffer must lie at a multiple of 4 bytes, got address {address:#x}")
    if status != GDN_OK:
        raise ValueError(f"buffer has {have} bytes, this ring needs {needed}")
    return 0


cdef object new_file(path, size_t nbytes):
    """A mapping of a new file whose bytes are reserved: a write to a hole on a full disk would end the process (SIGBUS)."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return mmap.mmap(fd, nbytes)
    except OSError as error:
        os.unlink(path)
        raise OSError(error.errno, f"{nbytes} bytes for the ring cannot be reserved: {os.strerror(error.errno)}",
                      os.fspath(path)) from error
    finally:
        os.close(fd)


# ---------------------------------------------------------------- refused bytes

cdef str no_ring(const gdn_ring_header *h, size_t size):
    if size >= 16 and memcmp(h.magic, b"GDNRING", 8) == 0 and h.abi != GDN_RING_ABI:
        return f"buffer holds a ring of abi {h.abi}, no ring of abi {GDN_RING_ABI}: it cannot be read any more"
    return f"buffer of {size} bytes holds no ring, or a damaged one"


cdef str why_not(const gdn_ring_header *ring, const void *given, size_t size):
    """What is wrong with bytes that load refused."""
    cdef gdn_saved h, mine
    if size < sizeof(gdn_saved):
        return f"{size} bytes are fewer than its header has"
    memcpy(&h, given, sizeof(gdn_saved))
    if memcmp(h.magic, b"GDNSEQ\0", 8) or h.abi != GDN_RING_ABI:
        return f"it does not begin as one of abi {GDN_RING_ABI} does"
    if <size_t>h.nbytes != size:
        return f"it says it has {h.nbytes} bytes and has {size}"
    if crc32(<const char *>given + CRC_START, h.nbytes - CRC_START) != h.crc:
        return "its checksum does not fit"
    if h.tag != ring.tag and h.tag != 0 and ring.tag != 0:
        return f"its tag is {h.tag:#x}, the ring's {ring.tag:#x}"
    if h.valid > ring.n_rollback:
        return f"it can be rolled back by {h.valid} tokens, the ring keeps {ring.n_rollback}"
    if h.position > MAX_TOKENS:
        return f"its position {h.position} is beyond {MAX_TOKENS}, where none can be continued"
    if h.dtype != ring.dtype:
        return f"its states are of type {h.dtype}, the ring's of type {ring.dtype} (GDN_TYPE_*)"
    describe(ring, 0, 0, 0, &mine)
    there, here = shape_of(&h), shape_of(&mine)
    if there != here:
        return f"(n_layers, H_k, H_v, S_k, S_v, per_channel, conv_channels, conv_width) are {there} there and {here} here"
    if h.n_log > ring.log_capacity or (ring.form == GDN_FORM_LOG and h.valid > h.n_log >= 0):
        return (f"its depth ({h.valid} tokens, {h.n_log} entries of a log) is of another form or log_capacity: "
                f"save it with depth=False")
    return f"its header contradicts itself: position {h.position}, depth {h.valid}, {h.n_log} entries"


cdef tuple shape_of(const gdn_saved *h):
    return h.n_layers, h.H_k, h.H_v, h.S_k, h.S_v, h.per_channel, h.conv_channels, h.conv_width
