"""The tensor ``kvpack.header``: a Header as canonical msgpack (spec/container.md, msgpack profile)."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import msgpack

from kvpack.formats import CODECS, codec_class, codec_from_params, registered
from kvpack.formats.errors import InvalidHeader, InvalidParameter, LimitExceeded, UnknownCodec, UnsupportedVersion

from .checks import check_keys, check_string, check_type
from .header import FEATURES, FORMAT, Header, LayerEntry, SideEntry, TensorEntry, lacking, within
from .header_scan import news
from .limits import MAX_BINARY_BYTES, MAX_ENTRIES, MAX_HEADER_BYTES, MAX_LAYERS, MAX_NAMES, MAX_STRING_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.base import Codec

    from .header import Contents

_TOP_KEYS = ("format", "required", "ignorable", "model", "recipe", "start", "codecs", "layers", "tensors")
_SIDE_KEYS = tuple(field.name for field in dataclasses.fields(SideEntry) if field.name != "entries")
_TENSOR_KEYS = tuple(field.name for field in dataclasses.fields(TensorEntry))
_BYTES_PER_CONTAINER = 16
"""Minimum number of bytes per array or map in a valid header, apart from the top-level keys and layers without sides."""
_MAX_KEPT, _MAX_KEPT_BYTES = 256, 1 << 12
_codecs: dict[tuple[bytes, tuple[type, ...]], Codec] = {}
"""Codecs by their packed maps and the registered classes: files of one recipe have the same ones, which are checked and made once."""


def pack_header(header: Header) -> bytes:
    """The bytes of the header tensor. Raises LimitExceeded for more bytes than the format allows."""
    return _packed(header, [[t.name, t.dtype, t.shape, t.filter, t.stored_bytes, t.digest] for t in header.tensors])


def pack_contents(contents: Contents) -> bytes:
    """The header's map without tensors: the description of a page in a row. Raises LimitExceeded."""
    return _packed(contents, [])


def _packed(header: Contents, tensors: list[Any]) -> bytes:
    # Most layers are equal.
    sides = {side: _packed_side(side) for side in {side for layer in header.layers for _, side in layer.sides()}}
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
            "tensors": tensors,
        }
    )
    check_header_size(len(data))
    return data


def parse_header(data: bytes) -> Header:
    """Parse the bytes that ``pack_header`` makes, and refuse all others.

    Raises UnsupportedVersion, UnknownCodec, InvalidHeader and LimitExceeded, which name the place. Unknown versions, features
    and codecs are reported first, whatever else the header holds.
    """
    try:
        return _parsed(data)
    except UnknownCodec:
        _refuse_news(data)
        # The first of several ids counts, and it is known.
        raise InvalidHeader("kvpack.header is not canonical msgpack: the key id occurs twice in the map of a codec") from None
    except (InvalidHeader, LimitExceeded):
        _refuse_news(data)
        raise


def _refuse_news(data: bytes) -> None:
    """Raise UnsupportedVersion for a later format or an unknown required feature, UnknownCodec for an unknown codec."""
    found = news(data, FEATURES, CODECS)
    if found.format is not None and found.format > FORMAT:
        raise UnsupportedVersion(newer(found.format))
    if found.feature is not None:
        raise UnsupportedVersion(lacking(found.feature))
    if found.codec is not None:
        codec_class(found.codec)


def _parsed(data: bytes) -> Header:
    top = _unpacked(data)
    check_type("kvpack.header", top, dict)
    check_type("format", top.get("format"), int)
    if top["format"] != FORMAT:
        raise InvalidHeader(f"format is {top['format']}, expected {FORMAT}")
    check_type("required", top.get("required"), list)
    check_keys("kvpack.header", top, _TOP_KEYS)
    for name in ("codecs", "layers", "tensors"):
        check_type(name, top[name], list)
    codecs = [_codec(f"codecs[{number}]", params) for number, params in enumerate(top["codecs"])]
    header = Header(
        required=tuple(top["required"]),
        ignorable=top["ignorable"],
        model=top["model"],
        recipe=top["recipe"],
        start=top["start"],
        codecs=tuple(codec for codec, _ in codecs),
        layers=tuple(_layer(f"layers[{number}]", layer) for number, layer in enumerate(top["layers"])),
        tensors=tuple(_tensor(number, row) for number, row in enumerate(top["tensors"])),
    )
    if not all(canonical for _, canonical in codecs) or not _is_canonical(top, data):
        raise InvalidHeader("kvpack.header is not canonical msgpack: its values, packed again, give other bytes")
    return header


def _is_canonical(top: dict[str, Any], data: bytes) -> bool:
    """Return True if ``data`` is the canonical encoding of ``top``, a header that is valid except for its codecs. Faster than encoding the
    Header again.
    """
    if any([*top[name]] != sorted(top[name]) for name in ("ignorable", "model")):
        return False
    if any(side is not None and side.get("entries") == {} for layer in top["layers"] for side in layer.values()):
        return False
    return bool(msgpack.packb(top) == data)


