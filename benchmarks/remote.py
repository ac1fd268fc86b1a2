"""A call that runs in a process of its own, for comparisons that need another level (GDN_LEVEL is read at import).

    Remote("v3", "prefill", "qwen3-next-80b", 2048)      calls benchmarks.ours.prefill(SHAPES[...], 2048) there

The process checks the call's answer first.  It times itself: only the number of calls and the seconds cross the pipe.
"""

import json
import os
import subprocess
import sys
import time

from benchmarks import ours, pairs
from benchmarks.shapes import SHAPES

on_the_way = 0.0        # seconds that calls have taken to reach other processes and come back


def clock():
    """perf_counter without the time that calls were on their way."""
    return time.perf_counter() - on_the_way


class Remote:
    def __init__(self, level, maker, shape, *args):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.remote", json.dumps([maker, shape, *args])], text=True,
            env={**os.environ, "GDN_LEVEL": level}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def sample(self, n):
        global on_the_way
        start = time.perf_counter()
        try:
            self.process.stdin.write(f"{n}\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"the measuring process ended with code {self.process.wait()}")
        on_the_way += time.perf_counter() - start - n * float(answer)
        return float(answer)

    def __call__(self):
        self.sample(1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def main():
    maker, shape, *args = json.loads(sys.argv[1])
    call = getattr(ours, maker)(SHAPES[shape], *args)
    call.check()
    for line in sys.stdin:
        print(pairs.sample(call, int(line)), flush=True)


if __name__ == "__main__":
    main()
