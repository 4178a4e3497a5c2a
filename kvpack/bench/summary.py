"""Computes a measurement's report from its windows, and prints the report's table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from kvpack.coding.recipes import parse_recipe
from kvpack.evaluation.intervals import CONFIDENCE, significantly_less, student_t_interval, wilson_interval
from kvpack.evaluation.windows import SINK_TOKENS, Comparison, RecipeResult
from kvpack.formats.arguments import describe
from kvpack.formats.errors import InvalidParameter
from kvpack.output import format_count, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .generated import GenerationEffect

CHECKED_DIM = 128

_SMALLEST = 1e-12

DEPTHS = 4
"""Number of equal parts of a prompt for which needle recall is reported."""


@dataclass(frozen=True)
class NeedleAnswer:
    """The answer to a question about a needle.

    ``depth`` is the position of the needle as a fraction of the prompt's ``tokens`` tokens. ``right`` is True if the answer is correct.
    """

    tokens: int
    depth: float
    right: bool

    @classmethod
    def grade(cls, tokens: int, depths: Sequence[float], answers: Sequence[bool]) -> list[NeedleAnswer]:
        return [cls(tokens, depth, right) for depth, right in zip(depths, answers, strict=True)]


def summary(
    starts: Sequence[int],
    exact_losses: Sequence[float],
    forgotten: Sequence[Comparison],
    exact_recall: dict[str, Any] | None,
    recipes: Sequence[tuple[str, Sequence[RecipeResult], dict[str, Any] | None]],
    reference: str | None = None,
) -> dict[str, Any]:
    """Return the report's results as JSON values, with recipes in descending order of bits.

    Each recipe is compared with the recipe ``reference`` window by window. Intervals are Student's t intervals over the windows.
    """
    exact_loss = fmean(exact_losses)
    rows = [_recipe_row(recipe, measured, exact_losses, recalled) for recipe, measured, recalled in recipes]
    mark_pareto_front(rows)
    add_ratios(rows, reference)
    return {
        "confidence": CONFIDENCE,
        "reference": reference,
        "uncompressed": {
            "perplexity": math.exp(exact_loss),
            "needles": exact_recall,
            "windows": [{"start": start, "log_perplexity": loss} for start, loss in zip(starts, exact_losses, strict=True)],
        },
        "forgotten": {
            "kept_tokens": SINK_TOKENS,
            **_prediction_results(forgotten, exact_losses),
            "windows": [asdict(window) for window in forgotten],
        },
        "recipes": sorted(rows, key=lambda row: -row["bits_per_value"]),
    }


def text_summary(
    starts: Sequence[int],
    exact_losses: Sequence[float],
    forgotten: Sequence[Comparison],
    measured: Sequence[Sequence[RecipeResult]],
    names: Sequence[str],
    reference: str | None,
) -> dict[str, Any]:
    """Return the results for an additional text (not the main evaluation text) as JSON values: predictions, but no errors of layers.

    ``forgotten`` contains the predictions of each window after only the first tokens of its prefix (``evaluate_forgotten``).
    """
    rows = [_text_row(name, windows, exact_losses) for name, windows in zip(names, measured, strict=True)]
    add_ratios(rows, reference)
    return {
        "uncompressed": {"perplexity": math.exp(fmean(exact_losses)), "starts": list(starts)},
        "forgotten": _prediction_results(forgotten, exact_losses),
        "recipes": sorted(rows, key=lambda row: -row["bits_per_value"]),
    }


def _text_row(name: str, measured: Sequence[RecipeResult], exact_losses: Sequence[float]) -> dict[str, Any]:
    return {
        "recipe": name,
        "bits_per_value": _mean_bits(measured),
        **_prediction_results(measured, exact_losses),
        "windows": [{"kl_divergence": window.kl_divergence, "log_perplexity": window.log_perplexity} for window in measured],
    }


def generation_summary(names: Sequence[str], effects: Sequence[GenerationEffect]) -> dict[str, dict[str, Any]]:
    """Return the effect of each recipe on a generated text as JSON values."""
    return {name: asdict(effect) for name, effect in zip(names, effects, strict=True)}


def _mean_bits(measured: Sequence[RecipeResult]) -> float:
    return 8 * sum(window.bytes for window in measured) / sum(window.values for window in measured)


def mark_pareto_front(rows: Sequence[dict[str, Any]]) -> None:
    """Set ``on_front`` in each row: True if it is on the Pareto front of bits and KL divergence.

    The recipe with the fewest bits is on the front. Each recipe with more bits is on it if its divergence is significantly below that of
    the previous recipe on the front. Divergences are compared per window, as logarithms, so that windows with large divergences do not
    dominate.
    """
    front: list[list[float]] = []
    for row in sorted(rows, key=lambda row: (row["bits_per_value"], row["kl_divergence"])):
        logarithms = _log_divergences(row)
        row["on_front"] = not front or significantly_less(logarithms, front[-1])
        if row["on_front"]:
            front.append(logarithms)


def add_ratios(rows: Sequence[dict[str, Any]], reference: str | None) -> None:
    """Set ``of_reference`` in each row: the ratio of its divergence to that of the recipe ``reference``, with an interval, or None."""
    compared = next((_log_divergences(row) for row in rows if row["recipe"] == reference), None)
    for row in rows:
        row["of_reference"] = None
        if compared is not None:
            differences = [value - other for value, other in zip(_log_divergences(row), compared, strict=True)]
            interval = student_t_interval(differences)
            ends = None if interval is None else [math.exp(end) for end in interval]
            row["of_reference"] = {"ratio": math.exp(fmean(differences)), "interval": ends}


def _log_divergences(row: dict[str, Any]) -> list[float]:
    return [math.log(max(window["kl_divergence"], _SMALLEST)) for window in row["windows"]]


def _prediction_results(windows: Sequence[Comparison | RecipeResult], exact_losses: Sequence[float]) -> dict[str, Any]:
    differences = [window.log_perplexity - exact for window, exact in zip(windows, exact_losses, strict=True)]
    divergences = [window.kl_divergence for window in windows]
    return {
        "perplexity": math.exp(fmean(window.log_perplexity for window in windows)),
        "log_perplexity_difference": fmean(differences),
        "log_perplexity_difference_interval": student_t_interval(differences),
        "kl_divergence": fmean(divergences),
        "kl_divergence_interval": student_t_interval(divergences),
        "same_choices": fmean(window.same_choices for window in windows),
    }


def _recipe_row(
    recipe: str, measured: Sequence[RecipeResult], exact_losses: Sequence[float], needles: dict[str, Any] | None
) -> dict[str, Any]:
    by_layer = {
        name: [fmean(values) for values in zip(*(getattr(window, name) for window in measured), strict=True)]
        for name in ("k_cosine", "v_cosine", "attention_error")
    }
    return {
        "recipe": recipe,
        "family": key_codec(recipe),
        "bits_per_value": _mean_bits(measured),
        "nominal_bits": fmean(window.nominal_bits for window in measured),
        **_prediction_results(measured, exact_losses),
        **{name: fmean(values) for name, values in by_layer.items()},
        "needles": needles,
        "encode_seconds": median(window.encode_seconds for window in measured),
        "load_seconds": median(window.load_seconds for window in measured),
        "by_layer": by_layer,
        "windows": [asdict(window) for window in measured],
    }


def key_codec(recipe: str) -> str:
    """Return the id of the codec that ``recipe`` uses for keys in most layers."""
    rule = next(rule for rule in reversed(parse_recipe(recipe).rules) if "k" in rule.sides and rule.covers(1, 3))
    return rule.codec_id


def summarize_recall(answers: Sequence[NeedleAnswer]) -> dict[str, Any]:
    """Return the number of correct answers as JSON values: in total, by depth, and by prompt length."""
    parts: list[list[bool]] = [[] for _ in range(DEPTHS)]
    lengths: dict[int, list[bool]] = {}
    for question in answers:
        parts[int(question.depth * DEPTHS)].append(question.right)
        lengths.setdefault(question.tokens, []).append(question.right)
    return {
        **_recall_counts([question.right for question in answers]),
        "answers": [asdict(question) for question in answers],
        "by_depth": [{"from": number / DEPTHS, "to": (number + 1) / DEPTHS, **_recall_counts(part)} for number, part in enumerate(parts)],
        "by_length": [{"tokens": tokens, **_recall_counts(part)} for tokens, part in sorted(lengths.items())],
    }


def _recall_counts(answers: Sequence[bool]) -> dict[str, Any]:
    return {"right": sum(answers), "asked": len(answers), "interval": wilson_interval(sum(answers), len(answers)) if answers else None}


def report_table(report: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, the columns and the rows of the report's table, without empty columns."""
    exact, reference = report["uncompressed"], report["reference"]
    columns = [
        "recipe", "bits per\nvalue", "smaller\nthan bf16", "nominal\nbits", "perplexity", "change in log\nperplexity", "95%\n+-",
        "KL\n(nats)", "95%\n+-", f"x {reference or ''}", "95%\ninterval", "same\nchoice", "attention\nerror", "needles\nright",
        "95%\ninterval", "encode\ns", "load\nms",
    ]  # fmt: skip
    bits = f"{report['uncompressed_bits']:.2f}"
    rows = [["uncompressed", bits, "", "", f"{exact['perplexity']:.4f}", *[""] * 8, *_recall_cells(exact["needles"]), "", ""]]
    for row in report["recipes"]:
        rows.append(
            [
                row["recipe"],
                *_size_cells(row),
                f"{row['nominal_bits']:.2f}",
                *_predicted_cells(row),
                f"{row['attention_error']:.4f}",
                *_recall_cells(row["needles"]),
                f"{row['encode_seconds']:.2f}",
                f"{1000 * row['load_seconds']:.1f}",
            ]
        )
    rows.append(["past forgotten", "0.00", "", "", *_predicted_cells(report["forgotten"]), *[""] * 5])
    empty = [column for column, cells in enumerate(zip(*rows, strict=True)) if not any(cells)]
    columns, *rows = ([cell for column, cell in enumerate(cells) if column not in empty] for cells in (columns, *rows))
    return f"{model_label(report)}, {report['precision']}, {report['text']}: {sizes_text(report['settings'])}", columns, rows


