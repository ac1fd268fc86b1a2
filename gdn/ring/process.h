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

static uint64_t gdn_boot(void)
{
    static uint32_t boot = 0;
    uint32_t hash = 2166136261u;
    char text[64];
    if (boot == 0) {
        if (gdn_read_file("/proc/sys/kernel/random/boot_id", text, sizeof text) > 0)
            for (const char *c = text; *c; c++)
                hash = (hash ^ (uint8_t)*c) * 16777619u;
        boot = hash;
    }
    return (uint64_t)boot << 32;
}

/* Whether process `pid` runs, and since when.  A zombie does not run, unless only its first thread has ended. */
static int gdn_process_runs(uint32_t pid, uint64_t *start)
{
    char path[32], text[1024], state = 0;
    const char *c;
    unsigned long long value = 0, n_threads = 0;
    *start = 0;
    if (pid == 0 || pid > INT32_MAX)
        return 0;
    snprintf(path, sizeof path, "/proc/%u/stat", (unsigned)pid);
    if (gdn_read_file(path, text, sizeof text) <= 0 || (c = strrchr(text, ')')) == NULL)
        return kill((pid_t)pid, 0) == 0 || errno != ESRCH;     /* no /proc, or it hides other users' processes */
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
    *start = gdn_boot() ^ (uint64_t)value;
    return state != 'X' && (state != 'Z' || n_threads > 1);
}

static int gdn_process_is(uint32_t pid, uint64_t start)
{
    uint64_t now;
    return gdn_process_runs(pid, &now) && (now == start || now == 0 || start == 0);
}

/* The process that calls.  Looked up once, and again in a forked child. */
static gdn_process gdn_self = { 0, 0 };

static void gdn_forget_self(void)
{
    gdn_self.pid = 0;
}

static gdn_process gdn_me(void)
{
    gdn_process me;
    me.pid = __atomic_load_n(&gdn_self.pid, __ATOMIC_ACQUIRE);
    me.start = gdn_self.start;
    if (me.pid == 0) {
        me.pid = (uint32_t)getpid();
        gdn_process_runs(me.pid, &me.start);
        gdn_self.start = me.start;
        __atomic_store_n(&gdn_self.pid, me.pid, __ATOMIC_RELEASE);
    }
    return me;
}

static void gdn_watch_self(void)
{
    pthread_atfork(NULL, NULL, gdn_forget_self);
}

/* A process in the 32 bits that can be swapped atomically at any 4-byte address: 22 of process id, 10 of its start. */
static uint32_t gdn_token(uint32_t pid, uint64_t start)
{
    return (pid & 0x3fffffu) | (uint32_t)((start * 0x9E3779B97F4A7C15ull) >> 54) << 22;
}

static int gdn_token_runs(uint32_t token)
{
    uint64_t start;
    return gdn_process_runs(token & 0x3fffffu, &start) && (start == 0 || gdn_token(token, start) == token);
}

static inline int gdn_swap(uint32_t *word, uint32_t from, uint32_t to)
{
    return __atomic_compare_exchange_n(word, &from, to, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

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
