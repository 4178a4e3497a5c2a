"""What a warp's tiles are loaded from: the rows of a work item's streams, and those that follow them brought nearer ahead of time."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.kernels.loaders.qjl import load_signs
from kvpack.kernels.words.tile_layout import second_token_offset


@triton.jit
def stream_pointers(row: tl.tensor, batch: tl.tensor, head: tl.tensor, SIDE: tl.constexpr) -> tl.tuple:
    """Pointers to the first row of this head in each stream."""
    pointers = ()
    for number in tl.static_range(len(SIDE.streams)):
        pointers = pointers + (_pointer(row + 3 * number, batch, head, SIDE.streams[number].bits, SIDE.streams[number].aligned),)
    return pointers


@triton.jit
def _pointer(at: tl.tensor, batch: tl.tensor, head: tl.tensor, BITS: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    address = tl.load(at) + batch * tl.load(at + 1) + head * tl.load(at + 2)
    if BITS == 16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int32))
    return tl.multiple_of(pointer, ALIGNED)


@triton.jit
def prefetch(pointers: tl.tuple, first: tl.tensor, tokens: tl.tensor, SIDE: tl.constexpr) -> None:
    """Have the rows of ``tokens``, if there are any, from row ``first`` on brought to the second-level cache."""
    for number in tl.static_range(len(SIDE.streams)):
        if SIDE.streams[number].row_bytes:
            _prefetch_stream(pointers[number], first, tokens, SIDE.streams[number].row_bytes, SIDE.streams[number].tokens)


@triton.jit
def _prefetch_stream(pointer: tl.tensor, first: tl.tensor, tokens: tl.tensor, ROW_BYTES: tl.constexpr, ROW_TOKENS: tl.constexpr) -> None:
    """One operation of one thread, in whole pieces of 16 bytes: it was faster than lines that all threads ask for."""
    begin = pointer.to(tl.int64) + first // ROW_TOKENS * ROW_BYTES
    tl.inline_asm_elementwise(
        """{ .reg .pred real; .reg .b32 thread, size; .reg .b64 begin;
            mov.u32 thread, %tid.x; and.b32 size, $2, -16; setp.gt.s32 real, size, 0; setp.eq.and.b32 real, thread, 0, real;
            and.b64 begin, $1, -16; @real cp.async.bulk.prefetch.L2.global [begin], size; mov.u32 $0, 0; }""",
        "=r,l,r",
        [begin, (tokens * ROW_BYTES // ROW_TOKENS).to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_tiles(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    end: tl.tensor,
    SIDE: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """``TILES`` tiles of ``TOKENS`` tokens: what the codec's rows hold of each, and the signs beside it, if any.

    If the side is ``paired``, half as many of twice as many tokens.
    """
    CONSTANTS: tl.constexpr = SIDE.constants
    SIGNS: tl.constexpr = SIDE.signs
    raws = ()
    for tile in tl.static_range(TILES // 2 if SIDE.dual else TILES):
        at = token + tile * (2 * TOKENS if SIDE.dual else TOKENS)
        valid = (at < end, at + second_token_offset(SIDE.dual, TOKENS) < end) if SIDE.dual else at < end
        raw = (SIDE.load(pointers, first, at, valid, CONSTANTS, MASKED, SIDE.whole, TRANSPOSED, FAST),)
        if SIDE.signs is not None:
            raw = raw + (load_signs(pointers, first, at, valid, SIGNS, MASKED, TRANSPOSED, FAST),)
        raws = raws + (raw,)
    return raws
