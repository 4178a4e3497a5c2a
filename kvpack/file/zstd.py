"""Compression of stored tensors with zstd. Each tensor is one frame with a known decoded size (spec/container.md, zstd)."""

from __future__ import annotations

from kvpack.formats.errors import InvalidPayload

from .limits import MAX_RATIO, MAX_WINDOW_BYTES

FEATURE = "zstd-checksum"
"""Name of the ignorable feature of files in which all zstd frames have a content checksum."""

MIN_SAVING = 0.03
"""Minimum fraction of a tensor's size that a frame must save to be stored."""

_LEVEL = 3
_MAGIC = b"\x28\xb5\x2f\xfd"


def compress_frame(raw: memoryview) -> bytes | None:
    """Return ``raw`` as one zstd frame, or None if that saves less than 3% or exceeds the format's maximum ratio."""
    import zstandard

    frame = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(raw)
    return frame if len(frame) <= (1 - MIN_SAVING) * len(raw) and len(raw) <= MAX_RATIO * len(frame) else None


def decompress_frame(name: str, stored: memoryview, size: int, *, checksums: bool) -> memoryview:
    """Decode a zstd frame to ``size`` writable bytes.

    Memory is allocated only after ``size`` has been compared with the frame's header. With ``checksums=True`` (if the file has
    ``FEATURE``), a frame without a content checksum is rejected. Raises InvalidPayload, with the tensor's ``name`` in the message.
    """
    import zstandard

    try:
        if stored[: len(_MAGIC)] != _MAGIC:
            raise InvalidPayload(f"{name}: begins with {stored[: len(_MAGIC)].hex()}, but zstd frames begin with {_MAGIC.hex()}")
        frame = zstandard.get_frame_parameters(stored)
        if frame.content_size != size:
            raise InvalidPayload(f"{name}: the zstd frame declares {frame.content_size} bytes, but the shape needs {size}")
        if frame.window_size > MAX_WINDOW_BYTES:
            window = frame.window_size
            raise InvalidPayload(f"{name}: the zstd frame has a window of {window} bytes, but the maximum is {MAX_WINDOW_BYTES}")
        if frame.dict_id:
            raise InvalidPayload(f"{name}: the zstd frame needs the dictionary {frame.dict_id}, but dictionaries are not allowed")
        if checksums and not frame.has_checksum:
            raise InvalidPayload(f"{name}: the zstd frame has no content checksum, which {FEATURE!r} requires of every frame")
        if not size:
            return _decompress_empty(name, stored)
        # The decompressor allocates the size in the frame's header, which equals ``size``. max_output_size would not limit it.
        return memoryview(bytearray(zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)))
    except zstandard.ZstdError as error:
        raise InvalidPayload(f"{name}: expected a single complete zstd frame: {error}") from None


def _decompress_empty(name: str, stored: memoryview) -> memoryview:
    """Decode a frame without content, including its blocks, which zstandard's decompress() does not read.

    Raises InvalidPayload if it is not empty, and ZstdError for an invalid block or checksum.
    """
    import zstandard

    stream = zstandard.ZstdDecompressor().decompressobj()
    # A block with content raises an error, because it decodes to more than the header's size.
    stream.decompress(stored)
    if stream.unused_data or not stream.eof:
        raise InvalidPayload(f"{name}: expected a single complete zstd frame without content")
    return memoryview(bytearray())
