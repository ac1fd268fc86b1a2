"""Continuous batching: one thread owns the ring and runs a packed step after the other.

Between two steps requests join, leave and are cancelled.  A step holds, for every text that is being written, its newest
token and the drafts that may follow it; and, within a budget, a piece of every prompt that is not read yet.
"""

import collections
import math
import threading
import time
import traceback
from dataclasses import dataclass

import numpy as np

import gdn
from server import sampling
from server.prefixes import Prefixes
from server.requests import Refused
from server.sequences import Job, Saved
from server.states import States


@dataclass(frozen=True)
class Settings:
    n_active: int = 64               # texts written at once
    n_draft: int = 8                 # drafts a text and step at most; 0 turns them off
    draft_tokens: int = 16           # drafts of a step at most: few texts may draft far, many hardly
    step_tokens: int = 240           # tokens of a step at most; a prompt takes what decodes and drafts leave
    piece: int = 128                 # tokens of one prompt a step at most; states are kept where pieces end
    max_queue: int = 256             # requests that wait for a slot at most
    prefix_bytes: int = 256 << 20    # of ring for the states of prefixes; 0 turns them off
    timeout: float = 120.0           # seconds of a request, waiting included
    save_every: int = 0              # tokens after which a text's state is posted, for another engine; 0 never


