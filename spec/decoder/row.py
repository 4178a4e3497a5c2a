"""Rows of pages (spec/row.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .codec import Codec, NumberStream
from .codecs import CODECS
from .container import index_by_digest
from .contents import File
from .conventions import ceil_div, word32, word64
from .features import CODEC_FEATURES
from .header import parse_msgpack, take_header
from .json_header import ALIGNMENT
from .packing import MAX_DIM
from .refusal import require
from .values import decode_side

ROW_MAGIC = b"kvpack-row 1\n\0\0\0"
FRAME_BYTES = 128
MAX_ROW_BYTES = 2**32 - 64
MULTIPLIER = 0x9E3779B97F4A7C15
PAGE_DTYPE = "page-dtype"
PAGE_DTYPES = (b"bf16", b"fp16", b"fp32", b"fp8_e4m3", b"fp8_e5m2", b"u8")
ROW = "row.md, Layout"


@dataclass
class Row:
    """A decoded row: the fields of its frame, and its page as a file without other contents."""

    namespace: bytes
    key: bytes
    page: File


def opaque(entry: Mapping[str, Any]) -> Codec:
    require(list(entry) == ["id", "dim"], "row.md, Decode", f"the map of codec opaque has the keys {list(entry)}, expected id and dim")
    dim = entry["dim"]
    require(isinstance(dim, int) and 1 <= dim <= MAX_DIM, "row.md, Decode", f"dim of codec opaque is {dim!r}, expected 1 to {MAX_DIM}")
    values = NumberStream("bytes", "U8", (dim,), any_bits=True)
    return Codec("opaque", dim, 1, {}, [values], lambda _, row: row["bytes"], lambda _, row: [0.0] * dim)


def checksum(row: bytes) -> int:
    sum_ = 0
    for at in range(0, len(row), 4):
        sum_ = (sum_ * MULTIPLIER + (0 if 24 <= at < 32 else word32(row, at))) % 2**64
    return sum_


def read_row(data: bytes, bases: Sequence[bytes] = ()) -> Row:
    """Check a whole row and decode its page. Bytes after the row in ``data`` are ignored. Raises ``Refused``.

    ``bases`` are the basis files that the caller has.
    """
    require(data[:16] == ROW_MAGIC, ROW, "the data does not begin with the magic of a row of version 1")
    length, stored = word64(data, 16), word64(data, 24)
    most = min(len(data), MAX_ROW_BYTES)
    require(FRAME_BYTES <= length <= most, ROW, f"the row's length is {length}, expected {FRAME_BYTES} to {most} bytes")
    data = data[:length]
    require(checksum(data) == stored, "row.md, Checksum", f"the row's bytes do not match its checksum, {stored:#x}")
    size = word32(data, 96)
    begin = ceil_div(FRAME_BYTES + size, ALIGNMENT) * ALIGNMENT
    require(begin <= length, ROW, f"the description has {size} bytes, which do not fit into a row of {length}")
    require(
        not any(data[100:FRAME_BYTES]) and not any(data[FRAME_BYTES + size : begin]),
        ROW,
        "a padding byte of the frame or the description is not zero",
    )
    file = take_page(parse_msgpack(data[FRAME_BYTES : FRAME_BYTES + size], ["opaque"]))
    contents = {}
    for number, layer in enumerate(file.layers):
        for name, side in layer.items():
            for tensor in side.tensors(f"{number}.{name}.") if side else ():
                end = begin + ceil_div(tensor.bytes, ALIGNMENT) * ALIGNMENT
                contents[tensor.name] = data[begin : begin + tensor.bytes]
                require(not any(data[begin + tensor.bytes : end]), ROW, f"a padding byte after {tensor.name} is not zero")
                begin = end
    require(begin == length, ROW, f"the streams end at {begin}, but the row ends at {length}")
    for number, layer in enumerate(file.layers):
        for name, side in layer.items():
            if side is not None:
                decode_side(side, f"{number}.{name}.", contents, index_by_digest(bases))
    return Row(data[32:64], data[64:96], file)


def take_page(header: dict[str, Any]) -> File:
    """Check the description of a page, which is the map of a header with the restrictions of row.md."""
    required = header.get("required")
    is_plain = header.get("tensors") == [] and isinstance(required, list) and all(name in CODEC_FEATURES for name in required)
    require(is_plain, ROW, "the description lists tensors, or features other than those of codecs, but a page has neither")
    file = take_header(header, {**CODECS, "opaque": opaque}, without_tensors=True)
    require(
        file.start == 0 and not file.model and list(file.ignorable) == [PAGE_DTYPE],
        ROW,
        "the description has a start, a model or other ignorable features, but a page has none of them",
    )
    dtype = file.ignorable[PAGE_DTYPE]
    require(dtype in PAGE_DTYPES, ROW, f"the dtype is {dtype!r}, expected one of {PAGE_DTYPES}")
    sides = [side for layer in file.layers for side in layer.values() if side]
    require(all(layer["k"] for layer in file.layers), ROW, "a layer has no k, but a page requires keys in every layer")
    require(
        len(sides) in (len(file.layers), 2 * len(file.layers)),
        ROW,
        "some layers have v and others do not, but a page requires v in all layers or in none",
    )
    require(
        len({(side.heads, *side.runs) for side in sides}) == 1,
        ROW,
        "keys and values differ in heads or tokens, but a page requires the same numbers in every layer",
    )
    for side in sides:
        other_entries = set(side.entries) - {"raw_positions", "raw_values"}
        plain = (side.batch, len(side.runs), side.tail, side.window, len(other_entries)) == (1, 1, 0, 0, 0)
        require(plain, ROW, "keys or values are not one run of one sequence, or have a tail, a window or entries that a page cannot have")
        require(
            dtype != b"u8" or side.codec.id == "opaque",
            "row.md, Other dtypes",
            f"the dtype is u8, which requires the codec opaque, but the codec is {side.codec.id}",
        )
    return file
