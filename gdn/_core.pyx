"""The door: Python objects and C structs in, checked jobs out to the level kernels, errors back as exceptions."""

import importlib
import os

import numpy as np

cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cython.parallel cimport parallel
from libc.math cimport isfinite, sqrtf
from libc.stdint cimport INT64_MAX, int32_t, int64_t, intptr_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset
from numpy cimport NPY_INT64, PyArray_DATA, PyArray_ISCARRAY_RO, PyArray_TYPE, ndarray

from gdn._tensor cimport Tensor, as_array, check_overlap, fit, is_masked, to_c
from gdn.kernels.level cimport *

cnp.import_array()

include "door/span.pxi"
include "door/errors.pxi"
include "door/engine.pxi"
include "door/build.pxi"
include "door/threads.pxi"
include "door/scratch.pxi"
include "door/rows.pxi"
include "door/plan.pxi"
include "door/states.pxi"
include "door/delta.pxi"
include "door/conv.pxi"
include "door/pointwise.pxi"
include "door/table.pxi"
include "door/layer.pxi"

threads_usable = usable_cpus()
load_level()
