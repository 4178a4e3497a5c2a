"""Helpers that encoders share: rows of values, their rotation as a matrix product, norms, levels and rounding.

A rotation's signs are exact in every input dtype, so a product is as accurate as the sum of its values. A kernel sets a flag if it cannot
encode a row as ``formats/`` would, because values are not finite, do not fit the stored dtype, or have squares outside the range of
float32. Then ``formats/`` encodes all tokens.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.octahedral_search import midpoints
from kvpack.formats.rotation import Rotation
from kvpack.formats.tables import cache_per_device
from kvpack.formats.token_norms import LIMITS, LOG8, MAX_STORED, log8_bounds
from kvpack.kernels.bitpack.columns import launch
from kvpack.kernels.gpu import gpu

from .columns import MIN_AXIS

MAX_ROW_BYTES = 1024
"""Maximum row size, in bytes, at which a tile of rows fits in shared memory."""

MAX_PRODUCTS = 256
"""Maximum head dim for which one program computes all coordinates of a row together. Larger head dims are processed in blocks."""

MIN_SQUARE = 2.0**-80
MAX_SQUARE = 2.0**80
"""Largest squared norm for which float32 is accurate (``MIN_SQUARE`` is the smallest). ``formats/`` encodes other tokens."""

TILE_VALUES = 1 << 12
"""Number of values in a tile of ``launch_on_tiles``."""
TILE_WARPS = 4

STREAM_ALIGNMENT = 16
"""Common divisor, in bytes, of the stream offsets in ``BatchOffsets``."""

_STREAM_ALIGNMENT = tl.constexpr(STREAM_ALIGNMENT)

_PARTS = 3
"""Number of bfloat16 parts into which a float32 value is split."""


def block_tokens(x: torch.Tensor, limit: int) -> int:
    """Return the number of tokens per tile: ``limit``, or half of it for rows of ``x`` that are long and would fill the registers."""
    return limit if x.shape[3] <= MAX_PRODUCTS else max(MIN_AXIS, limit // 2)


def launch_on_tiles(kernel: Any, x: torch.Tensor, origins: BatchOffsets, *arguments: Any, **constants: Any) -> None:
    """Launch ``kernel`` with one program per tile of ``x`` ``[batch, kv_head, token, dim]``. The batch entries are at ``origins``.

    ``x`` may have arbitrary strides.
    """
    batch, heads, tokens, dim = x.shape
    channels = next_power_of_two(dim)
    block = max(1, min(TILE_VALUES // channels, next_power_of_two(tokens)))
    launch(
        kernel, batch * heads * -(-tokens // block), x.device, x, *x.stride()[1:], heads, tokens, origins.table, *arguments,
        DIM=dim, CHANNELS=channels, ALIGNED=max(1, origins.aligned // x.element_size()), BLOCK_TOKENS=block, warps=TILE_WARPS, **constants,
    )  # fmt: skip


class InputArguments(NamedTuple):
    """Kernel arguments for a tensor to encode: run-time ``arguments``, and compile-time ``constants``."""

    arguments: tuple[Any, ...]
    constants: dict[str, Any]


class BatchOffsets(NamedTuple):
    """Offsets of batch entries that are scattered in memory, such as the pages of an inference engine.

    ``table``, int64 ``[batch, 3]``, contains three numbers per entry: the offset of its input in elements, the offset of its streams in
    bytes (both from the first entry's), and the index of its flag. ``aligned`` is a power of two, at most 16, that divides the byte offsets
    of all inputs. Stream offsets are multiples of ``STREAM_ALIGNMENT``.
    """

    table: torch.Tensor
    aligned: int


def operand_type(x: torch.Tensor) -> Any:
    """Return the Triton type of rows of ``x`` in matrix products. The interpreter cannot multiply bfloat16."""
    return {torch.float16: tl.float16}.get(x.dtype, tl.bfloat16) if not gpu(x.device).interpreted else tl.float32


def input_arguments(x: torch.Tensor, origins: BatchOffsets | None = None) -> InputArguments:
    """Return the kernel arguments for ``x`` ``[batch, kv_head, token, dim]``, with arbitrary strides and batch entries at ``origins``."""
    padded = max(MIN_AXIS, next_power_of_two(x.shape[3]))
    parts = _PARTS if x.dtype == torch.float32 else 1
    return InputArguments(
        (x, *x.stride(), x.shape[1], x.shape[2], None if origins is None else origins.table),
        {
            "DIM": x.shape[3],
            "PADDED_DIM": padded,
            "PARTS": parts,
            "OPERAND": operand_type(x),
            "ALIGNED": 1 if origins is None else max(1, origins.aligned // x.element_size()),
        },
    )


def coordinate_matrices(rotation: Rotation, count: int, symbols: int, block: int, x: torch.Tensor) -> torch.Tensor:
    """Return the matrices that map rows of ``x`` to rotated coordinates: one matrix for each of the ``count`` coordinates of a symbol.

    The shape is ``[blocks, count, padded dim, block]``, for ``symbols`` symbols in blocks. Entries are +1, -1 or 0: the entries of the
    rotation times sqrt(dim), or those of the identity without a rotation.
    """
    dtype = torch.float16 if x.dtype == torch.float16 else torch.bfloat16
    return _build_coordinate_matrices(rotation, count, symbols, block, dtype, x.device)


@cache_per_device
def _build_coordinate_matrices(rotation: Rotation, count: int, symbols: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    dim = rotation.dim
    # The signs of a Hadamard rotation are exactly its entries times sqrt(dim).
    matrix = rotation.matrix().sign().T
    padded = torch.zeros(max(MIN_AXIS, next_power_of_two(dim)), count, symbols, dtype=torch.float32)
    for channel in range(dim):
        padded[:dim, channel % count, channel // count] = matrix[:, channel]
    return padded.view(-1, count, symbols // block, block).permute(2, 1, 0, 3).to(dtype).contiguous()


@cache_per_device
def table_values(table: bytes) -> torch.Tensor:
    """Convert a table of little-endian float32 bytes to a float32 tensor."""
    return torch.tensor(struct.unpack(f"<{len(table) // 4}f", table), dtype=torch.float32)


@cache_per_device
def table_bounds(table: bytes) -> torch.Tensor:
    """Return the midpoints between neighbors of a table with values in [0, 1], followed by 2.0. The result is never empty."""
    return torch.tensor([*midpoints(table), 2.0], dtype=torch.float32)


def rotation_scale(rotation: Rotation) -> float:
    """Return the factor that products with ``coordinate_matrices`` lack."""
    return 1.0 if rotation.kind == "none" else 1.0 / math.sqrt(rotation.dim)


def norm_limit(dtype: str) -> float:
    """Return the smallest norm that does not fit the stored ``dtype``."""
    return LIMITS[dtype]


def norm_byte_bounds(norm: str, device: torch.device) -> torch.Tensor | None:
    """Return the bounds that ``store_norms`` needs to store norms as bytes, or None if ``norm`` is a different format."""
    return log8_bounds(device) if norm == LOG8 else None


def norm_rule_limit(norm_rule: str, dtype: str) -> float:
    """Return the ``RULE`` constant of encoders: 0 for norm_rule=norm, otherwise the largest number that ``dtype`` can store."""
    return 0.0 if norm_rule == "norm" else MAX_STORED[dtype]


class EntryOffsets(NamedTuple):
    """Offsets of one batch entry's input (in values) and streams (in bytes), and the index of its flag."""

    input: Any
    streams: Any
    flag: Any


@triton.jit
def load_origin(origins: tl.tensor, batch: tl.tensor, ALIGNED: tl.constexpr) -> tl.tuple:
    """Load the ``EntryOffsets`` of a batch entry. Input offsets are multiples of ``ALIGNED`` values."""
    row = origins + batch * 3
    return EntryOffsets(tl.multiple_of(tl.load(row), ALIGNED), tl.load(row + 1), tl.load(row + 2))


@triton.jit
def move_pointer(pointer: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """Return a stream's ``pointer`` moved by ``shift`` bytes, a multiple of ``STREAM_ALIGNMENT``."""
    SIZE: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    ALIGNED: tl.constexpr = _STREAM_ALIGNMENT // SIZE
    return pointer + tl.multiple_of(shift // SIZE, ALIGNED)


@triton.jit
def move_pointers(pointers: tl.tuple, shift: tl.tensor) -> tl.tuple:
    moved = ()
    for index in tl.static_range(len(pointers)):
        moved = moved + (move_pointer(pointers[index], shift),)  # noqa: RUF005
    return moved


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
    """Load the values of ``token`` in their stored dtype, ``[token, PADDED_DIM]``. Padding and tokens that are not ``valid`` become 0."""
    channel = tl.arange(0, PADDED_DIM)[None, :]
    row = x + batch * batch_stride + head * head_stride
    return tl.load(row + token * token_stride + channel.to(tl.int64) * channel_stride, valid & (channel < DIM), 0.0)


@triton.jit
def multiply_coordinates(
    rows: tl.tensor,
    matrix: tl.tensor,
    index: tl.tensor,
    BLOCK: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    OPERAND: tl.constexpr,
) -> tl.tensor:
    """Multiply ``rows`` ``[token, PADDED_DIM]`` by matrix ``index`` of ``coordinate_matrices``: float32 ``[token, BLOCK]``."""
    address = matrix + index * PADDED_DIM * BLOCK + tl.arange(0, PADDED_DIM)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    factor = tl.load(address).to(OPERAND)
    if PARTS == 1:
        value = tl.dot(rows.to(OPERAND), factor, input_precision="ieee")
    else:
        value = tl.zeros((rows.shape[0], BLOCK), tl.float32)
        remainder = rows
        for _ in tl.static_range(PARTS):
            part = remainder.to(tl.bfloat16)
            value = tl.dot(part.to(OPERAND), factor, value, input_precision="ieee")
            remainder = remainder - part.to(tl.float32)
    return value


@triton.jit
def flag_unless(ok: tl.tensor, flag: tl.tensor) -> None:
    """Set the flag unless all elements of ``ok`` are true."""
    tl.store(flag, 1, tl.min(ok.to(tl.int32)) == 0)


@triton.jit
def compute_norms(rows: tl.tensor, flag: tl.tensor, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr) -> tl.tensor:
    """Return the norm of each row, float32 ``[token, 1]``. Sets the flag for a norm of ``LIMIT`` or more, and for squares out of range.

    Rows of zeros do not set the flag, but NaN does.
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
    """Store one norm per row. Norms that do not fit, which ``compute_norms`` has flagged, are stored as 0.

    With ``log8_bounds``, a norm is stored as a byte: the number of bounds that do not exceed it.
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
    """Compute the factor of ``formats.norm_rule.unbiased_factor``. All tiles must have the same shape."""
    is_close = (product > 0) & (2 * product * product >= squares * decoded) & (norm < LIMIT)
    return tl.where(is_close, tl.minimum(norm * (squares / tl.where(is_close, product, 1.0)), RULE), norm)


@triton.jit
def store_errors(
    block: tl.tuple, factor: tl.tensor, squares: tl.tensor, product: tl.tensor, decoded: tl.tensor, SHAPE: tl.constexpr
) -> None:
    """Store the error of each token relative to its norm, if errors are measured.

    A token u decodes to ``factor`` times d. ``squares`` is |u|^2, ``product`` <u, d> and ``decoded`` |d|^2, ``[token, 1]`` each.
    """
    if SHAPE.measured:
        error = tl.maximum(squares - 2 * factor * product + factor * factor * decoded, 0.0)
        tl.store(block.errors, tl.sqrt_rn(error / tl.where(squares > 0, squares, float("inf"))), block.valid)


@triton.jit
def look_up_entry(level: tl.tensor, table: tl.tensor, LEVELS: tl.constexpr) -> tl.tensor:
    """Return the table entry of each ``level``. In small tables (up to 16 ``LEVELS``), it is found by comparisons."""
    if LEVELS <= 16:
        entry = tl.zeros(level.shape, tl.float32) + tl.load(table)
        for index in tl.static_range(1, LEVELS):
            entry = tl.where(level >= index, tl.load(table + index), entry)
    else:
        entry = tl.load(table + level)
    return entry


@triton.jit
def find_level(values: tl.tensor, bounds: tl.tensor, LEVELS: tl.constexpr) -> tl.tensor:
    """Return the number of ascending ``bounds`` that are below each value, int32.

    There are ``LEVELS`` - 1 bounds; ``LEVELS`` is a power of two, at most 256. A few bounds are compared one by one, because a lookup
    converts the tile's layout, which costs as much as several comparisons.
    """
    level = tl.zeros(values.shape, tl.int32)
    if LEVELS <= 16:
        for index in tl.static_range(LEVELS - 1):
            level += tl.where(values > tl.load(bounds + index), 1, 0)
    else:
        for step in tl.static_range(1, 9):
            if LEVELS >> step > 0:
                bound = tl.load(bounds + (level + ((LEVELS >> step) - 1)))
                level += tl.where(values > bound, LEVELS >> step, 0)
    return level


@triton.jit
def enclosing_levels(values: tl.tensor, table: tl.tensor, LEVELS: tl.constexpr) -> tl.tuple:
    """Return the two entries of an ascending ``table`` that enclose each value, preceded by the index of the lower entry.

    For a value outside the table, these are the first two or the last two entries.
    """
    if LEVELS <= 16:
        level = tl.zeros(values.shape, tl.int32)
        lower = tl.zeros(values.shape, tl.float32) + tl.load(table)
        upper = tl.zeros(values.shape, tl.float32) + tl.load(table + 1)
        for index in tl.static_range(1, LEVELS - 1):
            above = values > tl.load(table + index)
            level += tl.where(above, 1, 0)
            lower = tl.where(above, tl.load(table + index), lower)
            upper = tl.where(above, tl.load(table + index + 1), upper)
    else:
        level = tl.minimum(find_level(values, table + 1, LEVELS), LEVELS - 2)
        lower = tl.load(table + level)
        upper = tl.load(table + (level + 1))
    return level, lower, upper


@triton.jit
def nearest_integer(values: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Return the integer in [0, ``LARGEST``] that is nearest to each value, int32. Ties go to even integers."""
    limited = tl.minimum(tl.maximum(values, 0.0), LARGEST)
    # Adding 2^23 leaves the integer in the fraction bits.
    return (limited + 8388608.0).to(tl.int32, bitcast=True) & 0x7FFFFF
