"""Errors for packed objects that are pickled, or passed to a model as if they were transformers caches."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any, NoReturn, Self, TypeVar

from kvpack.formats.errors import InvalidParameter

Class = TypeVar("Class")

_CACHE_ATTRIBUTES = {"get_seq_length", "get_mask_sizes", "get_max_length", "update", "is_compileable", "_is_user_defined", "key_cache"}
"""Attributes that transformers reads or sets on its caches."""


class _NotATransformersCache(InvalidParameter, FrozenInstanceError):
    """Raised on access to an attribute that only transformers caches have."""


def explain_errors(cls: type[Class]) -> type[Class]:
    """Decorate a class so that using its objects as transformers caches raises an error that names the right class."""
    set_attribute: Any = cls.__setattr__
    message = (
        "a LiveCache is not a transformers cache: pass the model kvpack.integrations.transformers.KvpackCache(model, recipe), or "
        "KvpackCache.of(live.freeze(), model) to continue its tokens"
        if hasattr(cls, "freeze")
        else f"a packed {cls.__name__} is not a transformers cache: pass the model kvpack.integrations.transformers.KvpackCache.of(cache, "
        "model), or KvpackCache.load(path, model)"
    )

    def refuse_access(self: object, name: str) -> NoReturn:
        if name in _CACHE_ATTRIBUTES:
            raise _NotATransformersCache(message)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def refuse_change(self: object, name: str, value: object) -> None:
        if name in _CACHE_ATTRIBUTES:
            raise _NotATransformersCache(message)
        set_attribute(self, name, value)

    # A frozen dataclass must not define __setattr__ in its body.
    cls.__getattr__, cls.__setattr__ = refuse_access, refuse_change  # type: ignore[attr-defined, method-assign]
    return cls


class PackedObject:
    """Base class of immutable caches and their parts. Copying returns the same object. Pickling is not supported."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise InvalidParameter(
            f"a packed {type(self).__name__} cannot be pickled: write it with kvpack.save(cache, path) and read it with kvpack.load(path)"
        )
