"""Checks that a cache, its token ids and the chunk size match a store's identity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpack.coding.recipes import canonical_recorded_text, parse_recipe
from kvpack.file.inputs import WITHOUT_IDS, Inputs
from kvpack.formats.errors import InvalidParameter
from kvpack.identity.canonical_text import weights_kind

from .keys import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.cache.cache import Cache
    from kvpack.cache.states import States
    from kvpack.identity.identity import Identity

_ANY_DIM = 128
"""A head dim that every codec supports. The size of token groups does not depend on the head dim."""


def check_cache(cache: Any, identity: Identity) -> None:
    """Raise InvalidParameter unless ``cache`` is a packed cache that can be stored under ``identity``.

    It must have the model and the recipe of ``identity``, and contain one whole sequence. Every layer must end at the cache's last token.
    """
    from kvpack.cache.cache import Cache

    model = identity.header_model
    if not isinstance(cache, Cache):
        raise InvalidParameter(f"a {type(cache).__name__} is not a packed cache: create one with kvpack.pack")
    if cache.start:
        raise InvalidParameter(
            f"the cache starts at position {cache.start}, but a prefix must start at 0: save a cache from its first token "
            "on"
        )
    if canonical_recorded_text(cache.recipe) != identity.recipe:
        raise InvalidParameter(f"the cache's recipe is {cache.recipe!r}, but the store's is {identity.recipe!r}: convert the cache")
    digest_kind = weights_kind(cache.model.get("weights", ""))
    same_weights_kind = bool(digest_kind and identity.weights_of_kind(digest_kind))
    for name, value in cache.model.items():
        if name == "name" and same_weights_kind:
            # The weights' digests are compared instead: the same weights may be in another folder.
            continue
        other = model.get(name, value)
        if name == "weights" and digest_kind:
            # Digests of different kinds, or a digest and a revision, cannot be compared.
            other = identity.weights_of_kind(digest_kind) or value
        if other != value:
            raise InvalidParameter(
                f"{name} of the cache's model is {value!r}, but the store's identity has {other!r}: open a store for this model"
            )
    for index, layer in enumerate(cache):
        for name, side in layer.sides.items():
            if side.batch != 1:
                raise InvalidParameter(
                    f"layers[{index}].{name} holds {side.batch} sequences, but a prefix has one: save each sequence separately"
                )
        if layer.states and not identity.keeps_states:
            raise InvalidParameter(
                f"layers[{index}] has the states {' and '.join(layer.states)}, but the store's identity is for a model without states: "
                "create the identity with kvpack.Identity.of(model, recipe), or pass keeps_states=True"
            )
        if layer.sides and layer.seen_tokens != cache.tokens:
            raise InvalidParameter(
                f"layers[{index}] ends at token {layer.seen_tokens}, but the cache ends at {cache.tokens}: "
                "pass a cache with all tokens in every layer"
            )


def check_ids(cache: Cache, ids: bytes) -> None:
    """Raise InvalidParameter if ``ids`` differ from the token ids in the cache. A cache without ids must have one token per id."""
    count, cache_ids = len(ids) // ID_BYTES, b"" if cache.inputs is None else cache.inputs.token_ids
    shared_bytes = min(len(ids), len(cache_ids))
    if cache_ids[:shared_bytes] != ids[:shared_bytes]:
        stored, passed = (memoryview(data)[:shared_bytes].cast("I").tolist() for data in (cache_ids, ids))
        token = next(index for index, pair in enumerate(zip(stored, passed, strict=True)) if pair[0] != pair[1])
        raise InvalidParameter(
            f"token {token} of the cache was computed from id {stored[token]}, but token_ids[{token}] is {passed[token]}: pass the ids "
            "that the cache was computed from"
        )
    if count != cache.tokens and len(cache_ids) != cache.tokens * ID_BYTES:
        raise InvalidParameter(
            f"token_ids has {count} ids, but the cache has {cache.tokens} tokens: expected one id for each token. If both begin with the "
            "same tokens, truncate the longer one, as in token_ids[:n] or cache[:, :n]. If a sliding window has dropped the first tokens, "
            "run the prompt through kvpack.prefill, which keeps them"
        )


def usable_states(cache: Cache, chunk: int, packed: int) -> dict[int, States]:
    """Return the states of ``cache`` at chunk boundaries within its first ``packed`` tokens, by position.

    Raises InvalidParameter if there are whole chunks, but no states at any boundary.
    """
    from kvpack.cache.cache import all_states

    known = all_states(cache)
    result = {position: states for position, states in known.items() if not position % chunk and 0 < position <= packed}
    if not result and packed >= chunk:
        held = f"only after token {' and '.join(map(str, sorted(known)))}" if known else "none"
        raise InvalidParameter(
            f"the model keeps states, but the cache has {held}. A store needs states at multiples of {chunk} tokens: run the prompt "
            f"through kvpack.prefill(..., chunk={chunk}), or in passes that end there, each followed by KvpackCache.snapshot_states()"
        )
    return result


def check_length(cache: Cache, longest: int | None) -> None:
    """Raise InvalidParameter if ``cache`` has more than ``longest`` tokens, because RoPE uses different frequencies for such a cache."""
    if longest is not None and max(cache.tokens, cache.computed) > longest:
        held = f"holds {cache.tokens} tokens" if cache.tokens > longest else f"was sliced from {cache.computed} tokens without inputs="
        raise InvalidParameter(
            f"the cache {held}: the model's rotary embedding uses different frequencies for sequences of more than "
            f"{longest} tokens, so keys depend on the length of the whole sequence and cannot be stored by token ids: save caches of at "
            f"most {longest} tokens"
        )


def require_input_digests(cache: Cache, digests: Sequence[bytes], chunk: int) -> None:
    """Raise InvalidParameter if a chunk depends on more than token ids, but has no digest in ``digests``."""
    if cache.inputs is None:
        return
    for text, start in zip(cache.inputs.undetermined, cache.inputs.starts, strict=True):
        index = start // chunk
        if index < len(digests) and not digests[index]:
            if text.endswith(WITHOUT_IDS):
                raise InvalidParameter(
                    f"{text}, so token_ids cannot be compared with the ids they were computed from: if you know all ids, "
                    "use dataclasses.replace(cache, inputs=kvpack.Inputs(numpy.array(ids, '<u4').tobytes()))"
                )
            raise InvalidParameter(
                f"{text}: token ids alone do not determine the cache's keys and values. Pass inputs= with one digest "
                f"for each chunk of {chunk} tokens: the digest of its other inputs, or b'' if it has none. Chunk {index} needs a digest"
            )


def loaded_inputs(ids: bytes, digests: Sequence[bytes], chunk: int) -> Inputs:
    """Return the ``Cache.inputs`` of a cache loaded for the token ``ids``. Saving the cache again requires the same ``digests``."""
    starts = [index * chunk for index in range(len(ids) // ID_BYTES // chunk) if digests[index]]
    texts = (f"tokens {start} to {start + chunk - 1} were stored with a digest of other inputs" for start in starts)
    return Inputs(ids, tuple(texts), tuple(starts))


def check_groups(identity: Identity, chunk: int) -> None:
    """Raise InvalidParameter unless every codec of the recipe splits ``chunk`` tokens into whole token groups."""
    for rule in parse_recipe(identity.recipe).rules:
        for side in rule.sides:
            group = rule.codec(_ANY_DIM, side).group_tokens
            if chunk % group:
                raise InvalidParameter(
                    f"chunk is {chunk}, but {side}={rule.codec_id} encodes {group} tokens together: use a multiple of {group}"
                )
