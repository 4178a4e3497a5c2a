"""Decoding of a whole file (spec/container.md, Reading)."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from functools import partial

from .basis import check_frame_values
from .basis_lookup import Bases
from .contents import File, Tensor
from .features import BASIS, CHECKSUMS
from .header import parse_msgpack, take_header
from .json_header import BLOCK, JSON_HEADER, JSON_START, json_header, tensor_spans
from .limits import FORMAT, LIMITS, MAX_FILE_BYTES, MAX_HEADER_BYTES, MAX_JSON_BYTES
from .refusal import refuse, require
from .values import decode_side
from .xxh3 import xxh3_128
from .zstd import check_frame

Decompress = Callable[[bytes, int], bytes]
"""A function that returns the content of a Zstandard frame, given the frame and the size of the content."""


def read(data: bytes, decompress: Decompress | None = None, bases: Sequence[bytes] = ()) -> File:
    """Check a whole file and decode it, in the order of container.md, Reading. Raises ``Refused``.

    ``bases`` are the basis files that the caller has.
    """
    number = 8 + len(JSON_START)
    ends = data[8:number] == JSON_START and re.fullmatch(rb"([1-9][0-9]{0,8})?", data[number:]) is not None
    require(not ends, "container.md, File", "the file ends before its major version number")
    rule = "container.md, JSON header"
    major = re.match(re.escape(JSON_START) + rb'([1-9][0-9]{0,8})[ "]', data[8 : 8 + len(JSON_START) + 10])
    if major is None:
        refuse(rule, "the file does not begin with kvpack's metadata and a major version number")
    require(int(major[1]) <= FORMAT, rule, f"a newer version wrote this file: its format is {int(major[1])}, expected at most {FORMAT}")

    rule = "container.md, File"
    length = int.from_bytes(data[:8], "little")
    require(length <= MAX_JSON_BYTES, LIMITS, f"the JSON header has {length} bytes, expected at most {MAX_JSON_BYTES}")
    require((8 + length) % BLOCK == 0, rule, f"the JSON header ends at byte 8 + {length}, which is not a multiple of {BLOCK}")
    require(8 + length <= len(data), rule, f"the JSON header has {length} bytes, but the file has only {len(data)}")

    json, section = data[8 : 8 + length], memoryview(data)[8 + length :]
    matched = JSON_HEADER.match(json.decode("latin-1"))
    require(matched is not None, "container.md, JSON header", "the JSON header does not begin with the metadata and kvpack.header")
    assert matched is not None
    header_bytes = int(matched[2])
    require(header_bytes <= MAX_HEADER_BYTES, LIMITS, f"kvpack.header has {header_bytes} bytes, expected at most {MAX_HEADER_BYTES}")
    require(header_bytes <= len(section), rule, "the file ends within kvpack.header")
    header = bytes(section[:header_bytes])
    require(xxh3_128(header).hex() == matched[1], "container.md, Digests", "the bytes of kvpack.header do not match its digest")

    file = take_header(parse_msgpack(header))

    require(
        json == json_header(header, file.tensors),
        "container.md, JSON header",
        "the JSON header is not the one that kvpack.header determines",
    )
    spans = tensor_spans(header_bytes, file.tensors)
    end = spans[-1].end if spans else header_bytes
    require(8 + length + end <= MAX_FILE_BYTES, LIMITS, f"the file has {8 + length + end} bytes, expected at most {MAX_FILE_BYTES}")
    require(len(section) == end, rule, f"the data section has {len(section)} bytes, but its tensors end at {end}")

    contents: dict[str, bytes] = {}
    for place in spans:
        stored = bytes(section[place.begin : place.end])
        if place.tensor is None:
            require(
                not any(stored), "container.md, Tensors and alignment", f"the padding at byte {place.begin} of the data section is not zero"
            )
        else:
            contents[place.tensor.name] = take_content(place.tensor, stored, decompress, CHECKSUMS in file.ignorable)
    basis_files = index_by_digest(bases)
    for number_, layer in enumerate(file.layers):
        for name, side in layer.items():
            if side is not None:
                decode_side(side, f"{number_}.{name}.", contents, basis_files)
                if BASIS in file.required:
                    finite = all(map(math.isfinite, side.values))
                    require(finite, "basis.md, File", f"{number_}.{name}: it contains a value that is not finite")
    file.states = {name: content for name, content in contents.items() if name.split(".")[1] == "state"}
    if BASIS in file.required:
        check_frame_values(file)
    return file


def index_by_digest(bases: Sequence[bytes]) -> Bases:
    """Index basis files by the digests that identify them. Each file is read when it is needed."""
    return {hashlib.sha256(basis).digest(): partial(read, basis) for basis in bases}


def take_content(tensor: Tensor, stored: bytes, decompress: Decompress | None, checksums: bool) -> bytes:
    """Check the stored bytes of a tensor, and return them decompressed."""
    require(xxh3_128(stored) == tensor.digest, "container.md, Digests", f"the bytes of {tensor.name} do not match its digest")
    if tensor.filter == "none":
        return stored
    check_frame(tensor.name, stored, tensor.bytes, checksums)
    if decompress is None:
        refuse(
            "container.md, zstd",
            f"{tensor.name}: a decompressor is needed, but none was passed, and the standard library of Python 3.11 has none",
        )
    content = decompress(stored, tensor.bytes)
    require(
        len(content) == tensor.bytes, "container.md, zstd", f"{tensor.name}: the content has {len(content)} bytes, expected {tensor.bytes}"
    )
    return content
