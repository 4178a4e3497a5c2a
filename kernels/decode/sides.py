"""The pages of a side to a tensor: one launch, whatever their number."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvpack.formats.raw import Raw

from . import decode, klt, unpack
from .rows import Packed

if TYPE_CHECKING:
    import torch

    from kvpack.kernels.attend.layers import Page, Side


class Part(NamedTuple):
    """Tokens ``[start, stop)`` of a page, and the token of the side at which the page begins."""

    page: Page
    first: int
    start: int
    stop: int

    def packed(self, start: int) -> Packed:
        """Its rows, for an output whose first token is token ``start`` of the side."""
        # Cutting a page takes longer than all else here.
        whole = self.stop - self.start == self.page.tokens
        streams = self.page.streams if whole else self.page.rows(self.start, self.stop)
        return Packed(streams, self.stop - self.start, self.first + self.start - start)


def unpack_into(side: Side, start: int, stop: int, out: torch.Tensor) -> list[tuple[int, int]]:
    """Decode tokens ``[start, stop)`` of the pages of ``side`` into ``out`` ``[batch, kv_head, token, dim]``, token ``start`` first.

    Returns the ranges of tokens, counted from the first of the side, that are left to be written: of a codec that no kernel takes, or if
    they begin within a group of tokens, and of the raw tail. Raises InvalidShape unless streams are as their codec lays them out.
    """
    left: list[tuple[int, int]] = []
    if parts := _parts(side, start, stop):
        codec = parts[0].page.codec
        if type(codec) is Raw:
            for part in parts:
                begin = part.first + part.start - start
                out[:, :, begin : begin + part.stop - part.start] = part.page.streams["values"][:, :, part.start : part.stop]
        elif unpack.takes(codec, out):
            unpack.unpack(codec, [part.packed(start) for part in parts], out)
        elif klt.takes(codec, out):
            klt.unpack(codec, [part.packed(start) for part in parts], out)
        elif parts[0].start % codec.token_group or not decode.decode_into(codec, [part.packed(start) for part in parts], out, True):
            left.append((parts[0].first + parts[0].start, parts[-1].first + parts[-1].stop))
    tail = side.tokens - side.tail.shape[2]
    if stop > max(start, tail):
        left.append((max(start, tail), stop))
    return left


def _parts(side: Side, start: int, stop: int) -> list[Part]:
    found, first = [], 0
    for page in side.pages:
        begin, end = max(0, start - first), min(page.tokens, stop - first)
        if begin < end:
            found.append(Part(page, first, begin, end))
        first += page.tokens
        if first >= stop:
            break
    return found
