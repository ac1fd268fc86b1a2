# The engine, used by the Python and the C face alike: the level table, threads, scratch, the loop over work items.

cdef extern from *:
    """
    #ifdef _OPENMP
    #include <omp.h>
    #define GDN_OPENMP 1
    #else
    #define GDN_OPENMP 0
    static inline int omp_get_max_threads(void) { return 1; }
    static inline int omp_get_num_threads(void) { return 1; }
    static inline int omp_get_thread_num(void)  { return 0; }
    static inline int omp_in_parallel(void)     { return 0; }
    #endif
    #if defined(__unix__) || defined(__APPLE__)
    #include <pthread.h>
    static int gdn_forked = 0;
    static void gdn_mark_forked(void) { gdn_forked = 1; }
    static void gdn_watch_forks(void) { pthread_atfork(NULL, NULL, gdn_mark_forked); }
    #else
    static int gdn_forked = 0;
    static void gdn_watch_forks(void) { }
    #endif
    static inline int64_t gdn_claim(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
    """
    int GDN_OPENMP
    int gdn_forked
    void gdn_watch_forks() nogil
    int64_t gdn_claim(int64_t *counter) nogil
    int omp_get_max_threads() nogil
    int omp_get_num_threads() nogil
    int omp_get_thread_num() nogil
    int omp_in_parallel() nogil

cdef extern from "cpu.h" nogil:
    int gdn_cpu_level()
    uint64_t gdn_flush_begin()
    void gdn_flush_end(uint64_t mode)

cdef const gdn_level *level = NULL
cdef int threads_set = 0          # set_num_threads; 0 = not set
cdef int threads_usable = 1       # what affinity and the cgroup quota leave this process

# A forked child of a process whose OpenMP runtime has started hangs at its first parallel region: it runs serial.
gdn_watch_forks()

LEVELS = ("base", "v3", "v4")


cdef void load_level() except *:
    """Import the best level module this machine runs, or the one GDN_LEVEL names."""
    global level
    best = gdn_cpu_level()
    name = os.environ.get("GDN_LEVEL") or LEVELS[best]
    if name not in LEVELS:
        raise ImportError(f"GDN_LEVEL={name!r} is not one of {', '.join(LEVELS)}")
    if LEVELS.index(name) > best:
        raise ImportError(f"GDN_LEVEL={name} asks for more than this machine runs: its best level is {LEVELS[best]}")
    try:
        module = importlib.import_module(f"gdn._level_{name}")
    except ModuleNotFoundError as error:
        raise ImportError(f"level {name} is not part of this build of gdn: {error}") from None
    level = <const gdn_level *>PyCapsule_GetPointer(module.table, "gdn._level")


cdef enum:
    MOST_THREADS = 64             # or four for each CPU: OpenMP ends the process when it cannot start one


cdef int choose_threads(int64_t asked, int64_t n_items) noexcept nogil:
    """Workers for n_items: what was asked, else set_num_threads, else OpenMP's own number within what the process may use."""
    cdef int64_t n = asked
    if n_items <= 1 or gdn_forked or omp_in_parallel():
        return 1
    if n <= 0:
        n = threads_set if threads_set > 0 else min(omp_get_max_threads(), threads_usable)
    return <int>max(1, min(n, n_items, max(MOST_THREADS, 4 * threads_usable)))


cdef struct run:                  # one loop over work items
    gdn_item_fn fn
    const void *job
    int64_t n_items
    bint flush
    bint claim                    # workers claim one item after another; else each has a fixed share
    int64_t claimed               # next unclaimed item
    char *scratch
    size_t scratch_per_worker


cdef void work(run *r, int64_t me, int64_t n_workers) noexcept nogil:
    """One worker's part of a run."""
    cdef int64_t share = r.n_items // n_workers, rest = r.n_items % n_workers
    cdef int64_t item = gdn_claim(&r.claimed) if r.claim else me * share + min(me, rest)
    cdef int64_t stop = r.n_items if r.claim else item + share + (me < rest)
    cdef void *scratch = r.scratch + me * r.scratch_per_worker
    cdef uint64_t mode = gdn_flush_begin() if r.flush else 0
    while item < stop:
        r.fn(r.job, item, scratch)
        item = gdn_claim(&r.claimed) if r.claim else item + 1
    if r.flush:
        gdn_flush_end(mode)


cdef void run_items(gdn_item_fn fn, const void *job, int64_t n_items, int n_workers, bint flush, bint claim=False,
                    char *scratch=NULL, size_t scratch_per_worker=0) noexcept nogil:
    """Run every item once.  Serial calls do not enter an OpenMP region, so that they work anywhere."""
    cdef run r
    cdef run *shared = &r
    r.fn, r.job, r.n_items, r.flush, r.claim, r.claimed = fn, job, n_items, flush, claim, 0
    r.scratch, r.scratch_per_worker = scratch, scratch_per_worker
    if n_workers <= 1:
        work(shared, 0, 1)
        return
    with parallel(num_threads=n_workers):
        work(shared, omp_get_thread_num(), omp_get_num_threads())
