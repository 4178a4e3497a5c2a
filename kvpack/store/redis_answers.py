"""Checks of server replies: a server that is not Redis, or that somebody has modified, may reply with anything.

Each check returns the reply. It raises NotRedis, which counts as a server that does not answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LARGEST = 2**53
"""Lua's numbers are binary64."""
_MESSAGE_BYTES = 2**16
_CURSOR_DIGITS = 20


class NotRedis(Exception):
    """A reply that no Redis server sends."""


def integer(answer: Any) -> int:
    """Check that the reply is an integer from 0 to 2^53."""
    if type(answer) is not int or not 0 <= answer <= _LARGEST:
        raise _wrong(answer, "an integer from 0 to 2^53")
    return answer


def integers(count: int) -> Callable[[Any], list[int]]:
    """Return a check for ``count`` integers."""
    return lambda answer: [integer(item) for item in _listed(answer, f"{count} integers", count)]


def data(most: int) -> Callable[[Any], bytes]:
    """Return a check for at most ``most`` bytes."""

    def check(answer: Any) -> bytes:
        if type(answer) is not bytes or len(answer) > most:
            raise _wrong(answer, f"at most {most} bytes")
        return answer

    return check


def data_list(answer: Any) -> list[bytes]:
    """Check that the reply is a list of bytes."""
    result = _listed(answer, "a list of bytes")
    for item in result:
        if type(item) is not bytes:
            raise _wrong(answer, "a list of bytes")
    return result


def member_list(answer: Any) -> list[bytes]:
    """Check that the reply is a list of keys."""
    result = data_list(answer)
    if any(len(key) != KEY_BYTES for key in result):
        raise _wrong(answer, f"keys of {KEY_BYTES} bytes")
    return result


def sizes_and_uses(answer: Any) -> list[float]:
    """Check alternating sizes and last uses; a use is a number as text, or empty for none, which becomes 0."""
    result = _listed(answer, "sizes and times")
    if len(result) % 2:
        raise _wrong(answer, "sizes and times in turn")
    pairs = zip(result[::2], result[1::2], strict=True)
    return [number for size, used in pairs for number in (float(integer(size)), _number(used))]


def numbers(answer: Any) -> list[int]:
    """Check that the reply is two integers, or only -1."""
    return answer if answer == [-1] and type(answer[0]) is int else integers(2)(answer)


def progress(answer: Any) -> int:
    """Check that the reply is 0, 1 or -1."""
    if type(answer) is not int or not -1 <= answer <= 1:
        raise _wrong(answer, "0, 1 or -1")
    return answer


def page(answer: Any) -> tuple[bytes, int]:
    """Check the reply of a scan; return its cursor, as text, and a number."""
    result = _listed(answer, "a cursor and a number", 2)
    if type(result[0]) is not bytes or not result[0].isdigit() or len(result[0]) > _CURSOR_DIGITS:
        raise _wrong(answer, "a cursor")
    return result[0], integer(result[1])


def taken(answer: Any) -> bool:
    """Return True if a missing key was set."""
    if answer is not None and answer is not True and answer != b"OK":
        raise _wrong(answer, "OK or nothing")
    return answer is not None


def score(answer: Any) -> bool:
    """Return True if there is a score."""
    return answer is not None


def stored(front_bytes: int) -> Callable[[Any], list[Any]]:
    """Return a check for the reply of the script that puts entries.

    The reply is only -1, or evicted entries and bytes, a message, and a result for each entry.
    """

    def result(one: Any) -> Any:
        if type(one) is list:
            _listed(one, "a front and a size", 2)
            return data(front_bytes)(one[0]), integer(one[1])
        return integer(one)

    def check(answer: Any) -> list[Any]:
        if answer == [-1] and type(answer[0]) is int:
            return [-1]
        found = _listed(answer, "what was evicted, and results", 4)
        results = [result(item) for item in _listed(found[3], "results")]
        return [integer(found[0]), integer(found[1]), data(_MESSAGE_BYTES)(found[2]), results]

    return check


def scanned(answer: Any, cursor: int) -> tuple[int, Sequence[bytes]]:
    """Check the reply of a scan; return the next cursor after ``cursor``, and names."""
    if type(answer) is not tuple or len(answer) != 2 or type(answer[0]) is not int or answer[0] < 0:
        raise _wrong(answer, "a cursor and names")
    if answer[0] == cursor != 0:
        raise _wrong(answer, "another cursor than that of the request")
    return answer[0], data_list(answer[1])


def _listed(answer: Any, what: str, count: int | None = None) -> list[Any]:
    if type(answer) is not list or (count is not None and len(answer) != count):
        raise _wrong(answer, what)
    return answer


def _number(answer: Any) -> float:
    if type(answer) is not bytes or len(answer) > 64:
        raise _wrong(answer, "a number as text")
    try:
        result = float(answer or 0)
    except ValueError:
        raise _wrong(answer, "a number as text") from None
    return result if result == result else 0.0


def _wrong(answer: Any, expected: str) -> NotRedis:
    return NotRedis(f"the server answers {answer!r:.80}, expected {expected}: it is not Redis, or its keys were changed by another program")
