"""Several requests to a server under way at once."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    Item = TypeVar("Item")
    Result = TypeVar("Result")


def in_parallel(call: Callable[[Item], Result], items: Iterable[Item], at_once: int) -> Generator[Result, None, None]:
    """``call(item)`` for every item, in order, with up to ``at_once`` under way; what is not begun when the iterator closes never is."""
    rest = iter(items)
    first = list(islice(rest, at_once))
    if len(first) < 2:
        yield from map(call, first)
        yield from map(call, rest)
        return
    with ThreadPoolExecutor(len(first)) as pool:
        waiting = deque(pool.submit(call, item) for item in first)
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(call, item) for item in islice(rest, 1))
                yield result
        finally:
            for future in waiting:
                future.cancel()
