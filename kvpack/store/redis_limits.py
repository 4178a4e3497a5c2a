"""Limits of one request to a Redis server: the bytes of its answer, and the time, also if the server takes a byte now and then."""

from __future__ import annotations

import time
from typing import Any

BYTES_A_SECOND = 2**20
"""Bytes per second that extend the timeout of a request and its reply."""


def limited(connection: type[Any], max_bytes: int) -> type[Any]:
    """Return ``connection``, a class of redis-py, with limits on the time of requests and on the size of replies, ``max_bytes``."""

    class Limited(connection):  # type: ignore[misc]
        """A connection that counts from each request on."""

        def _connect(self) -> Any:
            self._exchange = _Exchange(super()._connect(), self.socket_timeout, max_bytes)
            return self._exchange

        def send_packed_command(self, command: Any, *args: Any, **options: Any) -> Any:
            if self._sock is not None:
                self._exchange.begin()
            return super().send_packed_command(command, *args, **options)

    return Limited


class _Exchange:
    """A socket that gives up if a request and its reply take more than ``seconds``, or if the reply has more than ``max_bytes``.

    Each MiB that has gone or come allows a second more.
    """

    def __init__(self, socket: Any, seconds: float | None, max_bytes: int) -> None:
        self._socket, self._seconds, self._max_bytes = socket, seconds, max_bytes
        self.begin()

    def begin(self) -> None:
        """Note that a request is about to be sent."""
        self._begun, self._sent, self._taken = time.monotonic(), 0, 0
        self._socket.settimeout(self._seconds)

    def sendall(self, data: Any, *flags: Any) -> None:
        """As for a socket, which would apply the timeout to each part of a request. Raises TimeoutError."""
        view = memoryview(data).cast("B")
        while len(view):
            self._limit(f"a request, of which {self._sent} bytes are sent,")
            count = self._socket.send(view, *flags)
            self._sent += count
            view = view[count:]

    def recv(self, count: int, *flags: Any) -> bytes:
        """As for a socket. Raises TimeoutError, and OSError for too many bytes."""
        # Without a timeout the client looks whether an idle connection has something to read.
        if self._socket.gettimeout() != 0:
            self._limit(f"an answer of {self._taken} bytes so far")
        data: bytes = self._socket.recv(count, *flags)
        self._taken += len(data)
        if self._taken > self._max_bytes:
            raise OSError(f"an answer has more than {self._max_bytes} bytes")
        return data

    def _limit(self, what: str) -> None:
        """Let the next call of the socket wait for what is left of the time. Raises TimeoutError."""
        if self._seconds is not None:
            left = self._begun + self._seconds + (self._sent + self._taken) / BYTES_A_SECOND - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{what} took more than {self._seconds} s")
            self._socket.settimeout(min(left, self._seconds))

    def recv_into(self, buffer: Any, *args: Any) -> int:
        """As for a socket. Raises the errors of ``recv``."""
        room = memoryview(buffer).cast("B")
        data = self.recv(min(len(room), args[0]) if args and args[0] else len(room), *args[1:])
        room[: len(data)] = data
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)
