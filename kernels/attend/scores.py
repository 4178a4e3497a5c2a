"""Scores of a warp's tiles of keys: S^T = K q^T, scaled, capped and masked."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.bitpack.tile_layout import second_token_offset
from kvpack.kernels.loaders.key_mean import load_products
from kvpack.kernels.loaders.outliers import add_outlier_scores
from kvpack.kernels.loaders.qjl import decode_bits, factor_of_bits

from .factors import factor_of, of_rows


class Lookup(NamedTuple):
    """Constants for decoding the tiles of a side: column fields (``bitfields.load_column_fields``), and its table in global memory."""

    column_fields: Any
    table: Any


class Visible(NamedTuple):
    """The tokens that a query sees: those before ``end``, up to ``ahead`` after its own, and the newest ``window`` of these.

    ``first`` is the first visible token, or None if the window alone decides it.
    """

    end: Any
    ahead: Any
    window: Any
    first: Any


@triton.jit
def score(
    loaded: tl.tuple,
    entries: tl.tuple,
    queries: tl.tuple,
    cap: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    visible: tl.tuple,
    lookup: tl.tuple,
    K: tl.constexpr,
    DUAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Return base-2 logarithms of weights, ``[warp, token, row]`` for each ``loaded`` tile; with ``MASKED``, -inf for invisible tokens.

    ``token`` ``[warp, token]`` are the tokens of each warp's first tile; ``first`` is the token of the first warp, counted from the first
    page of means. With ``DUAL``, a score belongs to that token if the row is not ``queries.second``, else to the one after it
    (``tile_layout.second_token_offset``); keys that are not dual have a tile for each.
    """
    TOKENS: tl.constexpr = token.shape[1]
    EACH: tl.constexpr = 2 if DUAL and not K.dual else 1
    scores = ()
    for tile in tl.static_range(len(loaded) // EACH):
        found = _score(
            loaded[tile * EACH : (tile + 1) * EACH], entries, queries, cap, first, lookup, K, DUAL, len(loaded) // EACH, tile, TOKENS,
            SOFTCAP, FAST,
        )  # fmt: skip
        if MASKED:
            at = (token + tile * (2 * TOKENS if DUAL else TOKENS))[:, :, None]  # [warp, token, 1], with DUAL [warp, token, row]
            if DUAL:
                at = at + queries.second.to(tl.int32) * second_token_offset(DUAL, TOKENS)
            seen = (at < visible.end) & (at <= queries.position + visible.ahead) & (at > queries.position - visible.window)
            if visible.first is not None:
                seen = seen & (at >= visible.first)
            found = tl.where(seen, found, float("-inf"))
        scores = scores + (found,)
    return scores


@triton.jit
def _score(
    loaded: tl.tuple,
    entries: tl.tuple,
    queries: tl.tuple,
    cap: tl.tensor,
    first: tl.tensor,
    lookup: tl.tuple,
    K: tl.constexpr,
    DUAL: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Return the scores ``[warp, token, row]`` of one tile; signs use the last columns of the query.

    If two tiles were ``loaded``, their tokens share a row of scores, and each has its own query tiles.
    """
    STEPS: tl.constexpr = K.steps
    CONSTANTS: tl.constexpr = K.constants
    SHARED: tl.constexpr = K.shared
    SIGNS: tl.constexpr = K.signs
    MEANS: tl.constexpr = K.means
    OUTLIERS: tl.constexpr = K.outliers
    SIGN_STEPS: tl.constexpr = 0 if K.signs is None else K.signs.steps
    OWN: tl.constexpr = len(queries.tiles) // len(loaded)
    WARPS: tl.constexpr = queries.tiles[0].shape[0]
    ROWS: tl.constexpr = queries.tiles[0].shape[2]
    # Tokens are the first axis of the product: a tile has more tokens than a decode step has query rows, and the matrix units
    # take 16 rows of their first operand at a time, but only 8 columns of the second.
    scores = tl.zeros((WARPS, TOKENS, ROWS), tl.float32)
    for number in tl.static_range(len(loaded)):
        for step in tl.static_range(STEPS):
            tiles = K.decode(loaded[number][0], lookup.column_fields, lookup.table, step, CONSTANTS, SHARED, False, FAST)
            products = scores
            if K.step_factor is not None:
                products = tl.zeros((WARPS, TOKENS, ROWS), tl.float32)
            products = _add_products(products, tiles, queries.tiles, number * (STEPS * len(tiles) + SIGN_STEPS) + step * len(tiles))
            if K.step_factor is not None:
                products = scores + products * K.step_factor(loaded[number][0], step, CONSTANTS, FAST)[:, :, None]
            scores = products
    if K.factor is not None:
        scores = scores * of_rows(factor_of(loaded, 0, queries.second, K.factor, CONSTANTS, K.dual, FAST))
    if K.signs is not None:
        products = tl.zeros((WARPS, TOKENS, ROWS), tl.float32) + queries.half_sum
        for number in tl.static_range(len(loaded)):
            for step in tl.static_range(SIGN_STEPS):
                tiles = decode_bits(loaded[number][1], lookup.column_fields, step, SIGNS, FAST)
                products = _add_products(products, tiles, queries.tiles, (number + 1) * OWN - SIGN_STEPS + step)
        scores += products * of_rows(factor_of(loaded, 1, queries.second, factor_of_bits, SIGNS, False, FAST))
    if K.means is not None:
        scores += load_products(
            queries.products, queries.pages, queries.padded, first, queries.second, MEANS, DUAL, TILES, TILE, WARPS, TOKENS
        )  # fmt: skip
    if K.outliers is not None:
        scores = add_outlier_scores(scores, entries, queries.tiles, TILE, OUTLIERS, FAST)
    if K.offset:
        scores += queries.offset
    scores = scores * queries.scale
    if SOFTCAP:
        # cap * tanh(s / cap): 1 / cap is in scale, and the logarithm's base in cap.
        scores = (1 - 2 / (tl.exp2(scores * 2.885390081777927) + 1)) * cap
    return scores


@triton.jit
def _add_products(scores: tl.tensor, tiles: tl.tuple, q: tl.tuple, FIRST: tl.constexpr) -> tl.tensor:
    """Add K q^T of ``tiles`` ``[warp, token, column]`` and the query's tiles from ``FIRST`` on to scores ``[warp, token, row]``.

    For bfloat16 tiles ``q`` holds high and low halves, whose two products are exact enough.
    """
    for number in tl.static_range(len(tiles)):
        tile = tiles[number]
        if tile.dtype == tl.bfloat16:
            scores = tl.dot(tile, q[2 * (FIRST + number)], scores)
            scores = tl.dot(tile, q[2 * (FIRST + number) + 1], scores)
        else:
            scores = tl.dot(tile, q[FIRST + number], scores, input_precision="tf32x3")
    return scores
