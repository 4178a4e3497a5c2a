"""The axes of tiles: ``[warp, token, column]`` for keys, and ``[warp, column, token]`` (transposed) for values.

Values are loaded transposed; matrix instructions transpose them back when they load operands from shared memory.

If a token has few words, tiles are *dual*: a tile row contains the words of two tokens. The first half of the columns belongs to one token,
and the second half to the token ``SECOND_OFFSET`` tokens later (0 if tiles are not dual). If a token has even fewer words, the two tokens
alternate every ``Tiles.interleave`` columns.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def broadcast_tokens(value: tl.tensor, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Reshape ``[warp, token]`` to ``[warp, token, 1]``, or transposed ``[warp, 1, token]``, so that it broadcasts to a tile."""
    if TRANSPOSED:
        value = value[:, None, :]
    else:
        value = value[:, :, None]
    return value


@triton.jit
def broadcast_columns(value: tl.tensor, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Reshape ``[warp, column]`` to ``[warp, 1, column]``, or transposed ``[warp, column, 1]``, so that it broadcasts to a tile."""
    if TRANSPOSED:
        value = value[:, :, None]
    else:
        value = value[:, None, :]
    return value


@triton.constexpr_function
def second_token_offset(dual: int, tokens: int) -> int:
    """Return the distance in tokens between the two tokens of a dual tile's row, or 0 if tiles are not dual.

    The tile has ``tokens`` rows; ``dual`` is ``Tiles.dual``.
    """
    return (0, tokens, 1)[dual]


@triton.jit
def repeat_columns(value: tl.tensor, COPIES: tl.constexpr, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Place ``COPIES`` copies of each column next to each other: ``[warp, token, width]`` becomes ``[warp, token, width * COPIES]``.

    If transposed, columns are the middle axis.
    """
    WARPS: tl.constexpr = value.shape[0]
    COUNT: tl.constexpr = value.shape[1 if TRANSPOSED else 2]
    TOKENS: tl.constexpr = value.shape[2 if TRANSPOSED else 1]
    if TRANSPOSED:
        value = tl.reshape(tl.broadcast_to(value[:, :, None, :], (WARPS, COUNT, COPIES, TOKENS)), (WARPS, COUNT * COPIES, TOKENS))
    else:
        value = tl.reshape(tl.broadcast_to(value[:, :, :, None], (WARPS, TOKENS, COUNT, COPIES)), (WARPS, TOKENS, COUNT * COPIES))
    return value


@triton.jit
def split_last_axis(value: tl.tensor) -> tl.tuple:
    """Split ``value`` into one tensor per element of its last axis, whose length must be a power of two."""
    COUNT: tl.constexpr = value.shape[-1]
    parts = ()
    if COUNT == 1:
        parts = (tl.reshape(value, value.shape[:-1]),)
    else:
        even, odd = tl.split(tl.reshape(value, value.shape[:-1] + [COUNT // 2, 2]))
        even = split_last_axis(even)
        odd = split_last_axis(odd)
        for index in tl.static_range(COUNT // 2):
            parts = parts + (even[index], odd[index])
    return parts


@triton.jit
def tile_copies(value: tl.tensor, COPIES: tl.constexpr, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Return a tile that consists of ``COPIES`` copies of the tile ``value``, side by side."""
    if COPIES > 1:
        WARPS: tl.constexpr = value.shape[0]
        WIDTH: tl.constexpr = value.shape[1 if TRANSPOSED else 2]
        TOKENS: tl.constexpr = value.shape[2 if TRANSPOSED else 1]
        if TRANSPOSED:
            value = tl.broadcast_to(value[:, None, :, :], (WARPS, COPIES, WIDTH, TOKENS))
            value = tl.reshape(value, (WARPS, COPIES * WIDTH, TOKENS))
        else:
            value = tl.broadcast_to(value[:, :, None, :], (WARPS, TOKENS, COPIES, WIDTH))
            value = tl.reshape(value, (WARPS, TOKENS, COPIES * WIDTH))
    return value


@triton.jit
def column_tokens(token: tl.tensor, is_second: tl.tensor, SECOND_OFFSET: tl.constexpr, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Return the token of each tile element, in a shape that broadcasts to the tile.

    ``token`` is ``[warp, token]``. ``is_second``, ``[1, column]``, is 1 for columns that belong to a row's second token, and 0 for others.
    """
    value = broadcast_tokens(token, TRANSPOSED)
    if SECOND_OFFSET:
        value = value + broadcast_columns(is_second, TRANSPOSED) * SECOND_OFFSET
    return value


@triton.jit
def valid_columns(valid: tl.tensor, is_second: tl.tensor, SECOND_OFFSET: tl.constexpr, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Return a mask of valid tile elements, in a shape that broadcasts to the tile.

    ``valid`` is ``[warp, token]``. For a dual tile, it is a pair of such masks, for the first and the second tokens.
    """
    if SECOND_OFFSET:
        in_second = broadcast_columns(is_second, TRANSPOSED) != 0
        value = (broadcast_tokens(valid[0], TRANSPOSED) & (in_second == 0)) | (broadcast_tokens(valid[1], TRANSPOSED) & in_second)
    else:
        value = broadcast_tokens(valid, TRANSPOSED)
    return value
