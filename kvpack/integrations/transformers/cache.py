"""KvpackCache: a transformers cache over a packed one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache as TransformersCache

from kvpack.cache.given import check_packed
from kvpack.formats.errors import InvalidParameter, InvalidShape, OutOfBounds

from .hooks import Hooks
from .layers import AbsentLayer, Decoding, PackedLayer
from .models import Model, check_identity, check_layers, has_multidimensional_positions
from .positions import RotaryPositions
from .record import Record
from .states import PackedLength, PackedStates
from .tracking import Tracking

if TYPE_CHECKING:
    from kvpack.cache.cache import Cache


class KvpackCache(TransformersCache):  # type: ignore[misc]
    """A transformers cache over a packed one: new tokens are packed when appended, old ones are never unpacked.

    Give the model the token ids that follow the cache, or give ``generate`` all token ids.

    With ``model``, a transformers model or a PEFT wrapper of one, the cache is checked against it, forward passes are recorded
    (``packed.inputs``) until ``release``, and ``generate`` is refused other token ids than the cache's. A model whose attention
    cannot take packed layers then gets dense keys and values, decoded layer by layer for each call, and a KvpackWarning tells so;
    ``dense`` says at once whether it does.

    A model with rotary positions of several dimensions, such as Qwen2-VL, continues a prompt whose recorded ids are all of it;
    for any other, ``rope_deltas`` is what the model had of that name after the prompt, or 0 for text.

    Raises InvalidDtype for what is not a packed cache; InvalidParameter, naming what differs, for a cache of another model and for
    one that does not start at position 0; NotConsecutive when a layer ends before the others; InvalidShape when one lacks tokens
    of the model's window.
    """

    def __init__(
        self,
        cache: Cache,
        model: torch.nn.Module | None = None,
        *,
        dense: bool | None = None,
        rope_deltas: torch.Tensor | int | None = None,
    ) -> None:
        check_packed(cache, "KvpackCache({})")
        if cache.start:
            raise InvalidParameter(f"the cache starts at position {cache.start}; a model continues a cache that starts at position 0")
        cache.check_ends()
        known = None if model is None else Model(model)
        if known is not None:
            known.check(cache)
            check_identity(cache, model)
        windows = [None] * len(cache) if known is None else known.windows(len(cache))
        decoding = Decoding(bool(dense))
        layers = [PackedLayer(one, window, decoding) if one.sides else AbsentLayer() for one, window in zip(cache, windows, strict=True)]
        super().__init__(layers=layers)
        self._packed, self._model, self._dense = cache, known, bool(dense)
        for number, layer in enumerate(self.layers):
            if dense and known is None and layer.is_sliding:
                raise InvalidParameter(f"layers[{number}] skipped tokens: dense layers need the model's window, KvpackCache(cache, model)")
            layer.check_window()
        positions = RotaryPositions.of(known, cache.inputs, cache.tokens, rope_deltas)
        if known is not None and dense is None and not known.takes_packed_layers:
            self._dense = True
            decoding.tell(known.name)
        self.passes = Tracking(Record(cache.inputs, cache.tokens), positions, None if self._dense else known)
        self._hooks = None if model is None else Hooks.on(model)
        self._seen: set[type] = set()

    @property
    def packed(self) -> Cache:
        """The packed cache with every token appended so far: what ``kvpack.save`` takes.

        ``inputs`` says what the tokens came from, as far as it was recorded.
        """
        layers = tuple(layer.packed for layer in self.layers)
        return replace(self._packed, layers=layers, inputs=self.passes.record.inputs)

    def release(self) -> None:
        """Stop recording forward passes: hooks are removed from the model unless another cache records it."""
        self._hooks = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append ``[batch, kv_head, token, dim]`` keys and values to one layer, and return the arguments of attention for both.

        That is the packed layer, or dense keys and values where the model cannot take it.
        Raises OutOfBounds for a layer that the cache does not have, InvalidShape when the tensors do not continue it, or when an
        earlier pass failed between two layers.
        """
        if layer_idx >= len(self.layers):
            raise OutOfBounds(f"the model asks for layer {layer_idx}, the packed cache has {len(self.layers)} layers")
        layer: PackedLayer = self.layers[layer_idx]
        self._check_states(key_states, value_states, layer_idx)
        self.passes.check_update()
        before = layer.packed
        layer.update(key_states, value_states)
        if self._dense:
            try:
                dense = layer.packed.unpack(key_states.dtype)
            except BaseException:
                layer.packed = before
                raise
        self.passes.appended(layer.packed.seen)
        if self._dense:
            return dense
        states = PackedStates(self.check_attention, layer.packed)
        return states, states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of keys for a mask, marked if attention "kvpack" needs no mask."""
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return (length if self._dense else PackedLength(length)), offset

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest ``-tokens_to_remove`` tokens of every layer, or none. Raises OutOfBounds, InvalidShape."""
        for layer in self.layers:
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        self.passes.record.crop(self.passes.record.tokens + tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.passes.record.crop(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` of the batch, in that order; codes are copied, never decoded."""
        super().batch_select_indices(indices)
        self.passes.select(indices)

    def check_attention(self, module: torch.nn.Module) -> None:
        """Raise InvalidParameter when an attention module belongs to a model that cannot continue this cache."""
        if self._model is not None or type(module) in self._seen:
            return
        check_layers(len(self.layers), module)
        if has_multidimensional_positions(getattr(module, "config", None)):
            raise InvalidParameter(
                f"{type(module).__name__} has rotary positions of several dimensions, which need the model: write KvpackCache(cache, model)"
            )
        self._seen.add(type(module))

    def _check_states(self, key_states: torch.Tensor, value_states: torch.Tensor, number: int) -> None:
        """Raise InvalidShape unless these states continue layer ``number``, and it is the one that is due."""
        packed = self.layers[number].packed
        for name, side, states in (("keys", packed.k, key_states), ("values", packed.v, value_states)):
            if side is None:
                raise InvalidShape(f"layers[{number}] of the cache has no {name}, and the model has")
            found, expected = (states.shape[0], states.shape[1], states.shape[3]), (side.batch, side.heads, side.dim)
            if found != expected:
                raise InvalidShape(
                    f"layers[{number}]: the model's {name} have batch, heads and dim {list(found)}, the cache's {list(expected)}: "
                    f"{list(states.shape)} does not continue it"
                )
        following = self.layers[number + 1].packed if number + 1 < len(self.layers) else packed
        if following.sides and following.seen < packed.seen:
            raise InvalidShape(
                f"layers[{number}] has seen {packed.seen} tokens and layers[{number + 1}] {following.seen}: "
                "a forward pass ended between them; continue with a new KvpackCache"
            )
