"""python -m cluster.measure: what a state weighs and what it costs to save, ship, load and compute it on this machine."""

import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import asyncio
import time
from statistics import median

import numpy as np
import ray
from server.model import Model

import gdn
from cluster.__main__ import start

# Of Qwen3-Next-80B-A3B: 36 layers of Gated DeltaNet.
LARGE = {"n_layers": 36, "H_v": 32, "S_k": 128, "S_v": 128, "conv_channels": 8192, "conv_width": 4}


class Holder:
    """An actor with a ring."""

    def __init__(self, extents):
        self.ring = gdn.StateRing.create(2, **extents)
        self.ring.acquire(1)

    def save(self):
        return np.frombuffer(self.ring.save(1), np.uint8)

    def load(self, data):
        if 2 in self.ring.seq_ids:
            self.ring.release(2)
        self.ring.load(2, data)


def seconds(run, n=15):
    times = []
    for _ in range(n):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return median(times)


class Talker:
    async def nothing(self):
        pass

    async def pieces(self, n):
        for _ in range(n):
            yield b"piece", None, False


async def calls(n=300):
    """Seconds of a call that does nothing, and of a piece of a stream."""
    actor = ray.remote(Talker).options(num_cpus=1).remote()
    await actor.nothing.remote()
    began = time.perf_counter()
    for _ in range(n):
        await actor.nothing.remote()
    middle = time.perf_counter()
    async for piece in actor.pieces.options(num_returns="streaming").remote(n):
        await piece
    end = time.perf_counter()
    ray.kill(actor)
    return (middle - began) / n, (end - middle) / n


def states(extents, n):
    """Bytes of a saved state, seconds to save, to load, and from actor to actor."""
    here = Holder(extents)
    data = here.save()
    from_, to = (ray.remote(Holder).options(num_cpus=1).remote(extents) for _ in range(2))
    ray.get(to.load.remote(from_.save.remote()))
    result = (len(data), seconds(here.save, n), seconds(lambda: here.load(data), n),
              seconds(lambda: ray.get(to.load.remote(from_.save.remote())), n))
    for actor in (from_, to):
        ray.kill(actor)
    return result


def prefill(model, n_tokens):
    """Seconds to read a prompt of n_tokens."""
    ring = gdn.StateRing.create(1, n_layers=len(model.layers), **model.layers[0].extents)
    ring.acquire(1)
    tokens = np.arange(n_tokens) % 90 + 32

    def run():
        ring.reset(1)
        for at in range(0, n_tokens, 128):
            piece = tokens[at:at + 128]
            batch = gdn.Batch([1] * len(piece))
            with ring.begin(batch) as step:
                model(piece, batch, step, [len(piece) - 1])

    return seconds(run, 9)


def main():
    start(2, log_to_driver=False)
    model = Model()
    small = {"n_layers": len(model.layers), **model.layers[0].extents}
    for name, extents, n in (("shakespeare", small, 30), ("Qwen3-Next's layers", LARGE, 7)):
        nbytes, save, load, ship = states(extents, n)
        print(f"{name}: a state is {nbytes / 1e6:.2f} MB; save {1e3 * save:.2f} ms, {nbytes / save / 1e9:.1f} GB/s; "
              f"load {1e3 * load:.2f} ms, {nbytes / load / 1e9:.1f} GB/s; actor to actor {1e3 * ship:.1f} ms")
    call, piece = asyncio.run(calls())
    print(f"Ray: a call takes {1e3 * call:.2f} ms, a piece of a stream {1e3 * piece:.2f} ms")
    for n in (16, 64, 128, 256, 512, 1024, 4096):
        print(f"shakespeare: a prompt of {n} tokens takes {1e3 * prefill(model, n):.2f} ms")
    ray.shutdown()


if __name__ == "__main__":
    main()
