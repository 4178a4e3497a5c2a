"""A real S3 server on the loopback interface for tests (moto, entirely in memory), and one that sends false responses."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from support import warm_python

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = "bucket"
VARIABLES = {
    "endpoint": "AWS_ENDPOINT_URL",
    "region": "AWS_REGION",
    "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY",
}
"""The environment variable for each of the storage_options."""
PROGRAM = """
import os, sys
from moto import server
print(os.getpid(), flush=True)
sys.stdout = open(os.devnull, "w")
server.main(sys.argv[1:])
"""


class Server:
    """moto's S3 server on a free port, with one bucket.

    After a restart, the address is the same, but all objects are lost.
    """

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"s3://{BUCKET}/some/prefix"
        self.options = options(f"http://127.0.0.1:{self.port}")
        self.start()

    def start(self) -> None:
        """Start the server, wait until it responds, and create the bucket."""
        command = [warm_python.python("moto.server"), "-c", PROGRAM, "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.number = int(self.process.stdout.readline())
        deadline = time.monotonic() + 60
        while True:
            try:
                request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{BUCKET}", method="PUT")
                urllib.request.urlopen(request, timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "the server did not start"
                assert self.process.poll() is None
                time.sleep(0.02)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.number, signal.SIGKILL)
            self.process.communicate()


def options(endpoint: str) -> dict[str, str]:
    """Return the storage_options that point to ``endpoint``."""
    return {"endpoint": endpoint, "region": "us-east-1", "access_key_id": "key", "secret_access_key": "secret"}


@contextlib.contextmanager
def run_server() -> Iterator[Server]:
    """Run a server while the context is active. Without moto's server, the test is skipped."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed")
    server = Server()
    try:
        yield server
    finally:
        server.kill()


class LyingHandler(BaseHTTPRequestHandler):
    """A server that answers every GET and HEAD of an entry with ``body`` and the content length ``length``, or with ``status``."""

    body = b""
    length = 0
    status = 200

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(self.body)

    def do_DELETE(self) -> None:
        self.send_response(204)
        self.end_headers()

    def _answer(self, body: bytes) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(self.length))
        self.send_header("ETag", '"tag"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextlib.contextmanager
def run_lying_server() -> Iterator[tuple[type[LyingHandler], dict[str, str]]]:
    """Run a server that sends false responses.

    Yields the class whose attributes configure the responses, and the storage_options for the server.
    """
    handler = type("Lying", (LyingHandler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield handler, options(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
