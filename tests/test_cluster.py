"""The example cluster: a local Ray of three actors, which are killed at random while texts are written.

Not part of the default run: `make test-cluster`.
"""

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import missing, optional

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

optional("gguf"), optional("prometheus_client")

from server.engine import Engine, Settings
from server.metrics import Metrics
from server.model import Model
from server.requests import Refused, Request

try:
    import ray
    from cluster.__main__ import start
    from cluster.router import ClusterSettings, Router
except ImportError as error:             # the file is collected where Ray is not asked for, too
    ABSENT = error
else:
    ABSENT = None

pytestmark = pytest.mark.cluster
SHIP_FROM = 40


@pytest.fixture(scope="module")
def local_ray():
    if ABSENT:
        missing(ABSENT)
    with pytest.MonkeyPatch.context() as patch:             # what the actors inherit
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH")))))
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        start(3, log_to_driver=False)
        yield
        ray.shutdown()


def texts_alone(requests):
    """What an engine in this process writes, {(request's number, choice): text}."""
    texts, over = {}, []

    def post(events):
        for job, event in events:
            if isinstance(event, tuple):
                key = numbers[job], event[0]
                texts[key] = texts.get(key, b"") + event[1]
            else:
                over.append(event)

    engine = Engine(Model(), Settings(n_active=8, prefix_bytes=0, max_queue=1000), Metrics(), post)
    numbers = {engine.submit(request, None): i for i, request in enumerate(requests)}
    engine.start()
    while len(over) < len(requests):
        time.sleep(0.01)
    engine.stop()
    assert over == [None] * len(requests)
    return texts


def some_requests(n, max_tokens, rng):
    heads = [b"HAMLET.\nTo be, or not to be, that is the question:\n" * 4, b"ROMEO.\n",
             b"Now is the winter of our discontent\n" * 3]
    return [Request(heads[i % 3] + b"%d" % i, max_tokens, [0, 0.7, 1.2][int(rng.integers(3))], i, n=1 + i % 2) for i in range(n)]


class Asked:
    """A request at the router, and what came."""

    def __init__(self, router, request):
        self.texts, self.over, self.error = {}, asyncio.Event(), None
        self.ticket = router.submit(request, self.deliver)

    def deliver(self, event):
        if isinstance(event, tuple):
            index, out, _ = event
            self.texts[index] = self.texts.get(index, b"") + out
        else:
            self.error = event
            self.over.set()


def with_router(run):
    engine = Settings(n_active=8, prefix_bytes=0, timeout=100)
    settings = ClusterSettings(engine=engine, ship_from=SHIP_FROM, max_queue=40, save_every=16)

    async def main():
        router = Router(settings, Metrics())
        await asyncio.wait_for(router.ready(), 60)
        try:
            return await asyncio.wait_for(run(router), 150)
        finally:
            await router.stop()

    return asyncio.run(main())


def check(asked, alone):
    for i, one in enumerate(asked):
        assert one.error is None, one.error
        for index, text in one.texts.items():
            assert text == alone[i, index], (i, index)
    assert sum(len(one.texts) for one in asked) == len(alone)


@pytest.mark.usefixtures("local_ray")
def test_texts_are_those_of_one_engine_and_prompts_go_where_they_are_known():
    requests = some_requests(12, 60, np.random.default_rng(0))

    async def run(router):
        first = [Asked(router, request) for request in requests]
        await asyncio.gather(*(one.over.wait() for one in first))
        again = [Asked(router, request) for request in requests]
        await asyncio.gather(*(one.over.wait() for one in again))
        return first, again, router.n_shipped, await router.prefill[0].actor.counts.remote()

    first, again, n_shipped, counts = with_router(run)
    alone = texts_alone(requests)
    check(first, alone)
    check(again, alone)
    shipped = [r for r in requests if len(r.prompt) >= SHIP_FROM]
    assert n_shipped == 2 * len(shipped)
    assert counts["kept_tokens"] >= sum(len(r.prompt) - 1 for r in shipped)         # the second time none is run
    assert [one.ticket.n_cached for one in again] == [len(r.prompt) - 1 if r in shipped else 0 for r in requests]


@pytest.mark.usefixtures("local_ray")
def test_actors_killed_at_random():
    """Every half second or so one of the three processes dies; every text is what it would have been."""
    requests, chance = some_requests(16, 300, np.random.default_rng(1)), random.Random(2)

    async def run(router):
        asked = [Asked(router, request) for request in requests]
        everyone, killed = router.prefill + router.decode, 0
        done = asyncio.gather(*(one.over.wait() for one in asked))
        while not done.done() and killed < 5:
            await asyncio.sleep(chance.uniform(0.3, 1.0))
            try:
                pid = await asyncio.wait_for(chance.choice(everyone).actor.pid.remote(), 10)
                os.kill(pid, signal.SIGKILL)
                killed += 1
            except (ray.exceptions.RayActorError, ProcessLookupError, asyncio.TimeoutError):
                pass                                    # it is dead already
        await done
        return asked, killed, router.n_resumed

    asked, killed, n_resumed = with_router(run)
    check(asked, texts_alone(requests))
    print(f"{killed} actors killed, {n_resumed} texts resumed")
    assert killed >= 3 and n_resumed >= 3


@pytest.mark.usefixtures("local_ray")
def test_cancelled_requests_free_their_slots_and_the_queue_is_bounded():
    async def run(router):
        asked = [Asked(router, Request(b"KING.\n%d" % i, 3000, 1.0, i)) for i in range(40)]
        with pytest.raises(Refused, match="waiting"):
            router.submit(Request(b"KING.\n"), None)
        while not all(any(one.texts.values()) for one in asked[:4]):
            await asyncio.sleep(0.05)
        for one in asked:
            router.cancel(one.ticket)
        for _ in range(200):
            busy = [await worker.actor.busy.remote() for worker in router.decode]
            if busy == [(0, 0), (0, 0)] and not router.live:
                break
            await asyncio.sleep(0.05)
        one = Asked(router, Request(b"ROMEO.\n", 20, 0))
        await one.over.wait()
        return busy, one

    busy, one = with_router(run)
    assert busy == [(0, 0), (0, 0)]
    check([one], texts_alone([Request(b"ROMEO.\n", 20, 0)]))
