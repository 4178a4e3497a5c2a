"""Conversion of a cache's layers to a different recipe."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from kvpack.coding.encoding import RAW_DTYPES, RAW_NAMES, Progress, encode, is_rounded
from kvpack.formats.errors import ValueTooLarge
from kvpack.formats.raw import EXACT_DTYPES
from kvpack.formats.token_norms import PAGE_TOKENS
from kvpack.runtime.modes import float32_no_grad

from .packed_runs import PackedRun, PackedRuns
from .side import Side, pack_side

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.coding.recipes import Recipe
    from kvpack.formats.base import Codec
    from kvpack.formats.raw_positions import RawPositions

    from .layer import Layer

VALUES_AT_ONCE = 1 << 24
"""Maximum number of values to decode in one block, unless encoding needs all values of a layer."""


def convert_layers(layers: Sequence[Layer], recipe: Recipe, start: int, progress: Progress | None) -> tuple[tuple[Layer, ...], str]:
    """Re-encode ``layers`` with ``recipe``. Returns the new layers and the recipe's canonical text.

    ``start`` is the position of the first token. Keys and values that already have the right codec are reused. If only the bit layout
    differs, codes are repacked without decoding.
    """
    recipe.check_layers(len(layers))
    result = []
    for number, layer in enumerate(layers):
        sides: list[Side | None] = []
        first, norms = start + layer.skipped, _norm_getter(layer)
        for name, side in (("k", layer.k), ("v", layer.v)):
            if side is None:
                sides.append(None)
                continue
            codec = recipe.codec(number, len(layers), name, side.dim, _exact_dtype(side))
            if codec == side.codec:
                # Use the recipe's codec, because it also has encoder options and the basis, which files do not store.
                sides.append(_with_window(replace(side, codec=codec), recipe.window, f"layers[{number}].{name}", first, norms))
            elif codec.has_same_codes(side.codec):
                with float32_no_grad(side.device):
                    repacked = side.repack(codec)
                sides.append(_with_window(repacked, recipe.window, f"layers[{number}].{name}", first, norms))
            else:
                packed = _reencode(side, codec, recipe.window, f"layers[{number}].{name}", first, norms(codec))
                sides.append(replace(packed, tail=_narrow_exactly(packed.tail, side.tail.dtype)))
        result.append(replace(layer, k=sides[0], v=sides[1]))
        if progress:
            progress(number + 1, len(layers))
    return tuple(result), recipe.canonical


def pack_tails(layers: Sequence[Layer], start: int) -> tuple[Layer, ...]:
    """Encode the raw tails of ``layers``, except for tokens that a window keeps raw. ``start`` is the position of the first token."""
    result = []
    for number, layer in enumerate(layers):
        first, norms = start + layer.skipped, _norm_getter(layer)
        k, v = (
            None if side is None else _with_window(side, side.window, f"layers[{number}].{name}", first, norms)
            for name, side in (("k", layer.k), ("v", layer.v))
        )
        result.append(replace(layer, k=k, v=v))
    return tuple(result)


def _norm_getter(layer: Layer) -> Callable[[Codec], torch.Tensor | None]:
    """Return a function that computes the norms by which a codec selects raw tokens. It decodes the layer only once."""
    get_norms = {name: cache(side.norms) for name, side in layer.sides.items()}

    def norms(codec: Codec) -> torch.Tensor | None:
        raw: RawPositions | None = codec.raw_positions
        if raw is None or "k" not in get_norms:
            return None
        return raw.selection_norms(get_norms["k"](), get_norms["v"]() if "v" in get_norms else None)

    return norms


def _reencode(side: Side, codec: Codec, window: int, where: str, first: int, norms: torch.Tensor | None) -> Side:
    """Re-encode ``side`` with ``codec``. ``first`` is the position of the side's first token.

    Values are decoded and encoded in blocks, unless a stream of the codec depends on more than one block.
    """
    # A different dtype would change the bits of NaN.
    dtype, tokens = RAW_DTYPES[_exact_dtype(side)], side.tokens
    multiple = math.lcm(128, codec.group_tokens, side.codec.group_tokens)
    step = max(1, VALUES_AT_ONCE // (side.batch * side.heads * side.dim) // multiple) * multiple
    raw = codec.raw_positions
    raw_layout = {} if raw is None else raw.layout(1, 1, 0)
    per_token = all(entry.per == "token" or name in raw_layout for name, entry in codec.layout(side.batch, side.heads, tokens).items())
    packed = tokens - tokens % window if window else tokens
    aligned = all(boundary % multiple == 0 for boundary in side.boundaries if boundary < packed) and packed % side.codec.group_tokens == 0
    # The codec may reject values of a raw side. The message needs their positions in the whole side.
    lossy = codec.exact_dtype is None and side.codec.exact_dtype is None
    if not (lossy and per_token and aligned and packed > step):
        return pack_side(side.unpack(dtype), codec, window, where, first, norms)
    parts = []
    with float32_no_grad(side.device):
        try:
            # The last block has at least a page of tokens, because RawPositions compares norms with the median of the last page.
            starts = [start for start in range(0, packed, step) if not start or packed - start >= PAGE_TOKENS]
            for start, stop in pairwise([*starts, packed]):
                part, part_norms = side.slice(start, stop).unpack(dtype), None if norms is None else norms[:, :, start:stop]
                parts.append(PackedRun(codec, stop - start, encode(codec, part, where, position=first + start, norms=part_norms)))
        except ValueTooLarge:
            return pack_side(side.unpack(dtype), codec, window, where, first, norms)
        tail = side.slice(packed, tokens).unpack(dtype)
    return Side(codec, PackedRuns.from_runs([PackedRun.joined(parts)]), tail, window)


def _exact_dtype(side: Side) -> str:
    """Return the narrowest raw dtype that represents all decoded values of ``side`` exactly."""
    dtypes = {RAW_NAMES[side.tail.dtype]} if side.tail.shape[2] or not side.runs else set()
    if side.runs:
        dtypes.add(side.codec.exact_dtype or "fp32")
    return next(name for name in EXACT_DTYPES if dtypes <= set(EXACT_DTYPES[name]))


def _narrow_exactly(tail: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    narrow = tail.to(dtype)
    return tail if is_rounded(tail, narrow) else narrow


def _with_window(side: Side, window: int, where: str, first: int, norms: Callable[[Codec], torch.Tensor | None]) -> Side:
    """Return ``side`` with a new window. Tail tokens that no longer fit in the window are encoded."""
    tokens = side.tail.shape[2]
    ready = tokens - tokens % window if window else tokens
    if not ready:
        return side if window == side.window else replace(side, window=window)
    with float32_no_grad(side.device):
        before = side.runs[-1].streams if side.runs else None
        packed, key_norms = side.packed_tokens, norms(side.codec)
        tail_norms = None if key_norms is None else key_norms[:, :, packed : packed + ready]
        run = PackedRun(side.codec, ready, encode(side.codec, side.tail[:, :, :ready], where, before, first + packed, tail_norms))
        return replace(side.with_run(run, side.tail[:, :, ready:].clone()), window=window)
