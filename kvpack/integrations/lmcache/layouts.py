"""Conversion of LMCache's objects to pages, and of its keys to bytes.

An object is ``[2, layer, token, head * dim]``, where the first axis is for keys and values. If the engine stores a head's key and value
next to each other, as vLLM 0.28 does, an object is *fused*: ``[1, layer, token, head * 2 * dim]``, possibly without the first axis. Latents
have the shape of fused objects.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.recipes import recipe_with_basis, reject_layer_clauses
from kvpack.pages.buffer import PageBuffer
from kvpack.pages.codec import PageCodec
from kvpack.pages.geometry import DTYPES, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvpack.coding.recipes import Recipe

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK_TOKENS = 256
"""Default number of tokens in LMCache's objects."""


def adapter_recipe(recipe: str, basis: str | None, head_dim: int, kv_dtype: str) -> Recipe:
    """Return the recipe with its ``basis``, if it needs one.

    Objects with as many layers as the basis must contain all layers of the model, in order. Raises InvalidParameter if the recipe selects
    layers, and the errors of ``recipe_with_basis`` and ``PageCodec``. They are raised here, before any object arrives, because LMCache
    would count later errors only as misses.
    """
    reject_layer_clauses(recipe, "LMCache's objects do not record which layers of the model they hold")
    parsed = recipe_with_basis(recipe, basis, None)
    if parsed.basis is None and not kv_dtype:
        PageCodec(parsed, PageGeometry(1, 1, _CHUNK_TOKENS, head_dim, head_dim)).close()
    return parsed


def check_model(recipe: Recipe, key: Any) -> None:
    """Raise InvalidParameter if the recipe's basis was calibrated for a model other than the one that ``key`` names."""
    if recipe.basis is not None:
        recipe.basis.check_model({"name": key.model_name})


def is_fused(options: Mapping[str, Any]) -> bool:
    """Return the option ``fused``. Raises InvalidParameter unless it is true or false."""
    fused = options.get("fused", False)
    if not isinstance(fused, bool):
        raise InvalidParameter(f"fused is {fused!r:.40}, expected true or false")
    return fused


def object_geometry(shape: Sequence[int], dtype: torch.dtype, head_dim: int, kv_dtype: str, fused: bool) -> PageGeometry:
    """Return the geometry of an object. Raises InvalidParameter if the object is not keys and values.

    ``kv_dtype`` is the engine's name for its cache dtype, which distinguishes different 8-bit floats. ``fused`` is True if objects whose
    first axis is 1 or missing contain keys and values.
    """
    split = len(shape) == 4 and shape[0] == 2
    one_plane = len(shape) == 3 or (len(shape) == 4 and shape[0] == 1)
    row = head_dim if split else 2 * head_dim
    if not (split or (fused and one_plane)) or shape[-1] % row or dtype not in _NAMES:
        raise InvalidParameter(
            f"the object is {dtype} {list(shape)}, expected [2, layer, token, head * {head_dim}], or with fused [1, layer, token, "
            f"head * {2 * head_dim}], for engines that keep keys and values adjacent: set others to 'raw' to keep latents, recurrent "
            "states and other objects byte for byte"
        )
    if dtype == DTYPES["u8"] and not kv_dtype:
        raise InvalidParameter("the object holds bytes, whose dtype LMCache's keys do not record: set kv_dtype, such as fp8_e4m3")
    layers, tokens, width = shape[-3:]
    return PageGeometry(layers, width // row, tokens, head_dim, head_dim, _NAMES[dtype])


def keeps_other_objects(options: Mapping[str, Any]) -> bool:
    """Return True if objects other than keys and values are kept, because the option ``others`` is "raw"."""
    others = options.get("others")
    if others not in (None, "raw"):
        raise InvalidParameter(f"others is {others!r:.40}, expected 'raw', which keeps objects other than keys and values byte for byte")
    return others is not None


def byte_geometry(shape: Sequence[int], dtype: torch.dtype) -> tuple[PageGeometry, str]:
    """Return the geometry of an object that is kept byte for byte, and the name of its dtype in kvpack."""
    if dtype not in _NAMES:
        raise InvalidParameter(f"the object is {dtype} {list(shape)}, expected one of {', '.join(DTYPES)}")
    return PageGeometry.of_bytes(math.prod(shape) * dtype.itemsize), _NAMES[dtype]


def as_page_buffer(geometry: PageGeometry, x: torch.Tensor) -> PageBuffer:
    if geometry.dim_v is None:
        # The buffer must be a view of the engine's memory, because loads write to it.
        if not x.is_contiguous():
            raise InvalidParameter(f"the object has shape {list(x.shape)} and strides {list(x.stride())}, expected a contiguous tensor")
        return PageBuffer(geometry, [x.view(-1).view(geometry.torch_dtype).view(1, geometry.heads, geometry.tokens, geometry.dim_k)])
    if x.dim() == 4 and x.shape[0] == 2:
        heads = x.view(*x.shape[:3], geometry.heads, geometry.dim_k).transpose(2, 3)[:, None]
    else:
        heads = x.view(*x.shape[-3:-1], geometry.heads, 2, geometry.dim_k).permute(3, 0, 2, 1, 4)[:, None]
    return PageBuffer(geometry, heads[0], heads[1])


def key_bytes(key: Any) -> bytes:
    """Return all fields of LMCache's key of an object as bytes. Each field is preceded by its length."""
    fields = (
        key.chunk_hash,
        key.model_name.encode(),
        str(key.kv_rank).encode(),
        str(key.object_group_id).encode(),
        key.cache_salt.encode(),
    )
    return b"".join(len(part).to_bytes(8, "little") + part for part in fields)
