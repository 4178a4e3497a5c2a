"""Token norms of codecs that encode within a unit vector: the first and last steps of their quantizers."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
from triton import language as tl

from .rows import LARGEST_SQUARE, SMALLEST_SQUARE, limit_of, log8_bounds_of, norms_of, rule_of, store_norms, unbiased_factor

if TYPE_CHECKING:
    import torch

    from kvpack.formats.octahedral import Octahedral
    from kvpack.formats.scalar import Scalar

_SMALLEST_SQUARE, _LARGEST_SQUARE = tl.constexpr(SMALLEST_SQUARE), tl.constexpr(LARGEST_SQUARE)


class Norms(NamedTuple):
    """The least norm that does not fit, the ``rule`` of ``rows.rule_of``, and the index of the table for ``store_norms``, or -1."""

    limit: float
    rule: float
    log8: int


class NormState(NamedTuple):
    """Per token, ``[token, 1]``: its norm, the factor that scales its values to a unit vector, and sums over decoded values."""

    norm: Any
    factor: Any
    product: Any
    decoded: Any


def norms_for(codec: Scalar | Octahedral, tables: list[torch.Tensor], device: torch.device) -> Norms:
    """Return the constants of ``codec``, and add its table to ``tables`` if it has one."""
    bounds = log8_bounds_of(codec.norm, device)
    if bounds is not None:
        tables.append(bounds)
    dtype = codec.scales(1, 1, 1)["norm"].dtype
    return Norms(limit_of(dtype), rule_of(codec.norm_rule, dtype), -1 if bounds is None else len(tables) - 1)


@triton.jit
def begin_norms(block: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
    """Return the ``NormState`` of tokens before any decoded value is added."""
    norm = norms_of(block.rows, block.flag, CONSTANTS.norms.limit, _SMALLEST_SQUARE, _LARGEST_SQUARE)
    factor = SHAPE.scale / tl.maximum(norm, 1e-37)
    return NormState(norm, factor, tl.zeros(norm.shape, tl.float32), tl.zeros(norm.shape, tl.float32))


@triton.jit
def with_decoded(state: tl.tuple, value: tl.tensor, decoded: tl.tensor) -> tl.tuple:
    """Add a block's values within the unit vector, and their decoded values, to ``state``."""
    product = state.product + tl.sum(value * decoded, 1)[:, None]
    return NormState(state.norm, state.factor, product, state.decoded + tl.sum(decoded * decoded, 1)[:, None])


@triton.jit
def end_norms(block: tl.tuple, state: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> None:
    """Store the norms in the first stream of scales."""
    LIMIT: tl.constexpr = CONSTANTS.norms.limit
    RULE: tl.constexpr = CONSTANTS.norms.rule
    LOG8: tl.constexpr = CONSTANTS.norms.log8
    norm = state.norm
    if RULE > 0:
        norm = unbiased_factor(norm, 1.0, state.product, state.decoded, LIMIT, RULE)
    if LOG8 < 0:
        store_norms(block.stored[0], norm, block.row, block.valid, None, LIMIT)
    else:
        store_norms(block.stored[0], norm, block.row, block.valid, block.tables[LOG8], LIMIT)
