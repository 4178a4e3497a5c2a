"""Helpers that the encoders share: rows of values, their rotation as a matrix-unit product, norms, levels and rounding.

A rotation's entries are +1 and -1, which every input type represents exactly: the product is as exact as the sum of its values. A row that
a kernel does not encode as ``formats/`` would raises a flag, and the whole run is encoded there. Such rows have values that are not finite
or do not fit their width, whose error it then names, or values whose squares leave float32.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.octahedral_search import midpoints
from kvpack.formats.tables import cache_per_device
from kvpack.formats.token_norms import LARGEST_STORED, LIMITS, LOG8, log8_bounds

from .columns import SMALLEST_AXIS

if TYPE_CHECKING:
    from kvpack.formats.rotation import Rotation

LARGEST_ROW = 1024
"""Bytes of a row of values up to which the rows of a tile fit shared memory."""

MAX_PRODUCTS = 256
"""Maximum head dim for which all coordinates of a row come from products at once; beyond it, encoders process a block at a time."""

SMALLEST_SQUARE = 2.0**-80
LARGEST_SQUARE = 2.0**80
"""Bounds between which squares of norms lose nothing in float32."""

STREAMS_ALIGNED = 16
"""Bytes that divide the places of streams from one of ``Origins`` to another."""

_STREAMS_ALIGNED = tl.constexpr(STREAMS_ALIGNED)

_PARTS = 3
"""bfloat16 numbers whose sum is a float32."""


def block_tokens(x: torch.Tensor, most: int) -> int:
    """Return the tokens of a tile of rows of ``x``, at most ``most``; more of the longest rows would fill the registers."""
    return most if x.shape[3] <= MAX_PRODUCTS else max(SMALLEST_AXIS, most // 2)


class Input(NamedTuple):
    """A tensor to encode: ``arguments`` for ``load_rows``, and the ``constants`` of every encoder."""

    arguments: tuple[Any, ...]
    constants: dict[str, Any]


class Origins(NamedTuple):
    """Offsets of the values and the streams of batch entries that are not contiguous, as in an engine's pages.

    ``table`` is int64 ``[batch, 3]``: element offset from the first input, byte offset from the streams of the first, and the flag's index.
    ``aligned`` is a power of two, at most 16, that divides the byte offset of every input; streams are ``STREAMS_ALIGNED`` bytes apart.
    """

    table: torch.Tensor
    aligned: int


def operand_of(x: torch.Tensor) -> Any:
    """Return the type in which rows of ``x`` are multiplied; Triton's interpreter cannot multiply bfloat16."""
    return {torch.float16: tl.float16}.get(x.dtype, tl.bfloat16) if x.device.type == "cuda" else tl.float32


