"""Caches that several tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvpack import Cache

RECIPES = [
    "bf16",
    "kivi-2",
    "kivi-2-u8",
    "oscar-2",
    "fp8",
    "nvfp4",
    "octopus-3",
    "turboquant-2.5",
    "polarquant-3",
    "turboangle-k8v4",
    "kv=quaternion:s=24,r=3",
    "kivi-4;tail=64",
    "kv=octahedral:b=3,channel_scale=fp16,outliers=3,sinks=2",
    "kv=group:b=2,g=32,rotation=hadamard,channel_scale=fp16,outliers=3,qjl=fp32,sinks=2,low_norm_tokens=3;tail=64",
]

BOUNDS = {
    "bf16": 0.0,
    "kivi-2": 0.45,
    "kivi-2-u8": 0.45,
    "oscar-2": 0.45,
    "fp8": 0.05,
    "nvfp4": 0.15,
    "octopus-3": 0.3,
    "turboquant-2.5": 0.35,
    "polarquant-3": 0.3,
    "turboangle-k8v4": 0.1,
    "kv=quaternion:s=24,r=3": 0.25,
    "kivi-4;tail=64": 0.1,
    "kv=octahedral:b=3,channel_scale=fp16,outliers=3,sinks=2": 0.3,
    "kv=group:b=2,g=32,rotation=hadamard,channel_scale=fp16,outliers=3,qjl=fp32,sinks=2,low_norm_tokens=3;tail=64": 0.45,
}
"""Largest relative error (2-norm over all keys or values) of each recipe on Gaussian values."""


def random_pairs(
    layers: int, tokens: int, *, batch: int = 1, heads: int = 2, dims: tuple[int, int] = (64, 64), seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def one(dim: int) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, dim, generator=generator).to(torch.bfloat16)

    return [(one(dims[0]), one(dims[1])) for _ in range(layers)]


def unpack_all(cache: Cache) -> list[torch.Tensor]:
    return [x for pair in cache.unpack(torch.float32) for x in pair if x is not None]


def relative_error(cache: Cache, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    exact = [x.to(torch.float32) for pair in pairs for x in pair]
    return max(((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(unpack_all(cache), exact, strict=True))
