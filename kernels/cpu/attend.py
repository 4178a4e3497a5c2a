"""attend on the CPU: compiled kernels over any number of packed pages, within float32 rounding of the exact result.

Sources: FlashAttention's running softmax, flash decoding's split of the tokens; OCTOPUS Eq. 13 for queries and values in the coded frame.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from kvpack.runtime.modes import without_autocast

from . import library, sides

if TYPE_CHECKING:
    from .codecs import Described
    from .sides import Frame, Side, SidePart

    Integers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

MIN_VALUES = 1 << 19
"""Keys and values, times query rows, of a call for each of its threads: below it, starting one costs more than it saves."""


class _Part(NamedTuple):
    """A part of a side and its C description, which refers to memory of both and of ``described``."""

    part: SidePart
    described: Described
    struct: library.SideArgument


class _Span(NamedTuple):
    start: int
    stop: int
    k: _Part
    v: _Part


class Prepared:
    """Attention over both sides of a layer with a fixed number of sequences, KV heads and tokens; its tables are built once."""

    def __init__(self, k: Side, v: Side, k_parts: list[_Part], v_parts: list[_Part]) -> None:
        self._k_parts, self._v_parts, self._tokens = k_parts, v_parts, k.tokens
        self._heads, self._k_dim, self._v_dim = k.heads, k.codec.dim, v.codec.dim

    @staticmethod
    def of(k: Side, v: Side) -> Prepared | None:
        """Create the call over a layer; None if C does not support its codecs, side-cars or strides."""
        if library.library() is None or (k_parts := sides.parts_of(k)) is None or (v_parts := sides.parts_of(v)) is None:
            return None
        return Prepared(k, v, [_described(part) for part in k_parts], [_described(part) for part in v_parts])

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
        """Compute softmax(scale q k^T) v over the first ``tokens`` tokens, or all, with the checked arguments of ``kvpack.attend``.

        ``level`` is an index into ``library.levels()``. Raises MemoryError.
        """
        batch, q_heads, q_len, _ = q.shape
        heads, v_dim = self._heads, self._v_dim
        rows = q_heads // heads * q_len
        with without_autocast(q.device):
            scaled = (q.detach().to(torch.float32) * scale).reshape(batch, heads, rows, self._k_dim)
            visible = _visible(batch, q_len, self._tokens if tokens is None else tokens, causal, sliding_window, lengths, starts)
            begin, end = int(visible[..., 0].min()), int(visible[..., 1].max())
            spans = _spans(self._k_parts, self._v_parts, begin, end)
            queries: dict[Frame | None, torch.Tensor] = {}
            sums: dict[Frame | None, torch.Tensor] = {}
            structs = (library.Span * len(spans))()
            for number, (start, stop, k, v) in enumerate(spans):
                for_keys, for_values = k.part.frame, v.part.frame
                if for_keys not in queries:
                    queries[for_keys] = (scaled if for_keys is None else for_keys.query(scaled)).contiguous()
                if for_values not in sums:
                    sums[for_values] = torch.zeros(batch, heads, rows, v_dim, dtype=torch.float32, device=q.device)
                structs[number] = library.Span(start, stop, k.struct, v.struct, queries[for_keys].data_ptr(), sums[for_values].data_ptr())
            sinks = None if sink_logits is None else sink_logits.detach().to("cpu", torch.float32).contiguous()
            work = batch * heads * rows * max(0, end - begin) * (self._k_dim + v_dim)
            threads = min(library.checked_threads(threads, torch.get_num_threads()), 1 + work // MIN_VALUES)
            call = library.Attend(
                batch, heads, rows, q_len, v_dim, visible.ctypes.data, None if sinks is None else sinks.data_ptr(), softcap or 0.0,
                structs, len(spans), threads, level,
            )  # fmt: skip
            compiled = library.library()
            assert compiled is not None
            if compiled.kvpack_attend(ctypes.byref(call)):
                raise MemoryError("not enough memory to compute attention: the buffers could not be allocated")
            out = torch.zeros(batch, heads, rows, v_dim, dtype=torch.float32, device=q.device) if len(sums) != 1 else None
            for frame, part in sums.items():
                mapped = part if frame is None else frame.original(part)
                out = mapped if out is None else out.add_(mapped)
            assert out is not None
            return out.reshape(batch, q_heads, q_len, v_dim).to(q.dtype)


def _described(part: SidePart) -> _Part:
    described = part.described()
    return _Part(part, described, part.struct(described))


def _visible(
    batch: int,
    q_len: int,
    tokens: int,
    causal: bool,
    sliding_window: int | None,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> Integers:
    """Return the tokens [begin, end) that each query sees, int64 ``[batch, q_len, 2]`` within 0 to tokens."""
    # By NumPy, whose calls take a fraction of torch's: a decode step makes them for every layer.
    held = tokens if lengths is None else lengths.numpy()[:, None]
    after = held - q_len + numpy.arange(1, q_len + 1)
    result = numpy.empty((batch, q_len, 2), numpy.int64)
    result[..., 0] = 0 if sliding_window is None else after - sliding_window
    result[..., 1] = after if causal else held
    if starts is not None:
        numpy.maximum(result[..., 0], starts.numpy()[:, None], out=result[..., 0])
    return result.clip(0, tokens, out=result)


def _spans(k: list[_Part], v: list[_Part], begin: int, end: int) -> list[_Span]:
    """Split the tokens [begin, end) at the ends of the parts of either side."""
    spans: list[_Span] = []
    first = second = 0
    start = begin
    while start < end:
        while k[first].part.stop <= start:
            first += 1
        while v[second].part.stop <= start:
            second += 1
        stop = min(k[first].part.stop, v[second].part.stop, end)
        spans.append(_Span(start, stop, k[first], v[second]))
        start = stop
    return spans
