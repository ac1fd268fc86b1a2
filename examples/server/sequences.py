"""One text that is being written: what is in it, what may be sent, when it is over."""

import time
from dataclasses import dataclass

import numpy as np

from server.drafts import DraftLength, draft
from server.model import END, N_VOCAB
from server.sampling import Noise


class Sequence:
    """Choice `index` of a request: prompt and output, of which the state in the ring has seen the first n_seen."""

    def __init__(self, job, index, n_draft, written=b""):
        request = job.request
        self.job, self.index, self.request = job, index, request
        self.text, self.n_prompt = bytearray(request.prompt + written), len(request.prompt)
        self.seq_id, self.n_seen, self.n_sent, self.n_saved = None, 0, len(self.text), len(self.text)
        self.end = self.n_prompt + request.max_tokens      # where the output is over at the latest
        self.noise = Noise(request.seed, index, N_VOCAB)
        self.drafting = DraftLength(n_draft)
        self.finish_reason = None

    @property
    def n_output(self):
        return len(self.text) - self.n_prompt

    @property
    def n_waiting(self):
        """Tokens that the state has not seen: the rest of the prompt, or the newest token."""
        return len(self.text) - self.n_seen

    def siblings(self):
        """The other choices of a request whose prompt has been read: they begin where its first one stands."""
        return [s for s in self.job.sequences if s.seq_id is None] if not self.n_output else []

    def draft(self, most):
        n = min(self.drafting.next(), most, self.end - len(self.text) - 1)
        return draft(self.text, n) if n > 0 else b""

    def scaled_noise(self, n):
        """What is added to the logits of the next n tokens."""
        if self.request.temperature == 0:
            return np.zeros((n, N_VOCAB))
        return self.request.temperature * self.noise(self.n_output, n)

    def add(self, token):
        """Append a chosen token; True when that ends the text."""
        if token == END:
            self._finish("stop", len(self.text))
        else:
            self.text.append(token)
            at = [self.text.find(stop, max(self.n_prompt, len(self.text) - len(stop))) for stop in self.request.stop]
            at = [i for i in at if i >= 0]
            if at:
                self._finish("stop", min(at))
            elif len(self.text) == self.end:
                self._finish("length", self.end)
        return self.finish_reason is not None

    def _finish(self, reason, end):
        self.finish_reason, self.end = reason, end

    def unsent(self):
        """Output that can be sent now: what may yet turn out to begin a stop string waits."""
        end = self.end if self.finish_reason else len(self.text) - self._maybe_stop()
        out = bytes(self.text[self.n_sent:end])
        self.n_sent = max(self.n_sent, end)
        return out

    def _maybe_stop(self):
        for n in range(max((len(stop) for stop in self.request.stop), default=1) - 1, 0, -1):
            if n <= self.n_output and any(stop.startswith(self.text[-n:]) for stop in self.request.stop):
                return n
        return 0


@dataclass(frozen=True)
class Saved:
    """An event: the state of a choice, all of whose output that it has seen came in events before."""
    index: int
    data: bytes


class Job:
    """A request on its way through the engine; deliver(event) is for whoever forwards what the engine posts.

    Events: (index, bytes, finish_reason or None) for a choice, then None when all are over; or an exception, the last.
    To go on with a text that another engine began, `written` is its output so far and `state` (or None) bytes of ring.save
    of a sequence that has seen a part of prompt and output, not all; that engine's `Saved` events have them.
    """

    def __init__(self, request, deliver, timeout, n_draft, index=0, written=b"", state=None):
        self.request, self.deliver = request, deliver
        self.deadline = time.monotonic() + timeout
        self.sequences = [Sequence(self, index + i, n_draft, written) for i in range(request.n)]
        self.state = state
        self.n_cached = 0                                   # tokens of the prompt that a kept state had seen
        self.cancelled = False

    @property
    def n_output(self):
        return sum(s.n_output for s in self.sequences)
