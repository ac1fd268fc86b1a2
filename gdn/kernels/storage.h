/* storage.h - numbers as they lie in memory: float32, float16 or bfloat16.  They are widened as they are read and rounded
 * as they are written; what is computed is float32.  `type` is a GDN_TYPE_*, a constant where speed counts.
 *
 * To nearest, ties to even, as numpy and ml_dtypes round; NaN stays NaN.  An activation beyond float16 becomes infinite, a
 * finite element of a state becomes the largest float16 instead, 65504.  Conversions do not depend on whether the mode
 * flushes subnormal float32.  AVX-512's vcvtneps2bf16 is not used: it flushes them always. */
#ifndef GDN_STORAGE_H
#define GDN_STORAGE_H

#include "gdn.h"
#include "simd.h"

typedef uint32_t vu __attribute__((vector_size(GDN_VECTOR_BYTES), aligned(4), may_alias));
typedef uint16_t vw __attribute__((vector_size(GDN_VECTOR_BYTES / 2), aligned(2), may_alias));

static inline int64_t type_size(int type) { return type == GDN_TYPE_F32 ? 4 : 2; }

/* ---- 16-bit words and lanes ---- */

static inline vu v_load_words(const void *p)
{
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__SSE4_1__)
    return (vu)_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return __builtin_convertvector(*(const vw *)p, vu);
#endif
}

/* The lanes, each below 2^16. */
static inline void v_store_words(void *p, vu x)
{
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)x));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1)));
#elif defined(__SSE4_1__)
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi32((__m128i)x, (__m128i)x));
#else
    *(vw *)p = __builtin_convertvector(x, vw);
#endif
}

static inline vu v_choose(vu mask, vu a, vu b) { return (mask & a) | (~mask & b); }

/* ---- float16 and bfloat16 as bits ---- */

static inline vf v_widen_f16(vu h)
{
    vu sign = (h & 0x8000) << 16, magnitude = h & 0x7fff;
    vu normal = (magnitude << 13) + (112u << 23) + ((vu)(magnitude >= 0x7c00) & (112u << 23));
    vf small = __builtin_convertvector((vi)magnitude, vf) * 0x1p-24f;
    return (vf)(sign | v_choose((vu)(magnitude < 0x400), (vu)small, normal));
}

static inline vu v_bits_f16(vf x)
{
    vu u = (vu)x & 0x7fffffff, sign = ((vu)x >> 16) & 0x8000;
    vu normal = (u - (112u << 23) + 0xfff + ((u >> 13) & 1)) >> 13;
    vu small = (vu)((vf)u + 0.5f) - 0x3f000000;             /* an ulp of 0.5 is the smallest float16 */
    vu y = v_choose((vu)(u < 0x38800000), small, normal);
    y = v_choose((vu)(u >= 0x477ff000), (vu){0} + 0x7c00, y);
    return sign | v_choose((vu)(u > 0x7f800000), 0x7e00 | ((u >> 13) & 0x3ff), y);
}

static inline vu v_bits_bf16(vf x)
{
    vu u = (vu)x, y = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return v_choose((vu)((u & 0x7fffffff) > 0x7f800000), (u >> 16) | 0x40, y);
}

/* x, finite values beyond float16's largest number replaced by that. */
static inline vf v_saturate_f16(vf x)
{
    vf y = v_min(v_set(65504.0f), v_max(v_set(-65504.0f), x));
#if defined(__AVX512DQ__)
    return (vf)_mm512_mask_mov_ps((__m512)y, _mm512_fpclass_ps_mask((__m512)x, 0x18), (__m512)x);
#else
    return v_select((vi)(((vu)x & 0x7fffffff) == 0x7f800000), x, y);
#endif
}

/* The upper halves are x as bfloat16; numbers: no lane is NaN. */
static inline vu v_round_bf16(vf x, const int numbers)
{
    vu u = (vu)x;
    if (!numbers) return v_bits_bf16(x) << 16;
#if defined(__AVX512F__)
    __mmask16 odd = _mm512_test_epi32_mask((__m512i)u, _mm512_set1_epi32(0x10000));
    __m512i y = _mm512_add_epi32((__m512i)u, _mm512_set1_epi32(0x7fff));
    return (vu)_mm512_mask_sub_epi32(y, odd, y, _mm512_set1_epi32(-1));
#else
    return u + 0x7fff + ((u >> 16) & 1);
#endif
}

/* Two vectors of bfloat16 as they lie side by side, elements of even and of odd index apart: no element moves to another
 * lane. */
static inline void v_load_even_odd(const char *p, vf *even, vf *odd)
{
    vu x;
#if defined(__AVX512F__)
    __asm__ volatile("vmovups %1, %0" : "=v"(x) : "m"(*(const vu *)p));
#else
    x = *(const vu *)p;
#endif
    *even = (vf)(x << 16);
    *odd = (vf)(x & 0xffff0000);
}

static inline void v_store_even_odd(char *p, vf even, vf odd, const int numbers)
{
    *(vu *)p = (v_round_bf16(even, numbers) >> 16) | (v_round_bf16(odd, numbers) & 0xffff0000);
}

/* Of n elements, 2 VL at a time: those of even index, then those of odd. */
static inline void v_split_even_odd(float *to, const float *from, int64_t n)
{
    for (int64_t i = 0; i < n; i += 2 * VL)
        for (int l = 0; l < VL; l++) {
            to[i + l] = from[i + 2 * l];
            to[i + VL + l] = from[i + 2 * l + 1];
        }
}

/* ---- vectors in memory ---- */

static inline vf v_load_type(const char *p, const int type)
{
    if (type == GDN_TYPE_F32) return v_load((const float *)p);
    if (type == GDN_TYPE_BF16) return (vf)(v_load_words(p) << 16);
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__) && defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    return v_widen_f16(v_load_words(p));
#endif
}

