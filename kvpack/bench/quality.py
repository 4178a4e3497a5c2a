"""kvpack bench quality: the quality that packing costs a model, measured on packed files of its own KV caches.

A window of ``tokens`` tokens is read in two parts. The first is prefilled by the uncompressed model; its KV cache is packed,
saved and loaded, and the model reads the last ``score`` tokens over the packed layers, at most ``step`` at once, appending their keys and
values, which are packed too. What it predicts there is compared with what the uncompressed model predicts in the same place.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvpack.coding.bases import Basis
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.formats.errors import WriteFailed
from kvpack.models import load_model, model_folder, transformers_library

from . import needles, picture
from .models import OUTLIER_PAIRS, Text, make_twin, read_text, vocabulary
from .sizes import check_size, positions, starts, window, window_ids, window_tokens
from .summary import show, summary
from .windows import PASS, Bf16Cache, Forgotten, Measured, measure, packed_file, prefill, read_exactly, read_forgotten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.coding.encoding import Progress

__all__ = ["RECIPES", "Settings", "run", "show"]

RECIPES = (
    "bf16",
    "fp8",
    "turboangle-k8v4",
    "kivi-4",
    "octopus-4",
    "nvfp4",
    "hqmq-s96-r4",
    "octopus-3",
    "octopus-3-scaled",
    "turboquant-3",
    "turboquant-3-scaled",
    "polarquant-3",
    "hqmq-s24-r3",
    "oscar-2",
    "oscar-2-scaled",
    "kivi-2",
    "octopus-2",
    "turboquant-2",
)
"""The baseline, what engines keep, and the papers' configurations, from most bits to fewest."""

DEFAULT_TOKENS = 1024
DEFAULT_SCORE = 256
DEFAULT_WINDOWS = 8
DEFAULT_NEEDLES = 8
REFERENCE = "fp8"
"""What engines keep: the divergence of every recipe is also told as a multiple of this one's."""

_TWIN_SAMPLE = 256


@dataclass(frozen=True)
class Settings:
    """Sizes of a measurement; None stands for the default, or for the limit of the model and the text if that is smaller.

    ``tokens`` of a window, of which the last ``score`` are scored, at most ``step`` at once; ``windows`` of the text; ``needles`` are
    prompts; ``twin`` is the factor of the outlier-heavy twin, None for the model as it is.
    """

    tokens: int | None = None
    score: int | None = None
    windows: int | None = None
    needles: int | None = None
    twin: float | None = None
    seed: int = 0
    step: int = PASS


@dataclass(frozen=True)
class _Sizes:
    tokens: int
    score: int
    windows: int
    needles: int
    step: int


