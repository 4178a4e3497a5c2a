"""Strict types and limits of header values; every message names the place (``where``), the rule and the value found."""

from __future__ import annotations

from typing import Any

from kvpack.formats.errors import InvalidHeader, LimitExceeded

from .limits import MAX_BINARY_BYTES, MAX_NAMES, MAX_STRING_BYTES


def check_integer(where: str, value: Any, low: int, high: int) -> None:
    """Raise InvalidHeader for another type or less than ``low``, LimitExceeded for more than ``high``."""
    check_type(where, value, int)
    if value < low:
        raise InvalidHeader(f"{where} is {value}, expected at least {low}")
    if value > high:
        raise LimitExceeded(f"{where} is {value}, the limit is {high}")


def check_string(where: str, value: Any) -> None:
    """Raise InvalidHeader for another type or text that UTF-8 cannot encode, LimitExceeded for long text."""
    check_type(where, value, str)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidHeader(f"{where} is {value!r}, which UTF-8 cannot encode") from None
    if size > MAX_STRING_BYTES:
        raise LimitExceeded(f"{where} has {size} bytes, the limit is {MAX_STRING_BYTES}")


def check_binary(where: str, value: Any) -> None:
    """Raise InvalidHeader for another type, LimitExceeded for too many bytes."""
    check_type(where, value, bytes)
    if len(value) > MAX_BINARY_BYTES:
        raise LimitExceeded(f"{where} has {len(value)} bytes, the limit is {MAX_BINARY_BYTES}")


def check_sequence(where: str, value: Any, kind: type, limit: int) -> None:
    """Raise InvalidHeader unless ``value`` is of type ``kind``, LimitExceeded for more than ``limit`` entries."""
    check_type(where, value, kind)
    if len(value) > limit:
        raise LimitExceeded(f"{where} has {len(value)} entries, the limit is {limit}")


def check_names(where: str, value: Any, kind: type) -> None:
    """Check a map from names to ``str`` or ``bytes``. Raises InvalidHeader and LimitExceeded."""
    check_sequence(where, value, dict, MAX_NAMES)
    for name, entry in value.items():
        check_string(f"a name in {where}", name)
        (check_string if kind is str else check_binary)(f"{where}[{name!r}]", entry)


def check_keys(where: str, value: Any, expected: tuple[str, ...]) -> None:
    """Raise InvalidHeader unless ``value`` is a map with exactly the ``expected`` keys, in order."""
    check_type(where, value, dict)
    if tuple(value) != expected:
        raise InvalidHeader(f"{where} has the keys {', '.join(map(_shown, value))}, expected {', '.join(expected)}")


def _shown(name: Any) -> str:
    """A name from a file, with terminal control characters escaped."""
    return name if isinstance(name, str) and name.isprintable() else repr(name)


def check_type(where: str, value: Any, kind: type) -> None:
    """Raise InvalidHeader unless ``value`` is of exactly type ``kind``: a bool is not an integer."""
    if type(value) is not kind:
        raise InvalidHeader(f"{where} is of type {type(value).__name__}, expected {kind.__name__}")
