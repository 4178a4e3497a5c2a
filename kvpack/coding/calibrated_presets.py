"""kvpack's own presets for use with a basis, with keys in the basis's frames and bit widths based on measured losses.

The preset fixes the average width. A tensor (the keys or the values of one layer) with a higher loss gets more bits.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from .presets import KVPACK_PRESETS, KVPACK_RAW_CLAUSE, calibrated_codec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .bases import Basis

    TensorKey = tuple[int, str]
    """A layer number, with "k" for its keys or "v" for its values."""

MAX_WIDTH = 8

ADDED_LOSS = 0.5
"""Fraction of the mean loss that is added to the loss of every tensor.

Measured losses are noisy, and the smallest ones are not meaningful. Without this addition, tensors that matter for other texts would get
only one bit.
"""


def calibrated_presets(basis: Basis) -> dict[str, str]:
    """Return the recipe clauses of kvpack's own presets for ``basis``, by preset name. Empty if the basis has no frames for keys."""
    if not basis.has_balanced_frames:
        return {}
    return {name: calibrated_clauses(basis, preset.bits, trellis=preset.trellis) for name, preset in KVPACK_PRESETS.items()}


def calibrated_clauses(basis: Basis, average: float, *, trellis: bool) -> str:
    """Return recipe clauses for ``basis`` with at most ``average`` bits per value, averaged over all tensors."""
    result, average_bits = choose_widths(basis.losses, average), int(average)
    texts = [_tensor_clause("", side, average_bits, average_bits, trellis, basis) for side in "kv"]
    for side in "kv":
        for width in sorted(set(result.values()) - {average_bits}):
            layers = [layer for (layer, its_side), its_width in sorted(result.items()) if (its_side, its_width) == (side, width)]
            if layers:
                texts.append(_tensor_clause(f"layers={','.join(map(str, layers))}:", side, width, average_bits, trellis, basis))
    return ";".join([*texts, KVPACK_RAW_CLAUSE])


def _tensor_clause(layers: str, side: str, bits: int, average_bits: int, trellis: bool, basis: Basis) -> str:
    named = f",basis={basis.digest.hex()}" if side == "k" else ""
    return f"{layers}{side}={calibrated_codec(side, bits, trellis, average_bits)}{named}"


def choose_widths(losses: Mapping[TensorKey, float], average: float) -> dict[TensorKey, int]:
    """Return a bit width of at least 1 for each tensor. The mean width is at most ``average``.

    ``losses`` were all measured at the same width. Each bit is assumed to divide a loss by 4, and is assigned to the tensor whose loss it
    reduces most (Shoham and Gersho 1988).
    """
    result, raised = dict.fromkeys(losses, 1), increase_losses(losses)
    for _ in range(int((average - 1) * len(losses))):
        below_maximum = (tensor_key for tensor_key in losses if result[tensor_key] < MAX_WIDTH)
        tensor_key = max(below_maximum, key=lambda tensor_key: raised[tensor_key] * 4.0 ** -result[tensor_key])
        result[tensor_key] += 1
    return result


def increase_losses(losses: Mapping[TensorKey, float]) -> dict[TensorKey, float]:
    """Return all losses, increased by ``ADDED_LOSS`` times their mean."""
    added = ADDED_LOSS * fmean(losses.values()) if losses else 0.0
    return {tensor_key: loss + added for tensor_key, loss in losses.items()}
