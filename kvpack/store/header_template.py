"""Recognizes chunk headers that match a known header except for digests, the start, and the feature that identifies the chunk.

Comparing bytes is much faster than parsing. Does not import torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import msgpack
import xxhash

from kvpack.file.front import DIGEST_SLICE, LENGTH_BYTES, pack_header

if TYPE_CHECKING:
    from kvpack.file.container import File
    from kvpack.file.header import Header

Info = TypeVar("Info")

_MAX_TEMPLATES = 64
_MAX_START = 2**32


@dataclass(frozen=True)
class HeaderTemplate:
    """The front that matching files share: the bytes ``text``, and the header bits that are set in ``mask``.

    ``payload`` is the offset of the first tensor in the file. ``start_range`` and ``feature_range`` are byte ranges in the header.
    """

    size: int
    text: bytes
    mask: int
    fixed: int
    header_bytes: int
    start_range: slice
    feature_range: slice
    payload: int

    @classmethod
    def from_file(cls, file: File, feature: str) -> Self:
        """Build a template from ``file``, an open file that has been checked and contains the feature ``feature``."""
        header = file.header
        packed = pack_header(header)
        digests = tuple(dataclasses.replace(tensor, digest=_invert_bits(tensor.digest)) for tensor in header.tensors)
        feature_bytes = header.ignorable[feature]
        other = {**header.ignorable, feature: _invert_bits(feature_bytes)}
        feature_at = _differing_indices(packed, pack_header(dataclasses.replace(header, ignorable=other)))[0]
        start_range, feature_range = _start_range(header, packed), slice(feature_at, feature_at + len(feature_bytes))
        mask = bytearray(b"\xff" * len(packed))
        for place in _differing_indices(packed, pack_header(dataclasses.replace(header, tensors=digests))):
            mask[place] = 0
        for places in (start_range, feature_range):
            mask[places] = bytes(places.stop - places.start)
        payload = len(file.front.text) + min((place.begin for place in file.front.places.values()), default=len(packed))
        number = int.from_bytes(mask, "little")
        fixed = int.from_bytes(packed, "little") & number
        return cls(file.size, file.front.text, number, fixed, len(packed), start_range, feature_range, payload)

    def match(self, data: memoryview) -> tuple[int, bytes] | None:
        """Return the position of the first token of ``data`` and its feature, or None if ``data`` does not match this template.

        All bytes before the payload are compared.
        """
        if len(data) != self.size:
            return None
        header_end = len(self.text) + self.header_bytes
        header, text = bytes(data[len(self.text) : header_end]), bytearray(data[: len(self.text)])
        if text[DIGEST_SLICE] != xxhash.xxh3_128_hexdigest(header).encode():
            return None
        text[DIGEST_SLICE] = self.text[DIGEST_SLICE]
        if text != self.text or int.from_bytes(header, "little") & self.mask != self.fixed or any(data[header_end : self.payload]):
            return None
        start = _unpack(header[self.start_range])
        return None if start is None else (start, header[self.feature_range])


class HeaderTemplates(Generic[Info]):
    """A few templates of earlier chunk files. Each comes with information that the caller can reuse for matching files."""

    def __init__(self) -> None:
        self._templates: dict[tuple[int, bytes], list[tuple[HeaderTemplate, Info]]] = {}
        self._count = 0

    def add(self, file: File, feature: str, info: Info) -> None:
        """Add a template of ``file``, an open file that was already checked and contains ``feature``.

        ``match`` returns ``info`` for files that match the template.
        """
        if self._count < _MAX_TEMPLATES and file.header.start < _MAX_START:
            self._count += 1
            template = HeaderTemplate.from_file(file, feature)
            self._templates.setdefault(_template_key(file.size, file.front.text), []).append((template, info))

    def match(self, data: memoryview) -> tuple[Info, int, bytes] | None:
        """Return the information of the template that matches ``data``, with the position of the first token and the feature in ``data``.

        If no template matches, return None.
        """
        text = bytes(data[: LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")]) if self._count else b""
        for template, known in self._templates.get(_template_key(len(data), text), ()):
            if (found := template.match(data)) is not None:
                return known, *found
        return None


def _template_key(size: int, text: bytes) -> tuple[int, bytes]:
    return size, text[: DIGEST_SLICE.start] + text[DIGEST_SLICE.stop :]


def _start_range(header: Header, packed: bytes) -> slice:
    """Return the range of bytes in the packed header that encodes the start.

    The range is found by packing the header again with a different start that needs as many bytes.
    """
    last = _differing_indices(packed, pack_header(dataclasses.replace(header, start=header.start ^ 1)))[-1]
    return slice(last - len(msgpack.packb(header.start)) + 1, last + 1)


def _unpack(packed: bytes) -> int | None:
    """Return the integer that ``packed`` encodes, or None if it is negative or not in its shortest encoding."""
    try:
        start = msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException):
        return None
    return start if type(start) is int and start >= 0 and msgpack.packb(start) == packed else None


def _invert_bits(data: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in data)


def _differing_indices(first: bytes, other: bytes) -> list[int]:
    return [index for index, (byte, other_byte) in enumerate(zip(first, other, strict=True)) if byte != other_byte]
