"""What runs in the actors: one that reads prompts, one that writes texts.  Plain classes; router.py makes actors of them."""

import asyncio
import os

import numpy as np
from server.engine import Engine
from server.inbox import GONE, Inbox
from server.metrics import Metrics
from server.model import Model
from server.prefixes import Prefixes
from server.sequences import Saved
from server.states import States

import gdn


class Prefill:
    """Reads a prompt but for its last token; the state is what it hands over, as an array of ring.save's bytes."""

    def __init__(self, settings):
        self.model, self.piece = Model(), settings.piece
        self.states = States(self.model.layers, 1, settings.prefix_bytes, 0)
        self.prefixes = Prefixes(self.states.n_kept, self.states.ring.release)
        self.n_tokens = self.n_kept_tokens = 0

    def pid(self):
        return os.getpid()

    def counts(self):
        return {"tokens": self.n_tokens, "kept_tokens": self.n_kept_tokens, "prefixes": len(self.prefixes)}

    def read(self, prompt):
        """(tokens that a kept state had seen, the state)"""
        text = prompt[:-1]
        n, kept = self.prefixes.find(text)
        n_kept = n
        self.n_kept_tokens += n
        self.n_tokens += len(text) - n
        seq_id = self.states.acquire() if kept is None else self.states.copy(kept)
        try:
            while n < len(text):
                piece = text[n:n + self.piece]
                n += len(piece)
                kept = n < len(text) and self.prefixes.most > 0 and not self.prefixes.has(text[:n])
                self.prefixes.make_room(kept)
                _, new_ids = self.states.run(self.model, np.frombuffer(piece, np.uint8), gdn.Batch([seq_id] * len(piece)), [],
                                             [(seq_id, len(piece))] if kept else [])
                for new_id in new_ids:
                    self.prefixes.keep(text[:n], new_id)
            data = np.frombuffer(self.states.save(seq_id), np.uint8)
        except BaseException:
            self.states.ring.release(seq_id)
            raise
        if self.prefixes.most:
            self.prefixes.keep(text, seq_id)
        else:
            self.states.ring.release(seq_id)
        return n_kept, data


class Decode:
    """Writes texts with an engine of its own; says now and then where a sequence stands."""

    def __init__(self, settings):
        self.engine = Engine(Model(), settings, Metrics(), self._post)
        self.loop, self.writes = None, {}

    def _post(self, events):
        self.loop.call_soon_threadsafe(lambda: [job.deliver(event) for job, event in events])

    async def pid(self):
        return os.getpid()

    async def busy(self):
        """(texts that have a slot or wait for one, streams that are open)"""
        return len(self.engine.running) + len(self.engine.queue), len(self.writes)

    async def cancel(self, write_id):
        """Its slot is free before the next step, even if the stream waits for a reader."""
        if write_id in self.writes:
            inbox, job = self.writes[write_id]
            self.engine.cancel(job)
            inbox.put(GONE)

    async def write(self, write_id, request, index, written, state):
        """Choice `index` of a request, of which `written` is known and `state` (or None) has seen a part; in pieces:
        (bytes, finish_reason or None, whether the next piece is a saved state)."""
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            self.engine.start()
        inbox, over = Inbox(), False
        job = self.engine.submit(request, inbox.put, index=index, written=written, state=state)
        self.writes[write_id] = inbox, job
        try:
            while not over:
                out, reason, saved = b"", None, None
                for event in await inbox.get():
                    if event is GONE:
                        return
                    if isinstance(event, Exception):
                        over = True
                        raise event
                    if event is None:
                        over = True
                    elif isinstance(event, Saved):
                        saved = event
                    else:
                        out, reason = out + event[1], event[2]
                yield out, reason, saved is not None
                if saved is not None:
                    yield np.frombuffer(saved.data, np.uint8)
        finally:
            del self.writes[write_id]
            if not over:
                self.engine.cancel(job)
