"""python -m server.load: how the server does under 1, 4, 16 and 64 streams, and whether every text is what it should be.

    python -m server.load                  starts a server of its own, on a free port
    python -m server.load --port 8080      asks one that runs

Every stream's text is compared with the same request's text when it is alone on the server.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

HOST = "127.0.0.1"
PLAYS = ["HAMLET", "OTHELLO", "ROMEO", "JULIET", "MACBETH", "PORTIA", "KING RICHARD", "FALSTAFF"]
SPEECH = ("Now is the winter of our discontent\nMade glorious summer by this sun of York;\nAnd all the clouds that lour'd "
          "upon our house\nIn the deep bosom of the ocean buried.\n")


@dataclass
class Stream:
    """One answer: when it was asked, when each event came, what it said."""
    began: float
    times: list = field(default_factory=list)
    text: str = ""
    usage: dict = None

    @property
    def first(self):
        return self.times[0] - self.began

    @property
    def gaps(self):
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


async def complete(port, **fields):
    """One streamed completion."""
    body = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **fields}).encode()
    stream = Stream(time.perf_counter())
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: %s\r\nConnection: close\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n" % (HOST.encode(), len(body)) + body)
    try:
        status = (await reader.readline()).split()[1]
        while (await reader.readline()).strip():
            pass
        if status != b"200":
            raise RuntimeError((await reader.read()).decode())
        rest = b""
        while size := int(await reader.readline(), 16):         # chunks: a size, as many bytes, an empty line
            *events, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n\n")
            for event in events:
                _read(stream, event)
    finally:
        writer.close()
    if stream.usage is None:
        raise RuntimeError(f"the stream ended early after {stream.text[-80:]!r}")
    return stream


def _read(stream, event):
    if event == b"data: [DONE]":
        return
    fields = json.loads(event[6:])
    if "error" in fields:
        raise RuntimeError(fields["error"]["message"])
    if "usage" in fields:
        stream.usage = fields["usage"]
        return
    stream.times.append(time.perf_counter())
    stream.text += fields["choices"][0]["text"]


async def metrics(port):
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"GET /metrics HTTP/1.0\r\nHost: %s\r\n\r\n" % HOST.encode())
    text = (await reader.read()).decode()
    writer.close()
    return {name: float(value) for name, value in re.findall(r"^gdn_(\w+) (\S+)$", text, re.MULTILINE)}


async def together(port, requests):
    before, began = await metrics(port), time.perf_counter()
    streams = await asyncio.wait_for(asyncio.gather(*(complete(port, **r) for r in requests)), 300)
    seconds, after = time.perf_counter() - began, await metrics(port)
    return streams, seconds, {name: after[name] - before[name] for name in after}


def percentile(values, p):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(p * len(ordered)))] if ordered else float("nan")


async def scaling(port, counts, n_tokens, temperature, rounds=5):
    """The table: throughput and times for each number of streams, in rounds of one after the other."""
    print(f"\ntemperature {temperature:g}, {n_tokens} tokens a stream\n"
          f"{'streams':>8} {'tokens/s':>9} {'first token':>12} {'p50 gap':>9} {'p99 gap':>9} {'drafts':>13} "
          f"{'prefix hits':>12} {'same text':>10} {'close':>6}")
    requests = [{"prompt": f"{PLAYS[i % len(PLAYS)]}.\n{i}", "max_tokens": n_tokens, "temperature": temperature, "seed": i}
                for i in range(max(counts))]
    alone = [await complete(port, **r) for r in requests]
    rounds = [{n: await together(port, requests[:n]) for n in counts} for _ in range(rounds)]
    rates = {n: [sum(s.usage["completion_tokens"] for s in one[n][0]) / one[n][1] for one in rounds] for n in counts}
    for n in counts:
        results = [one[n] for one in rounds]
        streams = [s for result in results for s in result[0]]
        total = lambda name: sum(result[2][name] for result in results)      # noqa: B023
        gaps = [gap for s in streams for gap in s.gaps]
        same = sum(s.text == alone[i % n].text for i, s in enumerate(streams))
        print(f"{n:>8} {median(rates[n]):>9.0f} {1e3 * median(s.first for s in streams):>9.1f} ms "
              f"{1e3 * percentile(gaps, .5):>6.2f} ms {1e3 * percentile(gaps, .99):>6.1f} ms "
              f"{total('accepted_tokens_total'):>6.0f}/{total('drafted_tokens_total'):<6.0f} "
              f"{total('prefix_hits_total'):>9.0f}/{len(streams):<3} {same:>6}/{len(streams):<4} "
              f"{total('close_choices_total'):>5.0f}")
        if same < len(streams):
            raise SystemExit(f"{len(streams) - same} texts differ from those written alone (sampling.py says when they may)")
    first, *more = counts
    ratio = {n: median(many / one for many, one in zip(rates[n], rates[first], strict=True)) for n in more}
    print(f"against {first}, median of rounds: " + ", ".join(f"{n} streams {ratio[n]:.1f} times" for n in more))


async def prefix(port, rounds=9, n=400):
    """Time to first token of prompts of n bytes: never seen before, and seen."""
    cold, warm = [], []
    for i in range(rounds):
        prompt = (f"{time.time_ns()} {i}. " + SPEECH * 9)[:n]
        for times in (cold, warm):
            times.append((await complete(port, prompt=prompt, max_tokens=4, temperature=0)).first)
    print(f"\nprompt of {n} tokens, time to first token: {1e3 * median(cold):.1f} ms new, {1e3 * median(warm):.1f} ms kept, "
          f"{median(cold) / median(warm):.1f} times shorter")
    return median(cold) / median(warm)


def main():
    parser = argparse.ArgumentParser(prog="python -m server.load", description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, help="of a server that runs; without it one is started, and one without drafts")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    args = parser.parse_args()
    if args.port:
        asyncio.run(everything(args.port, args))
        return
    print("a server with drafts")
    with_drafts = served(args, [])
    print("\na server without drafts")
    without = served(args, ["--n-draft", "0", "--prefix-bytes", "0"], only_repetitive=True)
    print(f"\nrepetitive text, 1 stream: {with_drafts:.0f} tokens/s with drafts, {without:.0f} without: "
          f"{with_drafts / without:.2f} times")


async def everything(port, args, only_repetitive=False):
    await complete(port, prompt="warm up", max_tokens=50)
    if not only_repetitive:
        for temperature in (0, 0.7):
            await scaling(port, args.streams, args.tokens, temperature)
        await prefix(port)
    return await repetitive(port)


async def repetitive(port, rounds=5, n_tokens=400):
    """Tokens per second of a text that repeats itself (greedy, after a speech said three times)."""
    rates = []
    for _ in range(rounds):
        stream = await complete(port, prompt=SPEECH * 3, max_tokens=n_tokens, temperature=0)
        rates.append((len(stream.text) - 1) / (stream.times[-1] - stream.times[0]))
    return median(rates)


def served(args, options, **more):
    """Run everything against a server of our own, which ends by SIGTERM."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    server = subprocess.Popen([sys.executable, "-m", "server", "--port", "0", *options], stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": path})
    try:
        for line in server.stderr:
            if found := re.search(r"running on http://[^:]+:(\d+)", line):
                threading.Thread(target=server.stderr.read, daemon=True).start()       # what it says must go somewhere
                return asyncio.run(everything(int(found[1]), args, **more))
        raise SystemExit("the server did not start")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


if __name__ == "__main__":
    main()
