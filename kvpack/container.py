"""The kvpack file: a safetensors file whose every byte is covered by a check (spec/container.md).

u64 length, JSON header, then the data: the tensor ``kvpack.header`` and the payload tensors at multiples of 64.
The JSON header is a function of ``kvpack.header``; a reader never parses it, it writes it again and compares.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import xxhash

from .atomic import write_file
from .formats.errors import (
    DigestMismatch,
    InvalidHeader,
    InvalidParameter,
    InvalidPayload,
    InvalidShape,
    KvpackError,
    LimitExceeded,
    MissingFile,
    NotKvpack,
    OutOfBounds,
    Truncated,
    UnsupportedVersion,
)
from .formats.lazy import numpy
from .header import FORMAT, MAX_FILE_BYTES, MAX_RATIO, Contents, Header, TensorEntry, layout_bytes, newer, side_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .header import SideEntry

    Progress = Callable[[int, int], None]

MAX_JSON_BYTES = 16 * 2**20
"""Bytes of the JSON header."""
MAX_WINDOW_BYTES = 8 * 2**20
"""Window of a zstd frame."""
DATA_ALIGNMENT = 4096
"""The data section starts at a multiple of this in the file."""
TENSOR_ALIGNMENT = 64
"""Every payload tensor starts at a multiple of this."""
MIN_SAVING = 0.03
"""A writer keeps a zstd frame only when it saves this share."""

_LENGTH_BYTES = 8
_ZSTD_LEVEL = 3
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_PREFIX = b'{"__metadata__":{"format":"kvpack","kvpack":"'
_VERSION = re.compile(re.escape(_PREFIX) + rb"([1-9][0-9]{0,8})\b")
_START = re.compile(
    re.escape(_PREFIX) + rb'1 ([0-9a-f]{32})"},"kvpack\.header":\{"dtype":"U8","shape":\[([1-9][0-9]{0,8})\],"data_offsets":\[0,\2\]\}'
)
_OPENING_BYTES = 256
"""More than the JSON header up to and with kvpack.header can take."""
_MAGICS = {
    b"GGUF": "a GGUF file",
    b"PK\x03\x04": "a zip archive, such as a PyTorch checkpoint",
    b"\x80": "a pickle",
    b"\x93NUMPY": "a NumPy array",
    b"PAR1": "a Parquet file",
    b"\x28\xb5\x2f\xfd": "a zstd frame",
    bytes(8): "zeros",
}
_NUMPY_DTYPES = {"U8": "u1", "U16": "<u2", "F16": "<f2", "BF16": "<u2", "F32": "<f4"}


@dataclass(frozen=True)
class Place:
    """Where a tensor is in the data section: pad bytes from ``pad``, the tensor from ``begin`` to ``end``."""

    pad: int
    begin: int
    end: int


def file_size(contents: Contents) -> int:
    """The exact bytes that ``write`` makes of ``contents`` without compression. Raises LimitExceeded."""
    tensors = [
        TensorEntry(name, layout.dtype, layout.shape, "none", layout_bytes(layout), bytes(16)) for name, layout in contents.layouts.items()
    ]
    header = _with_tensors(contents, tensors)
    data = header.to_bytes()
    front, places = _front(header, data)
    return len(front) + _data_bytes(places, data)


def write(
    path: str | os.PathLike[str],
    contents: Contents,
    arrays: Mapping[str, Any],
    *,
    compress: bool = False,
    durable: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write a file atomically and return its bytes.

    ``arrays`` holds a C-contiguous buffer for every name of ``contents.layouts``. ``compress`` stores a tensor as a zstd
    frame where that saves 3 % or more. ``durable`` syncs file and folder. ``progress(done, total)`` counts bytes.
    Raises InvalidParameter, InvalidShape and LimitExceeded before anything is written, then WriteFailed.
    """
    pieces = _pieces(contents, arrays, compress)
    total = sum(map(len, pieces))
    write_file(path, _counted(pieces, total, progress), durable=durable)
    return total


def to_bytes(contents: Contents, arrays: Mapping[str, Any], *, compress: bool = False) -> bytes:
    """The bytes of the file that ``write`` makes. Raises InvalidParameter, InvalidShape and LimitExceeded."""
    return b"".join(_pieces(contents, arrays, compress))


