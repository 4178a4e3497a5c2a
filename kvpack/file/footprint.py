"""An upper bound on the memory for reading a file, which is compared with ``memory_limit``.

``memory_limit`` covers the file's bytes, its decoded tensors, and everything else that is allocated by opening, verifying, attending,
unpacking and slicing (tables, copies, Python objects), except the tensors that these operations return. Allocations of up to ``FREE_BYTES``
are not counted. The interpreter, the tiles being decoded, and codec tables cached for all files take at most ``CONSTANT_BYTES`` more, plus
``THREAD_BYTES`` for each PyTorch thread after the first.
"""

from __future__ import annotations

from kvpack.formats.errors import LimitExceeded

from .header import Header, SideEntry, layout_bytes

FREE_BYTES = 1 << 24
"""Total size, in bytes, of allocations that are not counted. Ordinary files need less."""
CONSTANT_BYTES = 1 << 26
"""Maximum memory in bytes that reading takes beyond ``memory_limit``, including ``FREE_BYTES``."""
THREAD_BYTES = 1 << 25
"""Memory in bytes for the tile of each PyTorch thread after the first."""

HEADER_FACTOR = 48
"""Maximum size, in bytes, of the Python objects for one byte of kvpack.header."""
JSON_FACTOR = 4
"""Number of copies of the JSON header in memory: as stored, as rebuilt, and as the strings from which it is rebuilt."""
RUN_BYTES = 1024
TENSOR_BYTES = 3072
SIDE_BYTES = 8192
LAYER_BYTES = 512
CODEC_BYTES = 8192
"""Memory in bytes per run, tensor, side, layer and codec of a file that is loaded and used."""
VALUE_BYTES = 40
"""Temporary memory in bytes per value that is decoded and attended."""


def check_size(size: int, memory_limit: int) -> None:
    """Raise LimitExceeded if a file of ``size`` bytes is larger than ``memory_limit``."""
    if size > memory_limit:
        raise LimitExceeded(f"has {size} bytes, but memory_limit is {memory_limit}: pass a higher limit to load it")


def check_front(size: int, json_bytes: int, header_bytes: int, memory_limit: int) -> None:
    """Raise LimitExceeded if reading the file and parsing its header could take more memory than ``memory_limit``."""
    parts = {f"the {size} bytes of the file": size, f"the parsed header of {header_bytes} bytes": _front_bytes(json_bytes, header_bytes)}
    _check_memory(parts, memory_limit)


def check_header(header: Header, size: int, json_bytes: int, header_bytes: int, memory_limit: int) -> None:
    """Raise LimitExceeded if reading a file could take more memory than ``memory_limit``. The message lists the largest parts."""
    sizes = {name: layout_bytes(layout) for name, layout in header.layouts.items()}
    if (decoded := sum(sizes.values())) > memory_limit:
        raise LimitExceeded(
            f"its decoded tensors take up {decoded} bytes, but memory_limit is {memory_limit}: pass a higher limit to load it"
        )
    frames = [sizes[tensor.name] for tensor in header.tensors if tensor.filter == "zstd"]
    sides = [side for layer in header.layers for _, side in layer.sides()]
    runs = sum(len(side.runs) for side in sides)
    objects = len(header.tensors) * TENSOR_BYTES + len(sides) * SIDE_BYTES + len(header.layers) * LAYER_BYTES
    objects += len(header.codecs) * CODEC_BYTES
    values = max((side.batch * side.heads * _values_at_once(header, side) for side in sides), default=0)
    parts = {
        f"the {size} bytes of the file": size,
        # The frame being decoded is in memory twice.
        f"{len(frames)} zstd tensors, decoded": sum(frames) + max(frames, default=0),
        f"{len(header.tensors)} tensors of {len(header.layers)} layers and {len(header.codecs)} codecs": objects,
        f"the parsed header of {header_bytes} bytes": _front_bytes(json_bytes, header_bytes),
        f"{runs} runs": runs * RUN_BYTES,
        f"{values} values that are decoded together": values * VALUE_BYTES,
    }
    _check_memory(parts, memory_limit)


def _values_at_once(header: Header, side: SideEntry) -> int:
    """Return the number of values per head that are decoded together: one token group, plus all rows that are stored once per run."""
    codec, longest = header.codecs[side.codec], max(side.runs, default=0)
    return codec.dim * min(codec.group_tokens, longest) + (codec.without_sidecars.values_per_run if longest else 0)


def _front_bytes(json_bytes: int, header_bytes: int) -> int:
    return JSON_FACTOR * json_bytes + HEADER_FACTOR * header_bytes


def _check_memory(parts: dict[str, int], memory_limit: int) -> None:
    """Raise LimitExceeded if ``parts``, in bytes, add up to more than ``memory_limit`` plus ``FREE_BYTES``."""
    total = sum(parts.values())
    if total > memory_limit + FREE_BYTES:
        largest = sorted(((size, part) for part, size in parts.items() if size > total // 50), reverse=True)
        text = ", ".join(f"{size} for {part}" for size, part in largest)
        more = f"but memory_limit is {memory_limit} (plus {FREE_BYTES} that are always allowed): pass a higher limit"
        raise LimitExceeded(f"reading could take {total} bytes of memory ({text}), {more}")
