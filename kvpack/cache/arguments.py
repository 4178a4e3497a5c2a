"""Arguments of the wrong kind: each is refused with what to write instead."""

from __future__ import annotations

import operator
from typing import Any

import torch

from kvpack.formats.errors import InvalidDtype, InvalidParameter


def checked_device(device: Any) -> torch.device:
    """``device`` as torch names it. Raises InvalidParameter for what is no device."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise InvalidParameter(f"device is {device!r}, expected a torch.device or a name such as 'cpu' or 'cuda:0'") from None


def check_floating(dtype: Any) -> None:
    """Raise InvalidDtype unless ``dtype`` is a floating-point dtype of torch."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidDtype(f"dtype is {dtype!r}, expected one of torch, such as torch.bfloat16")
    if not dtype.is_floating_point:
        raise InvalidDtype(f"{dtype} cannot hold decoded values: they are floating point")


def integer(value: Any, what: str) -> int:
    """``value`` as an integer. Raises InvalidParameter, which calls it ``what``."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidParameter(f"{what} is {value!r:.80}, expected an integer") from None


def check_number(value: Any, what: str) -> None:
    """Raise InvalidParameter, which calls it ``what``, unless ``value`` is None or a number."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise InvalidParameter(f"{what} is {value!r:.80}, expected a number")
