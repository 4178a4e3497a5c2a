"""Support for KvpackCache in code compiled by torch.compile, with custom operators that call its methods."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch

from kvpack.formats.errors import InvalidParameter
from kvpack.live import operators

from .masks import check_columns, masked_attention, read_padding

_TENSORS = ("input_ids", "attention_mask", "position_ids", "cache_position")
"""Arguments of a model's forward that a pass reads, in the order in which ``kvpack::begin_pass`` receives them."""


class CompiledCalls(operators.Tickets):
    """The calls that compiled code makes to the KvpackCache ``cache``, with one ticket per layer (see ``kvpack.live.operators``)."""

    def __init__(self, cache: Any, layers: int) -> None:
        super().__init__(self, layers)
        self._cache = weakref.ref(cache)
        self._masks: dict[int, _Mask] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(memo[id(self._cache())], len(self.tickets))

    def update(self, layer: int, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
        """Append keys and values to a layer. Called by the operator ``live_update``."""
        assert k is not None
        assert v is not None
        self.cache.append_tokens(k, v, layer)

    def attend(self, layer: int, q: torch.Tensor, *, starts: torch.Tensor | None, **options: Any) -> torch.Tensor:
        """Compute attention over a layer. Called by the operator ``live_attend``."""
        if starts is not None:
            matching = next((mask for mask in self._masks.values() if mask.starts.data_ptr() == starts.data_ptr()), None)
            if matching is None and any(mask.columns is not None for mask in self._masks.values()):
                raise InvalidParameter(
                    "the attention mask hides tokens other than left padding, and torch.compile copied it, so kvpack cannot "
                    "tell which mask it is: pad on the left, or call the model without torch.compile"
                )
            if matching is not None and matching.columns is not None:
                return self._masked(layer, q, matching, **options)
            starts = starts if matching is None or matching.hides_tokens else None
        out: torch.Tensor = self.cache.attend(layer, q, starts=starts, **options)
        return out

    def starts(self, layer: int, queries: int, columns: torch.Tensor) -> torch.Tensor:
        """Return the first token that each sequence attends to, int32 ``[batch]``.

        A padding mask ``columns`` ``[batch, token]`` that also hides later tokens is recorded.
        """
        length, first = self.cache.mask_sizes(queries, layer)
        padding = read_padding(length, first, columns)
        starts = torch.zeros(len(columns), dtype=torch.int32, device=columns.device) if padding.starts is None else padding.starts
        # The memory of ``starts`` is not reused: attention finds the mask by its address.
        others = None if padding.on_the_left else columns[:, first : first + length] != 0
        self._masks[layer] = _Mask(starts, padding.starts is not None, others, length)
        return starts.view_as(starts)

    def _masked(
        self,
        layer: int,
        q: torch.Tensor,
        mask: _Mask,
        *,
        scale: float | None,
        causal: bool,
        softcap: float | None,
        sliding_window: int | None,
        sink_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention over the decoded keys and values of a layer. The mask ``[batch, token]`` covers the layer's tokens."""
        k, v = self.cache.decode(layer, q.shape[2], q.dtype)
        check_columns(mask.tokens, k.shape[2], layer, q.shape[2])
        assert mask.columns is not None
        # Tokens without a column in the mask are hidden.
        columns = torch.nn.functional.pad(mask.columns, (0, mask.tokens - mask.columns.shape[1]))
        token = torch.arange(mask.tokens, device=q.device)
        ahead = token - token[-q.shape[2] :, None]
        seen = columns[:, None, None, :].expand(-1, -1, q.shape[2], -1)
        if causal:
            seen = seen & (ahead <= 0)
        if sliding_window is not None:
            seen = seen & (ahead > -sliding_window)
        return masked_attention(q, k, v, seen, scale, softcap, sink_logits)

    def compiled_seen(self, layer: int) -> torch.Tensor:
        """Return the number of tokens that a layer has seen, as an int64 tensor ``[]`` on the CPU, for compiled code."""
        seen: torch.Tensor
        seen, self.tickets[layer] = count_tokens(self.tickets[layer], layer)
        return seen

    def compiled_starts(self, layer: int, queries: int, columns: torch.Tensor) -> torch.Tensor:
        starts: torch.Tensor
        starts, self.tickets[layer] = sequence_starts(self.tickets[layer], columns, layer, queries)
        return starts

    def compiled_begin(self, module: int, arguments: dict[str, Any]) -> None:
        """Call ``Tracking.enter`` from compiled code. ``module`` is an index into the modules with hooks."""
        # Of arguments that are not tensors, only the names are passed, and the value of output_attentions.
        names = [name for name, value in arguments.items() if name != "output_attentions" or value]
        ticket = begin_pass(self.tickets, [arguments.get(name) for name in _TENSORS], module, " ".join(names))
        # Later operators take this ticket, so the compiler cannot move them before this one.
        self.tickets = [ticket] * len(self.tickets)

    def compiled_end(self, module: int) -> None:
        self.tickets = [end_pass(self.tickets, module)] * len(self.tickets)

    @property
    def cache(self) -> Any:
        cache = self._cache()
        assert cache is not None
        return cache


class _Mask(NamedTuple):
    """The result of ``CompiledCalls.starts`` for a mask over ``tokens`` tokens.

    ``hides_tokens`` is True if the mask hides any token. ``columns``, bool ``[batch, token]``, is the mask if it hides tokens other than
    the first ones of each sequence, or None otherwise.
    """

    starts: torch.Tensor
    hides_tokens: bool
    columns: torch.Tensor | None
    tokens: int


def supports(arguments: dict[str, Any]) -> bool:
    """Return True if ``compiled_begin`` supports these arguments of a forward pass."""
    values = [arguments[name] for name in _TENSORS if name in arguments]
    return all(isinstance(value, torch.Tensor) for value in values)


def _find_calls(ticket: torch.Tensor) -> CompiledCalls:
    cache = operators.find_cache(ticket)
    assert isinstance(cache, CompiledCalls)
    return cache


# Schemas are explicit because annotations are strings in this module, which PyTorch cannot read.
@torch.library.custom_op("kvpack::count_tokens", mutates_args=(), schema="(Tensor ticket, SymInt layer) -> (Tensor, Tensor)")
def count_tokens(ticket: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of ``KvpackCache.get_seq_length``, int64 ``[]`` on the CPU, and the next ticket (see ``CompiledCalls``)."""
    return torch.tensor(_find_calls(ticket).cache.get_seq_length(layer), dtype=torch.int64, device="cpu"), ticket.clone()


@count_tokens.register_fake
def _(ticket: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(ticket), torch.empty_like(ticket)


@torch.library.custom_op(
    "kvpack::sequence_starts", mutates_args=(), schema="(Tensor ticket, Tensor columns, SymInt layer, SymInt queries) -> (Tensor, Tensor)"
)
def sequence_starts(ticket: torch.Tensor, columns: torch.Tensor, layer: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first token that each sequence attends to, int32 ``[batch]`` (``CompiledCalls.starts``), and the next ticket."""
    return _find_calls(ticket).starts(layer, queries, columns), ticket.clone()


@sequence_starts.register_fake
def _(ticket: torch.Tensor, columns: torch.Tensor, layer: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    return columns.new_empty(columns.shape[0], dtype=torch.int32), torch.empty_like(ticket)


@torch.library.custom_op(
    "kvpack::begin_pass", mutates_args=(), schema="(Tensor[] tickets, Tensor?[] values, SymInt module, str names) -> Tensor"
)
def begin_pass(tickets: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None], module: int, names: str) -> torch.Tensor:
    """Call ``Tracking.enter`` with the arguments ``values``, and return the next ticket of all layers.

    ``names`` lists further arguments, without their values.
    """
    cache = _find_calls(tickets[0]).cache
    tensors = {name: tensor for name, tensor in zip(_TENSORS, values, strict=True) if tensor is not None}
    cache.passes.enter(cache.hooked_module(module), {**dict.fromkeys(names.split(), True), **tensors})
    return tickets[0].clone()


@torch.library.custom_op("kvpack::end_pass", mutates_args=(), schema="(Tensor[] tickets, SymInt module) -> Tensor")
def end_pass(tickets: Sequence[torch.Tensor], module: int) -> torch.Tensor:
    """Call ``Tracking.leave`` after a call that succeeded, and return the next ticket of all layers."""
    cache = _find_calls(tickets[0]).cache
    cache.passes.leave(cache.hooked_module(module), {}, True)
    return tickets[0].clone()


@begin_pass.register_fake
def _(tickets: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None], module: int, names: str) -> torch.Tensor:
    return torch.empty_like(tickets[0])


@end_pass.register_fake
def _(tickets: Sequence[torch.Tensor], module: int) -> torch.Tensor:
    return torch.empty_like(tickets[0])