def difference_of(data: bytes, expected: bytes) -> str:
    """The first field in which the map ``data`` differs from the map ``expected``, with both values: for messages."""
    try:
        found = _unpacked(data)
    except (InvalidHeader, LimitExceeded) as error:
        return str(error)
    return _difference("", found, _unpacked(expected)) or f"its description has {len(data)} bytes, expected {len(expected)}"


def _difference(where: str, found: Any, expected: Any) -> str:
    """The first difference of two values of msgpack; empty if there is none."""
    if type(found) is type(expected) is dict and [*found] == [*expected]:
        places = [(f"{where}.{name}".lstrip("."), found[name], expected[name]) for name in expected]
    elif type(found) is type(expected) is list and len(found) == len(expected):
        places = [(f"{where}[{number}]", *both) for number, both in enumerate(zip(found, expected, strict=True))]
    elif type(found) is type(expected) is list:
        return f"{where} has the length {len(found)}, expected {len(expected)}"
    else:
        return "" if found == expected else f"{where or 'the description'} is {found!r:.200}, expected {expected!r:.200}"
    return next((text for place in places if (text := _difference(*place))), "")


def newer(version: int) -> str:
    """The message for a file of a later major number."""
    return f"written by a newer kvpack: format {version}, this one reads {FORMAT}"


def _packed_side(side: SideEntry) -> dict[str, Any]:
    packed = {name: getattr(side, name) for name in _SIDE_KEYS}
    return {**packed, "entries": dict(side.entries)} if side.entries else packed


def _unpacked(data: bytes) -> Any:
    check_header_size(len(data))
    count = _counter(len(data) // _BYTES_PER_CONTAINER + len(_TOP_KEYS) + MAX_LAYERS)
    try:
        return msgpack.unpackb(
            data,
            max_str_len=MAX_STRING_BYTES,
            max_bin_len=MAX_BINARY_BYTES,
            max_array_len=MAX_ENTRIES,
            max_map_len=MAX_NAMES,
            # This format has no extension types, but a later one may; its headers must be reported as newer.
            max_ext_len=MAX_BINARY_BYTES,
            list_hook=count,
            object_hook=count,
        )
    except LimitExceeded:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        kind = LimitExceeded if re.search("exceeds max_(str|bin|array|map)_len", str(error)) else InvalidHeader
        raise kind(f"kvpack.header is not msgpack within the format's limits: {str(error) or type(error).__name__}") from None


def _counter(limit: int) -> Callable[[Any], Any]:
    """A hook that refuses more arrays and maps than ``limit``: one byte of msgpack can take seventy in memory."""
    left = limit

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise LimitExceeded(f"kvpack.header has more than {limit} arrays and maps, its length allows no more")
        return container

    return count


def check_header_size(size: int) -> None:
    """Raise LimitExceeded for a ``kvpack.header`` of more bytes than the format allows."""
    if size > MAX_HEADER_BYTES:
        raise LimitExceeded(f"kvpack.header has {size} bytes, the limit is {MAX_HEADER_BYTES}")


def _codec(where: str, params: Any) -> tuple[Codec, bool]:
    """The codec of a map, and whether this is the one that the codec is stored as."""
    check_type(where, params, dict)
    try:
        packed = msgpack.packb(params)
    except ValueError:
        # It is nested more deeply than any codec.
        return _new_codec(where, params), False
    key = packed, registered()
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
        check_string(f"a key of {where}", name)
    check_string(f"{where}.id", params.get("id"))
    try:
        return codec_from_params(params)
    except InvalidParameter as error:
        raise InvalidHeader(f"{where}: {error}") from None


def _layer(where: str, layer: Any) -> LayerEntry:
    check_keys(where, layer, ("k", "v"))
    sides = {name: None if side is None else _side(f"{where}.{name}", side) for name, side in layer.items()}
    try:
        return LayerEntry(**sides)
    except InvalidHeader as error:
        raise within(where, error) from None


def _side(where: str, side: Any) -> SideEntry:
    has_entries = type(side) is dict and "entries" in side
    check_keys(where, side, (*_SIDE_KEYS, "entries") if has_entries else _SIDE_KEYS)
    try:
        check_type("runs", side["runs"], list)
        entries = side.get("entries", {})
        check_type("entries", entries, dict)
        return SideEntry(**{**side, "runs": tuple(side["runs"]), "entries": tuple(entries.items())})
    except (InvalidHeader, LimitExceeded) as error:
        raise within(where, error) from None


def _tensor(number: int, row: Any) -> TensorEntry:
    if type(row) is not list or len(row) != len(_TENSOR_KEYS) or type(row[2]) is not list:
        raise InvalidHeader(f"tensors[{number}] is {row!r:.200}, expected [{', '.join(_TENSOR_KEYS)}]")
    name, dtype, shape, chosen, stored_bytes, digest = row
    try:
        return TensorEntry(name, dtype, tuple(shape), chosen, stored_bytes, digest)
    except (InvalidHeader, LimitExceeded) as error:
        raise within(f"tensors[{number}]", error) from None
