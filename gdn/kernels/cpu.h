/* cpu.h - which level this processor and operating system can run, and the flush-to-zero mode of a thread. */
#ifndef GDN_CPU_H
#define GDN_CPU_H

#include <stdint.h>
#include <string.h>

static const char *const gdn_levels[3] = { "base", "v3", "v4" };

/* 0 base, 1 v3, 2 v4; -1 for anything else. */
static inline int gdn_level_named(const char *name)
{
    int i;
    for (i = 2; i >= 0 && strcmp(name, gdn_levels[i]) != 0; i--)
        ;
    return i;
}

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#include <xmmintrin.h>

/* The best level, -1 if not even base runs.  Levels are compiled for x86-64-v2, v3 and v4, and every instruction of those
 * may be used: so each is asked for.  __builtin_cpu_supports asks the operating system's saved-state mask too. */
static inline int gdn_cpu_level(void)
{
    const unsigned v2 = bit_SSE3 | bit_SSSE3 | bit_CMPXCHG16B | bit_SSE4_1 | bit_SSE4_2 | bit_POPCNT;
    const unsigned v3 = bit_FMA | bit_MOVBE | bit_OSXSAVE | bit_F16C;
    unsigned a, b, ecx = 0, extended = 0, d;
    __builtin_cpu_init();
    __get_cpuid(1, &a, &b, &ecx, &d);
    __get_cpuid(0x80000001, &a, &b, &extended, &d);
    if ((ecx & v2) != v2 || !(extended & bit_LAHF_LM))
        return -1;
    if ((ecx & v3) != v3 || !(extended & bit_LZCNT) || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi")
        || !__builtin_cpu_supports("bmi2"))
        return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? 2 : 1;
}

/* Subnormals flushed (FTZ and DAZ) from here on in this thread; returns the mode to restore. */
static inline uint64_t gdn_flush_begin(void)
{
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040u);
    return mode;
}
static inline void gdn_flush_end(uint64_t mode) { _mm_setcsr((unsigned)mode); }

#elif defined(__aarch64__)
static inline int gdn_cpu_level(void) { return 0; }
static inline uint64_t gdn_flush_begin(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode | (UINT64_C(1) << 24)));
    return mode;
}
static inline void gdn_flush_end(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }

#else
static inline int gdn_cpu_level(void) { return 0; }
static inline uint64_t gdn_flush_begin(void) { return 0; }
static inline void gdn_flush_end(uint64_t mode) { (void)mode; }
#endif
#endif
