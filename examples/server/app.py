"""The HTTP face: OpenAI-style completions, /health, /metrics and a page."""

import asyncio
import codecs
import contextlib
import json
import secrets
import time
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from server import requests
from server.engine import Engine
from server.inbox import GONE, Inbox
from server.metrics import Metrics
from server.requests import MODEL, Limits, Refused

BODY_SECONDS = 10.0               # for a body to arrive
PACE = 0.0005                     # seconds of the loop that an event may cost: with n texts, one has an event every n PACE


class Completion:
    """One request: its job, its texts so far, and whether the client is still there."""

    def __init__(self, engine, metrics, wanted, receive):
        self.engine, self.metrics, self.wanted, self.inbox = engine, metrics, wanted, Inbox()
        self.id, self.created, self.began = f"cmpl-{secrets.token_hex(12)}", int(time.time()), time.perf_counter()
        self.job = engine.submit(wanted, self.inbox.put)
        self.decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(wanted.n)]
        self.watcher = asyncio.create_task(self._watch(receive))
        self.done = False

    async def _watch(self, receive):
        while (await receive())["type"] != "http.disconnect":
            pass
        self.inbox.put(GONE)

    def close(self):
        self.watcher.cancel()
        if not self.done:
            self.engine.cancel(self.job)

    async def pieces(self):
        """Lists of (index, text, finish_reason), what is ready together in one; ends early if the client leaves."""
        while not self.done:
            raw, reasons = {}, {}
            for event in await self.inbox.get():
                if event is GONE:
                    return
                if isinstance(event, Exception):
                    self.done = True
                    raise event
                if event is None:
                    self.done = True
                else:
                    index, out, reason = event
                    raw[index], reasons[index] = raw.get(index, b"") + out, reason
            if raw and self.began is not None:
                self.metrics.first_token_seconds.observe(time.perf_counter() - self.began)
                self.began = None
            if raw:
                sent = time.perf_counter()
                yield [(i, self.decoders[i].decode(out, final=reasons[i] is not None), reasons[i]) for i, out in raw.items()]
                if not self.done and self.engine.n_running > 1:
                    await asyncio.sleep(max(0, sent + PACE * self.engine.n_running - time.perf_counter()))

    def usage(self):
        n_prompt, n_output = len(self.wanted.prompt), self.job.n_output
        return {"prompt_tokens": n_prompt, "completion_tokens": n_output, "total_tokens": n_prompt + n_output,
                "prompt_tokens_details": {"cached_tokens": self.job.n_cached}}

    def json(self, choices, **more):
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": MODEL, "choices": choices,
                **more}

    async def whole(self):
        texts, reasons = [""] * self.wanted.n, [None] * self.wanted.n
        async for pieces in self.pieces():
            for index, text, reason in pieces:
                texts[index] += text
                reasons[index] = reason
        return JSONResponse(self.json([choice(*x) for x in zip(range(self.wanted.n), texts, reasons, strict=True)],
                                      usage=self.usage()))

    async def events(self):
        """The stream's bytes: server-sent events, an error as the last of them."""
        # As event(self.json([choice(...)])) would write it, three times as fast.
        head = (event(self.json([])).replace(b"%", b"%%").replace(b"[]", b'[{"index": %d, "text": %s, "finish_reason": %s, '
                                                                         b'"logprobs": null}]'))
        try:
            async for pieces in self.pieces():
                yield b"".join(head % (i, json.dumps(text).encode(), json.dumps(reason).encode()) for i, text, reason in pieces)
            if self.wanted.include_usage and self.done:
                yield event(self.json([], usage=self.usage()))
        except Refused as error:
            yield event(error.json())
        except Exception as error:
            yield event(failure(error).json())
        yield b"data: [DONE]\n\n"


def choice(index, text, reason):
    return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}


def event(fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def failure(error):
    return Refused(500, "internal_error", f"the step failed: {type(error).__name__}")


class Stream(Response):
    """Sends what `completion` yields; Starlette's own would not see a client that leaves while nothing is sent."""

    def __init__(self, completion, timeout):
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self.completion, self.timeout = completion, timeout

    async def __call__(self, scope, receive, send):
        try:
            await asyncio.wait_for(self._send(send), self.timeout)          # a client that does not read is left
        finally:
            self.completion.close()

    async def _send(self, send):
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self.completion.events():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def read_body(request, limit):
    """The body's bytes, Refused if it is too large, late, or of another type."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "unsupported_media_type", "Content-Type must be application/json")
    body, total = bytearray(), 0
    async for chunk in request.stream():
        total += len(chunk)
        if total <= limit:
            body += chunk
        elif total > 64 * limit:            # less is read to its end: a close before it would reset the answer away
            break
    if total > limit:
        raise Refused(413, "body_too_large", f"the body has more than {limit} bytes", headers={"Connection": "close"})
    return bytes(body)


@contextlib.asynccontextmanager
async def local_engine(model, settings, metrics):
    """An engine in a thread of this process, whose events come to the loop."""
    loop = asyncio.get_running_loop()

    def dispatch(events):
        for job, event in events:
            job.deliver(event)

    engine = Engine(model, settings, metrics, lambda events: loop.call_soon_threadsafe(dispatch, events))
    engine.start()
    yield engine
    await asyncio.to_thread(engine.stop)


def create_app(open_engine, timeout, limits=Limits(), hosts=("127.0.0.1", "localhost")):  # noqa: B008
    """open_engine(metrics): a context that gives an engine; timeout: seconds that it gives a request."""
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(app):
        async with open_engine(metrics) as engine:
            metrics.watch(engine.gauges())
            app.state.engine = engine
            yield

    async def completions(request):
        try:
            body = await asyncio.wait_for(read_body(request, limits.body), BODY_SECONDS)
        except ClientDisconnect:
            return Response(status_code=400)                    # which nobody reads
        except asyncio.TimeoutError:
            raise Refused(408, "body_timeout", f"no whole body within {BODY_SECONDS:g} s",
                          headers={"Connection": "close"}) from None
        wanted = requests.read(body, limits, lambda: secrets.randbits(63))
        completion = Completion(app.state.engine, metrics, wanted, request.receive)
        if wanted.stream:
            return Stream(completion, timeout + 10)
        try:
            return await completion.whole()
        finally:
            completion.close()

    async def health(request):
        alive = app.state.engine.is_alive
        return JSONResponse({"status": "ok" if alive else "engine stopped", "model": MODEL}, 200 if alive else 503)

    async def show_metrics(request):
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def page(request):
        return FileResponse(Path(__file__).with_name("page.html"))

    async def refuse(request, error):
        metrics.refused.labels(error.code).inc()
        return JSONResponse(error.json(), error.status, error.headers)

    async def http_error(request, error):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        return await refuse(request, Refused(error.status_code, code, error.detail, headers=error.headers))

    async def internal_error(request, error):
        return await refuse(request, failure(error))

    routes = [Route("/", page), Route("/health", health), Route("/metrics", show_metrics),
              Route("/v1/completions", completions, methods=["POST"])]
    app = Starlette(routes=routes, lifespan=lifespan,
                    exception_handlers={Refused: refuse, HTTPException: http_error, Exception: internal_error})
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    return app
