"""Rotary positions of several dimensions: models compute them from images and store where the text continues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from kvpack.file.inputs import Inputs

    from .models import Model


class RotaryPositions:
    """The positions that tokens after a cache have in such a model: the number of tokens before them plus ``deltas``, one for each row.

    The first pass over an empty cache may have any positions: images and padding decide them, and the deltas of what follows.
    """

    def __init__(self, deltas: torch.Tensor, name: str) -> None:
        self._deltas, self._name = deltas, name
        # Of the numbers of tokens, which masks use: those of padding are not counted.
        self._hidden = torch.zeros_like(deltas)
        self._given = False

    @classmethod
    def of(cls, model: Model | None, inputs: Inputs | None, tokens: int, rope_deltas: torch.Tensor | int | None) -> RotaryPositions | None:
        """Those after a cache of ``tokens`` tokens; None for a model whose positions have one dimension.

        Raises InvalidParameter when they are not known: a file does not hold them, and the model may have others of another prompt.
        """
        if model is None or not model.has_multidimensional_positions:
            if rope_deltas is not None:
                raise InvalidParameter("rope_deltas is for models with rotary positions of several dimensions: KvpackCache(cache, model)")
            return None
        if rope_deltas is None:
            if tokens and (inputs is None or inputs.undetermined or inputs.tokens != tokens):
                raise InvalidParameter(
                    f"{model.name} has rotary positions of several dimensions, and the cache does not say where they continue: write "
                    "KvpackCache(cache, model, rope_deltas=...) with what model.model.rope_deltas was after the prompt, or 0 if it was text"
                )
            rope_deltas = 0
        return cls(torch.as_tensor(rope_deltas, device="cpu").detach().to(torch.int64).reshape(-1, 1), model.name)

    def begin(self) -> None:
        """A forward pass begins."""
        self._given = False

    def check(self, arguments: Mapping[str, Any], start: int) -> None:
        """Raise InvalidParameter when the model, or a part of it, is given other positions for the tokens from ``start`` on."""
        positions = arguments.get("position_ids")
        if not isinstance(positions, torch.Tensor) or not positions.numel():
            return
        self._given = True
        plain = torch.arange(start, start + positions.shape[-1], device="cpu")
        found = positions.detach().cpu().reshape(-1, *positions.shape[-2:])
        # The first of four is the number of the token, for masks.
        rotary = found[1:] if len(found) == 4 else found
        if not start:
            self._deltas = rotary.amax((0, 2))[:, None] + 1 - positions.shape[-1]
            self._hidden = found[0].amax(1)[:, None] + 1 - positions.shape[-1]
            return
        if not bool((rotary == plain + self._deltas).all()) or (len(found) == 4 and not bool((found[0] == plain + self._hidden).all())):
            self._refuse(int(rotary[0, 0, 0]), start)

    def check_given(self, start: int) -> None:
        """Raise InvalidParameter when no positions were given, and those that the model takes then are others."""
        if not self._given and bool(self._deltas.any()):
            self._refuse(start, start)

    def select(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch."""
        if len(self._deltas) > 1:
            self._deltas, self._hidden = self._deltas[indices.cpu()], self._hidden[indices.cpu()]

    def _refuse(self, found: int, start: int) -> None:
        deltas = self._deltas.flatten().tolist()
        raise InvalidParameter(
            f"{self._name} gives token {start} the position {found}, and after this cache it has {start + deltas[0]}: "
            f"set model.model.rope_deltas to torch.tensor({[[delta] for delta in deltas]}), or to None for text"
        )
