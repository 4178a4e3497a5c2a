"""Damage the golden files in every way and count undetected cases: ``python -m support.golden_damage``.

For every file, the program flips every bit, truncates the file at every length, zeroes every block, and swaps and repeats tensors. It
counts the cases that raise no KvpackError. This takes a few minutes.
"""

from __future__ import annotations

import itertools
import sys
import time
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from kvpack.file import container, front
from kvpack.formats.errors import KvpackError
from support.golden_files import FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from kvpack.file.header import Header

FILES = sorted(FOLDER.glob("*.kvpack"))
BLOCKS = (64, 512, 4096)


@contextmanager
def cache_fronts() -> Iterator[None]:
    """Cache parsed header tensors and JSON headers while the context is active, because their bytes seldom change here."""
    parse, make = front.parse_header, front.make_front
    fronts: dict[int, tuple[Header, front.Front]] = {}

    def make_once(header: Header) -> front.Front:
        # The header is kept alive, so that its id stays unique.
        if id(header) not in fronts:
            fronts[id(header)] = header, make(header)
        return fronts[id(header)][1]

    front.parse_header, front.make_front = cache(parse), make_once
    try:
        yield
    finally:
        front.parse_header, front.make_front = parse, make


def is_refused(data: bytes | bytearray | memoryview) -> bool:
    """Return True if a reader refuses ``data`` with a KvpackError. Other exceptions are raised."""
    try:
        container.open_bytes(data).verify()
    except KvpackError:
        return True
    return False


def accepted_flips(data: bytes, bits: Iterable[int]) -> list[int]:
    """Return the bits in ``bits`` whose flip is not detected."""
    damaged, accepted = bytearray(data), []
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
        if not is_refused(damaged):
            accepted.append(bit)
        damaged[bit // 8] ^= 1 << bit % 8
    return accepted


def accepted_lengths(data: bytes, lengths: Iterable[int]) -> list[int]:
    """Return the lengths in ``lengths`` at which truncation of the file is not detected."""
    return [length for length in lengths if not is_refused(memoryview(data)[:length])]


def zeroed_blocks(data: bytes) -> Iterator[bytes]:
    """Yield the file with one block replaced by zeros, for every block that is not zero."""
    for block in BLOCKS:
        for at in range(0, len(data), block):
            if any(data[at : at + block]):
                yield data[:at] + bytes(len(data[at : at + block])) + data[at + block :]


def moved_tensors(data: bytes) -> Iterator[bytes]:
    """Yield the file with two tensors of equal size swapped, and with one replaced by the other, if that changes a byte."""
    file = container.open_bytes(data)
    start = len(file.front.text)
    places = [(start + place.begin, start + place.end) for place in file.front.places.values()]
    for (a, b), (c, d) in itertools.combinations(places, 2):
        first, second = data[a:b], data[c:d]
        if b - a == d - c and first != second:
            for here, there in ((second, first), (first, first), (second, second)):
                yield data[:a] + here + data[b:c] + there + data[d:]


def count_damage(path: Path) -> dict[str, tuple[int, int]]:
    """Return, for every kind of damage, the number of cases tried on a file, and how many of these were not refused."""
    data = path.read_bytes()
    found = {
        "flipped bits": (8 * len(data), len(accepted_flips(data, range(8 * len(data))))),
        "truncations": (len(data), len(accepted_lengths(data, range(len(data))))),
    }
    kinds: dict[str, Callable[[bytes], Iterator[bytes]]] = {"zeroed blocks": zeroed_blocks, "swapped and repeated tensors": moved_tensors}
    for kind, make in kinds.items():
        refused = [is_refused(damaged) for damaged in make(data)]
        found[kind] = len(refused), refused.count(False)
    return found


def main() -> int:
    total: dict[str, tuple[int, int]] = {}
    start = time.monotonic()
    for path in FILES:
        with cache_fronts():
            for kind, (done, accepted) in count_damage(path).items():
                before = total.get(kind, (0, 0))
                total[kind] = before[0] + done, before[1] + accepted
        print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)
    for kind, (done, accepted) in total.items():
        print(f"{kind} in {len(FILES)} files: {done:,}, not refused: {accepted}")
    return 1 if any(accepted for _, accepted in total.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
