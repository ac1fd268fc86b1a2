"""The door: Python objects and C structs in, checked jobs out to the level kernels, errors back as exceptions."""

import importlib
import os

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cython.parallel cimport parallel
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t

from gdn.kernels.level cimport *

include "door/engine.pxi"
include "door/build.pxi"

load_level()
