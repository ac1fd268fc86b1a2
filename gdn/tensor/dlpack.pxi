# DLPack, both ways: the exchange structs, taking a capsule in, handing one out.
#
# Needs: _tensor.pyx, memory.pxi (Memory), _checked.pxd (multiply).

cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void *data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t *shape
    int64_t *strides              # in elements; NULL = C-contiguous
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor dl_tensor
    void *manager_ctx
    void (*deleter)(DLManagedTensor *) noexcept

cdef struct DLManagedTensorVersioned:
    uint32_t major
    uint32_t minor
    void *manager_ctx
    void (*deleter)(DLManagedTensorVersioned *) noexcept
    uint64_t flags
    DLTensor dl_tensor

cdef enum:
    DL_CPU = 1
    DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4
    DL_READ_ONLY = 1, DL_IS_COPIED = 2

cdef tuple DL_CODES = ("int", "uint", "float", "handle", "bfloat", "complex", "bool")


# ---------------------------------------------------------------- in

cdef Memory open_dlpack(object data, str name, block *b):
    """Take over the capsule of a DLPack object; the returned Memory gives it back."""
    device = data.__dlpack_device__()
    if int(device[0]) != DL_CPU:
        raise ValueError(f"{name} must be in CPU memory, got DLPack device {tuple(map(int, device))}")
    try:
        try:
            capsule = data.__dlpack__(max_version=(1, 0))
        except TypeError:         # a producer from before version 1.0
            capsule = data.__dlpack__()
    except BufferError as error:
        raise ValueError(f"{name} cannot be shared through DLPack: {error}") from error
    cdef Memory memory = Memory.__new__(Memory)
    cdef DLTensor *dl
    cdef DLManagedTensorVersioned *versioned
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        versioned = <DLManagedTensorVersioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        if versioned.major != 1:
            raise ValueError(f"{name} comes as DLPack {versioned.major}.{versioned.minor}, version 1 is understood")
        PyCapsule_SetName(capsule, "used_dltensor_versioned")
        memory.versioned = versioned
        memory.readonly = versioned.flags & DL_READ_ONLY != 0
        dl = &versioned.dl_tensor
    else:
        memory.plain = PyCapsule_GetPointer(capsule, "dltensor")
        PyCapsule_SetName(capsule, "used_dltensor")
        dl = &(<DLManagedTensor *>memory.plain).dl_tensor
    if dl.device.device_type != DL_CPU:
        raise ValueError(f"{name} must be in CPU memory, got DLPack device {dl.device.device_type}")
    describe_dlpack(dl, name, b)
    return memory


cdef int describe_dlpack(const DLTensor *dl, str name, block *b) except -1:
    cdef int i
    cdef int64_t dense
    b.format = NULL
    b.dl_code, b.dl_bits = dl.dtype.code, dl.dtype.bits
    b.itemsize = (dl.dtype.bits * dl.dtype.lanes + 7) // 8
    b.kind = OTHER
    if dl.dtype.lanes == 1:
        if dl.dtype.code == DL_FLOAT and dl.dtype.bits == 32:
            b.kind = GDN_TYPE_F32
        elif dl.dtype.code == DL_FLOAT and dl.dtype.bits == 16:
            b.kind = GDN_TYPE_F16
        elif dl.dtype.code == DL_BFLOAT and dl.dtype.bits == 16:
            b.kind = GDN_TYPE_BF16
        elif dl.dtype.code == DL_INT and dl.dtype.bits == 32:
            b.kind = GDN_TYPE_I32
        elif dl.dtype.code <= DL_UINT and dl.dtype.bits == 8:
            b.kind = BYTES
        elif dl.dtype.code == DL_UINT and dl.dtype.bits == 16:
            b.kind = WORDS
    if dl.ndim < 0 or dl.ndim > MAX_AXES:
        raise ValueError(f"{name} has {dl.ndim} axes, at most {MAX_AXES} are understood")
    b.data = <char *>dl.data + dl.byte_offset
    b.ndim = dl.ndim
    dense = b.itemsize
    for i in range(dl.ndim - 1, -1, -1):
        b.shape[i] = dl.shape[i]
        if dl.strides == NULL:
            b.strides[i] = dense
        elif multiply(dl.strides[i], b.itemsize, &b.strides[i]):
            raise ValueError(f"{name} has a stride of {dl.strides[i]} elements")
        dense *= dl.shape[i]
    return 0


