# gdn.h as Cython sees it.  Nothing but declarations: cimporting it loads no module.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "gdn.h" nogil:
    enum:
        GDN_TYPE_F32, GDN_TYPE_F16, GDN_TYPE_I32, GDN_TYPE_BF16
    ctypedef struct gdn_tensor:
        void *data
        int32_t type
        int64_t ne[4]
        int64_t nb[4]
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
        GDN_ERR_LOCKED
        GDN_ERR_TWICE
        GDN_ERR_PENDING
        GDN_ERR_SPARE
    enum:
        GDN_ABI
        GDN_HEAD_NONE, GDN_HEAD_TILED, GDN_HEAD_INTERLEAVED
        GDN_MODE_AUTO, GDN_MODE_CHUNKED, GDN_MODE_RECURRENT
        GDN_QK_L2NORM, GDN_L2_MAX, GDN_BETA_LOGIT, GDN_SCALE_GIVEN
        GDN_ACT_NONE, GDN_ACT_SILU, GDN_ACT_SIGMOID
        GDN_L2_FORM_SUM, GDN_L2_FORM_MAX
        GDN_GATE_SOFTPLUS, GDN_GATE_BOUNDED, GDN_GATE_CLAMPED
        GDN_ROUND_NEAREST, GDN_ROUND_STOCHASTIC
        GDN_RING_ABI
        GDN_SLOT_FREE, GDN_SLOT_LIVE, GDN_SLOT_LOST, GDN_SLOT_FILLING
        GDN_MARK_NONE, GDN_MARK_STEP, GDN_MARK_FRESH, GDN_MARK_FILL
        GDN_FORM_PLANES, GDN_FORM_LOG
    ctypedef struct gdn_call:
        gdn_tensor state, state_out
        int64_t n_seqs, n_snapshots, snapshot_nb
        const int64_t *rows_in
        const int64_t *rows_out
        const int64_t *cu_seqlens
        void *scratch
        size_t scratch_size
        char *message
        size_t message_size
        const int64_t *log_in
        int64_t n_log_in
        const int64_t *log_out
        int64_t n_log_out
        const int64_t *parents
        const int64_t *checkpoints
        int64_t n_checkpoints
        int32_t rounding, reserved
        uint64_t seed
    ctypedef struct gdn_delta_net_args:
        uint32_t size
        int32_t head_map
        int32_t mode
        uint32_t flags
        float scale
        float l2_eps
        int32_t n_threads
        int32_t reserved
        gdn_tensor q, k, v, g, beta, out
        gdn_tensor log_k, log_d, log_g
        gdn_call call
    ctypedef struct gdn_conv_args:
        uint32_t size
        int32_t activation
        int32_t n_threads
        int32_t reserved
        gdn_tensor x, weight, bias, out
        gdn_tensor log_x
        gdn_call call
    size_t GDN_DELTA_NET_ARGS_LEAST "GDN_ARGS_LEAST(gdn_delta_net_args)"
    size_t GDN_CONV_ARGS_LEAST "GDN_ARGS_LEAST(gdn_conv_args)"
    ctypedef struct gdn_ring_header:
        char magic[8]
        uint32_t abi, header_size
        int64_t nbytes
        uint64_t tag, nonce
        int32_t form, dtype, n_slots, n_rollback, n_planes, n_layers, H_k, H_v, S_k, S_v, per_channel
        int32_t conv_channels, conv_width, log_capacity, n_entries, n_spare, n_ids, head_map
        int64_t n_rows, n_embd_s, n_embd_r
        int64_t slots_offset, readers_offset, journal_offset, lists_offset, list_nb, spares_offset, ids_offset, free_offset
        int64_t ssm_offset, ssm_row_nb, conv_offset, conv_row_nb
        int64_t log_offset, entry_nb, entry_d, entry_g, entry_x, layer_nb
        uint32_t checksum, lock, sequence, n_journal, last_step
        int32_t n_spare_free
    ctypedef struct gdn_ring_slot:
        int64_t seq_id, position
        uint64_t owner_start
        int64_t n_tokens
        int32_t state, mark
        uint32_t owner, step
        int32_t next, id_at
        int32_t head, valid, touched
        int32_t row, zero, order, first, n_log, new_row, n_kept, n_new, n_tree, tree
    ctypedef struct gdn_ring_readers:
        uint32_t count[8]
        uint32_t owner[8]
        uint64_t owner_start[8]
    ctypedef struct gdn_ring_undo:
        int32_t slot
        gdn_ring_slot old
    ctypedef struct gdn_ring_params:
        uint32_t size
        int32_t n_slots, n_rollback, n_layers, H_v, S_k, S_v
        int32_t conv_channels, conv_width
        int32_t spare, form, H_k, per_channel, log_capacity, n_spare, dtype, head_map
        uint64_t tag
    ctypedef struct gdn_ring_step:
        uint32_t size
        uint32_t step
        int64_t n_seqs
        int64_t n_snapshots
        const int64_t *seq_ids
        const int64_t *n_tokens
        const int64_t *positions
        int64_t *rows_in
        int64_t *rows_out
        int64_t failed
        int32_t first
        uint64_t nonce
        int64_t n_log_in, n_log_out
        int64_t *log_in
        int64_t *log_out
        const int64_t *parents
        const int64_t *forks
        int64_t n_forks, max_checkpoints
        int64_t *checkpoints
        int64_t n_checkpoints
    ctypedef void (*gdn_share_fn)(void *job, int32_t share) noexcept nogil
    ctypedef void (*gdn_parallel_for)(void *context, gdn_share_fn body, void *job, int32_t n_shares) noexcept nogil
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
        gdn_status (*decay_gate)(const gdn_tensor *, const gdn_tensor *, const gdn_tensor *, int32_t, float,
                                 const gdn_tensor *, int32_t) noexcept nogil
        gdn_status (*solve_tri)(const gdn_tensor *, const gdn_tensor *, int32_t, int32_t, const gdn_tensor *,
                                int32_t) noexcept nogil
        const char *(*status_string)(gdn_status) noexcept nogil
        gdn_status (*ring_size)(const gdn_ring_params *, size_t *) noexcept nogil
        gdn_status (*ring_init)(const gdn_ring_params *, void *, size_t) noexcept nogil
        gdn_status (*ring_attach)(void *, size_t) noexcept nogil
        gdn_status (*ring_acquire)(gdn_ring_header *, int64_t, int64_t *) noexcept nogil
        gdn_status (*ring_release)(gdn_ring_header *, int64_t) noexcept nogil
        gdn_status (*ring_begin)(gdn_ring_header *, gdn_ring_step *) noexcept nogil
        gdn_status (*ring_commit)(gdn_ring_header *, gdn_ring_step *) noexcept nogil
        gdn_status (*ring_abort)(gdn_ring_header *, gdn_ring_step *) noexcept nogil
        gdn_status (*ring_rollback)(gdn_ring_header *, int64_t, int64_t) noexcept nogil
        gdn_status (*ring_reset)(gdn_ring_header *, int64_t) noexcept nogil
        gdn_status (*ring_copy)(gdn_ring_header *, int64_t, int64_t) noexcept nogil
        gdn_status (*ring_position)(gdn_ring_header *, int64_t, int64_t *) noexcept nogil
        gdn_status (*ring_max_rollback)(gdn_ring_header *, int64_t, int64_t *) noexcept nogil
        gdn_status (*ring_save_size)(gdn_ring_header *, int64_t, size_t *) noexcept nogil
        gdn_status (*ring_save)(gdn_ring_header *, int64_t, void *, size_t, size_t *) noexcept nogil
        gdn_status (*ring_load)(gdn_ring_header *, int64_t, const void *, size_t) noexcept nogil
        gdn_status (*ring_conv)(gdn_ring_header *, int64_t, gdn_tensor *) noexcept nogil
        gdn_status (*ring_ssm)(gdn_ring_header *, int64_t, gdn_tensor *) noexcept nogil
        gdn_status (*ring_log)(gdn_ring_header *, int64_t, gdn_tensor *, gdn_tensor *, gdn_tensor *,
                               gdn_tensor *) noexcept nogil
        gdn_status (*ring_accept)(gdn_ring_header *, int64_t, const int64_t *, int64_t) noexcept nogil
        gdn_status (*ring_copy_state)(gdn_ring_header *, int64_t, int64_t) noexcept nogil
        gdn_status (*ring_save_state_size)(gdn_ring_header *, int64_t, size_t *) noexcept nogil
        gdn_status (*ring_save_state)(gdn_ring_header *, int64_t, void *, size_t, size_t *) noexcept nogil
        gdn_status (*set_parallel_for)(gdn_parallel_for fn, void *context) noexcept nogil
