"""Attention on the CPU: C kernels over any number of packed pages, accurate to float32 rounding.

Sources: FlashAttention's online softmax; flash decoding's split of the tokens; OCTOPUS Eq. 13 for queries and values in the coded frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from kvpack.runtime.modes import without_autocast

from . import library, sides

if TYPE_CHECKING:
    from .codecs import CodecDescription
    from .sides import CodedFrame, Side, SidePart

    Integers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

MIN_VALUES = 1 << 19
"""Minimum work per thread, as keys and values times query rows. With less, another thread costs more than it saves."""


class _DescribedPart(NamedTuple):
    """Part of a layer's keys or values, and its C struct, which points into ``part`` and ``description``."""

    part: SidePart
    description: CodecDescription
    struct: library.SideArgument


class _Span(NamedTuple):
    """Tokens ``[start, stop)`` that are in a single part of the keys and a single part of the values."""

    start: int
    stop: int
    k: _DescribedPart
    v: _DescribedPart


class PreparedAttention:
    """A prepared attention call over one layer's keys and values, whose shapes are fixed. Their C descriptions are built only once."""

    def __init__(self, k: Side, v: Side, k_parts: list[_DescribedPart], v_parts: list[_DescribedPart]) -> None:
        self._k_parts, self._v_parts, self._tokens = k_parts, v_parts, k.tokens
        self._heads, self._k_dim, self._v_dim = k.heads, k.codec.dim, v.codec.dim

    @staticmethod
    def create(k: Side, v: Side) -> PreparedAttention | None:
        """Create the call. Returns None if the C kernels do not support the codecs, sidecars or strides of ``k`` or ``v``."""
        if library.library() is None or (k_parts := sides.side_parts(k)) is None or (v_parts := sides.side_parts(v)) is None:
            return None
        return PreparedAttention(k, v, [_describe_part(part) for part in k_parts], [_describe_part(part) for part in v_parts])

    def __call__(
        self,
        q: torch.Tensor,
        scale: float,
        causal: bool,
        softcap: float | None,
        sliding_window: int | None,
        sink_logits: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        tokens: int | None = None,
        threads: int | None = None,
        level: int = 0,
    ) -> torch.Tensor:
        """Return softmax(scale q k^T) v over the first ``tokens`` tokens, or over all tokens if ``tokens`` is None.

        ``level`` is an index into ``library.levels()``. The other arguments are as in ``kvpack.attend``, and have been checked. Raises
        MemoryError.
        """
        batch, q_heads, q_len, _ = q.shape
        heads, v_dim = self._heads, self._v_dim
        rows = q_heads // heads * q_len
        with without_autocast(q.device):
            scaled = (q.detach().to(torch.float32) * scale).reshape(batch, heads, rows, self._k_dim)
            visible = _visible_ranges(batch, q_len, self._tokens if tokens is None else tokens, causal, sliding_window, lengths, starts)
            begin, end = int(visible[..., 0].min()), int(visible[..., 1].max())
            spans = _split_spans(self._k_parts, self._v_parts, begin, end)
            queries: dict[CodedFrame | None, torch.Tensor] = {}
            sums: dict[CodedFrame | None, torch.Tensor] = {}
            structs = (library.Span * len(spans))()
            for index, (start, stop, k, v) in enumerate(spans):
                k_frame, v_frame = k.part.frame, v.part.frame
                if k_frame not in queries:
                    queries[k_frame] = (scaled if k_frame is None else k_frame.query(scaled)).contiguous()
                if v_frame not in sums:
                    sums[v_frame] = torch.zeros(batch, heads, rows, v_dim, dtype=torch.float32, device=q.device)
                structs[index] = library.Span(start, stop, k.struct, v.struct, queries[k_frame].data_ptr(), sums[v_frame].data_ptr())
            sinks = None if sink_logits is None else sink_logits.detach().to("cpu", torch.float32).contiguous()
            work = batch * heads * rows * max(0, end - begin) * (self._k_dim + v_dim)
            threads = library.thread_count(threads, 1 + work // MIN_VALUES)
            call = library.AttendArguments(
                batch, heads, rows, q_len, v_dim, visible.ctypes.data, None if sinks is None else sinks.data_ptr(), softcap or 0.0,
                structs, len(spans), threads, level,
            )  # fmt: skip
            library.run("attend", call, "compute attention")
            out = torch.zeros(batch, heads, rows, v_dim, dtype=torch.float32, device=q.device) if len(sums) != 1 else None
            for frame, frame_sums in sums.items():
                original = frame_sums if frame is None else frame.original(frame_sums)
                out = original if out is None else out.add_(original)
            assert out is not None
            return out.reshape(batch, q_heads, q_len, v_dim).to(q.dtype)


def _describe_part(part: SidePart) -> _DescribedPart:
    description = part.describe()
    return _DescribedPart(part, description, part.to_struct(description))


def _visible_ranges(
    batch: int,
    q_len: int,
    tokens: int,
    causal: bool,
    sliding_window: int | None,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> Integers:
    """Return the range of tokens ``[begin, end)`` that each query attends to, within ``[0, tokens)``: int64 ``[batch, q_len, 2]``."""
    # NumPy calls take a fraction of the time of PyTorch calls, and a decode step makes them for every layer.
    length = tokens if lengths is None else lengths.numpy()[:, None]
    causal_end = length - q_len + numpy.arange(1, q_len + 1)
    result = numpy.empty((batch, q_len, 2), numpy.int64)
    result[..., 0] = 0 if sliding_window is None else causal_end - sliding_window
    result[..., 1] = causal_end if causal else length
    if starts is not None:
        numpy.maximum(result[..., 0], starts.numpy()[:, None], out=result[..., 0])
    return result.clip(0, tokens, out=result)


def _split_spans(k: list[_DescribedPart], v: list[_DescribedPart], begin: int, end: int) -> list[_Span]:
    """Split tokens ``[begin, end)`` wherever a part of the keys or of the values begins."""
    spans: list[_Span] = []
    k_index = v_index = 0
    start = begin
    while start < end:
        while k[k_index].part.stop <= start:
            k_index += 1
        while v[v_index].part.stop <= start:
            v_index += 1
        stop = min(k[k_index].part.stop, v[v_index].part.stop, end)
        spans.append(_Span(start, stop, k[k_index], v[v_index]))
        start = stop
    return spans
