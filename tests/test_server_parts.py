"""The example server without HTTP: requests, drafts, prefixes, sampling, and the engine's texts against the model alone."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import optional
from threadpoolctl import threadpool_limits

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

for module in ("gguf", "prometheus_client", "starlette"):
    optional(module)

from server import sampling
from server.drafts import DraftLength, draft
from server.engine import Engine, Settings
from server.metrics import Metrics
from server.model import Model
from server.prefixes import Prefixes
from server.requests import Limits, Refused, Request, read
from server.sequences import Job, Saved

import gdn

EXPECTED = np.load(EXAMPLES / "shakespeare" / "expected.npz")
SMALL = {"n_active": 6, "n_draft": 4, "draft_tokens": 12, "step_tokens": 60, "piece": 32, "prefix_bytes": 24 << 20}


@pytest.fixture(scope="module")
def model():
    with threadpool_limits(1):              # small matrices
        yield Model()


class Client:
    """Collects what an engine posts, until every job is over."""

    def __init__(self, model, **settings):
        self.engine = Engine(model, Settings(**{**SMALL, **settings}), Metrics(), self.post)
        self.texts, self.reasons, self.over, self.saved = {}, {}, {}, []

    def post(self, events):
        for job, event in events:
            if event is None or isinstance(event, Exception):
                self.over[job] = event
            elif isinstance(event, Saved):
                self.saved.append((job, event, self.texts[job, event.index]))
            else:
                index, out, reason = event
                self.texts[job, index] = self.texts.get((job, index), b"") + out
                self.reasons[job, index] = reason

    def submit(self, prompt, max_tokens=40, resumed=None, **fields):
        return self.engine.submit(Request(prompt, max_tokens, **{"temperature": 0, **fields}), None, **(resumed or {}))

    def turn(self):
        """One turn of the engine's loop, in this thread."""
        self.engine._drop()
        self.engine._admit()
        if self.engine.running:
            self.engine._step()
        self.engine._post()

    def run(self):
        for _ in range(5000):
            if not (self.engine.queue or self.engine.running):
                break
            self.turn()
        assert not self.engine.queue and not self.engine.running
        self.check_slots()

    def value(self, name):
        return self.engine.metrics.registry.get_sample_value(f"gdn_{name}")

    def check_slots(self):
        engine = self.engine
        held = len(engine.prefixes) + sum(s.seq_id is not None for s in engine.running)
        assert engine.ring.n_free == engine.ring.n_slots - held
        assert len(engine.prefixes) <= engine.states.n_kept


def alone(model, prompt, n, temperature=0, seed=0, index=0):
    """The text by single calls on a ring of one slot: the whole prompt, then token by token."""
    ring = gdn.StateRing.create(1, n_layers=len(model.layers), **model.layers[0].extents)
    ring.acquire(1)
    rng, text, new = np.random.default_rng((seed, index)), bytearray(), prompt
    for _ in range(n):
        batch = gdn.Batch([1] * len(new))
        with ring.begin(batch) as step:
            logits = model(np.frombuffer(new, np.uint8), batch, step, [len(new) - 1])
        token = (logits[0] + temperature * rng.gumbel(size=256)).argmax()
        text.append(token)
        new = bytes([token])
    return bytes(text)


# ---- the engine ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings", [{}, {"n_draft": 0}, {"prefix_bytes": 0}, {"piece": 7}], ids=str)
def test_greedy_texts_are_those_of_transformers(model, settings):
    client = Client(model, **settings)
    jobs = [client.submit(EXPECTED[f"prompt{i % 3}"].tobytes(), 200) for i in range(9)]
    client.run()
    for i, job in enumerate(jobs):
        assert client.texts[job, 0] == EXPECTED[f"greedy{i % 3}"].tobytes()
        assert client.over[job] is None and client.reasons[job, 0] == "length" and job.n_output == 200