def _size_cells(row: dict[str, Any]) -> list[str]:
    return [f"{row['bits_per_value']:.2f}", f"{16 / row['bits_per_value']:.2f} x"]


MAX_KL = 0.005
"""Default limit of the verdict. By Pinsker's inequality, at a KL divergence of x up to about sqrt(x / 2) of the sampled tokens change."""


def verdict(report: dict[str, Any]) -> list[str]:
    """Return sentences that rate the recipes by needle recall and KL divergence. A recipe's rating depends on the upper end of the
    divergence's interval, on the text for which it is highest.
    """
    limit = report["settings"]["max_kl"]
    worst: dict[str, float] = {}
    mean: dict[str, float] = {}
    for row in (row for part in (report, *report["others"]) for row in part["recipes"]):
        divergence = row["kl_divergence"]
        worst[row["recipe"]] = max(worst.get(row["recipe"], 0.0), (row["kl_divergence_interval"] or [divergence])[-1])
        mean[row["recipe"]] = max(mean.get(row["recipe"], 0.0), divergence)
    recall = report["uncompressed"]["needles"]
    losing = [row["recipe"] for row in report["recipes"] if recall and row["needles"]["interval"][1] < recall["interval"][0]]
    left = [row["recipe"] for row in report["recipes"] if row["recipe"] not in losing]
    good = [name for name in left if worst[name] <= limit]
    lines = [f"{', '.join(good)}: KL of at most {limit:g}, so {_changed_text(limit)}."] if good else []
    for name in left:
        if mean[name] <= limit < worst[name]:
            lines.append(
                f"{name}: above {limit:g} only by its interval (its mean KL is {mean[name]:.2g}, but the 95% interval ends at "
                f"{worst[name]:.2g}). More windows narrow it."
            )
        elif name not in good:
            lines.append(f"{name}: KL of up to {worst[name]:.2g}, so {_changed_text(worst[name])}.")
    if losing:
        lines.append(f"{', '.join(losing)}: significantly fewer needles than with the uncompressed cache.")
    if good:
        lines.append(f"Verdict: {good[-1]} is good enough: the smallest recipe here whose KL is at most {limit:g}.")
    else:
        lines.append(f"Verdict: no recipe here has a KL of at most {limit:g}: try recipes with more bits, or lossless.")
    if len(report["uncompressed"]["windows"]) == 1:
        lines.append("One window is only a first look: measure more before you decide.")
    return lines


