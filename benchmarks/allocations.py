"""Does a decode call allocate?  Counted, not guessed: the C allocator is wrapped by a preloaded library.

tracemalloc would see numpy's arrays and mallinfo what was kept, but neither a native buffer taken and given back within
the call; the wrapper sees every malloc, calloc, realloc, aligned allocation and mmap.
"""

import ctypes
import json
import os
import subprocess
import sys
import tracemalloc

from benchmarks.native import built

CALLS = 50


def of_decode():
    """(allocator calls per decode call, details), measured in a process with the wrapper preloaded."""
    with built("count_malloc.c", "-fno-builtin") as library:
        run = subprocess.run([sys.executable, "-m", "benchmarks.allocations"], check=True, text=True,
                             capture_output=True, env={**os.environ, "LD_PRELOAD": str(library)})
    calls, details = json.loads(run.stdout)
    return calls, details


def main():
    from benchmarks import ours
    from benchmarks.shapes import KIMI, QWEN
    process = ctypes.CDLL(None)
    counter = ctypes.c_ulong.in_dll(process, "gdn_malloc_calls")
    largest = ctypes.c_ulong.in_dll(process, "gdn_malloc_largest")
    results, sizes, python = {}, {}, {}
    for shape in (QWEN, KIMI):
        for n_threads in (1, 2):
            call = ours.decode(shape, ours.layer_states(shape, n_layers=1), n_threads=n_threads)
            name = f"{shape.name} x{n_threads}"
            call.check()
            call()
            before, largest.value = counter.value, 0
            for _ in range(CALLS):
                call()
            results[name], sizes[name] = (counter.value - before) / CALLS, largest.value
            tracemalloc.start()
            call()
            tracemalloc.reset_peak()
            start = tracemalloc.get_traced_memory()[0]
            call()
            python[name] = tracemalloc.get_traced_memory()[1] - start
            tracemalloc.stop()
    print(json.dumps([max(results.values()), {"largest_bytes": max(sizes.values()),
                                              "python_object_bytes": max(python.values())}]))


if __name__ == "__main__":
    main()
