"""kvpack bench quality: measure how much model quality packing costs, on packed files of the model's own KV caches.

A window of ``tokens`` tokens is read in two parts. The uncompressed model prefills the first part, whose KV cache is packed, saved and
loaded. The model then reads the last ``scored_tokens`` tokens over the packed layers, at most ``step`` at a time, and appends and packs
their keys and values. These predictions are compared with those of the uncompressed model at the same positions.

Unless the user passes a text, a language model reads windows of prose and of code and one long window. It is also asked for passkeys in
prompts of several lengths, and generates a text, which is then read over the packed caches token by token.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from kvpack.coding.bases import Basis
from kvpack.coding.recipes import Recipe
from kvpack.evaluation.models import (
    LONGER_TEXT,
    Text,
    bundled_text,
    check_size,
    get_vocabulary_size,
    ids_per_window,
    position_limit,
    read_text,
    window_ids,
    window_starts,
    window_tokens,
)
from kvpack.evaluation.twins import OUTLIER_PAIRS, make_twin, offset_keys
from kvpack.evaluation.windows import (
    PASS_TOKENS,
    Bf16Cache,
    Comparison,
    RecipeResult,
    evaluate_forgotten,
    evaluate_uncompressed,
    measure,
    packed_file,
    prefill,
    uncompressed_cache,
)
from kvpack.formats.errors import InvalidParameter, WriteFailed
from kvpack.identity.fingerprint import model_name
from kvpack.models import load_model, model_folder

from . import generated, needles, quality_plot
from .summary import MAX_KL, NeedleAnswer, check_max_kl, generation_summary, show, summarize_recall, summary, text_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvpack.coding.encoding import Progress

__all__ = ["RECIPES", "QualitySettings", "run", "show"]

RECIPES = ("fp8", "nvfp4", "kvpack-4", "octopus-3", "kvpack-3", "kvpack-2")
"""Default recipes: engines' formats, kvpack's own, and one from a paper. Together with CALIBRATED, they take 15 minutes on two cores."""

CALIBRATED = ("klt-2.5", "klt-1.75", "klt-1.25", "transform-1", "transform-0.6")
"""Additional default recipes if a basis is passed."""

DEFAULT_TOKENS = 1024
DEFAULT_SCORE = 256
DEFAULT_WINDOWS = 8
DEFAULT_NEEDLES = 8
LONG_TOKENS = 4096
"""Number of tokens in the long text's only window."""
REFERENCE = "fp8"
"""A recipe of serving engines, with which other recipes' divergences are compared."""

TEXT, LONG_TEXT = "prose", "long"
OTHER_TEXTS = ("code", LONG_TEXT)
"""Additional texts, for which only divergences are reported."""

_TWIN_SAMPLE = 256
_DIGITS = 5
"""Number of significant digits in a report's numbers."""

_MIN_BYTES = needles.LINES * needles.LINE_BYTES * 2 + needles.QUESTION_TOKENS
"""Minimum number of tokens in a byte-level prompt with key lines."""


@dataclass(frozen=True)
class QualitySettings:
    """Settings of a measurement. None selects the default, or the limit of the model and the text if that is smaller.

    Attributes:
        tokens: Tokens per window.
        scored_tokens: Number of tokens scored at the end of each window.
        windows: Number of windows of the text.
        needles: Number of needle prompts of each length.
        twin: Factor that scales outlier channels in the model's twin, or None for the model itself.
        seed: Seed of windows, needles, twins and generated text.
        step: Maximum number of scored tokens per forward pass.
        offset: Size of the constant added to some key channels, in standard deviations, or None to add nothing.
        generated: Number of tokens to generate after a prompt, or None for none.
        device: "cpu" (in float32) or "cuda" (in bfloat16).
        inserted: Text of one token, such as "<|endoftext|>", that replaces the middle token of the packed part of each window.
        others: Names of additional texts, which kvpack includes. The last one is a long document.
        max_kl: The verdict's limit of KL divergence, in nats.
    """

    tokens: int | None = None
    scored_tokens: int | None = None
    windows: int | None = None
    needles: int | None = None
    twin: float | None = None
    seed: int = 0
    step: int = PASS_TOKENS
    offset: float | None = None
    generated: int | None = None
    device: str = "cpu"
    inserted: str | None = None
    others: tuple[str, ...] = OTHER_TEXTS
    max_kl: float = MAX_KL