def test_texts_are_those_written_alone(model, rng):
    """Requests that join at any time, share beginnings, are sampled with seeds, some of them cancelled on the way."""
    client, asked, cancelled = Client(model), [], set()
    heads = [b"HAMLET.\nTo be, or not to be, ", b"ROMEO.\n", b"Now is the winter of our discontent\nMade glorious summer " * 2]
    for i in range(40):
        prompt = heads[rng.integers(3)] + bytes(rng.choice(list(b"the sun of York "), rng.integers(0, 40)))
        fields = {"temperature": [0, 0.7, 1.3][i % 3], "seed": int(rng.integers(2**62))}
        asked.append((client.submit(prompt, int(rng.integers(1, 60)), **fields), prompt, fields))
        for _ in range(rng.integers(0, 6)):
            client.turn()
            client.check_slots()
        if i % 7 == 3:
            client.engine.cancel(asked[-1][0])
            cancelled.add(asked[-1][0])
    client.run()
    for job, prompt, fields in asked:
        expected = alone(model, prompt, job.request.max_tokens, **fields)
        if job in cancelled:
            assert expected.startswith(client.texts.get((job, 0), b"")) and job not in client.over
        else:
            assert client.texts[job, 0] == expected


def test_choices_have_seeds_of_their_own(model):
    client = Client(model)
    job = client.submit(b"MACBETH.\n", 30, temperature=0.8, seed=5, n=4)
    other = client.submit(b"MACBETH.\n", 30, temperature=0.8, seed=5)
    client.run()
    texts = [client.texts[job, i] for i in range(4)]
    assert texts == [alone(model, b"MACBETH.\n", 30, 0.8, 5, i) for i in range(4)]
    assert len(set(texts)) == 4 and client.texts[other, 0] == texts[0]
    assert client.value("output_tokens_total") == 150


def test_choices_begin_beside_drafts(model):
    """The step that reads the last token of a kept prompt may verify drafts: other choices have not seen them."""
    client, prompt = Client(model), b"Good night, good night, sweet prince! " * 4
    client.submit(prompt, 1)
    client.run()
    job, drafted = client.submit(prompt, 20, temperature=0.9, seed=2, n=3), client.value("drafted_tokens_total")
    client.turn()
    assert job.n_cached == len(prompt) - 1 and client.value("drafted_tokens_total") > drafted
    client.run()
    assert [client.texts[job, i] for i in range(3)] == [alone(model, prompt, 20, 0.9, 2, i) for i in range(3)]


def test_states_are_in_a_log_within_their_bytes(model):
    client = Client(model)
    ring, states = client.engine.ring, client.engine.states
    assert ring.form == "log" and ring.n_spare == SMALL["n_active"] and states.n_kept > 24
    without = Client(model, prefix_bytes=0).engine.ring.nbytes
    assert ring.nbytes - without <= SMALL["prefix_bytes"] < ring.nbytes - without + 2 * states.slot_nbytes


def test_choices_wait_for_slots_and_refuse_what_never_fits(model):
    client = Client(model)
    jobs = [client.submit(b"A" * 50, 5, temperature=1, n=4) for _ in range(5)]
    client.run()
    assert all(client.over[job] is None for job in jobs)
    with pytest.raises(Refused, match="6 slots"):
        client.submit(b"A", n=7)


def test_kept_prefixes_are_used(model):
    client = Client(model)
    prompt = b"All the world's a stage, and all the men and women merely players. " * 2
    first = client.submit(prompt)
    client.run()
    again, on, branch = client.submit(prompt), client.submit(prompt + client.texts[first, 0]), client.submit(prompt[:70])
    client.run()
    assert first.n_cached == 0 and again.n_cached == len(prompt) - 1 and on.n_cached == len(prompt) + 39
    assert branch.n_cached == 64                        # where a piece of 32 had ended
    assert client.texts[again, 0] == client.texts[first, 0]
    assert client.texts[branch, 0] == alone(model, prompt[:70], 40)


def test_drafts_save_steps(model):
    prompt, texts, steps = b"Good night, good night, sweet prince! " * 4, [], []
    for n_draft in (0, 4):
        client = Client(model, n_draft=n_draft)
        job = client.submit(prompt, 200)
        client.run()
        texts.append(client.texts[job, 0])
        steps.append(client.value("step_seconds_count"))
    assert texts[0] == texts[1] and steps[0] > 200 > 2 * steps[1]
    assert client.value("accepted_tokens_total") + steps[1] - 4 == 200     # four pieces of the prompt write nothing


def test_stop_strings(model):
    whole = alone(model, b"ROMEO.\n", 60)
    for stop in ((whole[20:24],), (b"\xff\xfe", whole[30:31]), (whole[10:40], whole[12:15])):
        client = Client(model)
        job = client.submit(b"ROMEO.\n", 60, stop=stop)
        client.run()
        end = min(i for i in map(whole.find, stop) if i >= 0) if len(stop[0]) < 10 else whole.find(stop[1])
        assert client.texts[job, 0] == whole[:end] and client.reasons[job, 0] == "stop"


