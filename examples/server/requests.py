"""What a client asks for, read strictly: a field that is not understood is refused by its name."""

import json
from dataclasses import dataclass

MODEL = "shakespeare"


@dataclass(frozen=True)
class Limits:
    prompt: int = 16384          # bytes
    max_tokens: int = 4096
    n: int = 8
    stops: int = 4
    stop_bytes: int = 64
    body: int = 131072           # bytes of a request


class Refused(Exception):
    """A request that gets an error: HTTP status, a code to program against, the parameter, a sentence."""

    def __init__(self, status, code, message, param=None, headers=None):
        super().__init__(message)
        self.status, self.code, self.message, self.param, self.headers = status, code, message, param, headers

    def __reduce__(self):
        return Refused, (self.status, self.code, self.message, self.param, self.headers)

    def json(self):
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Request:
    prompt: bytes
    max_tokens: int = 16
    temperature: float = 1.0
    seed: int = 0
    stop: tuple = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False


def read(body, limits, new_seed):
    """A Request from the bytes of a body; new_seed() where it names none.  Refused says what is wrong."""
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise Refused(400, "invalid_json", f"the body is no JSON: {error}") from None
    except RecursionError:
        raise Refused(400, "invalid_json", "the body is nested too deeply") from None
    if not isinstance(fields, dict):
        raise Refused(400, "invalid_json", "the body must be a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None}
    known = {"model", "prompt", "max_tokens", "temperature", "seed", "stop", "n", "stream", "stream_options"}
    for name in fields:
        if name not in known:
            raise Refused(400, "unsupported_parameter", f"unsupported parameter {name[:64]!r}; this server knows "
                          f"{', '.join(sorted(known))}", name[:64])
    if fields.get("model", MODEL) != MODEL:
        raise Refused(404, "model_not_found", f"there is one model here, {MODEL!r}", "model")
    stream = typed(fields, "stream", bool, False)
    return Request(_prompt(fields, limits), number(fields, "max_tokens", 16, 1, limits.max_tokens),
                   number(fields, "temperature", 1.0, 0, 2, (int, float)),
                   number(fields, "seed", None, 0, 2**63 - 1) if "seed" in fields else new_seed(),
                   _stops(fields, limits), number(fields, "n", 1, 1, limits.n), stream, _include_usage(fields, stream))


def invalid(name, message):
    return Refused(400, "invalid_value", f"{name}: {message}", name)


def typed(fields, name, kind, default):
    value = fields.get(name, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Refused(400, "invalid_type", f"{name} has the wrong type, {type(value).__name__}", name)
    return value


def number(fields, name, default, least, most, kind=int):
    value = typed(fields, name, kind, default)
    if not least <= value <= most:                                  # not so for NaN either
        raise invalid(name, f"must be from {least} to {most}")
    return value


def encoded(name, text):
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise invalid(name, "holds half of a surrogate pair, which is no text") from None


def _prompt(fields, limits):
    if "prompt" not in fields:
        raise Refused(400, "missing_parameter", "prompt is missing", "prompt")
    prompt = encoded("prompt", typed(fields, "prompt", str, None))
    if not 1 <= len(prompt) <= limits.prompt:
        raise invalid("prompt", f"must have from 1 to {limits.prompt} bytes, has {len(prompt)}")
    return prompt


def _stops(fields, limits):
    stop = typed(fields, "stop", (str, list), [])
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > limits.stops:
        raise invalid("stop", f"at most {limits.stops} strings")
    for s in stops:
        if not isinstance(s, str) or not 1 <= len(encoded("stop", s)) <= limits.stop_bytes:
            raise invalid("stop", f"must be strings of 1 to {limits.stop_bytes} bytes")
    return tuple(s.encode() for s in stops)


def _include_usage(fields, stream):
    options = typed(fields, "stream_options", dict, {})
    if options and not stream:
        raise invalid("stream_options", "only with stream")
    if set(options) - {"include_usage"}:
        raise invalid("stream_options", "include_usage is all there is")
    return typed(options, "include_usage", bool, False)
