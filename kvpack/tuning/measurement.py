"""Measurement of a recipe's loss: how a model's predictions over packed files diverge from its uncompressed predictions."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from kvpack.coding.bases import Basis
from kvpack.coding.recipes import Recipe
from kvpack.evaluation.windows import UncompressedResult, evaluate_packed, evaluate_uncompressed, packed_file

from .file_sizes import FileLength


@dataclass(frozen=True)
class Loss:
    """The loss of one recipe, with one number per window. ``bytes`` and ``values`` are totals over one file for each window.

    The KL divergence (nats per token) is the expected increase in log-perplexity on text sampled from the uncompressed model. It hardly
    depends on the text, so a few windows suffice to compare codecs.
    """

    kl_divergences: list[float]
    log_perplexities: list[float]
    bytes: int
    values: int

    @property
    def kl_divergence(self) -> float:
        return fmean(self.kl_divergences)

    @property
    def bits_per_value(self) -> float:
        return 8 * self.bytes / self.values

    @staticmethod
    def combine(losses: Sequence[Loss]) -> Loss:
        """Return the losses of one recipe in several windows as one ``Loss``."""
        return Loss(
            [divergence for loss in losses for divergence in loss.kl_divergences],
            [perplexity for loss in losses for perplexity in loss.log_perplexities],
            sum(loss.bytes for loss in losses),
            sum(loss.values for loss in losses),
        )


@dataclass
class Windows:
    """Windows of a text that are read repeatedly. Sizes are computed for files of ``length``.

    ``step`` is called after each window that is read, and ``on_measured`` after each new loss. ``losses`` are keyed by recipe text, which
    includes the digest of ``basis`` if it is used. ``exact`` contains the uncompressed model's predictions, with keys and values in bf16
    and only for the prefix.
    """

    model: Any
    folder: str
    length: FileLength
    step: Callable[[], None]
    exact: list[UncompressedResult] = field(default_factory=list)
    losses: dict[str, Loss] = field(default_factory=dict)
    on_measured: Callable[[str, Loss], None] | None = None
    basis: Basis | None = None

    def evaluate(self, windows: Sequence[torch.Tensor], scored_tokens: int) -> UncompressedResult:
        """Read windows ``[1, token]`` without packing. Returns the complete predictions for the first window."""
        first = None
        for tokens in windows:
            result = evaluate_uncompressed(self.model, tokens, scored_tokens)
            first = first or result
            pairs = [(k.to(torch.bfloat16), v.to(torch.bfloat16)) for k, v in result.prefix_pairs]
            self.exact.append(replace(result, pairs=pairs, recorded_attention={}))
            self.step()
        assert first is not None
        return first

    def loss(self, recipe: str) -> Loss:
        """Return the loss of a recipe in all windows. Each recipe is measured only once."""
        recipe = Recipe(recipe, self.basis).text
        if recipe in self.losses:
            for _ in self.exact:
                self.step()
        else:
            self.losses[recipe] = Loss.combine([self._measure(exact, recipe) for exact in self.exact])
            if self.on_measured:
                self.on_measured(recipe, self.losses[recipe])
        return self.losses[recipe]

    def _measure(self, exact: UncompressedResult, recipe: str) -> Loss:
        packed = packed_file(exact.prefix_pairs, Recipe(recipe, self.basis), os.path.join(self.folder, "window.kvpack"))
        predicted = evaluate_packed(self.model, exact, packed)
        self.step()
        size, values = self.length.file_bytes(predicted.cache), self.length.values(predicted.cache)
        return Loss([predicted.kl_divergence], [predicted.log_perplexity], size, values)


def evaluate_once(
    searched: Windows, windows: Sequence[torch.Tensor], scored_tokens: int, recipes: Sequence[str]
) -> tuple[list[float], dict[str, Loss]]:
    """Return the losses of the uncompressed model and of ``recipes`` in ``windows``. Only one window is in memory at a time.

    The model and the basis are those of ``searched``.
    """
    exact: list[float] = []
    losses: dict[str, list[Loss]] = {recipe: [] for recipe in recipes}
    for tokens in windows:
        window = Windows(searched.model, searched.folder, searched.length, searched.step, basis=searched.basis)
        exact.append(window.evaluate([tokens], scored_tokens).loss)
        for recipe, result in losses.items():
            result.append(window.loss(recipe))
    return exact, {recipe: Loss.combine(result) for recipe, result in losses.items()}
