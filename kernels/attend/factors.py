"""Token factors: one scale per token. Instead of decoded values, scores and softmax weights are multiplied by it."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.kernels.bitpack.tile_layout import repeat_columns
from kvpack.kernels.loaders.qjl import sign_norm_factor

MIN_OUTLIER_FACTOR = tl.constexpr(2.0**-7)
"""Minimum factor assumed for a token with outliers, so that a weight divided by the factor's power of two is at most 2^7."""


@triton.jit
def tile_factors(
    loaded: tl.tuple,
    AT: tl.constexpr,
    is_second: tl.tensor,
    FACTOR: tl.constexpr,
    CONSTANTS: tl.constexpr,
    PAIRED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Return the token factors of the ``loaded`` tiles: ``[warp, token]``, or ``[warp, token, row]`` if rows attend to different tokens.

    ``FACTOR`` converts the stored factors, which are element ``AT`` of each loaded tile. With ``PAIRED``, a tile row contains two tokens,
    and ``FACTOR`` returns their factors as two tensors ``[warp, token]`` or as one tensor ``[warp, token, 2]``.
    """
    factor = FACTOR(loaded[0][AT], CONSTANTS, FAST)
    if PAIRED and len(factor) == 1:
        factor = repeat_columns(factor[0], is_second.shape[2] // 2, False)
    elif PAIRED:
        factor = tl.where(is_second, factor[1][:, :, None], factor[0][:, :, None])
    elif len(loaded) == 2:
        factor = tl.where(is_second, FACTOR(loaded[1][AT], CONSTANTS, FAST)[:, :, None], factor[:, :, None])
    return factor


@triton.jit
def broadcast_over_rows(value: tl.tensor) -> tl.tensor:
    """Reshape ``[warp, token]`` to ``[warp, token, 1]``, so that it broadcasts over query rows.

    Return tensors with three axes unchanged.
    """
    if len(value.shape) == 2:
        value = value[:, :, None]
    return value


@triton.jit
def _power_and_quotient(factor: tl.tensor) -> tl.tuple:
    """Split ``factor`` into 2^e times a quotient with magnitude in [1, 2). Returns e, 2^-e and the quotient.

    The split is exact for magnitudes of at least 2^-100; a smaller factor gets the quotient 0. If the factor is 0, e is the largest e of
    the tile, because the token's weight still counts in the softmax total and must not underflow.
    """
    bits = factor.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    tiny = exponent < 27
    exponent = tl.where(tiny, tl.maximum(tl.max(exponent, 1), 27)[:, None], exponent)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    quotient = tl.where(tiny, 0, (bits & ~0x7F800000) | 0x3F800000).to(tl.float32, bitcast=True)
    return (exponent - 127).to(tl.float32), inverse, quotient


@triton.jit
def power_and_quotients(
    loaded: tl.tuple,
    is_second: tl.tensor,
    V: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Return e, 2^-e and the token factor divided by 2^e.

    For values with QJL signs or outliers, also return the signs' factor divided by 2^e. e is the exponent of the token factor or of the
    signs' factor, whichever is larger (see ``_power_and_quotient``).
    """
    CONSTANTS: tl.constexpr = V.constants
    SIGNS: tl.constexpr = V.signs
    if V.factor is None:
        factor = tl.full(tile_factors(loaded, 1, is_second, sign_norm_factor, SIGNS, False, FAST).shape, 1.0, tl.float32)
    else:
        factor = tile_factors(loaded, 0, is_second, V.factor, CONSTANTS, V.dual, FAST)
    if V.signs is None and V.outliers is None:
        result = _power_and_quotient(factor)
    else:
        largest = tl.abs(factor)
        if V.outliers is not None:
            largest = tl.maximum(largest, MIN_OUTLIER_FACTOR)
        sign_factor = largest
        if V.signs is not None:
            sign_factor = tile_factors(loaded, 1, is_second, sign_norm_factor, SIGNS, False, FAST)
            largest = tl.maximum(largest, tl.abs(sign_factor))
        power, inverse, _ = _power_and_quotient(largest)
        result = power, inverse, factor * inverse, sign_factor * inverse
    return result
