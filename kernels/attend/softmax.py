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

from .factors import of_rows, power_and_rests

UNSEEN = tl.constexpr(-1.0e30)
"""The largest score of a row that has seen no token: finite, so that no difference of two is NaN."""


class Softmax(NamedTuple):
    """Running state of a warp's online softmax, in float32.

    The ``largest`` score is ``[warp, 1, row]``, the ``total`` of weights ``[warp, token, row]``, one for each position in its tiles, and
    the ``sums`` of weighted values ``[warp, column, row]``, one for each tile of a token's values.
    """

    largest: Any
    total: Any
    sums: Any


@triton.jit
def empty(V: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr) -> tl.tuple:
    """Return the ``Softmax`` of no tokens. Dual values have the columns of two tokens."""
    V_WIDTHS: tl.constexpr = V.widths
    largest = tl.full((WARPS, 1, ROWS), UNSEEN, tl.float32)
    total = tl.zeros((WARPS, TOKENS, ROWS), tl.float32)
    sums = ()
    for number in tl.static_range(len(V_WIDTHS)):
        sums = sums + (_zeros(WARPS, 2 * V_WIDTHS[number] if V.dual else V_WIDTHS[number], ROWS),)
    return Softmax(largest, total, sums)


@triton.jit
def _zeros(WARPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    return tl.zeros((WARPS, WIDTH, ROWS), tl.float32)


@triton.jit
def add(
    before: tl.tuple,
    scores: tl.tuple,
    loaded: tl.tuple,
    entries: tl.tuple,
    second: tl.tensor,
    lookup: tl.tuple,
    V: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Add the ``loaded`` tiles of values, with ``scores`` ``[warp, token, row]``, to the ``Softmax`` ``before``.

    Earlier sums are rescaled once for all tiles. A value's factor is 2^e times a rest: e is added to the score and the rest multiplies the
    weight, so that weights never leave [-2, 2]. Signs have their own factors and the last sums; e comes from the larger factor.
    """
    STEPS: tl.constexpr = V.steps
    CONSTANTS: tl.constexpr = V.constants
    SHARED: tl.constexpr = V.shared
    SIGNS: tl.constexpr = V.signs
    OUTLIERS: tl.constexpr = V.outliers
    SIGN_STEPS: tl.constexpr = 0 if V.signs is None else V.signs.steps
    FIRST_SIGNS: tl.constexpr = len(before.sums) - SIGN_STEPS
    EACH: tl.constexpr = len(loaded) // len(scores)
    largest, total, weights, sign_weights, plain_weights, kept = _weights(before, scores, loaded, second, V, FAST)
    sums = ()
    for number in tl.static_range(len(before.sums)):
        sums = sums + (before.sums[number] * kept,)
    for number in tl.static_range(len(loaded)):
        weight = _own_weights(weights[number // EACH], second, number, EACH)
        if V.signs is not None:
            sign_weight = _own_weights(sign_weights[number // EACH], second, number, EACH)
        added = ()
        for step in tl.static_range(STEPS):
            tiles = V.decode(loaded[number][0], lookup.column_fields, lookup.table, step, CONSTANTS, SHARED, True, FAST)
            added = added + _weighted(tiles, weight, sums, step * len(tiles))
        for step in tl.static_range(SIGN_STEPS):
            tiles = decode_signs(loaded[number][1], lookup.column_fields, step, SIGNS, FAST)
            added = added + _weighted(tiles, sign_weight, sums, FIRST_SIGNS + step)
        sums = added
        if V.outliers is not None:
            sums = add_outlier_values(sums, entries, plain_weights[number], number, OUTLIERS, FAST)
    return Softmax(largest, total, sums)


@triton.jit
def _weights(before: tl.tuple, scores: tl.tuple, loaded: tl.tuple, second: tl.tensor, V: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """Return the new largest score, the total of weights, the weights, and the factor of the earlier sums ``[warp, 1, row]``.

    Weights are ``[warp, token, row]`` per tile, for values, signs and outliers.
    """
    EACH: tl.constexpr = len(loaded) // len(scores)
    powered = ()
    powers = ()
    for tile in tl.static_range(len(scores)):
        score = scores[tile]
        if V.factor is not None or V.signs is not None:
            power = power_and_rests(loaded[tile * EACH : (tile + 1) * EACH], second, V, FAST)
            score = score + of_rows(power[0])
            powers = powers + (power,)
        powered = powered + (score,)
    largest = tl.maximum(before.largest, tl.max(_largest_of(powered), 1)[:, None, :])
    kept = tl.exp2(before.largest - largest)
    total = before.total * kept
    weights = ()
    sign_weights = ()
    plain_weights = ()
    for tile in tl.static_range(len(scores)):
        weight = tl.exp2(powered[tile] - largest)
        if V.factor is not None or V.signs is not None:
            plain = weight * of_rows(powers[tile][1])
            total += plain
            plain_weights = plain_weights + (plain,)
            if V.signs is not None:
                sign_weights = sign_weights + (weight * of_rows(powers[tile][3]),)
            weight = weight * of_rows(powers[tile][2])
        else:
            total += weight
            plain_weights = plain_weights + (weight,)
        weights = weights + (weight,)
    return largest, total, weights, sign_weights, plain_weights, kept


@triton.jit
def _weighted(tiles: tl.tuple, weights: tl.tensor, sums: tl.tuple, FIRST: tl.constexpr) -> tl.tuple:
    """Add V^T P^T of some tiles ``[warp, column, token]`` to the sums from number ``FIRST`` on, and return those sums."""
    new = ()
    for number in tl.static_range(len(tiles)):
        tile = tiles[number]
        value_sum = sums[FIRST + number]
        if tile.dtype == tl.bfloat16:
            # A bfloat16 weight has 8 bits: a second product adds those that rounding has dropped.
            high = weights.to(tl.bfloat16)
            value_sum = tl.dot(tile, high, value_sum)
            value_sum = tl.dot(tile, (weights - high.to(tl.float32)).to(tl.bfloat16), value_sum)
        elif tile.dtype == tl.float16:
            value_sum = tl.dot(tile, weights.to(tl.float16), value_sum)
        else:
            # Matrix units take float32 as TF32, with 11 bits; three products of high and low parts restore the rest.
            value_sum = tl.dot(tile, weights, value_sum, input_precision="tf32x3")
        new = new + (value_sum,)
    return new


@triton.jit
def _own_weights(weights: tl.tensor, second: tl.tensor, NUMBER: tl.constexpr, EACH: tl.constexpr) -> tl.tensor:
    """Return the weights for value tile ``NUMBER`` from rows with the weights of two tokens; ``EACH`` is the tiles per pair of tokens."""
    if EACH == 2:
        weights = tl.where(second == (NUMBER % 2 == 1), weights, 0)
    return weights


@triton.jit
def _largest_of(tiles: tl.tuple) -> tl.tensor:
    """Return the elementwise maximum of ``tiles``."""
    largest = tiles[0]
    for number in tl.static_range(1, len(tiles)):
        largest = tl.maximum(largest, tiles[number])
    return largest


@triton.jit
def _product_alone(value: tl.tensor, kept: tl.tensor) -> tl.tensor:
    """Return ``value`` times ``kept``, which is at most 1, rounded.

    Two lanes add two such products, each its own to the other's. Fused with its own product, the addition would give them different sums.
    """
    return tl.where(kept > 1, 0.0, value * kept)


@triton.jit
def merge_tokens(softmax: tl.tuple, second: tl.tensor, V: tl.constexpr) -> tl.tuple:
    """Merge the ``Softmax`` of the first and second tokens of tile rows: half as many rows, and for dual values half the columns."""
    largest = softmax.largest
    total = softmax.total
    WARPS: tl.constexpr = largest.shape[0]
    ROWS: tl.constexpr = largest.shape[2] // 2
    WIDTH: tl.constexpr = V.widths[0]
    most = tl.max(tl.reshape(largest, (WARPS, 1, 2, ROWS)), 2)
    kept = tl.exp2(largest - tl.reshape(tl.broadcast_to(most[:, :, None, :], (WARPS, 1, 2, ROWS)), (WARPS, 1, 2 * ROWS)))
    added = ()
    for number in tl.static_range(len(softmax.sums)):
        if V.dual:
            # Columns of dual tiles alternate between two tokens: drop products of one token's values with the other's weights.
            value = tl.where((tl.arange(0, 2 * WIDTH)[None, :, None] // V.interleave % 2 == 1) == second, softmax.sums[number] * kept, 0.0)
            value = tl.sum(tl.sum(tl.reshape(value, (WARPS, WIDTH // V.interleave, 2, V.interleave, 2, ROWS)), 4), 2)
            value = tl.reshape(value, (WARPS, WIDTH, ROWS))
        else:
            value = _product_alone(softmax.sums[number], kept)
            value = tl.sum(tl.reshape(value, (WARPS, value.shape[1], 2, ROWS)), 2)
        added = added + (value,)
    return Softmax(most, tl.sum(tl.reshape(_product_alone(total, kept), (WARPS, 1, 2, ROWS)), 2), added)
