"""The example server as its clients see it: answers, streams, refusals, clients that vanish, an end that waits."""

import concurrent.futures
import json
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers import optional
from server_tools import EXAMPLES, Server, events, post, read_all, reset, split

for module in ("gguf", "prometheus_client", "starlette", "uvicorn"):
    optional(module)

EXPECTED = np.load(EXAMPLES / "shakespeare" / "expected.npz")
PROMPT, GREEDY = EXPECTED["prompt1"].tobytes().decode(), EXPECTED["greedy1"].tobytes().decode()


@pytest.fixture(scope="module")
def server():
    server = Server("--n-active", "16", "--max-queue", "8")
    yield server
    assert server.stop() == 0 and "Traceback" not in "".join(server.log)


def idle(metrics):
    return metrics["slots_busy"] == metrics["queue"] == 0


def test_completion(server):
    answer = server.complete(PROMPT, 100)
    assert answer["object"] == "text_completion" and answer["model"] == "shakespeare"
    assert answer["choices"] == [{"index": 0, "text": GREEDY[:100], "finish_reason": "length", "logprobs": None}]
    assert {k: answer["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 40, "completion_tokens": 100, "total_tokens": 140}


def test_stream(server):
    status, headers, body = server.post({"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "stream": True,
                                         "stream_options": {"include_usage": True}})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    *pieces, usage = events(body)
    assert "".join(p["choices"][0]["text"] for p in pieces) == GREEDY[:100]
    assert [p["choices"][0]["finish_reason"] for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 100


def test_streams_together_are_the_texts_alone(server):
    wanted = [{"prompt": f"KING.\n{i}", "max_tokens": 60, "temperature": 0.8, "seed": i, "n": 2} for i in range(12)]
    alone = [[c["text"] for c in server.complete(**fields)["choices"]] for fields in wanted]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda fields: events(server.post({**fields, "stream": True})[2]), wanted))
    for texts, pieces in zip(alone, together, strict=True):
        choices = [c for p in pieces for c in p["choices"]]
        assert texts == ["".join(c["text"] for c in choices if c["index"] == i) for i in (0, 1)]


def test_seeds(server):
    texts = [server.complete(PROMPT, 40, temperature=1, **seed)["choices"][0]["text"]
             for seed in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {}, {})]
    assert texts[0] == texts[1] and len(set(texts)) == 4


def test_bytes_that_are_no_text_come_as_replacements(server):
    text = server.complete("\xff", 200, temperature=2, seed=3)["choices"][0]["text"]
    pieces = events(server.post({"prompt": "\xff", "max_tokens": 200, "temperature": 2, "seed": 3, "stream": True})[2])
    assert text == "".join(p["choices"][0]["text"] for p in pieces)


@pytest.mark.parametrize(("request_", "status", "code"), [
    (post({"prompt": "A", "top_k": 3}), 400, "unsupported_parameter"),
    (post(b'{"prompt": "A"'), 400, "invalid_json"),
    (post({"prompt": "A", "model": "x"}), 404, "model_not_found"),
    (post(b"x" * 200000), 413, "body_too_large"),
    (post({"prompt": "A"}, Content_Type="text/plain"), 415, "unsupported_media_type"),
    (post({"prompt": "A"}, Content_Type=None), 415, "unsupported_media_type"),
    (b"GET /v1/completions HTTP/1.0\r\nHost: localhost\r\n\r\n", 405, "method_not_allowed"),
    (b"GET /v1/models HTTP/1.0\r\nHost: localhost\r\n\r\n", 404, "not_found"),
], ids=lambda x: repr(x)[:30])
def test_bad_input_is_refused_by_name(server, request_, status, code):
    before = server.metrics()
    found, _, body = server.ask(request_)
    error = json.loads(body)["error"]
    assert (found, error["code"]) == (status, code) and error["message"] and error["type"] == "invalid_request_error"
    after = server.metrics()
    key = f'refused_total{{code="{code}"}}'
    assert after[key] == before.get(key, 0) + 1 and idle(after)


def test_other_hosts_are_refused(server):
    assert server.ask(b"GET / HTTP/1.0\r\nHost: elsewhere.example\r\n\r\n")[0] == 400


