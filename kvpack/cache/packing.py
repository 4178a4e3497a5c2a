"""pack: a model's KV cache into a packed one; convert: a packed one into another recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from kvpack.coding.encoding import RAW_NAMES, check_finite, encode, is_rounded
from kvpack.coding.modes import own_modes
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.file.checks import check_integer, check_names, check_string
from kvpack.file.inputs import Inputs
from kvpack.file.limits import MAX_TOKENS
from kvpack.formats.errors import InvalidHeader, InvalidParameter, InvalidShape, LimitExceeded
from kvpack.formats.raw import HOLDS, Raw

from .arguments import integer
from .cache import Cache, Layer, Pair, Side, check_tensor
from .dense_states import dense_states
from .pages import Page

if TYPE_CHECKING:
    import os

    from kvpack.coding.encoding import Progress
    from kvpack.formats.base import Codec


def pack(
    past_key_values: Any,
    recipe: str | os.PathLike[str] | Recipe,
    *,
    model: Mapping[str, str] | None = None,
    start: int = 0,
    inputs: Inputs | None = None,
    progress: Progress | None = None,
) -> Cache:
    """Encode a KV cache with ``recipe``: a preset's name, a recipe string, or ``"@path"`` or a Path of a recipe file.

    ``past_key_values`` is a transformers Cache, a sequence of (k, v) a layer, or one (k, v); k and v are
    ``[batch, kv_head, token, dim]`` in bfloat16, float16 or float32, and either may be None. In place of (k, v) a layer may be
    (k, v, skipped), where a sliding window has dropped that many tokens before them. ``model`` is the model's
    identity, ``start`` the position of the first token; both are stored. ``inputs`` is what the tokens were
    computed from, where it is known. ``progress`` counts layers.
    Raises InvalidRecipe, MissingFile, InvalidShape, InvalidDtype, NonFinite, OutOfRange or InvalidParameter.
    """
    recipe = parse_recipe(recipe)
    if model is not None and not isinstance(model, Mapping):
        raise InvalidParameter(f"model is a {type(model).__name__}, expected a map of names to text, such as {{'name': 'llama'}}")
    if inputs is not None and not isinstance(inputs, Inputs):
        raise InvalidParameter(f"inputs is a {type(inputs).__name__}, expected a kvpack.Inputs")
    start, model = integer(start, "start"), dict(model or {})
    try:
        check_integer("start", start, 0, MAX_TOKENS)
        check_names("model", model, str)
    except (InvalidHeader, LimitExceeded) as error:
        raise InvalidParameter(str(error)) from None
    _check_length(recipe)
    states = dense_states(past_key_values)
    recipe.check_layers(len(states))
    layers = []
    for number, (k, v, skipped) in enumerate(states):
        _check_pair((k, v), f"layers[{number}]")
        layers.append(Layer(*(_pack_side(x, recipe, number, len(states), side) for x, side in ((k, "k"), (v, "v"))), skipped=skipped))
        if progress:
            progress(number + 1, len(states))
    return Cache(tuple(layers), recipe.text, MappingProxyType(model), start, inputs)


def convert(cache: Cache, recipe: str | os.PathLike[str] | Recipe, progress: Progress | None) -> Cache:
    """The cache in another recipe; a side that has its codec already is kept, one that only packs otherwise is repacked."""
    recipe = parse_recipe(recipe)
    _check_length(recipe)
    recipe.check_layers(len(cache))
    layers = []
    for number, layer in enumerate(cache.layers):
        sides: list[Side | None] = []
        for name, side in (("k", layer.k), ("v", layer.v)):
            if side is None:
                sides.append(None)
                continue
            codec = recipe.codec(number, len(cache), name, side.dim, _exact_dtype(side))
            if codec == side.codec:
                sides.append(_with_window(side, recipe.window, f"layers[{number}].{name}"))
            elif codec.same_codes(side.codec):
                with own_modes(side.device):
                    repacked = side.repacked(codec)
                sides.append(_with_window(repacked, recipe.window, f"layers[{number}].{name}"))
            else:
                packed = _packed(side.unpack(torch.float32), codec, recipe.window, f"layers[{number}].{name}")
                sides.append(replace(packed, tail=_narrowed(packed.tail, side.tail.dtype)))
        layers.append(replace(layer, k=sides[0], v=sides[1]))
        if progress:
            progress(number + 1, len(cache))
    return replace(cache, layers=tuple(layers), recipe=recipe.text)


def _exact_dtype(side: Side) -> str:
    """The narrowest raw dtype that holds every value of a side as it decodes."""
    dtypes = {RAW_NAMES[side.tail.dtype]} if side.tail.shape[2] or not side.pages else set()
    if side.pages:
        dtypes.add(side.codec.dtype if isinstance(side.codec, Raw) else "fp32")
    return next(name for name in HOLDS if dtypes <= set(HOLDS[name]))


def _narrowed(tail: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 tail in ``dtype``, or as it is where ``dtype`` would round it."""
    narrow = tail.to(dtype)
    return tail if is_rounded(tail, narrow) else narrow


def _check_length(recipe: Recipe) -> None:
    """Raise InvalidParameter for a recipe that no header can hold."""
    try:
        check_string("recipe", recipe.text)
    except (InvalidHeader, LimitExceeded) as error:
        raise InvalidParameter(str(error)) from None


def _with_window(side: Side, window: int, where: str) -> Side:
    """The side at another window: what its tail may no longer hold is encoded, as ``pack`` would."""
    if window == side.window:
        return side
    tokens = side.tail.shape[2]
    ready = tokens - tokens % window if window else tokens
    if not ready:
        return replace(side, window=window)
    with own_modes(side.device):
        before = side.pages[-1].streams if side.pages else None
        page = Page(side.codec, ready, encode(side.codec, side.tail[:, :, :ready], where, before))
        return replace(side.followed_by(page, side.tail[:, :, ready:].clone()), window=window)


def _pack_side(x: torch.Tensor | None, recipe: Recipe, layer: int, layers: int, side: str) -> Side | None:
    if x is None:
        return None
    where = f"layers[{layer}].{side}"
    try:
        codec = recipe.codec(layer, layers, side, x.shape[3], RAW_NAMES[x.dtype])
    except InvalidParameter as error:
        raise InvalidParameter(f"{where}: {error}") from None
    return _packed(x, codec, recipe.window, where)


def _packed(x: torch.Tensor, codec: Codec, window: int, where: str) -> Side:
    """A side of ``x``, encoded by ``codec`` but for the tail that ``window`` leaves."""
    tokens = x.shape[2]
    # With a residual window the newest tokens stay raw; without one everything is packed, a partial last group included.
    packed = tokens - tokens % window if window else tokens
    with own_modes(x.device):
        if codec.id != "raw":
            check_finite(x[:, :, packed:], packed, where)
        pages = (Page(codec, packed, encode(codec, x[:, :, :packed], where)),) if packed else ()
        return Side(codec, pages, x[:, :, packed:].clone(), window)


def _check_pair(pair: Pair, where: str) -> None:
    for name, x in zip("kv", pair, strict=True):
        if x is None:
            continue
        check_tensor(x, f"{where}.{name}")
        if not x.shape[0] or not x.shape[1]:
            raise InvalidShape(f"{where}.{name}: shape {list(x.shape)}; there is at least one sequence and one head")
    k, v = pair
    if k is not None and v is not None and k.shape[:3] != v.shape[:3]:
        raise InvalidShape(f"{where}: k is {list(k.shape)} and v is {list(v.shape)}; batch, kv_head and token agree")
