"""First and last steps of the quantizers that encode unit vectors and store one norm per token."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.octahedral import Octahedral
from kvpack.formats.scalar import Scalar

from .rows import (
    MAX_SQUARE,
    MIN_SQUARE,
    compute_norms,
    norm_byte_bounds,
    norm_limit,
    norm_rule_limit,
    store_errors,
    store_norms,
    unbiased_factor,
)

_MIN_SQUARE, _MAX_SQUARE = tl.constexpr(MIN_SQUARE), tl.constexpr(MAX_SQUARE)


class NormConstants(NamedTuple):
    """Compile-time constants for norms.

    ``limit`` is the smallest norm that overflows its dtype, and ``rule`` comes from ``rows.norm_rule_limit``. If norms are stored as bytes,
    ``log8`` is the index of the table that ``store_norms`` needs; otherwise, it is -1.
    """

    limit: float
    rule: float
    log8: int


class NormState(NamedTuple):
    """State of a program's tokens, ``[token, 1]`` each.

    ``norm`` is a token's norm, and ``factor`` normalizes its values. ``product`` and ``decoded`` are sums: of values times decoded values,
    and of squared decoded values.
    """

    norm: Any
    factor: Any
    product: Any
    decoded: Any


def create_norms(codec: Scalar | Octahedral, tables: list[torch.Tensor], device: torch.device) -> NormConstants:
    """Return the ``NormConstants`` of ``codec``. If norms have 8 bits, the table of their bounds is appended to ``tables``."""
    bounds = norm_byte_bounds(codec.norm, device)
    if bounds is not None:
        tables.append(bounds)
    dtype = codec.scale_layouts(1, 1, 1)["norm"].dtype
    return NormConstants(norm_limit(dtype), norm_rule_limit(codec.norm_rule, dtype), -1 if bounds is None else len(tables) - 1)


@triton.jit
def begin_norms(block: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
    """Return the initial ``NormState``, before any block is added."""
    norm = compute_norms(block.rows, block.flag, CONSTANTS.norms.limit, _MIN_SQUARE, _MAX_SQUARE)
    factor = SHAPE.scale / tl.maximum(norm, 1e-37)
    return NormState(norm, factor, tl.zeros(norm.shape, tl.float32), tl.zeros(norm.shape, tl.float32))


@triton.jit
def add_decoded(state: tl.tuple, value: tl.tensor, decoded: tl.tensor) -> tl.tuple:
    """Add a block of the normalized vector and the block's decoded values to ``state``."""
    product = state.product + tl.sum(value * decoded, 1)[:, None]
    return NormState(state.norm, state.factor, product, state.decoded + tl.sum(decoded * decoded, 1)[:, None])


@triton.jit
def finish_norms(block: tl.tuple, state: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> None:
    """Store the norms of the tokens in the first stream of scales. If the codec requests it, apply the norm_rule=unbiased correction."""
    LIMIT: tl.constexpr = CONSTANTS.norms.limit
    RULE: tl.constexpr = CONSTANTS.norms.rule
    LOG8: tl.constexpr = CONSTANTS.norms.log8
    norm = state.norm
    if RULE > 0:
        norm = unbiased_factor(norm, 1.0, state.product, state.decoded, LIMIT, RULE)
    # All results for a token of zeros are 0.
    squares = tl.where(state.norm > 0, 1.0, 0.0)
    store_errors(block, norm / tl.where(state.norm > 0, state.norm, 1.0), squares, state.product, state.decoded, SHAPE)
    if LOG8 < 0:
        store_norms(block.stored[0], norm, block.row, block.valid, None, LIMIT)
    else:
        store_norms(block.stored[0], norm, block.row, block.valid, block.tables[LOG8], LIMIT)
