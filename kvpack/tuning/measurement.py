"""The loss of a recipe: the divergence of what a model predicts over its packed files from what it predicts without packing."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from kvpack.bench.windows import packed_file, read_exactly, read_packed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.bench.windows import Exact


@dataclass(frozen=True)
class Loss:
    """What one recipe costs, a number a window; ``bytes`` are those of the windows' files, ``values`` what they hold.

    The KL divergence (nats a token) is what the log-perplexity would rise by if the text were as the uncompressed model
    expects it. It hardly depends on which text is read, so that a few windows tell codecs apart whose perplexities they cannot.
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


@dataclass
class Windows:
    """Windows of one text and the losses measured in them; ``step`` is told of every window read."""

    model: Any
    folder: str
    step: Callable[[], None]
    exact: list[Exact] = field(default_factory=list)
    losses: dict[str, Loss] = field(default_factory=dict)

    def read(self, windows: Sequence[torch.Tensor], score: int) -> Exact:
        """Read windows ``[1, token]`` without packing, and return all of the first one."""
        first = None
        for tokens in windows:
            found = read_exactly(self.model, tokens, score)
            first = first or found
            # Of the others only what a measurement needs is kept, in the precision that it packs.
            pairs = [(k.to(torch.bfloat16), v.to(torch.bfloat16)) for k, v in found.first]
            self.exact.append(replace(found, pairs=pairs, seen={}))
            self.step()
        assert first is not None
        return first

    def loss(self, recipe: str) -> Loss:
        """What the recipe costs, measured once for every text of a recipe. Raises OutOfRange where a codec cannot hold the values."""
        if recipe not in self.losses:
            self.losses[recipe] = self._measure(recipe)
        else:
            for _ in self.exact:
                self.step()
        return self.losses[recipe]

    def _measure(self, recipe: str) -> Loss:
        path = os.path.join(self.folder, "window.kvpack")
        divergences, perplexities, size, values = [], [], 0, 0
        for exact in self.exact:
            predicted = read_packed(self.model, exact, packed_file(exact.first, recipe, path))
            divergences.append(predicted.kl_divergence)
            perplexities.append(predicted.log_perplexity)
            size += predicted.whole.nbytes
            values += predicted.whole.values
            self.step()
        return Loss(divergences, perplexities, size, values)
