"""A circuit breaker. After failures, requests pause for a while, so that a dead server costs one timeout instead of many."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from kvpack.runtime.threads import Lock

if TYPE_CHECKING:
    from collections.abc import Callable

    from .counters import Counters

    Result = TypeVar("Result")

MAX_FAILURES = 2
"""Number of consecutive failures after which requests pause."""
PAUSE_SECONDS = 5.0
"""Duration of a pause in seconds. The first request after a pause tests whether the server answers."""


class CircuitBreaker:
    """Pauses requests after ``MAX_FAILURES`` consecutive failures. Safe to use from any thread."""

    def __init__(self) -> None:
        self._failure_count = 0
        self._paused_until = 0.0
        self._lock = Lock()

    def allows_request(self) -> bool:
        """Return True if a request may be sent now. After a pause, one caller may send a request, and the others wait for its outcome."""
        with self._lock:
            if self._failure_count < MAX_FAILURES:
                return True
            now = time.monotonic()
            if now < self._paused_until:
                return False
            self._paused_until = now + PAUSE_SECONDS
            return True

    def record_success(self) -> None:
        with self._lock:
            self._failure_count = 0

    def record_failure(self) -> None:
        """Record that the server did not answer in time."""
        with self._lock:
            self._failure_count += 1
            self._paused_until = time.monotonic() + PAUSE_SECONDS


class RequestGuard:
    """Sends requests to a server, except during a pause. Counts ``errors`` as faults.

    ``refusals`` are errors that a working server may return. They count as faults, but do not start a pause.
    """

    def __init__(
        self,
        breaker: CircuitBreaker,
        counters: Counters,
        errors: tuple[type[BaseException], ...],
        refusals: tuple[type[BaseException], ...],
    ) -> None:
        self._breaker, self._counters, self._errors, self._refusals = breaker, counters, errors, refusals

    def request(self, operation: str, send: Callable[[], Result], default: Result) -> Result:
        """Return the server's reply, or ``default`` after a fault."""
        if not self._breaker.allows_request():
            self._counters.fault(operation, CircuitOpen("the server did not answer, and requests to it are paused for a while"))
            return default
        try:
            reply = send()
        except BaseException as error:
            if not isinstance(error, self._errors) and not is_panic(error):
                raise
            if isinstance(error, self._refusals):
                self._breaker.record_success()
            else:
                self._breaker.record_failure()
            self._counters.fault(operation, error)
            return default
        self._breaker.record_success()
        return reply


def is_panic(error: BaseException) -> bool:
    """Return True if ``error`` is a panic in a Rust extension, usually for lack of memory. Panics are not subclasses of Exception."""
    return type(error).__module__ == "pyo3_runtime"


class CircuitOpen(Exception):
    """The fault that is counted if a request is not sent because earlier requests failed."""
