# simd.h as Cython sees it: vf is a float to Cython, a vector of VL floats to the C compiler.
#
# Needs: nothing.

cdef extern from "simd.h" nogil:
    ctypedef float vf
    enum:
        VL
        MR
        NV
        NC
        HELD_MAX
        FETCH_SHARE
        FEW_ACC
        FEW_ROWS
        FEW_NV
        CHUNK_MAX
        CHUNKED_FROM
        PAIR_LD
        PAIR_NV
    vf v_load(const float *p)
    vf v_load_ordered(const float *p)
    void v_load_interleaved(vf *x, const float *p, const int n)
    void v_store_interleaved(float *p, const vf *x, const int n)
    void v_store(float *p, vf x)
    vf v_set(float s)
    vf v_load_head(const float *p, int64_t n)
    void v_store_head(float *p, vf x, int64_t n)
    float v_sum(vf x)
    vf v_sums(vf *x)
    void v_store_sums(float *p, int64_t ld, const vf *x, const int n)
    vf v_and(vf x, vf mask)
    void v_two_sums(vf a, vf b, float *sum_a, float *sum_b)
    vf v_with_lane(vf x, int64_t i, float s)
    vf v_exp(vf x)
    vf v_exp_whole_part(vf x, vf *whole, vf *part)
    vf v_sigmoid(vf x)
    vf v_silu(vf x)
    vf v_softplus(vf x)
    vf v_mul_zero(vf a, vf b)
    vf v_max(vf a, vf x)
    void v_transpose(char *to, int64_t to_nb, const char *from_, int64_t from_nb)
    void v_prefetch(const float *p, int64_t n)
