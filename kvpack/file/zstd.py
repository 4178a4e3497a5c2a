"""zstd as a filter of stored tensors: one frame whose decoded size is known in advance (spec/container.md, zstd)."""

from __future__ import annotations

from kvpack.formats.errors import InvalidPayload

from .limits import MAX_RATIO, MAX_WINDOW_BYTES

FEATURE = "zstd-checksum"
"""The ignorable feature of a file whose frames all have a content checksum."""

MIN_SAVING = 0.03
"""The smallest share that a frame must save for a writer to keep it."""

_LEVEL = 3
_MAGIC = b"\x28\xb5\x2f\xfd"


def compressed(raw: memoryview) -> bytes | None:
    """Return one frame of ``raw``, or None if it saves less than 3 % or is smaller than the format allows."""
    import zstandard

    frame = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(raw)
    return frame if len(frame) <= (1 - MIN_SAVING) * len(raw) and len(raw) <= MAX_RATIO * len(frame) else None


def decompressed(name: str, stored: memoryview, size: int, *, checksums: bool) -> memoryview:
    """Decode the frame ``stored`` to ``size`` writable bytes; nothing is allocated before the frame's header matches ``size``.

    With ``checksums`` (the file has ``FEATURE``), a frame without a content checksum is refused, because versions of libzstd decode some
    malformed frames to different values. Raises InvalidPayload, which begins with ``name``.
    """
    import zstandard

    try:
        if stored[: len(_MAGIC)] != _MAGIC:
            raise InvalidPayload(f"{name}: begins with {stored[: len(_MAGIC)].hex()}, expected {_MAGIC.hex()}, the magic of a zstd frame")
        frame = zstandard.get_frame_parameters(stored)
        if frame.content_size != size:
            raise InvalidPayload(f"{name}: the zstd frame declares {frame.content_size} bytes, but the shape takes {size}")
        if frame.window_size > MAX_WINDOW_BYTES:
            raise InvalidPayload(f"{name}: the zstd frame needs a window of {frame.window_size} bytes, the limit is {MAX_WINDOW_BYTES}")
        if frame.dict_id:
            raise InvalidPayload(f"{name}: the zstd frame needs the dictionary {frame.dict_id}, but dictionaries are not allowed")
        if checksums and not frame.has_checksum:
            raise InvalidPayload(f"{name}: the zstd frame has no content checksum, which {FEATURE!r} requires of every frame")
        if not size:
            return _no_content(name, stored)
        # The decompressor allocates the size that the frame states, now known to be ``size``; max_output_size would not limit it.
        return memoryview(bytearray(zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)))
    except zstandard.ZstdError as error:
        raise InvalidPayload(f"{name}: is not one whole zstd frame: {error}") from None


def _no_content(name: str, stored: memoryview) -> memoryview:
    """Decode a frame without content to its end; zstandard's decompress() does not read the blocks of a frame that states 0 bytes.

    Raises InvalidPayload, and ZstdError for a block or a checksum that is wrong.
    """
    import zstandard

    stream = zstandard.ZstdDecompressor().decompressobj()
    # A block with content is an error: it decodes to more than the frame states.
    stream.decompress(stored)
    if stream.unused_data or not stream.eof:
        raise InvalidPayload(f"{name}: is not one whole zstd frame without content")
    return memoryview(bytearray())
