"""Measure the losses and sizes of kvpack's own presets, relative to the papers' recipes on the same text windows.

A window has ``TOKENS`` packed tokens and ``SCORE`` scored ones, as in ``kvpack bench quality``. The results of each window are saved to a
file after each row, so that several processes can share the work, and existing results are not measured again. ``make bench-presets``
runs this measurement.
"""

from __future__ import annotations

import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from kvpack.coding.bases import Basis
from kvpack.coding.recipes import Recipe
from kvpack.coding.recorded_presets import RECORDED
from kvpack.evaluation.models import LONGER_TEXT, check_size, get_vocabulary_size, ids_per_window, read_text, window_ids, window_starts
from kvpack.evaluation.twins import make_twin, offset_keys
from kvpack.evaluation.windows import evaluate_uncompressed, measure
from kvpack.file.atomic import write_file
from kvpack.models import load_model, model_folder
from kvpack.output import print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.coding.encoding import Progress

TOKENS, SCORE = 3840, 256
_SAMPLE = 256


@dataclass(frozen=True)
class Row:
    """A recipe to measure, and the limits that its results must meet.

    For a recipe that is not a preset, ``average`` is the average of the widths that are derived from the basis. The results are relative to
    the row named ``of``: ``part`` is the largest share of that row's loss that this row may have. ``bits`` is the largest permitted number
    of bits per value.
    """

    name: str
    recipe: str
    of: str = ""
    bits: float = 0.0
    part: float = 0.0
    by_basis: bool = False
    average: float = 0.0
    trellis: bool = False


SCALAR, OCTOPUS, QUAROT, FP8 = "scalar, 2 bits", "octopus-3 of the paper", "quarot-4 of the paper", "fp8"
PAPERS = ("octopus-3", "turboquant-3", "octopus-2", "hqmq-s24-r3", "quarot-4")

WITH_MEANS = (("octopus-3", 0.4), ("turboquant-3", 0.4), ("octopus-2", 0.35), ("hqmq-s24-r3", 0.35))
"""Presets from papers with separate key means, and the largest permitted loss of each, relative to the paper's recipe."""

ROWS = (
    Row(FP8, RECORDED["fp8"]),
    Row(SCALAR, "kv=scalar:b=2"),
    *(Row(f"{name} of the paper", RECORDED[name]) for name in PAPERS),
    *(Row(f"{name} with key means", name, f"{name} of the paper", 0.1, part) for name, part in WITH_MEANS),
    Row("kvpack-2", "kvpack-2", SCALAR, 2.3, 0.4),
    Row("kvpack-3", "kvpack-3", OCTOPUS, 3.3, 0.35),
    Row("kvpack-4", "kvpack-4", QUAROT, 4.3, 0.3),
    Row("kvpack-2-trellis", "kvpack-2-trellis", SCALAR, 2.3, 0.4),
    Row("kvpack-3-trellis", "kvpack-3-trellis", OCTOPUS, 3.3, 0.35),
    Row("kvpack-4-trellis", "kvpack-4-trellis", QUAROT, 4.3, 0.3),
    Row("kvpack-2, basis", "kvpack-2", SCALAR, 2.25, 0.2, by_basis=True),
    Row("kvpack-2-trellis, basis", "kvpack-2-trellis", SCALAR, 2.25, 0.12, by_basis=True),
    Row("2.4 bits, basis", "", OCTOPUS, 2.7, 0.45, by_basis=True, average=2.4),
    Row("2.4 bits of a trellis, basis", "", OCTOPUS, 2.7, 0.3, by_basis=True, average=2.4, trellis=True),
    Row("3.85 bits, basis", "", FP8, 4.2, 1.05, by_basis=True, average=3.85),
)


@dataclass(frozen=True)
class Settings:
    """The model's folder (None for the demo's model), the text file, the basis, and the folder for results.

    ``windows``, ``twin`` and ``offset`` are those of ``kvpack bench quality``. With a twin or an offset, no basis is used.
    """

    model: str | None
    text: str
    out: str
    basis: str | None = None
    windows: int = 8
    tokens: int = TOKENS
    device: str = "cpu"
    twin: float | None = None
    offset: float | None = None


