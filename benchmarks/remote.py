"""A call that runs in a process of its own, for comparisons that need another level (GDN_LEVEL is read at import).

    Remote("v3", "prefill", "qwen3-next-80b", 2048)      calls benchmarks.ours.prefill(SHAPES[...], 2048) there

The process checks the level's answer first.  It times itself: only the number of calls and the seconds cross the pipe.
"""

import json
import os
import subprocess
import sys

from benchmarks import ours, pairs
from benchmarks.check import check_call
from benchmarks.shapes import SHAPES


class Remote:
    def __init__(self, level, maker, shape, *args):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.remote", json.dumps([maker, shape, *args])], text=True,
            env={**os.environ, "GDN_LEVEL": level}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def sample(self, n):
        self.process.stdin.write(f"{n}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the measuring process ended with code {self.process.wait()}")
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
    check_call(SHAPES[shape], args[0] if maker.startswith("prefill") else 1)
    for line in sys.stdin:
        print(pairs.sample(call, int(line)), flush=True)


if __name__ == "__main__":
    main()
