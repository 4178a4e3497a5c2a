"""Fast decode steps on the CPU. A layer is checked and prepared once, and again only if its packed runs or buffers change."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvpack.attention import check_call, checked_tokens, cpu_attention
from kvpack.coding import dispatch
from kvpack.coding.encoding import check_finite

if TYPE_CHECKING:
    from collections.abc import Callable

    from .layer import LiveLayer


_NUMBER_TYPES = {type(None), bool, int, float}
"""Types of numeric options. Prepared calls are cached by the values of their options."""


class CpuSteps:
    """Prepared decode steps of one layer. For calls that they do not support, use the layer's ``update`` and ``kvpack.attend``."""

    captured = False

    def __init__(self, layer: LiveLayer) -> None:
        self._layer = layer
        self._view()

    @staticmethod
    def supports(layer: LiveLayer, q: torch.Tensor) -> bool:
        """Return True if the layer has keys and values and the C kernels support queries like ``q``."""
        return set(layer.sides) == {"k", "v"} and isinstance(q, torch.Tensor) and q.device == layer.device and dispatch.uses_c(q.device)

    def try_update(self, k: torch.Tensor | None, v: torch.Tensor | None) -> bool:
        """Append tokens to the raw tail and return True. If ``update`` must check or convert them or make room, return False instead."""
        layer = self._layer
        if self._version != layer.version:
            self._view()
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
            self._view()
        if not self._is_even or not isinstance(q, torch.Tensor) or q.requires_grad or q.layout != torch.strided:
            return None
        tokens, queries = self._older + layer.raw_tokens, q.shape[2] if q.dim() == 4 else 0
        if not 1 <= queries <= tokens or (layer.skipped and (window is None or tokens - queries < window - 1)):
            return None
        if {type(scale), type(causal), type(softcap), type(window)} - _NUMBER_TYPES or not isinstance(sink_logits, torch.Tensor | None):
            return None
        sinks = None if sink_logits is None else (sink_logits.shape, sink_logits.dtype)
        request = (q.shape, q.dtype, q.device, scale, causal, softcap, window, sinks, dispatch.environment_key())
        if request not in self._calls:
            check_call(q, layer.layer(), scale, causal, softcap, window, sink_logits)
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

    def _view(self) -> None:
        layer = self._layer
        self._version, self._is_even, self._older = layer.version, not layer.is_uneven, layer.older_tokens
        self._calls: dict[Any, Callable[..., torch.Tensor] | None] = {}
        self._shapes = {name: (side.batch, side.heads, side.dim) for name, side in layer.sides.items()}
        self._finite = {name: f"{layer.name}.{name}" for name, side in layer.sides.items() if side.codec.exact_dtype is None}
        self._whole = layer.whole()
