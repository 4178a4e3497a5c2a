"""safetensors files that are not kvpack's, read within limits and written without a second copy of their tensors."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from kvpack.coding.encoding import STATE_DTYPES
from kvpack.file.limits import MAX_JSON_BYTES, MAX_TOKENS
from kvpack.file.user_files import open_regular
from kvpack.formats.errors import InvalidParameter, MissingFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Found = TypeVar("Found")

_NAMES = {**STATE_DTYPES, torch.int32: "I32", torch.int64: "I64"}
"""safetensors names of the dtypes that are written."""

MAX_VALUES = 2**63 - 1
"""The most values of a tensor, where sizes of 0 count as 1: torch's strides have 64 bits."""


def read(path: str, check: Callable[[list[str], dict[str, str]], Found]) -> tuple[dict[str, torch.Tensor], Found]:
    """The tensors of a safetensors file, and what ``check`` makes of their names and of the metadata, before any is read.

    Raises MissingFile, InvalidParameter when the file is no safetensors file or has a tensor that torch cannot hold, and what ``check``
    raises.
    """
    _check_front(path)
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            found = check(names, file.metadata() or {})
            for name in names:
                _check_shape(path, name, file.get_slice(name).get_shape())
            return {name: file.get_tensor(name) for name in names}, found
    except OSError as error:
        raise MissingFile(f"{path}: could not be opened: {error.strerror or error}") from None
    except SafetensorError as error:
        text = str(error).encode("unicode_escape").decode("ascii")
        raise InvalidParameter(f"{path}: is not a safetensors file: {text}") from None


def pieces(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> list[memoryview]:
    """A safetensors file of ``tensors`` on the CPU, as pieces that share their memory: safetensors' own writer would hold a copy."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end, found = 0, []
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        found.append(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *found]


def _check_front(path: str) -> None:
    """Refuse a file that is not regular, which could make safetensors wait, and a header larger than that of any cache."""
    descriptor = open_regular(path)
    try:
        length = int.from_bytes(os.read(descriptor, 8), "little")
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if 8 + length > size:
        raise InvalidParameter(f"{path}: is not a safetensors file: it has {size} bytes, and its header would end at {8 + length}")
    if length > MAX_JSON_BYTES:
        raise InvalidParameter(f"{path}: its header has {length} bytes, the limit is {MAX_JSON_BYTES}")


def _check_shape(path: str, name: str, shape: list[int]) -> None:
    """Refuse a shape that no torch tensor can have, such as an empty one of 2^63 tokens."""
    if shape and max(shape) > MAX_TOKENS:
        raise InvalidParameter(f"{path}: the tensor {name!r} has the shape {shape}, the largest size is {MAX_TOKENS}")
    # An empty tensor has strides as well.
    if (values := math.prod(max(1, size) for size in shape)) > MAX_VALUES:
        what = f"whose nonzero sizes have the product {values}, the limit is {MAX_VALUES}"
        raise InvalidParameter(f"{path}: the tensor {name!r} has the shape {shape}, {what}")
