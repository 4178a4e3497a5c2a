"""The search by widths: the loss of every layer and side is measured at 2 bits and predicted for other widths.

Each additional bit divides the error of a Lloyd-Max code, and with it the loss, by about 4. The loss of a place at 2 bits thus predicts its
loss at every width: a bit goes where loss * 4^(2 - bits) falls the most per byte. Only the chosen recipes are also measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpack.coding.calibrated_presets import raised_losses
from kvpack.coding.recipes import parse_recipe
from kvpack.formats.errors import InvalidParameter

from .allocation import uniform
from .greedy import allocate
from .place_losses import MEASURED_BITS, in_one_place
from .search import within_budget

if TYPE_CHECKING:
    from .greedy import Losses
    from .search import Measurement, Search

CHECKED = 2
"""Recipes measured after the places: the one found, and the best uniform one that fits."""


def steps(layers: int) -> int:
    """Return the number of recipes that the search measures."""
    return 2 * layers + CHECKED


def by_widths(search: Search) -> tuple[Measurement, Measurement | None]:
    """Return the chosen allocation, and the largest uniform one within the budget; None if none fits.

    Raises InvalidParameter for a budget below the smallest candidates.
    """
    allocate(search.priced, {place: dict.fromkeys(codecs, 0.0) for place, codecs in search.priced.packed.items()}, search.budget)
    measured = {}
    for (layer, side), codecs in search.priced.packed.items():
        codec = min(codecs, key=lambda codec: (abs(bits_of(codec, side) - MEASURED_BITS), codec))
        loss = search.windows.loss(in_one_place(layer, side, codec)).kl_divergence
        measured[layer, side] = codec, loss
        search.sensitivities[layer, side] = {codec: loss}
    tuned = within_budget(search, "widths", _predicted(search, measured))
    pairs = zip(*(search.everywhere(side) for side in "kv"), strict=False)
    fitting = [result for k, v in pairs if search.fits(result := uniform(search.priced.places, k, v))]
    plain = search.measure("uniform", fitting[-1]) if fitting else None
    if plain is not None and plain.loss.kl_divergence < tuned.loss.kl_divergence:
        tuned = plain
    return tuned, plain


def _predicted(search: Search, measured: dict[tuple[int, str], tuple[str, float]]) -> Losses:
    """Return the losses of all candidates in every place, minus the smallest loss, which is noise that no width reduces."""
    floor = min(loss for _, loss in measured.values())
    raised = raised_losses({place: loss - floor for place, (_, loss) in measured.items()})
    result: Losses = {}
    for (layer, side), codecs in search.priced.packed.items():
        codec, _ = measured[layer, side]
        bits = {other: bits_of(other, side) for other in codecs}
        result[layer, side] = {other: raised[layer, side] * 4.0 ** (bits[codec] - bits[other]) for other in codecs}
    return result


def bits_of(codec: str, side: str) -> float:
    """Return the bits per value of the codes of ``codec``, in the words of a recipe.

    Raises InvalidParameter for a codec without such a width.
    """
    recipe = parse_recipe(f"kv=raw;{side}={codec}")
    words = dict(next(rule for rule in reversed(recipe.rules) if side in rule.sides).words)
    if not words.get("b", "").isdigit():
        raise InvalidParameter(f"--candidate is {codec!r}, but the search by widths supports only codecs with b=<bits>, such as scalar:b=3")
    return float(words["b"])
