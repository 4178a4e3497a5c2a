"""Checks of argument types; each message says what to write instead."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import torch

from kvpack.formats.errors import InvalidDtype, InvalidParameter


def checked_device(device: Any) -> torch.device:
    """``device`` as a torch.device. Raises InvalidParameter if it does not name one."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise InvalidParameter(f"device is {device!r}, expected a torch.device or a name such as 'cpu' or 'cuda:0'") from None


def check_floating(dtype: Any) -> None:
    """Raise InvalidDtype unless ``dtype`` is a floating-point dtype of torch."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidDtype(f"dtype is {dtype!r}, expected a torch dtype, such as torch.bfloat16")
    if not dtype.is_floating_point:
        raise InvalidDtype(f"{dtype} cannot hold decoded values, expected a floating-point dtype")


def integer(value: Any, what: str) -> int:
    """``value`` as an integer. Raises InvalidParameter; ``what`` names the value in the message."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidParameter(f"{what} is {value!r:.80}, expected an integer") from None


def check_number(value: Any, what: str) -> None:
    """Raise InvalidParameter unless ``value`` is None or a number; ``what`` names it in the message."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise InvalidParameter(f"{what} is {value!r:.80}, expected a number")


def refuse_pickle(value: object) -> NoReturn:
    """Raise InvalidParameter: ``value`` is part of a packed cache."""
    raise InvalidParameter(
        f"a packed {type(value).__name__} is not pickled: kvpack.save(cache, path) writes it, kvpack.load(path) reads it"
    )
