"""The state ring: its logic on the flat buffer, without Python, the table's ring members, and its Python face.

The buffer's layout and the meaning of every function are told in gdn.h.
"""

import mmap
import os

import numpy

from gdn._arguments import flag, integer, integers
from gdn._core import EXCEPTIONS
from gdn._errors import RingBusyError

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.math cimport exp
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcmp, memcpy, memmove, memset
from numpy cimport NPY_INT64, PyArray_DATA, PyArray_EMPTY, import_array, ndarray, npy_intp

from gdn._c cimport *
from gdn._checked cimport add, multiply
from gdn._core cimport api
from gdn._tensor cimport tensor_over

from gdn._core import TokenLog

cdef extern from "process.h" nogil:
    ctypedef struct gdn_process:
        uint32_t pid
        uint64_t start
    gdn_process gdn_me()
    bint gdn_process_is(uint32_t pid, uint64_t start)
    uint32_t gdn_token(uint32_t pid, uint64_t start)
    bint gdn_token_runs(uint32_t token)
    uint64_t gdn_mix(uint64_t x)
    uint64_t gdn_nonce()
    bint gdn_swap(uint32_t *word, uint32_t old, uint32_t new)
    uint32_t gdn_add_to(uint32_t *word, uint32_t n)
    uint32_t gdn_load(const uint32_t *word)
    void gdn_store(uint32_t *word, uint32_t value)
    void gdn_fence()
    void gdn_pause()
    void gdn_sleep(long nanoseconds)
    int64_t gdn_milliseconds()
    int sched_yield()

cdef extern from "crc.h" nogil:
    uint32_t crc32 "gdn_crc32"(const void *data, size_t n)

cdef extern from *:
    """
    #define GDN_MAX_TOKENS (INT64_MAX / 2)
    #define GDN_PARAMS_LEAST offsetof(gdn_ring_params, form)
    #define GDN_STEP_LEAST offsetof(gdn_ring_step, n_log_in)
    """
    int64_t MAX_TOKENS "GDN_MAX_TOKENS"       # of a step, and of positions that can be continued: no sum overflows
    uint32_t PARAMS_LEAST "GDN_PARAMS_LEAST"  # the smallest structs of a caller's
    uint32_t STEP_LEAST "GDN_STEP_LEAST"

include "ring/layout.pxi"
include "ring/lock.pxi"
include "ring/slots.pxi"
include "ring/steps.pxi"
include "ring/save.pxi"
include "ring/table.pxi"
include "ring/arguments.pxi"
include "ring/step.pxi"
include "ring/python.pxi"

import_array()
gdn_ring_start(&api)
