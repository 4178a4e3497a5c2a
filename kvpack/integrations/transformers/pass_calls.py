"""The methods of a KvpackCache that a model and its attention call during a forward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache

from kvpack.formats.arguments import as_integer, describe
from kvpack.formats.errors import InvalidParameter, OutOfBounds
from kvpack.live.cache import LiveCache

from .compiled import CompiledCalls
from .graphs import StepGraphs
from .hooks import Hooks
from .layers import DecodingWarnings, EmptyLayer, PackedLayer, check_continues, check_window
from .model_changes import Lease
from .models import Model, check_layers, has_multidimensional_positions
from .state_layers import StateLayer, check_states_available
from .states import CapturedLength, CompiledLength, PackedLength, PackedStates, eager_only, without_gradients
from .tracking import Tracking

_DENSE = "a KvpackCache whose layers are decoded for its model (dense=True) decodes them in eager code"


class PassCalls(TransformersCache):  # type: ignore[misc]
    """A transformers cache over the layers of ``live``, with the methods that a model calls. ``passes`` tracks the calls."""

    live: LiveCache
    passes: Tracking
    compiled: CompiledCalls
    graphs: StepGraphs | None
    masked: dict[bool, bool]
    """True if the model's own attention received a causal mask in this pass. The key is True for layers with a sliding window."""
    _dense: bool
    _careful: bool
    _following: list[int]
    _decoding: DecodingWarnings
    _hooks: Lease[Hooks] | None
    _model: Model | None
    _seen: set[type]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append keys and values ``[batch, kv_head, token, dim]`` to one layer, and return what attention receives in place of both.

        This is the packed layer, or dense keys and values if the model does not accept packed layers. Raises OutOfBounds if the cache has
        no such layer, and InvalidParameter if the tensors do not continue the layer, or if an earlier pass failed between two layers.
        """
        if type(layer_idx) is not int:
            layer_idx = as_integer(layer_idx, "layer_idx")
        if not 0 <= layer_idx < len(self.layers):
            raise OutOfBounds(
                f"the model needs layer {describe(layer_idx)}, but the packed cache has {len(self.layers)} layers: load the model "
                "that computed the cache"
            )
        if self._dense:
            return self._update_decoded(key_states, value_states, layer_idx)  # type: ignore[no-any-return]
        if torch.compiler.is_dynamo_compiling():
            self.compiled.compiled_update(layer_idx, key_states, value_states)
        else:
            self.append_tokens(key_states, value_states, layer_idx)
        states = PackedStates(self, layer_idx, key_states, value_states)
        return states, states

    @eager_only(_DENSE)
    def _update_decoded(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int) -> tuple[Any, Any]:
        """Append tokens as ``append_tokens`` does, and return the layer's dense keys and values.

        If dense keys and values are not available, nothing is appended.
        """
        before = self.live.seen_tokens(layer_idx)
        self._append_tokens(key_states, value_states, layer_idx)
        layer: PackedLayer = self.layers[layer_idx]
        try:
            dense = layer.decode(key_states.shape[2], key_states.dtype)
        except BaseException:
            self.live.truncate(before, layer_idx)
            raise
        self.passes.record_appended(self.live.seen_tokens(layer_idx))
        k, v = (without_gradients(x, key_states, value_states) for x in dense)
        return k, v

    def append_tokens(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int) -> None:
        """Append tokens to one layer as ``update`` does, but return nothing."""
        # The fast path of most steps, whose shapes are those of the step before.
        seen = None if self._careful else self.live.try_update(layer_idx, key_states, value_states, self._following[layer_idx])
        if seen is None:
            self._append_tokens(key_states, value_states, layer_idx)
            seen = self.live.seen_tokens(layer_idx)
        self.passes.record_appended(seen)

    def _append_tokens(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int) -> None:
        check_continues(self.live, self.layers[layer_idx], layer_idx, self._following[layer_idx], key_states, value_states)
        self.passes.check_update()
        if self.passes.states and self.live.seen_tokens(layer_idx):
            check_states_available(self.layers)
        self.live.update(layer_idx, key_states, value_states)

    def attend(self, layer: int, q: torch.Tensor, *, sliding_window: int | None = None, **options: Any) -> torch.Tensor:
        """Run ``LiveCache.attend`` over one layer. Also raises InvalidParameter if the layer has dropped tokens of the window."""
        if skipped := self.live.skipped_tokens(layer):
            check_window(skipped, self.live.stored_tokens(layer) - q.shape[2], sliding_window)
        return self.live.attend(layer, q, sliding_window=sliding_window, **options)

    @property
    def is_initialized(self) -> bool:
        """True if the cache has tokens. Models whose prefix is not causal, such as PaliGemma, look for it only if there are none."""
        return self.passes.record.tokens > 0

    @property
    def has_hooks(self) -> bool:
        """True if hooks on the model report forward passes to the cache."""
        return self._hooks is not None

    @property
    def is_unexpected_pass(self) -> bool:
        """True during a pass that hooks on the cache's model did not report."""
        return self._model is not None and self.passes.is_idle

    def records(self, model: torch.nn.Module) -> bool:
        """Return True if the current pass over the cache is a call of ``model`` and is not part of another recording."""
        return self._hooks is not None and not self._hooks.change.recordings and self.passes.is_running(model)

    def hooked_module(self, module_index: int) -> torch.nn.Module | None:
        """Return the hooked module with this index, or None if it no longer exists."""
        return None if self._hooks is None else self._hooks.change.inside[module_index]()

    def decode(self, layer: int, queries: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return dense keys and values of one layer, for a mask over the tokens that ``queries`` queries may attend to.

        Issues a KvpackWarning.
        """
        self._decoding.warn_about_mask()
        packed: PackedLayer = self.layers[layer]
        return packed.decode(queries, dtype)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the number of tokens that a layer has seen. In compiled code, the result is a tensor, as for transformers' static caches.
        """
        if torch.compiler.is_dynamo_compiling() and not self._dense:
            return self.compiled.compiled_seen(layer_idx)
        return self._length(layer_idx)

    @eager_only(_DENSE)
    def _length(self, layer_idx: int) -> int:
        if self.graphs is not None and self.graphs.captured is not None:
            return CapturedLength(self.graphs.captured.tokens)
        layer_idx = as_integer(layer_idx, "layer_idx")
        if layer_idx < 0:
            raise OutOfBounds(f"layer {describe(layer_idx)} is out of range: the cache has {len(self.layers)} layers")
        return int(super().get_seq_length(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[Any, int]:
        """Return the number of keys for a mask, and the position of the first key.

        The number is a ``PackedLength`` or ``CompiledLength`` if attention "kvpack" does not need a mask.
        """
        if not torch.compiler.is_dynamo_compiling():
            return self.mask_sizes(query_length, layer_idx)
        if self._dense:
            return self._dense_mask_sizes(query_length, layer_idx)  # type: ignore[no-any-return]
        sizes = partial(self.mask_sizes, query_length, layer_idx)
        # The offset is 0 here; masks that need the real one call ``sizes``.
        return CompiledLength(sizes, partial(self.compiled.compiled_starts, layer_idx, query_length)), 0

    @eager_only(_DENSE)
    def _dense_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.mask_sizes(query_length, layer_idx)

    def mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys for a mask, and the first key's position, outside compiled code."""
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        if self._dense:
            return length, offset
        if self.graphs is not None and (captured := self.graphs.captured) is not None:
            length_in_graph = CapturedLength(captured.tokens)
            length_in_graph.captured = captured
            return length_in_graph + query_length, 0
        packed = PackedLength(length)
        attending = [layer for layer in self.layers if isinstance(layer, PackedLayer | EmptyLayer)]
        # transformers passes layer 0 even if that layer has only states, and means the first attention layer.
        layer_asked = self.layers[layer_idx] if self.layers[layer_idx] in attending else attending[0]
        packed.first_visible = lambda: min(layer.first_visible for layer in attending if layer.is_sliding == layer_asked.is_sliding)
        self.masked[layer_asked.is_sliding] = False
        packed.leave_to_attention = partial(self.masked.__setitem__, layer_asked.is_sliding)
        if not self.has_hooks:
            packed.check_mask = partial(self.passes.check_mask, query_length)
        return packed, offset

    def is_masked(self, layer: int) -> bool:
        """Return True if the model's own attention would receive a causal mask for ``layer``.

        Some models set is_causal=False and rely on this mask.
        """
        return self.masked.get(self.layers[layer].is_sliding, False)

    @property
    def is_linear(self) -> list[bool]:
        """A bool for each layer: True if it has states, but no keys and values."""
        return [isinstance(layer, StateLayer) and not isinstance(layer, PackedLayer) for layer in self.layers]

    def check_attention(self, module: torch.nn.Module) -> None:
        """Raise InvalidParameter if an attention module belongs to a model that cannot continue this cache."""
        if self._model is not None or type(module) in self._seen:
            return
        check_layers(len(self.layers), module)
        if has_multidimensional_positions(module):
            raise InvalidParameter(
                f"{type(module).__name__} has multi-dimensional rotary positions, which need the model: use KvpackCache.of(cache, model)"
            )
        self._seen.add(type(module))
