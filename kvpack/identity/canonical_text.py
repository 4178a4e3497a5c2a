"""Converts values to text that is the same in every process, for the digests of an identity (spec/store.md, Keys)."""

from __future__ import annotations

import enum
import hashlib
import json
import types
from contextlib import suppress
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from kvpack.formats.errors import InvalidParameter
from kvpack.formats.lazy import numpy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

SCALARS = frozenset({type(None), bool, int, float, str})
"""The types of scalar values that JSON represents exactly."""
ALL, SAMPLE, FILES = "sha256", "sample-sha256", "files-xxh3"
"""Prefixes, before a colon, of ``Identity.weights`` texts: a digest of all weights in memory, of a sample, or of a checkpoint's files.

Any other text is a revision. Different kinds are never compared.
"""
IDENTITY_ADVICE = "build the kvpack.Identity yourself, and include in it everything that the keys and values depend on"
"""Advice at the end of messages about a model that cannot be digested."""


def weights_kind(weights: str) -> str:
    """Return the kind of digest in ``Identity.weights``: ``ALL``, ``SAMPLE`` or ``FILES``. Empty if ``weights`` is a revision or empty."""
    kind = weights.partition(":")[0]
    return kind if kind in (ALL, SAMPLE, FILES) else ""


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


def to_json_value(where: str, value: Any, max_values: int | None = None) -> Any:
    """Convert ``value`` to JSON values. A tensor becomes its digest, which covers at most ``max_values`` of its values.

    Raises InvalidParameter, with ``where`` in the message, if kvpack cannot convert a value to text.
    """
    if type(value) in SCALARS:
        return value
    import torch

    if isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return to_json_value(where, value.value, max_values)
    if isinstance(value, (torch.dtype, torch.layout)):
        return str(value)
    if isinstance(value, torch.Tensor):
        return tensor_digest(where, value, max_values)
    if isinstance(value, numpy.ndarray) and value.dtype.kind in _NUMBERS:
        return f"{value.dtype} {list(value.shape)} {xxhash.xxh3_128_hexdigest(numpy.ascontiguousarray(value).data)}"
    if _is_structure(value):
        return to_json_value(where, vars(value), max_values)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [to_json_value(f"{where}[{number}]", item, max_values) for number, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted((to_json_value(where, item, max_values) for item in value), key=json_text)
    if isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {key: to_json_value(f"{where}.{key}", item, max_values) for key, item in value.items()}
        return sorted(
            ([to_json_value(where, key, max_values), to_json_value(f"{where}[{key!r}]", item, max_values)] for key, item in value.items()),
            key=json_text,
        )
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return to_json_value(where, value.item(), max_values)
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


def tensor_digest(where: str, tensor: torch.Tensor, max_values: int | None = None) -> str:
    """Return a tensor's dtype and shape, and the XXH3-128 of its bytes. For a quantized tensor, the digest covers all of its parts.

    With ``max_values``, only that many evenly spaced values are digested. Raises InvalidParameter, with ``where`` in the message, if values
    are not in memory or cannot be read as bytes.
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
        parts = [[name, tensor_digest(f"{where}.{name}", getattr(tensor, name), max_values)] for name in names]
        return f"{kind} {described} {json_digest([parts, to_json_value(where, context)])}"
    # The bytes of PyTorch's quantized tensors lack their scales.
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    try:
        values = _spaced_values(tensor.detach(), max_values)
        data = values.cpu().contiguous().flatten().view(torch.uint8).numpy()
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


def sample_values(named_values: Sequence[tuple[str, Any]], max_values: int) -> list[Any]:
    """Return the result of ``to_json_value`` for each (name, value) pair.

    Tensors are read in batches, because each read waits for a device.
    """
    import torch

    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
    for number, (_, value) in enumerate(named_values):
        if (
            type(value) in (torch.Tensor, torch.nn.Parameter)
            and value.layout is torch.strided
            and not value.is_quantized
            and value.device.type != "meta"
        ):
            groups.setdefault((value.device, value.dtype), []).append((number, value))
    result: dict[int, str] = {}
    for (_, dtype), tensors in groups.items():
        # If they cannot be read together, the loop below names the one that cannot be read.
        if dtype.itemsize in _INTEGERS:
            with suppress(RuntimeError, TypeError, NotImplementedError), torch.no_grad():
                result |= _batch_digests(tensors, getattr(torch, _INTEGERS[dtype.itemsize]), max_values)
    return [
        result[number] if number in result else to_json_value(name, value, max_values) for number, (name, value) in enumerate(named_values)
    ]


_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""Integer dtypes by size in bytes. Values are read as integers of the same size."""


def _batch_digests(tensors: Sequence[tuple[int, torch.Tensor]], dtype: torch.dtype, max_values: int) -> dict[int, str]:
    """Return the ``tensor_digest`` of each tensor, by index. ``tensors`` contains (index, tensor) pairs.

    The tensors must be on the same device and have the same item size. Values are read as integers of ``dtype``.
    """
    import torch

    samples = [x if x.dim() == 1 else x.flatten() for x in (_spaced_values(tensor, max_values) for _, tensor in tensors)]
    data = torch.cat(samples).cpu().view(dtype).numpy().data.cast("B")
    result, start = {}, 0
    described: dict[torch.Size, str] = {}
    for (number, tensor), sample in zip(tensors, samples, strict=True):
        stop = start + sample.nbytes
        shape = tensor.shape
        if shape not in described:
            described[shape] = f"{tensor.dtype} {list(shape)}"
        result[number] = f"{described[shape]} {xxhash.xxh3_128_hexdigest(data[start:stop])}"
        start = stop
    return result


def _spaced_values(values: torch.Tensor, max_values: int | None) -> torch.Tensor:
    """Return ``max_values`` evenly spaced values, or all values if there are fewer."""
    import torch

    if max_values is None or values.numel() <= max_values:
        return values
    step = values.numel() // max_values
    if values.is_contiguous():
        return values.as_strided((max_values,), (step,))
    return values[torch.unravel_index(torch.arange(max_values, device=values.device) * step, values.shape)]
