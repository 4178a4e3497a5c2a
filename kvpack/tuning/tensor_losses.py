"""Measurement of the losses of single tensors at one width, from which kvpack's own presets derive bit widths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvpack.coding.bases import LOSSES, Basis
from kvpack.coding.presets import KVPACK_RAW_CLAUSE, calibrated_codec
from kvpack.coding.recipes import Recipe
from kvpack.evaluation.windows import evaluate_over, evaluate_uncompressed, pack_as_bf16

MEASURED_BITS = 2
"""Bit width at which tensors are measured: small enough for losses above the noise, and large enough that losses add up."""

SCORED_PART = 4
"""One in this many tokens of a window is scored."""


def single_tensor_recipe(layer: int, side: str, codec: str) -> str:
    """Return the recipe that uses ``codec`` for the keys or values of one layer, and stores everything else in bf16."""
    return f"kv=raw:dtype=bf16;layers={layer}:{side}={codec}"


def measure_tensor_losses(model: Any, basis: Basis, windows: Sequence[torch.Tensor], step: Callable[[], None]) -> dict[str, str]:
    """Return the losses of all tensors in the layers that ``basis`` describes, as metadata for the basis.

    The smallest loss is noise, and is subtracted from all others. ``windows`` are token ids ``[1, token + 1]``. For each tensor, a window's
    scored tokens are read in one pass over a cache in which only this tensor was packed. ``step`` is called after each pass.
    """
    keys, values = (calibrated_codec(side, MEASURED_BITS, trellis=False) for side in "kv")
    recipe = Recipe(f"k={keys};v={values};{KVPACK_RAW_CLAUSE}", basis)
    layers = basis.described_layer_count
    losses = {side: [0.0] * layers for side in "kv"}
    for tokens in windows:
        exact = evaluate_uncompressed(model, tokens, max(1, (tokens.shape[1] - 1) // SCORED_PART))
        step()
        # The windows are so short that a CPU packs them before a GPU's kernels are compiled.
        packed = pack_as_bf16([(k.cpu(), v.cpu()) for k, v in exact.prefix_pairs], recipe)
        for layer, (k, v) in enumerate(exact.prefix_pairs[:layers]):
            decoded_k, decoded_v = packed[layer].unpack(k.dtype)
            assert decoded_k is not None
            assert decoded_v is not None
            for side, pair in (("k", (decoded_k.to(k.device), v)), ("v", (k, decoded_v.to(v.device)))):
                pairs = [*exact.prefix_pairs[:layer], pair, *exact.prefix_pairs[layer + 1 :]]
                losses[side][layer] += evaluate_over(model, exact, pairs).kl_divergence / len(windows)
                step()
    floor = min(map(min, losses.values()))
    return {LOSSES.format(side=side): ",".join(f"{loss - floor:.3g}" for loss in found) for side, found in losses.items()}
