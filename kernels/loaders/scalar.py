"""scalar as tiles (spec/codecs/scalar.md): values from a table, two or four fields at a time where their index is short."""

# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.kernels.tables.shared_table import look_up_bits
from kvpack.kernels.words.fields import load_planes, position_of_step, whole_planes, words_of_step
from kvpack.kernels.words.halves import load_factors, read_factors

from .tiles import Stream, TilePacking, Tiles, distance, fields_side_by_side, plane_streams, step_symbols, tile_packing

if TYPE_CHECKING:
    from kvpack.formats.columns import Columns
    from kvpack.formats.scalar import Scalar

MOST_INDEX_BITS = 8
"""Of several fields: 256 entries fit shared memory once a bank."""


class Part(NamedTuple):
    """The channels of one width: fields of ``bits``, ``beside`` of them side by side in a tile and ``apart`` from each other.

    ``together`` neighbouring fields share an index into the table, from ``first_entry`` on.
    """

    bits: int
    beside: int
    together: int
    first_entry: int
    steps: int
    apart: int


class Constants(NamedTuple):
    """What the functions below know of a codec and its tiles: each width of its channels has a packing and a part.

    Of ``parts`` of one, ``low`` and ``high`` are the same.
    """

    low: TilePacking
    high: TilePacking
    low_part: Part
    high_part: Part
    parts: int
    norm_stream: int
    norm_bits: int


def tiles(codec: Scalar, paired: int = 0) -> Tiles:
    """The loader of ``codec``: one code stream for each width of its channels. ``paired`` is that of the result."""
    streams: tuple[Stream, ...] = ()
    tables: list[torch.Tensor] = []
    packings: list[TilePacking] = []
    parts: list[Part] = []
    all_steps = 0
    channels: list[tuple[int, ...]] = []
    stored = (codec.magnitude_table, codec.high_magnitude_table)
    for (name, packing), part, table in zip(codec.packings().items(), codec.parts, stored, strict=False):
        magnitudes = torch.frombuffer(bytearray(table), dtype=torch.float32)
        values = torch.cat([magnitudes, -magnitudes])
        beside = fields_side_by_side(packing, paired)
        together = 1 if codec.bits_high else next(n for n in (4, 2, 1) if _looked_up_together(packing, part.bits, n, beside))
        apart = distance(packing, together * part.bits, packing.fields // together, paired)
        symbols = step_symbols(packing, apart, together, paired)
        steps = len(symbols) // together
        all_steps += steps
        packings.append(tile_packing(len(streams), packing, paired))
        parts.append(Part(part.bits, beside, together, sum(map(len, tables)), steps, apart))
        tables.append(_entries(values, together))
        channels += [tuple(part.channels[symbol] if symbol >= 0 else -1 for symbol in tile) for tile in symbols]
        streams = (*streams, *plane_streams(name, packing))
    norm_bits = 16 if codec.norm == "fp16" else 32
    constants = Constants(
        low=packings[0],
        high=packings[-1],
        low_part=parts[0],
        high_part=parts[-1],
        parts=len(parts),
        norm_stream=len(streams),
        norm_bits=norm_bits,
    )
    streams = (*streams, Stream("norm", norm_bits, 1))
    return Tiles(
        load,
        decode,
        factor,
        constants,
        all_steps,
        tuple(channels),
        streams,
        torch.cat(tables).to(torch.float16),
        packings=tuple(codec.packings().values()),
        paired=paired,
    )


def _looked_up_together(packing: Columns, bits: int, fields: int, beside: int) -> bool:
    """Whether as many fields can share one index: whole steps of them, and a table that fits."""
    return fields == 1 or (packing.fields % (fields * beside) == 0 and fields * bits <= MOST_INDEX_BITS)


def _entries(values: torch.Tensor, together: int) -> torch.Tensor:
    """What the codes of fields ``together`` in one index decode to, the first in its low bits, ``[entry, 2 or 4]``; one is repeated."""
    if together == 1:
        return values[:, None].expand(-1, 2)
    highest_first = torch.meshgrid([values] * together, indexing="ij")
    return torch.stack(highest_first[::-1], -1).flatten(0, -2)


@triton.jit
def load(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The planes of each width, then the norms."""
    LOW: tl.constexpr = CONSTANTS.low
    HIGH: tl.constexpr = CONSTANTS.high
    raw = load_planes(pointers, first, token, valid, LOW, MASKED, TURNED)
    if CONSTANTS.parts == 2:
        raw = raw + load_planes(pointers, first, token, valid, HIGH, MASKED, TURNED)
    return raw + load_factors(pointers[CONSTANTS.norm_stream], first, token, valid, CONSTANTS.norm_bits, LOW.paired, MASKED, FAST)


@triton.jit
def decode(
    raw: tl.tuple,
    places: tl.tuple,
    table: tl.tensor,
    STEP: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The values of the fields of ``STEP``, within a unit vector."""
    LOW_PACKING: tl.constexpr = CONSTANTS.low
    HIGH_PACKING: tl.constexpr = CONSTANTS.high
    LOW: tl.constexpr = CONSTANTS.low_part
    HIGH: tl.constexpr = CONSTANTS.high_part
    if LOW.steps > STEP:
        value = _decode_part(raw, places, table, STEP, 0, LOW_PACKING, LOW, SHARED, TURNED, FAST)
    else:
        value = _decode_part(raw, places, table, STEP - LOW.steps, 1, HIGH_PACKING, HIGH, SHARED, TURNED, FAST)
    return value


@triton.jit
def _decode_part(
    raw: tl.tuple,
    places: tl.tuple,
    table: tl.tensor,
    STEP: tl.constexpr,
    NUMBER: tl.constexpr,
    PACKING: tl.constexpr,
    PART: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    BITS: tl.constexpr = PART.bits
    BESIDE: tl.constexpr = PART.beside
    planes = whole_planes(raw, places, NUMBER, PACKING, TURNED, FAST)
    TOGETHER: tl.constexpr = PART.together
    ENTRY: tl.constexpr = 4 if TOGETHER == 4 else 2
    if BESIDE == 1:
        value = look_up_bits(planes, table, TOGETHER * STEP * BITS, TOGETHER * BITS, ENTRY, PART.first_entry, SHARED, FAST)
    else:
        GROUPS: tl.constexpr = PACKING.fields // TOGETHER
        index = words_of_step(planes, places, NUMBER, PACKING, 0, TOGETHER * BITS, STEP, BESIDE, PART.apart, GROUPS, TURNED, FAST)
        AT: tl.constexpr = position_of_step(STEP, TOGETHER * BITS, PART.apart)
        value = look_up_bits((index,), table, AT, TOGETHER * BITS, ENTRY, PART.first_entry, SHARED, FAST)
    if TOGETHER == 1:
        value = (value[0],)
    return value


@triton.jit
def factor(raw: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The norm."""
    LOW: tl.constexpr = CONSTANTS.low
    return read_factors(raw, CONSTANTS.norm_stream, CONSTANTS.norm_bits, LOW.paired, FAST)
