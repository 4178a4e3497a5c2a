"""Conversion of a search's outcome to JSON values and to a recipe file."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvpack.evaluation.intervals import student_t_interval
from kvpack.output import printable

from .allocation import recipe_text
from .candidates import is_attendable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .measurement import Loss
    from .search import Measurement, Search


def results(
    search: Search, held_out: tuple[list[float], dict[str, Loss]], tuned: Measurement, uniform: Measurement | None
) -> dict[str, Any]:
    """Return the chosen recipe, the best uniform recipe and all measurements as JSON values.

    ``held_out`` contains the losses in the held-out windows: of the uncompressed model, and of both recipes.
    """
    layers = len(search.candidates.tensor_keys) // 2
    exact, losses = held_out
    result, plain = (None if allocation is None else losses[recipe_text(allocation.allocation)] for allocation in (tuned, uniform))
    return {
        "tuned": _measurement_row(tuned, search, exact, losses),
        "uniform": None if uniform is None else _measurement_row(uniform, search, exact, losses),
        "comparison": None if result is None or plain is None else compare_losses(result, plain),
        "layers": [{side: tuned.allocation[layer, side] for side in "kv"} for layer in range(layers)],
        "attendable": all(map(is_attendable, tuned.allocation.values())),
        "measured": [
            {
                "what": allocation.role,
                "recipe": recipe_text(allocation.allocation),
                "attendable": all(map(is_attendable, allocation.allocation.values())),
                "bits_per_value": allocation.loss.bits_per_value,
                "kl_divergence": allocation.loss.kl_divergence,
            }
            for allocation in search.measurements
        ],
        "sensitivities": [
            {
                "layer": layer,
                "side": side,
                "codec": codec,
                "bytes": search.candidates.stream_bytes((layer, side), codec),
                "kl_divergence": loss,
            }
            for (layer, side), losses_by_codec in search.sensitivities.items()
            for codec, loss in losses_by_codec.items()
        ],
        "left_out": [
            {"layer": layer, "side": side, "codec": codec, "why": reason}
            for (layer, side), reasons in search.candidates.left_out.items()
            for codec, reason in reasons.items()
        ],
    }


def _measurement_row(measurement: Measurement, search: Search, exact: list[float], losses: dict[str, Loss]) -> dict[str, Any]:
    recipe = recipe_text(measurement.allocation)
    return {
        "recipe": recipe,
        "bits_per_value": measurement.loss.bits_per_value,
        "bytes": measurement.loss.bytes // len(search.windows.exact),
        "searched": _loss_results(measurement.loss, [window.loss for window in search.windows.exact]),
        "held_out": _loss_results(losses[recipe], exact),
    }


def _loss_results(loss: Loss, exact: list[float]) -> dict[str, Any]:
    differences = [result - reference for result, reference in zip(loss.log_perplexities, exact, strict=True)]
    return {
        "kl_divergence": loss.kl_divergence,
        "kl_divergences": loss.kl_divergences,
        "perplexity": math.exp(fmean(loss.log_perplexities)),
        "uncompressed_perplexity": math.exp(fmean(exact)),
        "log_perplexity_difference": fmean(differences),
        "log_perplexity_difference_interval": student_t_interval(differences),
    }


def compare_losses(tuned: Loss, uniform: Loss) -> dict[str, Any]:
    """Return the mean difference of the KL divergences in the same windows. It is negative if the tuned recipe is better.

    ``verdict`` is "better" or "worse" if Student's interval excludes 0, "the same" if both recipes are equal, and "undecided" otherwise.
    """
    differences = [loss - other for loss, other in zip(tuned.kl_divergences, uniform.kl_divergences, strict=True)]
    interval = student_t_interval(differences)
    if tuned is uniform:
        verdict = "the same"
    elif interval is None or interval[0] <= 0 <= interval[1]:
        verdict = "undecided"
    else:
        verdict = "better" if interval[1] < 0 else "worse"
    return {"kl_divergence_difference": fmean(differences), "interval": interval, "verdict": verdict}


def recipe_file(report: dict[str, Any], clauses: Sequence[str]) -> str:
    """Return the text of a recipe file: a description in comments, and one clause per line."""
    result, uniform = report["tuned"], report["uniform"]
    comments = [
        f"kvpack tune: {report['model']}, {report['text']}, at most {report['bits']:g} bits per value ({report['mode']} search)",
        f"{result['bits_per_value']:.3f} bits per value in files of {report['settings']['file_tokens']:,} tokens; "
        f"KL divergence {result['held_out']['kl_divergence']:.3g} nats per token on held-out text",
    ]
    if report["basis"] is not None:
        comments.append(f"basis {report['basis']['digest']}")
    if uniform is not None:
        loss = uniform["held_out"]["kl_divergence"]
        comments.append(f"{uniform_label(report)}: {uniform['recipe']}, {uniform['bits_per_value']:.3f} bits, {loss:.3g} nats")
    return "".join(f"{line}\n" for line in [*(f"# {printable(comment)}" for comment in comments), *clauses])


def uniform_label(report: dict[str, Any]) -> str:
    """Return the label of a report's uniform recipe.

    Only the thorough search compares several uniform recipes. The other searches use the largest that fits the budget.
    """
    return "best uniform recipe" if report["mode"] == "thorough" else "largest uniform recipe"
