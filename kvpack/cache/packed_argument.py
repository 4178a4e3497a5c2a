"""Check that an argument is a packed cache; the message names the correct call."""

from __future__ import annotations

import os
from typing import Any

from kvpack.formats.errors import InvalidType

from .cache import Cache


def check_packed(given: Any, call: str) -> None:
    """Raise InvalidType unless ``given`` is a Cache. ``call`` is the correct call for the message, with ``{}`` in place of the cache."""
    if isinstance(given, Cache):
        return
    if isinstance(getattr(given, "packed", None), Cache):
        instead = call.format("cache.packed")
    elif isinstance(given, (str, os.PathLike)):
        instead = call.format(f"kvpack.load({os.fspath(given)!r})")
    elif isinstance(given, (list, tuple)) or hasattr(given, "layers"):
        instead = call.format("kvpack.pack(past_key_values, recipe)")
    else:
        raise InvalidType(f"a {type(given).__name__} is not a packed cache: kvpack.pack makes one, and kvpack.load reads one")
    raise InvalidType(f"a {type(given).__name__} is not a packed cache: write {instead}")
