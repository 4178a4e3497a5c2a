"""Limits of what a Redis server sends in answer to one request: its bytes, and its time, also where it sends a byte now and then."""

from __future__ import annotations

import time
from typing import Any

BYTES_A_SECOND = 2**20
"""An answer may take the timeout, and a second more for so many bytes that have come."""


def limited(connection: type[Any], max_bytes: int) -> type[Any]:
    """``connection``, a class of redis-py, whose answers are cut off at ``max_bytes`` and by time."""

    class Limited(connection):  # type: ignore[misc]
        """A connection that counts from each request on."""

        def _connect(self) -> Any:
            self._answer = _Answer(super()._connect(), self.socket_timeout, max_bytes)
            return self._answer

        def send_packed_command(self, command: Any, *args: Any, **options: Any) -> Any:
            if self._sock is not None:
                self._answer.begin()
            return super().send_packed_command(command, *args, **options)

    return Limited


class _Answer:
    """A socket, which gives up where an answer takes more than ``seconds`` or has more than ``max_bytes``."""

    def __init__(self, socket: Any, seconds: float | None, max_bytes: int) -> None:
        self._socket, self._seconds, self._max_bytes = socket, seconds, max_bytes
        self.begin()

    def begin(self) -> None:
        """A request is about to be sent."""
        self._begun, self._taken = time.monotonic(), 0
        self._socket.settimeout(self._seconds)

    def recv(self, count: int, *flags: Any) -> bytes:
        """As a socket's. Raises TimeoutError, and OSError for too many bytes."""
        # Without a timeout the client looks whether an idle connection has something to read.
        if self._seconds is not None and self._socket.gettimeout() != 0:
            left = self._begun + self._seconds + self._taken / BYTES_A_SECOND - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"an answer of {self._taken} bytes so far took more than {self._seconds} s")
            self._socket.settimeout(min(left, self._seconds))
        data: bytes = self._socket.recv(count, *flags)
        self._taken += len(data)
        if self._taken > self._max_bytes:
            raise OSError(f"an answer has more than {self._max_bytes} bytes")
        return data

    def recv_into(self, buffer: Any, *args: Any) -> int:
        """As a socket's. Raises as ``recv``."""
        room = memoryview(buffer).cast("B")
        data = self.recv(min(len(room), args[0]) if args and args[0] else len(room), *args[1:])
        room[: len(data)] = data
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)
