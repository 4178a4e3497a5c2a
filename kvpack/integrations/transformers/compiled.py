"""What a KvpackCache does in code that torch.compile compiles: operators, which run its own methods."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self

import torch

from kvpack.live import operators

if TYPE_CHECKING:
    from collections.abc import Sequence

_TENSORS = ("input_ids", "attention_mask", "position_ids", "cache_position")
"""The arguments of a model's forward whose values a pass reads, in the order in which ``kvpack::pass_begins`` takes them."""


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
        self.cache.append(k, v, layer)

    def attend(self, layer: int, q: torch.Tensor, **options: Any) -> torch.Tensor:
        """What the operator does."""
        out: torch.Tensor = self.cache.attend(layer, q, **options)
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

    def compiled_seen(self, layer: int) -> torch.Tensor:
        """The number of tokens that one layer has seen, int64 ``[]`` in the CPU's memory, in compiled code."""
        seen: torch.Tensor
        seen, self._tickets[layer] = seen_tokens(self._tickets[layer], layer)
        return seen

    def compiled_begin(self, module: int, arguments: dict[str, Any]) -> None:
        """``Tracking.enter`` in compiled code, for the module of that number among those with hooks."""
        # None and empty values are left out; of the others, all but tensors and this one count by their names.
        names = [name for name, value in arguments.items() if name != "output_attentions" or value]
        ticket = pass_begins(self._tickets, [arguments.get(name) for name in _TENSORS], module, " ".join(names))
        # What follows needs it, and so comes after it.
        self._tickets = [ticket] * len(self._tickets)

    def compiled_end(self, module: int) -> None:
        """``Tracking.leave`` in compiled code."""
        self._tickets = [pass_ends(self._tickets, module)] * len(self._tickets)

    @property
    def cache(self) -> Any:
        """The KvpackCache."""
        cache = self._cache()
        assert cache is not None
        return cache


def takes(arguments: dict[str, Any]) -> bool:
    """Whether ``compiled_begin`` takes these arguments of a model's forward."""
    given = [arguments[name] for name in _TENSORS if name in arguments]
    return all(isinstance(value, torch.Tensor) for value in given)


def _calls(ticket: torch.Tensor) -> CompiledCalls:
    found = operators.cache_of(ticket)
    assert isinstance(found, CompiledCalls)
    return found


# Schemas are written out: here annotations are text, which PyTorch does not read.
@torch.library.custom_op("kvpack::seen_tokens", mutates_args=(), schema="(Tensor ticket, SymInt layer) -> (Tensor, Tensor)")
def seen_tokens(ticket: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``KvpackCache.get_seq_length`` as a tensor, and the next ticket."""
    return torch.tensor(_calls(ticket).cache.get_seq_length(layer), device="cpu"), ticket.clone()


@seen_tokens.register_fake
def _(ticket: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(ticket), torch.empty_like(ticket)


@torch.library.custom_op(
    "kvpack::pass_begins", mutates_args=(), schema="(Tensor[] tickets, Tensor?[] given, SymInt module, str names) -> Tensor"
)
def pass_begins(tickets: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None], module: int, names: str) -> torch.Tensor:
    """``Tracking.enter`` for the arguments ``given``, and others of which the names alone count; returns the next ticket of all layers."""
    cache = _calls(tickets[0]).cache
    tensors = {name: tensor for name, tensor in zip(_TENSORS, given, strict=True) if tensor is not None}
    cache.passes.enter(cache.watched(module), {**dict.fromkeys(names.split(), True), **tensors})
    return tickets[0].clone()


@torch.library.custom_op("kvpack::pass_ends", mutates_args=(), schema="(Tensor[] tickets, SymInt module) -> Tensor")
def pass_ends(tickets: Sequence[torch.Tensor], module: int) -> torch.Tensor:
    """``Tracking.leave`` after a call with a result; returns the next ticket of all layers."""
    cache = _calls(tickets[0]).cache
    cache.passes.leave(cache.watched(module), {}, True)
    return tickets[0].clone()


@pass_begins.register_fake
def _(tickets: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None], module: int, names: str) -> torch.Tensor:
    return torch.empty_like(tickets[0])


@pass_ends.register_fake
def _(tickets: Sequence[torch.Tensor], module: int) -> torch.Tensor:
    return torch.empty_like(tickets[0])
