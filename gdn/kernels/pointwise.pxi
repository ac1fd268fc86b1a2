cdef size_t conv_scratch(const gdn_conv_job *job) noexcept nogil:
    return 0

cdef void conv_item(const void *job, int64_t item, void *scratch) noexcept nogil:
    pass

cdef void l2_norm_item(const void *job, int64_t item, void *scratch) noexcept nogil:
    pass

cdef void rms_norm_gated_item(const void *job, int64_t item, void *scratch) noexcept nogil:
    pass

cdef void decay_gate_item(const void *job, int64_t item, void *scratch) noexcept nogil:
    pass

cdef void solve_tri_item(const void *job, int64_t item, void *scratch) noexcept nogil:
    pass
