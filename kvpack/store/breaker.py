"""A circuit breaker: a server that does not answer is left alone for a while, so that it costs its users one wait and not many."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from .locks import Lock

if TYPE_CHECKING:
    from collections.abc import Callable

    from .counters import Counters

    Result = TypeVar("Result")

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


class Guard:
    """Asks a server: ``errors`` are faults that are counted, and so is a question while it is left alone.

    ``refusals`` are those among the errors that a server gives which works: they are no reason to leave it alone.
    """

    def __init__(
        self, breaker: Breaker, counters: Counters, errors: tuple[type[BaseException], ...], refusals: tuple[type[BaseException], ...]
    ) -> None:
        self._breaker, self._counters, self._errors, self._refusals = breaker, counters, errors, refusals

    def ask(self, operation: str, ask: Callable[[], Result], otherwise: Result) -> Result:
        """What the server answers, or ``otherwise``."""
        if not self._breaker.allows():
            self._counters.fault(operation, Resting("the server has not answered, and is left alone for a while"))
            return otherwise
        try:
            answer = ask()
        except BaseException as error:
            if not isinstance(error, self._errors) and not is_panic(error):
                raise
            if isinstance(error, self._refusals):
                self._breaker.succeeded()
            else:
                self._breaker.failed()
            self._counters.fault(operation, error)
            return otherwise
        self._breaker.succeeded()
        return answer


def is_panic(error: BaseException) -> bool:
    """Whether an extension in Rust gave up, mostly for want of memory: its error is no Exception."""
    return type(error).__module__ == "pyo3_runtime"


class Resting(Exception):
    """Nothing was asked."""
