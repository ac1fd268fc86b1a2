/* simd.h - vectors for the kernels: GCC vector-extension values, so that one source serves every level.
 *
 * Cython sees `vf` as a float: `acc[i][j] += s * b[j]` broadcasts s.
 * VL         float lanes of a vector
 * MR, NV     the register tile: MR rows of NV vectors, accumulators for the MR x NV products (tile.pxi)
 * NC         vectors of a state row that a token-by-token step carries at once, two accumulators each (recurrent.pxi)
 * HELD_MAX   vectors of a state's row that a step keeps in registers, k and q with them, where that does not spill
 * FETCH_SHARE  1 / FETCH_SHARE of the next state is fetched while one is updated along its value index (recurrent.pxi)
 * CHUNKED_FROM  tokens from which mode auto runs chunked: where the two cross, alike for both gates
 * FEW_ACC    accumulators of a tile of few rows on a state in place (few_rows.pxi): FEW_ROWS rows by four of memory, or
 *            four by FEW_NV vectors
 * CHUNK_MAX  tokens of a chunk, a multiple of MR;  PAIR_LD floats of a row of chunk x chunk matrices, a
 * power of 2;  PAIR_NV vectors of it that hold a chunk */
#ifndef GDN_SIMD_H
#define GDN_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { VL = 16, MR = 8, NV = 2, NC = 8, HELD_MAX = 8, FETCH_SHARE = 4, CHUNK_MAX = 16, CHUNKED_FROM = 11,
       FEW_ACC = 16, FEW_ROWS = 4, FEW_NV = 4 };
#define GDN_LEVEL_NAME "v4"
#define GDN_LEVEL_TABLE gdn_level_v4
#elif defined(__AVX2__)
enum { VL = 8, MR = 6, NV = 2, NC = 4, HELD_MAX = 8, FETCH_SHARE = 1, CHUNK_MAX = 18, CHUNKED_FROM = 5,
       FEW_ACC = 8, FEW_ROWS = 2, FEW_NV = 2 };
#define GDN_LEVEL_NAME "v3"
#define GDN_LEVEL_TABLE gdn_level_v3
#else
enum { VL = 4, MR = 6, NV = 2, NC = 4, HELD_MAX = 1, FETCH_SHARE = 1, CHUNK_MAX = 18, CHUNKED_FROM = 5,
       FEW_ACC = 8, FEW_ROWS = 2, FEW_NV = 2 };
#define GDN_LEVEL_NAME "base"
#define GDN_LEVEL_TABLE gdn_level_base
#endif

enum { PAIR_LD = CHUNK_MAX > 16 ? 32 : 16, PAIR_NV = (CHUNK_MAX + VL - 1) / VL };

#if defined(__AVX512F__)
#define GDN_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define GDN_VECTOR_BYTES 32
#else
#define GDN_VECTOR_BYTES 16
#endif

/* Arrays of vectors become registers only if the loops over them are gone. */
#define GDN_UNROLL _Pragma("GCC unroll 16")

