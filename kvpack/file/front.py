"""The front of a kvpack file: its length, its JSON header and the tensor ``kvpack.header`` (spec/container.md).

``kvpack.header`` is a Header as canonical msgpack. It determines the rest of the front. Readers never parse the JSON. They find
``kvpack.header`` by the fixed first bytes of the JSON, check its digest, rebuild the whole front from it, and compare.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import msgpack
import xxhash

from kvpack.formats import CODECS, SIDECARS, codec_class, codec_from_params
from kvpack.formats.errors import (
    DigestMismatch,
    InvalidHeader,
    InvalidParameter,
    LimitExceeded,
    NotKvpack,
    Truncated,
    UnknownCodec,
    UnsupportedVersion,
)

from .checks import TEXT, Rule, check, check_keys
from .footprint import check_front, check_header
from .header import (
    DIGEST_BYTES,
    FEATURES,
    FORMAT,
    Header,
    LayerEntry,
    SideEntry,
    TensorEntry,
    layout_bytes,
    prefix_error,
    unsupported_feature_message,
)
from .header_scan import unknown_features
from .limits import (
    MAX_BINARY_BYTES,
    MAX_ENTRIES,
    MAX_FILE_BYTES,
    MAX_HEADER_BYTES,
    MAX_JSON_BYTES,
    MAX_LAYERS,
    MAX_NAMES,
    MAX_STRING_BYTES,
)

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

    from .header import Contents
    from .user_files import Source

DATA_ALIGNMENT = 4096
"""Alignment, in bytes, of the start of a file's data section."""
TENSOR_ALIGNMENT = 64
"""Alignment, in bytes, of each payload tensor within the data section."""
LENGTH_BYTES = 8

_PREFIX = b'{"__metadata__":{"format":"kvpack","kvpack":"'
DIGEST_SLICE = slice(LENGTH_BYTES + len(_PREFIX) + 2, LENGTH_BYTES + len(_PREFIX) + 34)
"""Position in a file of the digest of kvpack.header, which is stored as hexadecimal digits."""
_VERSION = re.compile(re.escape(_PREFIX) + rb"([1-9][0-9]{0,8})[ \"]")
_HEADER_TENSOR = re.compile(
    re.escape(_PREFIX) + rb'1 ([0-9a-f]{32})"},"kvpack\.header":\{"dtype":"U8","shape":\[([1-9][0-9]{0,6})\],"data_offsets":\[0,\2\]\}'
)
_BEGINNING_BYTES = 256
"""Maximum number of JSON bytes up to the end of the entry for kvpack.header."""
_OTHER_FORMATS = {
    b"GGUF": "a GGUF file",
    b"PK\x03\x04": "a zip archive, such as a PyTorch checkpoint",
    b"\x80\x02": "a pickle",
    b"\x93NUMPY": "a NumPy array",
    b"PAR1": "a Parquet file",
    b"\x28\xb5\x2f\xfd": "a zstd frame",
    b"\x1f\x8b": "a gzip file",
    b"version https://git-lfs": "a Git LFS pointer (git lfs pull downloads the file)",
    b"<": "a web page or XML",
}
COPY_AGAIN = "copy or download the file again"

_TOP_KEYS = ("format", "required", "ignorable", "model", "recipe", "start", "codecs", "layers", "tensors")
_SIDE_KEYS = tuple(field.name for field in dataclasses.fields(SideEntry) if field.name != "entries")
_LIST = Rule(list)
_TENSOR_KEYS = tuple(field.name for field in dataclasses.fields(TensorEntry))
_BYTES_PER_CONTAINER = 16
"""Minimum number of bytes per array or map in a valid header, apart from the top-level keys and empty layers."""
_MAX_KEPT, _MAX_KEPT_BYTES = 256, 1 << 12
_codecs: dict[tuple[bytes, tuple[type, ...]], Codec] = {}
"""Cache of codecs by their packed parameters and the registered codec classes. Files often have the same codecs."""


@dataclass(frozen=True)
class TensorPosition:
    """The bytes ``[begin, end)`` of the data section that contain a payload tensor. The padding before it starts at ``pad``."""

    pad: int
    begin: int
    end: int


