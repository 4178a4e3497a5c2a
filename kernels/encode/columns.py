"""Packing of columns(n, A, F) on the GPU, by matrix products of digits and place values (spec/packing.md, Bit packing).

A column is a sum of digits times place values. Place values are split into limbs: parts that float16 represents exactly, of 16 bits if
bases are powers of two, otherwise of 8 bits. The sum of the products of one limb is an integer that float32 represents exactly. The sums of
a column are then joined with carries.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.base import Codec
from kvpack.formats.columns import Columns, next_power_of_two
from kvpack.kernels.bitpack.columns import constant_at

MIN_AXIS = 16
"""Minimum length of an axis of a matrix product."""

WARPS = 2
"""Number of warps per program. With four, Triton 3.6 uses Hopper's matrix instructions with wrong addresses of digits."""

_PIECE_BITS = 8
"""Maximum bits of a digit per product, so that a digit times a limb is an integer that float32 can represent."""

_EXACT_SUM = {16: 1 << 24, 8: 1 << 22}
"""Exclusive upper bounds of sums, by bits per limb. Float32 is exact below them, and two joined limbs fit in 31 bits."""


class DigitBits(NamedTuple):
    """Part of the kernel's digit ``source``: the digit shifted right by ``shift``, then masked with ``mask``."""

    source: int
    shift: int
    mask: int


class StreamPacking(NamedTuple):
    """Description of how one code stream is packed: its columns, its limbs, and the digit bits that contribute to them.

    ``limbs`` is the number of limbs per column, each with ``limb_bits`` bits. The kernel's sums (one per limb), planes and place values are
    lists for all streams; ``first_sum``, ``first_plane`` and ``first_place_value`` are the indices at which this stream begins in them.
    """

    width: int
    tile_width: int
    column_bytes: int
    limb_bits: int
    limbs: int
    first_sum: int
    first_plane: int
    first_place_value: int
    pieces: tuple[DigitBits, ...]


class Term(NamedTuple):
    """Contribution of one of the kernel's digits to a code stream: ``bits`` bits of the digit from bit ``shift`` on, times ``weight``.

    ``source`` is the index of the kernel's digit, and ``digit`` is the index of the packing's digit, whose place values apply. ``symbols``
    lists the kernel's symbols in the stream's order; it is empty if the order is the same.
    """

    source: int
    bits: int
    shift: int = 0
    weight: int = 1
    digit: int = 0
    symbols: tuple[int, ...] = ()


class PackingPlan(NamedTuple):
    """Plan for packing all code streams of a codec.

    ``place_values`` is a flat float16 tensor: for each stream, the limbs of all place values, ``[piece, limb, symbol, column]``.
    """

    streams: tuple[StreamPacking, ...]
    place_values: torch.Tensor