def check_max_kl(value: float) -> None:
    """Raise InvalidParameter unless ``value``, the limit of the verdict, is a positive number."""
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidParameter(f"max_kl is {describe(value)}, expected a KL divergence above 0, in nats, such as {MAX_KL}")


def _changed_text(divergence: float) -> str:
    return f"up to about {100 * math.sqrt(min(divergence, 2.0) / 2):.0f}% of tokens change"


def show(report: dict[str, Any]) -> None:
    exact, settings, reference = report["uncompressed"], report["settings"], report["reference"]
    print_table(*report_table(report))
    print("The tokens before the scored ones are packed, saved and loaded; the scored ones are appended and packed by the cache,")
    print(f"at most {settings['step']} in a pass. Bits per value count every byte of a window's file. Perplexity is per token.")
    print("The change in its log is paired by window; its interval is Student's t over the windows.")
    print("KL is KL(uncompressed || packed) of the next token, in nats. Same choice: how often the most probable token is the same.")
    if reference is not None:
        print(f"x {reference}: KL as a multiple of that of {reference}, the geometric mean over the windows.")
    print(f"Past forgotten: the scored tokens attend to only the first {report['forgotten']['kept_tokens']} tokens.")
    print("Attention error is the relative error of a layer with exact input, averaged over layers.")
    print("Encode and load are the median times for the tokens before the scored ones.")
    for other in report["others"]:
        _show_other_text(other, reference, report["uncompressed_bits"])
    if exact["needles"] is not None:
        _show_needles(report)
    if report["generated"] is not None:
        _show_generated(report)
    print(f"The measurement took {report['cpu_seconds'] / 60:.1f} minutes of CPU time, over all threads.\n")
    print("\n".join(verdict(report)))


