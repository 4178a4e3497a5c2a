"""The packing columns(n, A, F) on the GPU: loading of fields, and unpacking of whole streams (spec/packing.md, Bit packing).

A program processes a tile ``[token, symbol]``, and each thread gathers the words of its symbols. Reads hit the cache, and writes are
contiguous. Addresses are 64-bit and do not depend on stored codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy
import torch
import triton
from triton import language as tl

from kvpack.formats.columns import Columns, next_power_of_two
from kvpack.formats.errors import InvalidParameter
from kvpack.kernels.triton_internals import launch_and_cache, launch_cached

TILE_SYMBOLS = 1 << 11
"""Number of symbols per program, over all its tokens."""

WARPS = 2
"""Number of warps per program. With 32 symbols per thread, two hide the latency of loads."""


def unpack(packing: Columns, planes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Unpack uint16 planes ``[batch, kv_head, token, words]``, with arbitrary strides, to one int32 tensor ``[..., symbols]`` per digit.

    The digits equal those of ``Columns.unpack``, even for words that no writer produces. Raises InvalidParameter if the planes do not match
    ``packing``.
    """
    batch, heads, tokens = planes[0].shape[:3]
    for words, plane in zip(packing.planes, planes, strict=True):
        check_shape("plane", plane, (batch, heads, tokens, words))
    digits = tuple(torch.empty(batch, heads, tokens, packing.symbols, dtype=torch.int32, device=planes[0].device) for _ in packing.bases)
    first, bases = [places[0] for places in packing.place_values], list(packing.bases)
    if packing.binary:
        first, bases = ([value.bit_length() - 1 for value in values] for values in (first, bases))
    block_tokens, block_symbols = tile_shape(packing)
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


def tile_shape(packing: Columns) -> tuple[int, int]:
    """Return the number of tokens and of symbols in a program's tile, both powers of two. A tile contains all symbols of its tokens."""
    symbols = next_power_of_two(packing.symbols)
    return max(1, TILE_SYMBOLS // symbols), symbols


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise InvalidParameter unless ``tensor`` has the ``expected`` shape, because kernels would read out of bounds."""
    if tuple(tensor.shape) != expected:
        raise InvalidParameter(f"{name} has shape {list(tensor.shape)}, but the codec needs shape {list(expected)}")


def device_table(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Copy ``rows`` of integers to an int64 tensor on ``device``, without waiting for the device."""
    table = torch.from_numpy(numpy.array(rows, dtype=numpy.int64))
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def launch(
    kernel: Any, programs: int, device: torch.device, *arguments: Any, warps: int = WARPS, fusion: bool = False, **constants: Any
) -> None:
    """Launch ``kernel`` with ``programs`` programs on ``device``. Nothing is launched if ``programs`` is 0.

    Without ``fusion``, products and sums are rounded separately, as in PyTorch.
    """
    if not programs:
        return
    options = {"num_warps": warps, "enable_fp_fusion": fusion}
    if device.type == "cuda" and launch_cached(kernel, programs, device, arguments, constants, options):
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        launch_and_cache(kernel, programs, device, arguments, constants, options)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def constant_at(constants: Any, *indices: int) -> Any:
    """Return the element at ``indices`` of nested constant tuples.

    Triton indexes only one level at a time, and Triton 3.6 drops the field names of tuples.
    """
    for index in indices:
        constants = constants[index]
    return constants


@triton.jit  # type: ignore[untyped-decorator]
def tile_origin(heads: tl.tensor, tokens: tl.tensor, BLOCK_TOKENS: tl.constexpr) -> tl.tuple:
    """Return the batch index, head and first token of this program's tile, int64, in a one-dimensional grid."""
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
    """Load word ``WORD`` of each ``column`` as int32 ``[token, symbol]``. From a plane of bytes, load the column's byte.

    ``strides`` contains the strides of each plane ``[batch, kv_head, token, words]``. ``token`` is ``[token, 1]``, and ``column`` is ``[1,
    symbol]``.
    """
    row = planes[WORD] + batch * strides[WORD][0] + head * strides[WORD][1] + token * strides[WORD][2]
    if COLUMN_BYTES // 2 == WORD:
        # Load a byte, not its word: Triton 3.6 packed a byte shifted out of a word next to undefined bits, and then read those bits.
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
    """Load the digit of each ``symbol`` as int32 ``[token, symbol]``, for packings whose digits are bit fields.

    A digit has ``BITS`` bits (at most 16). In field 0 of a column, it begins at bit ``FIRST_BIT``.
    """
    column = symbol % WIDTH
    position = FIRST_BIT + symbol // WIDTH * BITS
    word = position // 16
    shift = position % 16
    value = tl.full(mask.shape, 0, tl.int32)
    for plane in tl.static_range((COLUMN_BYTES + 1) // 2):
        starts = word == plane
        continues = (word == plane - 1) & (shift + BITS > 16)
        bits = load_word(planes, strides, batch, head, token, column, mask & (starts | continues), plane, WIDTH, COLUMN_BYTES)
        value |= tl.where(starts, bits >> shift, bits << (16 - shift))
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
    """Load the whole column that contains each symbol. Columns have up to 7 bytes.

    Returns nonnegative integers: int32 for columns of up to 3 bytes, otherwise int64.
    """
    column = symbol % WIDTH
    value = tl.full(mask.shape, 0, tl.int32 if COLUMN_BYTES <= 3 else tl.int64)
    for plane in tl.static_range((COLUMN_BYTES + 1) // 2):
        word = load_word(planes, strides, batch, head, token, column, mask, plane, WIDTH, COLUMN_BYTES)
        value |= word.to(value.dtype) << (16 * plane)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def extract_digit(columns: tl.tensor, field: tl.tensor, FIRST: tl.constexpr, BASE: tl.constexpr, FIELDS: tl.constexpr) -> tl.tensor:
    """Return ``columns // (FIRST * BASE^field) % BASE`` as int32.

    Each bit of ``field`` takes one division by a constant. ``field`` must be less than 64.
    """
    quotient = columns // FIRST
    for bit in tl.static_range(6):
        if 1 << bit < FIELDS:
            quotient = tl.where((field >> bit & 1) == 1, quotient // BASE ** (1 << bit), quotient)
    return (quotient % BASE).to(tl.int32)


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
    """Unpack one tile ``[token, symbol]`` of every digit to ``digits``, int32 ``[batch, kv_head, token, symbol]``.

    With ``BINARY``, ``FIRST`` and ``BASES`` are the first bit and the number of bits of each digit. Otherwise, they are its first place
    value and its base.
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
            value = extract_digit(columns, symbol // WIDTH, FIRST[digit], BASES[digit], FIELDS)
        tl.store(digits[digit] + offset, value, mask)
