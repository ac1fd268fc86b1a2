"""A prefix cache: prompts that begin alike are read once, and the states at chosen positions are kept in a ring.

A softmax model keeps a key and a value for every token, so any prefix of what it has read can be resumed.  A recurrent
state is of one position only: it must be kept where it will be wanted.  Here that is every `every` tokens of a prompt, and
one token before its end, from where a prompt that is cached as a whole gives its logits again.  One call reads the
prompt and writes all of these states (`forks`).

    python examples/prefix_cache.py
"""

import itertools
import time

import numpy as np
from server.model import Model
from server.prefixes import Prefixes

import gdn


class PrefixCache:
    """Prompts (bytes) in, sequences out: `read` gives a sequence that has read a prompt, and the logits after it.

    limit     bytes that kept states may take; the least recently used go first
    every     tokens from one kept state of a prompt to the next
    n_active  sequences that are with callers at the same time; `ring.release(seq_id)` ends one
    """

    def __init__(self, model, limit, every=64, n_active=1):
        extents = {"n_layers": len(model.layers), **model.layers[0].extents}
        slot = gdn.StateRing.nbytes_for(4096, **extents) / 4096
        if limit < slot:
            raise ValueError(f"a state takes {slot:.0f} bytes, the limit is {limit}")
        n_kept = int(limit // slot)
        self.ring = gdn.StateRing.create(n_kept + n_active, **extents, tag=model.layers[0].tag)
        self.kept = Prefixes(n_kept, self.ring.release)
        self.model, self.every, self.ids = model, every, itertools.count()

    def read(self, prompt):
        """(seq_id, logits) of a new sequence that has read the prompt, at least a byte."""
        known, source = self.kept.find(prompt[:-1])            # the last token is read in any case: its logits are asked for
        seq_id = next(self.ids)
        if source is None:
            self.ring.acquire(seq_id)
        else:
            self.ring.copy(source, seq_id, depth=False)
        rest = np.frombuffer(prompt, np.uint8)[known:]
        forks = [(seq_id, n - known, next(self.ids)) for n in self.wanted(len(prompt)) if n > known]
        self.kept.make_room(len(forks))
        batch = gdn.Batch([seq_id] * len(rest))
        with self.ring.begin(batch, forks=forks) as step:
            logits = self.model(rest, batch, step, [-1])[0]
        for _, n, new_id in forks:
            self.kept.keep(prompt[:known + n], new_id)
        return seq_id, logits

    def wanted(self, n):
        """Where a prompt of n tokens is kept: no more states than there is room for, the longest first."""
        return sorted({*range(self.every, n, self.every), n - 1} - {0})[-self.kept.most:]


def main():
    gdn.set_num_threads(1)
    model = Model()
    text = (b"HAMLET.\nTo be, or not to be, that is the question:\n" * 200)[:8001]
    for n in (400, 2000, 8000):
        cache, times = PrefixCache(model, limit=64 << 20, every=256), []
        for prompt in (text[:n], text[:n], text[:n - 8] + b"HORATIO."):
            start = time.perf_counter()
            seq_id, _ = cache.read(prompt)
            times.append(1e3 * (time.perf_counter() - start))
            cache.ring.release(seq_id)
        print(f"{n} tokens: {times[0]:.1f} ms read, {times[1]:.1f} ms again, {times[2]:.1f} ms with another end "
              f"({times[0] / times[1]:.0f} and {times[0] / times[2]:.0f} times as fast)")


if __name__ == "__main__":
    main()
