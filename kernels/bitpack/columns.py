"""columns(n, A, F) on the GPU: fields of packed words, and whole streams unpacked to digits (spec/packing.md, Bit packing).

A program processes a tile ``[token, symbol]``, and each thread gathers the words of its symbols: they come from the cache, and writes are
contiguous whatever the width. Addresses are 64-bit, and none depends on a code.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy
import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.errors import InvalidParameter
from kvpack.kernels.triton_internals import launch_and_keep, launch_kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.columns import Columns

TILE_SYMBOLS = 1 << 11
"""Symbols of one program, over all its tokens."""

WARPS = 2
"""Warps of a program: 32 symbols per thread hide the latency of a load and share scales among tokens."""


def unpack(packing: Columns, planes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Unpack uint16 planes ``[batch, kv_head, token, words]`` of any strides to one int32 tensor ``[..., symbols]`` per digit.

    The digits equal those of ``Columns.unpack``, whatever the words. Raises InvalidParameter if the planes do not match ``packing``.
    """
    batch, heads, tokens = planes[0].shape[:3]
    for words, plane in zip(packing.planes, planes, strict=True):
        check_shape("plane", plane, (batch, heads, tokens, words))
    digits = tuple(torch.empty(batch, heads, tokens, packing.symbols, dtype=torch.int32, device=planes[0].device) for _ in packing.bases)
    first, bases = [places[0] for places in packing.place_values], list(packing.bases)
    if packing.binary:
        first, bases = ([value.bit_length() - 1 for value in values] for values in (first, bases))
    block_tokens, block_symbols = tile(packing)
    programs = batch * heads * -(-tokens // block_tokens)
    launch(
        _unpack,
        programs,
        planes[0].device,
        digits,
        tuple(planes),
        tuple(plane.stride() for plane in planes),
        heads,
        tokens,
        BASES=tuple(bases),
        FIRST=tuple(first),
        BINARY=packing.binary,
        SYMBOLS=packing.symbols,
        FIELDS=packing.fields,
        WIDTH=packing.width,
        COLUMN_BYTES=packing.column_bytes,
        BLOCK_TOKENS=block_tokens,
        BLOCK_SYMBOLS=block_symbols,
    )
    return list(digits)


def tile(packing: Columns) -> tuple[int, int]:
    """Return the tokens and symbols of a program's tile, both powers of two: every symbol of as many tokens as ``TILE_SYMBOLS`` allows."""
    symbols = next_power_of_two(packing.symbols)
    return max(1, TILE_SYMBOLS // symbols), symbols


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise InvalidParameter unless ``tensor`` has the ``expected`` shape, because a kernel reads that many elements."""
    if tuple(tensor.shape) != expected:
        raise InvalidParameter(f"{name}: shape {list(tensor.shape)}, expected {list(expected)} from the codec")


def table_of(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Copy ``rows`` of integers to ``device``, int64. The host does not wait for pending work there."""
    table = torch.from_numpy(numpy.array(rows, dtype=numpy.int64))
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def launch(
    kernel: Any, programs: int, device: torch.device, *arguments: Any, warps: int = WARPS, fusion: bool = False, **constants: Any
) -> None:
    """Launch ``programs`` programs of a kernel, possibly none, on ``device``.

    Without ``fusion``, products and sums are rounded separately, as in torch.
    """
    if not programs:
        return
    options = {"num_warps": warps, "enable_fp_fusion": fusion}
    if device.type == "cuda" and launch_kept(kernel, programs, device, arguments, constants, options):
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        launch_and_keep(kernel, programs, device, arguments, constants, options)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def constant_at(constants: Any, *indices: int) -> Any:
    """Return the constant at ``indices`` of nested tuples; Triton itself accepts one index at a time and, in 3.6, drops names."""
    for index in indices:
        constants = constants[index]
    return constants


@triton.jit  # type: ignore[untyped-decorator]
def tile_origin(heads: tl.tensor, tokens: tl.tensor, BLOCK_TOKENS: tl.constexpr) -> tl.tuple:
    """Return the batch, the head and the first token, int64, of this program's tile in a one-dimensional grid."""
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(tokens, BLOCK_TOKENS)
    row = program // blocks
    return row // heads, row % heads, program % blocks * BLOCK_TOKENS


@triton.jit  # type: ignore[untyped-decorator]
def load_word(
    planes: tl.tuple,
    strides: tl.tuple,
    batch: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    column: tl.tensor,
    mask: tl.tensor,
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMN_BYTES: tl.constexpr,
) -> tl.tensor:
    """Load word ``WORD`` of each ``column``, int32 ``[token, symbol]``; in the last plane of an odd number of bytes, one byte.

    ``strides`` are those of each plane ``[batch, kv_head, token, words]``; ``token`` is ``[:, 1]``, ``column`` ``[1, :]``.
    """
    row = planes[WORD] + batch * strides[WORD][0] + head * strides[WORD][1] + token * strides[WORD][2]
    if COLUMN_BYTES // 2 == WORD:
        # Loaded as the byte that it is: shifted out of its word, Triton 3.6 packed it beside undefined bits, and read those as its own.
        half: tl.constexpr = (WIDTH + 1) // 2
        address = (row + (column % half).to(tl.int64) * strides[WORD][3]).to(tl.pointer_type(tl.uint8)) + column // half
        bits = tl.load(address, mask, 0).to(tl.int32)
    else:
        bits = tl.load(row + column.to(tl.int64) * strides[WORD][3], mask, 0).to(tl.int32)
    return bits


@triton.jit  # type: ignore[untyped-decorator]
def load_bit_fields(
    planes: tl.tuple,
    strides: tl.tuple,
    batch: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    symbol: tl.tensor,
    mask: tl.tensor,
    FIRST_BIT: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMN_BYTES: tl.constexpr,
) -> tl.tensor:
    """Load symbols of at most 16 ``BITS``, int32 ``[token, symbol]``; their field 0 begins at bit ``FIRST_BIT`` of a column."""
    column = symbol % WIDTH
    position = FIRST_BIT + symbol // WIDTH * BITS
    word = position // 16
    shift = position % 16
    value = tl.full(mask.shape, 0, tl.int32)
    for plane in tl.static_range((COLUMN_BYTES + 1) // 2):
        begins = word == plane
        goes_on = (word == plane - 1) & (shift + BITS > 16)
        bits = load_word(planes, strides, batch, head, token, column, mask & (begins | goes_on), plane, WIDTH, COLUMN_BYTES)
        value |= tl.where(begins, bits >> shift, bits << (16 - shift))
    return value & ((1 << BITS) - 1)


@triton.jit  # type: ignore[untyped-decorator]
def load_columns(
    planes: tl.tuple,
    strides: tl.tuple,
    batch: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    symbol: tl.tensor,
    mask: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMN_BYTES: tl.constexpr,
) -> tl.tensor:
    """Load the columns that contain each symbol, at most 7 bytes, never negative: int32 up to 3 bytes, else int64."""
    column = symbol % WIDTH
    value = tl.full(mask.shape, 0, tl.int32 if COLUMN_BYTES <= 3 else tl.int64)
    for plane in tl.static_range((COLUMN_BYTES + 1) // 2):
        word = load_word(planes, strides, batch, head, token, column, mask, plane, WIDTH, COLUMN_BYTES)
        value |= word.to(value.dtype) << (16 * plane)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def digit_of_field(columns: tl.tensor, field: tl.tensor, FIRST: tl.constexpr, BASE: tl.constexpr, FIELDS: tl.constexpr) -> tl.tensor:
    """Compute columns // (FIRST * BASE^field) % BASE, int32, by one constant division per bit of ``field``, which is below 64."""
    rest = columns // FIRST
    for bit in tl.static_range(6):
        if 1 << bit < FIELDS:
            rest = tl.where((field >> bit & 1) == 1, rest // BASE ** (1 << bit), rest)
    return (rest % BASE).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(
    digits: tl.tuple,
    planes: tl.tuple,
    strides: tl.tuple,
    heads: tl.tensor,
    tokens: tl.tensor,
    BASES: tl.constexpr,
    FIRST: tl.constexpr,
    BINARY: tl.constexpr,
    SYMBOLS: tl.constexpr,
    FIELDS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMN_BYTES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_SYMBOLS: tl.constexpr,
) -> None:
    """Unpack one tile ``[token, symbol]`` of every digit, int32 ``[batch, kv_head, token, symbol]``.

    If ``BINARY``, ``FIRST`` is each digit's first bit and ``BASES`` its number of bits; otherwise they are its first place value and its
    base.
    """
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    symbol = tl.arange(0, BLOCK_SYMBOLS)[None, :]
    mask = (token < tokens) & (symbol < SYMBOLS)
    offset = ((batch * heads + head) * tokens + token) * SYMBOLS + symbol
    if not BINARY:
        columns = load_columns(planes, strides, batch, head, token, symbol, mask, WIDTH, COLUMN_BYTES)
    for digit in tl.static_range(len(BASES)):
        if BINARY:
            value = load_bit_fields(planes, strides, batch, head, token, symbol, mask, FIRST[digit], BASES[digit], WIDTH, COLUMN_BYTES)
        else:
            value = digit_of_field(columns, symbol // WIDTH, FIRST[digit], BASES[digit], FIELDS)
        tl.store(digits[digit] + offset, value, mask)
