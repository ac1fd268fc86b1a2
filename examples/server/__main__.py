"""python -m server: the example model behind an OpenAI-style HTTP interface, on the loopback address."""

import argparse
import os
import signal
import sys

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")        # small matrices; read when numpy and gdn are imported

import uvicorn

from server.app import create_app, local_engine
from server.engine import Settings
from server.model import Model


def arguments():
    parser = argparse.ArgumentParser(prog="python -m server", description=__doc__)
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one")
    parser.add_argument("--drain", type=int, default=30, help="seconds that running requests get after SIGTERM")
    for name, default in vars(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


def main():
    args = arguments()
    settings = Settings(**{name: getattr(args, name) for name in vars(Settings())})
    sys.setswitchinterval(0.0001)           # the loop and the engine share the interpreter
    model = Model()
    serve(create_app(lambda metrics: local_engine(model, settings, metrics), settings.timeout), args.port, args.drain)


def serve(app, port, drain):
    # uvicorn stops listening, waits for what runs, then raises the signal again.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="info", access_log=False, http="h11", limit_concurrency=2048,
                timeout_graceful_shutdown=drain, backlog=1024)


if __name__ == "__main__":
    main()
