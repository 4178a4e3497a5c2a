"""Fast decode steps. On a CUDA device, kernels read positions, tails and runs there, so that the host has nothing to plan or check.

On the CPU, a layer is checked and prepared once, and again only if its packed runs or buffers change.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvpack.attention import check_call, checked_tokens, cpu_attention
from kvpack.coding import dispatch
from kvpack.coding.encoding import check_finite
from kvpack.formats.errors import OutOfBounds
from kvpack.runtime.modes import float32_no_grad, is_traced

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.kernels.attend.growing import AppendCall, GrowingCall

    from .layer import LiveLayer

ALIGNED = 4
"""Alignment, in 32-bit integers, that kernels expect of addresses."""


class TritonSteps:
    """Prepared decode steps of one layer. The device counts the layer's tokens.

    ``not_finite``, int32 ``[1]`` on the device, becomes nonzero if an added value is not finite.
    """

    def __init__(self, layer: LiveLayer) -> None:
        self._layer = layer
        self._calls: dict[Any, GrowingCall | None] = {}
        self._appends: dict[int, AppendCall] = {}
        self.captured = False
        """True if graph replays may have added tokens that the host has not counted. ``read_replayed_tokens`` counts them."""
        device, batch = layer.device, layer.batch
        self._checks = all(side.codec.exact_dtype is None for side in layer.sides.values())
        with float32_no_grad(device):
            # All tensors share one allocation, and each begins at an address with the alignment that kernels assume.
            numbers = torch.zeros(4 + -(-batch // ALIGNED), ALIGNED, dtype=torch.int32, device=device)
            self._packed, self._skipped, self._unchecked, self.not_finite = numbers[:4, :1].unbind()
            self._lengths = numbers[4:].view(-1)[:batch]
        self._version = layer.version
        self._write_lengths()

    @staticmethod
    def supports(layer: LiveLayer, q: torch.Tensor) -> bool:
        """Return True if the layer has keys and values and the kernels support queries like ``q``."""
        if set(layer.sides) != {"k", "v"} or not isinstance(q, torch.Tensor) or is_traced(q):
            return False
        return dispatch.uses_triton(q.device) and q.device == layer.device

    def try_update(self, k: torch.Tensor | None, v: torch.Tensor | None) -> bool:
        """Append a few tokens and return True. If the layer's ``update`` must check them or make room, return False instead."""
        layer = self._layer
        if not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor) or k.dim() != 4 or layer.pending_tokens or layer.is_uneven:
            return False
        tokens = k.shape[2]
        capturing = self._capturing
        if layer.raw_tokens + tokens > layer.room:
            if self.captured or capturing:
                raise OutOfBounds(
                    f"{layer.name}: the raw tail holds {layer.raw_tokens} of at most {layer.room} tokens, so {tokens} more do not fit: "
                    "call roll()"
                )
            return False
        append = self._appends.get(tokens)
        if append is None:
            from kvpack.kernels.attend.growing import AppendCall

            append = self._appends[tokens] = AppendCall(layer.sides["k"].tail, layer.sides["v"].tail, tokens)
        if not append.supports(k, v):
            return False
        append(k, v, self._lengths, self._packed, self.not_finite if self._checks else self._unchecked)
        layer.raw_tokens += tokens
        self.captured |= capturing
        return True

    def attend(
        self,
        q: torch.Tensor,
        sink_logits: torch.Tensor | None,
        starts: Any,
        scale: float | None,
        causal: bool,
        softcap: float | None,
        window: int | None,
    ) -> torch.Tensor | None:
        """Return the same outputs as ``LiveCache.attend``, or None if ``kvpack.attend`` must be called instead."""
        layer = self._layer
        if not isinstance(q, torch.Tensor) or q.dim() != 4 or q.shape[2] > layer.raw_tokens or layer.is_uneven:
            return None
        if is_traced(q, sink_logits) or not self._supports_starts(starts):
            return None
        if layer.skipped and (window is None or self._packed_tokens + layer.raw_tokens - q.shape[2] < window - 1):
            return None
        request = (q.shape, q.dtype, q.device, scale, causal, softcap, window, sink_logits is None, starts is None)
        if request not in self._calls:
            options = {"scale": scale, "causal": causal, "softcap": softcap, "sliding_window": window}
            self._calls[request] = self._prepare_call(q, sink_logits, starts, options)
        call = self._calls[request]
        if call is None:
            return None
        if starts is not None and (layer.skipped or layer.sliding_window is not None):
            # Kernels count from the first token in the cache, which changes between replays of a graph.
            starts = starts - self._skipped
        return call(q, self._lengths, sink_logits, starts)

    def refresh(self) -> bool:
        """Prepare for the layer's current state. Returns True if kernel launches changed."""
        changed = False
        if self._version != self._layer.version:
            view = self._layer.with_full_tail()
            for request, call in list(self._calls.items()):
                if call is None or not call.supports_layer(view):
                    del self._calls[request]
                    changed = True
                else:
                    with float32_no_grad(self._layer.device):
                        changed |= call.refresh(view)
            if not all(append.appends_to(*(side.tail for side in self._layer.sides.values())) for append in self._appends.values()):
                self._appends.clear()
                changed = True
            self._version = self._layer.version
        self._write_lengths()
        return changed

    def read_replayed_tokens(self) -> None:
        """Read from the device how many tokens CUDA graph replays have appended.

        Raises OutOfBounds if they did not fit in the tail.
        """
        if self.captured and not self._capturing:
            self._layer.raw_tokens = int(self._lengths[0]) - self._layer.older_tokens
            if self._layer.raw_tokens > self._layer.room:
                lost = self._layer.raw_tokens - self._layer.room
                self._layer.raw_tokens = self._layer.room
                raise OutOfBounds(
                    f"{self._layer.name}: the raw tail has room for {self._layer.room} tokens, but graph replays added {lost} more, which "
                    "are lost: call roll() at least once per window of tokens"
                )

    @property
    def _capturing(self) -> bool:
        return self._lengths.is_cuda and torch.cuda.is_current_stream_capturing()

    def _write_lengths(self) -> None:
        layer = self._layer
        self._packed_tokens = layer.older_tokens
        with float32_no_grad(layer.device):
            self._packed.fill_(self._packed_tokens)
            self._skipped.fill_(layer.skipped)
            self._lengths.fill_(self._packed_tokens + layer.raw_tokens)

    def _supports_starts(self, starts: Any) -> bool:
        """Return True if ``starts`` is None, or a tensor that kernels can read in place."""
        if starts is None:
            return True
        if not isinstance(starts, torch.Tensor) or starts.device != self._lengths.device:
            return False
        return starts.shape == self._lengths.shape and starts.dtype in (torch.int32, torch.int64)

    def _prepare_call(self, q: torch.Tensor, sink_logits: torch.Tensor | None, starts: Any, options: dict[str, Any]) -> GrowingCall | None:
        from kvpack.attention import check_call
        from kvpack.kernels.attend.growing import GrowingCall
        from kvpack.kernels.attend.prepared import AttendOptions

        view = self._layer.with_full_tail()
        layer = self._layer.as_layer()
        check_call(q, layer, sink_logits=sink_logits, **options)
        window = options["sliding_window"]
        if not options["causal"] or not GrowingCall.supports(q, view):
            return None
        if self._layer.sliding_window is not None and (window is None or window > self._layer.sliding_window):
            # Some tokens of a larger window will have been dropped when a graph is replayed.
            return None
        scale = q.shape[3] ** -0.5 if options["scale"] is None else options["scale"]
        call_options = AttendOptions(scale, True, options["softcap"], window, True, sink_logits is not None, starts is not None)
        with float32_no_grad(self._layer.device):
            return GrowingCall(q, view, call_options)