@dataclass(frozen=True)
class _MeasuredSizes:
    """The sizes of ``QualitySettings``, with defaults and limits applied."""

    tokens: int
    score: int
    windows: int
    needles: int
    step: int
    generated: int


def run(
    model: str | os.PathLike[str] | None,
    text: str | None,
    recipes: Sequence[str],
    settings: QualitySettings,
    *,
    basis: str | None = None,
    default_basis: str | None = None,
    reference: str | None = None,
    out: str | None = None,
    progress: Progress | None = None,
    show_line: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Measure recipes with ``model`` on ``text``, and return a report as JSON values.

    Args:
        model: Folder or hub name of the model, or None for the demo's model.
        text: Text file. By default, the demo's model reads the demo's text, and other models read the texts that kvpack includes.
        recipes: Recipes to measure.
        settings: Settings of the measurement.
        basis: Basis file for recipes such as klt-2, and for kvpack's own presets.
        default_basis: Basis file to use if ``basis`` is None, but only for recipes that need a basis.
        reference: Recipe to compare the others with, which is measured too.
        out: Folder for the plot and the report.
        progress: Called as ``progress(done, total)``.
        show_line: Called with a first line that names the texts, and with preliminary results after each window, prompt and generated text.

    ``cpu_seconds`` are process times over all threads. Two runs with the same seed differ only in times, and in rounding if PyTorch uses a
    different number of threads. Raises InvalidParameter if a size is not supported or the device is missing, MissingFile, WriteFailed, and
    MissingPackage if ``out`` is set but matplotlib is not installed.
    """
    began = time.process_time()
    file = basis or default_basis
    given = None if file is None else Basis.load(file)
    recipes = list(dict.fromkeys([*recipes, *([] if reference is None else [reference])]))
    parsed = [Recipe(recipe, given if basis is not None or Recipe(recipe).needs_basis else None) for recipe in recipes]
    _check_settings(settings, given)
    if out is not None:
        quality_plot.import_figure_module()
        _make_folder(out)
    with model_folder(model) as folder:
        network = load_model(folder)
        if settings.device == "cuda":
            network = network.to("cuda", torch.bfloat16)
        vocabulary_size = get_vocabulary_size(network)
        is_own = text is None and model is not None
        words = bundled_text(TEXT, folder, vocabulary_size) if is_own else read_text(text, folder, vocabulary_size)
        others = [bundled_text(name, folder, vocabulary_size) for name in settings.others] if is_own else []
        name = model_name(str(folder.resolve()))
    inserted = None if settings.inserted is None else _token_id(words, settings.inserted)
    most = position_limit(network)
    long = others[-1] if is_own else words
    sizes = _choose_sizes(settings, words, long, most)
    parts = [_TextWindows(words, sizes)]
    for other in others:
        whole = other is long
        its = replace(settings, tokens=min(LONG_TOKENS, most or LONG_TOKENS), windows=1, scored_tokens=None) if whole else settings
        parts.append(_TextWindows(other, _choose_sizes(replace(its, needles=0), other, other, most)))
    sample = window_ids(words, 0, _TWIN_SAMPLE).to(network.device)
    measurement = _Measurement(
        network, parts, long, tuple(recipes), tuple(parsed), reference, settings.seed, inserted, progress, show_line
    )
    report = {
        "model": name,
        "text": words.name,
        **_modify_keys(network, settings, sample),
        "inserted": settings.inserted,
        "basis": None if given is None else {"file": given.where, "digest": given.digest.hex()},
        "settings": {**asdict(sizes), "seed": settings.seed, "max_kl": settings.max_kl, "threads": torch.get_num_threads()},
        "precision": _precision_text(network),
        "uncompressed_bits": 8 * network.dtype.itemsize,
        **measurement.run(),
    }
    report["cpu_seconds"] = time.process_time() - began
    if out is not None:
        _write_report(report, Path(out))
    return report


def _check_settings(settings: QualitySettings, basis: Basis | None) -> None:
    """Raise InvalidParameter if the options conflict, or if the device is missing."""
    if settings.offset is not None and basis is not None:
        raise InvalidParameter("--offset changes the keys, but the basis was calibrated without it: omit --offset or --basis")
    check_max_kl(settings.max_kl)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("--device is cuda, but PyTorch found no CUDA device: omit --device to measure on the CPU")


def _modify_keys(network: Any, settings: QualitySettings, sample: torch.Tensor) -> dict[str, Any]:
    """Change the keys of ``network`` according to the settings, and return a description of the change for the report."""
    result: dict[str, Any] = {"twin": None, "offset": None}
    if settings.twin is not None:
        difference = make_twin(network, settings.twin, sample, settings.seed)
        result["twin"] = {"factor": settings.twin, "pairs_a_head": OUTLIER_PAIRS, "largest_logit_difference": difference}
    if settings.offset is not None:
        difference = offset_keys(network, settings.offset, sample, settings.seed)
        result["offset"] = {"factor": settings.offset, "largest_logit_difference": difference}
    return result


def _token_id(text: Text, token: str) -> int:
    """Return the id of the token with the text ``token``. Raises InvalidParameter if the text is not exactly one token."""
    ids = text.encode(token)
    if len(ids) != 1:
        raise InvalidParameter(f"--insert is {token!r}, which is {len(ids)} tokens for the model: pass the text of exactly one token")
    return ids[0]


def _precision_text(model: Any) -> str:
    """Return the model's dtype and device as text. Results with different texts are not comparable."""
    if model.device.type == "cuda":
        return f"bf16 on one {torch.cuda.get_device_name(model.device)}"
    return "fp32 on a CPU"


def _choose_sizes(settings: QualitySettings, text: Text, long_text: Text, max_positions: int | None) -> _MeasuredSizes:
    tokens = window_tokens(settings.tokens, DEFAULT_TOKENS, text, max_positions)
    scored_tokens = min(DEFAULT_SCORE, tokens // 2) if settings.scored_tokens is None else settings.scored_tokens
    room = len(text.ids) // ids_per_window(tokens, text)
    windows = min(DEFAULT_WINDOWS, room) if settings.windows is None else settings.windows
    lengths = _needle_lengths(tokens, long_text, max_positions)
    prompts = min((len(long_text.ids) // length for length in lengths), default=0)
    count = min(DEFAULT_NEEDLES, prompts) if settings.needles is None else settings.needles
    check_size("--score", scored_tokens, 1, tokens - 1, f"in a window of {tokens} tokens")
    check_size("--windows", windows, 1, room, f"(the number of {tokens}-token windows in {text.name}): {LONGER_TEXT}")
    check_size("--step", settings.step, 1, tokens, f"in a window of {tokens} tokens: pass a longer text or another --step")
    longest = max(lengths, default=needles.LENGTHS[0])
    sized = f"with windows of {_MIN_BYTES} tokens or more" if long_text.is_byte_level else f"of {longest:,} tokens"
    check_size("--needles", count, 0, prompts, f"prompts in {long_text.name}, {sized}")
    most = (max_positions or len(long_text.ids)) - generated.PROMPT
    written = settings.generated or 0
    check_size("--generate", written, 0, max(most, 0), f"tokens after a prompt of {generated.PROMPT} of {long_text.name}")
    return _MeasuredSizes(tokens, scored_tokens, windows, count, settings.step, written)


def _needle_lengths(tokens: int, text: Text, max_positions: int | None) -> tuple[int, ...]:
    """Return the lengths of needle prompts: the window's length for a byte-level model, otherwise several lengths up to the limits."""
    if text.is_byte_level:
        return (tokens,) if tokens >= _MIN_BYTES else ()
    most = min(len(text.ids), max_positions or len(text.ids))
    return tuple(length for length in needles.LENGTHS if length <= most)


@dataclass(frozen=True)
class _TextWindows:
    text: Text
    sizes: _MeasuredSizes


@dataclass
class _Measurement:
    """A measurement on all windows, all needle prompts and a generated text.

    The uncompressed results of a window are kept only until all recipes have been measured on it.
    """

    model: Any
    parts: Sequence[_TextWindows]
    long: Text
    names: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    reference: str | None
    seed: int
    inserted: int | None
    progress: Progress | None
    show_line: Callable[[str], object] | None = None
    done: int = 0

    @property
    def sizes(self) -> _MeasuredSizes:
        return self.parts[0].sizes

    def run(self) -> dict[str, Any]:
        if self.show_line:
            count, words = sum(part.sizes.windows for part in self.parts), ", ".join(part.text.name for part in self.parts)
            self.show_line(f"reading {count} {'window' if count == 1 else 'windows'} of {words}; results follow after each")
        with tempfile.TemporaryDirectory(prefix="kvpack-bench-") as folder:
            path = os.path.join(folder, "window.kvpack")
            read = [self._measure_windows(part, path) for part in self.parts]
            exact_answers, answers = self._answer_needles(path)
            written = self._generated_divergences(path)
        (begun, exact_losses, forgotten, measured), *others = read
        recalls = [None if not self.sizes.needles else summarize_recall(result) for result in answers]
        recipes = list(zip(self.names, measured, recalls, strict=True))
        recalled = summarize_recall(exact_answers) if exact_answers else None
        result = summary(begun, exact_losses, forgotten, recalled, recipes, self.reference)
        result["others"] = [
            {
                "text": part.text.name,
                "settings": asdict(part.sizes),
                **text_summary(*results, self.names, self.reference),
            }
            for part, results in zip(self.parts[1:], others, strict=True)
        ]
        result["generated"] = None if written is None else generation_summary(self.names, written)
        return result

    def _measure_windows(self, part: _TextWindows, path: str) -> tuple[list[int], list[float], list[Comparison], list[list[RecipeResult]]]:
        exact_losses: list[float] = []
        forgotten: list[Comparison] = []
        measured: list[list[RecipeResult]] = [[] for _ in self.recipes]
        size = ids_per_window(part.sizes.tokens, part.text)
        begun = window_starts(len(part.text.ids), size, part.sizes.windows, self.seed)
        for start in begun:
            ids = window_ids(part.text, start, size)
            if self.inserted is not None:
                ids[0, (part.sizes.tokens - part.sizes.score) // 2] = self.inserted
            exact = evaluate_uncompressed(self.model, self._to_device(ids), part.sizes.score)
            exact_losses.append(exact.loss)
            forgotten.append(evaluate_forgotten(self.model, exact))
            self._count_step()
            for recipe, rows in zip(self.recipes, measured, strict=True):
                rows.append(measure(self.model, exact, recipe, path, part.sizes.step, errors=part is self.parts[0]))
                self._count_step()
            so_far = (f"{fmean(row.kl_divergence for row in rows):.5f}" for rows in measured)
            self._show_results(f"{part.text.name}, window {len(exact_losses)} of {len(begun)}, mean KL", so_far)
        return begun, exact_losses, forgotten, measured

    def _needle_prompts(self) -> Iterator[needles.NeedlePrompt]:
        """Yield the needle prompts for each length and depth. Texts overlap only between prompts of different lengths."""
        generator = torch.Generator().manual_seed(self.seed)
        count = self.sizes.needles
        for length in _needle_lengths(self.sizes.tokens, self.long, position_limit(self.model)) if count else ():
            size = length - needles.QUESTION_TOKENS - len(self.long.start)
            for number, start in enumerate(window_starts(len(self.long.ids), size, count, self.seed + 1)):
                ids = self.long.ids[start : start + size]
                if self.long.is_byte_level:
                    yield needles.key_lines_prompt(self.long, ids, generator)
                else:
                    yield needles.passkey_prompt(self.long, ids, (number + 0.5) / count, generator)

    def _answer_needles(self, path: str) -> tuple[list[NeedleAnswer], list[list[NeedleAnswer]]]:
        exact_answers: list[NeedleAnswer] = []
        result: list[list[NeedleAnswer]] = [[] for _ in self.recipes]
        for prompt in self._needle_prompts():
            tokens = self._to_device(torch.tensor([[*self.long.start, *prompt.ids]]))
            pairs = prefill(self.model, tokens)
            length = tokens.shape[1]
            make_asked = partial(NeedleAnswer.grade, length, prompt.depths)
            # Copy the cache for each question, because it may grow in place.
            new_cache = partial(_copied_cache, self.model, pairs)
            exact_answers += make_asked(needles.grade_answers(self.model, prompt, new_cache))
            self._count_step()
            for recipe, right in zip(self.recipes, result, strict=True):
                packed = packed_file(pairs, recipe, path)
                right += make_asked(needles.grade_answers(self.model, prompt, partial(Bf16Cache.from_cache, self.model, packed)))
                self._count_step()
            rights = [sum(answer.right for answer in answers) for answers in (exact_answers, *result)]
            self._show_results(
                f"needles ({rights[0]} of {len(exact_answers)} found without packing) found with packing", map(str, rights[1:])
            )
        return exact_answers, result

    def _generated_divergences(self, path: str) -> list[generated.GenerationEffect] | None:
        if not self.sizes.generated:
            return None
        prompt = self._to_device(window_ids(self.long, 0, generated.PROMPT - len(self.long.start)))
        exact = generated.generate(self.model, prompt, self.sizes.generated, self.seed)
        self._count_step()
        written = []
        for recipe in self.recipes:
            written.append(generated.measure_generation(self.model, exact, recipe, path, self.sizes.step, self.seed))
            self._count_step()
        self._show_results("share of generated tokens that changed", (f"{100 * effect.changed:.1f}%" for effect in written))
        return written

    def _show_results(self, label: str, results: Iterable[str]) -> None:
        """Show a preliminary result of each recipe, if ``show_line`` is set."""
        if self.show_line:
            self.show_line(f"{label}: " + ", ".join(f"{name} {text}" for name, text in zip(self.names, results, strict=True)))

    def _to_device(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.to(self.model.device)

    def _count_step(self) -> None:
        self.done += 1
        if self.progress:
            lengths = len(_needle_lengths(self.sizes.tokens, self.long, position_limit(self.model)))
            read = sum(part.sizes.windows for part in self.parts) + self.sizes.needles * lengths + bool(self.sizes.generated)
            self.progress(self.done, read * (1 + len(self.recipes)))


def _copied_cache(model: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    return uncompressed_cache(model, [(k.clone(), v.clone()) for k, v in pairs])


def _make_folder(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteFailed(f"{path}: could not be created: {error.strerror}") from None


def round_numbers(value: Any) -> Any:
    """Round all floats in ``value``, which may be nested, to ``_DIGITS`` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {name: round_numbers(part) for name, part in value.items()}
    return [round_numbers(part) for part in value] if isinstance(value, (list, tuple)) else value


def _write_report(report: dict[str, Any], folder: Path) -> None:
    try:
        (folder / "quality.json").write_text(json.dumps(round_numbers(report), indent=2) + "\n")
        quality_plot.save_plot(report, folder / "quality")
    except OSError as error:
        raise WriteFailed(f"{error.filename}: could not be written: {error.strerror}") from None
