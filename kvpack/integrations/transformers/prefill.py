"""The function ``prefill``, which computes a prompt into a KvpackCache in passes. A store can resume after each pass."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch

from kvpack.cache.cache import Cache
from kvpack.cache_names import cache_argument
from kvpack.coding.recipes import Recipe
from kvpack.formats.arguments import as_integer, describe
from kvpack.formats.errors import InvalidParameter
from kvpack.store.store import CHUNK_TOKENS

from .cache import KvpackCache, create_cache
from .hooks import outermost_model
from .models import execution_device
from .prompts import as_token_ids

DEFAULT_STEP = 4096
"""Default number of tokens per pass. After each pass, the states of a model that has states are kept for a store."""


def prefill(
    model: torch.nn.Module,
    token_ids: Any,
    contents: Cache | str | os.PathLike[str] | Recipe,
    *,
    every: int = DEFAULT_STEP,
    chunk: int = CHUNK_TOKENS,
    **options: Any,
) -> KvpackCache:
    """Compute the cache of a prompt in passes, for ``kvpack.Store.save``.

    Passes end at multiples of ``every`` and at the last token. Layers with a sliding window keep all tokens, so that a store gets every
    chunk. For a model with recurrent or convolution layers, the states after each pass are kept, and a store can resume after any of them.
    In this case, ``chunk`` must divide ``every``. The size of states does not depend on the number of tokens. It is 78 MB for
    Qwen3-Next-80B-A3B (bfloat16, with recurrent states in float32), as much as the keys and values of 3,200 tokens, and 305 MB for
    Falcon-H1-34B, as much as those of 2,100 tokens. If they are kept every 4,096 tokens, they add 19 and 74 KB per token. Passes of other
    lengths compute states and logits that differ by rounding.

    Args:
        model: A transformers model. It receives no arguments other than token ids.
        token_ids: Token ids ``[batch, token]``.
        contents: A recipe, or a packed cache of the first tokens, as ``Store.load`` returns it. Only the remaining tokens, if any, are
            computed.
        every: Maximum number of tokens per pass.
        chunk: Tokens per chunk of the store.
        **options: As for KvpackCache.

    Returns:
        A KvpackCache. ``generate`` continues from it with these ids and at least one more id.

    Raises:
        InvalidType: ``token_ids`` are not token ids.
        InvalidParameter: ``token_ids`` does not begin with all token ids of the cache.

    Also raises the same errors as KvpackCache.

    >>> cache = kvpack.prefill(model, torch.arange(100)[None], "octopus-4", chunk=32)
    >>> cache.packed.tokens
    100
    """
    for name, number in (("every", every), ("chunk", chunk)):
        if as_integer(number, name) < 1:
            raise InvalidParameter(f"{name} is {describe(number)}, expected a positive number of tokens")
    ids = as_token_ids(token_ids)
    cache = create_cache(model, contents, **{"keep_all": True, **options})
    try:
        held = cache.get_seq_length()
        if ids.shape[1] < held:
            raise InvalidParameter(f"token_ids has {ids.shape[1]} tokens, but the cache holds {held}: pass at least those {held} tokens")
        if cache.keeps_states and every % chunk:
            raise InvalidParameter(f"every={every} skips the ends of chunks, where a store needs states: pass a multiple of {chunk}")
        compute_missing(cache, model, ids, every, chunk)
    except BaseException:
        cache.release()
        raise
    return cache


def compute_missing(cache: KvpackCache, model: torch.nn.Module, ids: torch.Tensor, every: int, chunk: int) -> None:
    """Run ``model`` over the tokens of ``ids``, ``[batch, token]``, that are not in ``cache`` yet, in the same passes as ``prefill``.

    Raises InvalidParameter if ``ids`` does not begin with the ids in the cache.
    """
    start = cache.get_seq_length()
    if ids.shape[1] == start:
        cache.passes.check_first_ids(ids)
        return
    cache.passes.check_ids(ids, ids.shape[1] - start)
    device, arguments = execution_device(model), _arguments(model, cache)
    with torch.no_grad():
        for stop in _pass_ends(start, ids.shape[1], every, chunk if cache.keeps_states else None):
            model(ids[:, start:stop].to(device), **arguments)
            cache.snapshot_states()
            start = stop


def _pass_ends(start: int, stop: int, every: int, chunk: int | None) -> list[int]:
    """Return the end of each pass over tokens ``[start, stop)``, in ascending order."""
    ends = {*range((start // every + 1) * every, stop, every), stop}
    if chunk is not None and stop // chunk * chunk > start:
        ends.add(stop // chunk * chunk)
    return sorted(ends)


def _arguments(model: torch.nn.Module, cache: KvpackCache) -> dict[str, Any]:
    """Return arguments for passes that compute only what ``cache`` needs, for example only the last logits."""
    model = outermost_model(model)
    result: dict[str, Any] = {**cache_argument(model, cache), "use_cache": True}
    return {**result, "logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else result