def test_what_may_become_a_stop_string_is_held_back():
    s = Job(Request(b"aab", 20, stop=(b"aabaac",)), None, 1, 0).sequences[0]
    sent = []
    for byte in b"xaabaabaacz":
        over = s.add(byte)
        sent.append(s.unsent())
        if over:
            break
    assert b"".join(sent) == b"xaab" and sent[:4] == [b"x", b"", b"", b""] and s.finish_reason == "stop"


def test_texts_go_on_in_another_engine(model):
    """From every saved state, with some or more of the text that followed it, and from the text alone."""
    fields = {"temperature": 0.9, "seed": 3}
    first, prompt = Client(model, save_every=7), b"OTHELLO.\n" * 6
    jobs = [first.submit(prompt, 60, **fields, n=2), first.submit(prompt, 60, temperature=0, stop=(b"the", b"q" * 20))]
    first.run()
    assert len(first.saved) >= 16
    for job, saved, written in first.saved:
        whole = first.texts[job, saved.index]
        for state, known in ((saved.data, written), (saved.data, whole[:len(written) + 3]), (None, written)):
            if len(known) >= len(whole):
                continue
            second = Client(model, n_draft=2)
            again = second.submit(prompt, 60, {"index": saved.index, "written": known, "state": state},
                                  temperature=job.request.temperature, seed=job.request.seed, stop=job.request.stop)
            second.run()
            assert known + second.texts[again, saved.index] == whole
            assert second.reasons[again, saved.index] == first.reasons[job, saved.index]
    assert jobs


def test_a_state_that_is_none_is_refused(model):
    client = Client(model, save_every=5)
    client.submit(b"OTHELLO.\n", 30)
    client.run()
    late = client.saved[-1][1].data
    jobs = [client.submit(b"OTHELLO.\n", 30, {"state": data}) for data in (b"", late[:-9], b"x" + late[1:], late)]
    good = client.submit(b"OTHELLO.\n", 30)
    client.run()
    assert all(isinstance(client.over[job], ValueError) for job in jobs) and client.over[good] is None


def test_a_step_that_fails_fails_its_requests_only(model):
    class Breaks:
        layers = model.layers
        on = True

        def __call__(self, *args):
            if self.on:
                raise RuntimeError("out of order")
            return model(*args)

    client = Client(Breaks())
    client.engine.start()
    try:
        client.engine.model.on = True
        job = client.submit(b"ROMEO.\n")
        wait_for(lambda: job in client.over)
        assert isinstance(client.over[job], RuntimeError)
        client.engine.model.on = False
        job = client.submit(b"ROMEO.\n")
        wait_for(lambda: job in client.over)
        assert client.texts[job, 0] == alone(model, b"ROMEO.\n", 40)
    finally:
        client.engine.stop()
    client.check_slots()


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_queue_is_bounded_and_late_requests_end(model):
    client = Client(model, max_queue=3, timeout=0.0)
    jobs = [client.submit(b"A") for _ in range(3)]
    with pytest.raises(Refused) as error:
        client.submit(b"A")
    assert error.value.status == 429 and int(error.value.headers["Retry-After"]) >= 1
    client.run()
    assert [client.over[job].code for job in jobs] == ["timeout"] * 3


# ---- its parts -------------------------------------------------------------------------------------------------------

def test_prefixes_against_a_dictionary(rng):
    released, kept = [], {}
    prefixes = Prefixes(12, released.append)
    for seq_id in range(3000):
        text = bytes(rng.choice(list(b"ab"), rng.integers(1, 9)))
        n, found = prefixes.find(text)
        best = max((t for t in kept if text.startswith(t)), key=len, default=b"")
        assert (n, found) == (len(best), kept.get(best))
        if best:
            kept[best] = kept.pop(best)                 # the most recently used is last
        released.clear()
        prefixes.keep(text, seq_id)
        if text in kept:
            kept[text] = kept.pop(text)
            assert released == [seq_id]
        else:
            kept[text] = seq_id
            gone = [kept.pop(next(iter(kept)))] if len(kept) > 12 else []
            assert released == gone
    assert count(prefixes.root) <= 2 * 12               # nodes that hold nothing are gone
    prefixes.make_room(12)
    assert len(prefixes) == 0 and not prefixes.root.children


def count(node):
    return sum(1 + count(child) for child in node.children.values())


