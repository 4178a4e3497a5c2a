"""rANS on the CPU: encode and decode chunks in C, bit for bit as ``formats/rans.py``; any words and states are safe to decode."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy
import torch

from kvpack.formats import rans

from . import library

if TYPE_CHECKING:
    Numbers = numpy.ndarray[Any, Any]

_SYMBOLS = 256
_STEP = numpy.dtype([("reciprocal", "<u8"), ("bias", "<u4"), ("frequency", "<u4")])
"""``RansStep`` of ``interface.h``."""
_MOST = numpy.uint64(2**64 - 1)

MIN_SYMBOLS = 1 << 18
"""Symbols of a call for each of its threads: below it, starting one costs more than it saves."""


def decode(
    chunks: rans.Chunks, lengths: Numbers, tables: Numbers, table: Numbers, threads: int | None = None, level: int = 0
) -> rans.Decoded:
    """Run ``formats.rans.decode`` in the compiled library, which must exist; ``level`` is an index into ``library.levels()``."""
    compiled = library.library()
    assert compiled is not None
    count, longest = len(lengths), int(lengths.max(initial=0))
    words, states = numpy.ascontiguousarray(chunks.words, numpy.uint16), numpy.ascontiguousarray(chunks.states, numpy.uint32)
    first = numpy.ascontiguousarray(numpy.cumsum(chunks.counts) - chunks.counts, numpy.int64)
    slots = rans.slot_table(tables)
    if len(slots) != len(tables) * rans.TOTAL:
        # Unchecked tables that do not sum: not every slot would be in memory.
        return rans.decode_in_numpy(chunks, lengths, tables, table)
    lengths, symbols, read = (
        numpy.ascontiguousarray(lengths, numpy.int64),
        numpy.empty((count, longest), numpy.uint8),
        numpy.empty(count, numpy.int64),
    )
    of_chunks, of_symbols = _tables(table, len(tables), (count, longest))
    last = numpy.empty((count, rans.LANES), numpy.uint32)
    threads = min(library.checked_threads(threads, torch.get_num_threads()), 1 + int(lengths.sum()) // MIN_SYMBOLS)
    # Chunks of one call share no output, and a word beyond the last reads as 0.
    addresses = (array.ctypes.data for array in (words, first, states, lengths, slots))
    more = (array.ctypes.data for array in (symbols, read, last))
    call = library.Rans(*addresses, _address(of_chunks), _address(of_symbols), *more, count, len(words), longest, threads, level)
    if compiled.kvpack_rans(ctypes.byref(call)):
        raise MemoryError("not enough memory to decode: the buffers of a thread could not be allocated")
    return rans.Decoded(symbols, read, last)


def encode(symbols: Numbers, lengths: Numbers, tables: Numbers, table: Numbers, threads: int | None = None, level: int = 0) -> rans.Chunks:
    """Run ``formats.rans.encode`` in the compiled library, which must exist; ``level`` is an index into ``library.levels()``."""
    compiled = library.library()
    assert compiled is not None
    count, alphabet = len(lengths), tables.shape[1]
    symbols = numpy.ascontiguousarray(symbols, numpy.uint8)
    stride = symbols.shape[1]
    lengths = numpy.ascontiguousarray(lengths, numpy.int64)
    of_chunks, of_symbols = _tables(table, len(tables), symbols.shape)
    # Symbols without a frequency do not occur: none divides by zero.
    frequencies = numpy.maximum(tables, 1)
    steps = numpy.zeros((len(tables), _SYMBOLS), _STEP)
    steps["frequency"][:, :alphabet] = frequencies
    steps["reciprocal"][:, :alphabet] = numpy.where(frequencies == 1, _MOST, _MOST // frequencies.astype(numpy.uint64) + numpy.uint64(1))
    steps["bias"][:, :alphabet] = numpy.cumsum(tables, 1) - tables + (rans.TOTAL - 1) * (frequencies == 1)
    words, written = numpy.empty((count, stride), numpy.uint16), numpy.empty(count, numpy.int64)
    states = numpy.empty((count, rans.LANES), numpy.uint32)
    threads = min(library.checked_threads(threads, torch.get_num_threads()), 1 + int(lengths.sum()) // MIN_SYMBOLS)
    addresses = (array.ctypes.data for array in (steps, words, written, states))
    call = library.RansEncode(
        symbols.ctypes.data, lengths.ctypes.data, _address(of_chunks), _address(of_symbols), *addresses, count, stride, threads, level
    )
    if compiled.kvpack_rans_encode(ctypes.byref(call)):
        raise MemoryError("not enough memory to encode: the buffers of a thread could not be allocated")
    none = numpy.empty(0, numpy.uint16)
    return rans.Chunks(numpy.concatenate([none, *(row[stride - own :] for row, own in zip(words, written, strict=True))]), written, states)


def _tables(table: Numbers, count: int, shape: tuple[int, ...]) -> tuple[Numbers | None, Numbers | None]:
    """Return table numbers below ``count``: per chunk, int64, or per symbol, uint8 of ``shape``; the other one is None."""
    if table.ndim == 1:
        return numpy.ascontiguousarray(table, numpy.int64), None
    result = numpy.ascontiguousarray(table, numpy.uint8)
    # C reads where they say.
    assert result.shape == shape
    assert int(result.max(initial=0)) < count
    return None, result


def _address(array: Numbers | None) -> int | None:
    return None if array is None else array.ctypes.data
