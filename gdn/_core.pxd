# The C face as Cython sees it, and what _core shares with _ring.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from gdn._types cimport *

cdef extern from "gdn.h" nogil:
    ctypedef enum gdn_status:
        GDN_OK
        GDN_ERR_NULL
        GDN_ERR_TYPE
        GDN_ERR_SHAPE
        GDN_ERR_STRIDE
        GDN_ERR_VALUE
        GDN_ERR_ROW
        GDN_ERR_SCRATCH
        GDN_ERR_ABI
        GDN_ERR_FULL
        GDN_ERR_UNKNOWN
        GDN_ERR_LOST
        GDN_ERR_BUSY
        GDN_ERR_ROLLBACK
        GDN_ERR_DAMAGED
    enum:
        GDN_ABI
        GDN_HEAD_NONE, GDN_HEAD_TILED, GDN_HEAD_INTERLEAVED
        GDN_MODE_AUTO, GDN_MODE_CHUNKED, GDN_MODE_RECURRENT
        GDN_QK_L2NORM, GDN_L2_MAX, GDN_BETA_LOGIT, GDN_SCALE_GIVEN
        GDN_ACT_NONE, GDN_ACT_SILU, GDN_ACT_SIGMOID
        GDN_L2_FORM_SUM, GDN_L2_FORM_MAX
    ctypedef struct gdn_delta_net_args:
        uint32_t size
        int32_t head_map
        int32_t mode
        uint32_t flags
        float scale
        float l2_eps
        int32_t n_threads
        int32_t reserved
        gdn_tensor q, k, v, g, beta, out, state, state_out
        int64_t n_seqs
        int64_t n_slots
        int64_t slot_nb
        const int64_t *rows_in
        const int64_t *rows_out
        const int64_t *cu_seqlens
        void *scratch
        size_t scratch_size
        char *message
        size_t message_size
    ctypedef struct gdn_conv_args:
        uint32_t size
        int32_t activation
        int32_t n_threads
        int32_t reserved
        gdn_tensor x, weight, bias, out, state, state_out
        int64_t n_seqs
        int64_t n_slots
        int64_t slot_nb
        const int64_t *rows_in
        const int64_t *rows_out
        const int64_t *cu_seqlens
        void *scratch
        size_t scratch_size
        char *message
        size_t message_size
    ctypedef struct gdn_api:
        uint32_t abi
        uint32_t size
        gdn_status (*gated_delta_net)(const gdn_delta_net_args *) noexcept nogil
        gdn_status (*gated_delta_net_scratch_size)(const gdn_delta_net_args *, size_t *) noexcept nogil
        gdn_status (*causal_conv1d)(const gdn_conv_args *) noexcept nogil
        gdn_status (*causal_conv1d_scratch_size)(const gdn_conv_args *, size_t *) noexcept nogil
        gdn_status (*l2_norm)(const gdn_tensor *, float, int32_t, const gdn_tensor *, int32_t) noexcept nogil
        gdn_status (*rms_norm_gated)(const gdn_tensor *, const gdn_tensor *, const gdn_tensor *, float, int32_t,
                                     const gdn_tensor *, int32_t) noexcept nogil
        gdn_status (*decay_gate)(const gdn_tensor *, const gdn_tensor *, const gdn_tensor *, const float *,
                                 const gdn_tensor *, int32_t) noexcept nogil
        gdn_status (*solve_tri)(const gdn_tensor *, const gdn_tensor *, int32_t, int32_t, const gdn_tensor *,
                                int32_t) noexcept nogil
        const char *(*status_string)(gdn_status) noexcept nogil

cdef gdn_api api        # the table behind gdn.capi and the capsule; _ring fills its members
