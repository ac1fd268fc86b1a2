"""The example server's page in headless Chromium, driven through its debugging pipe."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from helpers import missing, optional
from server_tools import Server

for module in ("gguf", "prometheus_client", "starlette", "uvicorn"):
    optional(module)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    missing("chromium (Debian: apt install chromium)")


class Browser:
    """Chromium reads commands from descriptor 3 and writes answers to 4, JSON that ends with a zero byte."""

    def __init__(self, profile):
        command_end, self.commands = os.pipe()
        self.answers, answer_end = os.pipe()
        # The shell moves our pipe's ends to 3 and 4, whatever they are here.
        script = f'exec 3<&{command_end} 4>&{answer_end}; exec "$@"'
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", script, "sh", CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}", "--window-size=1000,850",
             "--remote-debugging-pipe"], pass_fds=(command_end, answer_end), stderr=subprocess.DEVNULL)
        os.close(command_end)
        os.close(answer_end)
        self.last, self.rest, self.session = 0, b"", None

    def call(self, method, **params):
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                data = os.read(self.answers, 1 << 20)
                assert data, "the browser has ended"
                self.rest += data
            one, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(one)
            if answer.get("id") == self.last:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url):
        target = self.call("Target.createTarget", url=url)["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def js(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression, seconds=60):
        end = time.monotonic() + seconds
        while not (value := self.js(expression)):
            assert time.monotonic() < end, (expression, self.js("document.body.innerText"))
            time.sleep(0.05)
        return value

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        os.close(self.commands)
        os.close(self.answers)


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    assert server.stop() == 0


@pytest.fixture
def browser(server, tmp_path):
    browser = Browser(tmp_path)
    try:
        browser.open(f"http://127.0.0.1:{server.port}/")
        browser.wait_for("document.readyState == 'complete' && document.querySelectorAll('#slots i').length == 64")
        yield browser
    finally:
        browser.close()


TEXTS = "[...document.querySelectorAll('#texts pre')].map(x => x.textContent)"


def test_texts_stream_and_numbers_live(server, browser):
    browser.js("document.getElementById('tokens').value = 1500; document.getElementById('go').click()")
    browser.wait_for(f"{TEXTS}.length == 4 && {TEXTS}.every(x => x.length > 20 && x.length < 1500)")       # while it grows
    browser.wait_for("document.querySelectorAll('#slots i.write').length == 4")
    browser.wait_for("+document.getElementById('rate').textContent > 100")
    assert browser.js("document.getElementById('busy').textContent") == "4 of 64"
    if path := os.environ.get("GDN_PAGE_PICTURE"):
        browser.wait_for(f"{TEXTS}.every(x => x.length > 260)")
        Path(path).write_bytes(base64.b64decode(browser.call("Page.captureScreenshot")["data"]))
    browser.wait_for("!document.getElementById('go').disabled")
    prompt = browser.js("document.getElementById('prompt').value")
    assert browser.js(TEXTS) == [server.complete(prompt, 1500, temperature=0.7, seed=seed)["choices"][0]["text"]
                                 for seed in range(1, 5)]
    browser.wait_for("/^[1-9][0-9]* of [1-9][0-9]*$/.test(document.getElementById('drafts').textContent)")
    browser.wait_for("document.getElementById('busy').textContent == '0 of 64'")
    assert browser.js("document.getElementById('error').textContent") == ""


def test_stop_frees_the_slots(server, browser):
    browser.js("document.getElementById('tokens').value = 4096; document.getElementById('go').click()")
    browser.wait_for(f"{TEXTS}.length == 4 && {TEXTS}.every(x => x.length > 5)")
    browser.js("document.getElementById('stop').click()")
    server.wait_for(lambda m: m["slots_busy"] == 0, seconds=5)
    browser.wait_for("!document.getElementById('go').disabled")


def test_an_error_is_shown(browser):
    browser.js("document.getElementById('tokens').value = 10; document.getElementById('prompt').value = '';"
               "document.getElementById('go').click()")
    assert "prompt" in browser.wait_for("document.getElementById('error').textContent")
