"""Kernel that appends new tokens to a layer's raw tails (its newest, uncompressed tokens) at a position stored on the device."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 1024
"""Number of values copied per iteration of a program."""


@triton.jit
def append_tokens(
    k_tail: tl.tensor,
    v_tail: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    lengths: tl.tensor,
    packed: tl.tensor,
    not_finite: tl.tensor,
    tokens: tl.tensor,
    room: tl.tensor,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Append ``tokens`` new tokens to the raw tails of a layer. Each program appends the tokens of one sequence.

    ``k`` and ``v`` are ``[batch, HEADS, tokens, dim]``, and the tails are ``[batch, HEADS, room, dim]``. ``lengths``, int32 ``[batch]``,
    counts the tokens of each sequence, and the kernel adds ``tokens`` to it. ``packed``, int32 ``[1]``, is the number of tokens in packed
    pages. Tokens past the end of a tail are counted but not written. ``not_finite``, int32 ``[1]``, is set to 1 if a value is not finite.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + sequence)
    position = length - tl.load(packed)
    _append_side(k_tail, k, sequence, position, not_finite, tokens, room, HEADS, K_DIM, BLOCK)
    _append_side(v_tail, v, sequence, position, not_finite, tokens, room, HEADS, V_DIM, BLOCK)
    # The length must not change before every warp has read it.
    tl.debug_barrier()
    tl.store(lengths + sequence, length + tokens)


@triton.jit
def _append_side(
    tail: tl.tensor,
    x: tl.tensor,
    sequence: tl.tensor,
    position: tl.tensor,
    not_finite: tl.tensor,
    tokens: tl.tensor,
    room: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    for begin in range(0, HEADS * tokens * DIM, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        valid = index < HEADS * tokens * DIM
        value = tl.load(x + sequence * HEADS * tokens * DIM + index, valid, 0.0)
        row = index // DIM
        token = position + row % tokens
        valid = valid & (token >= 0) & (token < room)
        tl.store(tail + ((sequence * HEADS + row // tokens) * room + token) * DIM + index % DIM, value, valid)
        has_nonfinite = tl.sum((tl.abs(value.to(tl.float32)) < float("inf")).to(tl.int32), 0) < BLOCK
        tl.store(not_finite, 1, has_nonfinite)
