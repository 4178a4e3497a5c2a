"""Control headless Chromium in tests by the DevTools protocol over a pipe, without a driver or another package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking")
START = """
import os, sys
pipes = [os.dup(int(word)) for word in sys.argv[1:3]]
for number, pipe in zip((3, 4), pipes):
    os.dup2(pipe, number)
    os.set_inheritable(number, True)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Program that starts the browser with pipes as file descriptors 3, for commands, and 4, for replies."""
ANSWER_SECONDS = 120.0
"""Number of seconds after which a test fails if the browser does not reply. Ordinary runs never wait this long."""


class Page:
    """A browser tab. ``errors`` collects the exceptions of its scripts and the error messages on its console."""

    def __init__(self, process: subprocess.Popen[bytes], send: int, receive: int) -> None:
        self._process, self._send, self._receive = process, send, receive
        self._last, self._buffer = 0, b""
        self.errors: list[str] = []
        target = self.call("Target.createTarget", session=None, url="about:blank")["targetId"]
        self._session: str | None = self.call("Target.attachToTarget", session=None, targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, session: str | None = "", **parameters: Any) -> Any:
        """Send a command and return its result. Raises RuntimeError if the browser rejects it."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session or self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._last:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]

    def _next(self) -> Any:
        while b"\0" not in self._buffer:
            if not select.select([self._receive], [], [], ANSWER_SECONDS)[0]:
                raise RuntimeError("the browser does not respond")
            piece = os.read(self._receive, 1 << 20)
            if not piece:
                raise RuntimeError("the browser exited")
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        found = json.loads(text)
        parameters = found.get("params", {})
        if found.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:500])
        if found.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        return found

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which may be a promise. Raises RuntimeError if it throws."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:500])
        return result["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        end = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < end:
            if found := self.evaluate(condition):
                return found
            time.sleep(0.02)
        raise RuntimeError(
            f"the condition never became true: {condition}; the page shows: {self.evaluate('document.body.innerText')[:500]}"
        )

    def choose(self, selector: str, *paths: Path) -> None:
        """Choose the files ``paths`` in the file input that ``selector`` matches."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone)

    def color_scheme(self, name: str) -> None:
        """Emulate a user preference for the color scheme ``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, path: Path) -> None:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def page(folder: Path) -> Iterator[Page]:
    """Start a browser with one tab, whose profile is in ``folder``, and close it when the context exits."""
    assert PROGRAM is not None
    to_browser, send = os.pipe()
    receive, from_browser = os.pipe()
    command = [sys.executable, "-c", START, str(to_browser), str(from_browser), PROGRAM, *FLAGS]
    command += ["--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
    process = subprocess.Popen(
        command, pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(process, send, receive)
    finally:
        os.close(send)
        os.close(receive)
        process.kill()
        process.wait()
