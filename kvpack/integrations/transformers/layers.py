"""Packed layers in the form of transformers' cache layers."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin, DummyLayer

from kvpack.cache.layer import Layer
from kvpack.formats.arguments import describe
from kvpack.formats.errors import InvalidParameter, InvalidType, KvpackWarning, OutOfBounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.live.cache import LiveCache


class DecodingWarnings:
    """Warns once that a model receives decoded keys and values. ``warned`` is True after that, or if the user requested decoding."""

    def __init__(self, warned: bool) -> None:
        self.warned = warned

    def warn(self, name: str) -> None:
        """Issue a KvpackWarning about the model ``name``. Warns at most once."""
        self._warn(f"{name} has attention that does not support packed layers, so each call decodes the keys and values of its layer")

    def warn_about_mask(self) -> None:
        """Issue a KvpackWarning about masks. Warns at most once."""
        self._warn(
            "the attention mask hides tokens other than left padding, which packed attention does not support: "
            "each call with such a mask decodes the keys and values of its layer"
        )

    def warn_about_read(self, layer_index: int, name: str) -> None:
        """Issue a KvpackWarning that ``name`` ("keys" or "values") of layer ``layer_index`` was read. Warns at most once."""
        self._warn(
            f"layers[{layer_index}].{name} was read, which decodes all {name} of the layer: cache.packed[{layer_index}] is the packed "
            "layer; for "
            "attention that reads tensors, use KvpackCache(..., dense=True)"
        )

    def _warn(self, text: str) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(text, KvpackWarning, stacklevel=4)


class EmptyLayer(DummyLayer):  # type: ignore[misc]
    """An empty cache layer, for a model layer that uses the keys and values of another layer."""

    packed = Layer(None, None)
    is_sliding = False
    first_visible = 0

    def check_window(self, crop: int = 0) -> None:
        """Do nothing, because this layer attends to no tokens of its own."""

    def check_crop(self, tokens_to_remove: int) -> None:
        """Do nothing, because this layer contains no tokens."""


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A transformers cache layer over layer ``layer_index`` of a live cache.

    If the layer has a sliding window, it may keep only the newest tokens. ``window`` is the model's sliding window for the layer, or None
    for full attention or an unknown model. ``decoding`` is notified when ``keys`` or ``values`` are decoded for a model that reads them as
    tensors.
    """

    # This does not undo an update exactly, because tokens that were raw before stay packed. Assisted decoding announces its crops, so it is
    # permitted there.
    is_croppable = False
    supports_early_init = False

    def __init__(self, live: LiveCache, layer_index: int, window: int | None, decoding: DecodingWarnings) -> None:
        self.live, self.number, self.window = live, layer_index, window
        self.is_initialized = True
        self._decoding = decoding
        # True if the oldest tokens were or will be dropped. Without a window, none are.
        self.is_sliding = window is not None or self.skipped > 0

    @property
    def packed(self) -> Layer:
        """All tokens of the layer, as an immutable packed layer."""
        return self.live.layer(self.number)

    @property
    def keys(self) -> torch.Tensor | None:
        """Dense keys, for cross-attention."""
        self._decoding.warn_about_read(self.number, "keys")
        k = self.packed.k
        return k.unpack(k.tail.dtype) if k is not None else None

    @property
    def values(self) -> torch.Tensor | None:
        """Dense values, for cross-attention."""
        self._decoding.warn_about_read(self.number, "values")
        v = self.packed.v
        return v.unpack(v.tail.dtype) if v is not None else None

    @property
    def skipped(self) -> int:
        """Number of old tokens that a sliding window has dropped."""
        return self.live.skipped_tokens(self.number)

    @property
    def batch_size(self) -> int:
        return self.live.batch(self.number)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, because the layer gets its shapes from its first tokens."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append keys and values to the live cache. Returns the live cache twice, in place of keys and of values."""
        self.live.update(self.number, key_states, value_states)
        return self.live, self.live

    def get_seq_length(self) -> int:
        return self.live.seen_tokens(self.number)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self.live.seen_tokens(self.number)
        first = self._first_visible(seen)
        return seen + query_length - first, first

    @property
    def first_visible(self) -> int:
        """The first token that the next token can attend to."""
        return self._first_visible(self.live.seen_tokens(self.number))

    def decode(self, queries: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return dense keys and values of the tokens that the newest ``queries`` tokens may attend to (see ``get_mask_sizes``)."""
        skipped = self._first_visible(self.live.seen_tokens(self.number) - queries) - self.skipped
        k, v = self.live.unpack(self.number, dtype)
        return None if k is None else k[:, :, skipped:], None if v is None else v[:, :, skipped:]

    def _first_visible(self, seen: int) -> int:
        """Return the first token that the next token can attend to after ``seen`` tokens.

        This depends only on the window, not on the tokens that the layer still has.
        """
        return self.skipped if self.window is None else max(self.skipped, seen - self.window + 1)

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """Keep all tokens until the next ``crop``, and between later calls of ``crop``."""
        self.live.keep_past(self.number)
        self.is_croppable = True

    def check_window(self, crop: int = 0) -> None:
        """Raise InvalidParameter if the next token would attend to tokens that the layer skipped."""
        held = self.live.stored_tokens(self.number)
        if self.skipped and self.window is not None and held - crop < self.window - 1:
            less = f" ({crop} are to be dropped)" if crop else ""
            raise InvalidParameter(
                f"the layer holds only the newest {held} of its tokens{less}, but the model attends to a window of {self.window}: use a "
                "cache created with keep_all=True"
            )

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise OutOfBounds or InvalidParameter if ``crop`` cannot be called with this argument."""
        held = self.live.stored_tokens(self.number)
        if not -held <= tokens_to_remove <= 0:
            raise OutOfBounds(f"crop({tokens_to_remove}) is out of range: the layer holds {held} tokens, expected -{held} to 0")
        self.check_window(-tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens. ``tokens_to_remove`` is their number, negated, as transformers passes it."""
        self.check_crop(tokens_to_remove)
        self.live.truncate(self.live.seen_tokens(self.number) + tokens_to_remove, self.number)

    def offload(self) -> NoReturn:
        """Raise InvalidParameter: packed layers cannot be moved in the way that transformers moves tensors."""
        raise InvalidParameter(
            f"layers[{self.number}] is packed, and its pages stay on their device: omit offload, or save the cache and load it again"
        )

    def reset(self) -> None:
        self.live.reset(self.number)
        self.is_sliding = self.window is not None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at ``indices`` of the batch, in that order. Codes are copied, not decoded."""
        self.live.select(indices, self.number)


def check_window(skipped: int, older: int, window: int | None) -> None:
    """Raise InvalidParameter if a query attends to tokens that the layer skipped. ``older`` is the number of tokens before the queries."""
    if skipped and (window is None or older < window - 1):
        attended = "all of them" if window is None else f"a window of {window}"
        raise InvalidParameter(
            f"the layer holds only the newest {older} of its earlier tokens, but the model attends to {attended}: use a cache created "
            "with keep_all=True"
        )


def check_attention_window(layer_window: int | None, attention_window: int | None, module: torch.nn.Module) -> None:
    """Raise InvalidParameter if attention is wider than ``layer_window``, the window that the cache keeps. None means no window.

    Such a pass would need tokens that a packed layer has dropped.
    """
    if layer_window is not None and (attention_window is None or attention_window > layer_window):
        attended = "all tokens" if attention_window is None else f"a window of {attention_window}"
        raise InvalidParameter(
            f"{type(module).__name__} attends to {attended}, but its cache keeps a window of {layer_window}: use "
            "KvpackCache(model, recipe, dense=True), which decodes each layer before attention"
        )


def check_continues(live: LiveCache, layer: Any, layer_index: int, following: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise InvalidParameter unless the keys ``k`` and values ``v`` continue layer ``layer_index``.

    ``following`` is the index of the next layer that receives tokens.
    """
    for name, states_or_other in (("keys", k), ("values", v)):
        if not isinstance(states_or_other, torch.Tensor) or states_or_other.dim() != 4:
            raise InvalidType(
                f"layers[{layer_index}]: {name} are {describe(states_or_other)}, expected a tensor [batch, kv_head, token, dim]"
            )
    shapes, seen = live.shapes(layer_index), live.seen_tokens(layer_index)
    if not shapes and not isinstance(layer, EmptyLayer):
        return
    for name, side, states in (("keys", "k", k), ("values", "v", v)):
        if side not in shapes:
            raise InvalidParameter(
                f"layers[{layer_index}] of the cache has no {name}, but the model's layer does: load the model that computed the cache"
            )
        shape = states.shape[0], states.shape[1], states.shape[3]
        # A layer without tokens accepts any batch size.
        held = shapes[side] if seen else (shape[0], *shapes[side][1:])
        if shape != held:
            raise InvalidParameter(
                f"layers[{layer_index}]: {name} have batch, heads and dim {list(shape)}, but the cache has {list(held)}"
            )
    if (ahead := live.seen_tokens(following) - seen) < 0:
        raise InvalidParameter(
            f"layers[{layer_index}] has seen {seen} tokens, but layers[{following}] has seen {live.seen_tokens(following)}, because a "
            f"forward pass failed between them: call crop({ahead}) to drop what it added"
        )


def following_layers(layers: Sequence[Any]) -> list[int]:
    """Return, for each layer, the index of the next layer that receives tokens in a pass. For the last layer, it is the layer's own index.
    """
    packed = [number for number, layer in enumerate(layers) if isinstance(layer, PackedLayer)]
    return [next((after for after in packed if after > number), number) for number in range(len(layers))]


def live_batch_size(live: LiveCache) -> int | None:
    """Return the number of sequences in a live cache, or None before its first tokens."""
    for number in range(len(live)):
        if live.seen_tokens(number):
            return live.batch(number)
    return None
