"""Checks of server replies. A server that is not Redis, or whose keys another program has changed, may reply with anything.

Each check returns the reply, or raises NotRedis, which counts like a server that does not answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_INTEGER = 2**53
"""The largest integer up to which Lua's numbers, which are binary64, are exact."""
_MESSAGE_BYTES = 2**16
_CURSOR_DIGITS = 20


class NotRedis(Exception):
    """The error for a reply that no Redis server would send."""


def integer(answer: Any) -> int:
    """Check that the reply is an integer from 0 to 2^53."""
    if type(answer) is not int or not 0 <= answer <= _MAX_INTEGER:
        raise _unexpected_reply(answer, "an integer from 0 to 2^53")
    return answer


def integers(count: int) -> Callable[[Any], list[int]]:
    """Return a check for ``count`` integers."""
    return lambda answer: [integer(item) for item in _check_list(answer, f"{count} integers", count)]


def bytes_up_to(max_bytes: int) -> Callable[[Any], bytes]:
    """Return a check for at most ``max_bytes`` bytes."""

    def check(answer: Any) -> bytes:
        if type(answer) is not bytes or len(answer) > max_bytes:
            raise _unexpected_reply(answer, f"at most {max_bytes} bytes")
        return answer

    return check


def byte_strings(answer: Any) -> list[bytes]:
    """Check that the reply is a list of bytes."""
    result = _check_list(answer, "a list of bytes")
    for item in result:
        if type(item) is not bytes:
            raise _unexpected_reply(answer, "a list of bytes")
    return result


def member_list(answer: Any) -> list[bytes]:
    """Check that the reply is a list of keys."""
    result = byte_strings(answer)
    if any(len(key) != KEY_BYTES for key in result):
        raise _unexpected_reply(answer, f"keys of {KEY_BYTES} bytes")
    return result


def sizes_and_uses(answer: Any) -> list[float]:
    """Check that the reply alternates sizes and last uses. A use is a number as text; empty text becomes 0."""
    result = _check_list(answer, "sizes and times")
    if len(result) % 2:
        raise _unexpected_reply(answer, "alternating sizes and times")
    pairs = zip(result[::2], result[1::2], strict=True)
    return [number for size, used in pairs for number in (float(integer(size)), _parse_number(used))]


def two_integers(answer: Any) -> list[int]:
    """Check that the reply is a list of two integers, or of only -1."""
    return answer if answer == [-1] and type(answer[0]) is int else integers(2)(answer)


def sum_progress(answer: Any) -> int:
    """Check that the reply is 0, 1 or -1."""
    if type(answer) is not int or not -1 <= answer <= 1:
        raise _unexpected_reply(answer, "0, 1 or -1")
    return answer


def count_page(answer: Any) -> tuple[bytes, int]:
    """Check the reply of the script that counts entries; return its cursor, as text, and a number."""
    result = _check_list(answer, "a cursor and a number", 2)
    if type(result[0]) is not bytes or not result[0].isdigit() or len(result[0]) > _CURSOR_DIGITS:
        raise _unexpected_reply(answer, "a cursor")
    return result[0], integer(result[1])


def was_set(answer: Any) -> bool:
    """Check the reply to SET NX; return True if the key was set."""
    if answer is not None and answer is not True and answer != b"OK":
        raise _unexpected_reply(answer, "OK or nothing")
    return answer is not None


def has_score(answer: Any) -> bool:
    """Return True if the reply to ZSCORE is a score."""
    return answer is not None


def put_results(front_bytes: int) -> Callable[[Any], list[Any]]:
    """Return a check for the reply of the script that puts entries.

    The reply is only -1, or evicted entries and bytes, a message, and a result for each entry.
    """

    def result(item: Any) -> Any:
        if type(item) is list:
            _check_list(item, "a front and a size", 2)
            return bytes_up_to(front_bytes)(item[0]), integer(item[1])
        return integer(item)

    def check(answer: Any) -> list[Any]:
        if answer == [-1] and type(answer[0]) is int:
            return [-1]
        found = _check_list(answer, "what was evicted, and results", 4)
        results = [result(item) for item in _check_list(found[3], "results")]
        return [integer(found[0]), integer(found[1]), bytes_up_to(_MESSAGE_BYTES)(found[2]), results]

    return check


def scan_page(answer: Any, cursor: int) -> tuple[int, Sequence[bytes]]:
    """Check the reply to a SCAN from ``cursor``; return the next cursor and the names."""
    if type(answer) is not tuple or len(answer) != 2 or type(answer[0]) is not int or answer[0] < 0:
        raise _unexpected_reply(answer, "a cursor and names")
    if answer[0] == cursor != 0:
        raise _unexpected_reply(answer, "a cursor other than the request's")
    return answer[0], byte_strings(answer[1])


def _check_list(answer: Any, what: str, count: int | None = None) -> list[Any]:
    if type(answer) is not list or (count is not None and len(answer) != count):
        raise _unexpected_reply(answer, what)
    return answer


def _parse_number(answer: Any) -> float:
    if type(answer) is not bytes or len(answer) > 64:
        raise _unexpected_reply(answer, "a number as text")
    try:
        result = float(answer or 0)
    except ValueError:
        raise _unexpected_reply(answer, "a number as text") from None
    return result if result == result else 0.0


def _unexpected_reply(answer: Any, expected: str) -> NotRedis:
    return NotRedis(f"the server replied {answer!r:.80}, expected {expected}: it is not Redis, or another program has changed its keys")