def run(
    model: str | None,
    text: str | None,
    recipes: Sequence[str],
    settings: Settings,
    *,
    basis: str | None = None,
    reference: str | None = None,
    out: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure every recipe on the model in folder ``model`` and the file ``text``, and return JSON values.

    ``basis`` is the file of the basis that recipes such as klt-2 need, ``reference`` a recipe that is measured as well, and that the
    others are compared with, and ``out`` a folder that gets the picture and the report.
    Two runs with one seed differ in the times alone, and in rounding where torch has another number of threads. Raises
    InvalidRecipe, InvalidParameter for sizes that do not fit,
    MissingFile, WriteFailed and, for ``out``, KvpackError when matplotlib is not installed.
    """
    given = None if basis is None else Basis.load(basis)
    recipes = list(dict.fromkeys([*recipes, *([] if reference is None else [reference])]))
    parsed = [parse_recipe(recipe, given) for recipe in recipes]
    if out is not None:
        picture.library()
        _make_folder(out)
    with model_folder(model) as folder:
        network = load_model(folder)
        words = read_text(text, folder, vocabulary(network))
        name = folder.resolve().name
    sizes = _sizes(settings, words, positions(network))
    sample = window(words, 0, _TWIN_SAMPLE)
    twin = None
    if settings.twin is not None:
        difference = make_twin(network, settings.twin, sample, settings.seed)
        twin = {"factor": settings.twin, "pairs_a_head": OUTLIER_PAIRS, "largest_logit_difference": difference}
    report = {
        "model": name,
        "text": words.name,
        "twin": twin,
        "basis": None if given is None else {"file": given.where, "digest": given.digest.hex()},
        "settings": {**asdict(sizes), "seed": settings.seed, "threads": torch.get_num_threads()},
        **_Measurement(network, words, sizes, tuple(recipes), tuple(parsed), reference, settings.seed, progress).run(),
    }
    if out is not None:
        _write(report, Path(out))
    return report


def _sizes(settings: Settings, text: Text, most_positions: int | None) -> _Sizes:
    tokens = window_tokens(settings.tokens, DEFAULT_TOKENS, text, most_positions)
    score = min(DEFAULT_SCORE, tokens // 2) if settings.score is None else settings.score
    room = len(text.ids) // window_ids(tokens, text)
    needed = needles.LINES * needles.LINE_BYTES * 2 + needles.QUESTION_TOKENS
    prompts = room if text.of_bytes and tokens >= needed else 0
    windows = min(DEFAULT_WINDOWS, room) if settings.windows is None else settings.windows
    asked = min(DEFAULT_NEEDLES, prompts) if settings.needles is None else settings.needles
    check_size("score", score, 1, tokens - 1, f"of a window of {tokens} tokens")
    check_size("windows", windows, 1, room, f"of {tokens} tokens in {text.name}")
    check_size("step", settings.step, 1, tokens, f"of a window of {tokens} tokens")
    check_size("needles", asked, 0, prompts, f"prompts in {text.name}, for a model of bytes and windows of {needed} tokens or more")
    return _Sizes(tokens, score, windows, asked, settings.step)


@dataclass
class _Measurement:
    """One run over all windows, then all needle prompts; a window's exact results are kept only while the recipes are measured on it."""

    model: Any
    text: Text
    sizes: _Sizes
    names: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    reference: str | None
    seed: int
    progress: Progress | None
    done: int = 0

    def run(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="kvpack-bench-") as folder:
            path = os.path.join(folder, "window.kvpack")
            begun, exact_losses, forgotten, measured = self._windows(path)
            depths, exact_answers, answers = self._needles(path)
        recipes = list(zip(self.names, measured, answers, strict=True))
        return summary(begun, exact_losses, forgotten, exact_answers, recipes, depths, self.reference)

    def _windows(self, path: str) -> tuple[list[int], list[float], list[Forgotten], list[list[Measured]]]:
        exact_losses: list[float] = []
        forgotten: list[Forgotten] = []
        measured: list[list[Measured]] = [[] for _ in self.recipes]
        size = window_ids(self.sizes.tokens, self.text)
        begun = starts(len(self.text.ids), size, self.sizes.windows, self.seed)
        for start in begun:
            exact = read_exactly(self.model, window(self.text, start, size), self.sizes.score)
            exact_losses.append(exact.loss)
            forgotten.append(read_forgotten(self.model, exact))
            self._step()
            for recipe, rows in zip(self.recipes, measured, strict=True):
                rows.append(measure(self.model, exact, recipe, path, self.sizes.step))
                self._step()
        return begun, exact_losses, forgotten, measured

    def _needles(self, path: str) -> tuple[list[float], list[bool], list[list[bool]]]:
        depths: list[float] = []
        exact_answers: list[bool] = []
        found: list[list[bool]] = [[] for _ in self.recipes]
        if not self.sizes.needles:
            return depths, exact_answers, found
        generator = torch.Generator().manual_seed(self.seed)
        size = self.sizes.tokens - needles.QUESTION_TOKENS - len(self.text.start)
        for start in starts(len(self.text.ids), size, self.sizes.needles, self.seed + 1):
            prompt = needles.plant(bytes(self.text.ids[start : start + size]), generator)
            depths += prompt.depths
            pairs = prefill(self.model, torch.tensor([[*self.text.start, *prompt.text]]))
            exact_answers += needles.answers(self.model, prompt, partial(transformers_library().DynamicCache, pairs))
            self._step()
            for recipe, right in zip(self.recipes, found, strict=True):
                right += needles.answers(self.model, prompt, partial(Bf16Cache, packed_file(pairs, recipe, path)))
                self._step()
        return depths, exact_answers, found

    def _step(self) -> None:
        self.done += 1
        if self.progress:
            self.progress(self.done, (self.sizes.windows + self.sizes.needles) * (1 + len(self.recipes)))


def _make_folder(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteFailed(f"{path}: could not be made: {error.strerror}") from None


def _write(report: dict[str, Any], folder: Path) -> None:
    try:
        (folder / "quality.json").write_text(json.dumps(report, indent=2) + "\n")
        picture.draw(report, folder / "quality")
    except OSError as error:
        raise WriteFailed(f"{error.filename}: could not be written: {error.strerror}") from None
