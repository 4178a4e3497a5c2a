"""What a KvpackCache does in code that torch.compile compiles: operators, which run its own methods."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self

from kvpack.live import operators

if TYPE_CHECKING:
    import torch


class CompiledCalls:
    """The calls of the KvpackCache ``cache`` in compiled code, one ticket for each of its layers (``kvpack.live.operators``)."""

    def __init__(self, cache: Any, layers: int) -> None:
        self._cache = weakref.ref(cache)
        first = operators.ticket_of(self)
        self._tickets = [first.clone() for _ in range(layers)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(memo[id(self._cache())], len(self._tickets))

    def update(self, layer: int, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
        """What the operator does."""
        assert k is not None
        assert v is not None
        self._alive.append(k, v, layer)

    def attend(self, layer: int, q: torch.Tensor, **options: Any) -> torch.Tensor:
        """What the operator does."""
        out: torch.Tensor = self._alive.attend(layer, q, **options)
        return out

    def compiled_update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Append to one layer, in compiled code."""
        self._tickets[layer] = operators.live_update(self._tickets[layer], k, v, layer)

    def compiled_attend(
        self, layer: int, q: torch.Tensor, dim: int, sink_logits: torch.Tensor | None, starts: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        """Attend one layer, whose values have ``dim`` channels, in compiled code."""
        out: torch.Tensor
        out, self._tickets[layer] = operators.live_attend(self._tickets[layer], q, sink_logits, starts, layer, dim, **options)
        return out

    @property
    def _alive(self) -> Any:
        cache = self._cache()
        assert cache is not None
        return cache
