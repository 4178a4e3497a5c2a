"""scalar as tiles (spec/codecs/scalar.md): values from a table, two or four fields at a time where their index is short."""

# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from .fields import digits_of_step, load_factor, load_planes, read_factor, whole_planes
from .shared_table import look_up_bits
from .tiles import Stream, Tiles, fields_side_by_side, packing_constants, plane_streams, step_symbols

if TYPE_CHECKING:
    from kvpack.formats.scalar import Scalar

MOST_INDEX_BITS = 8
"""Of several fields: 256 entries fit shared memory once a bank."""


def tiles(codec: Scalar) -> Tiles:
    """The loader of ``codec``: one code stream for each width of its channels."""
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
        symbols = step_symbols(packing)
        beside = fields_side_by_side(packing)
        alone = codec.bits_high or beside > 1
        together = 1 if alone else next(n for n in (4, 2, 1) if len(symbols) % n == 0 and (n == 1 or n * part.bits <= MOST_INDEX_BITS))
        first_entry = sum(map(len, tables))
        steps = len(symbols) // together
        all_steps += steps
        packings.append(packing_constants(len(streams), packing))
        parts.append((part.bits, beside, together, first_entry, steps))
        tables.append(_entries(values, together))
        channels += [tuple(part.channels[symbol] if symbol >= 0 else -1 for symbol in step) for step in symbols]
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
    )


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
    return raw + load_factor(pointers[C[5]], first, token, valid, C[6], MASKED, FAST)


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
    if TOGETHER > 1:
        value = look_up_bits(planes, table, TOGETHER * STEP * BITS, TOGETHER * BITS, TOGETHER, PART[3], SHARED, FAST)
    elif BESIDE == 1:
        value = (look_up_bits(planes, table, STEP * BITS, BITS, 2, PART[3], SHARED, FAST)[0],)
    else:
        index = digits_of_step(planes, places, NUMBER, PACKING, 0, BITS, STEP, BESIDE, TURNED, FAST)
        value = (look_up_bits((index,), table, 0, BITS, 2, PART[3], SHARED, FAST)[0],)
    return value


@triton.jit
def factor(raw: tl.tuple, C: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The norm."""
    return read_factor(raw, C[5], C[6], FAST)
