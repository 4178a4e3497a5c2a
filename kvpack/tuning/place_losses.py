"""The loss of a model by layer and side at one width, from which kvpack's own presets derive widths."""

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
"""The width at which places are measured: coarse enough for a loss above the noise, and fine enough that the losses of places add up."""

SCORED_PART = 4
"""One token in this many of a window is scored."""


def in_one_place(layer: int, side: str, codec: str) -> str:
    """Return the recipe that stores ``side`` of ``layer`` with ``codec``, and everything else in bf16."""
    return f"kv=raw:dtype=bf16;layers={layer}:{side}={codec}"


def losses_of_places(model: Any, basis: Basis, layers: int, windows: Sequence[torch.Tensor], step: Callable[[], None]) -> dict[str, str]:
    """Return the losses of each side of ``layers`` layers, as texts for ``model`` of a basis, minus the smallest loss, which is noise.

    ``windows`` are token ids ``[1, token + 1]``; ``step`` is called for every window read.
    """
    with tempfile.TemporaryDirectory(prefix="kvpack-widths-") as folder:
        read = Windows(model, folder, step, basis=basis)
        read.read(windows, (windows[0].shape[1] - 1) // SCORED_PART)
        result = {side: [read.loss(_recipe(layer, side, basis)).kl_divergence for layer in range(layers)] for side in "kv"}
    floor = min(map(min, result.values()))
    return {LOSSES.format(side=side): ",".join(f"{loss - floor:.3g}" for loss in losses) for side, losses in result.items()}


def _recipe(layer: int, side: str, basis: Basis) -> str:
    codec = calibrated_codec(side, MEASURED_BITS, trellis=False)
    if side == "k" and not basis.has_balanced_frames:
        codec = codec.replace(",frame=centered", "")
    return f"{in_one_place(layer, side, codec)};{RAW_CLAUSE}"
