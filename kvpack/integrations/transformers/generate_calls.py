"""Wrappers of those methods of a model that ``generate`` calls. They report the calls to the model's KvpackCaches."""

from __future__ import annotations

import copy
import inspect
import weakref
from contextlib import ExitStack
from typing import Any, NoReturn, Self

import torch
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache

from kvpack.cache_names import NAMES, cache_in
from kvpack.formats.errors import InvalidParameter

from .model_changes import ModelChange
from .model_state import check_accepts_cache
from .plain_attention import remember_copies


class GenerateWatch(ModelChange):
    """Wraps methods of one model so that caches receive all token ids passed to ``generate``. Forward passes receive only the ids after the
    cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        wrappers = [method(model) for method in _WATCHED if hasattr(type(model), method.name)]
        # Copied models have wrappers already.
        wrappers = [wrapper for wrapper in wrappers if not isinstance(wrapper.replaced, _WatchedMethod)]
        for wrapper in wrappers:
            setattr(model, wrapper.name, wrapper)
        # Only the model owns the wrappers: the methods that they replaced may be bound to it, and would keep it alive.
        self._wrappers = [weakref.ref(wrapper) for wrapper in wrappers]

    def undo(self) -> None:
        """Remove the wrappers, unless the user has replaced them."""
        model = self.module()
        for wrapper in filter(None, (reference() for reference in self._wrappers)):
            if model is not None and vars(model).get(wrapper.name) is wrapper:
                delattr(model, wrapper.name)
                if wrapper.replaced is not None:
                    setattr(model, wrapper.name, wrapper.replaced)


def pass_trackers(past: Any) -> list[Any]:
    return [cache.passes for cache in _kvpack_caches(past)]


def caches_in(past: Any) -> list[TransformersCache]:
    if isinstance(past, EncoderDecoderCache):
        return [past.self_attention_cache, past.cross_attention_cache]
    return [past] if isinstance(past, TransformersCache) else []


def _kvpack_caches(past: Any) -> list[Any]:
    return [cache for cache in caches_in(past) if hasattr(cache, "passes")]


def _token_pass_trackers(past: Any) -> list[Any]:
    """Return the ``pass_trackers`` of the cache that contains ``generate``'s tokens.

    In an encoder-decoder cache, this is the cache for self-attention. The other one contains the encoder's tokens.
    """
    return pass_trackers(past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past)


def refuse_pickled_model() -> NoReturn:
    """Raise InvalidParameter: a model with hooks of a KvpackCache or of ``recording`` cannot be pickled."""
    raise InvalidParameter(
        "the model has hooks of a KvpackCache or of recording(), which cannot be pickled: call release() on the cache, or leave the with "
        "block, before saving the model. torch.save(model.state_dict(), path) always works"
    )


class _WatchedMethod:
    """A wrapper of a method of ``model`` that reports calls to the model's KvpackCaches. A copied model gets its own wrapper."""

    name: str

    def __init__(self, model: PreTrainedModel) -> None:
        self._owner = weakref.ref(model)
        self.replaced = vars(model).get(self.name)
        """The method of this instance that the wrapper calls, such as PEFT's, or None for the method of the model's class."""
        # generate inspects the signature.
        self.__signature__ = inspect.signature(getattr(model, self.name))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo.get(id(self._owner()))
        if copied is None:
            return self
        remember_copies(memo)
        wrapper = type(self)(copied)
        wrapper.replaced = copy.deepcopy(self.replaced, memo)
        return wrapper

    def __reduce__(self) -> NoReturn:
        refuse_pickled_model()

    def _live_model(self) -> PreTrainedModel:
        alive = self._owner()
        assert alive is not None
        return alive

    def _call_wrapped(self, *args: Any, **kwargs: Any) -> Any:
        alive = self._live_model()
        return getattr(type(alive), self.name)(alive, *args, **kwargs) if self.replaced is None else self.replaced(*args, **kwargs)


