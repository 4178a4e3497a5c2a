"""The front of a kvpack file: length and JSON header, both determined by ``kvpack.header`` (spec/container.md, JSON header).

A reader never parses the JSON. It takes the position of ``kvpack.header`` from the fixed beginning and, once that tensor's
digest matches, rebuilds the whole front and compares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from kvpack.formats.errors import DigestMismatch, InvalidHeader, LimitExceeded, NotKvpack, Truncated, UnsupportedVersion

from .footprint import check_front, check_header
from .header import DIGEST_BYTES, FORMAT, Header, TensorEntry, layout_bytes
from .header_tensor import check_header_size, newer, pack_header, parse_header
from .limits import MAX_FILE_BYTES, MAX_JSON_BYTES

if TYPE_CHECKING:
    from .header import Contents
    from .sources import Source

DATA_ALIGNMENT = 4096
"""The data section starts at a multiple of this in the file."""
TENSOR_ALIGNMENT = 64
"""Every payload tensor starts at a multiple of this in the data section."""
LENGTH_BYTES = 8

_PREFIX = b'{"__metadata__":{"format":"kvpack","kvpack":"'
DIGEST_PLACE = slice(LENGTH_BYTES + len(_PREFIX) + 2, LENGTH_BYTES + len(_PREFIX) + 34)
"""The position of kvpack.header's digest in a file, in hexadecimal digits."""
_VERSION = re.compile(re.escape(_PREFIX) + rb"([1-9][0-9]{0,8})[ \"]")
_HEADER_TENSOR = re.compile(
    re.escape(_PREFIX) + rb'1 ([0-9a-f]{32})"},"kvpack\.header":\{"dtype":"U8","shape":\[([1-9][0-9]{0,6})\],"data_offsets":\[0,\2\]\}'
)
_BEGINNING_BYTES = 256
"""More bytes than the JSON header can take up to the end of the entry of kvpack.header."""
_OTHERS = {
    b"GGUF": "a GGUF file",
    b"PK\x03\x04": "a zip archive, such as a PyTorch checkpoint",
    b"\x80\x02": "a pickle",
    b"\x93NUMPY": "a NumPy array",
    b"PAR1": "a Parquet file",
    b"\x28\xb5\x2f\xfd": "a zstd frame",
}


@dataclass(frozen=True)
class Place:
    """The position of a payload tensor in the data section: its pad starts at ``pad``, its bytes are ``[begin, end)``."""

    pad: int
    begin: int
    end: int


@dataclass(frozen=True)
class Front:
    """The bytes before the payload (``text`` up to the data section, then ``tensor``: kvpack.header), and payload positions."""

    text: bytes
    tensor: bytes
    places: dict[str, Place]

    @property
    def file_bytes(self) -> int:
        return len(self.text) + max((place.end for place in self.places.values()), default=len(self.tensor))


def make_front(header: Header) -> Front:
    """The front of the file that contains ``header``. Raises LimitExceeded."""
    return _front_of(header, pack_header(header))


def _front_of(header: Header, tensor: bytes) -> Front:
    """The front of the file whose ``kvpack.header`` is ``tensor``: the bytes of ``header``."""
    digest = xxhash.xxh3_128_hexdigest(tensor)
    rows = [
        f'"__metadata__":{{"format":"kvpack","kvpack":"{FORMAT} {digest}"}}',
        _row("kvpack.header", "U8", (len(tensor),), 0, len(tensor)),
    ]
    places = {}
    pads, end = 0, len(tensor)
    for entry in header.tensors:
        pad, begin = end, aligned(end)
        if begin > pad:
            rows.append(_row(f"kvpack.pad.{pads}", "U8", (begin - pad,), pad, begin))
            pads += 1
        end = begin + entry.stored_bytes
        dtype, shape = (entry.dtype, entry.shape) if entry.filter == "none" else ("U8", (entry.stored_bytes,))
        rows.append(_row(entry.name, dtype, shape, begin, end))
        places[entry.name] = Place(pad, begin, end)
    json = ("{" + ",".join(rows) + "}").encode()
    json += b" " * (-(LENGTH_BYTES + len(json)) % DATA_ALIGNMENT)
    if len(json) > MAX_JSON_BYTES:
        raise LimitExceeded(f"the JSON header has {len(json)} bytes, the limit is {MAX_JSON_BYTES}")
    front = Front(len(json).to_bytes(LENGTH_BYTES, "little") + json, tensor, places)
    if front.file_bytes > MAX_FILE_BYTES:
        raise LimitExceeded(f"the file has {front.file_bytes} bytes, the limit is {MAX_FILE_BYTES}")
    return front


def undigested_front(contents: Contents) -> Front:
    """The front of an uncompressed file of ``contents`` with zeros as digests: its places and sizes are final. Raises LimitExceeded."""
    zeros = bytes(DIGEST_BYTES)
    tensors = (
        TensorEntry(name, layout.dtype, layout.shape, "none", layout_bytes(layout), zeros) for name, layout in contents.layouts.items()
    )
    return make_front(Header.of(contents, tuple(tensors)))


