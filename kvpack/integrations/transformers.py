"""transformers models over packed layers: no decompressed copy of the cache exists.

    cache = kvpack.load("prompt.kvpack")
    model.set_attn_implementation("kvpack")
    model.generate(token_ids, past_key_values=KvpackCache(cache))

Importing this module registers the attention "kvpack". It runs causal and sliding-window attention; given
plain tensors (a model without a KvpackCache) it falls back to PyTorch's scaled dot product attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from kvpack.attention import attend
from kvpack.cache import Cache, Layer
from kvpack.formats.errors import InvalidParameter, InvalidShape, OutOfBounds

if TYPE_CHECKING:
    from collections.abc import Callable

QUERIES_AT_A_TIME = 128
"""Rows of a mask that are compared at a time with the mask that attention applies by itself."""


class KvpackCache(TransformersCache):  # type: ignore[misc]
    """A transformers cache over a packed one: new tokens are appended packed, old ones are never unpacked.

    Give the model the token ids that follow the cache, or give ``generate`` all of them. Raises
    InvalidParameter when the packed tokens do not start at position 0, NotConsecutive when a layer ends before the others.
    """

    def __init__(self, cache: Cache) -> None:
        if cache.start:
            raise InvalidParameter(f"the cache starts at position {cache.start}; a model continues a cache that starts at position 0")
        cache.check_ends()
        super().__init__(layers=[PackedLayer(layer, cache.tokens) for layer in cache])
        self._packed = cache

    @property
    def packed(self) -> Cache:
        """The packed cache with every token appended so far: what ``kvpack.save`` takes."""
        return replace(self._packed, layers=tuple(layer.packed for layer in self.layers))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append ``[batch, kv_head, token, dim]`` keys and values to one layer, and return that packed layer twice.

        Raises OutOfBounds for a layer that the cache does not have, InvalidShape when the tensors do not continue it.
        """
        if layer_idx >= len(self.layers):
            raise OutOfBounds(f"the model asks for layer {layer_idx}, the packed cache has {len(self.layers)} layers")
        layer: PackedLayer = self.layers[layer_idx]
        return layer.update(key_states, value_states)


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One packed layer that has seen ``seen`` tokens; a sliding-window layer may hold only the newest of them."""

    # Cropping leaves packed what was raw before, so transformers must not take it for an exact undo.
    is_croppable = False
    supports_early_init = False

    def __init__(self, packed: Layer, seen: int) -> None:
        super().__init__()
        self.packed, self.seen = packed, seen
        self.is_initialized = True

    @property
    def is_sliding(self) -> bool:
        """Whether the oldest tokens are gone."""
        return self.packed.tokens < self.seen

    @property
    def batch_size(self) -> int:
        return next(iter(self.packed.sides.values())).batch

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the layer is made of what was packed."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.packed = self.packed.append(key_states, value_states)
        self.seen += key_states.shape[2]
        held = NewestTokens(self.packed.k, self.packed.v) if self.is_sliding else self.packed
        return held, held

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.packed.tokens + query_length, self.seen - self.packed.tokens

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest ``-tokens_to_remove`` tokens (transformers passes a negative number)."""
        removed = -tokens_to_remove
        held = self.packed.tokens
        if not 0 <= removed <= held:
            raise OutOfBounds(f"crop({tokens_to_remove}) of a layer that holds {held} tokens; allowed are -{held} to 0")
        self.packed = self.packed.crop(removed)
        self.seen -= removed

    def reset(self) -> None:
        self.packed = replace(self.packed.crop(self.packed.tokens), skipped=0)
        self.seen = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` of the batch, in that order; codes are copied, never decoded."""
        self.packed = self.packed.select(indices)


class NewestTokens(Layer):
    """A layer without its oldest tokens: only attention with a sliding window is right over it."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | Layer,
    value: torch.Tensor | Layer,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function over a packed layer (``key``), or over tensors.

    ``query`` is ``[batch, q_head, q_len, dim]``; returns ``[batch, q_len, q_head, dim]``. Raises InvalidParameter
    for what ``attend`` has no counterpart of: a mask, dropout, a position bias.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if isinstance(key, Layer):
        unsupported = {"a mask": attention_mask, "a position bias": kwargs.get("position_bias")}
        for what, given in {**unsupported, "dropout": dropout or None}.items():
            if given is not None:
                raise InvalidParameter(f"attention over packed layers has no {what.removeprefix('a ')}, the model passes {what}")
        if isinstance(key, NewestTokens):
            _check_window(key.tokens - query.shape[2], sliding_window)
        logits = kwargs.get("s_aux")
        out = attend(query, key, scale=scaling, causal=causal, softcap=softcap, sliding_window=sliding_window, sink_logits=logits)
        return out.transpose(1, 2).contiguous(), None
    if isinstance(value, Layer):
        raise InvalidShape("the value states are a packed layer and the key states are a tensor")
    if attention_mask is None and causal:
        attention_mask = _lower_right_mask(query, key, sliding_window)
    options = kwargs | {"softcap": softcap, "is_causal": causal}
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    return result


def _check_window(older: int, sliding_window: int | None) -> None:
    if sliding_window is None or older < sliding_window - 1:
        window = "all of them" if sliding_window is None else f"a window of {sliding_window}"
        raise InvalidShape(f"the layer holds only the newest {older} of its earlier tokens, and the model attends to {window}")


def _lower_right_mask(query: torch.Tensor, key: torch.Tensor, sliding_window: int | None) -> torch.Tensor | None:
    """The mask of queries that are the newest tokens, or None where scaled dot product attention needs none."""
    queries, tokens = query.shape[2], key.shape[2]
    windowed = sliding_window is not None and sliding_window < tokens
    if not windowed and queries in (1, tokens):
        return None
    position = torch.arange(tokens - queries, tokens, device=key.device)[:, None]
    token = torch.arange(tokens, device=key.device)
    mask = token <= position
    if sliding_window is not None:
        mask &= token > position - sliding_window
    return mask[None, None]


def no_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> None:
    """transformers' mask function: builds none, and refuses every mask that is not causal or sliding-window.

    Raises InvalidParameter for padding, for a cache that is allocated beyond its tokens, and for any other pattern.
    """
    if attention_mask is not None and not attention_mask[:, -kv_length:].all():
        row = int((~attention_mask[:, -kv_length:].bool()).any(1).nonzero()[0])
        raise InvalidParameter(f"attention_mask has padding in row {row} of the batch; kvpack attention takes unpadded rows of one length")
    if kv_offset + kv_length != q_offset + q_length:
        raise InvalidParameter(
            f"the cache spans positions up to {kv_offset + kv_length}, the queries end at {int(q_offset + q_length)}; "
            "kvpack attention takes a KvpackCache or a DynamicCache"
        )
    if use_vmap:
        _refuse_mask()
    if mask_function is causal_mask_function:
        return
    window = getattr(config, "sliding_window", None)
    rows, token = torch.arange(batch_size, device=device)[:, None, None], torch.arange(kv_offset, kv_offset + kv_length, device=device)
    for first in range(int(q_offset), int(q_offset) + q_length, QUERIES_AT_A_TIME):
        position = torch.arange(first, min(first + QUERIES_AT_A_TIME, int(q_offset) + q_length), device=device)
        expected = token <= position[:, None]
        if window is not None:
            expected &= token > position[:, None] - window
        if not (mask_function(rows, 0, position[:, None], token) == expected).all():
            _refuse_mask()


def _refuse_mask() -> NoReturn:
    raise InvalidParameter("the model asks for a mask that is neither causal nor a sliding window; kvpack attention has no other")


AttentionInterface.register("kvpack", attention)
AttentionMaskInterface.register("kvpack", no_mask)
