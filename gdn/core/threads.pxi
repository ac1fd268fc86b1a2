# Thread counts as Python sees them.

cdef int usable_cpus() except -1:
    """What affinity and the cgroup's CPU quota leave this process, at least 1."""
    try:
        n = len(os.sched_getaffinity(0))
    except AttributeError:                        # not on every system
        n = os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, min(n, quota)) if quota else n


def cgroup_quota(root="/sys/fs/cgroup", membership="/proc/self/cgroup"):
    """CPUs of the tightest quota on the process's cgroup or one around it (v2, then v1), rounded up; None without one.

    Inside a container the group is the root of what is mounted; a service manager's groups lie below it."""
    groups = {}
    try:
        with open(membership) as file:
            groups = {controller: path for _, controllers, path in (line.rstrip("\n").split(":", 2) for line in file)
                      for controller in controllers.split(",")}
    except (OSError, ValueError):
        pass
    for controller, files in (("", ("cpu.max",)), ("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"))):
        names = [name for name in groups.get(controller, "").split("/") if name and name != ".."]
        quotas = [quota for n in range(len(names) + 1)
                  if (quota := directory_quota(os.path.join(root, controller, *names[:n]), files))]
        if quotas:
            return min(quotas)
    return None


def directory_quota(directory, files):
    """CPUs of one cgroup's quota and period, the words of its files; None without one."""
    words = []
    try:
        for name in files:
            with open(os.path.join(directory, name)) as file:
                words += file.read().split()
        quota, period = int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):              # absent, or "max"
        return None
    return -(-quota // period) if quota > 0 and period > 0 else None        # v1's "none" is -1


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
