"""kvpack's own presets with a basis: keys in its frames, and widths derived from the measured loss of each layer and side.

A place (a side of a layer) that loses more than others at one width gets more bits. The average of the widths is given by the preset.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from .presets import OWN, RAW_CLAUSE, calibrated_codec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .bases import Basis

    Place = tuple[int, str]
    """A layer and a side of it, "k" or "v"."""

MAX_WIDTH = 8

ADDED_LOSS = 0.1
"""The part of the mean loss that is added to that of every place.

Measured losses are noisy, and the smallest ones say nothing: without it, places that other text needs would be left with one bit.
"""


def calibrated_presets(basis: Basis) -> dict[str, str]:
    """Return the clauses of kvpack's own presets for ``basis``; empty if it has no frames for keys."""
    if not basis.has_balanced_frames:
        return {}
    return {name: clauses(basis, preset.bits, trellis=preset.trellis) for name, preset in OWN.items()}


def clauses(basis: Basis, average: float, *, trellis: bool) -> str:
    """Return the clauses of a recipe for ``basis`` with at most ``average`` bits per value in its codes on average."""
    result, usual = widths(basis.losses, average), int(average)
    texts = [_clause("", side, usual, trellis, basis) for side in "kv"]
    for side in "kv":
        for width in sorted(set(result.values()) - {usual}):
            layers = [layer for (layer, of), chosen in sorted(result.items()) if (of, chosen) == (side, width)]
            if layers:
                texts.append(_clause(f"layers={','.join(map(str, layers))}:", side, width, trellis, basis))
    return ";".join([*texts, RAW_CLAUSE])


def _clause(layers: str, side: str, bits: int, trellis: bool, basis: Basis) -> str:
    named = f",basis={basis.digest.hex()}" if side == "k" else ""
    return f"{layers}{side}={calibrated_codec(side, bits, trellis)}{named}"


def widths(losses: Mapping[Place, float], average: float) -> dict[Place, int]:
    """Return a width of at least 1 bit for each place, at most ``average`` bits on average, given their ``losses`` at one width.

    Each bit goes where it lowers the loss most (Shoham and Gersho 1988); it divides the loss of a place by about 4.
    """
    result, raised = dict.fromkeys(losses, 1), raised_losses(losses)
    for _ in range(int((average - 1) * len(losses))):
        place = max((place for place in losses if result[place] < MAX_WIDTH), key=lambda place: raised[place] * 4.0 ** -result[place])
        result[place] += 1
    return result


def raised_losses(losses: Mapping[Place, float]) -> dict[Place, float]:
    """Add ``ADDED_LOSS`` of the mean loss to each of ``losses``."""
    added = ADDED_LOSS * fmean(losses.values()) if losses else 0.0
    return {place: loss + added for place, loss in losses.items()}
