"""Bytes of a file, read and digested in one call, during which other threads run."""

from __future__ import annotations

from ctypes import addressof, byref
from typing import TYPE_CHECKING

import numpy
import xxhash

from . import library

if TYPE_CHECKING:
    from collections.abc import Sequence

FEWEST_BYTES = 241
"""Bytes of the shortest part that is digested here: XXH3 mixes shorter ones in other ways."""


def read(descriptor: int, offset: int, memory: memoryview, parts: Sequence[tuple[int, int]], level: int = 0) -> list[bytes] | None:
    """Read bytes from ``offset`` of a file into all of ``memory``; the XXH3-128 of its parts ``[begin, end)``, in their order there.

    None where the file could not be read, or ends before: then the content of ``memory`` is undefined. An interrupted call goes on.
    """
    compiled = library.library()
    assert compiled is not None
    assert all(stop <= begin for (_, stop), (begin, _) in zip(((0, 0), *parts), (*parts, (len(memory), 0)), strict=True))
    long = [(begin, end) for begin, end in parts if end - begin >= FEWEST_BYTES]
    found = (library.Part * len(long))(*(library.Part(begin, end, 0, 0) for begin, end in long))
    data = numpy.frombuffer(memory, numpy.uint8)
    call = library.Read(descriptor, offset, data.ctypes.data, len(memory), addressof(found), len(long), level)
    if compiled.kvpack_read(byref(call)):
        return None
    digests = ((part.high << 64 | part.low).to_bytes(16, "big") for part in found)
    return [next(digests) if end - begin >= FEWEST_BYTES else xxhash.xxh3_128_digest(memory[begin:end]) for begin, end in parts]
