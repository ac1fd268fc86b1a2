# The tensor struct of gdn.h.  Apart from _core, whose pxd has a variable: a cimport from there would load _core at run
# time, and _core itself needs _tensor.

from libc.stdint cimport int32_t, int64_t

cdef extern from "gdn.h" nogil:
    enum:
        GDN_TYPE_F32, GDN_TYPE_F16, GDN_TYPE_I32, GDN_TYPE_BF16
    ctypedef struct gdn_tensor:
        void *data
        int32_t type
        int64_t ne[4]
        int64_t nb[4]