class _WatchedGenerate(_WatchedMethod):
    """A wrapper of ``generate`` that lets only one thread at a time generate into a cache."""

    name = "generate"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        alive, trackers = self._live_model(), pass_trackers(cache_in(kwargs))
        if trackers:
            # While PEFT's wrapper generates, the model calls the wrapper's prepare_inputs_for_generation.
            wrapper = getattr(alive.prepare_inputs_for_generation, "__self__", None)
            check_accepts_cache(wrapper, continues=any(passes.record.tokens for passes in trackers))
        with ExitStack() as calls:
            for passes in trackers:
                calls.enter_context(passes.generating())
                # PEFT puts its own methods in place of the wrappers, and leaves them there.
                calls.callback(GenerateWatch(alive).undo)
            return self._call_wrapped(*args, **kwargs)


class _WatchedPrepareInputs(_WatchedMethod):
    """A wrapper of ``prepare_inputs_for_generation`` that checks token ids, and repeats the cache's sequences if there are more rows.

    If the RoPE frequencies change at the next token, the model omits the cache to recompute all tokens. The wrapper then empties it and
    passes it back in.
    """

    name = "prepare_inputs_for_generation"

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        alive, past = self._live_model(), cache_in(kwargs)
        for passes in _token_pass_trackers(past):
            passes.check_generate(alive, input_ids, kwargs)
        if kwargs.get("is_first_iteration", False):
            for cache in _kvpack_caches(past):
                cache.expand(input_ids.shape[0])
        prepared = self._call_wrapped(input_ids, *args, **kwargs)
        caches = _kvpack_caches(past)
        if caches and isinstance(prepared, dict) and cache_in(prepared) is None:
            for cache in caches:
                cache.begin_again(type(alive).__name__)
            prepared[next(name for name in NAMES if kwargs.get(name) is past)] = past
        return prepared


class _WatchedPrefill(_WatchedMethod):
    """A wrapper of ``_prefill`` that checks all token ids first, because ``_prefill`` may process a prompt in chunks."""

    name = "_prefill"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.__signature__.bind(*args, **kwargs).arguments
        ids, config, arguments = bound["input_ids"], bound["generation_config"], bound["model_kwargs"]
        with ExitStack() as chunks:
            if config.prefill_chunk_size is not None:
                for passes in _token_pass_trackers(cache_in(arguments)):
                    chunks.enter_context(passes.check_chunks(ids, arguments, getattr(config, "_mask_length", -1)))
            return self._call_wrapped(*args, **kwargs)


class _WhisperSegments(_WatchedMethod):
    """A wrapper of ``generate_with_fallback``, which Whisper calls for each segment of a recording, always with the same cache.

    It clears the cache before each segment, because segments do not depend on each other.
    """

    name = "generate_with_fallback"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.__signature__.bind(*args, **kwargs).arguments
        past = cache_in(bound["kwargs"])
        if _token_pass_trackers(past):
            if len(bound["temperatures"]) > 1:
                raise InvalidParameter(
                    "generate may compute the segment again for each temperature, and the cache would still hold the tokens of the first "
                    "attempt: pass one temperature, or omit the cache"
                )
            if bool(bound["seek"].any()):
                past.reset()
        return self._call_wrapped(*args, **kwargs)


class _WatchedPreparePositions(_WatchedMethod):
    """A wrapper of ``_prepare_position_ids_for_generation``, so that positions continue from the cache, not from the model's previous
    prompt.
    """

    name = "_prepare_position_ids_for_generation"

    def __call__(self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
        for passes in _token_pass_trackers(cache_in(model_kwargs)):
            passes.prepare_positions({"inputs": inputs_tensor, **model_kwargs})
        return self._call_wrapped(inputs_tensor, model_kwargs)


class _WatchedPrepareCache(_WatchedMethod):
    """A wrapper of ``_prepare_cache_for_generation`` that restores the caller's cache.

    Some models replace an encoder-decoder cache with their own.
    """

    name = "_prepare_cache_for_generation"

    def __call__(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        past = cache_in(model_kwargs)
        if not isinstance(past, EncoderDecoderCache) or not hasattr(past.cross_attention_cache, "passes"):
            return self._call_wrapped(generation_config, model_kwargs, *args, **kwargs)
        # Mark the cache as updated, so that transformers does not replace it.
        updated, past.is_updated = past.is_updated, {0: True}
        try:
            return self._call_wrapped(generation_config, model_kwargs, *args, **kwargs)
        finally:
            past.is_updated = updated


_WATCHED = (
    _WatchedGenerate,
    _WatchedPrepareInputs,
    _WatchedPreparePositions,
    _WatchedPrepareCache,
    _WatchedPrefill,
    _WhisperSegments,
)