def open_file(path: str | os.PathLike[str], *, max_bytes: int | None = None) -> File:
    """Map a file and check its size, version and headers; tensors are checked when first used.

    ``max_bytes`` limits both the file and what its tensors take when decoded. Order: spec/container.md, Reading.
    Raises MissingFile, NotKvpack, Truncated, DigestMismatch, UnsupportedVersion, UnknownCodec, InvalidHeader and LimitExceeded.
    """
    where = os.fspath(path)
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise MissingFile(f"{where}: is a {_kind(status.st_mode)}, expected a regular file")
            _check_size(where, status.st_size, max_bytes)
            # A private mapping is writable, as tensors are, and never changes the file.
            data = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise MissingFile(f"{where}: could not be opened: {reason or error}") from None
    return File(data, where, max_bytes)


def open_bytes(data: bytes | bytearray | memoryview, *, where: str = "bytes", max_bytes: int | None = None) -> File:
    """A file that is already in memory; tensors are views of ``data``. Raises as ``open_file``, naming ``where``."""
    _check_size(where, len(data), max_bytes)
    return File(data, where, max_bytes)


class File:
    """An open kvpack file: ``header``, ``size`` in bytes, ``tensors`` by name. A context manager.

    Made by ``open_file`` and ``open_bytes``. Every error names ``where``.
    """

    def __init__(self, data: mmap.mmap | bytes | bytearray | memoryview, where: str, max_bytes: int | None) -> None:
        self.where = where
        self.size = len(data)
        self._data = data
        self._view = memoryview(data)
        try:
            with _located(where):
                self.header, self._start, self._places = _read_front(self._view, max_bytes)
        except BaseException:
            self.close()
            raise
        self.tensors: dict[str, TensorEntry] = {tensor.name: tensor for tensor in self.header.tensors}
        self._verified: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; views from ``tensor`` stay valid, and keep the mapping until the last of them is gone."""
        self._view.release()
        if isinstance(self._data, mmap.mmap):
            with contextlib.suppress(BufferError):
                self._data.close()

    def tensor(self, name: str) -> memoryview:
        """The decoded bytes of a tensor as a flat view, its digest and the pad before it checked on first use.

        Of a mapped file the view is writable and private. Raises OutOfBounds for an unknown name, DigestMismatch, and
        InvalidPayload for a pad that is not zero or a zstd frame that is not of its size.
        """
        if name not in self.tensors:
            raise OutOfBounds(f"{self.where}: has no tensor {name!r}")
        entry, place = self.tensors[name], self._places[name]
        stored = self._view[self._start + place.begin : self._start + place.end]
        with _located(self.where):
            if name not in self._verified:
                _check_pad(name, self._view[self._start + place.pad : self._start + place.begin])
                _check_digest(name, stored, entry.digest)
                self._verified.add(name)
            return stored if entry.filter == "none" else _decompressed(name, stored, layout_bytes(self.header.layouts[name]))

    def check_side(self, layer: int, side: str) -> None:
        """Check the stored values of one side ("k" or "v") by its codec's rules. Raises InvalidPayload, and as ``tensor``."""
        entry: SideEntry | None = getattr(self.header.layers[layer], side)
        if entry is None:
            return
        codec = self.header.codecs[entry.codec]
        arrays = {}
        for stream in side_tensors(codec, entry):
            if stream != "tail":
                name = f"{layer}.{side}.{stream}"
                layout = self.header.layouts[name]
                arrays[stream] = numpy.frombuffer(self.tensor(name), _NUMPY_DTYPES[layout.dtype]).reshape(layout.shape)
        with _located(self.where):
            codec.check(arrays, f"{layer}.{side}")

    def verify(self, progress: Progress | None = None) -> None:
        """Check every byte: digests, pads, and the codecs' rules. ``progress(done, total)`` counts bytes of the file.

        Raises DigestMismatch and InvalidPayload.
        """
        for name in self.tensors:
            self.tensor(name)
            if progress is not None:
                progress(self._start + self._places[name].end, self.size)
        for number, layer in enumerate(self.header.layers):
            for side, _ in layer.sides():
                self.check_side(number, side)


