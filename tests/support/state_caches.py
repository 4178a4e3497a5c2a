"""Small caches of a model whose first layer has states and whose second layer has keys and values.

There are states at the ends of some chunks.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

import torch

import kvpack
from kvpack.cache.states import States, with_states
from support.caches import random_pairs
from support.store_caches import CHUNK, IDENTITY

STATEFUL = dataclasses.replace(IDENTITY, keeps_states=True)


def states(position: int, seed: int = 0) -> States:
    """Return the states after ``position`` tokens: a recurrent state in fp32, and that of a convolution in bf16.

    The second layer has no states.
    """
    generator = torch.Generator().manual_seed(1000 * seed + position)
    recurrent = torch.randn(1, 3, 4, generator=generator)
    conv = torch.randn(1, 5, 2, generator=generator).to(torch.bfloat16)
    return {"conv.0": conv, "recurrent.0": recurrent}, {}


def stateful(tokens: int, positions: Any, recipe: str = "kivi-2", seed: int = 0) -> kvpack.Cache:
    """Return a cache of ``tokens`` tokens with states after the last token, and at the positions ``positions``."""
    (pair,) = random_pairs(1, tokens, dims=(32, 32), seed=seed)
    packed = kvpack.pack([pair], recipe)
    layers = (kvpack.Layer(None, None), *packed.layers)
    kept = {position: states(position, seed) for position in positions}
    return dataclasses.replace(packed, layers=with_states(layers, states(tokens, seed)), states_at=MappingProxyType(kept))


def same_states(cache: kvpack.Cache | None, position: int, seed: int = 0) -> bool:
    """Return True if ``cache`` ends at ``position`` and has the states of that position."""
    assert cache is not None
    expected = states(position, seed)
    return cache.tokens == position and all(
        layer.states.keys() == own.keys() and all(torch.equal(layer.states[name], state) for name, state in own.items())
        for layer, own in zip(cache, expected, strict=True)
    )


def chunk_ends(*chunks: int) -> list[int]:
    """Return the positions at the ends of the chunks with these numbers."""
    return [CHUNK * count for count in chunks]
