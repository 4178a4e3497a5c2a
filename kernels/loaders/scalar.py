"""Tile loader of the scalar codec (spec/codecs/scalar.md). If an index is short, one lookup covers two or four fields."""

# Triton compiles no unpacking of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.kernels.bitpack.bitfields import expand_planes, load_planes, step_position, step_words
from kvpack.kernels.bitpack.streams import Stream, plane_streams
from kvpack.kernels.bitpack.tile_layout import broadcast_columns
from kvpack.kernels.bitpack.tile_packing import TilePacking, tile_field_count, tile_packing
from kvpack.kernels.bitpack.token_factors import FACTOR_BITS, load_factors, read_factors
from kvpack.kernels.tables.shared_table import look_up_bits, look_up_pairs

from .tiles import Tiles, step_symbols, tile_field_stride

if TYPE_CHECKING:
    from kvpack.formats.columns import Columns
    from kvpack.formats.scalar import Scalar

MAX_INDEX_BITS = 8
"""Maximum number of bits of a joint index of several fields, so that shared memory has room for one copy of the table per bank."""


class ChannelPart(NamedTuple):
    """Channels that share one bit width, and the fields that a tile decodes of them.

    A tile yields ``fields_per_tile`` fields of ``bits`` bits. Fields that are neighbors in the tile are ``field_stride`` fields apart in a
    row. A table index covers ``fields_per_index`` neighboring fields, and is counted from entry ``first_entry``.
    """

    bits: int
    fields_per_tile: int
    fields_per_index: int
    first_entry: int
    steps: int
    field_stride: int


class ScalarConstants(NamedTuple):
    """Compile-time constants of a scalar codec and its tiles. Each bit width has a packing and a part.

    If ``parts`` is 1, ``high`` equals ``low``.
    """

    low: TilePacking
    high: TilePacking
    low_part: ChannelPart
    high_part: ChannelPart
    parts: int
    norm_stream: int
    norm_bits: int


