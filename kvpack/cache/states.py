"""The states of a cache's layers at several positions, from which a model with states can resume in the middle of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .layer import Layer

States = tuple[Mapping[str, torch.Tensor], ...]
"""For each layer its states by name, empty for a layer that keeps none."""
StatesAt = Mapping[int, States]
"""States by the position after the token that they are of."""


def states_of(layers: Iterable[Layer]) -> States:
    """Return the states of each layer."""
    return tuple(layer.states for layer in layers)


def with_states(layers: Sequence[Layer], states: States) -> tuple[Layer, ...]:
    """Replace the states of ``layers``."""
    return tuple(replace(layer, states=MappingProxyType(dict(state))) for layer, state in zip(layers, states, strict=True))


def selected(states: States, rows: Sequence[int]) -> States:
    """Select these rows of every state."""
    return tuple({name: state[list(rows)] for name, state in layer.items()} for layer in states)


@dataclass(frozen=True)
class KeptStates:
    """States with a lazy selection of ``rows`` (None: all), because beams are selected at every step and states are large."""

    states: States
    rows: tuple[int, ...] | None = None

    def select(self, rows: Sequence[int]) -> KeptStates:
        """Keep only these rows of the batch."""
        return replace(self, rows=tuple(rows) if self.rows is None else tuple(self.rows[row] for row in rows))

    @property
    def now(self) -> States:
        """Apply the selection and return the states."""
        return self.states if self.rows is None else selected(self.states, self.rows)
