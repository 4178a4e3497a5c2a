"""From the windows of a measurement to its report, and the report's table."""

from __future__ import annotations

import math
from dataclasses import asdict
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from kvpack.coding.recipes import parse_recipe
from kvpack.output import print_table

from .intervals import CONFIDENCE, student_t, wilson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .windows import Measured

CHECKED_DIM = 128


def summary(
    starts: Sequence[int],
    exact_losses: Sequence[float],
    exact_answers: Sequence[bool],
    recipes: Sequence[tuple[str, Sequence[Measured], Sequence[bool]]],
) -> dict[str, Any]:
    """The report's results as JSON values, the recipes from most bits in the file to fewest.

    The difference of log-perplexity is paired by window; its interval is Student's t over the windows' means.
    """
    exact_loss = fmean(exact_losses)
    rows = [_row(recipe, measured, exact_losses, answers) for recipe, measured, answers in recipes]
    return {
        "confidence": CONFIDENCE,
        "uncompressed": {
            "perplexity": math.exp(exact_loss),
            "needles": _recall(exact_answers),
            "windows": [{"start": start, "log_perplexity": loss} for start, loss in zip(starts, exact_losses, strict=True)],
        },
        "recipes": sorted(rows, key=lambda row: -row["bits_per_value"]),
    }


def _row(recipe: str, measured: Sequence[Measured], exact_losses: Sequence[float], answers: Sequence[bool]) -> dict[str, Any]:
    losses = [window.log_perplexity for window in measured]
    differences = [loss - exact for loss, exact in zip(losses, exact_losses, strict=True)]
    by_layer = {
        name: [fmean(values) for values in zip(*(getattr(window, name) for window in measured), strict=True)]
        for name in ("k_cosine", "v_cosine", "attention_error")
    }
    return {
        "recipe": recipe,
        "family": family(recipe),
        "bits_per_value": 8 * sum(window.bytes for window in measured) / sum(window.values for window in measured),
        "nominal_bits": fmean(window.nominal_bits for window in measured),
        "perplexity": math.exp(fmean(losses)),
        "log_perplexity_difference": fmean(differences),
        "log_perplexity_difference_interval": student_t(differences),
        "kl_divergence": fmean(window.kl_divergence for window in measured),
        **{name: fmean(values) for name, values in by_layer.items()},
        "needles": _recall(answers),
        "encode_seconds": median(window.encode_seconds for window in measured),
        "load_seconds": median(window.load_seconds for window in measured),
        "by_layer": by_layer,
        "windows": [asdict(window) for window in measured],
    }


def family(recipe: str) -> str:
    """The codec of the keys in most of the layers."""
    return parse_recipe(recipe).codec(1, 3, "k", CHECKED_DIM).id


def _recall(answers: Sequence[bool]) -> dict[str, Any] | None:
    if not answers:
        return None
    return {"right": sum(answers), "asked": len(answers), "interval": wilson(sum(answers), len(answers)), "answers": list(answers)}


def show(report: dict[str, Any]) -> None:
    """Print one table and the meaning of its columns."""
    exact, settings = report["uncompressed"], report["settings"]
    columns = [
        "what", "bits a\nvalue", "nominal\nbits", "perplexity", "change of\nits log", "95 %\n+-", "KL\n(nats)",
        "K\ncosine", "V\ncosine", "attention\nerror", "needles\nright", "95 %\ninterval", "encode\ns", "load\nms",
    ]  # fmt: skip
    rows = [["uncompressed", "32.00", "", f"{exact['perplexity']:.4f}", *[""] * 6, *_recall_cells(exact["needles"]), "", ""]]
    for row in report["recipes"]:
        interval = row["log_perplexity_difference_interval"]
        rows.append(
            [
                row["recipe"],
                f"{row['bits_per_value']:.2f}",
                f"{row['nominal_bits']:.2f}",
                f"{row['perplexity']:.4f}",
                f"{row['log_perplexity_difference']:+.5f}",
                "" if interval is None else f"{(interval[1] - interval[0]) / 2:.5f}",
                f"{row['kl_divergence']:.5f}",
                f"{row['k_cosine']:.5f}",
                f"{row['v_cosine']:.5f}",
                f"{row['attention_error']:.4f}",
                *_recall_cells(row["needles"]),
                f"{row['encode_seconds']:.2f}",
                f"{1000 * row['load_seconds']:.1f}",
            ]
        )
    twin = report["twin"]
    name = report["model"] if twin is None else f"{report['model']}, its twin with key channels x {twin['factor']:g}"
    sizes = f"{settings['windows']} windows of {settings['tokens']:,} tokens, the last {settings['score']:,} scored"
    print_table(f"{name}, {report['text']}: {sizes}", columns, rows)
    print("The tokens before the scored ones are packed, saved and loaded; the scored ones are appended and packed by the cache.")
    print("bits: every byte of a window's file. Perplexity a token; the change of its log is paired by window, with Student's t over them.")
    print("KL: of the next token, uncompressed || packed. Attention error: relative, of a layer with exact input, mean over the layers.")
    print("Encode and load: seconds and milliseconds for the tokens before the scored ones, median of the windows.")
    if exact["needles"] is not None:
        print(f"Needles: {exact['needles']['asked']} questions in {settings['needles']} prompts, Wilson's interval.")


def _recall_cells(recall: dict[str, Any] | None) -> tuple[str, str]:
    if recall is None:
        return "", ""
    low, high = recall["interval"]
    return f"{recall['right']} of {recall['asked']}", f"{100 * low:.0f}-{100 * high:.0f} %"
