/* parallel.h - loops on OpenMP's threads or the host's, forks, and how many CPUs this process may use; nothing of Python. */
#ifndef GDN_PARALLEL_H
#define GDN_PARALLEL_H

#include <gdn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__unix__) || defined(__APPLE__)
#define GDN_POSIX 1
#include <dirent.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>
#else
#define GDN_POSIX 0
#endif

#ifdef _OPENMP
#include <omp.h>
#define GDN_OPENMP 1
#else
#define GDN_OPENMP 0
static inline int omp_get_max_threads(void) { return 1; }
static inline int omp_in_parallel(void)     { return 0; }
#endif

static inline int64_t gdn_claim(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

/* ---- CPUs ------------------------------------------------------------------------------------------------------- */

/* The next number of an open file, -1 for anything else ("max"). */
static long long gdn_read_number(FILE *file)
{
    long long x;
    return file != NULL && fscanf(file, "%lld", &x) == 1 ? x : -1;
}

/* CPUs of one cgroup's quota and period, rounded up; 0 without one.  v2 has both in cpu.max, v1 a file for each. */
static long long gdn_directory_quota(const char *directory, int v2)
{
    char path[4200];
    FILE *file, *second = NULL;
    long long quota, period;
    snprintf(path, sizeof path, "%s/%s", directory, v2 ? "cpu.max" : "cpu.cfs_quota_us");
    if ((file = fopen(path, "r")) == NULL)
        return 0;
    quota = gdn_read_number(file);
    if (!v2) {
        snprintf(path, sizeof path, "%s/cpu.cfs_period_us", directory);
        second = fopen(path, "r");
    }
    period = gdn_read_number(v2 ? file : second);
    fclose(file);
    if (second != NULL)
        fclose(second);
    return quota > 0 && period > 0 ? quota / period + (quota % period != 0) : 0;       /* v1's "none" is -1 */
}

/* The tightest quota of `root` and of the directories on `group`, a path below it. */
static long long gdn_tightest_quota(const char *root, const char *group, int v2)
{
    char directory[4096];
    long long least = gdn_directory_quota(root, v2), quota;
    size_t length;
    snprintf(directory, sizeof directory, "%s", root);
    while (*group != 0) {
        length = strcspn(group, "/");
        if (length > 0 && !(length == 2 && group[0] == '.' && group[1] == '.')) {
            size_t end = strlen(directory);
            if (end + length + 2 > sizeof directory)
                return least;
            snprintf(directory + end, sizeof directory - end, "/%.*s", (int)length, group);
            quota = gdn_directory_quota(directory, v2);
            if (quota > 0 && (least == 0 || quota < least))
                least = quota;
        }
        group += length + (group[length] != 0);
    }
    return least;
}

/* The process's path in the v2 hierarchy, or in v1's "cpu" one, from lines id:controllers:path; empty if not named. */
static void gdn_find_group(const char *membership, int v2, char *group, size_t size)
{
    char line[4096], *names, *path, *name;
    FILE *file = fopen(membership, "r");
    group[0] = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = 0;
        if ((names = strchr(line, ':')) == NULL || (path = strchr(++names, ':')) == NULL)
            continue;
        *path++ = 0;
        if (v2 ? *names == 0 : 0)
            snprintf(group, size, "%s", path);
        for (name = strtok(names, ","); !v2 && name != NULL; name = strtok(NULL, ","))
            if (strcmp(name, "cpu") == 0)
                snprintf(group, size, "%s", path);
    }
    if (file != NULL)
        fclose(file);
}

/* n_cpus within the tightest CPU quota on the process's cgroup or one around it (v2, then v1), at least 1.
 * Inside a container the group is the root of what is mounted; a service manager's groups lie below it. */
static int gdn_within_quota(int n_cpus, const char *root, const char *membership)
{
    char group[4096], cpu_root[4096];
    long long quota;
    gdn_find_group(membership, 1, group, sizeof group);
    quota = gdn_tightest_quota(root, group, 1);
    if (quota == 0) {
        gdn_find_group(membership, 0, group, sizeof group);
        snprintf(cpu_root, sizeof cpu_root, "%s/cpu", root);
        quota = gdn_tightest_quota(cpu_root, group, 0);
    }
    if (quota > 0 && quota < n_cpus)
        n_cpus = (int)quota;
    return n_cpus < 1 ? 1 : n_cpus;
}

/* CPUs that affinity leaves the process.  OpenMP knows them even where it has bound this thread to one of them. */
static int gdn_affinity(void)
{
#ifdef _OPENMP
    return omp_get_num_procs();
#else
    return 1;
#endif
}

/* ---- regions ------------------------------------------------------------------------------------------------------ */

#define GDN_LOAD(x)       __atomic_load_n(&(x), __ATOMIC_RELAXED)
#define GDN_STORE(x, to)  __atomic_store_n(&(x), to, __ATOMIC_RELAXED)

static gdn_parallel_for gdn_host_for;   /* the host's own loop, NULL for OpenMP's; only changed while no loop runs */
static void *gdn_host_context;
static int64_t gdn_running;             /* loops under way; far below 0 while the host's is changed */

/* OpenMP's threads do not come along into a forked child, its runtime does not know, and hangs: a child of a process that
 * had any threads runs serial. */
static int gdn_forked, gdn_had_threads;

#if GDN_POSIX
static int gdn_count_threads(void)
{
    DIR *tasks = opendir("/proc/self/task");
    int n = 0;
    if (tasks == NULL)
        return 2;                       /* unknown: take it that there are others */
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;)
        n += entry->d_name[0] != '.';
    closedir(tasks);
    return n;
}

