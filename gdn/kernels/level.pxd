# level.h as Cython sees it.

from libc.stdint cimport int64_t

from gdn._core cimport gdn_conv_args, gdn_delta_net_args, gdn_tensor

cdef extern from "level.h" nogil:
    ctypedef struct gdn_state_rows:
        const char **state_in
        const int64_t **state_in_nb
        char **state_out
    ctypedef struct gdn_delta_job:
        const gdn_delta_net_args *args
        int64_t H_k, H_v, S_k, S_v, n_seqs, n_slots
        int per_channel
        int tiled, single_tokens
        float scale
        int64_t chunked_from, part_unit, n_groups
        int64_t n_parts, part_columns
        gdn_state_rows rows
    ctypedef struct gdn_conv_job:
        const gdn_conv_args *args
        int64_t channels, width, n_seqs, n_slots
        int64_t n_parts, part_channels
        gdn_state_rows rows
    ctypedef struct gdn_rows_job:
        gdn_tensor x, y, w, out
        int64_t n_rows, rows_per_item
        float eps, lower_bound
        int form, activation, bounded
    ctypedef struct gdn_solve_job:
        gdn_tensor a, b, out
        int lower, unit
        int64_t n_parts, part_columns
    ctypedef void (*gdn_item_fn)(const void *job, int64_t item, void *scratch) noexcept nogil
    ctypedef struct gdn_level:
        const char *name
        int vl
        void (*delta_plan)(gdn_delta_job *) noexcept nogil
        size_t (*delta_scratch)(const gdn_delta_job *) noexcept nogil
        size_t (*conv_scratch)(const gdn_conv_job *) noexcept nogil
        gdn_item_fn delta, conv, l2_norm, rms_norm_gated, decay_gate, solve_tri
