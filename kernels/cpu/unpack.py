"""Unpack on the CPU: packed pages to dense rows, equal to those of ``formats/`` bit for bit wherever no rotation sums."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from kvpack.formats.balanced import Balanced
from kvpack.formats.channel_scale import ChannelScale, factors
from kvpack.formats.side_cars import WithSideCars

from . import library, rotations, sides

if TYPE_CHECKING:
    from kvpack.formats.base import Codec
    from kvpack.formats.side_car import KeptTokens

    from .sides import Side, SidePart

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes of dense rows, in the order of ``library.DTYPES``."""

MIN_VALUES = 1 << 18
"""Values of a call for each of its threads: below it, starting one costs more than it saves."""

MAPPED_TOKENS = 1 << 10
"""Tokens of balanced keys that are brought to the original frame at once."""

MANY_BYTES = 1 << 22
"""Results of at least this size are written around the processor's caches."""


def unpack_into(side: Side, out: torch.Tensor, threads: int | None = None, level: int = 0) -> bool:
    """Write all tokens of a side to ``out`` ``[batch, kv_head, token, dim]``, whole rows, in the original frame.

    Returns False, and writes nothing, if C does not support its codec, its strides, a side-car (other than balanced frames, channel scales
    and raw tokens), or a dtype that is not in ``DTYPES``. ``level`` is an index into ``library.levels()``. Raises MemoryError.
    """
    codec = side.codec
    if library.library() is None or out.dtype not in DTYPES or (parts := sides.parts_of(side)) is None:
        return False
    if isinstance(codec, WithSideCars) and not all(isinstance(value_map, ChannelScale | Balanced) for value_map in codec.value_maps):
        return False
    balanced = codec.side_car(Balanced)
    if balanced is None:
        _unpack_parts(side, parts, out, threads, level)
    else:
        _unpack_balanced(side, parts, balanced, out, threads, level)
    if isinstance(codec, WithSideCars):
        for tokens in codec.kept_tokens:
            _put_raw(side, tokens, out)
    return True


def _unpack_balanced(side: Side, parts: list[SidePart], balanced: Balanced, out: torch.Tensor, threads: int | None, level: int) -> None:
    """Write all tokens except raw ones to ``out``; ``parts`` are unpacked in their own frame first. Raises MemoryError."""
    framed = torch.empty_like(out, dtype=torch.float32)
    _unpack_parts(side, parts, framed, threads, level)
    packed = side.packed_tokens
    out[:, :, packed:] = framed[:, :, packed:]
    for first in range(0, packed, MAPPED_TOKENS):
        tokens = slice(first, min(packed, first + MAPPED_TOKENS))
        out[:, :, tokens] = balanced.inverse(framed[:, :, tokens], {})


def _unpack_parts(side: Side, parts: list[SidePart], out: torch.Tensor, threads: int | None, level: int) -> None:
    """Write ``parts`` to ``out``, after inverse rotations and channel scales. Raises MemoryError."""
    batch, heads = out.shape[:2]
    most = 1 + out.numel() // MIN_VALUES
    threads = min(library.checked_threads(threads, torch.get_num_threads()), most)
    compiled = library.library()
    assert compiled is not None
    for part in parts:
        described = part.described()
        rotation = rotations.NONE if part.frame is None else rotations.described(side.codec.rotation)
        scales = None if part.frame is None else _channel_scales(side.codec, part.frame)
        call = library.Unpack(
            batch, heads, part.start, part.stop, part.struct(described), DTYPES.index(out.dtype), rotation.struct,
            library.Stream() if scales is None else library.Stream.of(scales),
            library.Stream.of(out[:, :, part.start :]), out.nbytes >= MANY_BYTES, threads, level,
        )  # fmt: skip
        if compiled.kvpack_unpack(ctypes.byref(call)):
            raise MemoryError("not enough memory to unpack: the buffers could not be allocated")


def _channel_scales(codec: Codec, page: Any) -> torch.Tensor | None:
    """Return the factors of a page, float32 ``[batch, kv_head, 1, dim]``, if it has any."""
    if codec.side_car(ChannelScale) is None:
        return None
    return factors(page.streams).contiguous()


def _put_raw(side: Side, tokens: KeptTokens, out: torch.Tensor) -> None:
    """Write raw tokens to their places; C reads them in the coded frame, where they were rotated."""
    start = 0
    for stretch in side.runs.stretches:
        stop = start + int(stretch.ends[-1])
        positions, values = tokens.token_positions(stretch.streams), tokens.kept_values(stretch.streams)
        out[:, :, start:stop].permute(2, 0, 1, 3)[positions] = values.to(out.dtype)
        start = stop
