"""attend on the CPU: the compiled kernels over packed pages of any number, within binary32's rounding of the exact result.

Sources: FlashAttention's running softmax, flash decoding's split of the tokens; OCTOPUS Eq. 13 for queries and values in the coded frame.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy
import torch

from kvpack.runtime.threads import checked_threads

from . import library, sides

if TYPE_CHECKING:
    from .sides import Frame, Part, Side

    Integers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

FEWEST_VALUES = 1 << 19
"""Keys and values, times query rows, of a call for each of its threads: below it, starting one costs more than it saves."""


class Layer(Protocol):
    """Both sides of a layer, of as many sequences, KV heads and tokens."""

    @property
    def k(self) -> Side | None: ...
    @property
    def v(self) -> Side | None: ...


class _Span(NamedTuple):
    start: int
    stop: int
    k: Part
    v: Part


def supports(q: torch.Tensor, layer: Layer) -> bool:
    """Whether these kernels take the layer: its codecs, side-cars and strides, on the CPU."""
    k, v = layer.k, layer.v
    assert k is not None
    assert v is not None
    return library.library() is not None and sides.parts_of(k) is not None and sides.parts_of(v) is not None


def attend(
    q: torch.Tensor,
    layer: Layer,
    scale: float,
    causal: bool,
    softcap: float | None,
    sliding_window: int | None,
    sink_logits: torch.Tensor | None,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None = None,
    threads: int | None = None,
    level: int = 0,
) -> torch.Tensor:
    """softmax(scale q k^T) v over a layer that ``supports`` takes: ``kvpack.attend`` on checked input, with its arguments.

    ``level`` is a place in ``library.levels()``. Raises MemoryError.
    """
    k, v = layer.k, layer.v
    assert k is not None
    assert v is not None
    k_parts, v_parts = sides.parts_of(k), sides.parts_of(v)
    assert k_parts is not None
    assert v_parts is not None
    batch, q_heads, q_len, _ = q.shape
    rows = q_heads // k.heads * q_len
    v_dim = v.codec.dim
    scaled = (q.detach().to(torch.float32) * scale).reshape(batch, k.heads, rows, k.codec.dim)
    visible = _visible(batch, q_len, k.tokens, causal, sliding_window, lengths, starts)
    begin, end = int(visible[..., 0].min()), int(visible[..., 1].max())
    found = _spans(k_parts, v_parts, begin, end)
    queries: dict[Frame | None, torch.Tensor] = {}
    sums: dict[Frame | None, torch.Tensor] = {}
    structs = (library.Span * len(found))()
    # Held until C returns: tables of other codecs may push them out of the cache meanwhile.
    held = [(span.k.described(), span.v.described()) for span in found]
    for number, span in enumerate(found):
        if span.k.frame not in queries:
            queries[span.k.frame] = _framed(scaled, span.k.frame)
        if span.v.frame not in sums:
            sums[span.v.frame] = torch.zeros(batch, k.heads, rows, v_dim, dtype=torch.float32, device=q.device)
        pointers = queries[span.k.frame].data_ptr(), sums[span.v.frame].data_ptr()
        k_side, v_side = span.k.struct(held[number][0]), span.v.struct(held[number][1])
        structs[number] = library.Span(span.start, span.stop, k_side, v_side, *pointers)
    sinks = None if sink_logits is None else sink_logits.detach().to("cpu", torch.float32).contiguous()
    work = batch * k.heads * rows * max(0, end - begin) * (k.codec.dim + v_dim)
    threads = min(checked_threads(threads, torch.get_num_threads()), 1 + work // FEWEST_VALUES)
    call = library.Attend(
        batch, k.heads, rows, q_len, v_dim, visible.ctypes.data, None if sinks is None else sinks.data_ptr(), softcap or 0.0,
        structs, len(found), threads, level,
    )  # fmt: skip
    compiled = library.library()
    assert compiled is not None
    if compiled.kvpack_attend(ctypes.byref(call)):
        raise MemoryError("there is not enough memory for the buffers of attention")
    out = torch.zeros(batch, k.heads, rows, v_dim, dtype=torch.float32, device=q.device) if len(sums) != 1 else None
    for frame, part in sums.items():
        mapped = part if frame is None else frame.original(part)
        out = mapped if out is None else out.add_(mapped)
    assert out is not None
    return out.reshape(batch, q_heads, q_len, v_dim).to(q.dtype)


def _framed(q: torch.Tensor, frame: Frame | None) -> torch.Tensor:
    return q.contiguous() if frame is None else frame.query(q).contiguous()


def _visible(
    batch: int,
    q_len: int,
    tokens: int,
    causal: bool,
    sliding_window: int | None,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> Integers:
    """The tokens [begin, end) that each query sees, int64 ``[batch, q_len, 2]`` within 0 to tokens."""
    # By NumPy, whose calls take a fraction of torch's: a decode step makes them for every layer.
    held = tokens if lengths is None else lengths.numpy()[:, None]
    after = held - q_len + numpy.arange(1, q_len + 1)
    found = numpy.empty((batch, q_len, 2), numpy.int64)
    found[..., 0] = 0 if sliding_window is None else after - sliding_window
    found[..., 1] = after if causal else held
    if starts is not None:
        numpy.maximum(found[..., 0], starts.numpy()[:, None], out=found[..., 0])
    return found.clip(0, tokens, out=found)


def _spans(k: list[Part], v: list[Part], begin: int, end: int) -> list[_Span]:
    """The tokens [begin, end) cut where a part of either side ends."""
    spans: list[_Span] = []
    first = second = 0
    start = begin
    while start < end:
        while k[first].stop <= start:
            first += 1
        while v[second].stop <= start:
            second += 1
        stop = min(k[first].stop, v[second].stop, end)
        spans.append(_Span(start, stop, k[first], v[second]))
        start = stop
    return spans