def test_drafts():
    assert draft(b"to be or not to be", 4) == b" or "
    assert draft(b"abcdef", 4) == draft(b"", 4) == draft(b"a", 4) == b""
    assert draft(b"aaaaaaaa", 3) == b"a"                # what followed the newest earlier place
    length = DraftLength(8)
    for _ in range(3):
        length.record(length.next(), length.length)
    assert length.next() == 8
    for _ in range(6):
        length.record(length.next() or 1, 0)
    assert [length.next() for _ in range(5)].count(0) >= 2
    assert DraftLength(0).next() == 0


def test_choose_draws_from_softmax():
    logits, noise = np.array([[0.0, 1.0, 2.0]], np.float32), sampling.Noise(1, 0, 3)
    tokens = [sampling.choose(logits, 0.5 * noise(i, 1))[0][0] for i in range(6000)]
    weights = np.exp(logits[0] / 0.5)
    assert np.abs(np.bincount(tokens, minlength=3) / 6000 - weights / weights.sum()).max() < 0.03
    tokens, close = sampling.choose(np.array([[1, 3, 3], [0, 1, 5]], np.float32), np.zeros((2, 3)))
    assert tokens.tolist() == [1, 2] and close.tolist() == [True, False]


def test_noise_belongs_to_the_position():
    whole = np.random.default_rng((3, 1)).gumbel(size=(80, 5))
    for steps in ((1,) * 40, (5, 1, 7, 20, 2), (60,)):
        noise, at = sampling.Noise(3, 1, 5), 0
        for n in steps:
            np.testing.assert_array_equal(noise(at, n + 2), whole[at:at + n + 2])        # two of them taken back
            at += n


def body(**fields):
    return json.dumps({"prompt": "A", **fields}).encode()


@pytest.mark.parametrize(("data", "code", "param"), [
    (b"{", "invalid_json", None), (b"[1]", "invalid_json", None), (b"", "invalid_json", None), (b"\xff", "invalid_json", None),
    (b"[" * 100000, "invalid_json", None),
    (b"{}", "missing_parameter", "prompt"), (body(prompt=""), "invalid_value", "prompt"),
    (body(prompt=["A"]), "invalid_type", "prompt"), (body(prompt="a" * 20000), "invalid_value", "prompt"),
    (rb'{"prompt": "\ud800"}', "invalid_value", "prompt"),
    (body(max_tokens=0), "invalid_value", "max_tokens"), (body(max_tokens=1e3), "invalid_type", "max_tokens"),
    (body(max_tokens=True), "invalid_type", "max_tokens"), (body(max_tokens=10**9), "invalid_value", "max_tokens"),
    (body(temperature=-0.1), "invalid_value", "temperature"), (body(temperature="hot"), "invalid_type", "temperature"),
    (body(temperature=float("nan")), "invalid_value", "temperature"), (body(seed=-1), "invalid_value", "seed"),
    (body(seed=2**64), "invalid_value", "seed"), (body(stop=[""]), "invalid_value", "stop"),
    (body(stop=["a"] * 5), "invalid_value", "stop"),
    (body(stop=3), "invalid_type", "stop"), (body(stop=[3]), "invalid_value", "stop"),
    (body(n=0), "invalid_value", "n"), (body(n=9), "invalid_value", "n"), (body(stream="yes"), "invalid_type", "stream"),
    (body(stream_options={"include_usage": True}), "invalid_value", "stream_options"),
    (body(stream=True, stream_options={"x": 1}), "invalid_value", "stream_options"),
    (body(top_p=0.5), "unsupported_parameter", "top_p"), (body(max_token=5), "unsupported_parameter", "max_token"),
    (body(model="gpt"), "model_not_found", "model"),
], ids=lambda x: repr(x)[:40])
def test_bad_requests_are_refused_by_name(data, code, param):
    with pytest.raises(Refused) as error:
        read(data, Limits(), lambda: 1)
    assert (error.value.code, error.value.param) == (code, param) and 400 <= error.value.status < 500


def test_good_requests():
    assert read(body(), Limits(), lambda: 7) == Request(b"A", seed=7)
    assert read(body(model="shakespeare", max_tokens=5, temperature=0, seed=1, stop="x", n=2, stream=True, top_p=None,
                     stream_options={"include_usage": True}), Limits(), None) == Request(b"A", 5, 0, 1, (b"x",), 2, True, True)
