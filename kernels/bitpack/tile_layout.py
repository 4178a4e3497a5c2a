"""The axes of tiles: ``[warp, token, column]`` for keys, and ``[warp, column, token]`` (``TRANSPOSED``) for values.

Values are loaded transposed so that the matrix units' own loads from shared memory transpose them back.

Where rows of words are narrow, tiles are *dual*: a row contains the words of two tokens. The first half of its columns belongs to one
token and the second half to another, ``SECOND_OFFSET`` tokens further on (0: tiles are not dual). Where rows are narrower still, the
two tokens alternate every ``Tiles.interleave`` columns.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def of_tokens(value: tl.tensor, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Reshape ``value`` from ``[warp, token]`` to ``[warp, token, 1]`` or transposed ``[warp, 1, token]``, to broadcast to a tile."""
    if TRANSPOSED:
        value = value[:, None, :]
    else:
        value = value[:, :, None]
    return value


@triton.jit
def of_columns(value: tl.tensor, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Reshape ``value`` from ``[warp, column]`` to ``[warp, 1, column]`` or transposed ``[warp, column, 1]``, to broadcast to a tile."""
    if TRANSPOSED:
        value = value[:, :, None]
    else:
        value = value[:, None, :]
    return value


@triton.constexpr_function
def second_token_offset(dual: int, tokens: int) -> int:
    """Return the distance between the two tokens of a row, in a tile of ``tokens`` rows; ``dual`` is as in ``Tiles.dual``."""
    return (0, tokens, 1)[dual]


@triton.jit
def repeated(value: tl.tensor, COPIES: tl.constexpr, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Repeat each column of ``[warp, token, n]``, or transposed, ``[warp, n, token]``, in place to n * ``COPIES`` columns."""
    WARPS: tl.constexpr = value.shape[0]
    COUNT: tl.constexpr = value.shape[1 if TRANSPOSED else 2]
    TOKENS: tl.constexpr = value.shape[2 if TRANSPOSED else 1]
    if TRANSPOSED:
        value = tl.reshape(tl.broadcast_to(value[:, :, None, :], (WARPS, COUNT, COPIES, TOKENS)), (WARPS, COUNT * COPIES, TOKENS))
    else:
        value = tl.reshape(tl.broadcast_to(value[:, :, :, None], (WARPS, TOKENS, COUNT, COPIES)), (WARPS, TOKENS, COUNT * COPIES))
    return value


@triton.jit
def parts_of(value: tl.tensor) -> tl.tuple:
    """Split the last axis, whose length is a power of two, into one tensor per element."""
    COUNT: tl.constexpr = value.shape[-1]
    parts = ()
    if COUNT == 1:
        parts = (tl.reshape(value, value.shape[:-1]),)
    else:
        even, odd = tl.split(tl.reshape(value, value.shape[:-1] + [COUNT // 2, 2]))
        even = parts_of(even)
        odd = parts_of(odd)
        for number in tl.static_range(COUNT // 2):
            parts = parts + (even[number], odd[number])
    return parts


@triton.jit
def copied(value: tl.tensor, COPIES: tl.constexpr, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Place ``COPIES`` copies of the tile ``value`` side by side."""
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
def token_of_columns(token: tl.tensor, second: tl.tensor, SECOND_OFFSET: tl.constexpr, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Return the token of each column, broadcast to a tile.

    ``token`` is ``[warp, token]``; ``second``, ``[1, column]``, is 1 if a column belongs to the second token of a row, else 0.
    """
    value = of_tokens(token, TRANSPOSED)
    if SECOND_OFFSET:
        value = value + of_columns(second, TRANSPOSED) * SECOND_OFFSET
    return value


@triton.jit
def valid_columns(valid: tl.tensor, second: tl.tensor, SECOND_OFFSET: tl.constexpr, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Return a mask of the columns with a valid token, broadcast to a tile.

    ``valid`` is ``[warp, token]``, or two of these, of the first and second tokens, in a dual tile.
    """
    if SECOND_OFFSET:
        is_second = of_columns(second, TRANSPOSED) != 0
        value = (of_tokens(valid[0], TRANSPOSED) & (is_second == 0)) | (of_tokens(valid[1], TRANSPOSED) & is_second)
    else:
        value = of_tokens(valid, TRANSPOSED)
    return value
