"""Append new tokens to the raw tails of a layer, at a position stored on the device."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 1024
"""Values that a program copies at once."""


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
    """Append ``k`` and ``v`` ``[batch, HEADS, tokens, dim]`` to tails ``[batch, HEADS, room, dim]``, one program per sequence.

    ``lengths`` int32 ``[batch]`` counts the tokens stored and is increased by ``tokens``; the first ``packed`` (int32 ``[1]``) of them are
    in pages. Tokens beyond the room are counted but not written. ``not_finite`` int32 ``[1]`` is set if a value is not finite.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + sequence)
    at = length - tl.load(packed)
    _append_side(k_tail, k, sequence, at, not_finite, tokens, room, HEADS, K_DIM, BLOCK)
    _append_side(v_tail, v, sequence, at, not_finite, tokens, room, HEADS, V_DIM, BLOCK)
    # Only after every warp has read the old length may it change.
    tl.debug_barrier()
    tl.store(lengths + sequence, length + tokens)


@triton.jit
def _append_side(
    tail: tl.tensor,
    x: tl.tensor,
    sequence: tl.tensor,
    at: tl.tensor,
    not_finite: tl.tensor,
    tokens: tl.tensor,
    room: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    for begin in range(0, HEADS * tokens * DIM, BLOCK):
        number = begin + tl.arange(0, BLOCK)
        real = number < HEADS * tokens * DIM
        value = tl.load(x + sequence * HEADS * tokens * DIM + number, real, 0.0)
        row = number // DIM
        token = at + row % tokens
        real = real & (token >= 0) & (token < room)
        tl.store(tail + ((sequence * HEADS + row // tokens) * room + token) * DIM + number % DIM, value, real)
        lost = tl.sum((tl.abs(value.to(tl.float32)) < float("inf")).to(tl.int32), 0) < BLOCK
        tl.store(not_finite, 1, lost)