/* v_load_ordered of any type. */
static inline vf v_load_ordered_type(const char *p, const int type)
{
    if (type == GDN_TYPE_F32) return v_load_ordered((const float *)p);
#if defined(__AVX512F__)
    vf x;
    if (type == GDN_TYPE_F16) {
        __asm__ volatile("vcvtph2ps %1, %0" : "=v"(x) : "m"(*(const vw *)p));
        return x;
    }
    __asm__ volatile("vpmovzxwd %1, %0" : "=v"(x) : "m"(*(const vw *)p));
    return (vf)((vu)x << 16);
#elif defined(__F16C__) && defined(__AVX2__)
    vf x;
    if (type == GDN_TYPE_F16) {
        __asm__ volatile("vcvtph2ps %1, %0" : "=x"(x) : "m"(*(const vw *)p));
        return x;
    }
    __asm__ volatile("vpmovzxwd %1, %0" : "=x"(x) : "m"(*(const vw *)p));
    return (vf)((vu)x << 16);
#else
    return v_load_type(p, type);
#endif
}

static inline void v_store_type(char *p, vf x, const int type)
{
    if (type == GDN_TYPE_F32) {
        v_store((float *)p, x);
    } else if (type == GDN_TYPE_BF16) {
        v_store_words(p, v_bits_bf16(x));
    } else {
#if defined(__AVX512F__)
        _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(__AVX2__)
        _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
        v_store_words(p, v_bits_f16(x));
#endif
    }
}

/* The same of a state: float16 saturates. */
static inline void v_store_state(char *p, vf x, const int type)
{
    v_store_type(p, type == GDN_TYPE_F16 ? v_saturate_f16(x) : x, type);
}

/* ---- single numbers ---- */

static inline float load_type(const char *p, int type)
{
    if (type == GDN_TYPE_F32) return *(const float *)p;
    uint16_t words[VL] = {0};
    float lanes[VL];
    memcpy(words, p, 2);
    v_store(lanes, v_load_type((const char *)words, type == GDN_TYPE_BF16 ? GDN_TYPE_BF16 : GDN_TYPE_F16));
    return lanes[0];
}

static inline void store_type(char *p, float x, int type)
{
    if (type == GDN_TYPE_F32) {
        *(float *)p = x;
    } else {
        char lanes[4 * VL];
        v_store_type(lanes, v_set(x), type == GDN_TYPE_BF16 ? GDN_TYPE_BF16 : GDN_TYPE_F16);
        memcpy(p, lanes, 2);
    }
}

/* ---- how a state is rounded ----
 *
 * Stochastic: up with the probability of the part that is cut off, by bits of a generator that counts: they follow from
 * the call's seed, the sequence's index, the tokens it has seen in the call and the element's index in its row (as if that
 * were contiguous in ggml's order), so they are the same for any threads, parts, rows and strides. */

typedef struct { uint32_t key[2]; int stochastic; } gdn_rounding;

static inline uint64_t mix_64(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline gdn_rounding rounding_of(int stochastic, uint64_t seed, int64_t seq, int64_t position)
{
    uint64_t x = stochastic ? mix_64(mix_64(mix_64(seed) ^ (uint64_t)seq) ^ (uint64_t)position) : 0;
    return (gdn_rounding){{(uint32_t)x, (uint32_t)(x >> 32)}, stochastic};
}

/* Of element e + l * step in lane l. */
static inline vu v_random(const gdn_rounding *r, uint32_t e, uint32_t step)
{
    vu x;
    for (int l = 0; l < VL; l++) x[l] = l;
    x = x * step + e + r->key[0];
    x ^= x >> 16;
    x *= 0x21f0aaadu;
    x ^= x >> 15;
    x += r->key[1];
    x *= 0xd35a2d97u;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

static inline vu v_stochastic(vf x, const int type, vu random)
{
    vu u = (vu)x & 0x7fffffff, y;
    if (type == GDN_TYPE_BF16) {
        y = ((vu)x + (random & 0xffff)) >> 16;
        return v_choose((vu)(u > 0x7f800000), ((vu)x >> 16) | 0x40, y);
    }
    x = v_saturate_f16(x);
    u = (vu)x & 0x7fffffff;
    y = (u - (112u << 23) + (random & 0x1fff)) >> 13;
    vi small = __builtin_convertvector(v_select((vi)(u < 0x38800000), (vf)u, v_set(0)) * 0x1p37f, vi);     /* 13 bits are cut */
    y = v_choose((vu)(u < 0x38800000), ((vu)small + (random & 0x1fff)) >> 13, y);
    y = v_choose((vu)(u >= 0x7f800000), 0x7c00 | ((vu)(u > 0x7f800000) & 0x200), y);
    return (((vu)x >> 16) & 0x8000) | y;
}

/* A vector of a state, lane l being element e + l * step of its row. */
static inline void v_store_rounded(char *p, vf x, const int type, const gdn_rounding *r, uint32_t e, uint32_t step)
{
    if (type != GDN_TYPE_F32 && r->stochastic)
        v_store_words(p, v_stochastic(x, type, v_random(r, e, step)));
    else
        v_store_state(p, x, type);
}

static inline void store_rounded(char *p, float x, int type, const gdn_rounding *r, uint32_t e)
{
    if (type == GDN_TYPE_F32) {
        *(float *)p = x;
    } else {
        char lanes[4 * VL];
        v_store_rounded(lanes, v_set(x), type == GDN_TYPE_BF16 ? GDN_TYPE_BF16 : GDN_TYPE_F16, r, e, 0);
        memcpy(p, lanes, 2);
    }
}

#endif
