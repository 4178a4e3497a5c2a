"""Import spec/decoder, and compare the library's readers with it."""

from __future__ import annotations

from pathlib import Path

import zstandard

from spec import decoder as decoder

FOLDER = Path(decoder.__file__).parent
MODULES = sorted(FOLDER.rglob("*.py"))


def decompress(frame: bytes, size: int) -> bytes:
    """Return the content of a Zstandard frame that declares ``size`` bytes.

    If the frame is invalid, one byte more than ``size`` is returned.
    """
    try:
        if size:
            return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
        # decompress() does not read frames that declare a size of 0.
        stream = zstandard.ZstdDecompressor().decompressobj()
        content = stream.decompress(frame)
    except zstandard.ZstdError:
        return bytes(size + 1)
    return content if stream.eof and not stream.unused_data else bytes(1)
