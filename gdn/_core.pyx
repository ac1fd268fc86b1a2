"""Python objects and C structs in, checked jobs out to the level kernels, errors back as exceptions."""

import importlib
import os

import numpy as np

from gdn import _arguments
from gdn._arguments import flag, integer
from gdn._errors import RingBusyError, RingFullError, StateLostError

cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.math cimport isfinite, sqrtf
from libc.stdint cimport INT64_MAX, int32_t, int64_t, intptr_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset
from numpy cimport NPY_INT64, PyArray_DATA, PyArray_ISCARRAY_RO, PyArray_ISWRITEABLE, PyArray_TYPE, ndarray

from gdn._c cimport *
from gdn._checked cimport span_of
from gdn._tensor cimport Tensor, as_array, as_typed, check_overlap, fit, fit_typed, result_type, to_c
from gdn.kernels.level cimport *

cnp.import_array()

include "core/status.pxi"
include "core/parallel.pxi"
include "core/dispatch.pxi"
include "core/scratch.pxi"
include "core/cache_rows.pxi"
include "core/states.pxi"
include "core/log.pxi"
include "core/delta.pxi"
include "core/conv.pxi"
include "core/rowwise.pxi"
include "core/table.pxi"
include "core/layer.pxi"