def input_of(x: torch.Tensor, origins: Origins | None = None) -> Input:
    """Return the kernel arguments for ``x``, ``[batch, kv_head, token, dim]`` of any strides, with batch entries at ``origins`` if given.
    """
    padded = max(SMALLEST_AXIS, next_power_of_two(x.shape[3]))
    parts = _PARTS if x.dtype == torch.float32 else 1
    return Input(
        (x, *x.stride(), x.shape[1], x.shape[2], None if origins is None else origins.table),
        {
            "DIM": x.shape[3],
            "PADDED_DIM": padded,
            "PARTS": parts,
            "OPERAND": operand_of(x),
            "ALIGNED": 1 if origins is None else max(1, origins.aligned // x.element_size()),
        },
    )


def components(rotation: Rotation, count: int, symbols: int, block: int, x: torch.Tensor) -> torch.Tensor:
    """Return the matrices that map rows of ``x`` to the first coordinate of every ``count`` channels, then to the second, and so on.

    They are ``[blocks, count, padded dim, block]`` for ``symbols`` symbols in blocks, with entries +1, -1 or 0 in the type of the product:
    sqrt(dim) times the rotation, unless that is none.
    """
    return _components(rotation, count, symbols, block, torch.float16 if x.dtype == torch.float16 else torch.bfloat16, x.device)


@cache_per_device
def _components(rotation: Rotation, count: int, symbols: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    dim = rotation.dim
    # A matrix of no zeros: its signs are its entries times sqrt(dim), exactly.
    matrix = torch.eye(dim, dtype=torch.float32) if rotation.kind == "none" else rotation.matrix().sign().T
    padded = torch.zeros(max(SMALLEST_AXIS, next_power_of_two(dim)), count, symbols, dtype=torch.float32)
    for channel in range(dim):
        padded[:dim, channel % count, channel // count] = matrix[:, channel]
    return padded.view(-1, count, symbols // block, block).permute(2, 1, 0, 3).to(dtype).contiguous()


@cache_per_device
def values_of(table: bytes) -> torch.Tensor:
    """Return a table of little-endian float32 as a float32 tensor."""
    return torch.tensor(struct.unpack(f"<{len(table) // 4}f", table), dtype=torch.float32)


@cache_per_device
def bounds_of(table: bytes) -> torch.Tensor:
    """Return the bounds between neighbors in a table within [0, 1], and one above all, because a kernel supports no empty tensor."""
    return torch.tensor([*midpoints(table), 2.0], dtype=torch.float32)


def scale_of(rotation: Rotation) -> float:
    """Return the scale of the products with ``components``."""
    return 1.0 if rotation.kind == "none" else 1.0 / math.sqrt(rotation.dim)


def limit_of(dtype: str) -> float:
    """Return the least norm that does not fit a stored ``dtype``."""
    return LIMITS[dtype]


def log8_bounds_of(norm: str, device: torch.device) -> torch.Tensor | None:
    """Return the bounds that ``store_norms`` needs for a codec's ``norm``."""
    return log8_bounds(device) if norm == LOG8 else None


def rule_of(norm_rule: str, dtype: str) -> float:
    """Return the ``RULE`` of an encoder: 0 for norm_rule=norm, otherwise the largest factor of the stored ``dtype``."""
    return 0.0 if norm_rule == "norm" else LARGEST_STORED[dtype]


class Origin(NamedTuple):
    """Offsets for the pointers of the input, in values, of streams, in bytes, and of flags."""

    input: Any
    streams: Any
    flag: Any


@triton.jit
def origin_of(origins: tl.tensor, batch: tl.tensor, ALIGNED: tl.constexpr) -> tl.tuple:
    """Return the ``Origin`` of one batch entry. The origin of the input is a multiple of ``ALIGNED`` values."""
    row = origins + batch * 3
    return Origin(tl.multiple_of(tl.load(row), ALIGNED), tl.load(row + 1), tl.load(row + 2))


@triton.jit
def moved(pointer: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """Move ``pointer``, to a stream, by ``shift`` bytes."""
    SIZE: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    ALIGNED: tl.constexpr = _STREAMS_ALIGNED // SIZE
    return pointer + tl.multiple_of(shift // SIZE, ALIGNED)


@triton.jit
def all_moved(pointers: tl.tuple, shift: tl.tensor) -> tl.tuple:
    """Move each of ``pointers``, to streams, by ``shift`` bytes."""
    found = ()
    for number in tl.static_range(len(pointers)):
        found = found + (moved(pointers[number], shift),)  # noqa: RUF005
    return found


@triton.jit
def load_rows(
    x: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    batch: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> tl.tensor:
    """Load rows ``[token, PADDED_DIM]`` in their stored dtype; 0 where not ``valid``, int1 ``[token, 1]``."""
    channel = tl.arange(0, PADDED_DIM)[None, :]
    row = x + batch * batch_stride + head * head_stride
    return tl.load(row + token * token_stride + channel.to(tl.int64) * channel_stride, valid & (channel < DIM), 0.0)


@triton.jit
def component(
    rows: tl.tensor,
    matrix: tl.tensor,
    number: tl.tensor,
    BLOCK: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    OPERAND: tl.constexpr,
) -> tl.tensor:
    """Multiply ``rows``, ``[token, PADDED_DIM]``, by matrix ``number`` of ``components``: float32 ``[token, BLOCK]``."""
    place = matrix + number * PADDED_DIM * BLOCK + tl.arange(0, PADDED_DIM)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    factor = tl.load(place).to(OPERAND)
    if PARTS == 1:
        value = tl.dot(rows.to(OPERAND), factor, input_precision="ieee")
    else:
        value = tl.zeros((rows.shape[0], BLOCK), tl.float32)
        rest = rows
        for _ in tl.static_range(PARTS):
            part = rest.to(tl.bfloat16)
            value = tl.dot(part.to(OPERAND), factor, value, input_precision="ieee")
            rest = rest - part.to(tl.float32)
    return value


@triton.jit
def flag_unless(ok: tl.tensor, flag: tl.tensor) -> None:
    """Raise the flag unless the whole tile is ``ok``."""
    tl.store(flag, 1, tl.min(ok.to(tl.int32)) == 0)


@triton.jit
def norms_of(rows: tl.tensor, flag: tl.tensor, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr) -> tl.tensor:
    """Return the norm of each row, float32 ``[token, 1]``, and flag norms that are not below ``LIMIT`` or whose square is out of range.

    A row of zeros is in range; NaN is not.
    """
    value = rows.to(tl.float32)
    square = tl.sum(value * value, 1)
    norm = tl.sqrt_rn(square)
    ok = (square > SMALLEST) & (square < LARGEST) & (norm < LIMIT)
    if tl.min(ok.to(tl.int32)) == 0:
        flag_unless(ok | ((square == 0) & (tl.max(tl.abs(value), 1) == 0)), flag)
    return norm[:, None]


@triton.jit
def store_norms(
    norms: tl.tensor, norm: tl.tensor, row: tl.tensor, valid: tl.tensor, log8_bounds: tl.tensor | None, LIMIT: tl.constexpr
) -> None:
    """Write one norm per row; norms that do not fit, which are flagged already, are clamped so that no conversion overflows.

    With ``log8_bounds`` (``token_norms.log8_bounds``) a norm is written as a byte: the number of bounds that it is not below.
    """
    stored = tl.where(norm < LIMIT, norm, 0.0)
    if log8_bounds is not None:
        code = tl.zeros(norm.shape, tl.int32)
        for step in tl.static_range(8):
            code += tl.where(stored >= tl.load(log8_bounds + code + ((128 >> step) - 1)), 128 >> step, 0)
        stored = code
    tl.store(norms + row, stored.to(norms.dtype.element_ty), valid)


@triton.jit
def unbiased_factor(
    norm: tl.tensor, squares: tl.tensor, product: tl.tensor, decoded: tl.tensor, LIMIT: tl.constexpr, RULE: tl.constexpr
) -> tl.tensor:
    """Compute ``norm_rule.unbiased_factor`` for tiles of one shape."""
    kept = (product > 0) & (2 * product * product >= squares * decoded) & (norm < LIMIT)
    return tl.where(kept, tl.minimum(norm * (squares / tl.where(kept, product, 1.0)), RULE), norm)


@triton.jit
def entry_of(level: tl.tensor, table: tl.tensor, LEVELS: tl.constexpr) -> tl.tensor:
    """Look up each level in a ``table`` of ``LEVELS`` entries; a few entries are compared one by one, as in ``level_of``."""
    if LEVELS <= 16:
        entry = tl.zeros(level.shape, tl.float32) + tl.load(table)
        for number in tl.static_range(1, LEVELS):
            entry = tl.where(level >= number, tl.load(table + number), entry)
    else:
        entry = tl.load(table + level)
    return entry


@triton.jit
def level_of(values: tl.tensor, bounds: tl.tensor, LEVELS: tl.constexpr) -> tl.tensor:
    """Count the ascending bounds, ``LEVELS`` - 1 of them, below each value, int32; ``LEVELS`` is a power of two, at most 256.

    A few bounds are compared one by one: a lookup moves its tile to a memory layout and back, which costs as much as several comparisons.
    """
    level = tl.zeros(values.shape, tl.int32)
    if LEVELS <= 16:
        for number in tl.static_range(LEVELS - 1):
            level += tl.where(values > tl.load(bounds + number), 1, 0)
    else:
        for step in tl.static_range(1, 9):
            if LEVELS >> step > 0:
                bound = tl.load(bounds + (level + ((LEVELS >> step) - 1)))
                level += tl.where(values > bound, LEVELS >> step, 0)
    return level


@triton.jit
def enclosing_levels(values: tl.tensor, table: tl.tensor, LEVELS: tl.constexpr) -> tl.tuple:
    """Return the two neighbors in an ascending table that enclose each value, and the first one's number; clamped at the ends."""
    if LEVELS <= 16:
        level = tl.zeros(values.shape, tl.int32)
        lower = tl.zeros(values.shape, tl.float32) + tl.load(table)
        upper = tl.zeros(values.shape, tl.float32) + tl.load(table + 1)
        for number in tl.static_range(1, LEVELS - 1):
            above = values > tl.load(table + number)
            level += tl.where(above, 1, 0)
            lower = tl.where(above, tl.load(table + number), lower)
            upper = tl.where(above, tl.load(table + number + 1), upper)
    else:
        level = tl.minimum(level_of(values, table + 1, LEVELS), LEVELS - 2)
        lower = tl.load(table + level)
        upper = tl.load(table + (level + 1))
    return level, lower, upper


@triton.jit
def nearest_integer(values: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Return the integer in [0, LARGEST] nearest to each value, int32, ties to even."""
    limited = tl.minimum(tl.maximum(values, 0.0), LARGEST)
    # Where binary32 has no fractions its fraction bits are the integer.
    return (limited + 8388608.0).to(tl.int32, bitcast=True) & 0x7FFFFF
