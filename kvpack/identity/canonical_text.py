"""Converts values to text that is the same in every process, for the digests of an identity (spec/store.md, Keys)."""

from __future__ import annotations

import enum
import hashlib
import json
import types
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from kvpack.formats.errors import InvalidParameter
from kvpack.formats.lazy import numpy

if TYPE_CHECKING:

    import torch

SCALARS = frozenset({type(None), bool, int, float, str})
"""The types of scalar values that JSON represents exactly."""
ALL, FILES = "sha256", "files-xxh3"
"""Prefixes, before a colon, of ``Identity.weights`` texts: a digest of all weights in memory, or of a checkpoint's files.

Any other text is a revision. Different kinds are never compared.
"""
IDENTITY_ADVICE = "build the kvpack.Identity yourself, and include in it everything that the keys and values depend on"
"""Advice at the end of messages about a model that cannot be digested."""


def weights_kind(weights: str) -> str:
    """Return the kind of digest in ``Identity.weights``: ``ALL`` or ``FILES``. Empty if ``weights`` is a revision or empty."""
    kind = weights.partition(":")[0]
    return kind if kind in (ALL, FILES) else ""


def json_digest(value: Any) -> str:
    """Return the SHA-256 of ``json_text(value)`` in hexadecimal digits."""
    return f"sha256:{hashlib.sha256(json_text(value).encode('utf-8', 'surrogatepass')).hexdigest()}"


def json_text(value: Any) -> str:
    """Return ``value`` as JSON without spaces and with sorted keys. ``value`` is a result of ``to_json_value``."""
    return _JSON.encode(value)


_NUMBERS = "biufc"
"""Kinds of NumPy dtypes whose values are determined by their bytes."""
_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def to_json_value(where: str, value: Any) -> Any:
    """Convert ``value`` to JSON values. A tensor becomes its digest.

    Raises InvalidParameter, with ``where`` in the message, if kvpack cannot convert a value to text.
    """
    if type(value) in SCALARS:
        return value
    import torch

    if isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return to_json_value(where, value.value)
    if isinstance(value, (torch.dtype, torch.layout)):
        return str(value)
    if isinstance(value, torch.Tensor):
        return tensor_digest(where, value)
    if isinstance(value, numpy.ndarray) and value.dtype.kind in _NUMBERS:
        return f"{value.dtype} {list(value.shape)} {xxhash.xxh3_128_hexdigest(numpy.ascontiguousarray(value).data)}"
    if _is_structure(value):
        return to_json_value(where, vars(value))
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [to_json_value(f"{where}[{number}]", item) for number, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted((to_json_value(where, item) for item in value), key=json_text)
    if isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {key: to_json_value(f"{where}.{key}", item) for key, item in value.items()}
        return sorted(
            ([to_json_value(where, key), to_json_value(f"{where}[{key!r}]", item)] for key, item in value.items()),
            key=json_text,
        )
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return to_json_value(where, value.item())
    raise InvalidParameter(f"{where} is a {class_name(type(value))}, which kvpack cannot include in a digest: {IDENTITY_ADVICE}")


def is_constant(value: Any) -> bool:
    """Return True for a tensor, an array, a NumPy scalar, or a structure or container of these and of other scalars."""
    import torch

    if isinstance(value, (torch.Tensor, numpy.generic)):
        return True
    if isinstance(value, numpy.ndarray):
        return value.dtype.kind in _NUMBERS
    if _is_structure(value):
        return is_constant(vars(value))
    if isinstance(value, (list, tuple)):
        items: list[Any] = list(value)
    elif isinstance(value, dict) and all(map(_is_scalar, value)):
        items = list(value.values())
    else:
        return False
    return all(_is_scalar(item) or is_constant(item) for item in items)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _is_structure(value: Any) -> bool:
    if isinstance(value, types.SimpleNamespace):
        return True
    # Configurations have their own text form.
    return is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__") and not hasattr(value, "to_dict")


def tensor_digest(where: str, tensor: torch.Tensor) -> str:
    """Return a tensor's dtype and shape, and the XXH3-128 of its bytes. For a quantized tensor, the digest covers all of its parts.

    Raises InvalidParameter, with ``where`` in the message, if values are not in memory or cannot be read as bytes.
    """
    import torch

    kind = class_name(type(tensor))
    if tensor.device.type == "meta":
        raise InvalidParameter(
            f"{where} is on the meta device: its values are not in memory (offloaded, or not loaded yet), so they cannot be digested; "
            "load the whole model, or pass weights= (a revision) if it is a weight"
        )
    if kind.endswith(".DTensor"):
        raise InvalidParameter(
            f"{where} is a DTensor, but this process holds only part of it: pass weights= (a revision), or {IDENTITY_ADVICE}"
        )
    described = tensor_text(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        parts = [[name, tensor_digest(f"{where}.{name}", getattr(tensor, name))] for name in names]
        return f"{kind} {described} {json_digest([parts, to_json_value(where, context)])}"
    # The bytes of PyTorch's quantized tensors lack their scales.
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    try:
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidParameter(
            f"{where} ({kind}, {described}) cannot be digested, because its bytes cannot be read ({reason}): "
            f"pass weights= (a revision) if it is a weight, or {IDENTITY_ADVICE}"
        ) from None
    return f"{described} {xxhash.xxh3_128_hexdigest(data.data)}"


def tensor_text(tensor: torch.Tensor) -> str:
    """Return a dense tensor's dtype and shape in the form that ``tensor_digest`` uses."""
    return f"{tensor.dtype} {list(tensor.shape)}"
