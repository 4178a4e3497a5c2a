"""Reads and writes other programs' safetensors files, with limits. Tensors to write are not copied.

The safetensors package maps files to read them, so another process could crash this one by truncating a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from kvpack.file.front import other_format_name
from kvpack.file.limits import MAX_TOKENS
from kvpack.file.user_files import DiskFile, Source, open_regular
from kvpack.formats.arguments import prefix_errors
from kvpack.formats.errors import InvalidParameter

Result = TypeVar("Result")

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""torch dtypes by safetensors name."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

MAX_VALUES = 2**63 - 1
"""Maximum product of a tensor's nonzero sizes. PyTorch's strides have 64 bits."""

MAX_HEADER_BYTES = 2**22
"""Maximum size of a header in bytes. Parsed JSON can take up 24 times as much memory."""

_MAX_DIMS = 16


class _TensorEntry(NamedTuple):
    """A tensor in a file, with its dtype, its shape, and its byte range ``[begin, end)``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read(
    path: str, check: Callable[[list[str], dict[str, str]], Result], max_header_bytes: int = MAX_HEADER_BYTES
) -> tuple[dict[str, torch.Tensor], Result]:
    """Read all tensors of a safetensors file. Returns the tensors by name, and the result of ``check(names, metadata)``.

    ``check`` is called before any tensor is read. The tensors are copies, so the file may change afterward. Raises MissingFile, Truncated
    if the file shrinks during the read, InvalidParameter if it is not a valid safetensors file, and any error of ``check``.
    """
    source = DiskFile(open_regular(path))
    try:
        entries, metadata = _read_header(path, source, max_header_bytes)
        result = check(list(entries), metadata)
        return {name: _read_tensor(path, source, entry) for name, entry in entries.items()}, result
    finally:
        source.close()


def pieces(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> list[memoryview]:
    """Return a safetensors file of the CPU tensors ``tensors``, as a list of byte buffers.

    The buffers share the tensors' memory, which the safetensors package would copy.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end, result = 0, []
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        result.append(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *result]


def _read_header(path: str, source: Source, max_header_bytes: int) -> tuple[dict[str, _TensorEntry], dict[str, str]]:
    """Return the tensor entries in file order, and the metadata. Raises InvalidParameter unless the tensors exactly fill the file."""
    if source.size < 8:
        raise InvalidParameter(f"{path} is not a safetensors file: it has only {source.size} bytes")
    first = bytes(_read(path, source, 0, 8))
    length = int.from_bytes(first, "little")
    # The first bytes of a length can look like another format, so check the size first.
    if 8 + length > source.size and (other := other_format_name(first)):
        hint = ": save its tensors with safetensors.torch.save_file" if "PyTorch" in other or "pickle" in other else ""
        raise InvalidParameter(f"{path} is {other}, not a safetensors file{hint}")
    if 8 + length > source.size:
        raise InvalidParameter(f"{path} is not a safetensors file: it has {source.size} bytes, but its header would end at {8 + length}")
    if length > max_header_bytes:
        raise InvalidParameter(f"{path}: the header has {length} bytes, but at most {max_header_bytes} are allowed")
    header = _parse_header(path, _read(path, source, 8, 8 + length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise InvalidParameter(f"{path} is not a safetensors file: its __metadata__ is not a map from names to strings")
    entries = {name: _parse_entry(path, name, described) for name, described in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    end = 0
    for name, entry in entries.items():
        if entry.begin != end:
            fault = f"the tensor {name!r} begins at byte {entry.begin}, expected {end}"
            raise InvalidParameter(f"{path} is not a safetensors file: {fault}, where the previous tensor ends")
        end = entry.end
    if 8 + length + end != source.size:
        raise InvalidParameter(f"{path} is not a safetensors file: it has {source.size} bytes, but its tensors end at {8 + length + end}")
    return {name: entry._replace(begin=8 + length + entry.begin, end=8 + length + entry.end) for name, entry in entries.items()}, metadata


def _parse_header(path: str, data: memoryview) -> dict[str, Any]:
    """Return the JSON object in a header. Raises InvalidParameter if it is not valid JSON or repeats a name."""

    def check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("it contains a name twice")
        return result

    try:
        text = str(data, "utf-8")
        header: dict[str, Any] = json.loads(text, object_pairs_hook=check_unique)
        if not text.startswith("{"):
            raise ValueError("it does not begin with '{'")
        # Half of a surrogate pair cannot be encoded again.
        metadata = header.get("__metadata__")
        for name in (*header, *(word for item in (metadata.items() if isinstance(metadata, dict) else ()) for word in item)):
            str(name).encode()
    except (ValueError, RecursionError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is not a valid JSON object: {error}"
        raise InvalidParameter(f"{path} is not a safetensors file: its header {reason}") from None
    return header


def _parse_entry(path: str, name: str, description: Any) -> _TensorEntry:
    """Parse the JSON description of the tensor ``name``."""
    match description:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end], **others} if not others and all(
            type(number) is int and number >= 0 for number in (*shape, begin, end)
        ):
            pass
        case _:
            raise InvalidParameter(
                f"{path} is not a safetensors file: the tensor {name!r:.200} is {description!r:.200}, expected a dtype, a shape and "
                "data_offsets of integers"
            )
    torch_dtype = _DTYPES.get(dtype)
    if torch_dtype is None:
        fault = f"the tensor {name!r:.200} has dtype {dtype!r:.40}, expected one of {', '.join(_DTYPES)}"
        raise InvalidParameter(f"{path} is not a safetensors file: {fault}")
    _check_shape(path, name, shape)
    size = math.prod(shape) * torch_dtype.itemsize
    if end - begin != size:
        fault = f"of {dtype} {shape} has {end - begin} bytes, expected {size}"
        raise InvalidParameter(f"{path} is not a safetensors file: the tensor {name!r:.200} {fault}")
    return _TensorEntry(torch_dtype, tuple(shape), begin, end)


def _read_tensor(path: str, source: Source, entry: _TensorEntry) -> torch.Tensor:
    data = torch.empty(entry.end - entry.begin, dtype=torch.uint8, device="cpu")
    _read_into(path, source, entry.begin, data.numpy().data)
    return data.view(entry.dtype).view(entry.shape)


def _read(path: str, source: Source, begin: int, end: int) -> memoryview:
    data = memoryview(bytearray(end - begin))
    _read_into(path, source, begin, data)
    return data


def _read_into(path: str, source: Source, begin: int, memory: memoryview) -> None:
    with prefix_errors(path):
        source.read_into(begin, memory)


def _check_shape(path: str, name: str, shape: list[int]) -> None:
    """Raise InvalidParameter if PyTorch cannot create a tensor of this shape, even an empty one."""
    if len(shape) > _MAX_DIMS:
        raise InvalidParameter(f"{path}: the tensor {name!r:.200} has {len(shape)} dimensions, but at most {_MAX_DIMS} are supported")
    if shape and max(shape) > MAX_TOKENS:
        raise InvalidParameter(f"{path}: the tensor {name!r} has shape {shape}, but each dimension may be at most {MAX_TOKENS}")
    # Empty tensors have strides too.
    if (values := math.prod(max(1, size) for size in shape)) > MAX_VALUES:
        fault = f"but the product of its nonzero dimensions may be at most {MAX_VALUES}, not {values}"
        raise InvalidParameter(f"{path}: the tensor {name!r} has shape {shape}, {fault}")
