"""Checks of a server's replies. A server that is not Redis, or whose keys another program has changed, may reply with anything.

Each check returns the reply, or raises NotRedis, which counts as if the server had not replied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .keys import KEY_BYTES

_MAX_INTEGER = 2**53
"""Largest integer up to which Lua's numbers (doubles) represent all integers exactly."""
_MESSAGE_BYTES = 2**16
_CURSOR_DIGITS = 20
_PAGE_BYTES = 2**20
LISTED_BYTES = KEY_BYTES + 16
"""Size in bytes of an entry in a page: its key, its size, and its last use in microseconds. The two numbers take 8 bytes each."""


class NotRedis(Exception):
    """Raised for a reply that no Redis server would send."""


def check_integer(reply: Any) -> int:
    """Return the reply, which must be an integer from 0 to 2^53."""
    if type(reply) is not int or not 0 <= reply <= _MAX_INTEGER:
        raise _unexpected_reply(reply, "an integer from 0 to 2^53")
    return reply


def make_integers_check(count: int) -> Callable[[Any], list[int]]:
    """Return a check that accepts only a list of ``count`` integers."""
    return lambda reply: [check_integer(item) for item in _check_list(reply, f"{count} integers", count)]


def make_bytes_check(max_bytes: int) -> Callable[[Any], bytes]:
    """Return a check that accepts at most ``max_bytes`` bytes."""

    def check(reply: Any) -> bytes:
        if type(reply) is not bytes or len(reply) > max_bytes:
            raise _unexpected_reply(reply, f"at most {max_bytes} bytes")
        return reply

    return check


def check_byte_strings(reply: Any) -> list[bytes]:
    """Return the reply, which must be a list of bytes."""
    result = _check_list(reply, "a list of bytes")
    for item in result:
        if type(item) is not bytes:
            raise _unexpected_reply(reply, "a list of bytes")
    return result


def check_keys(reply: Any) -> list[bytes]:
    """Return the reply, which must be a list of keys."""
    result = check_byte_strings(reply)
    if any(len(key) != KEY_BYTES for key in result):
        raise _unexpected_reply(reply, f"keys of {KEY_BYTES} bytes")
    return result


def make_fronts_check(max_bytes: int) -> Callable[[Any], list[Any]]:
    """Return a check that accepts only a number, then for each entry its size and either an error or at most ``max_bytes`` bytes."""
    check_bytes = make_bytes_check(max_bytes)

    def check(reply: Any) -> list[Any]:
        found = _check_list(reply, "a number, then sizes and bytes")
        if len(found) % 2 == 0:
            raise _unexpected_reply(reply, "a number, then sizes and bytes")
        return [
            check_integer(item) if at % 2 or at == 0 else item if isinstance(item, Exception) else check_bytes(item)
            for at, item in enumerate(found)
        ]

    return check


def check_two_integers(reply: Any) -> list[int]:
    """Return the reply, which must be a list of two integers, or [-1]."""
    return reply if reply == [-1] and type(reply[0]) is int else make_integers_check(2)(reply)


def check_sum_progress(reply: Any) -> int:
    """Return the reply of the script that sums sizes: 1 if the sum is complete, 0 if more remain, or -1 if the sizes are unsound."""
    if type(reply) is not int or not -1 <= reply <= 1:
        raise _unexpected_reply(reply, "0, 1 or -1")
    return reply


def parse_count_page(reply: Any) -> tuple[bytes, int]:
    """Check the reply of the script that counts entries. Returns the cursor and the number of missing entries."""
    result = _check_list(reply, "a cursor and a number", 2)
    return _check_cursor(result[0]), check_integer(result[1])


def parse_set_reply(reply: Any) -> bool:
    """Check the reply to SET NX. Returns True if the key was set."""
    if reply is not None and reply is not True and reply != b"OK":
        raise _unexpected_reply(reply, "OK or nil")
    return reply is not None


def make_put_results_check(front_bytes: int) -> Callable[[Any], list[Any]]:
    """Return a check for replies of the script that puts entries.

    A reply is -1, or contains the number and size of the evicted entries, a message, and a result for each entry.
    """

    def check_result(item: Any) -> Any:
        if type(item) is list:
            _check_list(item, "a front and a size", 2)
            return make_bytes_check(front_bytes)(item[0]), check_integer(item[1])
        return check_integer(item)

    def check(reply: Any) -> list[Any]:
        if reply == [-1] and type(reply[0]) is int:
            return [-1]
        found = _check_list(reply, "two integers, a message and a list of results", 4)
        results = [check_result(item) for item in _check_list(found[3], "a list of results")]
        return [check_integer(found[0]), check_integer(found[1]), make_bytes_check(_MESSAGE_BYTES)(found[2]), results]

    return check


def parse_entry_page(reply: Any) -> tuple[bytes, bytes]:
    """Check the reply of a script that lists a page of entries. Returns its cursor and the bytes of its entries."""
    result = _check_list(reply, "a cursor and entries", 2)
    entries = make_bytes_check(_PAGE_BYTES)(result[1])
    if len(entries) % LISTED_BYTES:
        raise _unexpected_reply(reply, f"{LISTED_BYTES} bytes for each entry")
    return _check_cursor(result[0]), entries


def parse_totals(reply: Any) -> tuple[int, int, int, dict[bytes, bytes]] | None:
    """Check the reply of the script that returns totals. Returns its three numbers and its hash, or None for an empty reply."""
    found = _check_list(reply, "three integers followed by field-value pairs")
    if not found:
        return None
    if len(found) < 3 or len(found) % 2 == 0:
        raise _unexpected_reply(reply, "three integers followed by field-value pairs")
    fields = check_byte_strings(found[3:])
    entries, described, size = map(check_integer, found[:3])
    return entries, described, size, dict(zip(fields[::2], fields[1::2], strict=True))


def _check_cursor(reply: Any) -> bytes:
    if type(reply) is not bytes or not reply.isdigit() or len(reply) > _CURSOR_DIGITS:
        raise _unexpected_reply(reply, "a cursor")
    return reply


def _check_list(reply: Any, description: str, count: int | None = None) -> list[Any]:
    if type(reply) is not list or (count is not None and len(reply) != count):
        raise _unexpected_reply(reply, description)
    return reply


def _unexpected_reply(reply: Any, expected: str) -> NotRedis:
    return NotRedis(f"the server replied {reply!r:.80}, expected {expected}: it is not Redis, or another program has changed its keys")
