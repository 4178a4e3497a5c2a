"""Argument checks and helpers for error messages."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Mapping, Set
from typing import Any

from .errors import InvalidParameter, InvalidType, KvpackError
from .lazy import torch

_MAX_SHOWN = 80
"""Maximum number of characters of a value that a message shows."""
_BOOL_TYPES = {"bool", "bool_"}
"""Names of the Boolean types of Python and NumPy."""


def describe(value: Any) -> str:
    """Format ``value`` for a message: numbers and short strings in full, bytes by their length, anything else by its type."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"
    if value is None or isinstance(value, bool | float | complex | str):
        return f"{value!r:.{_MAX_SHOWN}}"
    if isinstance(value, int):
        # Python refuses to convert huge integers to decimal digits.
        return str(value) if -(2**63) <= value < 2**64 else f"a {value.bit_length()}-bit integer"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"a {type(value).__name__} of {dtype} {list(shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)} items"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


@contextlib.contextmanager
def prefix_errors(where: str, kind: type[KvpackError] = KvpackError) -> Iterator[None]:
    """Return a context manager that prefixes the messages of ``kind`` errors with ``where``."""
    try:
        yield
    except kind as error:
        raise type(error)(f"{where}: {error}") from None


def as_integer(value: Any, name: str) -> int:
    """Return ``value`` as an int. Raises InvalidType if it is not an integer; the message calls it ``name``."""
    if type(value) is int:
        return value
    try:
        # operator.index raises for tensors on the meta device and for arrays of several values.
        return int(operator.index(value))
    except (TypeError, ValueError, RuntimeError):
        raise InvalidType(f"{name} is {describe(value)}, expected an integer") from None


def check_flag(value: Any, name: str) -> None:
    """Raise InvalidType unless ``value`` is a bool. Strings are rejected because even "no" is truthy."""
    if type(value).__name__ not in _BOOL_TYPES and not (type(value) is int and value in (0, 1)):
        raise InvalidType(f"{name} is {describe(value)}, expected True or False")


def check_callback(value: Any, name: str = "progress") -> None:
    """Raise InvalidType unless ``value`` is None or callable."""
    if value is not None and not callable(value):
        raise InvalidType(f"{name} is {describe(value)}, expected a callable that takes (done, total), or None")


def check_mapping(value: Any, name: str, example: str) -> None:
    """Raise InvalidType unless ``value`` is None or a mapping. The message shows ``example``."""
    if value is not None and not isinstance(value, Mapping):
        raise InvalidType(f"{name} is {describe(value)}, expected a mapping such as {example}")


def as_list(value: Any, name: str, expected: str) -> list[Any]:
    """Return the items of a list, tuple, array or other sequence.

    Raises InvalidType for anything else; ``expected`` describes the items in the message.
    """
    if not isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set | type):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return list(value)
    raise InvalidType(f"{name} is {describe(value)}, expected a list of {expected}")


def check_text(value: Any, name: str) -> None:
    """Raise InvalidType unless ``value`` is a string."""
    if not isinstance(value, str):
        raise InvalidType(f"{name} is {describe(value)}, expected a string")


def checked_device(device: Any) -> torch.device:
    """Convert ``device`` to a torch.device. Raises InvalidParameter if PyTorch cannot allocate tensors on it."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise InvalidParameter(f"device is {describe(device)}, expected a torch.device or a name such as 'cpu' or 'cuda:0'") from None
    if parsed.type == "cpu":
        return parsed
    if parsed.type == "cuda" and (parsed.index or 0) >= (count := torch.cuda.device_count()):
        raise InvalidParameter(f"device is {str(parsed)!r}, but the number of CUDA devices is {count}: use an existing device, or 'cpu'")
    if parsed.type == "meta":
        raise InvalidParameter("device is 'meta', which has no values: use a device such as 'cpu' or 'cuda:0'")
    try:
        torch.empty(0, dtype=torch.uint8, device=parsed)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0][:80]
        raise InvalidParameter(
            f"device is {str(parsed)!r}, which this version of PyTorch cannot use ({reason}): use another, such as 'cpu'"
        ) from None
    return parsed


def check_floating(dtype: Any) -> None:
    """Raise InvalidType unless ``dtype`` is a floating-point torch.dtype."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidType(f"dtype is {describe(dtype)}, expected a torch dtype, such as torch.bfloat16")
    if not dtype.is_floating_point:
        raise InvalidType(f"{dtype} cannot represent decoded values: use a floating-point dtype")


def check_number(value: Any, name: str) -> None:
    """Raise InvalidType unless ``value`` is None or a number, and InvalidParameter if it is not finite. Messages call it ``name``."""
    number = isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64)
    if value is not None and not number:
        raise InvalidType(f"{name} is {describe(value)}, expected a number")
    if value is not None and not math.isfinite(value):
        raise InvalidParameter(f"{name} is {value}, expected a finite number")
