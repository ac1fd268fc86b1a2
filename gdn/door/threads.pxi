# Thread counts as Python sees them.

cdef int usable_cpus() except -1:
    """What affinity and the cgroup's CPU quota leave this process, at least 1."""
    try:
        n = len(os.sched_getaffinity(0))
    except AttributeError:                        # not on every system
        n = os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, min(n, quota)) if quota else n


def cgroup_quota(root="/sys/fs/cgroup"):
    """CPUs of the cgroup's quota rounded up (v2, then v1), None without one."""
    for path, period_path in (("cpu.max", None), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            with open(os.path.join(root, path)) as file:
                words = file.read().split()
            if period_path:
                with open(os.path.join(root, period_path)) as file:
                    words += file.read().split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):          # absent, "max", or -1 below
            continue
        if quota > 0 and period > 0:
            return -(-quota // period)
    return None


def set_num_threads(n):
    """Largest number of threads of calls without ``n_threads``; None goes back to the default: what OpenMP would use
    (OMP_NUM_THREADS, threadpoolctl) within the CPUs this process may run on."""
    global threads_set
    threads_set = 0 if n is None else threads_argument(n)


def get_num_threads():
    """Largest number of threads a call without ``n_threads`` uses."""
    return choose_threads(0, 2**31 - 1)


cdef int32_t threads_argument(n_threads) except -1:
    """n_threads of a call; None is 0, the default."""
    return 0 if n_threads is None else <int32_t>min(count_argument(n_threads, "n_threads"), <int64_t>65536)
