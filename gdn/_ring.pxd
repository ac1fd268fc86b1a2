# What the ring's Python face is made of, so that steps, which it hands out, can stand before it.

from libc.stdint cimport int32_t, int64_t

from gdn._c cimport gdn_ring_header, gdn_ring_slot, gdn_status, gdn_tensor


cdef class StateRing:
    cdef object __weakref__
    cdef Py_buffer view
    cdef gdn_ring_header *ring
    cdef readonly int32_t n_slots, n_rollback, n_planes, n_layers, H_v, S_k, S_v, conv_channels, conv_width
    cdef readonly int32_t log_capacity, n_spare
    cdef readonly bint per_channel

    cdef int refuse_fold(self, gdn_status status, int64_t seq_id) except -1
    cdef gdn_ring_slot committed(self, seq_id, int64_t *slot, bint lost) except *
    cdef list states(self)
    cdef object view_of(self, object layer, gdn_status status, gdn_tensor *t)
