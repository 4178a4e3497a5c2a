"""The running softmax over decoded tiles: scores S^T = K q^T, weights, and sums O^T = V^T P^T (FlashAttention's recurrence)."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.kernels.loaders.outliers import add_outlier_scores, add_outlier_values
from kvpack.kernels.loaders.qjl import decode_bits, decode_signs, factor_of_bits
from kvpack.kernels.words.tile_layout import second_token_offset

from .factors import factor_of, of_rows, power_and_rests

UNSEEN = tl.constexpr(-1.0e30)
"""The largest score of a row that has seen no token: finite, so that no difference of two is NaN."""


@triton.jit
def _products(tiles: tl.tuple, q: tl.tuple, scores: tl.tensor, FIRST: tl.constexpr) -> tl.tensor:
    """Add K q^T of some tiles; ``q`` holds high and low halves for bfloat16 tiles, whose products with both are exact enough."""
    for number in tl.static_range(len(tiles)):
        tile = tiles[number]
        if tile.dtype == tl.bfloat16:
            scores = tl.dot(tile, q[2 * (FIRST + number)], scores)
            scores = tl.dot(tile, q[2 * (FIRST + number) + 1], scores)
        else:
            scores = tl.dot(tile, q[FIRST + number], scores, input_precision="tf32x3")
    return scores


@triton.jit
def _scores(
    raws: tl.tuple,
    entries: tl.tuple,
    q: tl.tuple,
    half_sum: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    places: tl.tuple,
    table: tl.tensor,
    like: tl.tensor,
    second: tl.tensor,
    K: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Base-2 logarithms of weights, ``[warp, token, row]``; signs have the last columns of the query.

    Two ``raws`` are of tokens that share a row of scores (``add_tiles``), and each has query tiles of its own.
    """
    STEPS: tl.constexpr = K.steps
    CONSTANTS: tl.constexpr = K.constants
    SHARED: tl.constexpr = K.shared
    SIGNS: tl.constexpr = K.signs
    OUTLIERS: tl.constexpr = K.outliers
    SIGN_STEPS: tl.constexpr = 0 if K.signs is None else K.signs.steps
    OWN: tl.constexpr = len(q) // len(raws)
    scores = tl.zeros(like.shape, tl.float32)
    for number in tl.static_range(len(raws)):
        for step in tl.static_range(STEPS):
            tiles = K.decode(raws[number][0], places, table, step, CONSTANTS, SHARED, False, FAST)
            scores = _products(tiles, q, scores, number * (STEPS * len(tiles) + SIGN_STEPS) + step * len(tiles))
    if K.factor is not None:
        scores = scores * of_rows(factor_of(raws, 0, second, K.factor, CONSTANTS, K.dual, FAST))
    if K.signs is not None:
        products = tl.zeros(like.shape, tl.float32) + half_sum
        for number in tl.static_range(len(raws)):
            for step in tl.static_range(SIGN_STEPS):
                tiles = decode_bits(raws[number][1], places, step, SIGNS, FAST)
                products = _products(tiles, q, products, (number + 1) * OWN - SIGN_STEPS + step)
        scores += products * of_rows(factor_of(raws, 1, second, factor_of_bits, SIGNS, False, FAST))
    if K.outliers is not None:
        scores = add_outlier_scores(scores, entries, q, TILE, OUTLIERS, FAST)
    scores = scores * scale
    if SOFTCAP:
        # cap * tanh(s / cap): 1 / cap is in scale, and the logarithm's base in cap.
        scores = (1 - 2 / (tl.exp2(scores * 2.885390081777927) + 1)) * cap
    return scores


