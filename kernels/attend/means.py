"""Attention over pages with a mean key (sidecar key_mean). A program multiplies its query rows by the mean of each page once."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.kernels.loaders.key_mean import store_products
from kvpack.kernels.tiles.work import POSITION_BIAS

PAGES = tl.constexpr(16)
"""Number of pages that each warp of a program multiplies together."""


@triton.jit
def _page_numbers(begin: tl.tensor, WARPS: tl.constexpr) -> tl.tensor:
    """Return the indices of the pages whose means a program multiplies in one step, beginning with page ``begin``: int32 ``[page]``."""
    return tl.arange(0, WARPS * PAGES) + POSITION_BIAS + (begin - POSITION_BIAS)


@triton.jit
def load_means(
    streams: tl.tuple, first: tl.tensor, begin: tl.tensor, count: tl.tensor, MEANS: tl.constexpr, WARPS: tl.constexpr
) -> tl.tuple:
    """Load the scales and codes of the page means that a program multiplies in one step, beginning with page ``begin``.

    Pages are counted from page ``first`` of the streams. If a step has pages past the last of the ``count`` pages, it loads the last one
    again.
    """
    BYTES: tl.constexpr = MEANS.dim * MEANS.bits // 8
    BLOCK: tl.constexpr = max(16, triton.next_power_of_2(BYTES))
    byte = tl.arange(0, BLOCK)
    page = tl.minimum(_page_numbers(begin, WARPS), count - 1)
    scale = tl.load(streams[1].to(tl.pointer_type(tl.float16)) + first + page)
    at = streams[0] + first * BYTES + (page[:, None] * BYTES + byte[None, :])
    if BLOCK == BYTES:
        code = tl.load(at)
    else:
        code = tl.load(at, (byte < BYTES)[None, :], 0)
    return scale, code


@triton.jit
def multiply_page_means(
    products: tl.tensor,
    q: tl.tensor,
    loaded: tl.tuple,
    streams: tl.tuple,
    first: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    padded: tl.tensor,
    MEANS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """Multiply ``ROWS`` query rows by the means of ``count`` pages, beginning with page ``first``, and write the results to ``products``.

    ``products`` is float32 ``[page, row]``. ``q`` is float16 ``[half, padded row, channel]`` (``rotation.rotate_queries``). ``loaded``
    contains the means of the first step (``load_means`` with ``begin`` = 0), and ``streams`` the codes and scales of all means. The caller
    must execute a ``tl.debug_barrier`` before it reads the products.
    """
    BYTES: tl.constexpr = MEANS.dim * MEANS.bits // 8
    BLOCK: tl.constexpr = max(16, triton.next_power_of_2(BYTES))
    byte = tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)[None, :] * MEANS.dim
    queries = (_load_halves(q + row + byte[:, None], padded * MEANS.dim, byte, BYTES),)
    if MEANS.bits == 4:
        # A byte contains one channel of the first half and one of the second.
        queries = queries + (_load_halves(q + row + (BYTES + byte[:, None]), padded * MEANS.dim, byte, BYTES),)
    if WARPS > 1:
        _store_products(products, loaded, queries, begin, count, MEANS, ROWS, WARPS, FAST)
    elif begin < count:
        # Always so. Without a branch, the compiler keeps the tiles of queries in registers, with which one warp was slower.
        _store_products(products, loaded, queries, begin, count, MEANS, ROWS, WARPS, FAST)
    for begin in tl.range(WARPS * PAGES, count, WARPS * PAGES, num_stages=1):
        _store_products(products, load_means(streams, first, begin, count, MEANS, WARPS), queries, begin, count, MEANS, ROWS, WARPS, FAST)


@triton.jit
def _store_products(
    products: tl.tensor,
    loaded: tl.tuple,
    queries: tl.tuple,
    begin: tl.tensor,
    count: tl.tensor,
    MEANS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """Store the products of ``queries`` and the ``loaded`` means, beginning with page ``begin``.

    Each element of ``queries`` is a query in two halves (``_load_halves``). With 4-bit codes, the first element covers the first half of
    the channels, and the second element covers the rest.
    """
    page = _page_numbers(begin, WARPS)
    product = _multiply(_centered_code(loaded[1], 0, MEANS.bits, FAST), queries[0])
    if MEANS.bits == 4:
        product += _multiply(_centered_code(loaded[1], 4, MEANS.bits, FAST), queries[1])
    product *= loaded[0].to(tl.float32)[:, None]
    store_products(products, product, page, count, ROWS, FAST)


@triton.jit
def _load_halves(q: tl.tensor, stride: tl.tensor, byte: tl.tensor, BYTES: tl.constexpr) -> tl.tuple:
    """Load a query as two float16 tensors, a high and a low half, whose sum is more precise than a single float16.

    The low half begins ``stride`` values after the high half ``q``. Channels of code bytes past ``BYTES`` are 0.
    """
    if byte.shape[0] == BYTES:
        halves = tl.load(q), tl.load(q + stride)
    else:
        mask = (byte < BYTES)[:, None]
        halves = tl.load(q, mask, 0.0), tl.load(q + stride, mask, 0.0)
    return halves


@triton.constexpr_function
def _centered_ptx(position: int, bits: int) -> str:
    """Return PTX that converts the code in each of four bytes to float16, minus the middle code.

    A code has ``bits`` bits, beginning at bit ``position`` of its byte.
    """
    middle = 1024 + (1 << bits - 1)
    codes = "mov.b32 codes, $2;" if bits == 8 else f"shr.b32 codes, $2, {position}; and.b32 codes, codes, 0x0F0F0F0F;"
    # The lowest bits of binary16 numbers from 1024 to 2047 represent integers, in steps of 1.
    return f"""{{ .reg .b32 codes, middle; {codes} mov.b32 middle, {0xE400E400 | (middle - 1024) * 0x10001};
        prmt.b32 $0, codes, 0x64646464, 0x4140; prmt.b32 $1, codes, 0x64646464, 0x4342;
        add.rn.f16x2 $0, $0, middle; add.rn.f16x2 $1, $1, middle; }}"""


@triton.jit
def _centered_code(code: tl.tensor, POSITION: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Extract the code of ``BITS`` bits at bit ``POSITION`` of each int8, and return it minus the middle code, as float16."""
    if FAST:
        value = tl.inline_asm_elementwise(_centered_ptx(POSITION, BITS), "=r,=r,r", [code], dtype=tl.float16, is_pure=True, pack=4)
    else:
        value = ((code.to(tl.int16) >> POSITION & (1 << BITS) - 1) - (1 << BITS - 1)).to(tl.float16)
    return value


@triton.jit
def _multiply(codes: tl.tensor, query: tl.tuple) -> tl.tensor:
    """Return the products of float16 ``codes`` ``[page, byte]`` and a query in two halves (``_load_halves``)."""
    return tl.dot(codes, query[0]) + tl.dot(codes, query[1])
