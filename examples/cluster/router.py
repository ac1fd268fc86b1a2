"""Sends prompts to the actors that read and the actors that write, and what they write to whoever asked.

A request's state is in three places at most: the actor that writes it, the last state that this saved in Ray's object
store, and the text itself, from which any actor can compute it anew.  An actor that dies takes only the first along.
"""

import asyncio
import hashlib
import itertools
import time
from dataclasses import dataclass, replace

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from server.engine import Settings
from server.requests import Refused

from cluster.workers import Decode, Prefill

PREFIX = 64                      # bytes of a prompt that say which actor reads it
TRIES = 30                       # actors that may die under one text


@dataclass(frozen=True)
class ClusterSettings:
    n_prefill: int = 1
    n_decode: int = 2
    ship_from: int = 256         # tokens: shorter prompts are read where they are continued (docs/SERVING.md)
    max_queue: int = 256         # requests at once, waiting ones included
    save_every: int = 64         # tokens that an actor's death costs at most
    retry: float = 0.5           # seconds until an actor that died is tried again
    engine: Settings = Settings(n_active=16, prefix_bytes=0)
    prefix_bytes: int = 64 << 20         # of an actor that reads prompts


class Worker:
    """An actor and what the router knows of it.  Ray starts it again whenever it dies."""

    def __init__(self, kind, settings, room):
        # One try for every call: what to do when it fails is the router's business.
        self.actor = ray.remote(kind).options(max_restarts=-1, max_task_retries=0, max_concurrency=1000 if kind is Decode else 1,
                                              num_cpus=1).remote(settings)
        self.name, self.room, self.n, self.down_until = None, asyncio.Semaphore(room), 0, 0.0

    async def __aenter__(self):
        await self.room.acquire()
        self.n += 1

    async def __aexit__(self, *_):
        self.n -= 1
        self.room.release()

    @property
    def up(self):
        return time.monotonic() >= self.down_until


class Ticket:
    """A request on its way; what server.engine.Job is to the server."""

    def __init__(self, request, deliver):
        self.request, self.deliver, self.task = request, deliver, None
        self.n_output, self.n_cached = 0, 0


