"""Unpacking of packed pages to dense values on the CPU. Values equal those of ``formats/``, except for the rounding of rotations."""

from __future__ import annotations

from typing import Any

import torch

from kvpack.formats.balanced import FrameMap
from kvpack.formats.base import Codec
from kvpack.formats.channel_scale import ChannelScale, factors
from kvpack.formats.sidecar import RawTokenSidecar
from kvpack.formats.sidecars import CodecWithSidecars

from . import codecs, library, sides
from .sides import Side, SidePart

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Supported dtypes of dense values, in the order of ``library.DTYPES``."""

MIN_VALUES = 1 << 18
"""Minimum number of values per thread. With fewer, starting another thread costs more than it saves."""

BALANCED_BLOCK_TOKENS = 1 << 10
"""Number of tokens of balanced keys that are mapped to the original frame together."""

MIN_STREAMED_BYTES = 1 << 22
"""Minimum size of an output that is written with nontemporal stores, which bypass the processor's caches."""


def unpack_into(side: Side, out: torch.Tensor, threads: int | None = None, level: int = 0) -> bool:
    """Unpack all tokens of ``side`` into ``out`` ``[batch, kv_head, token, dim]`` with contiguous channels, in the original frame.

    Returns False, and writes nothing, if the C kernels do not support the side's codec, strides or sidecars, or the dtype of ``out``. The
    supported value maps are balanced frames and channel scales. ``level`` is an index into ``library.levels()``.
    """
    codec = side.codec
    if library.library() is None or out.dtype not in DTYPES or (parts := sides.side_parts(side)) is None:
        return False
    if isinstance(codec, CodecWithSidecars) and not all(isinstance(value_map, ChannelScale | FrameMap) for value_map in codec.value_maps):
        return False
    balanced = codec.sidecar(FrameMap)
    if balanced is None:
        _unpack_parts(side, parts, out, threads, level)
    else:
        _unpack_balanced(side, parts, balanced, out, threads, level)
    if isinstance(codec, CodecWithSidecars):
        for tokens in codec.raw_token_sidecars:
            _write_raw_tokens(side, tokens, out)
    return True


def _unpack_balanced(side: Side, parts: list[SidePart], balanced: FrameMap, out: torch.Tensor, threads: int | None, level: int) -> None:
    """Write all tokens except raw tokens to ``out``: decode them to the balanced frame, then invert it."""
    framed = torch.empty_like(out, dtype=torch.float32)
    _unpack_parts(side, parts, framed, threads, level)
    packed = side.packed_tokens
    out[:, :, packed:] = framed[:, :, packed:]
    for first in range(0, packed, BALANCED_BLOCK_TOKENS):
        tokens = slice(first, min(packed, first + BALANCED_BLOCK_TOKENS))
        out[:, :, tokens] = balanced.inverse(framed[:, :, tokens], {})


def _unpack_parts(side: Side, parts: list[SidePart], out: torch.Tensor, threads: int | None, level: int) -> None:
    """Unpack ``parts`` into ``out``, and apply inverse rotations and channel scales."""
    batch, heads = out.shape[:2]
    threads = library.thread_count(threads, 1 + out.numel() // MIN_VALUES)
    for part in parts:
        description = part.describe()
        rotation = codecs.NO_ROTATION if part.frame is None else codecs.describe_rotation(side.codec.rotation)
        scales = None if part.frame is None else _channel_scales(side.codec, part.frame)
        call = library.UnpackArguments(
            batch, heads, part.start, part.stop, part.to_struct(description), DTYPES.index(out.dtype), rotation.struct,
            library.Stream() if scales is None else library.Stream.describe(scales),
            library.Stream.describe(out[:, :, part.start :]), out.nbytes >= MIN_STREAMED_BYTES, threads, level,
        )  # fmt: skip
        library.run("unpack", call, "unpack")


def _channel_scales(codec: Codec, page: Any) -> torch.Tensor | None:
    if codec.sidecar(ChannelScale) is None:
        return None
    return factors(page.streams).contiguous()


def _write_raw_tokens(side: Side, tokens: RawTokenSidecar, out: torch.Tensor) -> None:
    """Write the stored values of raw tokens to ``out``, because C code receives only their rotated values."""
    start = 0
    for stretch in side.runs.stretches:
        stop = start + int(stretch.ends[-1])
        positions, values = tokens.token_positions(stretch.streams), tokens.kept_values(stretch.streams)
        out[:, :, start:stop].permute(2, 0, 1, 3)[positions] = values.to(out.dtype)
        start = stop
