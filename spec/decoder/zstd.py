"""Frames of zstd: RFC 8878, Sec. 3.1.1 (spec/container.md, zstd)."""

from __future__ import annotations

from .limits import MAX_WINDOW_BYTES
from .refusal import require


def check_frame(name: str, frame: bytes, content: int, checksums: bool) -> None:
    """Check that ``frame`` is exactly one frame with a content size, no dictionary, and a window within the limit.

    If ``checksums`` is True, the frame must have a checksum.
    """
    rule = "container.md, zstd"

    def take(at: int, count: int) -> int:
        require(at + count <= len(frame), rule, f"{name}: the frame is cut off")
        return int.from_bytes(frame[at : at + count], "little")

    require(take(0, 4) == 0xFD2FB528, rule, f"{name} does not begin like a Zstandard frame")
    descriptor = take(4, 1)
    single_segment, checksum = descriptor >> 5 & 1, descriptor >> 2 & 1
    require(descriptor & 0x08 == 0, rule, f"{name}: the reserved bit of the frame is set")
    require(checksum == 1 or not checksums, rule, f"{name}: the frame has no content checksum")
    at, window = 5, None
    if not single_segment:
        exponent, mantissa = take(at, 1) >> 3, take(at, 1) & 7
        window = (1 << 10 + exponent) * (8 + mantissa) // 8
        at += 1
    dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
    require(take(at, dictionary_bytes) == 0, rule, f"{name}: the frame needs a dictionary, but dictionaries are not allowed")
    at += dictionary_bytes
    size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
    require(size_bytes > 0, rule, f"{name}: the frame has no content size")
    size = take(at, size_bytes) + (256 if size_bytes == 2 else 0)
    at += size_bytes
    require(size == content, rule, f"{name}: the frame declares a content of {size} bytes, expected {content}")
    window = size if window is None else window
    require(window <= MAX_WINDOW_BYTES, rule, f"{name}: the frame's window of {window} bytes exceeds the limit")
    last = 0
    while not last:
        block = take(at, 3)
        last, kind, size = block & 1, block >> 1 & 3, block >> 3
        require(kind < 3, rule, f"{name}: a block has the reserved type")
        at += 3 + (1 if kind == 1 else size)
    require(at + 4 * checksum == len(frame), rule, f"{name}: the frame does not end where the tensor ends")
