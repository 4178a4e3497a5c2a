"""A real Redis server on the loopback interface for tests, without persistence."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")


class Server:
    """``redis-server`` on a free port.

    After a restart, the ``url`` is the same, but all data is lost unless ``keep_log`` was called.
    """

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder, self._keeps_log = folder, False
        self.start()

    def start(self) -> None:
        """Start the server and wait until it responds."""
        assert SERVER
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        options += ["--appendonly", "yes" if self._keeps_log else "no", "--aof-use-rdb-preamble", "no"]
        self.process = subprocess.Popen([SERVER, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def keep_log(self) -> None:
        """Restart the empty server with an append-only log that outlives it."""
        self._restart(keeps_log=True)

    def drop_log(self) -> None:
        """Restart the server empty and without any file."""
        self._restart(keeps_log=False)

    def log(self) -> bytes:
        """Return the append-only log, which contains the changes since ``keep_log``."""
        return self._log_path().read_bytes()

    def set_log(self, log: bytes) -> None:
        """Replace the log of the stopped server, which loads it when it starts."""
        self._log_path().write_bytes(log)

    def _restart(self, *, keeps_log: bool) -> None:
        self.kill()
        shutil.rmtree(self._folder / "appendonlydir", ignore_errors=True)
        self._keeps_log = keeps_log
        self.start()

    def _log_path(self) -> Path:
        (path,) = self._folder.glob("appendonlydir/*.incr.aof")
        return path


@contextlib.contextmanager
def run_server(folder: Path) -> Iterator[Server]:
    """Run a server while the context is active. Without an installed Redis, the test is skipped."""
    if SERVER is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    server = Server(folder)
    try:
        yield server
    finally:
        server.kill()
