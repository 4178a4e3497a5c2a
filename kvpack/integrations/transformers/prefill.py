"""prefill: compute a prompt into a KvpackCache in passes that a store can resume from."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from kvpack.cache_names import over
from kvpack.formats.arguments import integer, shown
from kvpack.formats.errors import InvalidParameter, InvalidShape

from .cache import KvpackCache
from .models import execution_device
from .prompts import token_ids_of

if TYPE_CHECKING:
    import os

    from kvpack.cache.cache import Cache
    from kvpack.coding.recipes import Recipe

EVERY = 2048
"""The tokens of a pass."""


def prefill(
    model: torch.nn.Module, token_ids: Any, contents: Cache | str | os.PathLike[str] | Recipe, *, every: int = EVERY, **options: Any
) -> KvpackCache:
    """Compute ``token_ids`` ``[batch, token]`` into a KvpackCache for ``kvpack.Store.save``, in passes of up to ``every`` tokens.

    ``contents`` is a recipe, or a packed cache of the first tokens, as ``Store.load`` gives it: only the others are computed. Passes end
    at multiples of ``every``, counted from the first token, and at the last token. ``options`` are those of ``KvpackCache``.

    Layers with a sliding window keep all tokens, so that a store takes every chunk. The model gets no other arguments than token ids.
    ``generate`` goes on from the cache with these ids and at least one more.

    Raises InvalidDtype or InvalidShape for anything but token ids, InvalidParameter where the cache holds other ids or as many tokens,
    and what KvpackCache raises.
    """
    every = integer(every, "every")
    if every < 1:
        raise InvalidParameter(f"every is {shown(every)}, expected the tokens of a pass, from 1")
    ids = token_ids_of(token_ids)
    cache = KvpackCache(model, contents, **{"keep_all": True, **options})
    start = cache.get_seq_length()
    if ids.shape[1] <= start:
        raise InvalidShape(f"token_ids has {ids.shape[1]} tokens, and the cache holds {start}: give those and at least one that follows")
    device, arguments = execution_device(model), _arguments(model, cache)
    try:
        cache.passes.check_ids(ids, ids.shape[1] - start)
        with torch.no_grad():
            while start < ids.shape[1]:
                stop = min(ids.shape[1], (start // every + 1) * every)
                model(ids[:, start:stop].to(device), **arguments)
                start = stop
    except BaseException:
        cache.release()
        raise
    return cache


def _arguments(model: torch.nn.Module, cache: KvpackCache) -> dict[str, Any]:
    """The arguments of passes into ``cache`` that compute no more than it needs."""
    given: dict[str, Any] = {**over(model, cache), "use_cache": True}
    return {**given, "logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else given
