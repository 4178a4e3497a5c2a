"""kvpack bench quality --peers: measure transformers' QuantizedCache, with quanto and HQQ, in the same windows as the recipes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from kvpack.evaluation.windows import compare_predictions, score_with_cache
from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpack.evaluation.windows import UncompressedResult

LIBRARIES = {"quanto": "optimum.quanto", "hqq": "hqq"}
"""Module of each backend."""

BITS = (4, 2)

AXES = {"quanto": 0, "hqq": 1}
"""Axis of groups for each backend. With these, both have one scale per group of values along a token."""

KEPT_BYTES = 2
"""Size in bytes of a scale, of a zero point and of a value in the residual window, for a model in bf16."""


@dataclass(frozen=True)
class Peer:
    """A backend with a number of bits."""

    backend: str
    bits: int

    @property
    def name(self) -> str:
        return f"{self.backend}, {self.bits} bits"


@dataclass(frozen=True)
class PeerResult:
    """Results of a peer in a window, as in ``windows.RecipeResult``; ``bytes`` is its memory use."""

    log_perplexity: float
    kl_divergence: float
    same_choices: float
    bytes: int
    values: int


def installed_peers() -> list[Peer]:
    """Return the peers whose libraries are installed. Raises InvalidParameter if there are none."""
    result = [Peer(backend, bits) for backend, module in LIBRARIES.items() if _is_installed(module) for bits in BITS]
    if not result:
        raise InvalidParameter("--peers measures quanto and HQQ, but neither is installed: pip install optimum-quanto hqq")
    return result


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def measure_peer(model: Any, exact: UncompressedResult, peer: Peer, step: int) -> PeerResult:
    """Quantize the keys and values of a window's prefix in bf16, and evaluate the scored tokens over them, at most ``step`` at a time."""
    from transformers.cache_utils import QuantizedCache

    axis = AXES[peer.backend]
    cache = QuantizedCache(peer.backend, model.config, nbits=peer.bits, axis_key=axis, axis_value=axis)
    with torch.inference_mode():
        for number, pair in enumerate(exact.first):
            cache.update(*(x.to(torch.bfloat16).to(x.dtype).contiguous() for x in pair), number)
    log_perplexity, kl_divergence, same_choices = compare_predictions(exact, score_with_cache(model, exact, cache, step))
    tensors = [x for layer in cache.layers for x in _layer_tensors(layer)]
    values = sum(k.numel() + v.numel() for k, v in exact.pairs)
    return PeerResult(log_perplexity, kl_divergence, same_choices, sum(map(_stored_bytes, tensors)), values)


def _layer_tensors(layer: Any) -> Iterator[torch.Tensor]:
    """Return the tensors of a layer of a QuantizedCache."""
    yield from (layer.keys, layer.values)
    for quantized in (layer._quantized_keys, layer._quantized_values):
        if isinstance(quantized, tuple):
            codes, meta = quantized
            yield from (codes, meta["scale"], meta["zero"])
        else:
            yield from (quantized._data._data, quantized._scale, quantized._shift)


def _stored_bytes(x: torch.Tensor) -> int:
    return x.numel() * (KEPT_BYTES if x.is_floating_point() else x.element_size())
