"""The search by widths: losses of single tensors are measured at 2 bits and predicted for other widths.

Each additional bit divides the error of a Lloyd-Max code, and with it the loss, by about 4. A tensor's loss at 2 bits therefore predicts
its loss at any width. Each bit is assigned where loss * 4^(2 - bits) decreases most per byte. Only the chosen recipes are measured as a
whole.
"""

from __future__ import annotations

from kvpack.coding.calibrated_presets import increase_losses
from kvpack.coding.recipes import parse_recipe
from kvpack.formats.errors import InvalidParameter

from .allocation import uniform_allocation
from .greedy import Losses, allocate
from .search import Measurement, Search, measure_within_budget
from .tensor_losses import MEASURED_BITS, single_tensor_recipe

MAX_CHECKED_RECIPES = 2


def recipe_count(layers: int) -> int:
    """Return the number of recipes that the search measures."""
    return 2 * layers + MAX_CHECKED_RECIPES


def search_by_widths(search: Search) -> tuple[Measurement, Measurement | None]:
    """Return the chosen allocation and the largest uniform one. The second is None if no uniform one fits the budget.

    Raises InvalidParameter if even the smallest candidates exceed the budget.
    """
    losses = {tensor_key: dict.fromkeys(codecs, 0.0) for tensor_key, codecs in search.candidates.packed.items()}
    allocate(search.candidates, losses, search.budget)
    measured = {}
    for (layer, side), codecs in search.candidates.packed.items():
        codec = min(codecs, key=lambda codec: (abs(average_bits(codec, side) - MEASURED_BITS), codec))
        loss = search.windows.loss(single_tensor_recipe(layer, side, codec)).kl_divergence
        measured[layer, side] = codec, loss
        search.sensitivities[layer, side] = {codec: loss}
    tuned = measure_within_budget(search, "widths", _predict_losses(search, measured))
    pairs = zip(*(search.common_candidates(side) for side in "kv"), strict=False)
    fitting = [result for k, v in pairs if search.fits(result := uniform_allocation(search.candidates.tensor_keys, k, v))]
    plain = search.measure("uniform", fitting[-1]) if fitting else None
    if plain is not None and plain.loss.kl_divergence < tuned.loss.kl_divergence:
        tuned = plain
    return tuned, plain


def _predict_losses(search: Search, measured: dict[tuple[int, str], tuple[str, float]]) -> Losses:
    """Predict the losses of all tensors with all candidates. The smallest measured loss is noise, and is subtracted from all others."""
    floor = min(loss for _, loss in measured.values())
    raised = increase_losses({tensor_key: loss - floor for tensor_key, (_, loss) in measured.items()})
    result: Losses = {}
    for (layer, side), codecs in search.candidates.packed.items():
        codec, _ = measured[layer, side]
        bits = {other: average_bits(other, side) for other in codecs}
        result[layer, side] = {other: raised[layer, side] * 4.0 ** (bits[codec] - bits[other]) for other in codecs}
    return result


def average_bits(codec: str, side: str) -> float:
    """Return the bits per value of a codec's codes. ``codec`` is written as in a recipe.

    Raises InvalidParameter if the codec has no fixed width.
    """
    recipe = parse_recipe(f"kv=raw;{side}={codec}")
    words = dict(next(rule for rule in reversed(recipe.rules) if side in rule.sides).words)
    if not words.get("b", "").isdigit():
        raise InvalidParameter(f"--candidate is {codec!r}, but the width search supports only codecs with b=<bits>, such as scalar:b=3")
    return float(words["b"])