@triton.jit
def _weighted(tiles: tl.tuple, weights: tl.tensor, sums: tl.tuple, FIRST: tl.constexpr) -> tl.tuple:
    """Add V^T P^T of some tiles ``[warp, column, token]`` to the sums from number ``FIRST`` on; returns those sums."""
    new = ()
    for number in tl.static_range(len(tiles)):
        tile = tiles[number]
        value_sum = sums[FIRST + number]
        if tile.dtype == tl.bfloat16:
            high = weights.to(tl.bfloat16)
            value_sum = tl.dot(tile, high, value_sum)
            value_sum = tl.dot(tile, (weights - high.to(tl.float32)).to(tl.bfloat16), value_sum)
        elif tile.dtype == tl.float16:
            value_sum = tl.dot(tile, weights.to(tl.float16), value_sum)
        else:
            value_sum = tl.dot(tile, weights, value_sum, input_precision="tf32x3")
        new = new + (value_sum,)
    return new


@triton.jit
def _own_weights(weights: tl.tensor, second: tl.tensor, NUMBER: tl.constexpr, EACH: tl.constexpr) -> tl.tensor:
    """Of weights of two tokens a row, those of tile ``NUMBER`` of the values, of which the two have ``EACH``."""
    if EACH == 2:
        weights = tl.where(second == (NUMBER % 2 == 1), weights, 0)
    return weights


@triton.jit
def _largest_of(tiles: tl.tuple) -> tl.tensor:
    """Of the values at each place of some tiles."""
    largest = tiles[0]
    for number in tl.static_range(1, len(tiles)):
        largest = tl.maximum(largest, tiles[number])
    return largest