def model_label(report: dict[str, Any]) -> str:
    """Return the name of a report's model, with a note if its keys or the text were changed."""
    twin, offset = report["twin"], report["offset"]
    name = str(report["model"])
    if twin is not None:
        name += f", its twin with key channels x {twin['factor']:g}"
    if offset is not None:
        name += f", keys moved by {offset['factor']:g} deviations in some channels"
    if report["inserted"] is not None:
        name += f", {report['inserted']} in the middle of the packed tokens"
    return name


def sizes_text(settings: dict[str, Any]) -> str:
    return f"{format_count(settings['windows'], 'window')} of {settings['tokens']:,} tokens, the last {settings['score']:,} scored"


def _show_other_text(other: dict[str, Any], reference: str | None, bits: int) -> None:
    columns = ["recipe", "bits per\nvalue", "smaller\nthan bf16", "perplexity", "change in log\nperplexity", "95%\n+-"]
    columns += ["KL\n(nats)", "95%\n+-", f"x {reference or ''}", "95%\ninterval", "same\nchoice"]
    rows = [["uncompressed", f"{bits:.2f}", "", f"{other['uncompressed']['perplexity']:.4f}", *[""] * 7]]
    rows += [[row["recipe"], *_size_cells(row), *_predicted_cells(row)] for row in other["recipes"]]
    rows.append(["past forgotten", "0.00", "", *_predicted_cells(other["forgotten"])])
    print_table(f"{other['text']}: {sizes_text(other['settings'])}", columns, rows)


def _show_needles(report: dict[str, Any]) -> None:
    series = [("uncompressed", report["uncompressed"]["needles"]), *((row["recipe"], row["needles"]) for row in report["recipes"])]
    depths = [f"{100 * part['from']:.0f} to {100 * part['to']:.0f}%" for part in series[0][1]["by_depth"]]
    lengths = [f"{part['tokens']:,} tokens" for part in series[0][1]["by_length"]]
    rows = [
        [name, *(f"{part['right']} of {part['asked']}" for part in (*needles["by_depth"], *needles["by_length"]))]
        for name, needles in series
    ]
    print_table("needles found, by depth in the prompt and by its length", ["recipe", *depths, *lengths], rows)
    print(f"Needles: {format_count(series[0][1]['asked'], 'question')}, with Wilson's interval.")


def _show_generated(report: dict[str, Any]) -> None:
    written = report["generated"]
    part = next(iter(written.values()))["kl_divergences"]
    size = -(-report["settings"]["generated"] // len(part))
    rows = []
    for row in report["recipes"]:
        effect = written[row["recipe"]]
        first = "-" if effect["first"] is None else f"{effect['first']:,}"
        cells = [f"{divergence:.4f}" for divergence in effect["kl_divergences"]]
        rows.append([row["recipe"], *cells, f"{100 * effect['changed']:.1f}%", first])
    columns = ["recipe", *(f"KL to\n{size * (number + 1):,}" for number in range(len(part))), "changed\ntokens", "before\nthe first"]
    print_table(f"{report['settings']['generated']:,} tokens that the uncompressed model generated", columns, rows)
    print("Changed: with the same random numbers, another token would have been drawn.")


def _predicted_cells(row: dict[str, Any]) -> tuple[str, ...]:
    changes, divergences = (row[f"{name}_interval"] for name in ("log_perplexity_difference", "kl_divergence"))
    return (
        f"{row['perplexity']:.4f}",
        f"{row['log_perplexity_difference']:+.5f}",
        _half_width(changes),
        f"{row['kl_divergence']:.5f}",
        _half_width(divergences),
        *_ratio_cells(row.get("of_reference")),
        f"{100 * row['same_choices']:.1f}%",
    )


def _half_width(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{(interval[1] - interval[0]) / 2:.5f}"


def _ratio_cells(ratio: dict[str, Any] | None) -> tuple[str, str]:
    if ratio is None:
        return "", ""
    ends = "" if ratio["interval"] is None else "-".join(f"{end:.3g}" for end in ratio["interval"])
    return f"{ratio['ratio']:.3g}", ends


def _recall_cells(recall: dict[str, Any] | None) -> tuple[str, str]:
    if recall is None:
        return "", ""
    low, high = recall["interval"]
    return f"{recall['right']} of {recall['asked']}", f"{100 * low:.0f}-{100 * high:.0f}%"