class Engine:
    """post(events) is called in the engine's thread, once a step, with [(job, event), ...]."""

    def __init__(self, model, settings, metrics, post):
        if settings.step_tokens < settings.n_active + settings.draft_tokens + settings.piece:
            raise ValueError(f"step_tokens = {settings.step_tokens} must hold n_active + draft_tokens + piece")
        self.model, self.settings, self.metrics, self.post = model, settings, metrics, post
        self.states = States(model.layers, settings.n_active, settings.prefix_bytes, settings.n_draft)
        self.ring = self.states.ring
        self.prefixes = Prefixes(self.states.n_kept, self.ring.release)
        self.queue = collections.deque()       # Jobs that wait; the lock's
        self.running = []                      # Sequences with a slot; the engine thread's
        self.events = []                       # what this step has to post
        self.wake = threading.Condition()
        self.stopping = False
        self.seconds = 0.1                     # a finished request's, on average
        self.thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    # ---- called from other threads ---------------------------------------------------------------------------------

    def start(self):
        self.thread.start()

    def submit(self, request, deliver, **resumed):
        """Queue a request, whose Job it returns; Refused (429) when the queue is full.  resumed: see Job."""
        if request.n > self.settings.n_active:
            raise Refused(400, "invalid_value", f"n: there are {self.settings.n_active} slots", "n")
        job = Job(request, deliver, self.settings.timeout, self.settings.n_draft, **resumed)
        with self.wake:
            if self.stopping:
                raise Refused(503, "shutting_down", "the server is shutting down")
            if len(self.queue) >= self.settings.max_queue:
                wait = math.ceil(self.seconds * len(self.queue) / self.settings.n_active)
                raise Refused(429, "queue_full", f"{len(self.queue)} requests are waiting already",
                              headers={"Retry-After": str(max(1, min(60, wait)))})
            self.queue.append(job)
            self.wake.notify()
        return job

    def cancel(self, job):
        """Its slots are free before the next step."""
        with self.wake:
            job.cancelled = True
            self.wake.notify()

    def gauges(self):
        """What /metrics tells of an engine: (name, text, function)."""
        return [
            ("slots", "texts that can be written at once", lambda: self.states.n_active),
            ("slots_busy", "texts being written", lambda: len(self.running)),
            ("slots_reading", "of them, those whose prompt is being read",
             lambda: sum(s.n_waiting > 1 for s in list(self.running))),
            ("queue", "requests waiting", lambda: len(self.queue)),
            ("ring_free", "free slots of the ring, kept prefixes not counted", lambda: self.ring.n_free),
            ("prefixes", "states of prefixes kept", lambda: len(self.prefixes)),
            ("prefix_bytes", "of ring that they take", lambda: len(self.prefixes) * self.states.slot_nbytes),
        ]

    @property
    def n_running(self):
        return len(self.running)

    @property
    def is_alive(self):
        return self.thread.is_alive()

    def stop(self, timeout=10.0):
        """End what runs and the thread."""
        with self.wake:
            self.stopping = True
            self.wake.notify()
        self.thread.join(timeout)

    # ---- the engine's thread ---------------------------------------------------------------------------------------

    def _loop(self):
        while self._wait():
            try:
                self._drop()
                self._admit()
                if self.running:
                    self._step()
            except Exception as error:
                traceback.print_exc()
                self._fail(error)
            self._post()
        self._fail(Refused(503, "shutting_down", "the server is shutting down"))
        self._post()

    def _post(self):
        if self.events:
            self.post(self.events)
            self.events = []

    def _wait(self):
        """Until there is something to do; False to stop."""
        with self.wake:
            while not (self.stopping or self.running or self.queue):
                self.wake.wait()
            return not self.stopping

    def _drop(self):
        """Release the cancelled and the late."""
        now = time.monotonic()
        with self.wake:
            gone = [job for job in self.queue if job.cancelled or job.deadline < now]
            if gone:
                self.queue = collections.deque(job for job in self.queue if job not in gone)
        gone += {s.job: None for s in self.running if s.job.cancelled or s.job.deadline < now}
        for job in gone:
            self._end(job, "cancelled" if job.cancelled else "timeout")
            if not job.cancelled:
                self.events.append((job, Refused(503, "timeout", f"not done after {self.settings.timeout:g} s")))

    def _end(self, job, outcome):
        for s in job.sequences:
            if s.seq_id is not None:
                self.ring.release(s.seq_id)
                s.seq_id = None
        self.running = [s for s in self.running if s.job is not job]
        self.metrics.requests.labels(outcome).inc()

    def _fail(self, error):
        """Nothing of the step was committed, but whose fault it was is not known: every request gets the error."""
        with self.wake:
            jobs = {**dict.fromkeys(s.job for s in self.running), **dict.fromkeys(self.queue)}
            self.queue.clear()
        for job in jobs:
            self._end(job, "failed")
            self.events.append((job, error))

    def _admit(self):
        """Give waiting requests their slots, from the longest state there is of their prompt."""
        while self.queue:
            job = self.queue[0]
            if len(self.running) + job.request.n > self.settings.n_active - self._promised():
                return
            with self.wake:
                self.queue.popleft()
            try:
                self._place(job, job.sequences[0])
            except ValueError as error:
                self._end(job, "failed")
                self.events.append((job, error))

    def _place(self, job, first):
        if job.state is not None:
            first.seq_id, first.n_seen = self.states.load(job.state)
            job.state = None
            if first.n_waiting < 1:
                raise ValueError(f"the state has seen {first.n_seen} tokens, the text has {len(first.text)}")
        else:
            n, kept = self.prefixes.find(first.text[:-1])       # the last token must run: its logits are needed
            first.seq_id = self.states.acquire() if kept is None else self.states.copy(kept)
            first.n_seen = job.n_cached = n
            self.metrics.prefix_hits.inc(kept is not None)
            self.metrics.prefix_tokens.inc(n)
        self.running.append(first)

    def _promised(self):
        """Slots for the choices of running requests that begin when the prompt has been read."""
        return sum(s.request.n - 1 for s in self.running if s is s.job.sequences[0] and not s.n_output)

    def _plan(self):
        """[(sequence, tokens to run, drafts), ...] of the next step."""
        settings, plan = self.settings, []
        decoding = [s for s in self.running if s.n_waiting == 1]
        for s in decoding:
            plan.append((s, 1, s.draft(min(settings.n_draft, settings.draft_tokens // len(decoding)))))
        room = settings.step_tokens - sum(1 + len(drafts) for _, _, drafts in plan)
        for s in self.running:
            n = min(s.n_waiting, settings.piece, room)
            if s.n_waiting > 1 and n > 0:
                room -= n
                plan.append((s, n, b""))
        return plan

    def _step(self):
        began, plan = time.perf_counter(), self._plan()
        tokens, ids, rows, kept, born = bytearray(), [], [], [], []
        for s, n, drafts in plan:
            tokens += s.text[s.n_seen:s.n_seen + n] + drafts
            ids += [s.seq_id] * (n + len(drafts))
            if s.n_seen + n == len(s.text):
                last = len(tokens) - len(drafts) - 1
                rows += range(last, len(tokens))
                born += [(s, n, other, last) for other in s.siblings()]
            kept += self._worth_keeping(s, n)
        kept = kept[:self.states.n_kept]
        self.prefixes.make_room(len(kept))
        rows += [last for *_, last in born]
        logits, new_ids = self.states.run(self.model, np.frombuffer(tokens, np.uint8), gdn.Batch(ids), rows,
                                          [(s.seq_id, n) for s, n, *_ in kept + born])
        for (s, n), new_id in zip(kept, new_ids[:len(kept)], strict=True):
            self.prefixes.keep(s.text[:s.n_seen + n], new_id)
        for (s, n, other, _), new_id in zip(born, new_ids[len(kept):], strict=True):
            other.seq_id, other.n_seen = new_id, s.n_seen + n
            self.running.append(other)
            plan.append((other, 0, b""))
        self._advance(plan, logits)
        self.metrics.step_seconds.observe(time.perf_counter() - began)

    def _worth_keeping(self, s, n):
        """Where a piece of a prompt ends its state is kept; of a whole prompt, the one before the last token."""
        if n == 1 or not self.states.n_kept:
            return []
        n -= s.n_seen + n == s.n_prompt
        return [] if self.prefixes.has(s.text[:s.n_seen + n]) else [(s, n)]

    def _advance(self, plan, logits):
        """Choose tokens, take wrong drafts back, deliver."""
        tokens = self._choose(plan, logits)
        at, n_prompt, n_output = 0, 0, 0
        for s, n, drafts in plan:
            s.n_seen += n
            n_prompt += max(0, min(s.n_seen, s.n_prompt) - (s.n_seen - n))
            if s.n_waiting:
                continue
            chosen, at = tokens[at:at + len(drafts) + 1], at + len(drafts) + 1
            n_output -= len(s.text)
            accepted = self._accept(s, chosen, drafts)
            n_output += len(s.text)
            if drafts:
                s.drafting.record(len(drafts), accepted)
                self.metrics.drafted.inc(len(drafts))
                self.metrics.accepted.inc(accepted)
            self._deliver(s)
        self.metrics.prompt_tokens.inc(n_prompt)
        self.metrics.output_tokens.inc(n_output)

    def _choose(self, plan, logits):
        noise = [s.scaled_noise(len(drafts) + 1) for s, n, drafts in plan if s.n_seen + n == len(s.text)]
        if not noise:
            return []
        tokens, close = sampling.choose(logits, np.concatenate(noise))
        self.metrics.close_choices.inc(int(close.sum()))
        return tokens.tolist()

    def _accept(self, s, chosen, drafts):
        """Append what was chosen as long as the drafts were right; the number that was."""
        accepted = 0
        while not s.add(chosen[accepted]) and accepted < len(drafts) and chosen[accepted] == drafts[accepted]:
            accepted += 1
        if accepted < len(drafts):
            self.ring.rollback(s.seq_id, len(drafts) - accepted)
        s.n_seen += accepted
        return accepted

    def _deliver(self, s):
        out, job = s.unsent(), s.job
        if out or s.finish_reason:
            self.events.append((job, (s.index, out, s.finish_reason)))
        every = self.settings.save_every
        if every and not s.finish_reason and len(s.text) - s.n_saved >= every and s.n_sent == len(s.text):
            s.n_saved = len(s.text)
            self.events.append((job, Saved(s.index, self.states.save(s.seq_id))))
        if s.finish_reason:
            self.running.remove(s)
            self._keep(s)
            if all(other.finish_reason for other in job.sequences):
                self.seconds += 0.1 * (time.monotonic() - job.deadline + self.settings.timeout - self.seconds)
                self.metrics.requests.labels("done").inc()
                self.events.append((job, None))

    def _keep(self, s):
        """A finished text may be the beginning of the next prompt: its state stays, its slot changes sides."""
        if self.states.n_kept:
            self.prefixes.keep(s.text[:s.n_seen], s.seq_id)
        else:
            self.ring.release(s.seq_id)
        s.seq_id = None
