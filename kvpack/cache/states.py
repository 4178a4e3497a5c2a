"""States of recurrent and convolution layers at several positions. A model can resume from them in the middle of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from .packed_objects import PackedObject

if TYPE_CHECKING:

    from .layer import Layer

States = tuple[Mapping[str, torch.Tensor], ...]
"""The states of each layer by name. The mapping is empty for a layer without states."""
StatesAt = Mapping[int, States]
"""States of all layers by position. The states at position p result from the tokens before p."""


def collect_states(layers: Iterable[Layer]) -> States:
    return tuple(layer.states for layer in layers)


def with_states(layers: Sequence[Layer], states: States) -> tuple[Layer, ...]:
    return tuple(replace(layer, states=MappingProxyType(dict(state))) for layer, state in zip(layers, states, strict=True))


def select_states(states: States, rows: Sequence[int]) -> States:
    """Return the states of only the sequences at ``rows``, in that order."""
    return tuple({name: state[list(rows)] for name, state in layer.items()} for layer in states)


@dataclass(frozen=True)
class SelectedStates(PackedObject):
    """The states of the sequences at ``rows`` (None for all).

    Rows are copied only on request, because states are large and beam search changes the selection at every step.
    """

    states: States
    rows: tuple[int, ...] | None = None

    def select(self, rows: Sequence[int]) -> SelectedStates:
        """Return the states of the sequences at ``rows``, which index the current selection."""
        return replace(self, rows=tuple(rows) if self.rows is None else tuple(self.rows[row] for row in rows))

    @property
    def selected(self) -> States:
        return self.states if self.rows is None else select_states(self.states, self.rows)