@dataclass(frozen=True)
class Front:
    """The bytes of a file before the payload, the positions of the payload tensors, and the size of the file.

    ``text`` contains the bytes before the data section, and ``tensor`` the bytes of kvpack.header.
    """

    text: bytes
    tensor: bytes
    places: dict[str, TensorPosition]
    file_bytes: int


def make_front(header: Header) -> Front:
    front = _build_front(header, pack_header(header))
    length = len(front.text) - LENGTH_BYTES
    if length > MAX_JSON_BYTES:
        raise LimitExceeded(f"the JSON header has {length} bytes, but the maximum is {MAX_JSON_BYTES}")
    return front


def _build_front(header: Header, tensor: bytes) -> Front:
    """Return the front of a file with ``header``. ``tensor`` contains the packed bytes of the header."""
    digest = xxhash.xxh3_128_hexdigest(tensor)
    rows = [
        f'"__metadata__":{{"format":"kvpack","kvpack":"{FORMAT} {digest}"}}',
        _json_entry("kvpack.header", "U8", (len(tensor),), 0, len(tensor)),
    ]
    places = {}
    pads, end = 0, len(tensor)
    for entry in header.tensors:
        pad, begin = end, align_up(end)
        if begin > pad:
            rows.append(_json_entry(f"kvpack.pad.{pads}", "U8", (begin - pad,), pad, begin))
            pads += 1
        end = begin + entry.stored_bytes
        dtype, shape = (entry.dtype, entry.shape) if entry.filter == "none" else ("U8", (entry.stored_bytes,))
        rows.append(_json_entry(entry.name, dtype, shape, begin, end))
        places[entry.name] = TensorPosition(pad, begin, end)
    json = ("{" + ",".join(rows) + "}").encode()
    json += b" " * (-(LENGTH_BYTES + len(json)) % DATA_ALIGNMENT)
    front = Front(len(json).to_bytes(LENGTH_BYTES, "little") + json, tensor, places, LENGTH_BYTES + len(json) + end)
    if front.file_bytes > MAX_FILE_BYTES:
        raise LimitExceeded(f"the file has {front.file_bytes} bytes, but the maximum is {MAX_FILE_BYTES}")
    return front


def undigested_front(contents: Contents) -> Front:
    """Return the front of an uncompressed file of ``contents``, with zeros as digests. Positions and sizes are final."""
    zeros = bytes(DIGEST_BYTES)
    tensors = (
        TensorEntry(name, layout.dtype, layout.shape, "none", layout_bytes(layout), zeros) for name, layout in contents.layouts.items()
    )
    return make_front(Header.from_contents(contents, tuple(tensors)))


def read_front(source: Source, memory_limit: int | None = None) -> tuple[Header, Front]:
    """Read the header and the front of a file. Checks every byte of the front, and the length of the file.

    Raises NotKvpack, UnsupportedVersion, UnknownCodec, Truncated, DigestMismatch, InvalidHeader or LimitExceeded.
    """
    size = source.size
    first = bytes(source.read(0, min(size, LENGTH_BYTES + _BEGINNING_BYTES)))
    length, beginning = int.from_bytes(first[:LENGTH_BYTES], "little"), first[LENGTH_BYTES:]
    if not beginning.startswith(_PREFIX):
        raise NotKvpack(_not_kvpack_message(first, size, length))
    version = _VERSION.match(beginning)
    if version and int(version[1]) > FORMAT:
        raise UnsupportedVersion(newer_format_message(int(version[1])))
    if length > MAX_JSON_BYTES:
        raise LimitExceeded(f"the JSON header has {length} bytes, but the maximum is {MAX_JSON_BYTES}")
    start = LENGTH_BYTES + length
    if start > size:
        raise Truncated(f"the file has {size} bytes, but its JSON header ends at byte {start}: {COPY_AGAIN}")
    if start % DATA_ALIGNMENT:
        raise InvalidHeader(f"the JSON header ends at byte {start}, expected a multiple of {DATA_ALIGNMENT}: {COPY_AGAIN}")
    entry = _HEADER_TENSOR.match(beginning)
    if not entry:
        raise InvalidHeader("the JSON header does not begin with the metadata of format 1 and the entry of kvpack.header")
    header_bytes = int(entry[2])
    check_header_size(header_bytes)
    end = start + header_bytes
    if end > size:
        raise Truncated(f"has {size} bytes, but kvpack.header ends at {end}: {COPY_AGAIN}")
    if memory_limit is not None:
        check_front(size, start, header_bytes, memory_limit)
    tensor = bytes(source.read(start, end))
    check_digest("kvpack.header", tensor, bytes.fromhex(entry[1].decode()))
    header = parse_header(tensor)
    if memory_limit is not None:
        check_header(header, size, start, header_bytes, memory_limit)
    # parse_header accepts only the canonical bytes of the header that it returns.
    front = _build_front(header, tensor)
    data = bytes(source.read(0, min(size, len(front.text))))
    if data != front.text:
        offset = _first_difference(data, front.text[: len(data)])
        raise InvalidHeader(f"the JSON header does not match kvpack.header at byte {offset} of the file: {COPY_AGAIN}")
    if size != front.file_bytes:
        raise Truncated(f"has {size} bytes, but its header declares {front.file_bytes}: {COPY_AGAIN}")
    return header, front