def _read_front(view: memoryview, max_bytes: int | None) -> tuple[Header, int, dict[str, Place]]:
    """Everything before the payload, checked: header, start of the data section, and the places of the tensors."""
    size = len(view)
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    opening = bytes(view[_LENGTH_BYTES : _LENGTH_BYTES + _OPENING_BYTES])
    if not opening.startswith(_PREFIX):
        raise NotKvpack(_not_kvpack(bytes(view[:_LENGTH_BYTES]), opening, length, size))
    version = _VERSION.match(opening)
    if version and int(version[1]) > FORMAT:
        raise UnsupportedVersion(newer(int(version[1])))
    if length > MAX_JSON_BYTES:
        raise LimitExceeded(f"the JSON header has {length} bytes, allowed are at most {MAX_JSON_BYTES}")
    start = _LENGTH_BYTES + length
    if start > size:
        raise Truncated(f"has {size} bytes, its JSON header ends at {start}")
    if start % DATA_ALIGNMENT:
        raise InvalidHeader(f"the JSON header ends at byte {start}, expected a multiple of {DATA_ALIGNMENT}")
    match = _START.match(opening)
    if not match:
        raise InvalidHeader("the JSON header does not begin with the metadata of format 1 and the tensor kvpack.header")
    end = start + int(match[2])
    if end > size:
        raise Truncated(f"has {size} bytes, kvpack.header ends at {end}")
    data = bytes(view[start:end])
    _check_digest("kvpack.header", data, bytes.fromhex(match[1].decode()))
    header = Header.from_bytes(data)
    if max_bytes is not None:
        decoded = sum(map(layout_bytes, header.layouts.values()))
        if decoded > max_bytes:
            raise LimitExceeded(f"the tensors take {decoded} bytes when decoded, max_bytes is {max_bytes}")
    front, places = _front(header, data)
    found = bytes(view[: len(front)])
    if found != front:
        at = next((i for i, (a, b) in enumerate(zip(found, front, strict=False)) if a != b), len(found))
        raise InvalidHeader(f"the JSON header differs at byte {at} of the file from the one that kvpack.header gives")
    expected = len(front) + _data_bytes(places, data)
    if size != expected:
        raise Truncated(f"has {size} bytes, its header gives {expected}")
    return header, len(front), places


def _not_kvpack(first: bytes, opening: bytes, length: int, size: int) -> str:
    if size < _LENGTH_BYTES:
        return f"is {f'only {size} bytes long' if size else 'empty'}, not a kvpack file"
    if opening.startswith(b"{") and _LENGTH_BYTES + length <= size:
        return 'is another safetensors file, not a kvpack file: its metadata does not begin with "format":"kvpack"'
    for magic, name in _MAGICS.items():
        if first.startswith(magic):
            return f"is {name}, not a kvpack file"
    return f"is not a kvpack file: it does not begin with the length of a JSON header and {_PREFIX[:16].decode()}"


def _front(header: Header, data: bytes) -> tuple[bytes, dict[str, Place]]:
    """The bytes before the data section, and where it holds each payload tensor; ``data`` is the header tensor."""
    digest = xxhash.xxh3_128_hexdigest(data)
    rows = [f'"__metadata__":{{"format":"kvpack","kvpack":"{FORMAT} {digest}"}}', _row("kvpack.header", "U8", (len(data),), 0, len(data))]
    places = {}
    pads, end = 0, len(data)
    for tensor in header.tensors:
        pad, begin = end, end + -end % TENSOR_ALIGNMENT
        if begin > pad:
            rows.append(_row(f"kvpack.pad.{pads}", "U8", (begin - pad,), pad, begin))
            pads += 1
        end = begin + tensor.stored_bytes
        dtype, shape = (tensor.dtype, tensor.shape) if tensor.filter == "none" else ("U8", (tensor.stored_bytes,))
        rows.append(_row(tensor.name, dtype, shape, begin, end))
        places[tensor.name] = Place(pad, begin, end)
    text = ("{" + ",".join(rows) + "}").encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % DATA_ALIGNMENT)
    if len(text) > MAX_JSON_BYTES:
        raise LimitExceeded(f"the JSON header has {len(text)} bytes, allowed are at most {MAX_JSON_BYTES}")
    front = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    if len(front) + end > MAX_FILE_BYTES:
        raise LimitExceeded(f"the file has {len(front) + end} bytes, allowed are at most {MAX_FILE_BYTES}")
    return front, places


