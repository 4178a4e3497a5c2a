"""Custom operators with which compiled code updates live caches and attends to them. ``torch.compile`` knows only their output shapes.

Each call receives a *ticket*, a tensor that contains the cache's number, and returns the layer's next ticket. Because each call depends on
the previous one, a compiler does not drop, merge or reorder calls, and code compiled for one cache works for another. Tickets are in CPU
memory, which keeps the operators out of CUDA graphs: a replay would not run their Python code.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from kvpack.formats.errors import InvalidParameter


class OperatorTarget(Protocol):
    """The methods of ``LiveCache`` that the operators call."""

    def update(self, layer: int, k: torch.Tensor | None, v: torch.Tensor | None) -> None: ...
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        *,
        scale: float | None,
        causal: bool,
        softcap: float | None,
        sliding_window: int | None,
        sink_logits: torch.Tensor | None,
        starts: torch.Tensor | None,
    ) -> torch.Tensor: ...


_caches: WeakValueDictionary[int, OperatorTarget] = WeakValueDictionary()
_numbers = itertools.count()


def register_cache(cache: OperatorTarget) -> torch.Tensor:
    """Register ``cache`` under a new number, and return its first ticket."""
    number = next(_numbers)
    _caches[number] = cache
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def find_cache(ticket: torch.Tensor) -> OperatorTarget:
    """Return the cache that a ticket refers to. Raises InvalidParameter if the cache no longer exists."""
    cache = _caches.get(int(ticket))
    if cache is None:
        raise InvalidParameter("compiled code uses a live cache that no longer exists: keep a reference to the cache")
    return cache


class Tickets:
    """The current ticket of each layer of a cache, for use by compiled code."""

    def __init__(self, cache: OperatorTarget, layers: int) -> None:
        first = register_cache(cache)
        self.tickets = [first.clone() for _ in range(layers)]

    def compiled_update(self, layer: int, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
        """Call the operator ``live_update`` for one layer, and store the new ticket."""
        self.tickets[layer] = live_update(self.tickets[layer], k, v, layer)

    def compiled_attend(
        self, layer: int, q: torch.Tensor, dim: int, sink_logits: torch.Tensor | None, starts: Any, **options: Any
    ) -> torch.Tensor:
        """Call the operator ``live_attend`` for one layer, and store the new ticket. ``dim`` is the head dim of the values."""
        if starts is not None:
            starts = torch.as_tensor(starts, device=starts.device if isinstance(starts, torch.Tensor) else "cpu")
        out: torch.Tensor
        out, self.tickets[layer] = live_attend(self.tickets[layer], q, sink_logits, starts, layer, dim, **options)
        return out


# The schemas are explicit because annotations are strings in this module, which PyTorch cannot read.
@torch.library.custom_op("kvpack::live_update", mutates_args=(), schema="(Tensor ticket, Tensor? k, Tensor? v, SymInt layer) -> Tensor")
def live_update(ticket: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: int) -> torch.Tensor:
    """Call ``update`` on the ticket's cache. Returns the next ticket."""
    find_cache(ticket).update(layer, k, v)
    return ticket.clone()


@live_update.register_fake
def _(ticket: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: int) -> torch.Tensor:
    return ticket.clone()


@torch.library.custom_op(
    "kvpack::live_attend",
    mutates_args=(),
    schema=(
        "(Tensor ticket, Tensor q, Tensor? sink_logits, Tensor? starts, SymInt layer, SymInt dim, float? scale, bool causal, "
        "float? softcap, SymInt? sliding_window) -> (Tensor, Tensor)"
    ),
)
def live_attend(
    ticket: torch.Tensor,
    q: torch.Tensor,
    sink_logits: torch.Tensor | None,
    starts: torch.Tensor | None,
    layer: int,
    dim: int,
    scale: float | None,
    causal: bool,
    softcap: float | None,
    sliding_window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``attend`` on the ticket's cache. Returns its output and the next ticket. ``dim`` is the head dim of the values."""
    out = find_cache(ticket).attend(
        layer, q, scale=scale, causal=causal, softcap=softcap, sliding_window=sliding_window, sink_logits=sink_logits, starts=starts
    )
    return out.contiguous(), ticket.clone()


@live_attend.register_fake
def _(
    ticket: torch.Tensor, q: torch.Tensor, sink_logits: torch.Tensor | None, starts: torch.Tensor | None, layer: int, dim: int, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty((*q.shape[:3], dim)), ticket.clone()
