"""Checks of argument types; each message names the correct call."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any, NoReturn, TypeVar

import torch

from kvpack.formats.arguments import integer, shown
from kvpack.formats.errors import InvalidParameter, InvalidType

__all__ = ["check_floating", "check_number", "checked_device", "explained", "integer", "refuse_pickle"]

Kind = TypeVar("Kind")

_OF_TRANSFORMERS = {"get_seq_length", "get_mask_sizes", "get_max_length", "update", "is_compileable", "_is_user_defined", "key_cache"}
"""Attributes that transformers reads or sets on a cache that it is given."""


class _Unchangeable(InvalidParameter, FrozenInstanceError):
    """An attribute that a packed cache does not have, or that cannot be set."""


def checked_device(device: Any) -> torch.device:
    """``device`` as a torch.device that contains values. Raises InvalidParameter for one that this PyTorch cannot use."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise InvalidParameter(f"device is {shown(device)}, expected a torch.device or a name such as 'cpu' or 'cuda:0'") from None
    if found.type == "cpu":
        return found
    if found.type == "cuda" and (found.index or 0) >= (count := torch.cuda.device_count()):
        raise InvalidParameter(f"device is {str(found)!r}, but PyTorch finds {count} CUDA devices: use one that exists, or 'cpu'")
    if found.type == "meta":
        raise InvalidParameter("device is 'meta', which has no values: use a device such as 'cpu' or 'cuda:0'")
    try:
        torch.empty(0, dtype=torch.uint8, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0][:80]
        raise InvalidParameter(f"device is {str(found)!r}, which this PyTorch cannot use ({reason}); name another, such as 'cpu'") from None
    return found


def check_floating(dtype: Any) -> None:
    """Raise InvalidType unless ``dtype`` is a floating-point dtype of torch."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidType(f"dtype is {shown(dtype)}, expected a torch dtype, such as torch.bfloat16")
    if not dtype.is_floating_point:
        raise InvalidType(f"{dtype} cannot represent decoded values: use a floating-point dtype")


def check_number(value: Any, what: str) -> None:
    """Raise InvalidType unless ``value`` is None or a number that a float can represent; ``what`` names it in the message."""
    number = isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64)
    if value is not None and not number:
        raise InvalidType(f"{what} is {shown(value)}, expected a number")


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
        f"a packed {type(value).__name__} is not pickled: kvpack.save(cache, path) writes it, kvpack.load(path) reads it"
    )
