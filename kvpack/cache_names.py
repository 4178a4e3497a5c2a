"""Names under which models accept and return caches: ``cache`` since transformers 5.24, ``past_key_values`` before."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

NAMES = ("cache", "past_key_values", "layer_past")
"""Names of the cache parameter of a model's forward. Models with custom code still use the older names."""


def cache_argument(model: Callable[..., Any], cache: Any) -> dict[str, Any]:
    """Return ``cache`` as the keyword argument by which ``model``'s forward and ``generate`` accept caches."""
    parameters = inspect.signature(getattr(model, "forward", model)).parameters
    return {next((name for name in NAMES if name in parameters), NAMES[0]): cache}


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among a call's keyword arguments, or None if there is none."""
    for name in NAMES:
        if (cache := arguments.get(name)) is not None:
            return cache
    return None


def output_cache(output: Any) -> Any:
    """Return the cache in the output of a forward pass, or None if there is none."""
    # Access by the older name issues a warning if the output has the newer one.
    return next((getattr(output, name) for name in NAMES[:2] if hasattr(output, name)), None)
