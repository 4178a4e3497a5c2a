"""Errors for packed caches and layers that are used as transformers caches or pickled. Each message names the right call."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any, NoReturn, TypeVar

from kvpack.formats.errors import InvalidParameter

Kind = TypeVar("Kind")

_OF_TRANSFORMERS = {"get_seq_length", "get_mask_sizes", "get_max_length", "update", "is_compileable", "_is_user_defined", "key_cache"}
"""Attributes that transformers reads or sets on a cache that it is given."""


class _Unchangeable(InvalidParameter, FrozenInstanceError):
    """An attribute that a packed cache does not have, or that cannot be set."""


def explained(kind: type[Kind]) -> type[Kind]:
    """Make errors of ``kind``, a frozen dataclass, tell transformers users which object to pass to a model instead."""
    refuse: Any = kind.__setattr__

    def missing(self: object, name: str) -> NoReturn:
        if name in _OF_TRANSFORMERS:
            raise _Unchangeable(_INSTEAD.format(type(self).__name__))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def unchangeable(self: object, name: str, value: object) -> None:
        if name in _OF_TRANSFORMERS:
            raise _Unchangeable(_INSTEAD.format(type(self).__name__))
        refuse(self, name, value)

    # A frozen dataclass may not define the second in its body.
    kind.__getattr__, kind.__setattr__ = missing, unchangeable  # type: ignore[attr-defined, method-assign]
    return kind


_INSTEAD = (
    "a packed {} is not a transformers cache: give the model kvpack.integrations.transformers.KvpackCache.of(cache, model), "
    "or KvpackCache.load(path, model)"
)


def refuse_pickle(value: object) -> NoReturn:
    """Raise InvalidParameter: ``value`` is part of a packed cache."""
    raise InvalidParameter(
        f"a packed {type(value).__name__} cannot be pickled: write it with kvpack.save(cache, path) and read it with kvpack.load(path)"
    )
