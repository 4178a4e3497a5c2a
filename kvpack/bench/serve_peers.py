"""The other transformers caches in bench serve: StaticCache, and QuantizedCache with each of its backends."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kvpack.formats.errors import InvalidParameter
from kvpack.models import import_transformers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Result = TypeVar("Result")

DYNAMIC, FLASH, STATIC = "DynamicCache", "DynamicCache, flash", "StaticCache"
OUT_OF_MEMORY_ERROR = "does not fit"
"""Error of a cache that does not fit in memory."""
BACKENDS = ("fp8", "quanto", "hqq")
"""Backends of QuantizedCache. The last two are packages that quantize to 4 bits."""
TIMES = ("step_seconds", "eager_seconds", "generate_seconds", "graph_seconds", "cache_bytes", "peak_bytes")


def peer_caches(model: Any, states: Sequence[tuple[torch.Tensor, torch.Tensor]], tokens: int, room: int) -> dict[str, Callable[[], Any]]:
    """Return functions by name. Each creates a cache that contains ``states`` and has room for another ``room`` tokens.

    ``states`` are the keys and values of ``tokens`` tokens. If transformers cannot create the cache for the model or the backend, the call
    raises its error.
    """
    library = import_transformers()

    def static() -> Any:
        if any(keys.shape[2] != tokens for keys, _ in states):
            raise InvalidParameter("some layers keep only a window of the tokens, which a StaticCache does not support")
        return _fill(library.StaticCache(config=model.config, max_cache_len=tokens + room), states)

    def quantized(backend: str) -> Any:
        return _fill(library.QuantizedCache(backend, model.config), states)

    return {STATIC: static, **{f"QuantizedCache, {backend}": partial(quantized, backend) for backend in BACKENDS}}


def _fill(cache: Any, states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    for number, (k, v) in enumerate(states):
        cache.update(k, v, number)
    return cache


def measured_row(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the row that ``measure`` returns for the cache ``name``. If it fails, return a row with the ``error``."""
    result, error = try_measure(measure)
    row: dict[str, Any] = {"cache": name, **dict.fromkeys(TIMES), **(result or {})}
    return row if error is None else {**row, "error": error}


def try_measure(measure: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """Return the result of ``measure`` and None. If it fails, return None and the text of the error on one line."""
    try:
        return measure(), None
    except torch.OutOfMemoryError:
        return None, OUT_OF_MEMORY_ERROR
    except Exception as error:
        return None, f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def cache_bytes(cache: Any) -> int | None:
    """Return the size in bytes of the tensors in a cache, or None if some layers are not dense."""
    held = [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "_quantized_keys", None) is None]
    return sum(x.nbytes for pair in held for x in pair) if len(held) == len(cache.layers) else None
