"""The part of a cache that a prompt can reuse: their common prefix of token ids."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from kvpack.cache.cache import Cache
from kvpack.file.inputs import IDS_LEFT_OUT, PADDED, ROWS_DIFFER, Inputs
from kvpack.formats.arguments import describe
from kvpack.formats.errors import InvalidParameter, InvalidType, KvpackWarning, OutOfBounds
from kvpack.identity.rope import max_uniform_length

from .passes import OTHER_FREQUENCIES
from .record import CHANGED, known_id_rows, visible_tokens


def common_tokens(cache: Cache, prompt: Any) -> int:
    """Return the length, in tokens, of the common prefix of ``cache`` and ``prompt``, ``[batch, token]``, over all rows.

    At least one token of the prompt remains to be computed. Raises InvalidParameter or InvalidType unless ``prompt`` has one row of token
    ids for each sequence of the cache. Raises InvalidParameter if the cache's ids are unknown, or if its first token depends on other
    inputs.
    """
    ids = as_token_ids(prompt)
    batches = {side.batch for layer in cache for side in layer.sides.values()}
    if batches - {ids.shape[0]}:
        raise InvalidParameter(
            f"the prompt has {ids.shape[0]} rows, but the cache holds {max(batches)} sequences: pass one row per sequence, "
            "or select sequences with Cache.select"
        )
    if not cache.tokens:
        return 0
    inputs = cache.inputs
    if inputs is None or (not inputs.tokens and not inputs.undetermined):
        raise InvalidParameter(
            "the cache does not hold the token ids that it was computed from, so no prompt can be compared with it: "
            "save a KvpackCache of the model, or pack with inputs="
        )
    others = _undetermined_inputs(inputs)
    if 0 in others:
        raise InvalidParameter(f"{others[0]}: token ids do not determine the cache, so no prompt can be compared with it")
    cache_ids = known_id_rows(inputs)
    longest = min([cache_ids.shape[1], cache.tokens, ids.shape[1] - 1, *others])
    different = ids[:, :longest] != cache_ids[:, :longest]
    visible = visible_tokens(inputs, ids.shape[0], cache.tokens)
    if visible is not None:
        different &= visible[:, :longest]
    differing = different.any(0).nonzero()
    return int(differing[0]) if len(differing) else longest


def _undetermined_inputs(inputs: Inputs) -> dict[int, str]:
    """Return the inputs that token ids and a mask do not determine, keyed by the first position that they affect.

    Ids that differ between rows are omitted, because known ids are compared. Hidden padding is omitted, because the next pass must provide
    the mask.
    """
    notes = zip(inputs.undetermined, inputs.starts, strict=True)
    return {start: text for text, start in notes if not text.endswith(ROWS_DIFFER) and not (text.endswith(PADDED) and inputs.hidden)}


def check_rows_known(cache: Cache) -> None:
    """Raise InvalidParameter if the rows of a batch have different ids and some of these ids are unknown."""
    inputs = cache.inputs
    if inputs is not None and inputs.rows_are_unknown:
        text = next(text for text in inputs.undetermined if text.endswith((ROWS_DIFFER, IDS_LEFT_OUT)))
        hint = "pass each row's ids as prompt= to keep the tokens that match, or "
        if 0 in _undetermined_inputs(inputs):
            hint = ""
        raise InvalidParameter(
            f"{text}, but the file does not store the ids of each row, so kvpack cannot check that each row continues its own prompt: "
            f"{hint}use KvpackCache.of(dataclasses.replace(cache, inputs=None), model), which skips comparing ids and masks"
        )


def changes_since_computed(cache: Cache) -> str:
    """Explain how a cache's values have changed since passes computed them. Empty if they have not.

    No prompt can reuse a cache that has changed.
    """
    texts = cache.inputs.undetermined if cache.inputs is not None else ()
    return next((text for text in texts if text.endswith(CHANGED)), "")


def frequency_difference(cache: Cache, prompt: Any, config: Any) -> str:
    """Explain why the same token ids may have different keys in ``cache`` and in ``prompt``. Returns "" if they cannot.

    Some RoPE types (dynamic, longrope) choose frequencies based on the sequence length.
    """
    longest = max_uniform_length(config)
    for name, tokens in (("cache", cache.tokens), ("prompt", as_token_ids(prompt).shape[1])):
        if longest is not None and tokens > longest:
            return f"the {name} has {tokens} tokens, and above {longest} the model's RoPE uses different frequencies"
    inputs = cache.inputs or Inputs()
    # The cache may be the beginning of a long sequence whose other tokens were dropped.
    texts = (text for text, start in zip(inputs.undetermined, inputs.starts, strict=True) if not start and OTHER_FREQUENCIES in text)
    return next(texts, "")


def as_token_ids(prompt: Any) -> torch.Tensor:
    """Return ``prompt`` as int64 ``[batch, token]`` on the CPU. Raises InvalidType or InvalidParameter unless it contains token ids."""
    try:
        ids = torch.as_tensor(prompt, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        instead = "pass tokenizer(text)['input_ids']" if isinstance(prompt, str | Mapping) else error
        raise InvalidType(f"prompt is {describe(prompt)}, expected token ids, which are integers: {instead}") from None
    if ids.is_meta or ids.layout != torch.strided or ids.is_quantized:
        raise InvalidType(f"prompt is {describe(ids)} on {ids.device}, expected a dense tensor of token ids")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise InvalidType(f"prompt has dtype {ids.dtype}, expected token ids, which are integers")
    ids = ids.to(torch.int64)
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or not ids.numel():
        raise InvalidParameter(f"prompt has shape {list(ids.shape)}, expected token ids [batch, token], at least one in each row")
    return ids


def crop_to_prompt(past: Any, cache: Cache, prompt: Any, config: Any) -> None:
    """Keep only the tokens of ``past`` that ``prompt`` begins with. ``past`` continues the packed ``cache``.

    If a layer lacks some of these tokens, or if their keys would differ, no token is kept. Issues a KvpackWarning if some cannot be kept.
    ``config`` is the model's configuration, or None if there is no model.
    """
    tokens = 0
    other = changes_since_computed(cache)
    if not other and config is not None:
        other = frequency_difference(cache, prompt, config)
    if other:
        warnings.warn(f"no tokens of the cache are kept for the prompt: {other}", KvpackWarning, stacklevel=4)
    else:
        tokens = common_tokens(cache, prompt)
    try:
        if tokens and (remaining := past.rewind(tokens)) < tokens:
            kept_text = f"the first {remaining}" if remaining else "none"
            text = f"the prompt and the cache begin with the same {tokens} tokens, and {kept_text} of them are kept"
            warnings.warn(f"{text}: layers keep states, and have none after later tokens", KvpackWarning, stacklevel=4)
            tokens = remaining
    except (OutOfBounds, InvalidParameter) as error:
        text = f"the prompt and the cache begin with the same {tokens} tokens, and none of them are kept: {error}"
        warnings.warn(text, KvpackWarning, stacklevel=4)
        tokens = 0
    if not tokens:
        past.reset()
