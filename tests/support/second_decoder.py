"""spec/decoder.py as a module, with the helpers for comparing the library's readers with it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import zstandard

PATH = Path(__file__).resolve().parents[2] / "spec" / "decoder.py"

_SPEC = importlib.util.spec_from_file_location("spec_decoder", PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
decoder = importlib.util.module_from_spec(_SPEC)
sys.modules["spec_decoder"] = decoder
_SPEC.loader.exec_module(decoder)


def decompress(frame: bytes, size: int) -> bytes:
    """The content of a Zstandard frame that declares ``size``, or one byte more than ``size`` if the frame is invalid."""
    try:
        if size:
            return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
        # decompress() reads nothing of a frame that declares no size.
        stream = zstandard.ZstdDecompressor().decompressobj()
        content = stream.decompress(frame)
    except zstandard.ZstdError:
        return bytes(size + 1)
    return content if stream.eof and not stream.unused_data else bytes(1)
