"""Random mutation of msgpack values: any map, array, number or string of a header may turn into any other value."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from fuzz.byte_mutator import mutate_bytes

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

LIMITS = (0, 1, 256, 4096, 65535, 65536, 2**17, 2**20, 2**31, 2**32, 2**40 - 1, 2**53, 2**60 - 1, 2**63, 2**64 - 1)
"""Numbers at the limits of the format and of machine integers."""

_OTHER_TYPES: tuple[Any, ...] = (None, True, False, 0, -1, 1.5, float("nan"), "", "x", b"", b"\0", [], {}, [[]], {"": 0}, [[[[[[[0]]]]]]])
_OVERSIZED_VALUES: tuple[Any, ...] = ("x" * 4097, b"\0" * 8000, [[]] * 1000, [0] * 5000, {str(number): number for number in range(257)})
"""Values above a limit, or longer than a header can describe."""


def random_value(source: random.Random) -> Any:
    """Return a value of any type. Every call creates a new value, because callers may change it."""
    return copy.deepcopy(source.choice(_OVERSIZED_VALUES if source.random() < 0.05 else _OTHER_TYPES))


def iterate_positions(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (map or array, key or index) within ``value``, from the top down."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield value, key
        yield from iterate_positions(entry)


def mutate_position(top: Any, words: Sequence[str], source: random.Random) -> None:
    """Change one value within ``top``, or the entries of one of its maps and arrays, in place."""
    candidates = list(iterate_positions(top))
    if not candidates:
        return
    holder, key = source.choice(candidates)
    if source.random() < 0.75:
        holder[key] = mutate_value(holder[key], words, source)
    elif isinstance(holder, list):
        _mutate_array(holder, source)
    else:
        _mutate_map(holder, key, words, source)


def mutate_value(value: Any, words: Sequence[str], source: random.Random) -> Any:
    """Return another value, usually of the same type."""
    if source.random() < 0.1:
        return random_value(source)
    if type(value) is int:
        limit = source.choice(LIMITS)
        return source.choice((value + 1, max(value - 1, -(2**63)), value * 2, value // 2, limit, limit + 1, source.randrange(300))) % 2**64
    if isinstance(value, str):
        return source.choice((source.choice(words), value + "x", value[:-1], value.upper(), value * source.choice((2, 300)), "\0", "é"))
    if isinstance(value, bytes):
        return mutate_bytes(value, source, 1 << 12)
    return random_value(source)


def _mutate_array(array: list[Any], source: random.Random) -> None:
    if not array:
        array.append(random_value(source))
        return
    one, other = source.randrange(len(array)), source.randrange(len(array))
    kind = source.randrange(4)
    if kind == 0:
        array.insert(one, array[other])
    elif kind == 1:
        del array[one]
    elif kind == 2:
        array[one], array[other] = array[other], array[one]
    else:
        array.append(random_value(source))


def _mutate_map(entries: dict[Any, Any], key: Any, words: Sequence[str], source: random.Random) -> None:
    kind = source.randrange(4)
    if kind == 0:
        del entries[key]
    elif kind == 1:
        entries[key] = entries.pop(key)
    elif kind == 2:
        entries[source.choice(words)] = source.choice((entries[key], random_value(source)))
    else:
        entries[source.choice((source.choice(words), 7, b"key"))] = entries.pop(key)