cdef void close_dlpack(Memory memory) noexcept:
    cdef DLManagedTensor *plain = <DLManagedTensor *>memory.plain
    cdef DLManagedTensorVersioned *versioned = <DLManagedTensorVersioned *>memory.versioned
    if plain != NULL and plain.deleter != NULL:
        plain.deleter(plain)
    if versioned != NULL and versioned.deleter != NULL:
        versioned.deleter(versioned)


# ---------------------------------------------------------------- out

cdef struct export:               # one allocation holds all a consumer sees
    DLManagedTensor plain
    DLManagedTensorVersioned versioned
    int64_t shape[4]
    int64_t strides[4]
    PyObject *tensor


cdef void drop_export(export *e) noexcept with gil:
    Py_XDECREF(e.tensor)
    free(e)


# Consumers may call a deleter without the GIL and, at exit, after the interpreter has gone.
cdef void delete_plain(DLManagedTensor *managed) noexcept nogil:
    if managed != NULL and Py_IsInitialized():
        drop_export(<export *>managed.manager_ctx)


cdef void delete_versioned(DLManagedTensorVersioned *managed) noexcept nogil:
    if managed != NULL and Py_IsInitialized():
        drop_export(<export *>managed.manager_ctx)


cdef void drop_capsule(object capsule) noexcept:
    """A capsule that nobody took still owns its tensor."""
    if PyCapsule_IsValid(capsule, "dltensor"):
        delete_plain(<DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor"))
    elif PyCapsule_IsValid(capsule, "dltensor_versioned"):
        delete_versioned(<DLManagedTensorVersioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned"))


cdef object export_dlpack(Tensor tensor, bint with_version, bint copied):
    cdef int i
    cdef int64_t size = item_size(tensor.t.type)
    cdef bint empty = 0 in tensor.shape
    if not empty and <uintptr_t>tensor.t.data % <uintptr_t>size:
        raise BufferError(f"DLPack needs an address that is a multiple of {size}, got {tensor.data:#x}")
    for i in range(4):
        if tensor.shape[i] > 1 and tensor.strides[i] % size:
            raise BufferError(f"DLPack needs strides that are multiples of {size} bytes, got nb {tensor.nb}")
    if tensor.memory.readonly and not with_version:
        raise BufferError("a read-only Tensor needs DLPack 1.0: ask with max_version=(1, 0), or with copy=True")
    cdef export *e = <export *>calloc(1, sizeof(export))
    if e == NULL:
        raise MemoryError()
    for i in range(4):
        e.shape[i] = tensor.shape[i]
        e.strides[i] = tensor.strides[i] // size if tensor.shape[i] > 1 else 1
    cdef DLTensor *dl = &e.versioned.dl_tensor if with_version else &e.plain.dl_tensor
    dl.data = tensor.t.data
    dl.device = DLDevice(DL_CPU, 0)
    dl.ndim = 4
    dl.dtype = DLDataType(DL_FLOAT, <uint8_t>(8 * size), 1)
    if tensor.t.type == GDN_TYPE_I32:
        dl.dtype.code = DL_INT
    elif tensor.t.type == GDN_TYPE_BF16:
        dl.dtype.code = DL_BFLOAT
    dl.shape, dl.strides = e.shape, e.strides
    e.plain.manager_ctx = e.versioned.manager_ctx = e
    e.plain.deleter, e.versioned.deleter = delete_plain, delete_versioned
    e.versioned.major = 1
    e.versioned.flags = (DL_READ_ONLY if tensor.memory.readonly else 0) | (DL_IS_COPIED if copied else 0)
    try:
        if with_version:
            capsule = PyCapsule_New(&e.versioned, "dltensor_versioned", drop_capsule)
        else:
            capsule = PyCapsule_New(&e.plain, "dltensor", drop_capsule)
    except BaseException:
        free(e)
        raise
    Py_INCREF(tensor)
    e.tensor = <PyObject *>tensor
    return capsule
