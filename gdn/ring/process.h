/* process.h - who runs: process identities that survive reuse of process ids, and the atomics of a lock in shared memory. */
#ifndef GDN_PROCESS_H
#define GDN_PROCESS_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct gdn_process {
    uint32_t pid;
    uint64_t start;             /* clock ticks from boot, the boot in the upper half; 0 = unknown */
} gdn_process;

static ssize_t gdn_read_file(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n;
    if (fd < 0)
        return -1;
    do
        n = read(fd, text, size - 1);
    while (n < 0 && errno == EINTR);
    close(fd);
    text[n < 0 ? 0 : n] = 0;
    return n;
}

/* Which boot, in the upper half; 0 = unknown.  Kept once it could be read. */
static uint64_t gdn_boot(void)
{
    static uint32_t boot = 0;
    uint32_t hash = 2166136261u, known = __atomic_load_n(&boot, __ATOMIC_RELAXED);
    char text[64];
    if (known == 0 && gdn_read_file("/proc/sys/kernel/random/boot_id", text, sizeof text) > 0) {
        for (const char *c = text; *c; c++)
            hash = (hash ^ (uint8_t)*c) * 16777619u;
        known = hash != 0 ? hash : 1;
        __atomic_store_n(&boot, known, __ATOMIC_RELAXED);
    }
    return (uint64_t)known << 32;
}

/* Whether process `pid` runs, and since when; *start 0: not to be known.  A zombie does not run, unless only its first
 * thread has ended. */
static int gdn_process_runs(uint32_t pid, uint64_t *start)
{
    char path[32], text[1024], state = 0;
    const char *c;
    uint64_t boot = gdn_boot();
    unsigned long long value = 0, n_threads = 0;
    *start = 0;
    if (pid == 0 || pid > INT32_MAX)
        return 0;
    snprintf(path, sizeof path, "/proc/%u/stat", (unsigned)pid);
    if (gdn_read_file(path, text, sizeof text) <= 0 || (c = strrchr(text, ')')) == NULL)
        return kill((pid_t)pid, 0) == 0 || errno != ESRCH;     /* no /proc, no file to be had, or it hides other users' */
    /* The command's name (field 2) may hold anything; fields count from behind its bracket. */
    for (int field = 3; field <= 22 && (c = strchr(c, ' ')) != NULL; field++) {
        c++;
        if (field == 3)
            state = *c;
        else if (field == 20)
            sscanf(c, "%llu", &n_threads);
        else if (field == 22)
            sscanf(c, "%llu", &value);
    }
    *start = boot != 0 && value != 0 ? boot ^ (uint64_t)value : 0;
    return state != 'X' && (state != 'Z' || n_threads > 1);
}

/* A start that either side could not read says nothing: then a process lives as long as its id does. */
static int gdn_process_is(uint32_t pid, uint64_t start)
{
    uint64_t now;
    return gdn_process_runs(pid, &now) && (now == start || now == 0 || start == 0);
}

/* The process that calls.  Looked up when the library is loaded, while there are files to be had, and in a forked child
 * when it first asks; what could not be read then stays unknown, so that a process is the same one all its life. */
static gdn_process gdn_self = { 0, 0 };

static void gdn_forget_self(void)
{
    gdn_self.pid = 0;
    gdn_self.start = 0;
}

static gdn_process gdn_me(void)
{
    gdn_process me;
    me.pid = __atomic_load_n(&gdn_self.pid, __ATOMIC_ACQUIRE);
    if (me.pid == 0) {
        uint64_t start;
        me.pid = (uint32_t)getpid();
        gdn_process_runs(me.pid, &start);
        if (start != 0)
            __atomic_store_n(&gdn_self.start, start, __ATOMIC_RELAXED);
        __atomic_store_n(&gdn_self.pid, me.pid, __ATOMIC_RELEASE);
    }
    me.start = __atomic_load_n(&gdn_self.start, __ATOMIC_RELAXED);
    return me;
}

__attribute__((constructor)) static void gdn_watch_self(void)
{
    pthread_atfork(NULL, NULL, gdn_forget_self);
    gdn_me();
}

/* A process in the 32 bits that can be swapped atomically at any 4-byte address: 22 of process id, 10 of its start, of
 * which 0 is an unknown one. */
static uint32_t gdn_token(uint32_t pid, uint64_t start)
{
    uint32_t bits = (uint32_t)((start * 0x9E3779B97F4A7C15ull) >> 54);
    return (pid & 0x3fffffu) | (start == 0 ? 0 : bits != 0 ? bits : 1) << 22;
}

static int gdn_token_runs(uint32_t token)
{
    uint64_t start;
    return gdn_process_runs(token & 0x3fffffu, &start) && (start == 0 || token >> 22 == 0
                                                           || gdn_token(token & 0x3fffffu, start) == token);
}

/* Bits that depend on every bit of x. */
static inline uint64_t gdn_mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

/* Another number each time, in every process; never 0. */
static uint64_t gdn_nonce(void)
{
    static uint32_t n = 0;
    struct timespec t;
    uint64_t x;
    clock_gettime(CLOCK_REALTIME, &t);
    x = gdn_mix((uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec);
    x = gdn_mix(x ^ (uint64_t)getpid() << 32 ^ __atomic_add_fetch(&n, 1, __ATOMIC_RELAXED));
    return x != 0 ? x : 1;
}

static inline int gdn_swap(uint32_t *word, uint32_t from, uint32_t to)
{
    return __atomic_compare_exchange_n(word, &from, to, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

static inline uint32_t gdn_add_to(uint32_t *word, uint32_t n) { return __atomic_fetch_add(word, n, __ATOMIC_ACQ_REL); }
static inline uint32_t gdn_load(const uint32_t *word)         { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline void gdn_store(uint32_t *word, uint32_t value)  { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static inline void gdn_fence(void)                            { __atomic_thread_fence(__ATOMIC_ACQ_REL); }

static inline void gdn_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void gdn_sleep(long nanoseconds)
{
    struct timespec t = { 0, nanoseconds };
    nanosleep(&t, NULL);
}

static inline int64_t gdn_milliseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

#endif
