"""rANS entropy coding in C, with the same results as ``formats/rans.py``. Decoding is safe for any words and states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from kvpack.formats import rans
from kvpack.runtime.memory import empty

from . import library

if TYPE_CHECKING:
    from collections.abc import Sequence

    Numbers = numpy.ndarray[Any, Any]

_ALPHABET = 256
_STEP = numpy.dtype([("reciprocal", "<u8"), ("bias", "<u4"), ("frequency", "<u4")])
"""NumPy equivalent of ``RansStep`` in ``interface.h``."""
_MAX_UINT64 = numpy.uint64(2**64 - 1)

MIN_SYMBOLS = 1 << 18
"""Minimum number of symbols per thread. With fewer, starting another thread costs more than it saves."""


def decode(
    chunks: rans.Chunks, lengths: Numbers, tables: Numbers, table_indices: Numbers, threads: int | None = None, level: int = 0
) -> rans.DecodedChunks:
    """Decode ``chunks`` in C as ``formats.rans.decode`` does.

    The library must be loaded, and ``level`` is an index into its ``levels()``.
    """
    count, longest = len(lengths), int(lengths.max(initial=0))
    words, states = numpy.ascontiguousarray(chunks.words, numpy.uint16), numpy.ascontiguousarray(chunks.states, numpy.uint32)
    first = numpy.ascontiguousarray(numpy.cumsum(chunks.counts) - chunks.counts, numpy.int64)
    slots = rans.slot_table(tables)
    if len(slots) != len(tables) * rans.TOTAL:
        # With a wrong total in an unchecked table, C would read past the end of the slots.
        return rans.decode_in_numpy(chunks, lengths, tables, table_indices)
    lengths, symbols, read = (
        numpy.ascontiguousarray(lengths, numpy.int64),
        numpy.empty((count, longest), numpy.uint8),
        numpy.empty(count, numpy.int64),
    )
    chunk_tables, symbol_tables = _split_table(table_indices, len(tables), (count, longest))
    last = numpy.empty((count, rans.LANES), numpy.uint32)
    threads = library.thread_count(threads, 1 + int(lengths.sum()) // MIN_SYMBOLS)
    # Chunks do not share output, and words past the end are read as 0.
    addresses = (array.ctypes.data for array in (words, first, states, lengths, slots))
    output_addresses = (array.ctypes.data for array in (symbols, read, last))
    call = library.RansDecodeArguments(
        *addresses, _address(chunk_tables), _address(symbol_tables), *output_addresses, count, len(words), longest, threads, level
    )
    library.run("rans", call, "decode")
    return rans.DecodedChunks(symbols, read, last)


def encode(
    symbols: Numbers, lengths: Numbers, tables: Numbers, table_indices: Numbers, threads: int | None = None, level: int = 0
) -> rans.Chunks:
    """Encode symbols in C as ``formats.rans.encode`` does. The library must be loaded, and ``level`` is an index into its ``levels()``."""
    return join_chunks([encode_separately(symbols, lengths, tables, table_indices, threads, level)])


class SeparateChunks(NamedTuple):
    """Encoded chunks as in ``rans.Chunks``, except that each chunk has its own array of words."""

    words: list[Numbers]
    counts: Numbers
    states: Numbers


def join_chunks(parts: Sequence[SeparateChunks]) -> rans.Chunks:
    """Concatenate the chunks of all ``parts`` into one ``rans.Chunks``."""
    words = [row for part in parts for row in part.words]
    # Use memory in huge pages, as for other large results, so that page faults are rare.
    joined = empty((sum(map(len, words)),), torch.uint16, torch.device("cpu")).view(torch.int16).numpy().view(numpy.uint16)
    if len(joined):
        numpy.concatenate(words, out=joined)
    return rans.Chunks(joined, *(numpy.concatenate([part[index] for part in parts]) for index in (1, 2)))


def encode_separately(
    symbols: Numbers, lengths: Numbers, tables: Numbers, table_indices: Numbers, threads: int | None = None, level: int = 0
) -> SeparateChunks:
    """Encode symbols as ``encode`` does, but leave the words of each chunk in their own array."""
    count, alphabet = len(lengths), tables.shape[1]
    symbols = numpy.ascontiguousarray(symbols, numpy.uint8)
    stride = symbols.shape[1]
    lengths = numpy.ascontiguousarray(lengths, numpy.int64)
    chunk_tables, symbol_tables = _split_table(table_indices, len(tables), symbols.shape)
    # Symbols with frequency 0 do not occur; 1 avoids a division by zero.
    frequencies = numpy.maximum(tables, 1)
    steps = numpy.zeros((len(tables), _ALPHABET), _STEP)
    steps["frequency"][:, :alphabet] = frequencies
    steps["reciprocal"][:, :alphabet] = numpy.where(
        frequencies == 1, _MAX_UINT64, _MAX_UINT64 // frequencies.astype(numpy.uint64) + numpy.uint64(1)
    )
    steps["bias"][:, :alphabet] = numpy.cumsum(tables, 1) - tables + (rans.TOTAL - 1) * (frequencies == 1)
    words, written = numpy.empty((count, stride), numpy.uint16), numpy.empty(count, numpy.int64)
    states = numpy.empty((count, rans.LANES), numpy.uint32)
    threads = library.thread_count(threads, 1 + int(lengths.sum()) // MIN_SYMBOLS)
    addresses = (array.ctypes.data for array in (steps, words, written, states))
    call = library.RansEncodeArguments(
        symbols.ctypes.data, lengths.ctypes.data, _address(chunk_tables), _address(symbol_tables), *addresses, count, stride, threads, level
    )
    library.run("rans_encode", call, "encode")
    return SeparateChunks([row[stride - word_count :] for row, word_count in zip(words, written, strict=True)], written, states)


def _split_table(table_indices: Numbers, count: int, shape: tuple[int, ...]) -> tuple[Numbers | None, Numbers | None]:
    """Return ``table_indices`` as C reads it: one int64 index per chunk, or one uint8 index per symbol. The other element is None.

    The indices select one of ``count`` frequency tables, and ``shape`` is the shape of the symbols.
    """
    if table_indices.ndim == 1:
        return numpy.ascontiguousarray(table_indices, numpy.int64), None
    result = numpy.ascontiguousarray(table_indices, numpy.uint8)
    # C uses these indices without a check.
    assert result.shape == shape
    assert int(result.max(initial=0)) < count
    return None, result


def _address(array: Numbers | None) -> int | None:
    return None if array is None else array.ctypes.data
