"""Attention scores of a warp's tiles of keys: S^T = K q^T, scaled, capped and masked."""

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
from kvpack.kernels.loaders.qjl import bit_factor, decode_bits

from .factors import broadcast_over_rows, tile_factors


class DecodeConstants(NamedTuple):
    """Run-time constants for decoding: the column fields (``bitfields.load_column_fields``), and the lookup table in global memory."""

    column_fields: Any
    table: Any


class VisibleTokens(NamedTuple):
    """Bounds of the tokens that a query attends to: before ``end``, at most ``ahead`` positions after the query, and within its ``window``.

    ``first`` is the first visible token, or None if only the window limits earlier tokens.
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
    """Return base-2 scores ``[warp, token, row]`` for each ``loaded`` tile. With ``MASKED``, invisible tokens get the score -inf.

    ``token``, ``[warp, token]``, contains the token numbers of each warp's first tile. ``first`` is the first warp's first token, counted
    from the start of the program's first page of means. With ``DUAL``, the scores in ``queries.is_second`` rows belong to the token that is
    ``tile_layout.second_token_offset`` tokens later. If key tiles are not dual, that token has a tile of its own.
    """
    TOKENS: tl.constexpr = token.shape[1]
    TOKENS_PER_ROW: tl.constexpr = 2 if DUAL and not K.dual else 1
    scores = ()
    for tile in tl.static_range(len(loaded) // TOKENS_PER_ROW):
        tile_scores = _score_tile(
            loaded[tile * TOKENS_PER_ROW : (tile + 1) * TOKENS_PER_ROW], entries, queries, cap, first, lookup, K, DUAL,
            len(loaded) // TOKENS_PER_ROW, tile, TOKENS, SOFTCAP, MASKED, FAST,
        )  # fmt: skip
        if MASKED:
            position = (token + tile * (2 * TOKENS if DUAL else TOKENS))[:, :, None]  # [warp, token, 1], with DUAL [warp, token, row]
            if DUAL:
                position = position + queries.is_second.to(tl.int32) * second_token_offset(DUAL, TOKENS)
            is_visible = (
                (position < visible.end) & (position <= queries.position + visible.ahead) & (position > queries.position - visible.window)
            )
            if visible.first is not None:
                is_visible = is_visible & (position >= visible.first)
            tile_scores = tl.where(is_visible, tile_scores, float("-inf"))
        scores = scores + (tile_scores,)
    return scores


@triton.jit
def _score_tile(
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
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Return the base-2 scores ``[warp, token, row]`` of the warps' tile ``TILE``.

    Products with QJL signs use the last columns of the query. If two tiles are ``loaded``, their tokens share rows of scores, and each tile
    has its own query tiles.
    """
    MODE: tl.constexpr = K.mode
    STEPS: tl.constexpr = K.steps
    CONSTANTS: tl.constexpr = K.constants
    SIGNS: tl.constexpr = K.signs
    MEANS: tl.constexpr = K.means
    OUTLIERS: tl.constexpr = K.outliers
    SIGN_STEPS: tl.constexpr = 0 if K.signs is None else K.signs.steps
    TILES_PER_TOKEN: tl.constexpr = len(queries.tiles) // len(loaded)
    WARPS: tl.constexpr = queries.tiles[0].shape[0]
    ROWS: tl.constexpr = queries.tiles[0].shape[2]
    # Tokens are the rows of the product: a tile has more tokens than a decode step has query rows, and matrix units process at least 16
    # rows of their first operand, but only 8 columns of the second.
    scores = tl.zeros((WARPS, TOKENS, ROWS), tl.float32)
    for index in tl.static_range(len(loaded)):
        for step in tl.static_range(STEPS):
            tiles = K.decode(loaded[index][0], lookup.column_fields, lookup.table, step, CONSTANTS, MODE)
            products = scores
            if K.step_factor is not None:
                products = tl.zeros((WARPS, TOKENS, ROWS), tl.float32)
            products = _add_products(products, tiles, queries.tiles, index * (STEPS * len(tiles) + SIGN_STEPS) + step * len(tiles))
            if K.step_factor is not None:
                products = scores + products * K.step_factor(loaded[index][0], step, CONSTANTS, FAST)[:, :, None]
            scores = products
    if K.factor is not None:
        scores = scores * broadcast_over_rows(tile_factors(loaded, 0, queries.is_second, K.factor, CONSTANTS, K.dual, FAST))
    if K.signs is not None:
        products = tl.zeros((WARPS, TOKENS, ROWS), tl.float32) + queries.half_sum
        for index in tl.static_range(len(loaded)):
            for step in tl.static_range(SIGN_STEPS):
                tiles = decode_bits(loaded[index][1], lookup.column_fields, step, SIGNS, MODE)
                products = _add_products(products, tiles, queries.tiles, (index + 1) * TILES_PER_TOKEN - SIGN_STEPS + step)
        scores += products * broadcast_over_rows(tile_factors(loaded, 1, queries.is_second, bit_factor, SIGNS, False, FAST))
    if K.means is not None:
        scores += load_products(
            queries.products, queries.pages, queries.stride, first, queries.is_second, MEANS, DUAL, TILES, TILE, WARPS, TOKENS, MASKED,
            FAST,
        )  # fmt: skip
    if K.outliers is not None:
        scores = add_outlier_scores(scores, entries, queries.tiles, TILE, OUTLIERS, FAST)
    if K.offset:
        scores += queries.offset
    scores = scores * queries.scale
    if SOFTCAP:
        # cap * tanh(s / cap): scale includes 1 / cap, and cap includes log2(e).
        scores = (1 - 2 / (tl.exp2(scores * 2.885390081777927) + 1)) * cap
    return scores


@triton.jit
def _add_products(scores: tl.tensor, tiles: tl.tuple, q: tl.tuple, FIRST: tl.constexpr) -> tl.tensor:
    """Add K q^T to ``scores`` ``[warp, token, row]``, for key ``tiles`` ``[warp, token, column]`` and the query tiles from ``q[FIRST]`` on.

    For bfloat16 tiles, ``q`` contains a high and a low half per tile, because one bfloat16 product is not precise enough.
    """
    for index in tl.static_range(len(tiles)):
        tile = tiles[index]
        if tile.dtype == tl.bfloat16:
            scores = tl.dot(tile, q[2 * (FIRST + index)], scores)
            scores = tl.dot(tile, q[2 * (FIRST + index) + 1], scores)
        else:
            scores = tl.dot(tile, q[FIRST + index], scores, input_precision="tf32x3")
    return scores