def align_up(end: int) -> int:
    return end + -end % TENSOR_ALIGNMENT


def is_file_start(first_bytes: bytes) -> bool:
    """Return True if these bytes (at least 64) begin a kvpack file of any version."""
    return first_bytes.startswith(_PREFIX, LENGTH_BYTES)


def front_bytes(first_bytes: bytes | memoryview) -> int:
    """Return the end of kvpack.header in a file that begins with these bytes (at least 4 KiB). Returns 0 if it is not a kvpack file."""
    entry = _HEADER_TENSOR.match(bytes(first_bytes[LENGTH_BYTES : LENGTH_BYTES + _BEGINNING_BYTES]))
    return LENGTH_BYTES + int.from_bytes(first_bytes[:LENGTH_BYTES], "little") + int(entry[2]) if entry else 0


def _first_difference(a: bytes, b: bytes) -> int:
    """Return the index of the first byte that differs. ``a`` and ``b`` have the same length.

    Comparing them as integers avoids a Python loop.
    """
    return len(a) + (int.from_bytes(a) ^ int.from_bytes(b)).bit_length() // -8


def check_digest(name: str, stored: bytes | memoryview, expected: bytes) -> None:
    """Raise DigestMismatch unless ``expected`` is the XXH3-128 of ``stored``, the bytes of tensor ``name``."""
    if (actual := xxhash.xxh3_128_digest(stored)) != expected:
        check_hash(name, len(stored), actual, expected)


def check_hash(name: str, size: int, actual: bytes, expected: bytes) -> None:
    """Raise DigestMismatch unless the digests are equal. ``name`` and ``size`` (in bytes) describe the tensor in the message."""
    if actual != expected:
        raise DigestMismatch(f"{name} is damaged: its {size} bytes have digest {actual.hex()}, expected {expected.hex()}: {COPY_AGAIN}")


