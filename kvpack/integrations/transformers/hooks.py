"""Hooks on a model that report forward passes to its KvpackCaches, and record passes over transformers' own caches."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache

from kvpack.cache.packing import dense_layers
from kvpack.cache_names import cache_in, output_cache
from kvpack.formats.errors import InvalidParameter

from . import compiled as compiled_calls
from .computed_checksums import ComputedChecksums
from .generate_calls import GenerateWatch, caches_in, pass_trackers, refuse_pickled_model
from .model_changes import Lease, ModelChange, lease
from .model_state import iterate_modules
from .passes import Pass, named_arguments
from .record import Record
from .sources import EncoderCalls, check_sources, encoder_decoder_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpack.cache.states import States
    from kvpack.file.inputs import Inputs
    from kvpack.file.sources import Sources

    from .compiled import CompiledCalls

class Hooks(ModelChange):
    """The hooks of one model, which is the outermost transformers model if it contains any. They do not reference caches."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.recordings: list[Recording] = []
        inner_models = models_in(model)
        self.inside = [weakref.ref(module) for module in inner_models]
        self.encoder_calls = EncoderCalls()
        state = _HooksReference(self)
        # A wrapper, such as PEFT's, may call the model's forward directly, which skips its hooks, but not those of models inside it.
        self._handles: list[Any] = []
        for number, module in enumerate(inner_models):
            self._handles.append(module.register_forward_pre_hook(partial(_before_call, state, number), with_kwargs=True))
            self._handles.append(module.register_forward_hook(partial(_after_call, state, number), with_kwargs=True, always_call=True))
        for encoder in encoder_decoder_parts(inner_models, "get_encoder"):
            self._handles.append(encoder.register_forward_hook(partial(_after_encoder, state), with_kwargs=True))
        # The decoders of FSMT are not transformers models.
        for decoder in encoder_decoder_parts(inner_models, "get_decoder"):
            if not isinstance(decoder, PreTrainedModel):
                self._handles.append(decoder.register_forward_pre_hook(partial(_before_decoder, state), with_kwargs=True))
        self._watches = [lease(GenerateWatch, module) for module in inner_models]

    @staticmethod
    def of(model: torch.nn.Module) -> Lease[Hooks]:
        """Return a lease on the hooks of ``model``. A wrapper of a transformers model shares the model's hooks."""
        return lease(Hooks, next(_models_in(model), model))

    def undo(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._watches = []


class _HooksReference:
    """A weak reference to a model's hooks. Pickling it raises an error that explains why the model cannot be pickled."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = weakref.ref(hooks)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        refuse_pickled_model()

    def recordings(self) -> list[Recording]:
        hooks = self._hooks()
        return [] if hooks is None else hooks.recordings

    def record_encoder(self, arguments: dict[str, Any], output: Any) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.encoder_calls.record_call(arguments, output)

    def sources(self, arguments: dict[str, Any]) -> Sources | None:
        """Return the digests of the encoder input that a call of the decoder uses, or None for any other call."""
        hooks = self._hooks()
        return None if hooks is None else hooks.encoder_calls.sources(arguments.get("encoder_hidden_states"))


def _before_call(hooks: _HooksReference, module_index: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    arguments = named_arguments(module, args, kwargs)
    past = cache_in(arguments)
    compiled = _compiled_calls(past, arguments) if torch.compiler.is_dynamo_compiling() else None
    if compiled is not None:
        compiled.compiled_begin(module_index, arguments)
        return
    for passes in [*pass_trackers(past), *hooks.recordings()]:
        passes.enter(module, arguments)
    _check_source(hooks, past, arguments)


def _check_source(hooks: _HooksReference, past: Any, arguments: dict[str, Any]) -> None:
    """Record the encoder input of a call over an encoder-decoder cache, and check that the cache was computed from the same input."""
    if isinstance(past, EncoderDecoderCache) and (sources := hooks.sources(arguments)) is not None:
        for passes in [*pass_trackers(past), *hooks.recordings()]:
            passes.record_sources(sources)
        check_sources(pass_trackers(past), sources)


def _before_decoder(hooks: _HooksReference, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    arguments = named_arguments(module, args, kwargs)
    _check_source(hooks, cache_in(arguments), arguments)


def _after_encoder(hooks: _HooksReference, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    hooks.record_encoder(named_arguments(module, args, kwargs), output)


def _after_call(
    hooks: _HooksReference, module_index: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    arguments = named_arguments(module, args, kwargs)
    past = cache_in(arguments)
    compiled = _compiled_calls(past, arguments) if torch.compiler.is_dynamo_compiling() else None
    if compiled is not None:
        compiled.compiled_end(module_index)
        return
    for passes in [*pass_trackers(past), *hooks.recordings()]:
        passes.leave(module, arguments, output)


class PassStack:
    """The nested calls of a forward pass over one cache. ``current`` is the pass to which they belong."""

    def __init__(self) -> None:
        self.current: Pass | None = None
        self.has_encoder = False
        """True if the call is over an encoder-decoder cache, which has two parts."""
        self._inside: list[torch.nn.Module] = []

    def __deepcopy__(self, memo: object) -> PassStack:
        return PassStack()

    @property
    def is_outermost(self) -> bool:
        return len(self._inside) == 1

    @property
    def is_idle(self) -> bool:
        return not self._inside

    def is_outermost_call(self, module: torch.nn.Module) -> bool:
        """Return True if the call of ``module`` is the only call in progress."""
        return len(self._inside) == 1 and self._inside[0] is module

    def enter(self, module: torch.nn.Module, arguments: dict[str, Any], start: int) -> Pass | None:
        """Record the beginning of a call over a cache of ``start`` tokens. Returns the previous pass if its end was not recorded."""
        # A failed or interrupted compiled call never reports its end.
        if module in self._inside:
            del self._inside[self._inside.index(module) :]
        self._inside.append(module)
        if len(self._inside) > 1:
            if self.current is not None:
                self.current.record_positions(arguments)
            return None
        self.has_encoder = isinstance(cache_in(arguments), EncoderDecoderCache)
        unfinished, self.current = self.current, None
        self.current = Pass(module, arguments, start, self.has_encoder)
        return unfinished

    def leave(self, module: torch.nn.Module) -> Pass | None:
        """Record the end of a call. If it was the outermost call of its pass, return the pass."""
        if self._inside and self._inside[-1] is module:
            self._inside.pop()
        if self._inside:
            return None
        ended, self.current = self.current, None
        return ended


class Recording:
    """The record of a model's passes over transformers' own caches."""

    def __init__(self) -> None:
        self._passes = PassStack()
        self._records: weakref.WeakKeyDictionary[TransformersCache, tuple[Record, ComputedChecksums]] = weakref.WeakKeyDictionary()

    def enter(self, module: torch.nn.Module, arguments: dict[str, Any]) -> None:
        past = cache_in(arguments)
        for cache in caches_in(past) if self._passes.is_idle else ():
            record, computed = self._find_record(cache)
            if record.tokens and not (computed.unchanged(cache) and _token_count(cache) == record.tokens):
                _update_record(record, computed, cache, _token_count(cache))
        self._passes.enter(module, arguments, _token_count(past))

    def record_sources(self, sources: Sources) -> None:
        if self._passes.current is not None:
            self._passes.current.sources = sources

    def leave(self, module: torch.nn.Module, arguments: dict[str, Any], output: Any) -> None:
        ended = self._passes.leave(module)
        past = cache_in(arguments)
        if past is None:
            past = output_cache(output)
        if ended is None:
            return
        for cache in caches_in(past):
            record, computed = self._find_record(cache)
            tokens = _token_count(cache)
            if tokens < record.tokens:
                # A hook has dropped tokens during the pass.
                _update_record(record, computed, cache, tokens)
                continue
            if ended.start > record.tokens:
                record.add(ended.start - record.tokens, None)
            record.add(tokens - record.tokens, None if output is None else ended)
            computed.add(cache, tokens)

    def _find_record(self, cache: TransformersCache) -> tuple[Record, ComputedChecksums]:
        if cache not in self._records:
            self._records[cache] = Record(None, 0), ComputedChecksums()
        return self._records[cache]

    def inputs(self, past_key_values: TransformersCache) -> Inputs:
        """Return the inputs of the tokens of ``past_key_values``, for the argument ``inputs`` of ``kvpack.pack``.

        They describe the keys and values that passes computed. If the cache has changed since, other than by dropping its newest tokens or
        selecting rows, the inputs are marked as undetermined. Raises InvalidParameter for a cache that no recorded pass used.
        """
        record, computed = self._known_record(past_key_values)
        inputs = record.inputs
        assert inputs is not None
        return replace(inputs, sums=computed.checksums_before(record.tokens))

    def snapshot_states(self, past_key_values: TransformersCache) -> None:
        """Copy the states of recurrent and convolution layers after the newest token to host memory."""
        record, computed = self._known_record(past_key_values)
        states = tuple({name: state.cpu() for name, state in layer.states.items()} for layer in dense_layers(past_key_values))
        if any(states):
            computed.states[record.tokens] = states

    def states_at(self, past_key_values: TransformersCache) -> dict[int, States]:
        """Return the kept states, for the argument ``states_at`` of ``kvpack.pack``. Selecting rows drops them."""
        return dict(self._known_record(past_key_values)[1].states)

    def _known_record(self, past: TransformersCache) -> tuple[Record, ComputedChecksums]:
        """Return the record of a cache and its checksums, after updating both to the cache's current state.

        Raises InvalidParameter if no recorded pass used the cache.
        """
        recorded = self._records.get(past) if isinstance(past, TransformersCache) else None
        if recorded is None:
            raise InvalidParameter(f"no recorded forward pass used this {type(past).__name__}: run the pass within recording(model)")
        _update_record(*recorded, past, _token_count(past))
        return recorded


@contextmanager
def recording(model: torch.nn.Module) -> Iterator[Recording]:
    """Record forward passes of ``model`` over transformers' own caches.

    For example::

        with recording(model) as record:
            logits, past = model(token_ids).to_tuple()
        cache = kvpack.pack(past, "octopus-3", inputs=record.inputs(past))
    """
    held, record = Hooks.of(model), Recording()
    held.change.recordings.append(record)
    try:
        yield record
    finally:
        held.change.recordings.remove(record)


def models_in(model: torch.nn.Module) -> list[PreTrainedModel]:
    """Return the transformers models among the modules of ``model``, outermost first. PEFT's wrappers do not count."""
    return list(_models_in(model))


def outermost_model(model: torch.nn.Module) -> PreTrainedModel:
    """Return the outermost transformers model that ``model`` is or contains."""
    return next(_models_in(model))


def _models_in(model: torch.nn.Module) -> Iterator[PreTrainedModel]:
    return (module for module in iterate_modules(model) if isinstance(module, PreTrainedModel))


def _compiled_calls(past: Any, arguments: dict[str, Any]) -> CompiledCalls | None:
    """Return the ``CompiledCalls`` of a pass over one KvpackCache, or None if compiled code does not support the pass."""
    if getattr(past, "compiled", None) is None or not past.has_hooks:
        return None
    return past.compiled if compiled_calls.supports(arguments) else None


def _token_count(past: Any) -> int:
    return int(past.get_seq_length()) if isinstance(past, TransformersCache) else 0


def _update_record(record: Record, computed: ComputedChecksums, cache: TransformersCache, tokens: int) -> None:
    """Update a record to the current state of its cache, which has ``tokens`` tokens.

    Since the last update, the newest tokens may have been dropped, sequences may have been selected, and passes that were not recorded may
    have added tokens. If values have changed in any other way, the recorded inputs are discarded.
    """
    remaining = min(tokens, record.tokens)
    rows = computed.match_rows(cache, remaining) if remaining else []
    if rows is None:
        record.forget(tokens)
        computed.crop(0)
    else:
        if rows and rows != list(range(computed.batch)):
            record.select(torch.tensor(rows, dtype=torch.int64, device="cpu"))
            computed.select(rows)
        if tokens < record.tokens:
            record.crop(tokens)
            computed.crop(tokens)
        elif tokens > record.tokens:
            record.add(tokens - record.tokens, None)
    if computed.tokens < tokens:
        computed.add(cache, tokens)
