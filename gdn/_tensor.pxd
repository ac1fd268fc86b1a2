# gdn.Tensor, and the conversions from Python arguments that every public function goes through.

from libc.stdint cimport int32_t, int64_t
from numpy cimport ndarray

from gdn._c cimport gdn_tensor


cdef class Memory:
    """Whatever keeps a block of memory alive, and where that block ends."""
    cdef Py_buffer buffer
    cdef void *plain              # DLManagedTensor to give back, or NULL
    cdef void *versioned          # DLManagedTensorVersioned to give back, or NULL
    cdef object owner
    cdef char *start              # first byte and the one behind the last; an int address has no known end
    cdef char *stop
    cdef bint bounded
    cdef bint readonly


cdef class Tensor:
    cdef object __weakref__
    cdef Memory memory
    cdef gdn_tensor t
    cdef int64_t shape[4]      # the same with the axes reversed, as buffers and numpy want them
    cdef int64_t strides[4]


# A writable Tensor over what t describes, which owner keeps alive; its bounds are the caller's word.
cdef Tensor tensor_over(const gdn_tensor *t, object owner)
# A zero-copy float32 array over obj (ndarray, Tensor, buffer or DLPack object), or the error a caller should see.
cdef ndarray as_array(object obj, str name, bint writable)
# The same of float32, float16 or bfloat16; where numpy's array has no bfloat16, its words are uint16.
cdef ndarray as_typed(object obj, str name, bint writable)
# Whether obj is one of numpy's masked arrays, whose masks nothing here would heed.
cdef bint is_masked(object obj)
# as_array with exactly ndim axes; a Tensor's leading unit axes are dropped,
# or ne[2] if that is the unit axis of three.
cdef ndarray fit(object obj, str name, int ndim, bint writable)
cdef ndarray fit_typed(object obj, str name, int ndim, bint writable)
# The dtype that an allocated result of an array's type has; TypeError for bfloat16 without ml_dtypes.
cdef object result_type(ndarray array)
# The C form of an array of at most four axes.
cdef int to_c(ndarray array, gdn_tensor *out) except -1
# Refuse an output that overlaps itself or one of others: (name, array or None, may_be_exactly_the_output) each.
cdef int check_overlap(str out_name, ndarray out, tuple others) except -1
