/* cpu.h - which level this processor and operating system can run, and the flush-to-zero mode of a thread. */
#ifndef GDN_CPU_H
#define GDN_CPU_H

#include <stdint.h>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>

/* 0 base, 1 v3, 2 v4.  __builtin_cpu_supports asks the operating system's saved-state mask too. */
static inline int gdn_cpu_level(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2")
        || !__builtin_cpu_supports("bmi"))
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