@triton.jit
def key_scores(
    k_raws: tl.tuple,
    k_entries: tl.tuple,
    q: tl.tuple,
    half_sum: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    position: tl.tensor,
    token: tl.tensor,
    second: tl.tensor,
    end: tl.tensor,
    ahead: tl.tensor,
    window: tl.tensor,
    k_places: tl.tuple,
    k_table: tl.tensor,
    like: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """``_scores`` of tiles of tokens, -inf where a query does not see one.

    If either side is paired, scores ``[warp, token, row]`` are of token t where the row is not ``second``, else of the one behind it
    (``tile_layout.second_token_offset``); a side that is not paired has a tile for each of the two.
    """
    TOKENS: tl.constexpr = like.shape[1]
    PAIRS: tl.constexpr = K.dual or V.dual
    K_EACH: tl.constexpr = 2 if PAIRS and not K.dual else 1
    scores = ()
    for tile in tl.static_range(len(k_raws) // K_EACH):
        score = _scores(
            k_raws[tile * K_EACH : (tile + 1) * K_EACH], k_entries, q, half_sum, scale, cap, k_places, k_table, like, second,
            K, tile, SOFTCAP, FAST,
        )  # fmt: skip
        if MASKED:
            at = (token + tile * (2 * TOKENS if PAIRS else TOKENS))[:, :, None]
            if PAIRS:
                at = at + second.to(tl.int32) * second_token_offset(PAIRS, TOKENS)
            seen = (at < end) & (at <= position + ahead) & (at > position - window)
            score = tl.where(seen, score, float("-inf"))
        scores = scores + (score,)
    return scores


@triton.jit
def add_tiles(
    scores: tl.tuple,
    v_raws: tl.tuple,
    v_entries: tl.tuple,
    second: tl.tensor,
    v_places: tl.tuple,
    v_table: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    sums: tl.tuple,
    V: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Tiles of tokens added to (largest score, sum of weights, sums of values), which are rescaled once for all of them.

    A value's factor is 2^e times a rest: e joins the score and the rest the weight, so that weights never leave [-2, 2]. Signs have
    factors of their own, and the last sums; e is that of the larger factor.
    """
    STEPS: tl.constexpr = V.steps
    CONSTANTS: tl.constexpr = V.constants
    SHARED: tl.constexpr = V.shared
    SIGNS: tl.constexpr = V.signs
    OUTLIERS: tl.constexpr = V.outliers
    SIGN_STEPS: tl.constexpr = 0 if V.signs is None else V.signs.steps
    FIRST_SIGNS: tl.constexpr = len(sums) - SIGN_STEPS
    TILES: tl.constexpr = len(scores)
    V_EACH: tl.constexpr = len(v_raws) // TILES
    powered = ()
    powers = ()
    for tile in tl.static_range(TILES):
        score = scores[tile]
        if V.factor is not None or V.signs is not None:
            raws = v_raws[tile * V_EACH : (tile + 1) * V_EACH]
            power = power_and_rests(raws, second, V, FAST)
            score = score + of_rows(power[0])
            powers = powers + (power,)
        powered = powered + (score,)
    new_largest = tl.maximum(largest, tl.max(_largest_of(powered), 1)[:, None, :])
    kept = tl.exp2(largest - new_largest)
    total = total * kept
    weights = ()
    sign_weights = ()
    plain_weights = ()
    for tile in tl.static_range(TILES):
        weight = tl.exp2(powered[tile] - new_largest)
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
    rescaled = ()
    for number in tl.static_range(len(sums)):
        rescaled = rescaled + (sums[number] * kept,)
    for number in tl.static_range(len(v_raws)):
        weight = _own_weights(weights[number // V_EACH], second, number, V_EACH)
        if V.signs is not None:
            sign_weight = _own_weights(sign_weights[number // V_EACH], second, number, V_EACH)
        new_sums = ()
        for step in tl.static_range(STEPS):
            decoded = V.decode(v_raws[number][0], v_places, v_table, step, CONSTANTS, SHARED, True, FAST)
            new_sums = new_sums + _weighted(decoded, weight, rescaled, step * len(decoded))
        for step in tl.static_range(SIGN_STEPS):
            decoded = decode_signs(v_raws[number][1], v_places, step, SIGNS, FAST)
            new_sums = new_sums + _weighted(decoded, sign_weight, rescaled, FIRST_SIGNS + step)
        rescaled = new_sums
        if V.outliers is not None:
            rescaled = add_outlier_values(rescaled, v_entries, plain_weights[number], number, OUTLIERS, FAST)
    return new_largest, total, rescaled


@triton.jit
def _product_alone(value: tl.tensor, kept: tl.tensor) -> tl.tensor:
    """``value`` times ``kept``, which is at most 1, rounded.

    Two lanes add two of these, each its own to the other's: were an addition one operation with its own product, they would differ.
    """
    return tl.where(kept > 1, 0.0, value * kept)


@triton.jit
def add_halves(
    largest: tl.tensor,
    total: tl.tensor,
    sums: tl.tuple,
    second: tl.tensor,
    V: tl.constexpr,
) -> tl.tuple:
    """What ``add_tiles`` gave for the first and for the second tokens, together: half as many rows, and of paired values columns."""
    WARPS: tl.constexpr = largest.shape[0]
    ROWS: tl.constexpr = largest.shape[2] // 2
    WIDTH: tl.constexpr = V.widths[0]
    most = tl.max(tl.reshape(largest, (WARPS, 1, 2, ROWS)), 2)
    kept = tl.exp2(largest - tl.reshape(tl.broadcast_to(most[:, :, None, :], (WARPS, 1, 2, ROWS)), (WARPS, 1, 2 * ROWS)))
    added = ()
    for number in tl.static_range(len(sums)):
        if V.dual:
            # Other columns are values of one token with the weights of the other.
            value = tl.where((tl.arange(0, 2 * WIDTH)[None, :, None] // V.interleave % 2 == 1) == second, sums[number] * kept, 0.0)
            value = tl.sum(tl.sum(tl.reshape(value, (WARPS, WIDTH // V.interleave, 2, V.interleave, 2, ROWS)), 4), 2)
            value = tl.reshape(value, (WARPS, WIDTH, ROWS))
        else:
            value = _product_alone(sums[number], kept)
            value = tl.sum(tl.reshape(value, (WARPS, value.shape[1], 2, ROWS)), 2)
        added = added + (value,)
    return most, tl.sum(tl.reshape(_product_alone(total, kept), (WARPS, 1, 2, ROWS)), 2), added
