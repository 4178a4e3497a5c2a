"""Encoding of column levels into chunks, and decoding of chunks to symbols, for the transform codec (spec/codecs/transform.md).

Everything here is exact integer arithmetic; ``transform.py`` interprets the symbols.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from . import rans
from .errors import ValueTooLarge
from .lazy import numpy, torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .frames import SymbolTables

    Numbers = numpy.ndarray[Any, Any]

ESCAPE_WORDS = 2


class Symbols(NamedTuple):
    """Decoded symbols of chunks, uint8 ``[chunk, symbol]``, in column order.

    ``columns`` and ``tokens`` are the column and token counts of each chunk. ``table`` is the table index of every symbol, uint8 ``[chunk,
    symbol]``. ``escaped`` contains the levels that follow escape symbols, in the order of the symbols of all chunks. For each chunk,
    ``read`` is the number of words read, ``counts`` is the number of words stored, and ``states`` are the final states.
    """

    symbols: Numbers
    columns: Numbers
    tokens: Numbers
    table: Numbers
    escaped: Numbers
    read: Numbers
    counts: Numbers
    states: Numbers


def encode_chunks(groups: Sequence[Numbers], tables: SymbolTables, table_indices: Numbers, shape: tuple[int, int]) -> dict[str, Numbers]:
    """Encode levels to all streams except ``positions``.

    ``groups`` contains, for each token group, the levels, int64 ``[batch, kv_head, column of the block, token]``. ``table_indices``
    ``[kv_head, column]`` selects a table for each column. ``shape`` is (batch, kv_head). Raises ValueTooLarge for levels that a table
    cannot encode.
    """
    batch, heads = shape
    chunks = [(levels[b, h], table_indices[h]) for levels in groups for b in range(batch) for h in range(heads)]
    columns = numpy.array([_used_columns(levels) for levels, _ in chunks], numpy.int64)
    sizes = numpy.array([levels.shape[1] for levels, _ in chunks], numpy.int64)
    longest = int((columns * sizes).max(initial=0))
    symbols, table = numpy.zeros((len(chunks), longest), numpy.uint8), numpy.zeros((len(chunks), longest), numpy.uint8)
    escapes = []
    for number, (levels, table_numbers) in enumerate(chunks):
        used, size = int(columns[number]), int(columns[number] * sizes[number])
        used_levels = levels[:used].reshape(-1)
        table[number, :size] = numpy.repeat(table_numbers[:used], sizes[number])
        result = numpy.where(numpy.abs(used_levels) <= tables.max_level, used_levels + (tables.max_level + 1), 0)
        result[tables.frequencies[table[number, :size], result] == 0] = 0
        if not tables.frequencies[table[number, :size], result].all():
            raise ValueTooLarge(
                "a value's level has no symbol in its table, and the table has no escape symbol: choose another number of "
                "bits"
            )
        symbols[number, :size] = result
        escapes.append(used_levels[result == 0].astype("<i4").view("<u2"))
    encoded = rans.encode(symbols, columns * sizes, tables.frequencies, table)
    ends = numpy.cumsum(encoded.counts)
    words = []
    for end, count, escaped in zip(ends, encoded.counts, escapes, strict=True):
        words += [encoded.words[end - count : end], escaped]
    counts = encoded.counts + numpy.array([len(escaped) for escaped in escapes], numpy.int64)

    def arrange_rows(values: Numbers) -> Numbers:
        return numpy.moveaxis(values.reshape(len(groups), batch, heads, *values.shape[1:]), 0, 2)

    return {
        "tokens": arrange_rows(sizes)[:, :1],
        "columns": arrange_rows(columns),
        "states": arrange_rows(encoded.states.astype("<u4").view("<u2").reshape(-1, 2 * rans.LANES)),
        "word_counts": arrange_rows(split_halves(counts)),
        "words": numpy.concatenate([*words, numpy.empty(0, numpy.uint16)])[None, None],
    }


class ChunkList(NamedTuple):
    """Sizes and positions of a codec's chunks, ordered by token group, sequence and head.

    ``columns``, ``tokens`` and ``counts`` are the column, token and word counts of each chunk. ``ends`` contains the index in ``words``
    after each chunk. ``states`` are uint16 ``[batch, kv_head, row, ...]``, and ``tables`` ``[kv_head, column]`` are the table indices of
    the columns.
    """

    columns: Numbers
    tokens: Numbers
    counts: Numbers
    ends: Numbers
    words: Numbers
    states: Numbers
    tables: Numbers

    @classmethod
    def from_streams(cls, streams: Mapping[str, torch.Tensor], tables: Numbers, chunk: int) -> ChunkList:
        """Return the chunks of ``streams``, which have up to ``chunk`` tokens each."""
        batch, heads, rows = streams["columns"].shape
        columns = numpy.minimum(flatten_chunks(streams["columns"]), tables.shape[1])
        counts = join_halves(flatten_chunks(streams["word_counts"]))
        tokens = numpy.minimum(flatten_chunks(streams["tokens"].expand(batch, heads, rows)), chunk)
        words, states = (streams[name].detach().cpu().numpy() for name in ("words", "states"))
        return cls(columns, tokens, counts, numpy.cumsum(counts), words.reshape(-1), states, tables)

    def symbols(self, start: int, stop: int, tables: SymbolTables) -> Symbols:
        """Decode the chunks ``[start:stop]`` to symbols."""
        batch, heads, _ = self.states.shape[:3]
        row, sequence, head = numpy.unravel_index(numpy.arange(start, stop), (self.states.shape[2], batch, heads))
        counts = self.counts[start:stop]
        begin = int(self.ends[start] - self.counts[start]) if stop > start else 0
        words = self.words[begin : begin + int(counts.sum())]
        table_numbers = self.tables[head]
        return decode_symbols(
            self.columns[start:stop], self.tokens[start:stop], counts, self.states[sequence, head, row], words, table_numbers, tables
        )


def decode_symbols(
    columns: Numbers, tokens: Numbers, counts: Numbers, states: Numbers, words: Numbers, table_indices: Numbers, tables: SymbolTables
) -> Symbols:
    """Decode chunks to symbols. ``words`` contains the words of all chunks.

    ``columns``, ``tokens`` and ``counts`` are the column, token and word counts of each chunk. ``states`` are words ``[chunk, 2 · LANES]``,
    and ``table_indices`` ``[chunk, column]`` selects a table for each column.
    """
    lengths = columns * tokens
    table = numpy.zeros((len(columns), int(lengths.max(initial=0))), numpy.uint8)
    for number, size in enumerate(lengths):
        table[number, :size] = numpy.repeat(table_indices[number, : columns[number]], tokens[number])
    first = numpy.ascontiguousarray(states.reshape(-1, 2 * rans.LANES), "<u2").view("<u4")
    decoded = rans.decode(rans.Chunks(words, counts, first), lengths, tables.frequencies, table)
    symbols = decoded.symbols
    symbols[numpy.arange(symbols.shape[1]) >= lengths[:, None]] = 1
    escapes = (symbols == 0).sum(1)
    begins = numpy.cumsum(counts) - counts + decoded.read
    # A chunk with too few words for its escapes reads others, which the count of read words reveals.
    at = numpy.repeat(begins - ESCAPE_WORDS * (numpy.cumsum(escapes) - escapes), escapes) + ESCAPE_WORDS * numpy.arange(escapes.sum())
    pairs = words.astype(numpy.int64) if len(words) else numpy.zeros(1, numpy.int64)
    escaped = (pairs.take(at, mode="clip") | pairs.take(at + 1, mode="clip") << 16).astype(numpy.uint32).view(numpy.int32)
    return Symbols(symbols, columns, tokens, table, escaped, decoded.read + ESCAPE_WORDS * escapes, counts, decoded.states)


def decode_levels(symbols: Symbols, tables: SymbolTables, dim: int) -> list[Numbers]:
    """Return the levels of each chunk, int64 ``[column, token]``, for all ``dim`` columns."""
    levels = symbols.symbols.astype(numpy.int64) - (tables.max_level + 1)
    levels[symbols.symbols == 0] = symbols.escaped
    whole = []
    for chunk_levels, columns, tokens in zip(levels, symbols.columns, symbols.tokens, strict=True):
        whole.append(numpy.zeros((dim, tokens), numpy.int64))
        whole[-1][:columns] = chunk_levels[: columns * tokens].reshape(columns, tokens)
    return whole


def _used_columns(levels: Numbers) -> int:
    """Return the number of columns up to the last one with a nonzero level. ``levels`` are ``[column, token]``."""
    used = numpy.flatnonzero(levels.any(1))
    return int(used[-1]) + 1 if len(used) else 0


def flatten_chunks(stream: torch.Tensor) -> Numbers:
    """Flatten rows ``[batch, kv_head, row, ...]`` of 16-bit numbers to int64, ordered by row, then sequence, then head."""
    result: Numbers = numpy.moveaxis(stream.cpu().numpy().astype(numpy.int64), 2, 0)
    return result.reshape(-1, *result.shape[3:])


def join_halves(pairs: Numbers) -> Numbers:
    """Join low and high 16-bit halves ``[..., 2]`` into 32-bit numbers, as int64 ``[...]``."""
    result: Numbers = pairs[..., 0] | pairs[..., 1] << 16
    return result


def split_halves(values: Numbers) -> Numbers:
    """Split ``values`` into low and high 16-bit halves, uint16 ``[..., 2]``."""
    return numpy.stack([values & 0xFFFF, values >> 16], -1).astype(numpy.uint16)


def to_stream(numbers: Numbers, device: torch.device) -> torch.Tensor:
    """Convert 16-bit ``numbers`` to a stream on ``device``."""
    return torch.from_numpy(numpy.array(numbers, numpy.uint16, order="C")).to(device)
