"""zstd as a filter of stored tensors: one frame, its size known beforehand (spec/container.md, zstd)."""

from __future__ import annotations

from kvpack.formats.errors import InvalidPayload

from .limits import MAX_RATIO, MAX_WINDOW_BYTES

MIN_SAVING = 0.03
"""A writer keeps a frame only when it saves this share."""

_LEVEL = 3
_MAGIC = b"\x28\xb5\x2f\xfd"


def compressed(raw: memoryview) -> bytes | None:
    """One frame of ``raw``, or None where it saves less than 3 % or is smaller than the format allows."""
    import zstandard

    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(raw)
    return frame if len(frame) <= (1 - MIN_SAVING) * len(raw) and len(raw) <= MAX_RATIO * len(frame) else None


def decompressed(name: str, stored: memoryview, size: int) -> memoryview:
    """The ``size`` bytes of the frame ``stored``, writable; nothing is allocated before the frame's own header agrees.

    Raises InvalidPayload, which begins with ``name``.
    """
    import zstandard

    try:
        if stored[: len(_MAGIC)] != _MAGIC:
            raise InvalidPayload(f"{name}: begins with {stored[: len(_MAGIC)].hex()}, a zstd frame with {_MAGIC.hex()}")
        frame = zstandard.get_frame_parameters(stored)
        if frame.content_size != size:
            raise InvalidPayload(f"{name}: the zstd frame says that it holds {frame.content_size} bytes, the shape takes {size}")
        if frame.window_size > MAX_WINDOW_BYTES:
            raise InvalidPayload(f"{name}: the zstd frame needs a window of {frame.window_size} bytes, the limit is {MAX_WINDOW_BYTES}")
        if frame.dict_id:
            raise InvalidPayload(f"{name}: the zstd frame needs the dictionary {frame.dict_id}, none is allowed")
        if not size:
            return _no_content(name, stored)
        # The decompressor allocates what the frame says, now known to be ``size``; its max_output_size would not hold it to less.
        return memoryview(bytearray(zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)))
    except zstandard.ZstdError as error:
        raise InvalidPayload(f"{name}: is not one whole zstd frame: {error}") from None


def _no_content(name: str, stored: memoryview) -> memoryview:
    """The empty content of a frame, which is read to its end: of one that says 0 bytes, zstandard's decompress() reads no more.

    Raises InvalidPayload, and ZstdError for a block or a checksum that is wrong.
    """
    import zstandard

    stream = zstandard.ZstdDecompressor().decompressobj()
    # Blocks of any content are an error: they make more than the frame says.
    stream.decompress(stored)
    if stream.unused_data or not stream.eof:
        raise InvalidPayload(f"{name}: is not one whole zstd frame of no content")
    return memoryview(bytearray())
