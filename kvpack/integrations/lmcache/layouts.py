"""LMCache's objects ``[2, layer, token, head * dim]`` as pages, and its keys as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpack.formats.errors import InvalidParameter, InvalidShape
from kvpack.integrations.recipes import check_no_layers_named, recipe_with_basis
from kvpack.pages.buffer import PageBuffer
from kvpack.pages.codec import PageCodec
from kvpack.pages.geometry import DTYPES, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvpack.coding.recipes import Recipe

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK_TOKENS = 256
"""Tokens of an object as LMCache makes them where it is not told otherwise."""


def recipe_of(recipe: str, basis: str | None, head_dim: int, kv_dtype: str) -> Recipe:
    """The recipe with its ``basis``, if it needs one: an object of as many layers as the basis then holds all of the model's, in order.

    Raises InvalidParameter for a recipe that names layers, what ``recipe_with_basis`` raises, and what ``PageCodec`` raises for the
    recipe and ``head_dim``, before there is an object: one by one LMCache would only miss them.
    """
    check_no_layers_named(recipe, "LMCache's objects do not tell which layers of the model they hold")
    found = recipe_with_basis(recipe, basis, None)
    if found.basis is None and not kv_dtype:
        PageCodec(found, PageGeometry(1, 1, _CHUNK_TOKENS, head_dim, head_dim)).close()
    return found


def check_model(recipe: Recipe, key: Any) -> None:
    """Raise InvalidParameter where the recipe's basis is that of another model than ``key`` names."""
    if recipe.basis is not None:
        recipe.basis.check_model({"name": key.model_name})


def geometry_of(shape: Sequence[int], dtype: torch.dtype, head_dim: int, kv_dtype: str) -> PageGeometry:
    """The geometry of one object. Raises InvalidShape for one that is not keys and values, and InvalidParameter.

    ``kv_dtype`` is the engine's name of its cache's dtype, without which bytes of different floats look the same.
    """
    if len(shape) != 4 or shape[0] != 2 or shape[3] % head_dim or dtype not in _NAMES:
        raise InvalidShape(
            f"the object is {dtype} {list(shape)}, expected [2, layer, token, head * {head_dim}]: latents, recurrent states and other "
            "objects are not packed"
        )
    if dtype == DTYPES["u8"] and not kv_dtype:
        raise InvalidParameter(
            "the object has bytes, which LMCache's keys do not tell from those of another dtype: give kv_dtype, such as fp8_e4m3"
        )
    _, layers, tokens, width = shape
    return PageGeometry(layers, width // head_dim, tokens, head_dim, head_dim, _NAMES[dtype])


def pages_of(geometry: PageGeometry, x: torch.Tensor) -> PageBuffer:
    """An object as a buffer of one slot."""
    heads = x.view(*x.shape[:3], geometry.heads, geometry.dim_k).transpose(2, 3)[:, None]
    return PageBuffer(geometry, heads[0], heads[1])


def key_bytes(key: Any) -> bytes:
    """Everything that LMCache's key of an object names."""
    fields = (
        key.chunk_hash,
        key.model_name.encode(),
        str(key.kv_rank).encode(),
        str(key.object_group_id).encode(),
        key.cache_salt.encode(),
    )
    return b"".join(len(part).to_bytes(8, "little") + part for part in fields)
