"""Checks of the forward passes over one KvpackCache, and what the record stores about them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Self

from kvpack.formats.errors import InvalidParameter

from .hooks import Passes

if TYPE_CHECKING:
    import torch

    from .models import Model
    from .positions import RotaryPositions
    from .record import Record


class Tracking:
    """Checks passes as they begin, and adds to ``record`` what each appended. ``model`` is given where its attention must be "kvpack"."""

    def __init__(self, record: Record, positions: RotaryPositions | None, model: Model | None) -> None:
        self.record, self._positions, self._model = record, positions, model
        self._passes = Passes()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(copy.deepcopy(self.record, memo), copy.deepcopy(self._positions, memo), self._model)

    def enter(self, module: torch.nn.Module, arguments: dict[str, Any]) -> None:
        """Check the beginning of a call. Raises InvalidParameter before anything is appended."""
        self._passes.enter(module, arguments, self.record.tokens)
        if self._passes.outermost and self._model is not None and not self._model.runs_packed_layers:
            raise InvalidParameter(
                f"the attention of {self._model.name} is {self._model.attention!r}, which cannot take packed layers: "
                'call model.set_attn_implementation("kvpack")'
            )
        if self._positions is not None:
            if self._passes.outermost:
                self._positions.begin()
            self._positions.check(arguments, self.record.tokens)

    def leave(self, module: torch.nn.Module, arguments: dict[str, Any], output: Any) -> None:
        """Note the end of a call, with or without a result."""
        self._passes.leave(module)

    def check_update(self) -> None:
        """Raise InvalidParameter when tokens are about to be appended with other positions than those that follow."""
        if self._positions is not None and self._passes.current is not None and self._passes.current.start == self.record.tokens:
            self._positions.check_given(self.record.tokens)

    def appended(self, tokens: int) -> None:
        """Note that a layer has now seen ``tokens`` tokens."""
        if tokens > self.record.tokens:
            self.record.add(tokens - self.record.tokens, self._passes.current)

    def select(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch."""
        self.record.select(indices)
        if self._positions is not None:
            self._positions.select(indices)

    def check_ids(self, ids: torch.Tensor, following: int) -> None:
        """Raise InvalidParameter unless token ids given to ``generate`` are the cache's, then the ``following`` that it computes."""
        if following <= 0:
            raise InvalidParameter(
                f"generate was given {ids.shape[1]} token ids, and the cache holds {self.record.tokens}: give at least one that follows it"
            )
        differing = self.record.differing(ids[:, : ids.shape[1] - following])
        if differing is not None:
            token, row, known, given = differing
            raise InvalidParameter(f"token {token} of row {row} has the id {given}, and the cache was computed from the id {known} there")