def _row(name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":[{begin},{end}]}}'


def _data_bytes(places: Mapping[str, Place], data: bytes) -> int:
    return max((place.end for place in places.values()), default=len(data))


def _pieces(contents: Contents, arrays: Mapping[str, Any], compress: bool) -> list[memoryview]:
    """The whole file, in order."""
    if set(arrays) != set(contents.layouts):
        odd = ", ".join(sorted(set(arrays) ^ set(contents.layouts))[:8])
        raise InvalidParameter(f"arrays missing or not in the layout: {odd}")
    tensors = []
    payload = {}
    for name, layout in contents.layouts.items():
        raw = _flat(name, arrays[name])
        if len(raw) != layout_bytes(layout):
            raise InvalidShape(f"{name} has {len(raw)} bytes, {layout.dtype} {list(layout.shape)} takes {layout_bytes(layout)}")
        chosen, stored = _compressed(raw) if compress else ("none", raw)
        tensors.append(TensorEntry(name, layout.dtype, layout.shape, chosen, len(stored), xxhash.xxh3_128_digest(stored)))
        payload[name] = stored
    header = _with_tensors(contents, tensors)
    data = header.to_bytes()
    front, places = _front(header, data)
    pieces = [memoryview(front), memoryview(data)]
    for name, place in places.items():
        pieces += [memoryview(bytes(place.begin - place.pad)), payload[name]]
    return pieces


def _with_tensors(contents: Contents, tensors: list[TensorEntry]) -> Header:
    return Header(**{f.name: getattr(contents, f.name) for f in fields(Contents)}, tensors=tuple(tensors))


def _flat(name: str, array: Any) -> memoryview:
    view = memoryview(array)
    if not view.c_contiguous:
        raise InvalidParameter(f"{name} is not C-contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _counted(pieces: list[memoryview], total: int, progress: Progress | None) -> Iterator[memoryview]:
    done = 0
    for piece in pieces:
        yield piece
        done += len(piece)
        if progress is not None:
            progress(done, total)


def _compressed(raw: memoryview) -> tuple[str, memoryview]:
    """The filter and the stored bytes: a zstd frame where it saves enough and keeps the format's limits."""
    import zstandard

    frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)
    if len(frame) <= (1 - MIN_SAVING) * len(raw) and len(raw) <= MAX_RATIO * len(frame):
        return "zstd", memoryview(frame)
    return "none", raw


def _decompressed(name: str, stored: memoryview, size: int) -> memoryview:
    """Decode one frame of exactly ``size`` bytes; nothing is allocated before its own header agrees."""
    import zstandard

    try:
        if stored[: len(_ZSTD_MAGIC)] != _ZSTD_MAGIC:
            raise InvalidPayload(f"{name}: does not begin with a zstd frame")
        frame = zstandard.get_frame_parameters(stored)
        if frame.content_size != size:
            raise InvalidPayload(f"{name}: the zstd frame says it holds {frame.content_size} bytes, its shape takes {size}")
        if frame.window_size > MAX_WINDOW_BYTES or frame.dict_id:
            raise InvalidPayload(
                f"{name}: the zstd frame needs a window of {frame.window_size} bytes and dictionary {frame.dict_id}, "
                f"allowed are at most {MAX_WINDOW_BYTES} and no dictionary"
            )
        # The decompressor allocates what the frame says, which is ``size``; a max_output_size would not hold it to less.
        return memoryview(bytearray(zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)))
    except zstandard.ZstdError as error:
        raise InvalidPayload(f"{name}: is not one whole zstd frame: {error}") from None


def _check_digest(name: str, stored: bytes | memoryview, expected: bytes) -> None:
    found = xxhash.xxh3_128_digest(stored)
    if found != expected:
        raise DigestMismatch(f"{name}: is damaged: its {len(stored)} bytes have the digest {found.hex()}, expected {expected.hex()}")


def _check_pad(name: str, pad: memoryview) -> None:
    if any(pad):
        raise InvalidPayload(f"{name}: the pad before it holds {pad.hex()}, expected {len(pad)} zero bytes")


def _check_size(where: str, size: int, max_bytes: int | None) -> None:
    if max_bytes is not None and size > max_bytes:
        raise LimitExceeded(f"{where}: has {size} bytes, max_bytes is {max_bytes}")
    if size < _LENGTH_BYTES:
        raise NotKvpack(f"{where}: {_not_kvpack(b'', b'', 0, size)}")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    try:
        yield
    except KvpackError as error:
        raise type(error)(f"{where}: {error}") from None