def _json_entry(name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":[{begin},{end}]}}'


def other_format_name(first: bytes) -> str:
    """Return the name of a known file format whose files begin with ``first``, or an empty string."""
    return next((name for magic, name in _OTHER_FORMATS.items() if first.startswith(magic)), "")


def _not_kvpack_message(first: bytes, size: int, length: int) -> str:
    if size < LENGTH_BYTES:
        return f"is {f'only {size} bytes long' if size else 'empty'}, not a kvpack file"
    if first[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{" and LENGTH_BYTES + length <= size:
        return 'is a safetensors file, but not a kvpack file: its metadata does not begin with "format":"kvpack"'
    if other := other_format_name(first):
        return f"is {other}, not a kvpack file"
    return f"is not a kvpack file: bytes 8 to {LENGTH_BYTES + len(_PREFIX) - 1} are not {_PREFIX.decode()}"


def pack_header(header: Contents) -> bytes:
    """Return the bytes of kvpack.header. For contents without tensors, return the description of a page in a row.

    Raises LimitExceeded if the result is larger than the format allows.
    """
    tensors = header.tensors if isinstance(header, Header) else ()
    # Most layers have equal entries, which are packed once.
    sides = {side: _pack_side(side) for side in {side for layer in header.layers for _, side in layer.sides()}}
    data: bytes = msgpack.packb(
        {
            "format": FORMAT,
            "required": list(header.required),
            "ignorable": dict(sorted(header.ignorable.items())),
            "model": dict(sorted(header.model.items())),
            "recipe": header.recipe,
            "start": header.start,
            "codecs": [codec.params() for codec in header.codecs],
            "layers": [{"k": layer.k and sides[layer.k], "v": layer.v and sides[layer.v]} for layer in header.layers],
            "tensors": [[t.name, t.dtype, t.shape, t.filter, t.stored_bytes, t.digest] for t in tensors],
        }
    )
    check_header_size(len(data))
    return data


def parse_header(data: bytes) -> Header:
    """Parse the bytes of kvpack.header. Rejects any bytes that ``pack_header`` cannot create.

    Raises UnsupportedVersion, UnknownCodec, InvalidHeader or LimitExceeded. Unknown versions, features and codecs are reported first.
    """
    try:
        return _parse(data)
    except UnknownCodec:
        _check_supported(data)
        # If a map has several ids, the first one counts, and that one is known.
        raise InvalidHeader("kvpack.header is not canonical msgpack: the key id occurs twice in the map of a codec") from None
    except (InvalidHeader, LimitExceeded):
        _check_supported(data)
        raise


def _check_supported(data: bytes) -> None:
    """Raise UnsupportedVersion for an unknown format version or required feature, and UnknownCodec for an unknown codec."""
    unknown = unknown_features(data, FEATURES, CODECS)
    if unknown.format is not None and unknown.format > FORMAT:
        raise UnsupportedVersion(newer_format_message(unknown.format))
    if unknown.feature is not None:
        raise UnsupportedVersion(unsupported_feature_message(unknown.feature))
    if unknown.codec is not None:
        codec_class(unknown.codec)


def _parse(data: bytes) -> Header:
    top = unpack_header(data)
    check("kvpack.header", top, Rule(dict))
    check("format", top.get("format"), Rule(int))
    if top["format"] != FORMAT:
        raise InvalidHeader(f"format is {top['format']}, expected {FORMAT}")
    check("required", top.get("required"), _LIST)
    check_keys("kvpack.header", top, _TOP_KEYS)
    for name in ("codecs", "layers", "tensors"):
        check(name, top[name], _LIST)
    codecs, canonical = [], True
    for number, params in enumerate(top["codecs"]):
        codec, same = _parse_codec(f"codecs[{number}]", params)
        codecs.append(codec)
        canonical = canonical and same
    header = Header(
        required=tuple(top["required"]),
        ignorable=top["ignorable"],
        model=top["model"],
        recipe=top["recipe"],
        start=top["start"],
        codecs=tuple(codecs),
        layers=tuple(map(_parse_layer, count(), top["layers"])),
        tensors=tuple(map(_parse_tensor, count(), top["tensors"])),
    )
    if not canonical or not _is_canonical(top, data):
        raise InvalidHeader("kvpack.header is not canonical msgpack: re-encoding its values gives different bytes")
    return header


def _is_canonical(top: dict[str, Any], data: bytes) -> bool:
    """Return True if ``data`` is the canonical encoding of ``top``, a header that is valid except possibly for its codecs.

    This is faster than encoding the Header again.
    """
    for layer in top["layers"]:
        for side in layer.values():
            if side is not None and side.get("entries") == {}:
                return False
    ignorable, model = [*top["ignorable"]], [*top["model"]]
    return ignorable == sorted(ignorable) and model == sorted(model) and bool(msgpack.packb(top) == data)


def newer_format_message(version: int) -> str:
    return f"written by a newer kvpack in format {version}, but this one reads format {FORMAT}: upgrade kvpack"


def _pack_side(side: SideEntry) -> dict[str, Any]:
    packed = {name: getattr(side, name) for name in _SIDE_KEYS}
    return {**packed, "entries": dict(side.entries)} if side.entries else packed


def unpack_header(data: bytes) -> Any:
    """Unpack the msgpack of kvpack.header within the format's limits. Raises InvalidHeader or LimitExceeded."""
    check_header_size(len(data))
    limit = remaining = len(data) // _BYTES_PER_CONTAINER + len(_TOP_KEYS) + MAX_LAYERS

    def count_container(container: Any) -> Any:
        # One byte of msgpack can take 70 bytes in memory.
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise LimitExceeded(f"kvpack.header has more than {limit} arrays and maps, the maximum for its size")
        return container

    try:
        return msgpack.unpackb(
            data,
            max_str_len=MAX_STRING_BYTES,
            max_bin_len=MAX_BINARY_BYTES,
            max_array_len=MAX_ENTRIES,
            max_map_len=MAX_NAMES,
            # This format has no extension types. Headers of later formats may contain them, and must be reported as newer.
            max_ext_len=MAX_BINARY_BYTES,
            list_hook=count_container,
            object_hook=count_container,
        )
    except LimitExceeded:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        kind = LimitExceeded if re.search("exceeds max_(str|bin|array|map)_len", str(error)) else InvalidHeader
        raise kind(f"kvpack.header is not msgpack within the format's limits: {str(error) or type(error).__name__}") from None


def check_header_size(size: int) -> None:
    """Raise LimitExceeded if kvpack.header is larger than the format allows. ``size`` is in bytes."""
    if size > MAX_HEADER_BYTES:
        raise LimitExceeded(f"kvpack.header has {size} bytes, but the maximum is {MAX_HEADER_BYTES}")


def _parse_codec(where: str, params: Any) -> tuple[Codec, bool]:
    """Return the codec that ``params`` describes, and True if these are its canonical parameters."""
    check(where, params, Rule(dict))
    try:
        packed = msgpack.packb(params)
    except ValueError:
        # The parameters are nested more deeply than those of any codec.
        return _new_codec(where, params), False
    key = packed, (*CODECS.values(), *SIDECARS.values())
    codec = _codecs.get(key)
    if codec is not None:
        return codec, True
    codec = _new_codec(where, params)
    if msgpack.packb(codec.params()) != packed:
        return codec, False
    if len(packed) <= _MAX_KEPT_BYTES:
        if len(_codecs) >= _MAX_KEPT:
            _codecs.clear()
        _codecs[key] = codec
    return codec, True


def _new_codec(where: str, params: dict[Any, Any]) -> Codec:
    for name in params:
        check(f"a key of {where}", name, TEXT)
    check(f"{where}.id", params.get("id"), TEXT)
    try:
        return codec_from_params(params)
    except InvalidParameter as error:
        raise InvalidHeader(f"{where}: {error}") from None


def _parse_layer(layer_index: int, layer: Any) -> LayerEntry:
    where = f"layers[{layer_index}]"
    check_keys(where, layer, ("k", "v"))
    k, v = layer["k"], layer["v"]
    try:
        return LayerEntry(None if k is None else _parse_side("k", k), None if v is None else _parse_side("v", v))
    except (InvalidHeader, LimitExceeded) as error:
        raise prefix_error(where, error) from None


def _parse_side(where: str, side: Any) -> SideEntry:
    has_entries = type(side) is dict and "entries" in side
    check_keys(where, side, (*_SIDE_KEYS, "entries") if has_entries else _SIDE_KEYS)
    try:
        check("runs", side["runs"], _LIST)
        entries = side.get("entries", {})
        check("entries", entries, Rule(dict))
        return SideEntry(**{**side, "runs": tuple(side["runs"]), "entries": tuple(entries.items())})
    except (InvalidHeader, LimitExceeded) as error:
        raise prefix_error(where, error) from None


def _parse_tensor(tensor_index: int, row: Any) -> TensorEntry:
    if type(row) is not list or len(row) != len(_TENSOR_KEYS) or type(row[2]) is not list:
        raise InvalidHeader(f"tensors[{tensor_index}] is {row!r:.200}, expected [{', '.join(_TENSOR_KEYS)}]")
    name, dtype, shape, filter_name, stored_bytes, digest = row
    try:
        return TensorEntry(name, dtype, tuple(shape), filter_name, stored_bytes, digest)
    except (InvalidHeader, LimitExceeded) as error:
        raise prefix_error(f"tensors[{tensor_index}]", error) from None