def paired_tiles(codec: Scalar) -> Tiles | None:
    """Return the paired loader of ``codec``, or None if it is not supported.

    A table index must cover two fields, and a tile must contain one field of each column. In rows of 3-byte columns, the upper bytes of
    neighboring columns must begin at the same bit: a register of keys contains two columns, and otherwise the compiler gives tiles of
    values a layout whose registers do not contain two neighboring tokens.
    """
    result = tiles(codec)
    constants: Any = result.constants
    if constants.parts > 1 or constants.low_part.fields_per_index != 2 or constants.low_part.fields_per_tile > 1:
        return None
    packing = constants.low
    if packing.column_bytes % 2 and (packing.width + 1) // 2 % 2:
        return None
    pairs = list(zip(result.channels[::2], result.channels[1::2], strict=True))
    values = tuple(tuple(channel for both in zip(*pair, strict=True) for channel in both) for pair in pairs)
    # The first tile of a step contains both fields of even columns, and the second tile those of odd columns.
    keys = tuple(
        tuple(channel for column in range(odd, len(step) // 2, 2) for channel in step[2 * column : 2 * column + 2])
        for step in values
        for odd in range(2)
    )
    result = replace(result, decode=decode_pairs, paired=True)
    return replace(result, channels=values, keys=replace(result, channels=keys))


def tiles(codec: Scalar, dual: int = 0) -> Tiles:
    """Return the tile loader of ``codec``, which has one code stream per bit width. For ``dual``, see ``Tiles``."""
    streams: tuple[Stream, ...] = ()
    tables: list[torch.Tensor] = []
    packings: list[TilePacking] = []
    parts: list[ChannelPart] = []
    all_steps = 0
    channels: list[tuple[int, ...]] = []
    stored = (codec.magnitude_table, codec.high_magnitude_table)
    for (name, packing), part, table in zip(codec.packings().items(), codec.channel_sets, stored, strict=False):
        magnitudes = torch.frombuffer(bytearray(table), dtype=torch.float32)
        values = torch.cat([magnitudes, -magnitudes])
        side_by_side = tile_field_count(packing, dual)
        fields = 1 if codec.bits_high else next(n for n in (4, 2, 1) if _can_share_index(packing, part.bits, n, side_by_side))
        field_stride = tile_field_stride(packing, fields * part.bits, packing.fields // fields, dual)
        symbols = step_symbols(packing, field_stride, fields, dual)
        steps = len(symbols) // fields
        all_steps += steps
        packings.append(tile_packing(len(streams), packing, dual))
        parts.append(ChannelPart(part.bits, side_by_side, fields, sum(map(len, tables)), steps, field_stride))
        tables.append(_joint_entries(values, fields))
        channels += [tuple(part.channels[symbol] if symbol >= 0 else -1 for symbol in tile) for tile in symbols]
        streams = (*streams, *plane_streams(name, packing))
    norm_bits = FACTOR_BITS[codec.norm]
    constants = ScalarConstants(
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
        dual=dual,
    )


def _can_share_index(packing: Columns, bits: int, fields: int, fields_per_tile: int) -> bool:
    """Return True if ``fields`` fields can form one table index: they must fill whole steps, and the table must be small enough."""
    return fields == 1 or (packing.fields % (fields * fields_per_tile) == 0 and fields * bits <= MAX_INDEX_BITS)


def _joint_entries(values: torch.Tensor, fields: int) -> torch.Tensor:
    """Return the table entries ``[entry, 2 or 4]`` for indices of ``fields`` codes, with the first code in the low bits.

    An entry for a single code contains its value twice.
    """
    if fields == 1:
        return values[:, None].expand(-1, 2)
    highest_first = torch.meshgrid([values] * fields, indexing="ij")
    return torch.stack(highest_first[::-1], -1).flatten(0, -2)


@triton.jit
def load(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tuple:
    """Load the planes of each bit width, int16 tiles ``[warp, token, column]`` or transposed, followed by the norms (``token_factors``)."""
    LOW: tl.constexpr = CONSTANTS.low
    HIGH: tl.constexpr = CONSTANTS.high
    loaded = load_planes(pointers, first, token, valid, LOW, MASKED, MODE.transposed)
    if CONSTANTS.parts == 2:
        loaded = loaded + load_planes(pointers, first, token, valid, HIGH, MASKED, MODE.transposed)
    return loaded + load_factors(pointers[CONSTANTS.norm_stream], first, token, valid, CONSTANTS.norm_bits, LOW.dual, MASKED, MODE.fast)


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the unit-vector coordinates of step ``STEP``: one float16 tile for each field that a table index covers.

    Tiles have the layout of the planes.
    """
    LOW_PACKING: tl.constexpr = CONSTANTS.low
    HIGH_PACKING: tl.constexpr = CONSTANTS.high
    LOW: tl.constexpr = CONSTANTS.low_part
    HIGH: tl.constexpr = CONSTANTS.high_part
    if LOW.steps > STEP:
        value = _decode_part(loaded, column_fields, table, STEP, 0, LOW_PACKING, LOW, MODE)
    else:
        value = _decode_part(loaded, column_fields, table, STEP - LOW.steps, 1, HIGH_PACKING, HIGH, MODE)
    return value


@triton.jit
def decode_pairs(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the unit-vector coordinates of both fields of table index ``STEP`` in each column, as two ``paired`` float16 tiles."""
    SHARED: tl.constexpr = MODE.shared
    PACKING: tl.constexpr = CONSTANTS.low
    PART: tl.constexpr = CONSTANTS.low_part
    if MODE.fast and MODE.shared.copies > 0:
        words = (loaded[PACKING.stream],)
        if PACKING.column_bytes == 3:
            words = words + (loaded[PACKING.stream + 1], broadcast_columns(column_fields[0], MODE.transposed))
        value = look_up_pairs(words, STEP * 2 * PART.bits, 2 * PART.bits, SHARED)
    else:
        value = _decode_part(loaded, column_fields, table, STEP, 0, PACKING, PART, MODE)
        first, second = value[0], value[1]
        HALVES: tl.constexpr = first.shape[:2] + [first.shape[2] // 2, 2]
        first_even, first_odd = tl.split(tl.reshape(first, HALVES))
        second_even, second_odd = tl.split(tl.reshape(second, HALVES))
        value = tl.reshape(tl.join(first_even, second_even), first.shape), tl.reshape(tl.join(first_odd, second_odd), first.shape)
    return value


@triton.jit
def _decode_part(
    loaded: tl.tuple,
    column_fields: tl.tuple,
    table: tl.tensor,
    STEP: tl.constexpr,
    PACKING_INDEX: tl.constexpr,
    PACKING: tl.constexpr,
    PART: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tuple:
    SHARED: tl.constexpr = MODE.shared
    FIELDS_PER_TILE: tl.constexpr = PART.fields_per_tile
    planes = expand_planes(loaded, column_fields, PACKING_INDEX, PACKING, MODE)
    FIELDS: tl.constexpr = PART.fields_per_index
    INDEX_BITS: tl.constexpr = FIELDS * PART.bits
    VALUES: tl.constexpr = 4 if FIELDS == 4 else 2
    if FIELDS_PER_TILE == 1:
        value = look_up_bits(planes, table, STEP * INDEX_BITS, INDEX_BITS, VALUES, PART.first_entry, SHARED, MODE.fast)
    else:
        INDICES: tl.constexpr = PACKING.fields // FIELDS
        STRIDE: tl.constexpr = PART.field_stride
        index = step_words(planes, column_fields, PACKING_INDEX, PACKING, 0, INDEX_BITS, STEP, FIELDS_PER_TILE, STRIDE, INDICES, MODE)
        AT: tl.constexpr = step_position(STEP, INDEX_BITS, STRIDE)
        value = look_up_bits((index,), table, AT, INDEX_BITS, VALUES, PART.first_entry, SHARED, MODE.fast)
    if FIELDS == 1:
        value = (value[0],)
    return value


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the norms, float32 ``[warp, token]``. For dual tiles, returns a pair of such tensors."""
    LOW: tl.constexpr = CONSTANTS.low
    return read_factors(loaded, CONSTANTS.norm_stream, CONSTANTS.norm_bits, LOW.dual, FAST)
