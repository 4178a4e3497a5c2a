"""rANS: the entropy coder of codecs whose sizes depend on their values (spec/rans.md).

A chunk is a sequence of symbols that is coded independently. It has ``LANES`` lanes: lane i mod ``LANES`` codes symbol i, and all lanes
share one sequence of 16-bit words. Everything is integer arithmetic in NumPy, vectorized over all lanes of many chunks, so that files can
be checked without torch. Source: J. Duda, Asymmetric numeral systems (arXiv 1311.2540); F. Giesen, Interleaved entropy coders (arXiv
1402.3392).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import InvalidPayload
from .lazy import numpy
from .value_blocks import first_index, row_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .value_blocks import Array

    Numbers = numpy.ndarray[Any, Any]

LANES = 32
PRECISION = 12
"""Number of bits of a frequency: the frequencies of a table sum to 2^PRECISION."""
TOTAL = 1 << PRECISION
MIN_STATE = 1 << 16
"""Smallest state of a lane; states are below 2^32.

It is also the state before the first symbol is encoded and after the last is decoded.
"""

MAX_SYMBOLS = 1 << 16
"""Maximum number of symbols in a chunk, so that 16 bits can count its words."""


class Chunks(NamedTuple):
    """Encoded chunks.

    ``words``, uint16 ``[word]``, contains the words of all chunks. ``counts``, int64 ``[chunk]``, is the number of words in each chunk.
    ``states``, uint32 ``[chunk, LANES]``, are the states at the start of decoding.
    """

    words: Numbers
    counts: Numbers
    states: Numbers


class DecodedChunks(NamedTuple):
    """Decoded ``symbols``, uint8 ``[chunk, symbol]``.

    ``read`` is the number of words read from each chunk, and ``states`` are the final states of its lanes.
    """

    symbols: Numbers
    read: Numbers
    states: Numbers

    def faulty_chunks(self, counts: Numbers) -> Numbers:
        """Return a mask of the chunks that are invalid.

        A chunk is valid if exactly ``counts`` words were read from it, and all of its final states are ``MIN_STATE``.
        """
        result: Numbers = (self.read != counts) | (self.states != MIN_STATE).any(1)
        return result


def frequencies(counts: Numbers) -> Numbers:
    """Return frequencies proportional to ``counts``, int64 ``[table, symbol]``.

    They sum to ``TOTAL`` and are at least 1 for nonzero counts. If all counts of a table are 0, symbol 0 gets the frequency ``TOTAL``.
    """
    counts = counts.astype(numpy.int64)
    counts[:, 0] += counts.sum(1) == 0
    sums = counts.sum(1, keepdims=True)
    result: Numbers = numpy.maximum((counts * TOTAL + sums // 2) // sums, counts > 0)
    rows, excess = numpy.arange(len(result)), result.sum(1) - TOTAL
    while excess.any():
        # Adjust the largest frequency, which changes the least in proportion.
        change = numpy.minimum(excess, 1)
        result[rows, result.argmax(1)] -= change
        excess -= change
    return result


def cost_bits(counts: Numbers, frequencies: Numbers) -> Numbers:
    """Return the number of bits, ``[table]``, that symbols with these ``counts`` take with the ``frequencies``.

    The result is infinite if a symbol that occurs has frequency 0.
    """
    with numpy.errstate(divide="ignore"):
        bits = PRECISION - numpy.log2(frequencies.astype(numpy.float64))
    result: Numbers = (counts * numpy.where(counts > 0, bits, 0.0)).sum(1)
    return result


compiled_encoder: Callable[[Numbers, Numbers, Numbers, Numbers], Chunks | None] | None = None
"""A faster equivalent of ``encode_in_numpy``, set by ``kvpack.coding.dispatch``. It returns None if it does not support the call."""


def encode(symbols: Numbers, lengths: Numbers, tables: Numbers, table_indices: Numbers) -> Chunks:
    """Encode with ``compiled_encoder`` if it is set and supports the call; otherwise, with ``encode_in_numpy``."""
    result = compiled_encoder(symbols, lengths, tables, table_indices) if compiled_encoder is not None else None
    return encode_in_numpy(symbols, lengths, tables, table_indices) if result is None else result


def encode_in_numpy(symbols: Numbers, lengths: Numbers, tables: Numbers, table_indices: Numbers) -> Chunks:
    """Encode the first ``lengths[i]`` symbols of each chunk i with the frequencies ``tables``, ``[table, symbol]``.

    ``table_indices`` contains the table index of each chunk, ``[chunk]``, or of each symbol, ``[chunk, symbol]``. Every symbol must have a
    frequency above 0.
    """
    chunks, longest = len(symbols), int(lengths.max(initial=0))
    steps = -(-longest // LANES)
    starts = numpy.cumsum(tables, 1) - tables
    states = numpy.full((chunks, LANES), MIN_STATE, numpy.uint64)
    words = numpy.zeros((chunks, steps, LANES), numpy.uint16)
    written = numpy.zeros((chunks, steps, LANES), bool)
    padded = numpy.zeros((chunks, steps * LANES), symbols.dtype)
    padded[:, :longest] = symbols[:, :longest]
    for step in reversed(range(steps)):
        part, rows = padded[:, step * LANES : (step + 1) * LANES], _step_tables(table_indices, step)
        frequency, start = tables[rows, part].astype(numpy.uint64), starts[rows, part].astype(numpy.uint64)
        active = numpy.arange(step * LANES, (step + 1) * LANES) < lengths[:, None]
        full = active & (states >= frequency << numpy.uint64(32 - PRECISION))
        written[:, step], words[:, step] = full, states & numpy.uint64(0xFFFF)
        states = numpy.where(full, states >> numpy.uint64(16), states)
        quotient, remainder = numpy.divmod(states, numpy.maximum(frequency, numpy.uint64(1)))
        states = numpy.where(active, (quotient << numpy.uint64(PRECISION)) + remainder + start, states)
    return Chunks(words[written], written.sum((1, 2), dtype=numpy.int64), states.astype(numpy.uint32))


compiled_decoder: Callable[[Chunks, Numbers, Numbers, Numbers], DecodedChunks | None] | None = None
"""A faster equivalent of ``decode_in_numpy``, set by ``kvpack.coding.dispatch``. It returns None if it does not support the call."""


def decode(chunks: Chunks, lengths: Numbers, tables: Numbers, table_indices: Numbers) -> DecodedChunks:
    """Decode with ``compiled_decoder`` if it is set and supports the call; otherwise, with ``decode_in_numpy``."""
    result = compiled_decoder(chunks, lengths, tables, table_indices) if compiled_decoder is not None else None
    return decode_in_numpy(chunks, lengths, tables, table_indices) if result is None else result


def decode_in_numpy(chunks: Chunks, lengths: Numbers, tables: Numbers, table_indices: Numbers) -> DecodedChunks:
    """Decode the first ``lengths[i]`` symbols of each chunk i to uint8. Symbols after a chunk's last one are undefined.

    The frequencies ``tables``, ``[table, symbol]``, sum to ``TOTAL``. ``table_indices`` contains the table index of each chunk,
    ``[chunk]``, or of each symbol, ``[chunk, symbol]``. Any words, counts and states are safe to decode; ``DecodedChunks.faulty_chunks``
    finds chunks that no encoder produces.
    """
    count, longest = len(lengths), int(lengths.max(initial=0))
    steps, shortest = -(-longest // LANES), int(lengths.min(initial=longest))
    slots = slot_table(tables)
    symbols = numpy.empty((steps, count, LANES), numpy.uint8)
    begins = numpy.cumsum(chunks.counts) - chunks.counts
    # A chunk with too few words reads words of other chunks, which the count of read words reveals.
    words = chunks.words.astype(numpy.uint32) if len(chunks.words) else numpy.zeros(1, numpy.uint32)
    at, states = begins.copy(), chunks.states.astype(numpy.uint32).reshape(-1)
    for step in range(steps):
        slot = states & numpy.uint32(TOTAL - 1)
        first = numpy.broadcast_to(_step_tables(table_indices, step) * TOTAL, (count, LANES)).reshape(-1)
        entries = slots.take(first + slot, mode="clip")
        symbols[step] = (entries & numpy.uint32(0xFF)).reshape(count, LANES)
        following = ((entries >> numpy.uint32(8) & numpy.uint32(TOTAL - 1)) + numpy.uint32(1)) * (states >> numpy.uint32(PRECISION))
        following += slot - (entries >> numpy.uint32(20))
        low = following < MIN_STATE
        if (step + 1) * LANES > shortest:
            active = (numpy.arange(step * LANES, (step + 1) * LANES) < lengths[:, None]).reshape(-1)
            low &= active
            following = numpy.where(active, following, states)
        places = numpy.flatnonzero(low)
        words_needed = numpy.count_nonzero(low.reshape(count, LANES), 1)
        sources = numpy.arange(len(places)) + numpy.repeat(at - numpy.cumsum(words_needed) + words_needed, words_needed)
        following[places] = following[places] << numpy.uint32(16) | words.take(sources, mode="clip")
        at += words_needed
        states = following
    in_order = symbols.transpose(1, 0, 2).reshape(count, steps * LANES)[:, :longest]
    return DecodedChunks(in_order, at - begins, states.reshape(count, LANES))


def _step_tables(table_indices: Numbers, step: int) -> Numbers:
    """Return the table index of each symbol in a step, int64 ``[chunk, LANES]``, or ``[chunk, 1]`` if each chunk has one table."""
    if table_indices.ndim == 1:
        return table_indices[:, None].astype(numpy.int64)
    result = numpy.zeros((len(table_indices), LANES), numpy.int64)
    part = table_indices[:, step * LANES : (step + 1) * LANES]
    result[:, : part.shape[1]] = part
    return result


def slot_table(tables: Numbers) -> Numbers:
    """Return the slots of all tables one after another, uint32 ``[table · slot]``.

    A slot contains its symbol in the lowest byte, the symbol's frequency - 1 from bit 8 on, and the symbol's first slot from bit 20 on.
    """
    tables = tables.astype(numpy.int64)
    starts = numpy.cumsum(tables, 1) - tables
    packed = numpy.arange(tables.shape[1]) | (tables - 1 << 8) | starts << 20
    return numpy.repeat((packed & 0xFFFFFFFF).astype(numpy.uint32).reshape(-1), tables.reshape(-1))


def check_states(states: Array, where: str) -> None:
    """Raise InvalidPayload for an initial state below 2^16. ``states`` are uint16 ``[..., 2 · LANES]``, low halves first."""
    for first, (block,) in row_blocks(states):
        low = block[:, 1::2] == 0
        if low.any():
            at = first_index(low, first * LANES, (*states.shape[:-1], LANES))
            raise InvalidPayload(f"{where}.states: the state at {at} is {block[:, ::2][low][0]}, expected at least {MIN_STATE}")


def check_ends(decoded: DecodedChunks, counts: Numbers, chunk_position: Callable[[int], Sequence[int]], where: str) -> None:
    """Raise InvalidPayload for the first chunk that no encoder produces.

    ``counts`` contains the number of words of each chunk. ``chunk_position`` returns the indices of a chunk for the message.
    """
    faulty = decoded.faulty_chunks(counts)
    if faulty.any():
        first = int(faulty.argmax())
        raise InvalidPayload(
            f"{where}.words: the chunk at {list(chunk_position(first))} uses {decoded.read[first]} of its {counts[first]} words "
            f"and ends in the states {sorted({int(state) for state in decoded.states[first]})[:4]}, expected all words and the final state "
            f"{MIN_STATE}"
        )
