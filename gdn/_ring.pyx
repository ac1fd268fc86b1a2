"""The state ring: its logic on the flat buffer, without Python, and the table's ring members.

The buffer's layout and the meaning of every function are told in gdn.h.
"""

cimport cython
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcmp, memcpy, memset

from gdn._c cimport *
from gdn._checked cimport add, multiply
from gdn._core cimport api

cdef extern from *:
    """
    #define GDN_MAX_TOKENS (INT64_MAX / 2)
    """
    int64_t MAX_TOKENS "GDN_MAX_TOKENS"       # of a step, and of positions that can be continued: no sum overflows

cdef enum:
    HEADER_BYTES = 256            # gdn_ring_header
    LAYOUT_BYTES = 144            # its fields in front of their checksum
    SLOT_BYTES = 64               # gdn_ring_slot
    ENTRY_BYTES = 72              # gdn_ring_entry
    MAX_SLOTS = 1 << 28
    ROW_ALIGN = 64
    MAX_PADDING = 60              # rows on 64-byte addresses from any address that is a multiple of 4

include "ring/crc.pxi"
include "ring/lock.pxi"


include "ring/layout.pxi"
include "ring/slots.pxi"
include "ring/steps.pxi"
include "ring/save.pxi"

api.ring_size, api.ring_init, api.ring_attach = ring_size, ring_init, ring_attach
api.ring_acquire, api.ring_release = ring_acquire, ring_release
api.ring_begin, api.ring_commit, api.ring_abort = ring_begin, ring_commit, ring_abort
api.ring_rollback, api.ring_reset, api.ring_copy = ring_rollback, ring_reset, ring_copy
api.ring_position, api.ring_max_rollback = ring_position, ring_max_rollback
api.ring_save_size, api.ring_save, api.ring_load = ring_save_size, ring_save, ring_load
api.ring_conv, api.ring_ssm = ring_conv, ring_ssm

include "ring/python.pxi"
