"""A server process of the example, and plain sockets to talk to it."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


class Server:
    def __init__(self, *options):
        path = os.pathsep.join(filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen([sys.executable, "-m", "server", "--port", "0", *options],
                                        stderr=subprocess.PIPE, text=True, env=environment)
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"running on http://127.0.0.1:(\d+)", line):
                self.port = int(found[1])
                threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()
                return
        raise AssertionError("".join(self.log))

    def stop(self):
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def send(self, data):
        """A connection on which `data` has been sent."""
        connection = self.connect()
        connection.sendall(data)
        return connection

    def ask(self, data):
        """(status, headers, body) of what answers `data`."""
        with self.send(data) as connection:
            return split(read_all(connection))

    def post(self, fields, **headers):
        return self.ask(post(fields, **headers))

    def get(self, path):
        return self.ask(b"GET %s HTTP/1.0\r\nHost: localhost\r\n\r\n" % path.encode())

    def complete(self, prompt, max_tokens=20, **fields):
        status, _, body = self.post({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields})
        assert status == 200, body
        return json.loads(body)

    def metrics(self):
        return {name: float(value) for name, value in
                re.findall(r'^gdn_(\w+(?:{.*})?) (\S+)$', self.get("/metrics")[2].decode(), re.MULTILINE)}

    def wait_for(self, condition, seconds=30):
        """condition(metrics), within a bound."""
        end = time.monotonic() + seconds
        while not condition(found := self.metrics()):
            assert time.monotonic() < end, found
            time.sleep(0.05)
        return found


def post(fields, **headers):
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    headers = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": len(body),
               **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if value is not None)
    return b"POST /v1/completions HTTP/1.0\r\n" + lines.encode() + b"\r\n" + body


def read_all(connection):
    data = b""
    while more := connection.recv(65536):
        data += more
    return data


def split(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return int(status.split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}, body


def events(body):
    """What a stream's data lines hold; the last must be [DONE]."""
    *lines, last, rest = body.decode().split("\n\n")
    assert last == "data: [DONE]" and rest == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def reset(connection):
    """Close as a process that dies does: the other side gets a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
