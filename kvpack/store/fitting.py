"""Whether a cache, and a chunk, fit an identity: what does not can never be stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpack.formats.errors import InvalidParameter

from ..recipes import parse_recipe

if TYPE_CHECKING:
    from .identity import Identity

_ANY_DIM = 128
"""A head dim that every codec takes; the tokens that it encodes together are those of any other."""


def check_cache(cache: Any, identity: Identity) -> None:
    """Raise InvalidParameter unless ``cache`` is a packed cache of one sequence from its start, of the identity's model and recipe."""
    from ..cache import Cache

    model = identity.header_model
    if not isinstance(cache, Cache):
        raise InvalidParameter(f"a {type(cache).__name__} is no packed cache: kvpack.pack makes one")
    if cache.start:
        raise InvalidParameter(f"the cache starts at position {cache.start}, a prefix starts at 0")
    if cache.recipe != identity.recipe:
        raise InvalidParameter(f"the cache is packed with {cache.recipe!r}, the store's identity says {identity.recipe!r}")
    for name, value in cache.model.items():
        if model.get(name, value) != value:
            raise InvalidParameter(f"the cache's model has {name} {value!r}, the store's identity says {model[name]!r}")
    for number, layer in enumerate(cache):
        for name, side in layer.sides.items():
            if side.batch != 1:
                raise InvalidParameter(f"layers[{number}].{name} holds {side.batch} sequences, a prefix is one")
        if layer.sides and layer.tokens != cache.tokens:
            first, last = cache.positions(number)
            raise InvalidParameter(
                f"layers[{number}] holds {layer.tokens} of {cache.tokens} tokens, positions {first} to {last}: "
                "a prefix needs all, and a sliding window drops some"
            )


def check_groups(identity: Identity, chunk: int) -> None:
    """Raise InvalidParameter unless every codec of the recipe encodes ``chunk`` tokens in whole groups."""
    for rule in parse_recipe(identity.recipe).rules:
        for side in rule.sides:
            group = rule.codec(_ANY_DIM, side).token_group
            if chunk % group:
                raise InvalidParameter(f"chunk is {chunk}, {side}={rule.codec_id} encodes {group} tokens together: allowed are multiples")
