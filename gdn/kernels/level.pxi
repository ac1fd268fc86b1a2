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
level.name = GDN_LEVEL_NAME
level.vl = VL
level.delta_plan = delta_plan
level.delta_scratch = delta_scratch
level.delta = delta_item
level.conv_scratch = conv_scratch
level.conv = conv_item
level.l2_norm = l2_norm_item
level.rms_norm_gated = rms_norm_gated_item
level.decay_gate = decay_gate_item
level.solve_tri = solve_tri_item

table = PyCapsule_New(&level, "gdn._level", NULL)
