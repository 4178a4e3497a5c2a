"""Extracts keys, values, token counts and states from a model's own cache. Rejects caches that contain anything else.

Known transformers classes are accepted by name, so that transformers need not be imported. For any other class, every attribute is
examined.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple

import torch

from kvpack.coding.encoding import STATE_DTYPES
from kvpack.file.layer_states import check_state
from kvpack.file.user_files import path_text
from kvpack.formats.errors import InvalidParameter, InvalidType

from .minifloats import Minifloats

_MODULE = "transformers.cache_utils"
_CACHES = {"Cache", "DynamicCache", "StaticCache"}
_CACHE_SETTINGS = {"layers", "layer_class_to_replicate", "offloading", "only_non_sliding", "prefetch_stream"}
_SLIDING, _STATIC = {"DynamicSlidingWindowLayer", "StaticSlidingWindowLayer"}, {"StaticLayer"}
_LINEAR = {
    "LinearAttentionCacheLayerMixin",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
}
_LAYERS = {"CacheLayerMixin", "DynamicLayer", "DummyLayer", *_SLIDING, *_STATIC, *_LINEAR}
_STATES = {"conv": "conv_states", "recurrent": "recurrent_states"}
"""Attributes of a layer that contain its states, by kind. Each attribute is a dict that maps numbers to tensors or None."""
_LAYER_TENSORS = {"keys", "values", "cumulative_length", "_sliding_window_tensor"}
"""Attributes of known layers that contain tensors: keys, values, token counts and the window."""
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, type, FunctionType, MethodType)
_CONFIGURATIONS = {"PreTrainedConfig", "PretrainedConfig"}


class DenseLayer(NamedTuple):
    """The unpacked contents of one cache layer.

    ``k`` and ``v`` are ``[batch, kv_head, token, dim]``. ``skipped`` is the number of earlier tokens that a sliding window has dropped.
    ``states`` are tensors ``[batch, ...]`` by name.
    """

    k: torch.Tensor | Minifloats | None
    v: torch.Tensor | Minifloats | None
    skipped: int = 0
    states: Mapping[str, torch.Tensor] = MappingProxyType({})


def extract_layers(past: Any) -> list[DenseLayer]:
    """Return the layers of a transformers cache or a similar object. Raises the same errors as ``packing.dense_layers``."""
    if "EncoderDecoderCache" in _class_names(past):
        raise InvalidParameter(
            f"the {type(past).__name__} contains two caches, one for the decoder's tokens and one for the "
            "encoder's tokens: pack its self_attention_cache and its cross_attention_cache separately"
        )
    if isinstance(getattr(past, "layers", None), Sequence):
        return _read_layers(past)
    if isinstance(past, str | bytes | os.PathLike):
        raise InvalidType(
            f"the path {path_text(past)!r} is not a KV cache: open kvpack files with kvpack.load, and safetensors files with the kvpack "
            "pack command"
        )
    if isinstance(getattr(past, "key_cache", None), list):
        raise InvalidType(
            f"the {type(past).__name__} is from a transformers version before 4.56: pass list(zip(cache.key_cache, cache.value_cache))"
        )
    raise InvalidType(f"a {type(past).__name__} is not a KV cache: pass a transformers Cache, one (k, v), or a list of (k, v)")


def _read_layers(past: Any) -> list[DenseLayer]:
    _refuse_other_contents(past, "", _CACHES, _CACHE_SETTINGS)
    layers = [_dense_layer(layer, f"layers[{number}]") for number, layer in enumerate(past.layers)]
    held = ((number, layer, layer.v if layer.k is None else layer.k) for number, layer in enumerate(layers))
    seen = {layer.skipped + x.shape[2]: number for number, layer, x in held if x is not None and _is_dense(x)}
    if len(seen) > 1:
        counts = " and ".join(f"layers[{number}] {count}" for count, number in sorted(seen.items(), key=lambda item: item[1]))
        raise InvalidParameter(
            f"the layers have seen different numbers of tokens ({counts}): pack layers that have seen the same tokens, as a list of (k, v)"
        )
    for number, (layer, dense) in enumerate(zip(layers, past.layers, strict=True)):
        if _class_names(dense) & _LINEAR and not layer.states and any(seen):
            raise InvalidParameter(
                f"layers[{number}] is a {type(dense).__name__} without a state, because the model keeps its states in its modules, "
                "where kvpack cannot pack them: use a model that keeps its states in its cache"
            )
    if all(layer.k is None and layer.v is None for layer in layers):
        raise InvalidParameter(f"a {type(past).__name__} has no keys or values yet: run a forward pass with it first")
    return layers


def _dense_layer(layer: Any, where: str) -> DenseLayer:
    """Return the contents of a cache layer: the filled part of a static layer, or the newest tokens of a sliding layer."""
    linear = bool(_class_names(layer) & _LINEAR)
    _refuse_other_contents(layer, where, _LAYERS, _LAYER_TENSORS | (set(_STATES.values()) if linear else set()))
    held = keys_and_values(layer, where)
    return held._replace(states=read_states(layer, where)) if linear else held


def read_states(layer: Any, where: str) -> dict[str, torch.Tensor]:
    """Return the states of a recurrent or convolution layer by name, or an empty dict before its first token."""
    result = {}
    for name, attribute in _STATES.items():
        for number, state in getattr(layer, attribute).items():
            if state is None or not layer.has_previous_state[number]:
                continue
            # The layer may keep older columns that the next token does not need.
            newest = state[..., -layer.conv_kernel_size[number] :] if name == "conv" else state
            check_state(f"{where}.{attribute}[{number}]", STATE_DTYPES.get(newest.dtype), newest.shape)
            result[f"{name}.{number}"] = newest.clone()
    return result


def keys_and_values(layer: Any, where: str) -> DenseLayer:
    """Return the keys and values of a transformers cache layer, and the number of tokens that its window has dropped.

    Raises InvalidParameter if keys or values are missing.
    """
    if not hasattr(layer, "keys"):
        return DenseLayer(None, None)
    k, v = layer.keys, layer.values
    if not _is_dense(k) or not _is_dense(v) or not hasattr(layer, "get_seq_length"):
        # A layer without tokens, or one that shares another layer's tokens, has empty tensors of rank 1, or none.
        k, v = (None if isinstance(x, torch.Tensor) and x.shape == (0,) else x for x in (k, v))
        return DenseLayer(k, v)
    seen, held, classes = int(layer.get_seq_length()), k.shape[2], _class_names(layer)
    if (seen > held and not classes & _SLIDING) or (seen < held and not classes & _STATIC):
        raise InvalidParameter(
            f"{where}: the {type(layer).__name__} has seen {seen} tokens but contains the keys of {held}: "
            "pack a cache that keeps all tokens, such as DynamicCache"
        )
    return DenseLayer(k[:, :, :seen], v[:, :, :seen], max(0, seen - held))


def _is_dense(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 4


def _class_names(value: Any) -> set[str]:
    """Return the names of all transformers cache classes in the class hierarchy of ``value``."""
    return {cls.__name__ for cls in type(value).__mro__ if cls.__module__ == _MODULE}


def _refuse_other_contents(value: Any, where: str, known_classes: set[str], expected: set[str]) -> None:
    """Raise InvalidParameter if ``value`` has an unknown transformers class, or an unexpected attribute that may contain tensors."""
    states = [name for name, state in _attributes(value) if name not in expected and not _is_plain(state)]
    if known_classes is _LAYERS and not (hasattr(value, "keys") and hasattr(value, "values")) and not _class_names(value) & _LINEAR:
        states = states or ["state"]
    if states or _class_names(value) - known_classes:
        description = f"{where} is a {type(value).__name__}" if where else f"the cache is a {type(value).__name__}"
        contents = f"its {' and '.join(states)}" if states else "a cache of this class"
        raise InvalidParameter(
            f"{description}: {contents} cannot be packed: pack a cache that contains only keys, values and recurrent states"
        )


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__" and hasattr(value, name):
                yield name, getattr(value, name)


def _is_plain(value: Any) -> bool:
    """Return True if ``value`` is a plain setting: neither a tensor nor an object that could contain one."""
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or any(cls.__name__ in _CONFIGURATIONS for cls in type(value).__mro__)
