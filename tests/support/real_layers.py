"""Keys, values and queries of two layers of a real language model, and a basis for them.

They are in tests/coding/real_layers.safetensors and real_layers.kvbasis.

The layers are layers 16 and 18 of SmolLM2-135M-Instruct after RoPE, for the first 512 tokens of kvpack's prose. ``python -m
support.real_layers MODEL BASIS`` creates the files again from the model's folder (see kvpack/bench/real_model.py) and its basis, which
``kvpack calibrate`` computed from 12 windows of 2,048 tokens of kvpack's calibration text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvpack.coding.bases import Basis, basis_bytes

FOLDER = Path(__file__).parents[1] / "coding"
TENSORS, BASIS = FOLDER / "real_layers.safetensors", FOLDER / "real_layers.kvbasis"
LAYERS = (16, 18)
TOKENS = 512


def layers() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return (k, v, q) of each layer, float32 ``[1, head, token, dim]``, with 3 KV heads and 9 query heads."""
    held = load_file(TENSORS)
    return [tuple(held[f"{layer}.{name}"].float() for name in "kvq") for layer in LAYERS]  # type: ignore[misc]


def basis() -> Basis:
    """Return the basis of the layers, in which they have the numbers 0 and 1."""
    return Basis.load(BASIS)


def write_files(model: str, basis_path: str) -> None:
    """Write the layers and the basis to their files."""
    from transformers import AttentionInterface

    from kvpack.evaluation.models import bundled_text, get_vocabulary_size, window_ids
    from kvpack.integrations.transformers import attention
    from kvpack.models import load_model

    seen: dict[str, torch.Tensor] = {}

    def recording(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if module.layer_idx in LAYERS:
            for name, x in (("k", key), ("v", value), ("q", query)):
                seen[f"{module.layer_idx}.{name}"] = x.to(torch.float16).contiguous().clone()
        return attention(module, query, key, value, *rest, **options)

    AttentionInterface.register("recording", recording)
    network = load_model(model)
    network.set_attn_implementation("recording")
    with torch.inference_mode():
        network(window_ids(bundled_text("prose", Path(model), get_vocabulary_size(network)), 0, TOKENS))
    save_file(seen, TENSORS, {"license": "Apache-2.0", "model": "SmolLM2-135M-Instruct"})
    of_all = Basis.load(basis_path)
    places = [(number, layer, side) for number, layer in enumerate(LAYERS) for side in "kv"]
    rows = {(number, side): of_all.rows(layer, side).rows[0] for number, layer, side in places}
    frames = {(number, side): of_all.frames(layer, side) for number, layer, side in places}
    BASIS.write_bytes(basis_bytes(rows, len(LAYERS), {"name": "SmolLM2-135M-Instruct, layers 16 and 18"}, "fp16", frames))


if __name__ == "__main__":
    write_files(*sys.argv[1:])
