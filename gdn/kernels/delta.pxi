cdef size_t delta_scratch(const gdn_delta_job *job) noexcept nogil:
    return 0

cdef void delta_item(const void *job, int64_t item, void *scratch) noexcept nogil:
    pass
