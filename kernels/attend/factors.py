"""Token factors, by which scores and weights are multiplied."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.kernels.bitpack.tile_layout import repeated
from kvpack.kernels.loaders.qjl import factor_of_signs

MIN_OF_OUTLIERS = tl.constexpr(2.0**-7)
"""The least factor that a token with outliers is taken for: weights over its power of two are at most 2^7."""


@triton.jit
def factor_of(
    loaded: tl.tuple,
    AT: tl.constexpr,
    second: tl.tensor,
    FACTOR: tl.constexpr,
    CONSTANTS: tl.constexpr,
    PAIRED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Return the factors in part ``AT`` of each ``loaded`` tile, ``[warp, token]``, or ``[warp, token, row]`` if two tokens share a row.

    For two tokens ``FACTOR`` returns one tensor each, or one ``[warp, token, 2]``.
    """
    factor = FACTOR(loaded[0][AT], CONSTANTS, FAST)
    if PAIRED and len(factor) == 1:
        factor = repeated(factor[0], second.shape[2] // 2, False)
    elif PAIRED:
        factor = tl.where(second, factor[1][:, :, None], factor[0][:, :, None])
    elif len(loaded) == 2:
        factor = tl.where(second, FACTOR(loaded[1][AT], CONSTANTS, FAST)[:, :, None], factor[:, :, None])
    return factor


@triton.jit
def of_rows(value: tl.tensor) -> tl.tensor:
    """Reshape ``[warp, token]`` so that it broadcasts to rows."""
    if len(value.shape) == 2:
        value = value[:, :, None]
    return value


@triton.jit
def _power_and_rest(factor: tl.tensor) -> tl.tuple:
    """Split ``factor`` into 2^e and a rest of 1 to 2 in size: return e, 2^-e and the rest.

    The split is exact down to 2^-100; below that the rest is 0. A token of factor 0 gets the largest e of its tile: its weight counts, and
    must not underflow next to the others.
    """
    bits = factor.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    tiny = exponent < 27
    exponent = tl.where(tiny, tl.maximum(tl.max(exponent, 1), 27)[:, None], exponent)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    rest = tl.where(tiny, 0, (bits & ~0x7F800000) | 0x3F800000).to(tl.float32, bitcast=True)
    return (exponent - 127).to(tl.float32), inverse, rest


@triton.jit
def power_and_rests(
    loaded: tl.tuple,
    second: tl.tensor,
    V: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Return e and 2^-e of ``_power_and_rest`` for the larger of a token's factors, and each factor divided by 2^e."""
    CONSTANTS: tl.constexpr = V.constants
    SIGNS: tl.constexpr = V.signs
    if V.factor is None:
        factor = tl.full(factor_of(loaded, 1, second, factor_of_signs, SIGNS, False, FAST).shape, 1.0, tl.float32)
    else:
        factor = factor_of(loaded, 0, second, V.factor, CONSTANTS, V.dual, FAST)
    if V.signs is None and V.outliers is None:
        result = _power_and_rest(factor)
    else:
        most = tl.abs(factor)
        if V.outliers is not None:
            most = tl.maximum(most, MIN_OF_OUTLIERS)
        of_signs = most
        if V.signs is not None:
            of_signs = factor_of(loaded, 1, second, factor_of_signs, SIGNS, False, FAST)
            most = tl.maximum(most, tl.abs(of_signs))
        power, inverse, _ = _power_and_rest(most)
        result = power, inverse, factor * inverse, of_signs * inverse
    return result
