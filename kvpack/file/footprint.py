"""What reading a file takes in memory, known before it is taken: what a caller's ``max_bytes`` is compared with.

``max_bytes`` bounds the bytes of the file, and beside them what its tensors decode to and everything else that opening,
verifying, attending, unpacking and slicing take, the tensors that they return aside: tables, copies and Python objects. Up to
``FREE_BYTES`` of the latter are not counted. The interpreter, the tiles that are decoded at a time, and the tables of codecs that
are kept for all files take at most ``CONSTANT_BYTES`` besides, and ``THREAD_BYTES`` for each further thread of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpack.formats.errors import LimitExceeded

from .header import layout_bytes

if TYPE_CHECKING:
    from .header import Header, SideEntry

FREE_BYTES = 1 << 24
"""Bytes that are not counted: what every ordinary file takes is a part of them."""
CONSTANT_BYTES = 1 << 26
"""Bytes that reading takes at most beside ``max_bytes``, ``FREE_BYTES`` among them."""
THREAD_BYTES = 1 << 25
"""As many again for every thread of torch but the first: each decodes a tile of its own."""

HEADER_FACTOR = 48
"""Bytes of Python objects that a byte of kvpack.header can become."""
JSON_FACTOR = 4
"""Copies of the JSON header: as it is in the file, as it must be, and the rows that this is made of."""
RUN_BYTES = 1024
TENSOR_BYTES = 3072
SIDE_BYTES = 8192
LAYER_BYTES = 512
CODEC_BYTES = 8192
"""Bytes for each run, tensor, side, layer and codec of a file once it is loaded and used."""
VALUE_BYTES = 40
"""Bytes that decoding and attending a value takes, while it does."""


def check_size(size: int, max_bytes: int | None) -> None:
    """Raise LimitExceeded for a file of more than ``max_bytes``."""
    if max_bytes is not None and size > max_bytes:
        raise LimitExceeded(f"has {size} bytes, max_bytes is {max_bytes}")


def check_front(size: int, json_bytes: int, header_bytes: int, max_bytes: int | None) -> None:
    """Raise LimitExceeded for a file whose header, once parsed, could take too much."""
    parts = {f"the {size} bytes of the file": size, f"a header of {header_bytes} bytes, parsed": _front_bytes(json_bytes, header_bytes)}
    _check(parts, max_bytes)


def check_header(header: Header, size: int, json_bytes: int, header_bytes: int, max_bytes: int | None) -> None:
    """Raise LimitExceeded, which names what takes how much, for a file that takes more than ``max_bytes``."""
    if max_bytes is None:
        return
    sizes = {name: layout_bytes(layout) for name, layout in header.layouts.items()}
    if (decoded := sum(sizes.values())) > max_bytes:
        raise LimitExceeded(f"its tensors, decoded, take {decoded} bytes, max_bytes is {max_bytes}")
    frames = [sizes[tensor.name] for tensor in header.tensors if tensor.filter == "zstd"]
    sides = [side for layer in header.layers for _, side in layer.sides()]
    runs = sum(len(side.runs) for side in sides)
    objects = len(header.tensors) * TENSOR_BYTES + len(sides) * SIDE_BYTES + len(header.layers) * LAYER_BYTES
    objects += len(header.codecs) * CODEC_BYTES
    values = max((side.batch * side.heads * header.codecs[side.codec].dim * _tokens_at_once(header, side) for side in sides), default=0)
    parts = {
        f"the {size} bytes of the file": size,
        # While one is decoded there are two copies of it.
        f"{len(frames)} zstd tensors, decoded": sum(frames) + max(frames, default=0),
        f"{len(header.tensors)} tensors of {len(header.layers)} layers and {len(header.codecs)} codecs": objects,
        f"a header of {header_bytes} bytes, parsed": _front_bytes(json_bytes, header_bytes),
        f"{runs} runs": runs * RUN_BYTES,
        f"{values} values that are decoded together": values * VALUE_BYTES,
    }
    _check(parts, max_bytes)


def _tokens_at_once(header: Header, side: SideEntry) -> int:
    return min(header.codecs[side.codec].token_group, max(side.runs, default=0))


def _front_bytes(json_bytes: int, header_bytes: int) -> int:
    return JSON_FACTOR * json_bytes + HEADER_FACTOR * header_bytes


def _check(parts: dict[str, int], max_bytes: int | None) -> None:
    """Raise LimitExceeded when ``parts`` take more than ``max_bytes`` and what is free, naming those that matter."""
    total = sum(parts.values())
    if max_bytes is not None and total > max_bytes + FREE_BYTES:
        named = sorted(((size, what) for what, size in parts.items() if size > total // 50), reverse=True)
        text = ", ".join(f"{size} for {what}" for size, what in named)
        raise LimitExceeded(f"takes up to {total} bytes in memory ({text}), max_bytes is {max_bytes} and {FREE_BYTES} more are allowed")
