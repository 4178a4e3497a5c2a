"""Checks of the arguments of a KvpackCache. Each message suggests what to write instead."""

from __future__ import annotations

import os
from typing import Any

import torch

from kvpack.cache.cache import Cache, check_packed
from kvpack.formats.arguments import check_flag, describe
from kvpack.formats.errors import InvalidParameter, InvalidType


def check_flags(*, keep_all: bool, **options: bool | None) -> None:
    """Raise InvalidParameter unless ``keep_all`` is a bool and each option is a bool or None."""
    check_flag(keep_all, "keep_all")
    for name, flag in options.items():
        if flag is not None:
            check_flag(flag, name)


def checked_recipe(model: Any, recipe: Any, config: Any) -> Any:
    """Check the arguments of an empty cache, and return its recipe. Raises InvalidType or InvalidParameter."""
    if isinstance(model, Cache) or isinstance(recipe, Cache):
        raise InvalidType("KvpackCache(model, recipe) creates an empty cache: use KvpackCache.of(cache, model) to continue a packed one")
    if model is None and config is None:
        raise InvalidType("the model is None: use KvpackCache(model, recipe), or KvpackCache(config=model.config, recipe=...)")
    if model is not None and config is not None:
        raise InvalidParameter("model and config were both passed, but a model has its own config: omit one of them")
    if model is not None and not isinstance(model, torch.nn.Module):
        loads = "AutoModelForCausalLM.from_pretrained(folder) loads a model, and KvpackCache.load(path, model) continues a file"
        raise InvalidType(f"the model is {describe(model)}, expected a transformers model: {loads}")
    if recipe is None:
        raise InvalidParameter("KvpackCache(model) needs a recipe, such as KvpackCache(model, 'octopus-3')")
    return recipe


def check_cache(cache: Any, model: Any) -> None:
    """Raise InvalidType unless ``cache`` is a packed cache and ``model`` is a model or None."""
    if cache is None:
        raise InvalidType(
            "the cache is None, which Store.load returns if nothing is stored: use KvpackCache(model, recipe), which creates an empty cache"
        )
    if isinstance(cache, torch.nn.Module):
        raise InvalidType("the first argument is a model: use KvpackCache.of(cache, model), or KvpackCache(model, recipe)")
    if isinstance(cache, str | os.PathLike):
        raise InvalidType(f"{describe(cache)} is not a packed cache: to continue from a file, use KvpackCache.load(path, model)")
    check_packed(cache, "KvpackCache.of({}, model)")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise InvalidType(f"model is {describe(model)}, expected the transformers model that will continue from the cache")


def check_model_of_file(path: Any, model: Any) -> None:
    """Raise InvalidType unless ``model``, the second argument of ``KvpackCache.load``, is a model. ``path`` is the first argument."""
    if not isinstance(model, torch.nn.Module):
        swapped = isinstance(path, torch.nn.Module)
        instead = "pass the path first, then the model" if swapped else "AutoModelForCausalLM.from_pretrained(folder) loads one"
        raise InvalidType(f"model is {describe(model)}, expected a transformers model: {instead}")
