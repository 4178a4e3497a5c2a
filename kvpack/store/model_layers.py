"""The layers of a model's cache, as transformers makes them for its configuration."""

from __future__ import annotations

from typing import Any


def cache_layers(config: Any) -> list[Any]:
    """The layers of the cache that transformers makes for a decoder's configuration.

    Raises what transformers raises for a configuration that it makes no cache of layers for: AttributeError, KeyError, TypeError or
    ValueError.
    """
    from transformers import DynamicCache

    layers: list[Any] = DynamicCache(config=config).layers
    return layers


def windows_of(config: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer of a model with ``config``, None for a layer without one; empty if no layer has one.

    Chunks of attention count as windows of their size: no token attends to an older one.
    """
    if config.is_encoder_decoder:
        return ()
    try:
        layers = cache_layers(config.get_text_config(decoder=True))
    except (AttributeError, KeyError, TypeError, ValueError):
        return ()
    windows = tuple(getattr(layer, "sliding_window", None) for layer in layers)
    return windows if any(windows) else ()
