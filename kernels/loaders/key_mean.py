"""Page means of keys in attention tiles (sidecar key_mean, spec/side-cars.md). All tokens of a page share one product of query and mean.

``attend.means`` stores these products in shared memory before a program's first tile. A tile only adds them to its scores.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import replace

import triton
from triton import language as tl

from kvpack.formats.key_mean import CODES, SCALE, KeyMean
from kvpack.kernels.bitpack.streams import Stream
from kvpack.kernels.bitpack.tile_layout import second_token_offset
from kvpack.kernels.tables.table_assembly import MATRIX_ALIGNMENT

from .tiles import PageMeanConstants, Tiles

PRODUCT_BYTES = 64
"""Number of bytes of shared memory per page, for the products of its mean with up to 16 query rows."""


def with_means(tiles: Tiles, key_mean: KeyMean) -> Tiles:
    """Return the loader ``tiles`` of a key codec, extended by the page means of ``key_mean``."""
    streams = Stream(CODES, 8, key_mean.dim * key_mean.bits // 8, key_mean.tokens), Stream(SCALE, 16, 1, key_mean.tokens)
    means = PageMeanConstants(key_mean.tokens, key_mean.dim, key_mean.bits, streams)
    return replace(tiles, means=means, keys=None if tiles.keys is None else replace(tiles.keys, means=means))


@triton.jit
def declare_products(MEANS: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr) -> None:
    """Reserve shared memory for the products of ``ROWS`` query rows and the means of a program's pages. Call it once per kernel."""
    thread = tl.arange(0, 32 * WARPS)
    tl.inline_asm_elementwise(_declare_ptx(4 * MEANS.pages * ROWS), "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _declare_ptx(size: int) -> str:
    """Return PTX that declares ``kvpack_products``, padded to a multiple of ``MATRIX_ALIGNMENT``."""
    whole = -(-size // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT
    return f".shared .align {MATRIX_ALIGNMENT} .b8 kvpack_products[{whole}]; mov.u32 $0, 0;"


@triton.jit
def store_products(
    products: tl.tensor, value: tl.tensor, page: tl.tensor, count: tl.tensor, ROWS: tl.constexpr, FAST: tl.constexpr
) -> None:
    """Store the products ``value`` ``[page, row]`` of all pages before page ``count``. A ``tl.debug_barrier`` must follow.

    With ``FAST``, they are stored in shared memory (``declare_products``), otherwise in global memory at ``products``.
    """
    index = page[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    if FAST:
        tl.inline_asm_elementwise(
            """{ .reg .pred real; .reg .b32 at; setp.lt.s32 real, $1, $2; mov.u32 at, kvpack_products; mad.lo.u32 at, $1, 4, at;
                @real st.shared.f32 [at], $3; mov.u32 $0, 0; }""",
            "=r,r,r,f",
            [index, count * ROWS, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(products + index, value, (page < count)[:, None])


@triton.jit
def load_products(
    products: tl.tensor,
    pages: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    is_second: tl.tensor,
    MEANS: tl.constexpr,
    DUAL: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Load the product of each query row with the page mean of each token, float32 ``[warp, token, row]``.

    If each warp's tile is within one page, the shape is ``[warp, 1, row]``. ``products``, ``[1, 1, row]``, locates the products of page 0,
    the program's first page: by pointers or, with ``FAST``, by indices in shared memory. The program has ``pages`` pages, whose products
    are ``stride`` products apart. ``first`` is the first token of the first warp's first tile, counted from page 0. A warp has ``TILES``
    tiles, and ``TILE`` is the tile to load. ``is_second`` is as in ``Queries``. With ``MASKED``, some tokens may be past the end.
    """
    SPAN: tl.constexpr = 2 * TOKENS if DUAL else TOKENS
    token = first + TILE * SPAN + tl.arange(0, WARPS)[:, None, None] * (TILES * SPAN)
    if not MEANS.whole:
        ADJACENT: tl.constexpr = DUAL and second_token_offset(DUAL, TOKENS) == 1
        token += tl.arange(0, TOKENS)[None, :, None] * (2 if ADJACENT else 1)
        if DUAL:
            token = token + is_second.to(tl.int32) * second_token_offset(DUAL, TOKENS)
    SHIFT: tl.constexpr = MEANS.tokens.bit_length() - 1
    page = token >> SHIFT
    if MASKED:
        # Products of tokens after the last one are never used.
        page = tl.minimum(page, pages - 1)
    if FAST:
        value = tl.inline_asm_elementwise(
            "{ .reg .b32 at; mov.u32 at, kvpack_products; add.u32 at, at, $1; ld.shared.f32 $0, [at]; }",
            "=f,r",
            [(products + page * stride) * 4],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        value = tl.load(products + page * stride)
    return value
