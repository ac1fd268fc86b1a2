"""Paired timing: A and B take turns, and the median of the per-pair ratios is the result.

A shared machine's speed drifts by tens of per cent within seconds; two calls a few milliseconds apart see the same
machine, so their ratio holds where the times do not.
"""

import os
import statistics
import time
from dataclasses import dataclass

MIN_SAMPLE = 3e-3       # seconds that one sample runs at least: calls shorter than this are repeated inside it
BUDGET = 4.0            # seconds that one comparison takes, about


@dataclass
class Pairs:
    """Median seconds a call of A and of B, and the median of the ratios time A / time B."""

    a: float
    b: float
    ratio: float
    n: int


def repeats(call, least=MIN_SAMPLE):
    """How many calls make one sample; the calls made here warm up.  A call that can check its answer does so first."""
    getattr(call, "check", call)()
    n = 1
    while True:
        t = sample(call, n) * n
        if t >= least:
            return n
        n = max(n + 1, min(10 * n, int(1.2 * n * least / max(t, 1e-9)) + 1))


def sample(call, n):
    """Seconds a call, over n calls; a ``Remote`` times them in its own process."""
    if hasattr(call, "sample"):
        return call.sample(n)
    start = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - start) / n


def compare(a, b, budget=BUDGET, least_pairs=5, most_pairs=300, settle=False):
    """Time the callables a and b in turns, the order of a pair swapped every time.  settle: a turn's first call, which has to
    write back what the other left in the caches, is not timed."""
    def turn(call, n):
        if settle:
            sample(call, 1)
        return sample(call, n)

    n_a, n_b = repeats(a), repeats(b)
    times_a, times_b = [], []
    stop = time.perf_counter() + budget
    while len(times_a) < least_pairs or (time.perf_counter() < stop and len(times_a) < most_pairs):
        if len(times_a) % 2:
            t_b = turn(b, n_b)
            t_a = turn(a, n_a)
        else:
            t_a = turn(a, n_a)
            t_b = turn(b, n_b)
        times_a.append(t_a)
        times_b.append(t_b)
    ratios = [x / y for x, y in zip(times_a, times_b, strict=True)]
    return Pairs(statistics.median(times_a), statistics.median(times_b), statistics.median(ratios), len(ratios))


def best_of(groups, a, b, budget=BUDGET):
    """The comparison with the smallest ratio out of ``groups`` shorter ones: for rows that need the whole machine."""
    def group():
        wait_for_quiet()
        return compare(a, b, budget / groups)
    return min((group() for _ in range(groups)), key=lambda p: p.ratio)


def wait_for_quiet(longest=15.0, busy=0.1):
    """Sleep until the processors are idle but for ``busy``, at most ``longest`` seconds (Linux; else do nothing)."""
    def ticks():
        with open("/proc/stat") as stat:
            user, nice, system, idle, *_ = map(int, stat.readline().split()[1:])
        return user + nice + system, idle

    stop = time.perf_counter() + longest
    while os.path.exists("/proc/stat") and time.perf_counter() < stop:
        used, idle = ticks()
        time.sleep(0.25)
        now_used, now_idle = ticks()
        if now_used - used <= busy * (now_used - used + now_idle - idle):
            return
