"""Multi-dimensional rotary positions, which models compute from images. The text after images continues at a different position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvpack.cache.cache import Cache
from kvpack.file.inputs import Inputs
from kvpack.formats.errors import InvalidParameter

from .model_state import iterate_modules
from .models import Model

_DELTAS = "rope_deltas"
"""Attribute in which models store the offset of text positions after a prompt's images."""


class RotaryPositions:
    """The positions of tokens after a cache: the number of tokens before them, plus the delta of their row.

    ``deltas`` contains one delta per row. The first pass over an empty cache may have any positions, depending on images and padding. They
    determine the deltas.
    """

    def __init__(self, deltas: torch.Tensor, tokens: int, model: Model) -> None:
        self._deltas, self._name, self._computed = deltas, model.name, model.keeps_rope_deltas
        # Padding tokens per sequence, which the token numbers in masks do not count.
        self._hidden = torch.zeros_like(deltas)
        self._given = False
        self._end = tokens if bool(deltas.any()) else 0
        """Number of tokens after which the deltas apply."""
        self._largest: torch.Tensor | None = None
        """Largest position up to each token of the first pass, int64 ``[row, token]``, or None if there was no first pass."""
        self._cut: int | None = None
        """Number of tokens that a crop left, if the deltas after them are unknown, or None otherwise."""

    @classmethod
    def after_cache(cls, model: Model | None, cache: Cache | None, inputs: Inputs | None, rope_deltas: Any) -> RotaryPositions | None:
        """Return the positions after ``cache``, or None if the model's positions have one dimension.

        ``cache`` is None for an empty cache. Raises InvalidParameter if the positions are not known: files need not record them, and the
        model may have those of another prompt.
        """
        recorded = None if cache is None else cache.position_offsets
        if model is None or not model.has_multidimensional_positions:
            if rope_deltas is not None:
                raise InvalidParameter("rope_deltas is for models with multi-dimensional rotary positions: omit it")
            if recorded is not None:
                raise InvalidParameter(
                    "the cache's position offsets require a model with multi-dimensional rotary positions"
                    f"{': use KvpackCache.of(cache, model)' if model is None else f', but {model.name} has none'}"
                )
            return None
        tokens = 0 if cache is None else cache.tokens
        if rope_deltas is None and recorded is None:
            if tokens and model.keeps_rope_deltas and (inputs is None or inputs.undetermined or inputs.tokens != tokens):
                raise InvalidParameter(
                    f"{model.name} has multi-dimensional rotary positions, but the cache does not record where they continue: "
                    "call KvpackCache.of(cache, model, rope_deltas=...) with the value that model.model.rope_deltas had after the prompt, "
                    "or 0 if the prompt was text only"
                )
            rope_deltas = 0
        deltas = torch.as_tensor(recorded if rope_deltas is None else rope_deltas, device="cpu").detach().to(torch.int64).reshape(-1, 1)
        recorded_deltas = None if recorded is None else torch.tensor(recorded, dtype=torch.int64, device="cpu")[:, None]
        if rope_deltas is not None and recorded_deltas is not None and not bool((deltas == recorded_deltas).all()):
            raise InvalidParameter(
                f"rope_deltas is {deltas.flatten().tolist()}, but the cache records {recorded_deltas.flatten().tolist()}: "
                "omit rope_deltas"
            )
        return cls(deltas, tokens, model)

    def offsets(self, rows: int, tokens: int) -> tuple[int, ...] | None:
        """Return the delta of each of ``rows`` sequences after ``tokens`` tokens, or None if it is unknown."""
        if not tokens or self._cut is not None:
            return None
        return tuple(self._deltas.expand(rows, 1).flatten().tolist())

    def set_deltas(self, model: torch.nn.Module | None, arguments: Mapping[str, Any], start: int) -> None:
        """Set the model's ``rope_deltas`` before a forward pass, or before ``generate`` computes its positions."""
        self._given = False
        if not start:
            return
        if self._cut is not None:
            raise InvalidParameter(
                f"after crop, the cache holds {self._cut} tokens, but does not record where positions continue after them: use "
                "KvpackCache.of(cache.packed, model, rope_deltas=...) with the value of model.model.rope_deltas after these tokens"
            )
        mask = arguments.get("attention_mask")
        hidden = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            # Models do not count tokens that a mask hides.
            hidden = (mask[:, :start] == 0).sum(1, keepdim=True).cpu()
            self._hidden = -hidden
        if model is None or isinstance(arguments.get("position_ids"), torch.Tensor):
            return
        deltas = self._deltas + hidden
        tensor = next((x for x in arguments.values() if isinstance(x, torch.Tensor)), deltas)
        for attributes in map(vars, iterate_modules(model)):
            if _DELTAS in attributes and (attributes[_DELTAS] is not None or bool(deltas.any())):
                attributes[_DELTAS] = deltas.to(tensor.device)

    def record_or_check(self, arguments: Mapping[str, Any], start: int) -> None:
        """Record the positions of a first pass, whose ``start`` is 0.

        For any other pass, raise InvalidParameter unless its positions continue the recorded ones.
        """
        positions = arguments.get("position_ids")
        if not isinstance(positions, torch.Tensor) or not positions.numel():
            return
        self._given = True
        plain = torch.arange(start, start + positions.shape[-1], dtype=torch.int64, device="cpu")
        cpu_positions = positions.detach().cpu().reshape(-1, *positions.shape[-2:])
        # The first of four rows contains token numbers, which only masks use.
        rotary_positions = cpu_positions[1:] if len(cpu_positions) == 4 else cpu_positions
        if not start:
            self._largest = rotary_positions.amax(0).cummax(1).values
            self._deltas = self._largest[:, -1:] + 1 - positions.shape[-1]
            self._hidden = cpu_positions[0].amax(1)[:, None] + 1 - positions.shape[-1]
            self._end, self._cut = positions.shape[-1], None
            return
        if not bool((rotary_positions == plain + self._deltas).all()) or (
            len(cpu_positions) == 4 and not bool((cpu_positions[0] == plain + self._hidden).all())
        ):
            other = (rotary_positions != plain + self._deltas).flatten(0, -2).any(0).nonzero()
            token = int(other[0]) if len(other) else 0
            self._reject_positions(sorted(set(rotary_positions[..., token].flatten().tolist())), start + token)

    def require_positions(self, start: int) -> None:
        """Raise InvalidParameter if no positions were passed and the model would compute wrong ones."""
        if not self._given and not start:
            # Without given positions, models use the positions of text.
            self._deltas = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
            self._hidden = torch.zeros_like(self._deltas)
            self._largest, self._end, self._cut = None, 0, None
        if not self._given and bool(self._deltas.any()):
            self._reject_positions([start], start)

    def crop(self, tokens: int) -> None:
        if not 0 < tokens < self._end:
            return
        if self._largest is None:
            self._cut = tokens
        else:
            self._largest, self._end = self._largest[:, :tokens], tokens
            self._deltas = self._largest[:, -1:] + 1 - tokens

    def select(self, indices: torch.Tensor) -> None:
        if len(self._deltas) > 1:
            self._deltas, self._hidden = self._deltas[indices.cpu()], self._hidden[indices.cpu()]
            self._largest = None if self._largest is None else self._largest[indices.cpu()]

    def _reject_positions(self, actual: list[int], token: int) -> None:
        deltas, positions = self._deltas.flatten().tolist(), " or ".join(map(str, actual[:3]))
        remedy = "omit position_ids" if self._computed else "pass position_ids that continue from there"
        raise InvalidParameter(
            f"{self._name} gives token {token} the position {positions}, but after this cache its position is {token + deltas[0]}: {remedy}"
        )
