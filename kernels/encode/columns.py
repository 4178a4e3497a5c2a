"""Write columns(n, A, F) on the GPU: digits times place values, as matrix-unit products (spec/packing.md, Bit packing).

A column is a sum of digits times places. A place is split into limbs that binary16 represents exactly, of 16 bits if bases are powers of
two and of 8 bits otherwise. The sums of limbs are integers that float32 represents exactly, and a carry joins them.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.kernels.bitpack.columns import constant_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpack.formats.base import Codec
    from kvpack.formats.columns import Columns

SMALLEST_AXIS = 16
"""The shortest axis that the matrix units take."""

WARPS = 2
"""Warps of a program that packs. With four, Triton 3.6 uses Hopper's matrix units, with wrong addresses of digits."""

_PIECE_BITS = 8
"""Bits of a digit per product: times a limb, they stay within the integers that float32 holds."""

_EXACT_SUM = {16: 1 << 24, 8: 1 << 22}
"""Bounds of the sums by the bits of a limb: float32 is exact, and the carry of two limbs fits 31 bits."""


class Piece(NamedTuple):
    """Bits of the kernel's digit ``source``: those in ``mask`` after a shift down by ``shift``."""

    source: int
    shift: int
    mask: int


class Stream(NamedTuple):
    """Packing of one code stream: its columns, the limbs of their sums, and the numbers of its first sum, plane and place."""

    width: int
    tile_width: int
    column_bytes: int
    limb_bits: int
    limbs: int
    first_sum: int
    first_plane: int
    first_place: int
    pieces: tuple[Piece, ...]


class Term(NamedTuple):
    """The contribution of a kernel's digit to a code stream: ``bits`` bits from bit ``shift`` up, times the ``weight`` of a place.

    ``source`` is the number of the digit in the kernel, ``digit`` the packing's digit whose places it uses, and ``symbols`` the kernel's
    symbols in the stream's order; empty if the order is the same.
    """

    source: int
    bits: int
    shift: int = 0
    weight: int = 1
    digit: int = 0
    symbols: tuple[int, ...] = ()


class Plan(NamedTuple):
    """Packing of all streams of a codec by a kernel: constants per stream, and the limbs of all places.

    ``places`` is binary16, flat: ``[piece, limb, symbol, column]`` of one stream after another.
    """

    streams: tuple[Stream, ...]
    places: torch.Tensor


