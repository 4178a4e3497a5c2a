"""The JSON header, tensors and alignment (spec/container.md)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .contents import Tensor
from .conventions import ceil_div
from .limits import FORMAT
from .xxh3 import xxh3_128

JSON_START = b'{"__metadata__":{"format":"kvpack","kvpack":"'
JSON_HEADER = re.compile(
    re.escape(JSON_START.decode()) + r'1 ([0-9a-f]{32})"\},'
    r'"kvpack\.header":\{"dtype":"U8","shape":\[([1-9][0-9]{0,6})\],"data_offsets":\[0,\2\]\}'
)
ALIGNMENT = 64
BLOCK = 4096


@dataclass(frozen=True)
class TensorSpan:
    """Position of a tensor or pad in the data section. ``tensor`` is None for a pad."""

    begin: int
    end: int
    tensor: Tensor | None


def tensor_spans(header_bytes: int, tensors: Sequence[Tensor]) -> list[TensorSpan]:
    """Return the positions of tensors and pads (container.md, Tensors and alignment)."""
    spans, at = [], header_bytes
    for tensor in tensors:
        if at % ALIGNMENT:
            spans.append(TensorSpan(at, ceil_div(at, ALIGNMENT) * ALIGNMENT, None))
            at = spans[-1].end
        spans.append(TensorSpan(at, at + tensor.stored_bytes, tensor))
        at += tensor.stored_bytes
    return spans


def json_header(header: bytes, tensors: Sequence[Tensor]) -> bytes:
    """Return the JSON header. It is determined by the tensor ``kvpack.header`` and the tensors that it lists."""
    parts = [JSON_START.decode() + f'{FORMAT} {xxh3_128(header).hex()}"}}']

    def entry(name: str, dtype: str, shape: Sequence[int], begin: int, end: int) -> str:
        return f',"{name}":{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":[{begin},{end}]}}'

    parts.append(entry("kvpack.header", "U8", [len(header)], 0, len(header)))
    pads = 0
    for place in tensor_spans(len(header), tensors):
        size = place.end - place.begin
        if place.tensor is None:
            parts.append(entry(f"kvpack.pad.{pads}", "U8", [size], place.begin, place.end))
            pads += 1
        elif place.tensor.filter == "none":
            parts.append(entry(place.tensor.name, place.tensor.dtype, place.tensor.shape, place.begin, place.end))
        else:
            parts.append(entry(place.tensor.name, "U8", [size], place.begin, place.end))
    text = "".join(parts).encode("ascii") + b"}"
    return text + b" " * (-(8 + len(text)) % BLOCK)
