"""Online softmax over tiles of values: weights P^T of scores, and sums O^T = V^T P^T (FlashAttention's recurrence)."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.loaders.outliers import add_outlier_values
from kvpack.kernels.loaders.qjl import decode_signs

from .factors import broadcast_over_rows, power_and_quotients

NO_SCORE = tl.constexpr(-1.0e30)
"""Initial largest score of a row. It is finite, so that differences of two scores are never NaN."""

_PAIR_WEIGHTS = tl.constexpr(
    """{ .reg .b32 pair, lane, select; movmatrix.sync.aligned.m8n8.trans.b16 pair, $2;
        mov.u32 lane, %laneid; shr.u32 lane, lane, 4;
        mad.lo.u32 select, lane, 0xFFFFCC34, 0x4410; prmt.b32 $0, pair, 0, select;
        mad.lo.u32 select, lane, 0xFFFFEE12, 0x4432; prmt.b32 $1, pair, 0, select; }"""
)
"""PTX of ``pair_weights`` for 8 rows: a lane has two tokens of one row, of the first half of the rows in the first half of the lanes."""


class Softmax(NamedTuple):
    """State of a warp's online softmax, in float32.

    ``largest`` is the largest score so far, ``[warp, 1, row]``. ``total`` is the sum of weights, ``[warp, token, row]``, kept separately
    for each token position of a tile. ``sums`` are the weighted sums of values, one tensor ``[warp, column, row]`` per value tile of a
    token.
    """

    largest: Any
    total: Any
    sums: Any


@triton.jit
def empty_softmax(V: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr) -> tl.tuple:
    """Return the initial ``Softmax``, without any tokens. For dual values (two tokens per tile row), sums have twice as many columns."""
    V_WIDTHS: tl.constexpr = V.widths
    largest = tl.full((WARPS, 1, ROWS), NO_SCORE, tl.float32)
    total = tl.zeros((WARPS, TOKENS, ROWS), tl.float32)
    sums = ()
    for index in tl.static_range(len(V_WIDTHS)):
        sums = sums + (_zeros(WARPS, V_WIDTHS[index] // 2 if V.paired else 2 * V_WIDTHS[index] if V.dual else V_WIDTHS[index], ROWS),)
    return Softmax(largest, total, sums)


@triton.jit
def _zeros(WARPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    return tl.zeros((WARPS, WIDTH, ROWS), tl.float32)


@triton.jit
def add(
    softmax: tl.tuple,
    scores: tl.tuple,
    loaded: tl.tuple,
    entries: tl.tuple,
    is_second: tl.tensor,
    lookup: tl.tuple,
    V: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Add the ``loaded`` tiles of values to ``softmax``. ``scores`` contains one tensor ``[warp, token, row]`` per tile.

    The earlier sums are rescaled once for all tiles. A token's factor is split into 2^e and a quotient: e is added to the score, and the
    quotient multiplies the weight, so that weights stay in [-2, 2]. QJL signs have their own factors, and their sums come last; e is then
    the exponent of the larger factor.
    """
    MODE: tl.constexpr = V.mode
    STEPS: tl.constexpr = V.steps
    CONSTANTS: tl.constexpr = V.constants
    SIGNS: tl.constexpr = V.signs
    OUTLIERS: tl.constexpr = V.outliers
    SIGN_STEPS: tl.constexpr = 0 if V.signs is None else V.signs.steps
    FIRST_SIGNS: tl.constexpr = len(softmax.sums) - SIGN_STEPS
    TILES_PER_ROW: tl.constexpr = len(loaded) // len(scores)
    largest, total, weights, sign_weights, plain_weights, rescale = _weights(softmax, scores, loaded, is_second, V, FAST)
    sums = ()
    for index in tl.static_range(len(softmax.sums)):
        sums = sums + (softmax.sums[index] * rescale,)
    for index in tl.static_range(len(loaded)):
        weight = _tile_weights(weights[index // TILES_PER_ROW], is_second, index, TILES_PER_ROW)
        if V.paired:
            weight = pair_weights(weight, is_second, FAST)
        if V.signs is not None:
            sign_weight = _tile_weights(sign_weights[index // TILES_PER_ROW], is_second, index, TILES_PER_ROW)
        added = ()
        for step in tl.static_range(STEPS):
            tiles = V.decode(loaded[index][0], lookup.column_fields, lookup.table, step, CONSTANTS, MODE)
            if V.paired:
                added = added + (tl.dot(tiles[1], weight[1], tl.dot(tiles[0], weight[0], sums[step])),)
            else:
                added = added + _add_weighted(tiles, weight, sums, step * len(tiles))
        for step in tl.static_range(SIGN_STEPS):
            tiles = decode_signs(loaded[index][1], lookup.column_fields, step, SIGNS, MODE)
            added = added + _add_weighted(tiles, sign_weight, sums, FIRST_SIGNS + step)
        sums = added
        if V.outliers is not None:
            sums = add_outlier_values(sums, entries, plain_weights[index], index, OUTLIERS, FAST)
    return Softmax(largest, total, sums)


@triton.jit
def _weights(softmax: tl.tuple, scores: tl.tuple, loaded: tl.tuple, is_second: tl.tensor, V: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """Return the new largest score and total, three kinds of weights (for values, signs and outliers), and the factor that rescales earlier
    sums.

    Weights are ``[warp, token, row]`` for each tile; the factor is ``[warp, 1, row]``.
    """
    TILES_PER_ROW: tl.constexpr = len(loaded) // len(scores)
    shifted_scores = ()
    powers = ()
    for tile in tl.static_range(len(scores)):
        score = scores[tile]
        if V.factor is not None or V.signs is not None:
            power = power_and_quotients(loaded[tile * TILES_PER_ROW : (tile + 1) * TILES_PER_ROW], is_second, V, FAST)
            score = score + broadcast_over_rows(power[0])
            powers = powers + (power,)
        shifted_scores = shifted_scores + (score,)
    largest = tl.maximum(softmax.largest, tl.max(_largest_of(shifted_scores), 1)[:, None, :])
    rescale = tl.exp2(softmax.largest - largest)
    total = softmax.total * rescale
    weights = ()
    sign_weights = ()
    plain_weights = ()
    for tile in tl.static_range(len(scores)):
        weight = tl.exp2(shifted_scores[tile] - largest)
        if V.factor is not None or V.signs is not None:
            plain = weight * broadcast_over_rows(powers[tile][1])
            total += plain
            plain_weights = plain_weights + (plain,)
            if V.signs is not None:
                sign_weights = sign_weights + (weight * broadcast_over_rows(powers[tile][3]),)
            weight = weight * broadcast_over_rows(powers[tile][2])
        else:
            total += weight
            plain_weights = plain_weights + (weight,)
        weights = weights + (weight,)
    return largest, total, weights, sign_weights, plain_weights, rescale


@triton.jit
def _add_weighted(tiles: tl.tuple, weights: tl.tensor, sums: tl.tuple, FIRST: tl.constexpr) -> tl.tuple:
    """Return the sums from ``sums[FIRST]`` on, plus the products V^T P^T of ``tiles`` ``[warp, column, token]`` and ``weights``."""
    added = ()
    for index in tl.static_range(len(tiles)):
        tile = tiles[index]
        value_sum = sums[FIRST + index]
        if tile.dtype == tl.bfloat16:
            # A bfloat16 weight has 8 significant bits: a second product adds the bits lost to rounding.
            high = weights.to(tl.bfloat16)
            value_sum = tl.dot(tile, high, value_sum)
            value_sum = tl.dot(tile, (weights - high.to(tl.float32)).to(tl.bfloat16), value_sum)
        elif tile.dtype == tl.float16:
            value_sum = tl.dot(tile, weights.to(tl.float16), value_sum)
        else:
            # Matrix units round float32 to TF32, with 11 significant bits; three products of high and low parts restore the precision.
            value_sum = tl.dot(tile, weights, value_sum, input_precision="tf32x3")
        added = added + (value_sum,)
    return added


@triton.jit
def pair_weights(weights: tl.tensor, is_second: tl.tensor, FAST: tl.constexpr) -> tl.tuple:
    """Return the weights ``[warp, token, row]`` for both tiles of a paired step (``Tiles.paired``).

    In the first tile, positions 2i and 2i + 1 are the two fields of token 2i. In the second tile, they are the two fields of token 2i + 1.
    Each query row uses one of the fields: there it gets the token's weight, and 0 at the other position.
    """
    WARPS: tl.constexpr = weights.shape[0]
    TOKENS: tl.constexpr = weights.shape[1]
    ROWS: tl.constexpr = weights.shape[2]
    weights = weights.to(tl.float16)
    if FAST:
        # Registers are exchanged here from the layout of products to that of second operands, of which the compiler only sees a view.
        first, other = tl.inline_asm_elementwise(_PAIR_WEIGHTS, "=r,=r,r", [weights], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
        first = tl.reshape(tl.trans(tl.reshape(first, (WARPS, TOKENS // 8, 8, ROWS)), 0, 1, 3, 2), (WARPS, TOKENS, ROWS))
        other = tl.reshape(tl.trans(tl.reshape(other, (WARPS, TOKENS // 8, 8, ROWS)), 0, 1, 3, 2), (WARPS, TOKENS, ROWS))
    else:
        even, odd = tl.split(tl.trans(tl.reshape(weights, (WARPS, TOKENS // 2, 2, ROWS)), 0, 1, 3, 2))
        field = (tl.arange(0, 2) == 1)[None, None, :, None]
        first = tl.reshape(tl.where(field == is_second[:, :, None, :], even[:, :, None, :], 0.0), (WARPS, TOKENS, ROWS))
        other = tl.reshape(tl.where(field == is_second[:, :, None, :], odd[:, :, None, :], 0.0), (WARPS, TOKENS, ROWS))
    return first.to(tl.float16), other.to(tl.float16)


@triton.jit
def _tile_weights(weights: tl.tensor, is_second: tl.tensor, TILE: tl.constexpr, TILES_PER_ROW: tl.constexpr) -> tl.tensor:
    """Return the weights for value tile ``TILE``. If a score row covers two tiles, rows that belong to the other tile's tokens become 0."""
    if TILES_PER_ROW == 2:
        weights = tl.where(is_second == (TILE % 2 == 1), weights, 0)
    return weights


@triton.jit
def _largest_of(tiles: tl.tuple) -> tl.tensor:
    largest = tiles[0]
    for index in tl.static_range(1, len(tiles)):
        largest = tl.maximum(largest, tiles[index])
    return largest


@triton.jit
def _round_product(value: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Return ``value * factor``, rounded before any later addition. ``factor`` must be at most 1.

    Two threads add the same two products in opposite order, and fused multiply-adds would make their sums differ.
    """
    return tl.where(factor > 1, 0.0, value * factor)


@triton.jit
def merge_tokens(softmax: tl.tuple, is_second: tl.tensor, V: tl.constexpr) -> tl.tuple:
    """Merge the sums for the first and the second tokens of tile rows. This halves the rows and, for dual values, the columns."""
    largest = softmax.largest
    total = softmax.total
    WARPS: tl.constexpr = largest.shape[0]
    ROWS: tl.constexpr = largest.shape[2] // 2
    WIDTH: tl.constexpr = V.widths[0]
    new_largest = tl.max(tl.reshape(largest, (WARPS, 1, 2, ROWS)), 2)
    rescale = tl.exp2(largest - tl.reshape(tl.broadcast_to(new_largest[:, :, None, :], (WARPS, 1, 2, ROWS)), (WARPS, 1, 2 * ROWS)))
    added = ()
    for index in tl.static_range(len(softmax.sums)):
        if V.dual:
            # Columns of dual tiles alternate between two tokens: drop products of one token's values with the other's weights.
            value = tl.where(
                (tl.arange(0, 2 * WIDTH)[None, :, None] // V.interleave % 2 == 1) == is_second, softmax.sums[index] * rescale, 0.0
            )
            value = tl.sum(tl.sum(tl.reshape(value, (WARPS, WIDTH // V.interleave, 2, V.interleave, 2, ROWS)), 4), 2)
            value = tl.reshape(value, (WARPS, WIDTH, ROWS))
        else:
            value = _round_product(softmax.sums[index], rescale)
            value = tl.sum(tl.reshape(value, (WARPS, value.shape[1], 2, ROWS)), 2)
        added = added + (value,)
    return Softmax(new_largest, tl.sum(tl.reshape(_round_product(total, rescale), (WARPS, 1, 2, ROWS)), 2), added)