static void gdn_before_fork(void) { gdn_had_threads = gdn_count_threads() > 1; }

static void gdn_in_child(void)
{
    gdn_forked = gdn_forked || gdn_had_threads;
    gdn_host_for = NULL;
    gdn_running = 0;
}
#endif

static void gdn_watch_forks(void)
{
    static int watched;
#if GDN_POSIX
    if (!watched)
        pthread_atfork(gdn_before_fork, NULL, gdn_in_child);
#endif
    watched = 1;
}

/* Whether threads pay.  A loop ends when its last thread does, and that one may have to wait for a CPU that somebody else
 * computes on.  So a loop on the default number of threads is timed: share 0 tells what all items would have taken alone,
 * and what was saved or lost against that goes to an account.  While it is in the black threads are used; when it runs out,
 * calls are serial for a while, twice as long each time it happens again soon. */
enum { GDN_MOST_CREDIT = 2000000, GDN_PROBE_CREDIT = 1000000, GDN_FIRST_PAUSE = 64000000 };       /* nanoseconds */
#define GDN_LONGEST_PAUSE INT64_C(16000000000)
static int64_t gdn_credit = GDN_MOST_CREDIT, gdn_pause_ends, gdn_pause;

static int64_t gdn_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static int gdn_threads_pay(void) { return GDN_LOAD(gdn_pause_ends) == 0 || gdn_now() >= GDN_LOAD(gdn_pause_ends); }

/* A loop of n_items began at `start` and is over; share 0 took `time` for `done` of them. */
static void gdn_account(int64_t start, int64_t time, int64_t done, int64_t n_items)
{
    int64_t now = gdn_now(), sum, pause = GDN_LOAD(gdn_pause);
    if (done == 0)
        return;
    sum = GDN_LOAD(gdn_credit) + (int64_t)((double)time / (double)done * (double)n_items) - (now - start);
    if (sum >= 0) {
        GDN_STORE(gdn_credit, sum < GDN_MOST_CREDIT ? sum : GDN_MOST_CREDIT);
        return;
    }
    pause = pause && now - GDN_LOAD(gdn_pause_ends) < 8 * pause ? 2 * pause : GDN_FIRST_PAUSE;
    pause = pause < GDN_LONGEST_PAUSE ? pause : GDN_LONGEST_PAUSE;
    GDN_STORE(gdn_credit, GDN_PROBE_CREDIT);
    GDN_STORE(gdn_pause, pause);
    GDN_STORE(gdn_pause_ends, now + pause);
}

#if GDN_OPENMP && GDN_POSIX
typedef struct gdn_gate { pthread_mutex_t mutex; } gdn_gate;

static void *gdn_wait_at_gate(void *gate)
{
    pthread_mutex_lock(&((gdn_gate *)gate)->mutex);
    pthread_mutex_unlock(&((gdn_gate *)gate)->mutex);
    return NULL;
}

/* How many of n - 1 threads beside this one the system starts, plus 1.  They wait until all are there, and end. */
static int gdn_try_threads(int n)
{
    pthread_t *threads = (pthread_t *)malloc((size_t)n * sizeof *threads);
    gdn_gate gate = { PTHREAD_MUTEX_INITIALIZER };
    int started = 0, i;
    if (threads == NULL)
        return 1;
    pthread_mutex_lock(&gate.mutex);
    while (started < n - 1 && pthread_create(&threads[started], NULL, gdn_wait_at_gate, &gate) == 0)
        started++;
    pthread_mutex_unlock(&gate.mutex);
    for (i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    free(threads);
    return started == n - 1 ? n : started < 3 ? 1 : started - 2;       /* the runtime needs some memory of its own */
}

/* At most n workers, so many as can be started: OpenMP ends the process when it cannot start one.  Asked only where that
 * may be: under a limit of memory, or for more threads than CPUs; and when this thread's team grows, for the runtime keeps
 * the team of a region for the next. */
static int gdn_startable(int n, int n_cpus)
{
    static __thread int team = 1;
    struct rlimit memory;
    if (n > team && (n > n_cpus || (getrlimit(RLIMIT_AS, &memory) == 0 && memory.rlim_cur != RLIM_INFINITY)))
        n = gdn_try_threads(n);
    return team = n;
}
#else
static int gdn_startable(int n, int n_cpus) { (void)n_cpus; return n; }
#endif

/* body(run, i) for each of n shares, at once where there are threads for it. */
static void gdn_parallel(gdn_share_fn body, void *run, int n)
{
    gdn_parallel_for fn;
    while (__atomic_fetch_add(&gdn_running, 1, __ATOMIC_ACQUIRE) < 0)
        __atomic_fetch_sub(&gdn_running, 1, __ATOMIC_RELEASE);
    fn = gdn_host_for;
    if (fn != NULL)
        fn(gdn_host_context, body, run, n);
    else {
#ifdef _OPENMP
#pragma omp parallel num_threads(n)
        for (int i = omp_get_thread_num(); i < n; i += omp_get_num_threads())
            body(run, i);
#else
        for (int i = 0; i < n; i++)
            body(run, i);
#endif
    }
    __atomic_fetch_sub(&gdn_running, 1, __ATOMIC_RELEASE);
}

static gdn_status gdn_set_parallel_for(gdn_parallel_for fn, void *context)
{
    int64_t none = 0;
    if (!__atomic_compare_exchange_n(&gdn_running, &none, INT64_MIN / 2, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return GDN_ERR_BUSY;
    gdn_host_context = context;
    GDN_STORE(gdn_host_for, fn);
    __atomic_fetch_sub(&gdn_running, INT64_MIN / 2, __ATOMIC_RELEASE);
    return GDN_OK;
}
#endif
