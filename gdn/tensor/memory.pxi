# Memory in: what a Tensor or an array lies in, who keeps it alive, what its elements are.
#
# Needs: _tensor.pyx (BYTES, MAX_AXES, OTHER, WORDS, block, span), dlpack.pxi (close_dlpack, open_dlpack), convert.pxi
# (is_masked).

@cython.final
@cython.no_gc_clear               # a Tensor in a dying cycle must not outlive its memory
cdef class Memory:
    def __dealloc__(self):
        if self.plain != NULL or self.versioned != NULL:
            close_dlpack(self)
        PyBuffer_Release(&self.buffer)


cdef bint is_scalar(object data):
    """numpy's scalars export buffers, but name no memory."""
    return isinstance(data, numpy.generic)


cdef Memory open_memory(object data, str name, block *b):
    """Describe the memory of a buffer or DLPack object and hold it."""
    cdef Memory memory
    if is_masked(data):
        raise TypeError(f"{name} must not be a masked array")
    if PyObject_CheckBuffer(data):
        memory = open_buffer(data, name, b)
    elif hasattr(data, "__dlpack__"):
        memory = open_dlpack(data, name, b)
    else:
        raise TypeError(f"{name} must be a buffer, a DLPack object, a gdn.Tensor or an int address, "
                        f"got {data.__class__.__name__}")
    cdef int64_t low, high
    span(b.ndim, b.shape, b.strides, b.itemsize, name, &low, &high)
    memory.start, memory.stop, memory.bounded = b.data + low, b.data + high, True
    return memory


cdef Memory open_buffer(object data, str name, block *b):
    cdef Memory memory = Memory.__new__(Memory)
    cdef Py_buffer *view = &memory.buffer
    cdef int i
    try:
        PyObject_GetBuffer(data, view, PyBUF_RECORDS_RO)
    except (ValueError, BufferError) as error:
        raise TypeError(f"{name} cannot be shared as a buffer: {error}") from error
    if view.ndim > MAX_AXES:
        raise ValueError(f"{name} has {view.ndim} axes, at most {MAX_AXES} are understood")
    memory.readonly = view.readonly
    b.data, b.format, b.itemsize, b.ndim = <char *>view.buf, view.format, view.itemsize, view.ndim
    if b.format == NULL:
        b.format = b"B"
    b.kind = format_kind(b.format, b.itemsize)
    cdef int64_t dense = b.itemsize
    for i in range(view.ndim - 1, -1, -1):
        b.shape[i] = view.shape[i]
        b.strides[i] = dense if view.strides == NULL else view.strides[i]       # ctypes gives none
        dense *= view.shape[i]
    return memory


cdef int format_kind(const char *format, int64_t itemsize) noexcept:
    """A GDN_TYPE_*, BYTES, WORDS or OTHER for a struct-module format of one native-order element."""
    cdef uint16_t one = 1
    cdef char little = b"<" if (<uint8_t *>&one)[0] else b">"
    if format[0] == b"@" or format[0] == b"=" or format[0] == little:
        format += 1
    if format[0] == 0 or format[1] != 0:
        return OTHER
    if format[0] == b"f":
        return GDN_TYPE_F32
    if format[0] == b"e":
        return GDN_TYPE_F16
    if itemsize == 4 and (format[0] == b"i" or format[0] == b"l"):
        return GDN_TYPE_I32
    if itemsize == 2 and format[0] == b"H":
        return WORDS
    if format[0] == b"B" or format[0] == b"b" or format[0] == b"c":
        return BYTES
    return OTHER


cdef str block_type_name(const block *b):
    if b.format == NULL:
        return f"{DL_CODES[b.dl_code] if b.dl_code < len(DL_CODES) else 'DLPack type '}{b.dl_bits}"
    text = b.format.decode("ascii", "replace")
    if "P" in text or "&" in text:
        return "a pointer (its target is given by address)"
    try:
        return str(numpy.dtype(text))
    except Exception:             # a format that is no numpy type, a bit field say
        return f"buffer format {text!r}"
