"""Measurement of the loss of each layer's keys and values at one width, from which kvpack's own presets derive widths."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from kvpack.coding.bases import LOSSES
from kvpack.coding.presets import RAW_CLAUSE, calibrated_codec

from .measurement import Windows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    import torch

    from kvpack.coding.bases import Basis

MEASURED_BITS = 2
"""Width, in bits, at which tensors are measured. It is small enough for losses above the noise, and large enough that losses add up."""

SCORED_PART = 4
"""Divisor of a window's tokens: one in this many is scored."""


def single_place_recipe(layer: int, side: str, codec: str) -> str:
    """Return the recipe with ``codec`` for ``side`` of ``layer``, and bf16 for everything else."""
    return f"kv=raw:dtype=bf16;layers={layer}:{side}={codec}"


def measure_place_losses(
    model: Any, basis: Basis, layers: int, windows: Sequence[torch.Tensor], step: Callable[[], None]
) -> dict[str, str]:
    """Return the losses of ``layers`` layers as metadata for a basis, minus the smallest loss, which is noise.

    ``windows`` are token ids ``[1, token + 1]``. ``step`` is called after each window that is read.
    """
    with tempfile.TemporaryDirectory(prefix="kvpack-widths-") as folder:
        reader = Windows(model, folder, step, basis=basis)
        reader.read(windows, (windows[0].shape[1] - 1) // SCORED_PART)
        result = {side: [reader.loss(_recipe(layer, side, basis)).kl_divergence for layer in range(layers)] for side in "kv"}
    floor = min(map(min, result.values()))
    return {LOSSES.format(side=side): ",".join(f"{loss - floor:.3g}" for loss in losses) for side, losses in result.items()}


def _recipe(layer: int, side: str, basis: Basis) -> str:
    codec = calibrated_codec(side, MEASURED_BITS, trellis=False)
    if side == "k" and not basis.has_balanced_frames:
        codec = codec.replace(",frame=centered", "")
    return f"{single_place_recipe(layer, side, codec)};{RAW_CLAUSE}"