class Router:
    """submit, cancel and stop as server.engine.Engine has them, to be called on the asyncio loop."""

    def __init__(self, settings, metrics):
        self.settings, self.metrics, self.ids, self.live = settings, metrics, itertools.count(), set()
        reading = replace(settings.engine, prefix_bytes=settings.prefix_bytes)
        writing = replace(settings.engine, save_every=settings.save_every)
        self.prefill = [Worker(Prefill, reading, 4) for _ in range(settings.n_prefill)]
        self.decode = [Worker(Decode, writing, settings.engine.n_active) for _ in range(settings.n_decode)]
        for i, worker in enumerate(self.prefill + self.decode):
            worker.name = str(i)
        self.n_resumed = self.n_shipped = self.n_recomputed = 0

    async def ready(self):
        """Wait until every actor answers."""
        await asyncio.gather(*(worker.actor.pid.remote() for worker in self.prefill + self.decode))

    def submit(self, request, deliver):
        """Start a request: deliver(event) gets what server.sequences.Job says; Refused (429) when there are too many."""
        if len(self.live) >= self.settings.max_queue:
            raise Refused(429, "queue_full", f"{len(self.live)} requests are waiting already", headers={"Retry-After": "1"})
        ticket = Ticket(request, deliver)
        ticket.task = asyncio.get_running_loop().create_task(self._run(ticket))
        self.live.add(ticket)
        return ticket

    def cancel(self, ticket):
        ticket.task.cancel()

    is_alive = True

    @property
    def n_running(self):
        return sum(worker.n for worker in self.decode)

    def gauges(self):
        """What /metrics tells of it: (name, text, function)."""
        return [
            ("slots", "texts that can be written at once", lambda: len(self.decode) * self.settings.engine.n_active),
            ("slots_busy", "texts being written", lambda: sum(w.n for w in self.decode)),
            ("slots_reading", "prompts being read", lambda: sum(w.n for w in self.prefill)),
            ("queue", "requests waiting or running", lambda: len(self.live)),
            ("prompts_shipped", "prompts whose state went over", lambda: self.n_shipped),
            ("resumed", "texts that went on in another actor", lambda: self.n_resumed),
            ("recomputed", "of them, from the text, as the saved state was lost", lambda: self.n_recomputed),
        ]

    async def stop(self):
        for ticket in list(self.live):
            ticket.task.cancel()
        await asyncio.gather(*(ticket.task for ticket in self.live), return_exceptions=True)
        for worker in self.prefill + self.decode:
            ray.kill(worker.actor)

    # ---- a request -------------------------------------------------------------------------------------------------

    async def _run(self, ticket):
        request, choices, outcome = ticket.request, [], "failed"
        try:
            state = await self._read(ticket)
            choices = [asyncio.ensure_future(self._write(ticket, i, state)) for i in range(request.n)]
            await asyncio.wait_for(asyncio.gather(*choices), self.settings.engine.timeout)
            outcome = "done"
            ticket.deliver(None)
        except asyncio.TimeoutError:
            ticket.deliver(Refused(503, "timeout", f"not done after {self.settings.engine.timeout:g} s"))
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Exception as error:
            ticket.deliver(error)
        finally:
            for task in choices:
                task.cancel()
            self.live.discard(ticket)
            self.metrics.requests.labels(outcome).inc()

    def _choose(self, workers, key):
        """The worker that a key belongs to, among those that are up: the others keep theirs when one dies."""
        up = [w for w in workers if w.up] or workers
        return max(up, key=lambda w: hashlib.blake2b(key + w.name.encode(), digest_size=8).digest())

    async def _read(self, ticket):
        """A reference to the state of a prompt but for its last token, None where it is cheaper to compute it there."""
        prompt = ticket.request.prompt
        if len(prompt) < self.settings.ship_from or not self.prefill:
            return None
        for _ in range(TRIES):
            worker = self._choose(self.prefill, prompt[:PREFIX])
            async with worker:
                n_cached, state = worker.actor.read.options(num_returns=2).remote(prompt)
                try:
                    ticket.n_cached = await n_cached
                    self.n_shipped += 1
                    return state                                 # stays where it is; only the reference comes here
                except RayActorError:
                    await self._down(worker)
        return None

    async def _down(self, worker):
        worker.down_until = time.monotonic() + self.settings.retry
        await asyncio.sleep(0.05)

    async def _write(self, ticket, index, state):
        """One choice: from actor to actor until it is whole."""
        progress = Progress(state)
        key = f"{next(self.ids)}".encode()
        for _ in range(TRIES):
            worker = self._choose(self.decode, key)
            async with worker:
                try:
                    if await self._stream(ticket, index, worker, progress):
                        return
                    self.n_resumed += 1
                except RayActorError:
                    if progress.over:
                        return
                    self.n_resumed += 1
                except RayTaskError as error:
                    raise error.cause from None
                except RayError:                                 # the saved state is gone with its machine: from the text
                    progress.state = None
                    self.n_recomputed += 1
            await self._down(worker)
        raise Refused(503, "no_worker", f"{TRIES} actors died under this text")

    async def _stream(self, ticket, index, worker, progress):
        """Pass on what one actor writes; False if it died, which shows as an error or as a stream without an end."""
        request, write_id = replace(ticket.request, n=1), next(self.ids)
        # The actor waits when four pieces have not been taken; what it writes meanwhile comes in one.
        stream = worker.actor.write.options(num_returns="streaming", _generator_backpressure_num_objects=4).remote(
            write_id, request, index, bytes(progress.text), progress.state)
        state = None                     # counts once the piece after it has come: until then it may be an error
        try:
            async for piece in stream:
                out, reason, saved = await piece
                progress.state, state = state or progress.state, None
                progress.text += out
                ticket.n_output += len(out)
                self.metrics.output_tokens.inc(len(out))
                progress.over = reason is not None
                if out or reason:
                    ticket.deliver((index, out, reason))
                if saved:
                    state = await anext(stream, None)
            return progress.over
        except asyncio.CancelledError:
            worker.actor.cancel.remote(write_id)
            ray.cancel(stream)
            raise


class Progress:
    """What is known of a text outside the actor that writes it."""

    def __init__(self, state):
        self.text, self.state, self.over = bytearray(), state, False
