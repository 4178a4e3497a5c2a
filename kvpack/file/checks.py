"""Checks a header's fields against tables of rules.

Error messages contain the position (``where``), the rule and the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvpack.formats.errors import InvalidHeader, InvalidParameter, LimitExceeded

from .limits import MAX_BINARY_BYTES, MAX_NAMES, MAX_STRING_BYTES


class Rule(NamedTuple):
    """A rule for a value of exactly the type ``kind``. A bool does not count as an integer.

    An integer must be from ``low`` to ``high``. For other types, ``high`` limits the size: UTF-8 bytes of text, bytes, or entries of a
    container. If ``choices`` is not empty, text must be one of them. The rule ``each`` applies to the entries of a list or tuple, and to
    the values of a dict with text keys.
    """

    kind: Any
    high: int | None = None
    low: int = 0
    choices: tuple[str, ...] = ()
    each: Any = None


TEXT = Rule(str, MAX_STRING_BYTES)
BINARY = Rule(bytes, MAX_BINARY_BYTES)
TEXT_BY_NAME = Rule(dict, MAX_NAMES, each=TEXT)
BINARY_BY_NAME = Rule(dict, MAX_NAMES, each=BINARY)


def check_fields(holder: object, rules: Mapping[str, Rule]) -> None:
    """Check the attributes of ``holder`` for which ``rules`` has a rule. Raises the same errors as ``check``."""
    for name, rule in rules.items():
        check(name, getattr(holder, name), rule)


def check(where: str, value: Any, rule: Rule) -> None:
    """Check ``value`` against ``rule``. ``where`` is its position in the header, for messages.

    Raises InvalidHeader if the type is wrong, an integer is too small, or text is not one of the choices. Raises LimitExceeded if the value
    exceeds the maximum.
    """
    kind, high, low, choices, each = rule
    if type(value) is not kind:
        raise InvalidHeader(f"{where} is of type {type(value).__name__}, expected {kind.__name__}")
    if kind is int:
        if value < low:
            raise InvalidHeader(f"{where} is {value}, expected at least {low}")
        if high is not None and value > high:
            raise LimitExceeded(f"{where} is {value}, expected at most {high}")
        return
    if high is not None:
        try:
            size = len(value.encode() if kind is str else value)
        except UnicodeEncodeError:
            raise InvalidHeader(f"{where} is {value!r}, which UTF-8 cannot encode") from None
        if size > high:
            raise LimitExceeded(f"{where} has {size} {'bytes' if kind in (str, bytes) else 'entries'}, but the maximum is {high}")
    if choices and value not in choices:
        raise InvalidHeader(f"{where} is {value!r}, expected one of {', '.join(choices)}")
    if each is not None and kind is dict:
        for name, entry in value.items():
            check(f"a name in {where}", name, TEXT)
            check(f"{where}[{name!r}]", entry, each)
    elif each is not None:
        for number, entry in enumerate(value):
            check(f"{where}[{number}]", entry, each)


def check_argument(where: str, value: Any, rule: Rule) -> None:
    """Check an argument from the caller against ``rule``."""
    try:
        check(where, value, rule)
    except (InvalidHeader, LimitExceeded) as error:
        raise InvalidParameter(str(error)) from None


def check_keys(where: str, value: Any, expected: tuple[str, ...]) -> None:
    """Raise InvalidHeader unless ``value`` is a dict with exactly the ``expected`` keys, in that order."""
    check(where, value, Rule(dict))
    if tuple(value) != expected:
        raise InvalidHeader(f"{where} has the keys {', '.join(map(_escaped_name, value))}, expected {', '.join(expected)}")


def _escaped_name(name: Any) -> str:
    """Return a name from a file, with control characters escaped for the terminal."""
    return name if isinstance(name, str) and name.isprintable() else repr(name)