def run(settings: Settings, processes: int = 1, rows: Sequence[Row] = ROWS, progress: Progress | None = None) -> dict[str, Any]:
    """Measure the rows of windows for which ``settings.out`` has no results yet, and return a summary of all windows.

    ``processes`` processes share the work. Raises InvalidParameter if the text is too short for the windows.
    """
    rows = [row for row in rows if not row.by_basis or (settings.basis is not None and settings.offset is None and settings.twin is None)]
    os.makedirs(settings.out, exist_ok=True)
    missing = [number for number in range(settings.windows) if not {row.name for row in rows} <= _found(settings, number).keys()]
    if processes == 1 or len(missing) == 1:
        for done, number in enumerate(missing, 1):
            _measure(settings, rows, number, torch.get_num_threads())
            if progress:
                progress(done, len(missing))
    elif missing:
        threads = max(1, (os.cpu_count() or 1) // processes)
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            for done, job in enumerate(as_completed([pool.submit(_measure, settings, rows, number, threads) for number in missing]), 1):
                job.result()
                if progress:
                    progress(done, len(missing))
    found = [_found(settings, number) for number in range(settings.windows)]
    return {"settings": asdict(settings), "rows": [_summary(row, rows, found) for row in rows]}


def _file(settings: Settings, number: int) -> Path:
    return Path(settings.out, f"window-{number}.json")


def _found(settings: Settings, number: int) -> dict[str, dict[str, float]]:
    """Return the results of the window ``number`` by the names of rows; empty if there are none."""
    file = _file(settings, number)
    found: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.exists() else {}
    return found


def recipe_of(row: Row, basis: Basis | None) -> Recipe:
    """Return the recipe of a row. It uses ``basis`` if the row needs one."""
    if not row.by_basis:
        return Recipe(row.recipe)
    assert basis is not None
    return Recipe.calibrated(basis, row.average, trellis=row.trellis) if row.average else Recipe(row.recipe, basis)


def _measure(settings: Settings, rows: Sequence[Row], number: int, threads: int) -> None:
    """Measure window ``number`` and write its results."""
    torch.set_num_threads(threads)
    basis = None if settings.basis is None else Basis.load(settings.basis)
    with model_folder(settings.model) as folder:
        model = load_model(folder)
        text = read_text(settings.text, folder, get_vocabulary_size(model))
    if settings.device == "cuda":
        model = model.to("cuda", torch.bfloat16)
    size = ids_per_window(settings.tokens + SCORE, text)
    reason = f"(the number of {settings.tokens + SCORE}-token windows in {text.name}): {LONGER_TEXT}"
    check_size("--windows", settings.windows, 1, len(text.ids) // size, reason)
    sample = window_ids(text, 0, _SAMPLE).to(model.device)
    if settings.twin is not None:
        make_twin(model, settings.twin, sample, 0)
    if settings.offset is not None:
        offset_keys(model, settings.offset, sample, 0)
    start = window_starts(len(text.ids), size, settings.windows, 0)[number]
    exact = evaluate_uncompressed(model, window_ids(text, start, size).to(model.device), SCORE)
    found = _found(settings, number)
    with tempfile.TemporaryDirectory(prefix="kvpack-bench-") as name:
        for row in (row for row in rows if row.name not in found):
            one = measure(model, exact, recipe_of(row, basis), os.path.join(name, "window.kvpack"), errors=False)
            found[row.name] = {
                "kl_divergence": one.kl_divergence,
                "bits_per_value": 8 * one.bytes / one.values,
                "same_choices": one.same_choices,
                "log_perplexity": one.log_perplexity - exact.loss,
                "encode_seconds": one.encode_seconds,
            }
            write_file(str(_file(settings, number)), [memoryview(json.dumps(found).encode())])


def _summary(row: Row, rows: Sequence[Row], windows: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return the means over all windows for a row, and whether they are within the row's limits.

    A ``bits`` limit below 1 is relative to the bits of the row named ``of``.
    """
    means = {name: fmean(found[row.name][name] for found in windows) for name in windows[0][row.name]}
    result: dict[str, Any] = {"name": row.name, **means, "of": row.of}
    if row.of:
        kl, bits = (fmean(found[row.of][name] for found in windows) for name in ("kl_divergence", "bits_per_value"))
        most = row.bits if row.bits >= 1 else bits + row.bits
        part = means["kl_divergence"] / kl
        result |= {"part": part, "most_bits": most, "most_part": row.part}
        result["within"] = means["bits_per_value"] <= most and part <= row.part
    return result


def show(report: dict[str, Any]) -> None:
    """Print one line per recipe."""
    print_table(
        f"{report['settings']['windows']} windows, {report['settings']['tokens']:,} tokens packed and {SCORE} scored",
        ["recipe", "bits", "at most", "KL", "same choice", "part", "at most", "of", ""],
        (
            [
                row["name"],
                f"{row['bits_per_value']:.3f}",
                f"{row['most_bits']:.2f}" if row["of"] else "",
                f"{row['kl_divergence']:.5f}",
                f"{100 * row['same_choices']:.1f}%",
                f"{row['part']:.3f}" if row["of"] else "",
                f"{row['most_part']:.2f}" if row["of"] else "",
                row["of"],
                ("yes" if row["within"] else "no") if row["of"] else "",
            ]
            for row in report["rows"]
        ),
        text_columns=1,
    )
