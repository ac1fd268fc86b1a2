# Threads: how many a call gets, and the loop over its work items.  Used by the Python and the C face alike.
#
# Needs: level.pxd (gdn_item_fn).

cdef extern from "parallel.h" nogil:
    int GDN_OPENMP
    int gdn_forked
    void gdn_watch_forks()
    int gdn_affinity()
    int gdn_within_quota(int n_cpus, const char *root, const char *membership)
    int gdn_startable(int n, int n_cpus)
    void gdn_parallel(void (*body)(void *run, int32_t share) noexcept nogil, void *run, int n_shares)
    gdn_status gdn_set_parallel_for(gdn_parallel_for fn, void *context)
    void *gdn_host_for            # read by GDN_LOAD outside loops: another thread may be changing it
    void *GDN_LOAD(void *x)
    bint gdn_threads_pay()
    int64_t gdn_now()
    void gdn_account(int64_t start, int64_t time, int64_t done, int64_t n_items)
    int64_t gdn_claim(int64_t *counter)
    int omp_get_max_threads()
    int omp_in_parallel()

cdef extern from "cpu.h" nogil:
    uint64_t gdn_flush_begin()
    void gdn_flush_end(uint64_t mode)

cdef int threads_set              # set_num_threads; 0 = not set
cdef int cpus_usable              # what affinity and the cgroup quota leave this process; set at the start

cdef enum:
    MOST_THREADS = 64             # or four for each CPU, whatever is asked for


cdef int choose_threads(int64_t asked, int64_t n_items) noexcept nogil:
    """Most workers for n_items: what was asked, else set_num_threads, else OpenMP's own number, or the host's threads', within
    what the process may use."""
    cdef int64_t n = asked
    cdef bint hosted = GDN_LOAD(gdn_host_for) != NULL
    if n_items <= 1 or (gdn_forked and not hosted) or omp_in_parallel():
        return 1
    if n <= 0:
        n = threads_set if threads_set > 0 else cpus_usable if hosted else min(omp_get_max_threads(), cpus_usable)
    return <int>max(1, min(n, n_items, max(MOST_THREADS, 4 * cpus_usable)))


cdef struct item_loop:
    gdn_item_fn fn
    const void *job
    int64_t n_items, n_workers
    bint flush
    bint claim                    # workers claim one item after another; else each has a fixed share
    int64_t claimed               # next unclaimed item
    char *scratch
    size_t scratch_per_worker
    bint timed                    # share 0 says how long it took for how many items
    int64_t time, done


cdef void run_share(void *loop, int32_t me) noexcept nogil:
    """One worker's items."""
    cdef item_loop *r = <item_loop *>loop
    cdef int64_t share = r.n_items // r.n_workers, rest = r.n_items % r.n_workers, done = 0
    cdef int64_t start = gdn_now() if r.timed and me == 0 else 0
    cdef int64_t item = gdn_claim(&r.claimed) if r.claim else me * share + min(me, rest)
    cdef int64_t stop = r.n_items if r.claim else item + share + (me < rest)
    cdef void *scratch = r.scratch + me * r.scratch_per_worker
    cdef uint64_t mode = gdn_flush_begin() if r.flush else 0
    while item < stop:
        r.fn(r.job, item, scratch)
        item = gdn_claim(&r.claimed) if r.claim else item + 1
        done += 1
    if r.flush:
        gdn_flush_end(mode)
    if r.timed and me == 0:
        r.time, r.done = gdn_now() - start, done


cdef void run_items(gdn_item_fn fn, const void *job, int64_t n_items, int n_workers, int32_t asked, bint flush,
                    bint claim=False, char *scratch=NULL, size_t scratch_per_worker=0) noexcept nogil:
    """Run every item once.  Serial calls do not enter an OpenMP region, so that they work anywhere.  Where the number of
    threads was not asked for, fewer may run than were planned: threads are left out while they do not pay."""
    cdef item_loop r
    cdef int64_t start
    cdef bint by_default = asked <= 0 and threads_set == 0
    r.fn, r.job, r.n_items, r.flush, r.claim, r.claimed = fn, job, n_items, flush, claim, 0
    r.scratch, r.scratch_per_worker, r.timed, r.done = scratch, scratch_per_worker, False, 0
    if n_workers > 1 and by_default and not gdn_threads_pay():
        n_workers = 1
    if n_workers > 1 and GDN_LOAD(gdn_host_for) == NULL:
        n_workers = gdn_startable(n_workers, cpus_usable)
    r.n_workers = max(1, n_workers)
    if n_workers <= 1:
        run_share(&r, 0)
        return
    r.timed = by_default
    start = gdn_now() if r.timed else 0
    gdn_parallel(run_share, &r, n_workers)
    if r.timed:
        gdn_account(start, r.time, r.done, n_items)


# ---- from Python -----------------------------------------------------------------------------------------------

def set_num_threads(n):
    """Largest number of threads of calls without ``n_threads``; None goes back to the default: what OpenMP would use
    (OMP_NUM_THREADS, threadpoolctl) within the CPUs this process may run on.  ValueError below 1, TypeError for no integer."""
    global threads_set
    threads_set = 0 if n is None else threads_argument(n)


def get_num_threads():
    """Largest number of threads a call without ``n_threads`` uses."""
    return choose_threads(0, 2**31 - 1)


cdef int32_t threads_argument(n_threads) except -1:
    """n_threads of a call; None is 0, the default."""
    if n_threads is None:
        return 0
    if type(n_threads) is int and 1 <= n_threads <= 65536:         # what nearly every call gives, without a call of Python
        return n_threads
    return <int32_t>min(integer(n_threads, "n_threads", 1), 65536)


def within_quota(int n_cpus, str root, str membership):
    """n_cpus within the CPU quota that the files of a cgroup file system at `root` and a membership file give."""
    cdef bytes c_root = os.fsencode(root), c_membership = os.fsencode(membership)
    return gdn_within_quota(n_cpus, c_root, c_membership)