_NUMBER_TYPES = {type(None), bool, int, float}
"""Types of numeric options. Prepared calls are cached by the values of these options."""


class CpuSteps:
    """Prepared decode steps of one layer. Calls that they do not support must use the layer's ``update`` and ``kvpack.attend``."""

    captured = False

    def __init__(self, layer: LiveLayer) -> None:
        self._layer = layer
        self._prepare()

    @staticmethod
    def supports(layer: LiveLayer, q: torch.Tensor) -> bool:
        """Return True if the layer has keys and values and the C kernels support queries like ``q``."""
        return set(layer.sides) == {"k", "v"} and isinstance(q, torch.Tensor) and q.device == layer.device and dispatch.uses_c(q.device)

    def try_update(self, k: torch.Tensor | None, v: torch.Tensor | None) -> bool:
        """Append tokens to the raw tail and return True. If ``update`` must check them, convert them or make room, return False instead."""
        layer = self._layer
        if self._version != layer.version:
            self._prepare()
        if not self._is_even or layer.pending_tokens or not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor) or k.dim() != 4:
            return False
        first, tokens = layer.raw_tokens, k.shape[2]
        if first - layer.newest >= layer.window or first + tokens > layer.room:
            return False
        given = (("k", k), ("v", v))
        for name, x in given:
            tail, (batch, heads, dim) = layer.sides[name].tail, self._shapes[name]
            if x.shape != (batch, heads, tokens, dim) or x.dtype != tail.dtype or x.device != tail.device or x.layout != tail.layout:
                return False
        for name, x in given:
            if name in self._finite:
                check_finite(x, self._older + first, self._finite[name])
        with torch.no_grad():
            for name, x in given:
                layer.sides[name].tail[:, :, first : first + tokens] = x
        layer.raw_tokens = first + tokens
        return True

    def attend(
        self,
        q: torch.Tensor,
        sink_logits: torch.Tensor | None,
        starts: Any,
        scale: float | None,
        causal: bool,
        softcap: float | None,
        window: int | None,
    ) -> torch.Tensor | None:
        """Return the same outputs as ``LiveCache.attend``, or None if ``kvpack.attend`` must be called instead."""
        layer = self._layer
        if self._version != layer.version:
            self._prepare()
        if not self._is_even or not isinstance(q, torch.Tensor) or is_traced(q, sink_logits) or q.layout != torch.strided:
            return None
        tokens, queries = self._older + layer.raw_tokens, q.shape[2] if q.dim() == 4 else 0
        if not 1 <= queries <= tokens or (layer.skipped and (window is None or tokens - queries < window - 1)):
            return None
        if {type(scale), type(causal), type(softcap), type(window)} - _NUMBER_TYPES or not isinstance(sink_logits, torch.Tensor | None):
            return None
        sinks = None if sink_logits is None else (sink_logits.shape, sink_logits.dtype)
        request = (q.shape, q.dtype, q.device, scale, causal, softcap, window, sinks, dispatch.environment_key())
        if request not in self._calls:
            check_call(q, layer.as_layer(), scale, causal, softcap, window, sink_logits)
            on_cpu = cpu_attention(q, self._whole)
            factor = q.shape[3] ** -0.5 if scale is None else scale
            self._calls[request] = on_cpu and partial(on_cpu, scale=factor, causal=causal, softcap=softcap, sliding_window=window)
        if (call := self._calls[request]) is None:
            return None
        if starts is not None:
            starts = checked_tokens("starts", starts, q.shape[0], layer.skipped, tokens)
        return call(q, sink_logits=sink_logits, starts=starts, tokens=tokens)

    def refresh(self) -> bool:
        """Prepare for the layer's current state. Always returns False: there are no kernel launches to capture again."""
        return False

    def read_replayed_tokens(self) -> None:
        """Do nothing, because steps on the CPU are never captured in a graph."""

    def _prepare(self) -> None:
        layer = self._layer
        self._version, self._is_even, self._older = layer.version, not layer.is_uneven, layer.older_tokens
        self._calls: dict[Any, Callable[..., torch.Tensor] | None] = {}
        self._shapes = {name: (side.batch, side.heads, side.dim) for name, side in layer.sides.items()}
        self._finite = {name: f"{layer.name}.{name}" for name, side in layer.sides.items() if side.codec.exact_dtype is None}
        self._whole = layer.with_full_tail()
