"""Run attention with a given module of ``kvpack.kernels.attend``, whichever one ``kvpack.attend`` would choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from kvpack import Layer


def attend_by(
    kernels: ModuleType,
    q: torch.Tensor,
    layer: Layer,
    scale: float,
    causal: bool = True,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sink_logits: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> Any:
    """Compute attention with the call that ``kernels`` prepares and caches with the layer.

    ``kernels`` is the module ``attention`` or ``many_queries``.
    """
    from kvpack.kernels.attend.prepared import AttendOptions

    options = AttendOptions(scale, causal, softcap, sliding_window, lengths is not None, sink_logits is not None, starts is not None)
    return kernels.prepare(q, layer, options)(q, sink_logits, lengths, starts)
