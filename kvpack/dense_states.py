"""The keys and values that a model's own cache holds, and at which positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvpack.formats.errors import InvalidDtype, InvalidShape

from .cache import Cache


class DenseLayer(NamedTuple):
    """Keys and values ``[batch, kv_head, token, dim]`` of one layer, and the tokens before them that it no longer holds."""

    k: torch.Tensor | None
    v: torch.Tensor | None
    skipped: int = 0


def dense_states(past: Any) -> list[DenseLayer]:
    """The layers of whatever a caller may hold. Raises InvalidDtype for what is no cache, InvalidShape for a layer that is not whole."""
    if isinstance(past, Cache) or isinstance(getattr(past, "packed", None), Cache):
        raise InvalidDtype(f"a {type(past).__name__} is packed already: Cache.convert gives it another recipe")
    if hasattr(past, "layers") and not isinstance(past, torch.Tensor):
        return [_states(layer, f"layers[{number}]") for number, layer in enumerate(past.layers)]
    if isinstance(past, (list, tuple)):
        if len(past) == 2 and all(x is None or isinstance(x, torch.Tensor) for x in past):
            return [DenseLayer(past[0], past[1])]
        if all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in past):
            return [DenseLayer(pair[0], pair[1]) for pair in past]
    raise InvalidDtype(f"a {type(past).__name__} is not a KV cache: give a transformers Cache, a list of (k, v), or one (k, v)")


def _states(layer: Any, where: str) -> DenseLayer:
    """What a transformers cache layer holds: of a static one, the part that is filled; of a sliding one, the newest tokens."""
    k, v = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor) or k.dim() != 4 or not hasattr(layer, "get_seq_length"):
        return DenseLayer(k, v)
    seen, held = int(layer.get_seq_length()), k.shape[2]
    if seen > held and not getattr(layer, "is_sliding", False):
        raise InvalidShape(
            f"{where}: a {type(layer).__name__} that has seen {seen} tokens holds the keys of {held}; "
            "pack a cache that holds all, as DynamicCache does"
        )
    return DenseLayer(k[:, :, :seen], v[:, :, :seen], max(0, seen - held))
