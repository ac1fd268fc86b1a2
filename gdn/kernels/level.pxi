# One instruction set's kernels behind one table.  Each _level_*.pyx includes this file and nothing else.
#
# Needs: nothing; what the files below need is imported here or in a file before them.

from cpython.pycapsule cimport PyCapsule_New
from libc.math cimport sqrtf
from libc.stdint cimport INT64_MAX, int64_t
from libc.string cimport memcpy, memset

from gdn._c cimport *
from gdn.kernels.level cimport *

include "simd.pxi"
include "pack.pxi"
include "storage.pxi"
include "tile.pxi"
include "pairs.pxi"
include "decay.pxi"
include "chunked.pxi"
include "recurrent.pxi"
include "few_rows.pxi"
include "item.pxi"
include "stretches.pxi"
include "log.pxi"
include "delta.pxi"
include "conv.pxi"
include "norms.pxi"
include "solve.pxi"

cdef extern from "simd.h":
    const char *GDN_LEVEL_NAME

cdef gdn_level level


cdef public const void *level_table "GDN_LEVEL_TABLE"() noexcept nogil:
    """The gdn_level of this module: gdn_level_base, gdn_level_v3 or gdn_level_v4 to a linker, hidden."""
    level.name, level.vl = GDN_LEVEL_NAME, VL
    level.delta_plan, level.delta_scratch, level.delta = delta_plan, delta_scratch, delta_item
    level.conv_scratch, level.conv = conv_scratch, conv_item
    level.l2_norm, level.rms_norm_gated, level.decay_gate = l2_norm_item, rms_norm_gated_item, decay_gate_item
    level.solve_tri = solve_tri_item
    return &level


table = PyCapsule_New(<void *>level_table(), "gdn._level", NULL)
