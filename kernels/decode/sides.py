"""Decoding of all pages of a side (a layer's keys or values) to a tensor, with one launch that is prepared once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvpack.formats.raw import Raw as RawCodec
from kvpack.kernels.tiles.addresses import uses_inline_ptx

from . import decode, klt, unpack
from .rows import PackedPart, PreparedDecode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.kernels.tiles.layers import PackedRun, Side


class SidePart(NamedTuple):
    """Tokens ``[start, stop)`` of a page that begins at token ``first`` of the side."""

    page: PackedRun
    first: int
    start: int
    stop: int

    def packed(self, start: int) -> PackedPart:
        """Return this part as input for a decoder. Token 0 of the decoder's output is token ``start`` of the side."""
        # Slicing a page takes longer than everything else here, so avoid it for whole pages.
        whole = self.stop - self.start == self.page.tokens
        streams = self.page.streams if whole else self.page.rows(self.start, self.stop)
        return PackedPart(streams, self.stop - self.start, self.first + self.start - start)


class RawTokens(NamedTuple):
    """Raw tokens: the output index and the sequence index of each token, each int64 ``[entry]``, and the values, ``[entry, kv_head, dim]``.
    """

    token: torch.Tensor
    sequence: torch.Tensor
    values: torch.Tensor

    def put(self, out: torch.Tensor) -> None:
        """Write the raw tokens to ``out``, in place of the values that kernels decoded."""
        if len(self.token):
            out.permute(2, 0, 1, 3)[self.token, self.sequence] = self.values.to(out.dtype)


class SideLaunch:
    """A cached launch that decodes all pages of a side into outputs with the same dtype and strides.

    Its tables are built once, on the CUDA stream of the first call. ``remaining`` lists the ranges of tokens that the launch does not
    write.
    """

    def __init__(self, prepared: PreparedDecode, raw: RawTokens | None, remaining: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._prepared, self._raw, self.remaining, self._device, self._stream, self._ready = prepared, raw, remaining, device, 0, None
        if device.type == "cuda":
            self._stream = _current_stream(device)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(device))

    def __call__(self, out: torch.Tensor) -> None:
        # A captured graph cannot wait for events outside it, and need not: torch.cuda.graph synchronizes before it begins.
        if self._ready is not None and _current_stream(self._device) != self._stream and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device).wait_event(self._ready)
        self._prepared.run(out)
        if self._raw is not None:
            self._raw.put(out)


_cached: WeakKeyDictionary[Side, dict[Any, SideLaunch]] = WeakKeyDictionary()


def unpack_into(side: Side, start: int, stop: int, out: torch.Tensor) -> list[tuple[int, int]]:
    """Decode tokens ``[start, stop)`` of ``side`` into ``out`` ``[batch, kv_head, token, dim]``, as far as kernels support it.

    Returns the ranges of tokens, counted from the side's first token, that the caller must write: the raw tail, and packed tokens if their
    codec has no kernel or ``start`` is inside a token group. A launch for all tokens is cached with the side. Raises InvalidParameter if a
    stream does not match its codec's layout.
    """
    key = out.dtype, out.stride(), uses_inline_ptx(out.device)
    all_tokens = start == 0 and stop == side.tokens
    if all_tokens and (cached := _cached.get(side, {}).get(key)) is not None:
        cached(out)
        return list(cached.remaining)
    remaining: list[tuple[int, int]] = []
    side_parts = _side_parts(side, start, stop)
    launch, raw = _prepare(side_parts, start, out), _raw_tokens(side_parts, start)
    if launch is not None:
        launch.run(out)
    elif side_parts and not _decode_with_fallback(side_parts, start, out):
        remaining.append((side_parts[0].first + side_parts[0].start, side_parts[-1].first + side_parts[-1].stop))
        raw = None
    if raw is not None:
        raw.put(out)
    tail = side.tokens - side.tail.shape[2]
    if stop > max(start, tail):
        remaining.append((max(start, tail), stop))
    if all_tokens and launch is not None and launch.cacheable:
        _cached.setdefault(side, {})[key] = SideLaunch(launch, raw, tuple(remaining), out.device)
    return remaining


def _prepare(parts: Sequence[SidePart], start: int, out: torch.Tensor) -> PreparedDecode | None:
    """Prepare one launch that decodes ``parts`` into outputs like ``out``. Returns None if one launch is not enough.

    The first token of ``out`` is token ``start`` of the side.
    """
    if not parts:
        return None
    codec, packed = parts[0].page.codec.without_raw_positions, [part.packed(start) for part in parts]
    if parts[0].start % codec.group_tokens:
        return None
    return unpack.prepare(codec, packed, out) if unpack.supports(codec, out) else decode.prepare(codec, packed, out, True)


def _decode_with_fallback(parts: Sequence[SidePart], start: int, out: torch.Tensor) -> bool:
    """Decode ``parts`` with a copy or with several launches. Arguments are as in ``_prepare``. Returns True on success."""
    codec, packed = parts[0].page.codec.without_raw_positions, [part.packed(start) for part in parts]
    if type(codec) is RawCodec:
        for part in parts:
            begin = part.first + part.start - start
            out[:, :, begin : begin + part.stop - part.start] = part.page.streams["values"][:, :, part.start : part.stop]
        return True
    if klt.supports(codec, out):
        klt.unpack(codec, packed, out)
        return True
    return parts[0].start % codec.group_tokens == 0 and decode.decode_into(codec, packed, out, True)


def _raw_tokens(parts: Sequence[SidePart], start: int) -> RawTokens | None:
    """Return the raw tokens of ``parts``, or None if the codec has none. Token 0 of the output is token ``start`` of the side."""
    raw = parts[0].page.codec.raw_positions if parts else None
    if raw is None:
        return None
    tokens, sequences, values = [], [], []
    for part in parts:
        packed = part.packed(start)
        token, sequence = raw.token_positions(packed.streams)
        tokens.append(token + packed.first)
        sequences.append(sequence)
        values.append(raw.kept_values(packed.streams))
    return RawTokens(torch.cat(tokens), torch.cat(sequences), torch.cat(values))


def _current_stream(device: torch.device) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def _side_parts(side: Side, start: int, stop: int) -> list[SidePart]:
    result, first = [], 0
    for page in side.runs:
        begin, end = max(0, start - first), min(page.tokens, stop - first)
        if begin < end:
            result.append(SidePart(page, first, begin, end))
        first += page.tokens
        if first >= stop:
            break
    return result