/* aligned(4), may_alias: any float address may be read as a vector. */
typedef float   vf __attribute__((vector_size(GDN_VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(GDN_VECTOR_BYTES), aligned(4), may_alias));

static inline vf   v_load(const float *p)            { return *(const vf *)p; }
/* A load as written: once, into a register, in program order with its like.  GCC would rather load a value again as an
 * operand of every use, and 64-byte loads are what a step on a state runs out of first; and it would move loads past
 * each other, after which hardware prefetchers no longer see one ascending stream, and wait for memory. */
static inline vf   v_load_ordered(const float *p)
{
#if defined(__AVX512F__)
    vf x;
    __asm__ volatile("vmovups %1, %0" : "=v"(x) : "m"(*(const vf *)p));
    return x;
#elif defined(__AVX__)
    vf x;
    __asm__ volatile("vmovups %1, %0" : "=x"(x) : "m"(*(const vf *)p));
    return x;
#elif defined(__SSE2__)
    vf x;
    __asm__ volatile("movups %1, %0" : "=x"(x) : "m"(*(const vf *)p));
    return x;
#else
    return v_load(p);
#endif
}
static inline void v_store(float *p, vf x)           { *(vf *)p = x; }
static inline vf   v_set(float s)                    { return s - (vf){0}; }
static inline vf   v_and(vf x, vf mask)              { return (vf)((vi)x & (vi)mask); }
static inline vf   v_select(vi mask, vf a, vf b)     { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* The first n < VL lanes from p, zeros behind; nothing past p[n-1] is read. */
static inline vf v_load_head(const float *p, int64_t n)
{
    float lanes[VL] = {0};
    memcpy(lanes, p, (size_t)n * sizeof(float));
    return v_load(lanes);
}

static inline void v_store_head(float *p, vf x, int64_t n)
{
    float lanes[VL];
    v_store(lanes, x);
    memcpy(p, lanes, (size_t)n * sizeof(float));
}

/* Sums of lanes four apart.  Unions halve vectors without memory. */
typedef float v_quarter __attribute__((vector_size(16), may_alias));

static inline v_quarter v_fold(vf x)
{
#if defined(__AVX512F__)
    typedef float v_half __attribute__((vector_size(32), may_alias));
    union { vf x; v_half half[2]; } u = {x};
    union { v_half x; v_quarter half[2]; } w = {u.half[0] + u.half[1]};
    return w.half[0] + w.half[1];
#elif defined(__AVX2__)
    union { vf x; v_quarter half[2]; } w = {x};
    return w.half[0] + w.half[1];
#else
    return x;
#endif
}

static inline float v_sum(vf x)
{
    v_quarter y = v_fold(x);
    return (y[0] + y[2]) + (y[1] + y[3]);
}

/* The sums of the lanes of a and of b. */
static inline void v_two_sums(vf a, vf b, float *sum_a, float *sum_b)
{
    v_quarter x = v_fold(a), y = v_fold(b);
    v_quarter xy = (v_quarter){x[0], y[0], x[1], y[1]} + (v_quarter){x[2], y[2], x[3], y[3]};
    v_quarter sums = xy + (v_quarter){xy[2], xy[3], xy[2], xy[3]};
    *sum_a = sums[0];
    *sum_b = sums[1];
}

/* x with lane i set to s; i outside 0..VL-1 sets none. */
static inline vf v_with_lane(vf x, int64_t i, float s)
{
    vi lanes;
    for (int l = 0; l < VL; l++) lanes[l] = l;
    return v_select(lanes == (int32_t)i, v_set(s), x);
}

/* The smaller, the larger of a and x; x where x is NaN. */
#if defined(__AVX512F__)
static inline vf v_min(vf a, vf x) { return (vf)_mm512_min_ps((__m512)a, (__m512)x); }
static inline vf v_max(vf a, vf x) { return (vf)_mm512_max_ps((__m512)a, (__m512)x); }
#elif defined(__AVX__)
static inline vf v_min(vf a, vf x) { return (vf)_mm256_min_ps((__m256)a, (__m256)x); }
static inline vf v_max(vf a, vf x) { return (vf)_mm256_max_ps((__m256)a, (__m256)x); }
#elif defined(__SSE2__)
static inline vf v_min(vf a, vf x) { return (vf)_mm_min_ps((__m128)a, (__m128)x); }
static inline vf v_max(vf a, vf x) { return (vf)_mm_max_ps((__m128)a, (__m128)x); }
#else
static inline vf v_min(vf a, vf x) { return v_select(x > a, a, x); }
static inline vf v_max(vf a, vf x) { return v_select(x < a, a, x); }
#endif

/* x = n ln2 + r for x cut to [low, high] (NaN stays): returns p = exp(r) - 1 and n. */
static inline vf v_exp_core(vf x, float low, float high, vi *n)
{
    const float magic = 12582912.0f;                       /* 1.5 * 2^23: adding it rounds to an integer */
    x = v_min(v_set(high), v_max(v_set(low), x));
    vf t = x * 1.44269504088896341f + magic;
    *n = (vi)t - (vi)v_set(magic);
    vf f = t - magic;
    vf r = (x - f * 0.693359375f) - f * -2.12194440e-4f;
    vf p = v_set(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    return p * r * r + r;
}

static inline vf v_power_of_2(vi n) { return (vf)((n + 127) << 23); }      /* -126 <= n <= 127 */

/* x 2^n, with gradual underflow unless the mode flushes.  Where no instruction does it, in two factors, so that results
 * below 2^-126 and at 2^128 are reached by multiplying. */
static inline vf v_times_power_of_2(vf x, vi n)
{
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)x, _mm512_cvtepi32_ps((__m512i)n));
#else
    vi half = n >> 1;
    return x * v_power_of_2(half) * v_power_of_2(n - half);
#endif
}

/* exp(x), relative error below 2e-7; exp(-inf) = 0, NaN stays NaN. */
static inline vf v_exp(vf x)
{
    vi n;
    vf p = v_exp_core(x, -150.0f, 150.0f, &n);
    return v_times_power_of_2(1.0f + p, n);
}

/* exp(x), and the same as whole + part: whole is 1, as a mask of all bits, and part exp(x) - 1 where exp(x) is between
 * 2^-1.5 and sqrt(2); else whole is 0 and part exp(x).  For slow decays (x near 0) the pair is exact to about 1e-7 * |x|, so
 * that a factor applied thousands of times does not drift. */
static inline vf v_exp_whole_part(vf x, vf *whole, vf *part)
{
    vi n;
    vf p = v_exp_core(x, -150.0f, 150.0f, &n);
    vi near_1 = (n == 0) | (n == -1);
    *whole = (vf)near_1;
    *part = v_select(near_1, v_select(n == 0, p, 0.5f * p - 0.5f), v_times_power_of_2(1.0f + p, n));
    return v_and(v_set(1.0f), *whole) + *part;
}

/* a / (1 + exp(-x)).  Half of a large 2^n divides the numerator instead: exp(-x) overflows below -88.7, while
 * x / (1 + exp(-x)) is a normal float down to -91.8.  a = x = -inf gives -inf. */
static inline vf v_logistic(vf a, vf x)
{
    vi n, half;
    vf p = v_exp_core(-x, -80.0f, 174.0f, &n);
    half = n >> 1;
    half &= ~(half >> 31);
    vf down = v_power_of_2(-half);
    return a * down / (down + (1.0f + p) * v_power_of_2(n - half));
}

static inline vf v_sigmoid(vf x) { return v_logistic(v_set(1.0f), x); }
static inline vf v_silu(vf x)    { return v_logistic(x, x); }

/* a * b where a product with an exact zero is zero, whatever the other factor: a gate of 0 at a rate of -inf. */
static inline vf v_mul_zero(vf a, vf b)
{
    vi zero = ((a == 0.0f) & ~(b != b)) | ((b == 0.0f) & ~(a != a));
    return v_select(zero, v_set(0.0f), a * b);
}

/* log(1 + exp(x)) with relative accuracy at both ends: max(x, 0) + log1p(exp(-|x|)),
 * log1p(t) = 2 atanh(t / (2 + t)) as its series, |t / (2 + t)| <= 1/3. */
static inline vf v_softplus(vf x)
{
    vf t = v_exp(v_select(x > 0.0f, -x, x));
    vf twice = t / (1.0f + 0.5f * t), s2 = 0.25f * twice * twice;    /* 2 s: halving would lose a subnormal's last bit */
    vf p = v_set(1.0f / 15);
    p = p * s2 + 1.0f / 13;
    p = p * s2 + 1.0f / 11;
    p = p * s2 + 1.0f / 9;
    p = p * s2 + 1.0f / 7;
    p = p * s2 + 1.0f / 5;
    p = p * s2 + 1.0f / 3;
    p = twice + twice * (s2 * p);
    return v_select(x > 0.0f, x + p, p);
}

/* Lanes of a and b interleaved: a0 b0 a1 b1 ..., first half and second half. */
#if defined(__AVX512F__)
#define V_LO 0,16,1,17,2,18,3,19,4,20,5,21,6,22,7,23
#define V_HI 8,24,9,25,10,26,11,27,12,28,13,29,14,30,15,31
#elif defined(__AVX2__)
#define V_LO 0,8,1,9,2,10,3,11
#define V_HI 4,12,5,13,6,14,7,15
#else
#define V_LO 0,4,1,5
#define V_HI 2,6,3,7
#endif
#if defined(__clang__)
#define V_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define V_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

static inline vf v_interleave_lo(vf a, vf b) { return V_SHUFFLE(a, b, V_LO); }
static inline vf v_interleave_hi(vf a, vf b) { return V_SHUFFLE(a, b, V_HI); }

/* Lane l is lane from[l] of a, then b; for a constant `from`. */
static inline vf v_shuffle(vf a, vf b, vi from)
{
#if defined(__clang__)
    vf y;
    for (int l = 0; l < VL; l++) y[l] = from[l] < VL ? a[from[l]] : b[from[l] - VL];
    return y;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

/* From and to n vectors interleaved at p: x[0][0], x[1][0], ... x[n-1][0], x[0][1], ...  n is a constant. */
static inline void v_load_interleaved(vf *x, const float *p, const int n)
{
    GDN_UNROLL
    for (int i = 0; i < n; i++) {
        x[i] = v_load(p);
        GDN_UNROLL
        for (int j = 0; j < n; j++) {
            vi from;
            for (int l = 0; l < VL; l++)
                from[l] = (n * l + i) / VL == j ? VL + (n * l + i) % VL : l;
            x[i] = v_shuffle(x[i], v_load(p + j * VL), from);
        }
    }
}

static inline void v_store_interleaved(float *p, const vf *x, const int n)
{
    GDN_UNROLL
    for (int j = 0; j < n; j++) {
        vf y = x[0];
        GDN_UNROLL
        for (int i = 0; i < n; i++) {
            vi from;
            for (int l = 0; l < VL; l++)
                from[l] = (j * VL + l) % n == i ? VL + (j * VL + l) / n : l;
            y = v_shuffle(y, x[i], from);
        }
        v_store(p + j * VL, y);
    }
}

/* A VL x VL block of floats transposed in registers: log2(VL) rounds of interleaving.  Rows lie to_nb and from_nb
 * bytes apart. */
static inline void v_transpose(char *to, int64_t to_nb, const char *from, int64_t from_nb)
{
    vf x[VL], y[VL];
    GDN_UNROLL
    for (int i = 0; i < VL; i++) x[i] = v_load((const float *)(from + i * from_nb));
    GDN_UNROLL
    for (int n = VL; n > 1; n /= 2) {
        GDN_UNROLL
        for (int i = 0; i < VL / 2; i++) {
            y[2 * i]     = v_interleave_lo(x[i], x[i + VL / 2]);
            y[2 * i + 1] = v_interleave_hi(x[i], x[i + VL / 2]);
        }
        GDN_UNROLL
        for (int i = 0; i < VL; i++) x[i] = y[i];
    }
    GDN_UNROLL
    for (int i = 0; i < VL; i++) v_store((float *)(to + i * to_nb), x[i]);
}

/* Lane i + n * j of the result is a part of the sum of y[i]'s lanes, the whole where n, a constant power of two, is VL.  Adding while transposing, about 3 operations a sum. */
static inline vf v_sums_kept(vf *y, const int n)
{
    GDN_UNROLL
    for (int m = n / 2; m > 0; m /= 2)
        GDN_UNROLL
        for (int i = 0; i < m; i++)
            y[i] = v_interleave_lo(y[i], y[i + m]) + v_interleave_hi(y[i], y[i + m]);
    return y[0];
}

/* Lane i is the sum of the lanes of x[i], in memory. */
static inline vf v_sums(const vf *x)
{
    vf y[VL];
    GDN_UNROLL
    for (int i = 0; i < VL; i++) y[i] = v_load_ordered((const float *)(x + i));
    return v_sums_kept(y, VL);
}

/* The sums of n vectors' lanes, n a constant power of two from 4, to rows of ld floats, four each. */
static inline void v_store_sums(float *p, int64_t ld, const vf *x, const int n)
{
    const int group = n < VL ? n : VL;
    GDN_UNROLL
    for (int i = 0; i < n; i += group) {
        vf y[VL];
        GDN_UNROLL
        for (int j = 0; j < group; j++) y[j] = x[i + j];
        union { vf x; v_quarter quarter[VL / 4]; } u = {v_sums_kept(y, group)};
        GDN_UNROLL
        for (int q = 0; q < group / 4; q++) {
            v_quarter sums = u.quarter[q];
            GDN_UNROLL
            for (int part = q + group / 4; part < VL / 4; part += group / 4) sums += u.quarter[part];
            memcpy(p + (i / 4 + q) * ld, &sums, 4 * sizeof(float));
        }
    }
}

/* n floats at p, towards the second-level cache; any address is harmless. */
static inline void v_prefetch(const float *p, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(p + i, 0, 2);
}

#endif
