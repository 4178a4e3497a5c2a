"""The axes of tiles: ``[warp, token, column]`` for keys, and ``TURNED``, ``[warp, column, token]``, for values.

Loaded turned, the matrix units' loads from shared memory turn them back. Where rows of words are narrow, the first half of the columns
is of one token, and the second half of another, ``BEHIND`` tokens behind it (0: there is none); where they are narrower still
(``Tiles.run``), so are the halves of each run of columns.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def of_tokens(value: tl.tensor, TURNED: tl.constexpr) -> tl.tensor:
    """``[warp, token]`` that broadcasts to a tile."""
    if TURNED:
        value = value[:, None, :]
    else:
        value = value[:, :, None]
    return value


@triton.jit
def of_columns(value: tl.tensor, TURNED: tl.constexpr) -> tl.tensor:
    """``[warp, column]`` that broadcasts to a tile."""
    if TURNED:
        value = value[:, :, None]
    else:
        value = value[:, None, :]
    return value


@triton.constexpr_function
def tokens_behind(paired: int, tokens: int) -> int:
    """How many tokens the second one of a row is behind the first, in a tile of ``tokens`` rows (``tiles.APART``)."""
    return (0, tokens, 1)[paired]


@triton.jit
def repeated(value: tl.tensor, COPIES: tl.constexpr, TURNED: tl.constexpr) -> tl.tensor:
    """``[warp, token, n]``, or turned, ``[warp, n, token]``, as a tile of n times ``COPIES`` columns, those of one beside each other."""
    WARPS: tl.constexpr = value.shape[0]
    COUNT: tl.constexpr = value.shape[1 if TURNED else 2]
    TOKENS: tl.constexpr = value.shape[2 if TURNED else 1]
    if TURNED:
        value = tl.reshape(tl.broadcast_to(value[:, :, None, :], (WARPS, COUNT, COPIES, TOKENS)), (WARPS, COUNT * COPIES, TOKENS))
    else:
        value = tl.reshape(tl.broadcast_to(value[:, :, :, None], (WARPS, TOKENS, COUNT, COPIES)), (WARPS, TOKENS, COUNT * COPIES))
    return value


@triton.jit
def parts_of(value: tl.tensor) -> tl.tuple:
    """Of each element of the last axis, a power of two of them, a tensor of all that have it."""
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
def copied(value: tl.tensor, COPIES: tl.constexpr, TURNED: tl.constexpr) -> tl.tensor:
    """A tile whose columns repeat those of ``value``."""
    if COPIES > 1:
        WARPS: tl.constexpr = value.shape[0]
        WIDTH: tl.constexpr = value.shape[1 if TURNED else 2]
        TOKENS: tl.constexpr = value.shape[2 if TURNED else 1]
        if TURNED:
            value = tl.broadcast_to(value[:, None, :, :], (WARPS, COPIES, WIDTH, TOKENS))
            value = tl.reshape(value, (WARPS, COPIES * WIDTH, TOKENS))
        else:
            value = tl.broadcast_to(value[:, :, None, :], (WARPS, TOKENS, COPIES, WIDTH))
            value = tl.reshape(value, (WARPS, TOKENS, COPIES * WIDTH))
    return value


@triton.jit
def token_of_columns(token: tl.tensor, second: tl.tensor, BEHIND: tl.constexpr, TURNED: tl.constexpr) -> tl.tensor:
    """The token of each column; ``second``, ``[1, column]`` of 0 and 1, is 1 where it is the one behind ``token``."""
    value = of_tokens(token, TURNED)
    if BEHIND:
        value = value + of_columns(second, TURNED) * BEHIND
    return value


@triton.jit
def valid_columns(valid: tl.tensor, second: tl.tensor, BEHIND: tl.constexpr, TURNED: tl.constexpr) -> tl.tensor:
    """Which columns of a tile are of valid tokens; ``valid`` is that of both tokens, if there are two."""
    if BEHIND:
        is_second = of_columns(second, TURNED) != 0
        value = (of_tokens(valid[0], TURNED) & (is_second == 0)) | (of_tokens(valid[1], TURNED) & is_second)
    else:
        value = of_tokens(valid, TURNED)
    return value
