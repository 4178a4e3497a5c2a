"""The checksum of page rows (spec/row.md), computed in C."""

from __future__ import annotations

import numpy

from . import library


def add_words(data: memoryview, checksum: int) -> int:
    """Return ``checksum`` updated with the 4-byte words of ``data``. The length of ``data`` must be a multiple of 4."""
    c_library = library.library()
    assert c_library is not None
    address = numpy.frombuffer(data, numpy.uint8).ctypes.data
    result: int = c_library.kvpack_checksum(address, len(data) // 4, checksum)
    return result
