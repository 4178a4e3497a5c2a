"""A circuit breaker: a server that does not answer is left alone for a while, so that it costs its users one wait and not many."""

from __future__ import annotations

import time

from .locks import Lock

FAILURES = 2
"""Failures in a row after which nothing is asked."""
REST_SECONDS = 5.0
"""How long nothing is asked; then one request tries."""


class Breaker:
    """Counts failures in a row. Safe to use from any thread."""

    def __init__(self, failures: int = FAILURES, rest_seconds: float = REST_SECONDS) -> None:
        self._failures, self._rest_seconds = failures, rest_seconds
        self._in_a_row = 0
        self._closed_until = 0.0
        self._lock = Lock()

    def allows(self) -> bool:
        """Whether to ask now. After a rest one caller may, and the others wait for what it meets."""
        with self._lock:
            if self._in_a_row < self._failures:
                return True
            now = time.monotonic()
            if now < self._closed_until:
                return False
            self._closed_until = now + self._rest_seconds
            return True

    def succeeded(self) -> None:
        """The server answered."""
        with self._lock:
            self._in_a_row = 0

    def failed(self) -> None:
        """It did not, or not in time."""
        with self._lock:
            self._in_a_row += 1
            self._closed_until = time.monotonic() + self._rest_seconds
