"""The layers of a model's cache, as transformers creates them for its configuration."""

from __future__ import annotations

from typing import Any


def cache_layers(config: Any) -> list[Any]:
    """Return the layers of the cache that transformers creates for a decoder's configuration.

    Raises transformers' error for a configuration for which it creates no cache of layers: AttributeError, KeyError, TypeError or
    ValueError.
    """
    from transformers import DynamicCache

    layers: list[Any] = DynamicCache(config=config).layers
    return layers


def layers_of(config: Any) -> tuple[tuple[int | None, ...], bool]:
    """Return the sliding window of each layer, empty if no layer has one, and whether any layer keeps recurrent or convolution states.

    ``config`` is the model's. Chunks of attention count as windows of their size, because no token attends to an older one. Layers of an
    encoder-decoder have neither: what they contain depends on the encoder, too.
    """
    if config.is_encoder_decoder:
        return (), False
    try:
        layers = cache_layers(config.get_text_config(decoder=True))
    except (AttributeError, KeyError, TypeError, ValueError):
        return (), False
    windows = tuple(getattr(layer, "sliding_window", None) for layer in layers)
    return windows if any(windows) else (), any(hasattr(layer, "recurrent_states") for layer in layers)
