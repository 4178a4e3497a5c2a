"""Checks that an argument is a packed cache."""

from __future__ import annotations

import os
from typing import Any

from kvpack.formats.errors import InvalidType

from .cache import Cache


def check_packed(value: Any, call: str) -> None:
    """Raise InvalidType unless ``value`` is a Cache. The message suggests ``call``, with ``{}`` in place of the cache."""
    if isinstance(value, Cache):
        return
    if isinstance(getattr(value, "packed", None), Cache):
        correct_call = call.format("cache.packed")
    elif isinstance(value, (str, os.PathLike)):
        correct_call = call.format(f"kvpack.load({os.fspath(value)!r})")
    elif isinstance(value, (list, tuple)) or hasattr(value, "layers"):
        correct_call = call.format("kvpack.pack(past_key_values, recipe)")
    else:
        raise InvalidType(f"a {type(value).__name__} is not a packed cache: create one with kvpack.pack, or read one with kvpack.load")
    raise InvalidType(f"a {type(value).__name__} is not a packed cache: use {correct_call}")
