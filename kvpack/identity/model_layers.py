"""Determines the layers of a model's cache from its configuration, as transformers does."""

from __future__ import annotations

from typing import Any


def cache_layers(config: Any) -> list[Any]:
    """Return the layers of the cache that transformers creates for a decoder's configuration.

    If transformers cannot create such a cache, raises its error: AttributeError, KeyError, TypeError or ValueError.
    """
    from transformers import DynamicCache

    layers: list[Any] = DynamicCache(config=config).layers
    return layers


def layers_of(config: Any) -> tuple[tuple[int | None, ...], bool]:
    """Return the sliding window of each layer (or an empty tuple), and True if any layer keeps recurrent or convolution states.

    ``config`` is the model's configuration. Chunked attention counts as a window of the chunk's size, because no token attends to tokens
    before its chunk. For an encoder-decoder, returns an empty tuple and False, because its layers also depend on the encoder.
    """
    if config.is_encoder_decoder:
        return (), False
    try:
        layers = cache_layers(config.get_text_config(decoder=True))
    except (AttributeError, KeyError, TypeError, ValueError):
        return (), False
    windows = tuple(getattr(layer, "sliding_window", None) for layer in layers)
    return windows if any(windows) else (), any(hasattr(layer, "recurrent_states") for layer in layers)
