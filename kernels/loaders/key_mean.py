"""Page means of keys in attention tiles (sidecar key_mean, spec/side-cars.md). All tokens of a page share one product of query and mean.

``attend.means`` computes these products before a program's first tile; a tile only adds them to its scores.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import triton
from triton import language as tl

from kvpack.formats.key_mean import CODES, SCALE
from kvpack.kernels.bitpack.streams import Stream
from kvpack.kernels.bitpack.tile_layout import second_token_offset

from .tiles import PageMeans

if TYPE_CHECKING:
    from kvpack.formats.key_mean import KeyMean

    from .tiles import Tiles


def with_means(tiles: Tiles, key_mean: KeyMean) -> Tiles:
    """Return the loader ``tiles`` of a key codec, extended with page means."""
    streams = Stream(CODES, 8, key_mean.dim * key_mean.bits // 8, key_mean.tokens), Stream(SCALE, 16, 1, key_mean.tokens)
    means = PageMeans(key_mean.tokens, key_mean.dim, key_mean.bits, streams)
    return replace(tiles, means=means, keys=None if tiles.keys is None else replace(tiles.keys, means=means))


@triton.jit
def load_products(
    products: tl.tensor,
    pages: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    MEANS: tl.constexpr,
    DUAL: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Load the product of each query row and each token's page mean, float32 ``[warp, token, row]``, or ``[warp, 1, row]`` for whole pages.

    ``products`` are pointers ``[1, 1, row]`` to the products of page 0, the first of the program's ``pages`` pages, which are ``stride``
    products apart. ``first`` is the token of the first warp's first tile, counted from page 0. Warps have ``TILES`` tiles, of which this is
    number ``TILE``. ``second`` is as in ``Queries``. With ``MASKED``, some tokens may be after the last one.
    """
    SPAN: tl.constexpr = 2 * TOKENS if DUAL else TOKENS
    token = first + TILE * SPAN + tl.arange(0, WARPS)[:, None, None] * (TILES * SPAN)
    if not MEANS.whole:
        ADJACENT: tl.constexpr = DUAL and second_token_offset(DUAL, TOKENS) == 1
        token += tl.arange(0, TOKENS)[None, :, None] * (2 if ADJACENT else 1)
        if DUAL:
            token = token + second.to(tl.int32) * second_token_offset(DUAL, TOKENS)
    SHIFT: tl.constexpr = MEANS.tokens.bit_length() - 1
    page = token >> SHIFT
    if MASKED:
        # Products of tokens after the last one are never used.
        page = tl.minimum(page, pages - 1)
    return tl.load(products + page * stride)
