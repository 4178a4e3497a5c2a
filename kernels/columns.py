"""columns(n, A, F) on the GPU: the fields of packed words, and whole streams unpacked to digits (spec/README.md, Bit packing).

A program holds a tile of tokens by columns. It loads each 16-bit word of its columns once; field k of all
columns is then one block of consecutive symbols. Addresses are 64-bit, and none depends on a code.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.errors import InvalidShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.columns import Columns

TILE_SYMBOLS = 1 << 12
"""Symbols that a program decodes, over all its tokens."""


def unpack(packing: Columns, planes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Unpack uint16 planes ``[batch, kv_head, token, words]`` of any strides to one int32 tensor ``[..., symbols]`` a digit.

    The digits are those of ``Columns.unpack``, whatever the words. Raises InvalidShape when the planes are not those of ``packing``.
    """
    batch, heads, tokens = planes[0].shape[:3]
    for words, plane in zip(packing.planes, planes, strict=True):
        check_shape("plane", plane, (batch, heads, tokens, words))
    digits = tuple(torch.empty(batch, heads, tokens, packing.symbols, dtype=torch.int32, device=planes[0].device) for _ in packing.bases)
    places = packing.place_values
    if packing.binary:
        places = tuple(tuple(place.bit_length() - 1 for place in row) for row in places)
    block_tokens, block_columns = tile(packing)
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
        BASES=packing.bases,
        PLACES=places,
        BINARY=packing.binary,
        SYMBOLS=packing.symbols,
        WIDTH=packing.width,
        COLUMN_BYTES=packing.column_bytes,
        BLOCK_TOKENS=block_tokens,
        BLOCK_COLUMNS=block_columns,
    )
    return list(digits)


def tile(packing: Columns) -> tuple[int, int]:
    """Tokens and columns of a program's tile, both powers of two: every column of as many tokens as ``TILE_SYMBOLS`` allows."""
    return max(1, TILE_SYMBOLS // next_power_of_two(packing.symbols)), next_power_of_two(packing.width)


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise InvalidShape unless ``tensor`` has the ``expected`` shape: a kernel reads that many elements of it."""
    if tuple(tensor.shape) != expected:
        raise InvalidShape(f"{name}: shape {list(tensor.shape)}, the codec lays out {list(expected)}")


def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Run a kernel of ``programs`` programs, which may be none, on ``device``: products and sums round apart, as torch's do."""
    if programs:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


@triton.jit  # type: ignore[untyped-decorator]
def tile_origin(heads: tl.tensor, tokens: tl.tensor, BLOCK_TOKENS: tl.constexpr) -> tl.tuple:
    """The batch, the head and the first token, int64, of this program's tile in a one-dimensional grid."""
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(tokens, BLOCK_TOKENS)
    row = program // blocks
    return row // heads, row % heads, program % blocks * BLOCK_TOKENS


@triton.jit  # type: ignore[untyped-decorator]
def load_words(
    planes: tl.tuple,
    strides: tl.tuple,
    batch: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    column: tl.tensor,
    mask: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMN_BYTES: tl.constexpr,
) -> tl.tuple:
    """The words of every column, lowest first, each int32 ``[token, column]``; a byte left over is the last word.

    ``strides`` are those of each plane ``[batch, kv_head, token, words]``; ``mask`` admits only columns below ``WIDTH``.
    """
    words: tl.tuple = ()
    for plane in tl.static_range(COLUMN_BYTES // 2):
        row = planes[plane] + batch * strides[plane][0] + head * strides[plane][1] + token * strides[plane][2]
        words = words + (tl.load(row[:, None] + column[None, :] * strides[plane][3], mask, 0).to(tl.int32),)  # noqa: RUF005
    if COLUMN_BYTES % 2 == 1:
        half: tl.constexpr = (WIDTH + 1) // 2
        last: tl.constexpr = COLUMN_BYTES // 2
        row = planes[last] + batch * strides[last][0] + head * strides[last][1] + token * strides[last][2]
        word = tl.load(row[:, None] + (column % half)[None, :] * strides[last][3], mask, 0).to(tl.int32)
        words = words + (word >> (column // half * 8).to(tl.int32)[None, :] & 0xFF,)  # noqa: RUF005
    return words


@triton.jit  # type: ignore[untyped-decorator]
def bit_field(words: tl.tuple, POSITION: tl.constexpr, BASE: tl.constexpr) -> tl.tensor:
    """The field of every column that begins at bit ``POSITION``, its base a power of two of at most 16 bits; it may straddle two words."""
    word: tl.constexpr = POSITION // 16
    shift: tl.constexpr = POSITION % 16
    field = words[word] >> shift
    if (BASE - 1) << shift > 0xFFFF:
        field |= words[word + 1] << (16 - shift)
    return field & (BASE - 1)


@triton.jit  # type: ignore[untyped-decorator]
def joined(words: tl.tuple, COLUMN_BYTES: tl.constexpr) -> tl.tensor:
    """Columns of at most 7 bytes as integers that are never negative: int32 up to 3 bytes, else int64."""
    column = words[0]
    if COLUMN_BYTES > 3:
        column = column.to(tl.int64)
    for word in tl.static_range(1, (COLUMN_BYTES + 1) // 2):
        column |= words[word].to(column.dtype) << (16 * word)
    return column


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(
    digits: tl.tuple,
    planes: tl.tuple,
    strides: tl.tuple,
    heads: tl.tensor,
    tokens: tl.tensor,
    BASES: tl.constexpr,
    PLACES: tl.constexpr,
    BINARY: tl.constexpr,
    SYMBOLS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMN_BYTES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One tile of tokens; ``PLACES`` are a field's bit positions when ``BINARY``, else its place values."""
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    token = first + tl.arange(0, BLOCK_TOKENS)
    column = tl.arange(0, BLOCK_COLUMNS)
    mask = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    words = load_words(planes, strides, batch, head, token, column.to(tl.int64), mask, WIDTH, COLUMN_BYTES)
    row = ((batch * heads + head) * tokens + token) * SYMBOLS
    # Fields past the last symbol are skipped; the last one that is used may be used in part.
    for digit in tl.static_range(len(BASES)):
        for field in tl.static_range((SYMBOLS + WIDTH - 1) // WIDTH):
            if BINARY:
                value = bit_field(words, PLACES[digit][field], BASES[digit])
            else:
                value = (joined(words, COLUMN_BYTES) // PLACES[digit][field] % BASES[digit]).to(tl.int32)
            symbol = field * WIDTH + column
            tl.store(digits[digit] + row[:, None] + symbol[None, :], value, mask & (symbol < SYMBOLS)[None, :])