def plan_packing(codec: Codec, terms: Mapping[str, Sequence[Term]], symbols: int, device: torch.device) -> PackingPlan | None:
    """Plan the packing of a codec's digits for kernels with ``symbols`` symbols per token, including padding.

    Returns None if float32 sums would not be exact.
    """
    streams: list[StreamPacking] = []
    matrices: list[torch.Tensor] = []
    sums_count = planes = elements = 0
    for name, packing in codec.packings().items():
        bits = 16 if packing.binary else 8
        pieces = [piece for term in terms[name] for piece in _split_term(term)]
        place_values = [_place_values(packing, piece, symbols) for piece in pieces]
        count = max(1, -(-max(value.bit_length() for place in place_values for row in place for value in row) // bits))
        limbs = torch.tensor(
            [[[[v >> bits * limb & (1 << bits) - 1 for v in row] for row in p] for limb in range(count)] for p in place_values],
            dtype=torch.int64,
            device="cpu",
        )
        largest = torch.tensor([(1 << piece.bits) - 1 for piece in pieces], dtype=torch.int64, device="cpu")[:, None, None]
        if int((limbs.sum(2) * largest).sum(0).max()) >= _EXACT_SUM[bits]:
            return None
        digit_bits = tuple(DigitBits(piece.source, piece.shift, (1 << piece.bits) - 1) for piece in pieces)
        streams.append(
            StreamPacking(packing.width, limbs.shape[-1], packing.column_bytes, bits, count, sums_count, planes, elements, digit_bits)
        )
        matrices.append(limbs.flatten().to(torch.float16))
        sums_count, planes, elements = sums_count + count, planes + len(packing.planes), elements + limbs.numel()
    return PackingPlan(tuple(streams), torch.cat(matrices).to(device))


def _split_term(term: Term) -> list[Term]:
    """Split ``term`` into terms of at most ``_PIECE_BITS`` bits each."""
    starts = range(0, term.bits, _PIECE_BITS)
    return [
        term._replace(bits=min(_PIECE_BITS, term.bits - start), shift=term.shift + start, weight=term.weight << start) for start in starts
    ]


def _place_values(packing: Columns, term: Term, symbols: int) -> list[list[int]]:
    """Return the place value of each of the kernel's ``symbols`` in each column of a tile. It is 0 for symbols outside the column."""
    width = max(MIN_AXIS, next_power_of_two(packing.width))
    place_values = [[0] * width for _ in range(symbols)]
    for index, symbol in enumerate(term.symbols or range(min(symbols, packing.symbols))):
        field, column = divmod(index, packing.width)
        place_values[symbol][column] = packing.place_values[term.digit][field] * term.weight
    return place_values


@triton.constexpr_function
def _limb_count(streams: tuple[StreamPacking, ...], index: int) -> int:
    return streams[index].limbs


@triton.jit
def _empty_sum(STREAM: tl.constexpr, BLOCK_TOKENS: tl.constexpr) -> tl.tensor:
    WIDTH: tl.constexpr = STREAM.tile_width
    return tl.zeros((BLOCK_TOKENS, WIDTH), tl.float32)


@triton.jit
def _extract_piece(digits: tl.tuple, PIECE: tl.constexpr) -> tl.tensor:
    return digits[PIECE.source] >> PIECE.shift & PIECE.mask


@triton.jit
def empty_columns(STREAMS: tl.constexpr, BLOCK_TOKENS: tl.constexpr) -> tl.tuple:
    """Return zeros for the sums of all streams, float32 ``[token, column]`` per limb."""
    sums = ()
    for stream in tl.static_range(len(STREAMS)):
        for _ in tl.static_range(_limb_count(STREAMS, stream)):
            sums = sums + (_empty_sum(constant_at(STREAMS, stream), BLOCK_TOKENS),)
    return sums


@triton.jit
def add_digits(
    sums: tl.tuple,
    digits: tl.tuple,
    place_values: tl.tensor,
    first: tl.tensor,
    COUNT: tl.constexpr,
    SYMBOLS: tl.constexpr,
    STREAMS: tl.constexpr,
) -> tl.tuple:
    """Add the digits of ``COUNT`` symbols, beginning with symbol ``first``, to ``sums``.

    ``digits`` are int32 ``[token, COUNT]`` each. A token has ``SYMBOLS`` symbols in total.
    """
    added = ()
    for stream in tl.static_range(len(STREAMS)):
        for limb in tl.static_range(_limb_count(STREAMS, stream)):
            added = added + (_add_limb(sums, digits, place_values, limb, first, COUNT, SYMBOLS, constant_at(STREAMS, stream)),)
    return added


@triton.jit
def _add_limb(
    sums: tl.tuple,
    digits: tl.tuple,
    place_values: tl.tensor,
    LIMB: tl.constexpr,
    first: tl.tensor,
    COUNT: tl.constexpr,
    SYMBOLS: tl.constexpr,
    STREAM: tl.constexpr,
) -> tl.tensor:
    address = (
        place_values
        + STREAM.first_place_value
        + (first + tl.arange(0, COUNT))[:, None] * STREAM.tile_width
        + tl.arange(0, STREAM.tile_width)[None, :]
    )
    total = sums[STREAM.first_sum + LIMB]
    PIECES: tl.constexpr = STREAM.pieces
    for index in tl.static_range(len(PIECES)):
        limbs = tl.load(address + (index * STREAM.limbs + LIMB) * SYMBOLS * STREAM.tile_width)
        digit = _extract_piece(digits, constant_at(PIECES, index))
        total = tl.dot(digit.to(tl.float16), limbs, total)
    return total


@triton.jit
def store_columns(sums: tl.tuple, planes: tl.tuple, row: tl.tensor, valid: tl.tensor, STREAMS: tl.constexpr) -> None:
    """Join the limbs of all columns, and write all planes of rows ``row``, int64 ``[token, 1]``.

    Rows that are not ``valid`` are skipped. A plane of bytes is passed as uint8.
    """
    for stream in tl.static_range(len(STREAMS)):
        _store_planes(sums, planes, row, valid, constant_at(STREAMS, stream))


@triton.jit
def _store_planes(sums: tl.tuple, planes: tl.tuple, row: tl.tensor, valid: tl.tensor, STREAM: tl.constexpr) -> None:
    WIDTH: tl.constexpr = STREAM.width
    HALF: tl.constexpr = (STREAM.width + 1) // 2
    column = tl.arange(0, STREAM.tile_width)[None, :]
    carry = tl.zeros(sums[STREAM.first_sum].shape, tl.int32)
    for word in tl.static_range((STREAM.column_bytes + 1) // 2):
        if STREAM.limb_bits == 16:
            if word < STREAM.limbs:
                carry += sums[STREAM.first_sum + word].to(tl.int32)
        else:
            if 2 * word < STREAM.limbs:
                carry += sums[STREAM.first_sum + 2 * word].to(tl.int32)
            if 2 * word + 1 < STREAM.limbs:
                carry += sums[STREAM.first_sum + 2 * word + 1].to(tl.int32) << 8
        if 2 * word + 1 < STREAM.column_bytes:
            tl.store(planes[STREAM.first_plane + word] + row * WIDTH + column, (carry & 0xFFFF).to(tl.uint16), valid & (column < WIDTH))
        else:
            # In a plane of W bytes, byte c is the low or high byte of word c mod (W / 2).
            address = planes[STREAM.first_plane + word] + row * (2 * HALF) + (column % HALF * 2 + column // HALF)
            tl.store(address, (carry & 0xFF).to(tl.uint8), valid & (column < 2 * HALF))
        carry = carry >> 16