def plan_of(codec: Codec, terms: Mapping[str, Sequence[Term]], symbols: int, device: torch.device) -> Plan | None:
    """Return the plan on ``device`` for a kernel of ``symbols`` symbols per token, including padding; None if sums would not be exact."""
    streams: list[Stream] = []
    matrices: list[torch.Tensor] = []
    accumulators = planes = elements = 0
    for name, packing in codec.packings().items():
        bits = 16 if packing.binary else 8
        pieces = [piece for term in terms[name] for piece in _pieces(term)]
        places = [_places(packing, piece, symbols) for piece in pieces]
        count = max(1, -(-max(value.bit_length() for place in places for row in place for value in row) // bits))
        limbs = torch.tensor(
            [[[[v >> bits * limb & (1 << bits) - 1 for v in row] for row in p] for limb in range(count)] for p in places],
            dtype=torch.int64,
            device="cpu",
        )
        largest = torch.tensor([(1 << piece.bits) - 1 for piece in pieces], dtype=torch.int64, device="cpu")[:, None, None]
        if int((limbs.sum(2) * largest).sum(0).max()) >= _EXACT_SUM[bits]:
            return None
        cuts = tuple(Piece(piece.source, piece.shift, (1 << piece.bits) - 1) for piece in pieces)
        streams.append(Stream(packing.width, limbs.shape[-1], packing.column_bytes, bits, count, accumulators, planes, elements, cuts))
        matrices.append(limbs.flatten().to(torch.float16))
        accumulators, planes, elements = accumulators + count, planes + len(packing.planes), elements + limbs.numel()
    return Plan(tuple(streams), torch.cat(matrices).to(device))


def _pieces(term: Term) -> list[Term]:
    """Split the term if its digit has more bits than one multiplication handles."""
    starts = range(0, term.bits, _PIECE_BITS)
    return [
        term._replace(bits=min(_PIECE_BITS, term.bits - start), shift=term.shift + start, weight=term.weight << start) for start in starts
    ]


def _places(packing: Columns, term: Term, symbols: int) -> list[list[int]]:
    """Return the place of each of the kernel's ``symbols`` in each column of its tile, 0 if it has none."""
    width = max(SMALLEST_AXIS, next_power_of_two(packing.width))
    places = [[0] * width for _ in range(symbols)]
    for number, symbol in enumerate(term.symbols or range(min(symbols, packing.symbols))):
        field, column = divmod(number, packing.width)
        places[symbol][column] = packing.place_values[term.digit][field] * term.weight
    return places


@triton.constexpr_function
def _limbs(streams: tuple[Stream, ...], number: int) -> int:
    return streams[number].limbs


@triton.jit
def _empty_sum(STREAM: tl.constexpr, BLOCK_TOKENS: tl.constexpr) -> tl.tensor:
    WIDTH: tl.constexpr = STREAM.tile_width
    return tl.zeros((BLOCK_TOKENS, WIDTH), tl.float32)


@triton.jit
def _piece_of(digits: tl.tuple, PIECE: tl.constexpr) -> tl.tensor:
    return digits[PIECE.source] >> PIECE.shift & PIECE.mask


@triton.jit
def empty_columns(STREAMS: tl.constexpr, BLOCK_TOKENS: tl.constexpr) -> tl.tuple:
    """Return zero accumulators for all streams, float32 ``[token, column]``, one per limb."""
    sums = ()
    for stream in tl.static_range(len(STREAMS)):
        for _ in tl.static_range(_limbs(STREAMS, stream)):
            sums = sums + (_empty_sum(constant_at(STREAMS, stream), BLOCK_TOKENS),)
    return sums


@triton.jit
def add_digits(
    sums: tl.tuple,
    digits: tl.tuple,
    places: tl.tensor,
    first: tl.tensor,
    COUNT: tl.constexpr,
    SYMBOLS: tl.constexpr,
    STREAMS: tl.constexpr,
) -> tl.tuple:
    """Add ``digits``, int32 ``[token, COUNT]`` each, of the symbols from ``first`` on of ``SYMBOLS``, to ``sums``."""
    added = ()
    for stream in tl.static_range(len(STREAMS)):
        for limb in tl.static_range(_limbs(STREAMS, stream)):
            added = added + (_add_limb(sums, digits, places, limb, first, COUNT, SYMBOLS, constant_at(STREAMS, stream)),)
    return added


@triton.jit
def _add_limb(
    sums: tl.tuple,
    digits: tl.tuple,
    places: tl.tensor,
    LIMB: tl.constexpr,
    first: tl.tensor,
    COUNT: tl.constexpr,
    SYMBOLS: tl.constexpr,
    STREAM: tl.constexpr,
) -> tl.tensor:
    place = (
        places + STREAM.first_place + (first + tl.arange(0, COUNT))[:, None] * STREAM.tile_width + tl.arange(0, STREAM.tile_width)[None, :]
    )
    total = sums[STREAM.first_sum + LIMB]
    PIECES: tl.constexpr = STREAM.pieces
    for number in tl.static_range(len(PIECES)):
        limbs = tl.load(place + (number * STREAM.limbs + LIMB) * SYMBOLS * STREAM.tile_width)
        digit = _piece_of(digits, constant_at(PIECES, number))
        total = tl.dot(digit.to(tl.float16), limbs, total)
    return total


@triton.jit
def store_columns(sums: tl.tuple, planes: tl.tuple, row: tl.tensor, valid: tl.tensor, STREAMS: tl.constexpr) -> None:
    """Write all planes of rows ``row``, int64 ``[token, 1]``, where ``valid``; a plane of remaining bytes is passed as uint8."""
    for stream in tl.static_range(len(STREAMS)):
        _store_stream(sums, planes, row, valid, constant_at(STREAMS, stream))


@triton.jit
def _store_stream(sums: tl.tuple, planes: tl.tuple, row: tl.tensor, valid: tl.tensor, STREAM: tl.constexpr) -> None:
    WIDTH: tl.constexpr = STREAM.width
    HALF: tl.constexpr = (STREAM.width + 1) // 2
    column = tl.arange(0, STREAM.tile_width)[None, :]
    rest = tl.zeros(sums[STREAM.first_sum].shape, tl.int32)
    for word in tl.static_range((STREAM.column_bytes + 1) // 2):
        if STREAM.limb_bits == 16:
            if word < STREAM.limbs:
                rest += sums[STREAM.first_sum + word].to(tl.int32)
        else:
            if 2 * word < STREAM.limbs:
                rest += sums[STREAM.first_sum + 2 * word].to(tl.int32)
            if 2 * word + 1 < STREAM.limbs:
                rest += sums[STREAM.first_sum + 2 * word + 1].to(tl.int32) << 8
        if 2 * word + 1 < STREAM.column_bytes:
            tl.store(planes[STREAM.first_plane + word] + row * WIDTH + column, (rest & 0xFFFF).to(tl.uint16), valid & (column < WIDTH))
        else:
            # Byte c of the last plane's W is the low or the high one of word c mod W / 2.
            place = planes[STREAM.first_plane + word] + row * (2 * HALF) + (column % HALF * 2 + column // HALF)
            tl.store(place, (rest & 0xFF).to(tl.uint8), valid & (column < 2 * HALF))
        rest = rest >> 16
