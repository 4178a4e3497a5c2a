"""The loss of a recipe: the divergence of a model's predictions over packed files from its predictions without packing."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from kvpack.coding.recipes import Recipe
from kvpack.evaluation.windows import packed_file, read_exactly, read_packed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.coding.bases import Basis
    from kvpack.evaluation.windows import Exact


@dataclass(frozen=True)
class Loss:
    """The cost of one recipe, one number per window; ``bytes`` is the size of the windows' files, ``values`` their number of values.

    The KL divergence (nats per token) is the expected rise of the log-perplexity on text drawn from the uncompressed model. It hardly
    depends on the text, so a few windows suffice to compare codecs whose perplexities they cannot distinguish.
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
    def joined(losses: Sequence[Loss]) -> Loss:
        """Join the losses of one recipe in several windows."""
        return Loss(
            [divergence for loss in losses for divergence in loss.kl_divergences],
            [perplexity for loss in losses for perplexity in loss.log_perplexities],
            sum(loss.bytes for loss in losses),
            sum(loss.values for loss in losses),
        )


@dataclass
class Windows:
    """Windows of one text that are read repeatedly; ``step`` is called for every window read, ``measured`` for every new loss.

    ``losses`` are keyed by recipe text, which names the ``basis`` if it needs one. ``exact`` holds the uncompressed model's results, but
    only the prefix of the pairs, in the precision that is packed.
    """

    model: Any
    folder: str
    step: Callable[[], None]
    exact: list[Exact] = field(default_factory=list)
    losses: dict[str, Loss] = field(default_factory=dict)
    measured: Callable[[str, Loss], None] | None = None
    basis: Basis | None = None

    def read(self, windows: Sequence[torch.Tensor], score: int) -> Exact:
        """Read windows ``[1, token]`` without packing, and return all results of the first one."""
        first = None
        for tokens in windows:
            result = read_exactly(self.model, tokens, score)
            first = first or result
            pairs = [(k.to(torch.bfloat16), v.to(torch.bfloat16)) for k, v in result.first]
            self.exact.append(replace(result, pairs=pairs, seen={}))
            self.step()
        assert first is not None
        return first

    def loss(self, recipe: str) -> Loss:
        """Return the cost of the recipe, measured once per recipe text. Raises OutOfRange if a codec cannot represent the values."""
        recipe = Recipe(recipe, self.basis).text
        if recipe in self.losses:
            for _ in self.exact:
                self.step()
        else:
            self.losses[recipe] = Loss.joined([self._measure(exact, recipe) for exact in self.exact])
            if self.measured:
                self.measured(recipe, self.losses[recipe])
        return self.losses[recipe]

    def _measure(self, exact: Exact, recipe: str) -> Loss:
        packed = packed_file(exact.first, Recipe(recipe, self.basis), os.path.join(self.folder, "window.kvpack"))
        predicted = read_packed(self.model, exact, packed)
        self.step()
        return Loss([predicted.kl_divergence], [predicted.log_perplexity], predicted.whole.nbytes, predicted.whole.values)


def read_once(
    searched: Windows, windows: Sequence[torch.Tensor], score: int, recipes: Sequence[str]
) -> tuple[list[float], dict[str, Loss]]:
    """Return the exact loss and those of ``recipes`` in ``windows``, with the model of ``searched``.

    One window is in memory at a time.
    """
    exact: list[float] = []
    losses: dict[str, list[Loss]] = {recipe: [] for recipe in recipes}
    for tokens in windows:
        window = Windows(searched.model, searched.folder, searched.step, basis=searched.basis)
        exact.append(window.read([tokens], score).loss)
        for recipe, result in losses.items():
            result.append(window.loss(recipe))
    return exact, {recipe: Loss.joined(result) for recipe, result in losses.items()}
