"""Decode a side's pages to a tensor with one launch for any number of pages, prepared once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvpack.formats.raw import Raw as RawCodec
from kvpack.formats.raw_positions import RawPositions
from kvpack.kernels.tiles.addresses import uses_assembly

from . import decode, klt, unpack
from .rows import Packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.base import Codec
    from kvpack.kernels.tiles.layers import PackedRun, Side

    from .rows import Prepared


class SidePart(NamedTuple):
    """Tokens ``[start, stop)`` of a page, and the side's token at which the page begins."""

    page: PackedRun
    first: int
    start: int
    stop: int

    def packed(self, start: int) -> Packed:
        """Return the part's rows, for an output whose first token is token ``start`` of the side."""
        # Cutting a page takes longer than all else here.
        whole = self.stop - self.start == self.page.tokens
        streams = self.page.streams if whole else self.page.rows(self.start, self.stop)
        return Packed(streams, self.stop - self.start, self.first + self.start - start)


class Raw(NamedTuple):
    """Raw tokens: their positions in an output, int64 ``[entry]`` each, and their values ``[entry, kv_head, dim]``."""

    token: torch.Tensor
    sequence: torch.Tensor
    values: torch.Tensor

    def put(self, out: torch.Tensor) -> None:
        """Overwrite the kernels' output with the raw tokens."""
        if len(self.token):
            out.permute(2, 0, 1, 3)[self.token, self.sequence] = self.values.to(out.dtype)


class Kept:
    """A launch that fills outputs of one dtype and strides with the pages of a side.

    Its tables are built once, on the stream of the first call. ``left`` are the ranges of tokens still to be written.
    """

    def __init__(self, prepared: Prepared, raw: Raw | None, left: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._prepared, self._raw, self.left, self._device, self._stream, self._ready = prepared, raw, left, device, 0, None
        if device.type == "cuda":
            self._stream = _current_stream(device)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(device))

    def __call__(self, out: torch.Tensor) -> None:
        # A graph may not wait for what is no part of it; torch.cuda.graph waits for all streams before it begins.
        if self._ready is not None and _current_stream(self._device) != self._stream and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device).wait_event(self._ready)
        self._prepared.run(out)
        if self._raw is not None:
            self._raw.put(out)


_kept: WeakKeyDictionary[Side, dict[Any, Kept]] = WeakKeyDictionary()


def unpack_into(side: Side, start: int, stop: int, out: torch.Tensor) -> list[tuple[int, int]]:
    """Decode tokens ``[start, stop)`` of the pages of ``side`` into ``out`` ``[batch, kv_head, token, dim]``, token ``start`` first.

    Returns the ranges of tokens, counted from the first of the side, still to be written: those of codecs without a kernel, those that
    begin within a token group, and the raw tail. A launch that decodes all tokens is cached with the side. Raises InvalidParameter unless
    streams have the layout of their codec.
    """
    key = out.dtype, out.stride(), uses_assembly(out.device)
    whole = start == 0 and stop == side.tokens
    if whole and (kept := _kept.get(side, {}).get(key)) is not None:
        kept(out)
        return list(kept.left)
    left: list[tuple[int, int]] = []
    parts = _parts(side, start, stop)
    prepared, raw = _prepared(parts, start, out), _raw_of(parts, start)
    if prepared is not None:
        prepared.run(out)
    elif parts and not _decoded(parts, start, out):
        left.append((parts[0].first + parts[0].start, parts[-1].first + parts[-1].stop))
        raw = None
    if raw is not None:
        raw.put(out)
    tail = side.tokens - side.tail.shape[2]
    if stop > max(start, tail):
        left.append((max(start, tail), stop))
    if whole and prepared is not None and prepared.lasting:
        _kept.setdefault(side, {})[key] = Kept(prepared, raw, tuple(left), out.device)
    return left


def _prepared(parts: Sequence[SidePart], start: int, out: torch.Tensor) -> Prepared | None:
    """Return the launch that decodes ``parts`` into outputs like ``out``, from token ``start`` of the side; None if it needs several."""
    if not parts:
        return None
    codec, packed = _codec_besides_raw(parts[0].page.codec), [part.packed(start) for part in parts]
    if unpack.supports(codec, out):
        return unpack.prepare(codec, packed, out)
    return None if parts[0].start % codec.token_group else decode.prepare(codec, packed, out, True)


def _decoded(parts: Sequence[SidePart], start: int, out: torch.Tensor) -> bool:
    """Decode ``parts``, as in ``_prepared``, by other means; return True on success."""
    codec, packed = _codec_besides_raw(parts[0].page.codec), [part.packed(start) for part in parts]
    if type(codec) is RawCodec:
        for part in parts:
            begin = part.first + part.start - start
            out[:, :, begin : begin + part.stop - part.start] = part.page.streams["values"][:, :, part.start : part.stop]
        return True
    if klt.supports(codec, out):
        klt.unpack(codec, packed, out)
        return True
    return parts[0].start % codec.token_group == 0 and decode.decode_into(codec, packed, out, True)


def _codec_besides_raw(codec: Codec) -> Codec:
    """Return the codec that decodes all but raw tokens, if it has no other side-cars."""
    return codec.family if codec.side_car(RawPositions) is not None and codec.without_raw_positions is codec.family else codec


def _raw_of(parts: Sequence[SidePart], start: int) -> Raw | None:
    """Return the raw tokens of ``parts``, for an output that begins at token ``start`` of the side.

    None if the codec keeps no raw positions, or has other side-cars.
    """
    if not parts:
        return None
    codec = parts[0].page.codec
    raw = codec.side_car(RawPositions)
    if raw is None or codec.without_raw_positions is not codec.family:
        return None
    tokens, sequences, values = [], [], []
    for part in parts:
        packed = part.packed(start)
        token, sequence = raw.token_positions(packed.streams)
        tokens.append(token + packed.first)
        sequences.append(sequence)
        values.append(raw.kept_values(packed.streams))
    return Raw(torch.cat(tokens), torch.cat(sequences), torch.cat(values))


def _current_stream(device: torch.device) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def _parts(side: Side, start: int, stop: int) -> list[SidePart]:
    result, first = [], 0
    for page in side.runs:
        begin, end = max(0, start - first), min(page.tokens, stop - first)
        if begin < end:
            result.append(SidePart(page, first, begin, end))
        first += page.tokens
        if first >= stop:
            break
    return result
