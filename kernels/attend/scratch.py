"""Tokens of a side decoded to a scratch, in the frame in which many queries attend them.

Where all packed tokens have one tile loader, that is the coded frame in the order of the loader's columns: queries and sums of values
go through a kept matrix once, and the tokens through none (OCTOPUS Eq. 13).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvpack.formats.side_cars import WithSideCars
from kvpack.kernels.decode import sides, tiles
from kvpack.kernels.decode.rows import Packed

from . import plan, rotation, segments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpack.formats.base import Codec

    from .layers import Page, Side

DECODED_BYTES = 64 << 20
"""Bytes of binary32 values that torch decodes at once where no fused kernel decodes."""

_works: WeakKeyDictionary[Side, dict[tuple[int, int], tiles.Work]] = WeakKeyDictionary()


class Frame(NamedTuple):
    """What a side is decoded to: the original frame, or the coded one of ``codec`` after the maps of values of ``page``, if it has any."""

    codec: Codec | None = None
    page: Page | None = None

    def queries(self, q: torch.Tensor, heads: int) -> tuple[torch.Tensor, float]:
        """Queries ``[batch, q_head, query, dim]`` of 16 bits in the frame of keys of ``heads`` heads, and what scores are to be times."""
        if self.codec is None:
            return q if q.stride(3) == 1 else q.contiguous(), 1.0
        if self.page is not None:
            grouped = q.reshape(q.shape[0], heads, -1, q.shape[3]).to(torch.float32)
            turned = torch.nn.functional.pad(self.page.codec.query(grouped, self.page.streams), (0, 1))
            columns = _column_channels(self.codec, str(q.device))
            return turned.index_select(3, columns).to(q.dtype).view(*q.shape[:3], -1), 1.0
        matrix, factor = _matrix(self.codec, q.dtype, str(q.device))
        if matrix is None:
            return q if q.stride(3) == 1 else q.contiguous(), factor
        return torch.matmul(q, matrix), factor

    def original(self, sums: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
        """Sums of values, float32 ``[batch, q_head, query, column]``, in the original frame and in ``dtype``."""
        if self.codec is None:
            return sums.to(dtype)
        if self.page is not None:
            columns = _column_channels(self.codec, str(sums.device))
            coded = sums.new_zeros(*sums.shape[:3], self.codec.dim + 1).index_copy_(3, columns, sums)[..., : self.codec.dim]
            grouped = coded.reshape(sums.shape[0], heads, -1, self.codec.dim)
            return self.page.original(grouped).view(*sums.shape[:3], -1).to(dtype)
        matrix = _value_matrix(self.codec, str(sums.device))
        return (sums if matrix is None else torch.matmul(sums, matrix)).to(dtype)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Values ``[batch, kv_head, token, dim]`` of 16 bits of the original frame in this one."""
        if self.codec is None:
            return x
        if self.page is not None:
            assert isinstance(self.page.codec, WithSideCars)
            mapped = x.to(torch.float32)
            for value_map in self.page.codec.value_maps:
                mapped = value_map.forward(mapped, self.page.streams)
            turned = torch.nn.functional.pad(self.codec.rotation.forward(mapped), (0, 1))
            return turned.index_select(3, _column_channels(self.codec, str(x.device))).to(x.dtype)
        matrix, factor = _matrix(self.codec, x.dtype, str(x.device))
        if matrix is None:
            return x
        # The factor joins the product before that is rounded.
        return torch.addmm(matrix[0], x.reshape(-1, x.shape[3]), matrix, beta=0, alpha=factor).view(*x.shape[:3], -1)

    @property
    def columns(self) -> int:
        """Columns of the coded frame."""
        assert self.codec is not None
        return len(plan.columns(self.codec, False))


@lru_cache(maxsize=256)
def _channels(codec: Codec) -> torch.Tensor:
    """The channel of each column, int64; the head dim for none."""
    return torch.tensor([channel if channel >= 0 else codec.dim for channel in plan.columns(codec, False)])


@lru_cache(maxsize=256)
def _column_channels(codec: Codec, device: str) -> torch.Tensor:
    with torch.inference_mode(False):
        return _channels(codec).to(device)


