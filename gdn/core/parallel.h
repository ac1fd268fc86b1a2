/* parallel.h - OpenMP regions, forks, and how many CPUs this process may use; nothing of Python. */
#ifndef GDN_PARALLEL_H
#define GDN_PARALLEL_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#define GDN_POSIX 1
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

/* A forked child of a process whose OpenMP runtime has started hangs at its first parallel region: it runs serial. */
static int gdn_forked;
static void gdn_mark_forked(void) { gdn_forked = 1; }

static void gdn_watch_forks(void)
{
    static int watched;
#if GDN_POSIX
    if (!watched)
        pthread_atfork(NULL, NULL, gdn_mark_forked);
#endif
    watched = 1;
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

/* work(run, i, n) on each of n workers at once; the runtime may give fewer. */
static void gdn_parallel(void (*work)(void *run, int64_t i, int64_t n), void *run, int n_workers)
{
#ifdef _OPENMP
#pragma omp parallel num_threads(n_workers)
    work(run, omp_get_thread_num(), omp_get_num_threads());
#else
    (void)n_workers;
    work(run, 0, 1);
#endif
}
#endif
