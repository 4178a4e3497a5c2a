"""kvpack bench quality --norm-rules: recipes compared with the same recipes under the papers' norm rule (norm_rule=norm), at equal
bytes.

Presets are measured as the papers define them, without the raw tokens that they have besides.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvpack.coding.presets import OWN, PUBLISHED
from kvpack.coding.recipes import SIDES, Recipe
from kvpack.coding.recorded_presets import RECORDED
from kvpack.coding.rules import Rule
from kvpack.errors import InvalidParameter
from kvpack.evaluation.intervals import CONFIDENCE, student_t
from kvpack.formats import CODECS
from kvpack.formats.side_cars import WithSideCars
from kvpack.output import print_table

from . import quality
from .summary import CHECKED_DIM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.coding.encoding import Progress
    from kvpack.formats.base import Codec

_PAPERS = ("norm_rule", "norm")


def recipes() -> list[str]:
    """The papers' presets for any model that the rule changes."""
    papers = [name for name, preset in PUBLISHED.items() if preset.layers is None and name not in OWN]
    return [name for name in papers if with_papers_rule(name) is not None]


def with_papers_rule(recipe: str) -> str | None:
    """``recipe`` with the papers' rule for every codec that takes one; None if that changes nothing. Raises InvalidParameter."""
    parsed = Recipe(RECORDED.get(recipe, recipe))
    if not any(_follows(rule.codec(CHECKED_DIM, side)) for rule in parsed.rules for side in SIDES if side in rule.sides):
        return None
    return ";".join([*map(_clause, parsed.rules), *([f"tail={parsed.window}"] if parsed.window else [])])


def _follows(codec: Codec) -> bool:
    """Return True if the codec stores something else for the papers' rule."""
    inner: Any = codec.codec if isinstance(codec, WithSideCars) else codec
    return getattr(inner, "norm_rule", "norm") != "norm" and getattr(inner, "token_scale", "") != "none"


def _clause(rule: Rule) -> str:
    """The clause of ``rule``, with the papers' rule if its codec takes one and names none."""
    words = list(rule.words)
    if any(field.name == _PAPERS[0] for field in fields(CODECS[rule.codec_id])) and _PAPERS[0] not in dict(words):  # type: ignore[arg-type]
        words.append(_PAPERS)
    items = "" if rule.items is None else "layers=" + ",".join(f"{first}-{last}" for first, last in rule.items) + ":"
    options = ",".join(f"{name}={value}" for name, value in words)
    return f"{items}{rule.sides}={rule.codec_id}{':' if options else ''}{options}"


def run(
    model: str | os.PathLike[str] | None,
    text: str | None,
    chosen: Sequence[str],
    settings: quality.Settings,
    *,
    out: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure ``chosen`` recipes with both rules as ``quality.run`` does, without needles, and return JSON values.

    Raises InvalidParameter for a recipe that the rule does not change, and the errors of ``quality.run``.
    """
    pairs = {}
    for recipe in chosen:
        other = with_papers_rule(recipe)
        if other is None:
            raise InvalidParameter(f"--norm-rules compares recipes with and without norm_rule=norm, which changes nothing of {recipe!r}")
        pairs[recipe] = RECORDED.get(recipe, recipe), other
    both = list(dict.fromkeys([*(plain for plain, _ in pairs.values()), *(papers for _, papers in pairs.values())]))
    report = quality.run(model, text, both, replace(settings, needles=0, generated=None), out=out, progress=progress)
    rows = {row["recipe"]: row for row in report["recipes"]}
    return {**report, "norm_rules": [_compared(recipe, rows[plain], rows[papers]) for recipe, (plain, papers) in pairs.items()]}


def _compared(recipe: str, row: dict[str, Any], papers: dict[str, Any]) -> dict[str, Any]:
    found, before = ([window["kl_divergence"] for window in one["windows"]] for one in (row, papers))
    differences = [one - other for one, other in zip(found, before, strict=True)]
    return {
        "recipe": recipe,
        "bits_per_value": row["bits_per_value"],
        "papers_bits_per_value": papers["bits_per_value"],
        "papers_kl_divergence": fmean(before),
        "kl_divergence": fmean(found),
        "difference_interval": student_t(differences),
    }


def show(report: dict[str, Any]) -> None:
    """Print one table, the recipes from most bits in the file to fewest."""
    rows = []
    for row in sorted(report["norm_rules"], key=lambda row: -row["bits_per_value"]):
        before, after, interval = row["papers_kl_divergence"], row["kl_divergence"], row["difference_interval"]
        rows.append(
            [
                row["recipe"],
                f"{row['papers_bits_per_value']:.3f}",
                f"{row['bits_per_value']:.3f}",
                f"{before:.5f}",
                f"{after:.5f}",
                f"{after / before:.2f}" if before else "",
                "" if interval is None else f"{interval[0]:+.5f} to {interval[1]:+.5f}",
            ]
        )
    settings = report["settings"]
    sizes = f"{settings['windows']} windows of {settings['tokens']:,} tokens, the last {settings['score']:,} scored"
    columns = ["recipe", "bits,\nnorm", "bits per\nvalue", "KL (nats),\nnorm", "KL\n(nats)", "ratio", "difference"]
    print_table(f"{report['model']}, {report['text']}: {sizes}", columns, rows)
    print("norm: norm_rule=norm, the norms that the papers store; without it, encoders store the factor that keeps products right.")
    print(f"Difference: of KL, paired by window, Student's t interval of {CONFIDENCE:.0%} over the windows.")
