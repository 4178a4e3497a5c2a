"""Tokens of a side decoded to a scratch, in the frame in which many queries attend them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kvpack.formats.side_cars import WithSideCars
from kvpack.kernels.decode import sides

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpack.formats.rotation import Rotation

    from .layers import Page, Side

DECODED_BYTES = 64 << 20
"""Bytes of binary32 values that torch decodes at once where no fused kernel decodes."""


class Frame(NamedTuple):
    """What a side is decoded to: the original frame, or its pages' coded one: that of a ``rotation``, after the maps of a ``page``."""

    rotation: Rotation | None = None
    page: Page | None = None

    @property
    def coded(self) -> bool:
        return self.rotation is not None

    def queries(self, q: torch.Tensor, heads: int) -> torch.Tensor:
        """Queries ``[batch, q_head, query, dim]`` of 16 bits in the frame of keys of ``heads`` heads."""
        if self.page is not None:
            grouped = q.reshape(q.shape[0], heads, -1, q.shape[3]).to(torch.float32)
            return self.page.codec.query(grouped, self.page.streams).to(q.dtype).view(q.shape)
        if self.rotation is not None:
            return self.rotation.forward(q.to(torch.float32)).to(q.dtype)
        return q if q.stride(3) == 1 else q.contiguous()

    def original(self, sums: torch.Tensor, heads: int) -> torch.Tensor:
        """Sums of values, float32 ``[batch, q_head, query, dim]``, in the original frame."""
        if self.page is not None:
            return self.page.original(sums.view(sums.shape[0], heads, -1, sums.shape[3])).view(sums.shape)
        return sums if self.rotation is None else self.rotation.inverse(sums)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Values ``[batch, kv_head, token, dim]`` of the original frame in this one."""
        if self.rotation is None:
            return x
        x = x.to(torch.float32)
        if self.page is not None:
            assert isinstance(self.page.codec, WithSideCars)
            for value_map in self.page.codec.value_maps:
                x = value_map.forward(x, self.page.streams)
        return self.rotation.forward(x)


def frame_of(side: Side) -> Frame:
    """The coded frame if all tokens of the side have the same one, and it is another than the original frame."""
    page = side.pages[0] if side.pages else None
    if page is None:
        return Frame()
    codec = page.codec
    if isinstance(codec, WithSideCars):
        # Each page has maps of its own; what else side-cars hold is for each token.
        return Frame(codec.rotation, page) if codec.value_maps and len(side.pages) == 1 and sides.only_maps(codec) else Frame()
    return Frame() if codec.rotation.kind == "none" else Frame(codec.rotation)


def decoded(side: Side, frame: Frame, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Tokens ``[start, stop)`` in ``frame``, ``[batch, kv_head, token, dim]``; heads are outermost in memory."""
    aligned = _group_start(side, start)
    scratch = torch.empty(side.heads, side.batch, stop - aligned, side.dim, dtype=dtype, device=side.device).transpose(0, 1)
    for first, last in sides.unpack_into(side, aligned, stop, scratch, not frame.coded):
        for begin, end, source in _left(side, frame, first, last):
            scratch[:, :, begin - aligned : end - aligned] = source
    return scratch[:, :, start - aligned :]


def _group_start(side: Side, token: int) -> int:
    """The first token of the group of tokens that holds ``token``."""
    first = 0
    for page in side.pages:
        if first <= token < first + page.tokens:
            return token - (token - first) % page.codec.token_group
        first += page.tokens
    return token


def _left(side: Side, frame: Frame, start: int, stop: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Tokens ``[start, stop)`` that no fused kernel decodes, part by part: first, end, and values in ``frame``."""
    first = 0
    most = max(1, DECODED_BYTES // (4 * side.batch * side.heads * side.dim))
    for page in side.pages:
        # Whole groups of tokens, which are decoded together.
        step = max(page.codec.token_group, most // page.codec.token_group * page.codec.token_group)
        last = min(stop, first + page.tokens)
        for begin in range(max(start, first), last, step):
            end = min(begin + step, last)
            yield begin, end, (page.frame if frame.coded else page.decode)(begin - first, end - first)
        first += page.tokens
    if stop > max(start, first):
        begin = max(start, first)
        yield begin, stop, frame.values(side.tail[:, :, begin - first : stop - first])
