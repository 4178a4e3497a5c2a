"""kvpack bench quality --peers: transformers' QuantizedCache, with quanto and HQQ, in the windows used for recipes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from kvpack.evaluation.windows import compare_predictions, read_over
from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpack.evaluation.windows import Exact

LIBRARIES = {"quanto": "optimum.quanto", "hqq": "hqq"}
"""The module of each backend."""

BITS = (4, 2)

AXES = {"quanto": 0, "hqq": 1}
"""Each backend's axis of groups, by which quanto has one scale for groups along a token, as HQQ has with the other."""

KEPT_BYTES = 2
"""Bytes of a scale, a zero point and a value of the residual window, as a model in bf16 keeps them."""


@dataclass(frozen=True)
class Peer:
    """One backend with one number of bits."""

    backend: str
    bits: int

    @property
    def name(self) -> str:
        return f"{self.backend}, {self.bits} bits"


@dataclass(frozen=True)
class PeerMeasured:
    """The results of a peer in a window, as in ``windows.Measured``; ``bytes`` is its memory use."""

    log_perplexity: float
    kl_divergence: float
    same_choices: float
    bytes: int
    values: int


def installed() -> list[Peer]:
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


def measure_peer(model: Any, exact: Exact, peer: Peer, step: int) -> PeerMeasured:
    """Quantize the window's first part as keys and values in bf16, and read the rest over it, at most ``step`` tokens at a time."""
    from transformers.cache_utils import QuantizedCache

    axis = AXES[peer.backend]
    cache = QuantizedCache(peer.backend, model.config, nbits=peer.bits, axis_key=axis, axis_value=axis)
    with torch.inference_mode():
        for number, pair in enumerate(exact.first):
            cache.update(*(x.to(torch.bfloat16).to(x.dtype).contiguous() for x in pair), number)
    log_perplexity, kl_divergence, same_choices = compare_predictions(exact, read_over(model, exact, cache, step))
    kept = [x for layer in cache.layers for x in _kept(layer)]
    values = sum(k.numel() + v.numel() for k, v in exact.pairs)
    return PeerMeasured(log_perplexity, kl_divergence, same_choices, sum(map(_bytes, kept)), values)


def _kept(layer: Any) -> Iterator[torch.Tensor]:
    """Return the tensors of a layer of a QuantizedCache."""
    yield from (layer.keys, layer.values)
    for quantized in (layer._quantized_keys, layer._quantized_values):
        if isinstance(quantized, tuple):
            codes, meta = quantized
            yield from (codes, meta["scale"], meta["zero"])
        else:
            yield from (quantized._data._data, quantized._scale, quantized._shift)


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * (KEPT_BYTES if x.is_floating_point() else x.element_size())