def read_front(source: Source, memory_limit: int | None = None) -> tuple[Header, Front]:
    """Read the header and the front of the file ``source``, checking every byte of the front and the length of the file.

    Raises NotKvpack, UnsupportedVersion, UnknownCodec, Truncated, DigestMismatch, InvalidHeader and LimitExceeded.
    """
    size = source.size
    first = bytes(source.read(0, min(size, LENGTH_BYTES + _BEGINNING_BYTES)))
    length, beginning = int.from_bytes(first[:LENGTH_BYTES], "little"), first[LENGTH_BYTES:]
    if not beginning.startswith(_PREFIX):
        raise NotKvpack(_not_kvpack(first, size, length))
    version = _VERSION.match(beginning)
    if version and int(version[1]) > FORMAT:
        raise UnsupportedVersion(newer(int(version[1])))
    if length > MAX_JSON_BYTES:
        raise LimitExceeded(f"the JSON header has {length} bytes, the limit is {MAX_JSON_BYTES}")
    start = LENGTH_BYTES + length
    if start > size:
        raise Truncated(f"has {size} bytes, its JSON header ends at {start}")
    if start % DATA_ALIGNMENT:
        raise InvalidHeader(f"the JSON header ends at byte {start}, expected a multiple of {DATA_ALIGNMENT}")
    entry = _HEADER_TENSOR.match(beginning)
    if not entry:
        raise InvalidHeader("the JSON header does not begin with the metadata of format 1 and the entry of kvpack.header")
    header_bytes = int(entry[2])
    check_header_size(header_bytes)
    end = start + header_bytes
    if end > size:
        raise Truncated(f"has {size} bytes, kvpack.header ends at {end}")
    check_front(size, start, header_bytes, memory_limit)
    tensor = bytes(source.read(start, end))
    check_digest("kvpack.header", tensor, bytes.fromhex(entry[1].decode()))
    header = parse_header(tensor)
    check_header(header, size, start, header_bytes, memory_limit)
    # parse_header takes no other bytes than those of the header that it returns.
    front = _front_of(header, tensor)
    found = bytes(source.read(0, min(size, len(front.text))))
    if found != front.text:
        at = _first_difference(found, front.text[: len(found)])
        raise InvalidHeader(f"the JSON header differs at byte {at} of the file from the one that kvpack.header gives")
    if size != front.file_bytes:
        raise Truncated(f"has {size} bytes, its header gives {front.file_bytes}")
    return header, front


def aligned(end: int) -> int:
    """The first place, from ``end`` on, at which a tensor may begin."""
    return end + -end % TENSOR_ALIGNMENT


def begins_file(beginning: bytes) -> bool:
    """Return True if the first bytes of a file (64 are enough) are those of a kvpack file of any version."""
    return beginning.startswith(_PREFIX, LENGTH_BYTES)


def front_bytes(beginning: bytes | memoryview) -> int:
    """The end of kvpack.header in the file that begins with ``beginning`` (4 KiB are enough); 0 if it is not a kvpack file."""
    entry = _HEADER_TENSOR.match(bytes(beginning[LENGTH_BYTES : LENGTH_BYTES + _BEGINNING_BYTES]))
    return LENGTH_BYTES + int.from_bytes(beginning[:LENGTH_BYTES], "little") + int(entry[2]) if entry else 0


def _first_difference(a: bytes, b: bytes) -> int:
    """The index of the first byte in which two texts of equal length differ, found with integers instead of one step per byte."""
    return len(a) + (int.from_bytes(a) ^ int.from_bytes(b)).bit_length() // -8


def check_digest(name: str, stored: bytes | memoryview, expected: bytes) -> None:
    """Raise DigestMismatch unless ``expected`` is the XXH3-128 of the ``stored`` bytes of tensor ``name``."""
    check_hash(name, len(stored), xxhash.xxh3_128_digest(stored), expected)


def check_hash(name: str, size: int, found: bytes, expected: bytes) -> None:
    """Raise DigestMismatch unless ``found``, the digest of the ``size`` bytes of tensor ``name``, is the ``expected`` one."""
    if found != expected:
        raise DigestMismatch(f"{name}: damaged: its {size} bytes have the digest {found.hex()}, expected {expected.hex()}")


def _row(name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":[{begin},{end}]}}'


def other_format(first: bytes) -> str:
    """Return the name of a known format that begins with ``first``; empty for any other."""
    return next((name for magic, name in _OTHERS.items() if first.startswith(magic)), "")


def _not_kvpack(first: bytes, size: int, length: int) -> str:
    if size < LENGTH_BYTES:
        return f"is {f'only {size} bytes long' if size else 'empty'}, not a kvpack file"
    if first[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{" and LENGTH_BYTES + length <= size:
        return 'is another safetensors file, not a kvpack file: its metadata does not begin with "format":"kvpack"'
    if other := other_format(first):
        return f"is {other}, not a kvpack file"
    return f"is not a kvpack file: bytes 8 to {LENGTH_BYTES + len(_PREFIX) - 1} are not {_PREFIX.decode()}"
