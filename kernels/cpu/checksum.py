"""The checksum of rows in C (spec/row.md)."""

from __future__ import annotations

import numpy

from . import library


def added(data: memoryview, sum_: int) -> int:
    """Add the words of ``data``, whose length is a multiple of 4, to the checksum ``sum_``."""
    compiled = library.library()
    assert compiled is not None
    address = numpy.frombuffer(data, numpy.uint8).ctypes.data
    result: int = compiled.kvpack_checksum(address, len(data) // 4, sum_)
    return result