@lru_cache(maxsize=256)
def _matrix(codec: Codec, dtype: torch.dtype, device: str) -> tuple[torch.Tensor | None, float]:
    """What channels add to columns ``[dim, column]``, as signs, which are exact in ``dtype``, and their size; None if that is nothing."""
    with torch.inference_mode(False):
        signs, size = rotation.column_signs(codec)
        return (None, 1.0) if _is_in_order(codec) else (signs.T.contiguous().to(dtype).to(device), size)


@lru_cache(maxsize=256)
def _value_matrix(codec: Codec, device: str) -> torch.Tensor | None:
    """What each column adds to each channel, float32 ``[column, dim]``; None where columns are the channels."""
    return None if _is_in_order(codec) else rotation.value_matrix(((codec, plan.columns(codec, False)),), 1, device)[0]


def _is_in_order(codec: Codec) -> bool:
    return codec.rotation.kind == "none" and plan.columns(codec, False) == tuple(range(codec.dim))


def frame_of(side: Side) -> Frame:
    """The coded frame if all packed tokens of the side have the same one and a loader that decodes them; else the original one."""
    found = [segment for segment in segments.of_side(side).segments if segment.page is not None]
    loader = tiles.loader_of(found[0].codec) if found else None
    # What all tokens have in common is in no column of theirs.
    if loader is None or loader.offset:
        return Frame()
    first = found[0].frame
    if any(segment.raw or not segment.exact or (segment is not found[0] and segment.frame != first) for segment in found):
        return Frame()
    return Frame(*first)


def decoded(side: Side, frame: Frame, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Tokens ``[start, stop)`` in ``frame``, ``[batch, kv_head, token, channel or column]``; heads are outermost in memory."""
    aligned = _group_start(side, start)
    width = side.dim if frame.codec is None else frame.columns
    scratch = torch.empty(side.heads, side.batch, stop - aligned, width, dtype=dtype, device=side.device).transpose(0, 1)
    if frame.codec is None:
        for first, last in sides.unpack_into(side, aligned, stop, scratch):
            for begin, end, source in _left(side, first, last):
                scratch[:, :, begin - aligned : end - aligned] = source
        return scratch[:, :, start - aligned :]
    packed = side.tokens - side.tail.shape[2]
    if aligned < packed:
        kept = _works.setdefault(side, {})
        asked = aligned, min(stop, packed)
        if asked not in kept:
            kept[asked] = _work(side, frame.codec, *asked)
        tiles.decode(frame.codec, kept[asked], scratch)
    if stop > packed:
        begin = max(aligned, packed)
        scratch[:, :, begin - aligned :] = frame.values(side.tail[:, :, begin - packed : stop - packed].to(dtype))
    return scratch[:, :, start - aligned :]


def _work(side: Side, codec: Codec, start: int, stop: int) -> tiles.Work:
    parts = []
    for segment in segments.of_side(side).segments:
        begin, end = max(start, segment.first), min(stop, segment.first + segment.tokens)
        if begin < end:
            own = segments.part_of(segment, begin - segment.first, end - segment.first)
            parts.append(Packed(own.streams, end - begin, begin - start))
    return tiles.work_of(codec, parts, side.batch, side.heads, side.device)


def _group_start(side: Side, token: int) -> int:
    """The first token of the group of tokens that holds ``token``."""
    first = 0
    for page in side.pages:
        if first <= token < first + page.tokens:
            return token - (token - first) % page.codec.token_group
        first += page.tokens
    return token


def _left(side: Side, start: int, stop: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Tokens ``[start, stop)`` that no fused kernel decodes, part by part: first, end, and values."""
    first = 0
    most = max(1, DECODED_BYTES // (4 * side.batch * side.heads * side.dim))
    for page in side.pages:
        # Whole groups of tokens, which are decoded together.
        step = max(page.codec.token_group, most // page.codec.token_group * page.codec.token_group)
        last = min(stop, first + page.tokens)
        for begin in range(max(start, first), last, step):
            end = min(begin + step, last)
            yield begin, end, page.decode(begin - first, end - first)
        first += page.tokens
    if stop > max(start, first):
        begin = max(start, first)
        yield begin, stop, side.tail[:, :, begin - first : stop - first]