def test_a_full_queue_says_when_to_come_again(server):
    wanted = post({"prompt": "A", "max_tokens": 3000, "temperature": 1, "n": 8, "stream": True})
    connections = []
    try:
        for n, condition in ((2, lambda m: m["slots_busy"] == 16), (8, lambda m: m["queue"] == 8)):
            connections += [server.send(wanted) for _ in range(n)]
            server.wait_for(condition)
        status, headers, body = server.post({"prompt": "A"})
        assert status == 429 and json.loads(body)["error"]["code"] == "queue_full" and int(headers["retry-after"]) >= 1
    finally:
        for connection in connections:
            reset(connection)
    server.wait_for(idle)
    assert server.complete(PROMPT)["choices"][0]["text"] == GREEDY[:20]


def test_health_and_metrics(server):
    assert json.loads(server.get("/health")[2])["status"] == "ok"
    server.complete(PROMPT * 5)
    found = server.metrics()
    assert found["slots"] == 16 and found["output_tokens_total"] >= 20 and found["prompt_tokens_total"] > 0
    assert found["step_seconds_count"] > 0 and found["prefixes"] > 0 and found['requests_total{outcome="done"}'] > 0


def test_a_thousand_clients_that_vanish(server):
    """In the middle of a body, before the first token, in the middle of a stream, of a waiting answer: no slot is left."""
    chance = random.Random(1)
    before = server.metrics()

    def vanish(i):
        wanted = post({"prompt": f"{i} HAMLET.\n" * chance.randint(1, 20), "max_tokens": 4000, "temperature": 1, "seed": i,
                       "stream": i % 4 > 0, "n": 1 + i % 3})
        connection = server.send(wanted[:-5] if i % 10 == 0 else wanted)
        if i % 10 > 2:
            connection.settimeout(chance.choice([0.001, 0.01, 0.05]))
            try:
                connection.recv(chance.choice([1, 100, 3000]))
            except TimeoutError:
                pass
        reset(connection)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(vanish, range(1000)))
    after = server.wait_for(idle)
    ended = lambda m: sum(m.get(f'requests_total{{outcome="{outcome}"}}', 0) for outcome in ("done", "cancelled"))
    assert ended(after) - ended(before) + after.get('refused_total{code="queue_full"}', 0) > 700
    assert after["ring_free"] + after["prefixes"] == before["ring_free"] + before["prefixes"]
    assert server.complete(PROMPT, 100)["choices"][0]["text"] == GREEDY[:100]


def test_the_loop_answers_while_prompts_are_read(server):
    """Health checks come back within a few steps, however long the prompts are."""
    connections = [server.send(post({"prompt": f"{i}" + "x " * 2000, "max_tokens": 1})) for i in range(4)]
    times = []
    for _ in range(30):
        began = time.perf_counter()
        assert server.get("/health")[0] == 200
        times.append(time.perf_counter() - began)
    for connection in connections:
        with connection:
            assert split(read_all(connection))[0] == 200
    assert sorted(times)[15] < 0.2


def test_sigterm_lets_streams_end():
    server = Server("--n-active", "4")
    connection = server.send(post({"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stream": True}))
    answer = connection.recv(10)                        # it has begun
    waiting = server.send(post({"prompt": PROMPT, "max_tokens": 200, "temperature": 0}))
    time.sleep(0.05)
    ended = []
    stopper = threading.Thread(target=lambda: ended.append(server.stop()))
    stopper.start()
    with connection, waiting:
        text = "".join(p["choices"][0]["text"] for p in events(split(answer + read_all(connection))[2]))
        other = json.loads(split(read_all(waiting))[2])["choices"][0]["text"]
    stopper.join(40)
    assert text == other == GREEDY and ended == [0]
    with pytest.raises(OSError):
        server.connect().close()


def test_sigterm_does_not_wait_for_ever():
    server = Server("--drain", "1")
    with server.send(post({"prompt": PROMPT, "max_tokens": 4096, "n": 8, "temperature": 1, "stream": True})) as connection:
        connection.recv(10)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(20)
    assert time.monotonic() - began < 10
    server.stop()


def test_load_generator(server):
    """The load script against this server: a short run ends well and prints its table."""
    done = subprocess.run([sys.executable, str(EXAMPLES / "server" / "load.py"), "--port", str(server.port), "--tokens", "20",
                           "--streams", "1", "4"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "against 1, median of rounds: 4 streams" in done.stdout and "times shorter" in done.stdout
