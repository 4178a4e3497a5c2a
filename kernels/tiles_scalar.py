"""scalar as tiles (spec/codecs/scalar.md): values from a table, two or four fields at a time where their index is short."""

# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from .fields import load_planes, position_of_step, whole_planes, words_of_step
from .halves import load_factors, read_factors
from .shared_table import look_up_bits
from .tiles import Stream, Tiles, distance, fields_side_by_side, plane_streams, step_symbols, tile_packing

if TYPE_CHECKING:
    from kvpack.formats.columns import Columns
    from kvpack.formats.scalar import Scalar

MOST_INDEX_BITS = 8
"""Of several fields: 256 entries fit shared memory once a bank."""


def tiles(codec: Scalar, paired: int = 0) -> Tiles:
    """The loader of ``codec``: one code stream for each width of its channels. ``paired`` is that of the result."""
    streams: tuple[Stream, ...] = ()
    tables: list[torch.Tensor] = []
    packings: list[tuple[int, ...]] = []
    parts: list[tuple[int, ...]] = []
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
        parts.append((part.bits, beside, together, sum(map(len, tables)), steps, apart))
        tables.append(_entries(values, together))
        channels += [tuple(part.channels[symbol] if symbol >= 0 else -1 for symbol in tile) for tile in symbols]
        streams = (*streams, *plane_streams(name, packing))
    norm_bits = 16 if codec.norm == "fp16" else 32
    constants = (packings[0], packings[-1], parts[0], parts[-1], len(parts), len(streams), norm_bits)
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
    C: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The planes of each width, then the norms."""
    LOW: tl.constexpr = C[0]
    HIGH: tl.constexpr = C[1]
    raw = load_planes(pointers, first, token, valid, LOW, MASKED, TURNED)
    if C[4] == 2:
        raw = raw + load_planes(pointers, first, token, valid, HIGH, MASKED, TURNED)
    return raw + load_factors(pointers[C[5]], first, token, valid, C[6], LOW[5], MASKED, FAST)


@triton.jit
def decode(
    raw: tl.tuple,
    places: tl.tuple,
    table: tl.tensor,
    STEP: tl.constexpr,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The values of the fields of ``STEP``, within a unit vector."""
    LOW_PACKING: tl.constexpr = C[0]
    HIGH_PACKING: tl.constexpr = C[1]
    LOW: tl.constexpr = C[2]
    HIGH: tl.constexpr = C[3]
    if LOW[4] > STEP:
        value = _decode_part(raw, places, table, STEP, 0, LOW_PACKING, LOW, SHARED, TURNED, FAST)
    else:
        value = _decode_part(raw, places, table, STEP - LOW[4], 1, HIGH_PACKING, HIGH, SHARED, TURNED, FAST)
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
    BITS: tl.constexpr = PART[0]
    BESIDE: tl.constexpr = PART[1]
    planes = whole_planes(raw, places, NUMBER, PACKING, TURNED, FAST)
    TOGETHER: tl.constexpr = PART[2]
    ENTRY: tl.constexpr = 4 if TOGETHER == 4 else 2
    if BESIDE == 1:
        value = look_up_bits(planes, table, TOGETHER * STEP * BITS, TOGETHER * BITS, ENTRY, PART[3], SHARED, FAST)
    else:
        GROUPS: tl.constexpr = PACKING.fields // TOGETHER
        index = words_of_step(planes, places, NUMBER, PACKING, 0, TOGETHER * BITS, STEP, BESIDE, PART[5], GROUPS, TURNED, FAST)
        AT: tl.constexpr = position_of_step(STEP, TOGETHER * BITS, PART[5])
        value = look_up_bits((index,), table, AT, TOGETHER * BITS, ENTRY, PART[3], SHARED, FAST)
    if TOGETHER == 1:
        value = (value[0],)
    return value


@triton.jit
def factor(raw: tl.tuple, C: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The norm."""
    LOW: tl.constexpr = C[0]
    return read_factors(raw, C[5], C[6], LOW[5], FAST)
