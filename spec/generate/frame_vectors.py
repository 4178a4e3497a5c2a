"""Conformance vectors of Zstandard frames: blocks, literals and sequences in every format, and malformed frames."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import zstandard

from spec.generate.invalid_vectors import add
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import edit, frame, keys_file
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.file_parts import Parts

BLOCKS_REFUSED: set[str] = set()
"""Files with errors in the compressed data or checksum of a frame, which only a decompressor can detect."""

EITHER = {
    "block-offset-0", "block-reserved-modes", "block-bit-missing",
    "literals-bit-left", "literals-bit-missing", "literals-no-end-mark", "tree-of-depth-12",
    "four-streams-of-four-literals",
}  # fmt: skip
"""Breaches of RFC 8878 that some versions of libzstd accept: before 1.5.7 those in blocks, and up to it those in literals and trees."""

REPEATED, REPEAT = 0x54, 0xFC
"""Modes of a sequences section whose three tables have one code each, and of one that reuses the previous block's tables."""


def add_all() -> None:
    add_compressed()
    add_by_hand()
    add_sizes()
    add_refused()
    add_literals()
    add_checksums()


def of_frame(stored: bytes, content_size: int, channels: int = 16, *changes: Callable[[Parts], None]) -> bytes:
    """Return a file with raw binary32 keys that are stored as the frame ``stored``, after ``changes``."""
    codec = create("raw", channels, dtype="fp32")
    tokens, rest = divmod(content_size, 4 * channels)
    assert rest == 0
    return keys_file(codec, frame(lambda raw: stored), *changes, runs=(tokens,), tail=0, heads=1)


def letters(size: int, seed: int, symbols: int = 26, first: int = 97) -> bytes:
    """Return random bytes with ``symbols`` distinct values. The first values are the most frequent."""
    source = random.Random(seed)
    return bytes(first + min(source.randrange(symbols) for _ in range(3)) for _ in range(size))


def phrases(size: int, seed: int) -> bytes:
    """Return repeated words with random letters between some of them."""
    source = random.Random(seed)
    words = [letters(source.randrange(3, 20), source.randrange(2**32)) for _ in range(40)]
    text = b""
    while len(text) < size:
        text += source.choice(words) + letters(source.randrange(6) // 2, source.randrange(2**32))
    return text[:size]


def add_compressed() -> None:
    """Add frames written by the Zstandard library, with strategies from ``fast`` (1) to ``btultra2`` (9)."""
    noise = random.Random(9).randbytes(4200)
    runs = b"".join(bytes([65 + number % 3]) * 40 + bytes([number, 7]) for number in range(100))
    for name, shows, content, window_log, strategy, checksum in (
        ("one-stream", "literals in one stream, without sequences", letters(192, 1), 15, 2, False),
        ("four-streams", "literals in four streams, whose sizes have 14 bits, with a checksum", letters(1280, 2), 15, 2, True),
        ("four-streams-of-18-bits", "literals in four streams, whose sizes have 18 bits", letters(18432, 3, 200, 0), 15, 2, False),
        ("weights", "a Huffman tree with uncompressed weights", letters(768, 4, 10, 0), 15, 1, False),
        ("first-matches", "sequences with predefined tables", phrases(640, 5), 15, 1, False),
        (
            "treeless",
            "blocks of 1 KiB with matches across them, and literals in four streams with the previous tree",
            phrases(6144, 6),
            10,
            2,
            True,
        ),
        ("repeat", "blocks of 1 KiB that reuse the tables and the tree of the previous block", phrases(6144, 7), 10, 9, False),
        ("two-blocks", "blocks of 4 KiB with more than 127 sequences", phrases(6144, 8), 12, 8, True),
        ("raw-literals", "raw literals, whose number has 20 bits", noise + noise[:88], 15, 2, False),
        ("raw-literals-of-12-bits", "raw literals, whose number has 12 bits", noise[:200] + noise[:56], 15, 2, False),
        ("runs", "runs of one byte: matches that overlap themselves", runs[:4096], 12, 7, False),
    ):
        parameters = zstandard.ZstdCompressionParameters(
            window_log=window_log,
            strategy=strategy,
            hash_log=12,
            chain_log=12,
            search_log=4,
            min_match=4 if strategy < 4 else 3,
            target_length=64 if strategy > 1 else 0,
            write_checksum=checksum,
        )
        make = lambda c=content, p=parameters: of_frame(zstandard.ZstdCompressor(compression_params=p).compress(c), len(c))  # noqa: E731
        add_valid(f"zstd-{name}", shows, make, "container-33" if checksum else "container-21")


def block(kind: int, size: int, stored: bytes) -> tuple[int, int, bytes]:
    return kind, size, stored


def raw(content: bytes) -> tuple[int, int, bytes]:
    return block(0, len(content), content)


def repeated(byte: int, count: int) -> tuple[int, int, bytes]:
    return block(1, count, bytes([byte]))


def compressed(literals: bytes, sequences: bytes) -> tuple[int, int, bytes]:
    return block(2, len(literals) + len(sequences), literals + sequences)


def joined(content_size: int, *blocks: tuple[int, int, bytes], window: int | None = None) -> bytes:
    """Return a frame of these blocks with a content size of 4 bytes, and with a window if ``window`` is its descriptor."""
    head = bytes([0xA0]) if window is None else bytes([0x80, window])
    parts = [bytes.fromhex("28b52ffd") + head + content_size.to_bytes(4, "little")]
    for number, (kind, size, stored) in enumerate(blocks):
        parts.append((size << 3 | kind << 1 | (number == len(blocks) - 1)).to_bytes(3, "little") + stored)
    return b"".join(parts)


def raw_literals(content: bytes) -> bytes:
    return (bytes([len(content) << 3]) if len(content) < 32 else (len(content) << 4 | 4).to_bytes(2, "little")) + content


def one_code(count: int, literals: int, offset: int, match: int, extra: str, modes: int = REPEATED) -> bytes:
    """Return a sequences section whose tables have one code each. ``extra`` contains the bits of all sequences in reading order."""
    if count < 128:
        number = bytes([count])
    else:
        number = bytes([128 + (count >> 8), count & 255]) if count < 0x7F00 else b"\xff" + (count - 0x7F00).to_bytes(2, "little")
    bits = int("1" + extra, 2)
    codes = bytes([literals, offset, match]) if modes & REPEATED == modes else b""
    return number + bytes([modes]) + codes + bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def add_by_hand() -> None:
    """Add frames that the Zstandard library does not write, or writes only for large contents."""
    blocks = [
        raw(bytes(range(64))),
        # Sequences of 4 literals and 5 bytes from 1, 4 and 3 bytes before.
        compressed(raw_literals(b"abcdefghijklmnop"), one_code(3, 4, 2, 2, "00" + "11" + "10")),
        raw(b""),
        # 3 literals each, then the second and the third of the last offsets.
        compressed(bytes([10 << 3 | 1]) + b"z", one_code(2, 3, 1, 0, "0" + "1")),
        # No literals: the second of the last offsets, in turn with the first.
        compressed(raw_literals(b""), one_code(4, 0, 0, 1, "")),
        # No literals: the third of the last offsets, the first less one, and the third again; 35 or 36 bytes.
        compressed(raw_literals(b""), one_code(3, 0, 1, 32, "00" + "11" + "01")),
        compressed(raw_literals(b""), one_code(130, 0, 1, 32, "01" * 65 + "00" * 65, REPEAT)),
        repeated(9, 5),
    ]
    size = 64 + 31 + 0 + 16 + 16 + 107 + 130 * 35 + 65 + 5
    filled = -size % 64
    make = lambda: of_frame(joined(size + filled, *blocks, raw(bytes(range(filled)))), size + filled)  # noqa: E731
    shows = "tables with one code, repeated literals, all repeat offsets with and without literals, and an empty block between others"
    add_valid("zstd-one-code", shows, make, "container-21")
    first, count = raw(random.Random(1).randbytes(512)), 32768
    many = lambda: of_frame(joined(512 + 3 * count, first, compressed(raw_literals(b""), one_code(count, 0, 0, 0, ""))), 512 + 3 * count)  # noqa: E731
    add_valid("zstd-32768-sequences", "a number of sequences that is stored in three bytes", many, "container-21")


def add_sizes() -> None:
    eight = bytes.fromhex("28b52ffd e0") + (64).to_bytes(8, "little") + (64 << 3 | 1).to_bytes(3, "little") + bytes(range(64))
    add_valid("zstd-size-of-8-bytes", "a content size of eight bytes", lambda: of_frame(eight, 64), "container-23")
    four = joined(64, raw(bytes(range(64))), window=0x03)
    shows = "a content size of four bytes, below the window"
    add_valid("zstd-size-of-4-bytes", shows, lambda: of_frame(four, 64), "container-23", "container-26")

    def at_ratio(size: int) -> bytes:
        frame = bytes.fromhex("28b52ffd 60") + (size - 256).to_bytes(2, "little") + (size << 3 | 3).to_bytes(3, "little") + b"\0"
        return of_frame(frame, size, size // 4)

    add_valid("zstd-largest-ratio", "2816 bytes in a frame of 11 bytes: the largest ratio, 256", lambda: at_ratio(2816), "container-29")
    add(
        "limit-of-the-ratio",
        "container-29",
        "LimitExceeded",
        "2820 bytes in a frame of 11 bytes: above the largest ratio",
        lambda: at_ratio(2820),
    )
    size = 2**23 + 4096
    # Blocks without content, so that the ratio is within its limit.
    many = [*[raw(b"")] * 11000, *[repeated(0, 2**17)] * 64, repeated(0, 4096)]
    shows = "a frame with Single_Segment_flag whose content exceeds the largest window by 4 KiB"
    add("zstd-window-of-one-segment", "container-26", "InvalidPayload", shows, lambda: of_frame(joined(size, *many), size, 1024))


def refused(name: str, rule: str, shows: str, stored: Callable[[], bytes], size: int = 64) -> None:
    BLOCKS_REFUSED.add(f"invalid/zstd-{name}.kvpack")
    add(f"zstd-{name}", rule, "InvalidPayload", shows, lambda: of_frame(stored(), size), either=name in EITHER)


def add_refused() -> None:
    def wrong_checksum() -> bytes:
        good = zstandard.ZstdCompressor(write_checksum=True).compress(letters(1280, 2))
        return good[:-1] + bytes([good[-1] ^ 1])

    refused("checksum-wrong", "container-33", "a content checksum with a flipped bit", wrong_checksum, 1280)
    shows = "a block with the declared number of bytes, and another block with one byte"
    longer = joined(64, raw(bytes(64)), repeated(0, 1), window=0)
    refused("content-more-in-a-block", "container-24", shows, lambda: longer)
    before = raw(bytes(range(1, 56)))
    four = raw_literals(b"abcd")
    good = one_code(1, 4, 2, 2, "00")
    for name, shows, literals, sequences in (
        ("match-before-the-content", "a match from before the first byte of the content", four, one_code(1, 4, 6, 2, "000000")),
        ("offset-0", "the first repeat offset minus one, which is 0", raw_literals(b"abcdef"), one_code(1, 0, 1, 0, "1")),
        ("reserved-modes", "reserved mode bits that are set", four, one_code(1, 4, 2, 2, "00", REPEATED | 1)[:2] + good[2:]),
        ("bit-left", "a bitstream with one bit more than the sequences read", four, one_code(1, 4, 2, 2, "000")),
        ("bit-missing", "a bitstream with one bit less than the sequences read", four, one_code(1, 4, 2, 2, "0")),
        ("no-end-mark", "a bitstream that ends with a zero byte", four, good[:-1] + b"\0"),
        ("literals-missing", "a sequence of five literals where there are four", four, one_code(1, 5, 2, 1, "00")),
        ("code-of-literals", "a literals length code above 35", four, one_code(1, 36, 2, 2, "00")),
        ("code-of-matches", "a match length code above 52", four, one_code(1, 4, 2, 53, "00")),
        ("tables-of-no-block", "tables of the previous block in the first compressed block", four, b"\1\xfc\4"),
        ("tree-of-no-block", "literals with the tree of the previous block in the first compressed block", b"\x93\x40\x00\x10", b"\0"),
        ("tree-of-no-weights", "a Huffman tree whose weights are all zero", b"\x92\xc0\x00\x81\x00\x10", b"\0"),
    ):
        stored = joined(64, before, compressed(literals, sequences))
        refused(f"block-{name}", "container-21", shows, lambda s=stored: s)


def add_literals() -> None:
    """Add frames with four literal streams of 56 bits each. Their Huffman tree has eleven weights, and 64 literals have one-bit codes."""
    right, streams = bytes.fromhex("8aba9876543210"), [bytes.fromhex("ffffffffffffff1f")] * 4

    def changed(weights: bytes = right, **ends: int) -> Callable[[], bytes]:
        found = [stream[:-1] + bytes([ends.get(f"stream{number}", stream[-1])]) for number, stream in enumerate(streams)]
        literals = bytes.fromhex("064f0b") + weights + bytes.fromhex("080008000800") + b"".join(found)
        return lambda: bytes.fromhex("28b52ffd 20 f0") + (len(literals) + 1 << 3 | 2 << 1 | 1).to_bytes(3, "little") + literals + b"\0"

    add_valid("zstd-literals", "literals in four streams with one-bit codes", lambda: of_frame(changed()(), 240, 60), "container-21")
    for name, shows, stored in (
        ("literals-bit-left", "a literals stream with one bit more than needed", changed(stream0=0x3F)),
        ("literals-bit-missing", "a literals stream with one bit less than needed", changed(stream0=0x0F)),
        ("literals-no-end-mark", "a literals stream that ends with a zero byte", changed(stream1=0)),
        ("tree-of-depth-12", "a Huffman tree with codes of twelve bits", changed(bytes.fromhex("8bcba987654321"))),
    ):
        BLOCKS_REFUSED.add(f"invalid/zstd-{name}.kvpack")
        add(f"zstd-{name}", "container-21", "InvalidPayload", shows, lambda s=stored: of_frame(s(), 240, 60), either=True)
    # A tree of one weight, whose two codes have one bit each; every stream has one literal and its mark.
    four = bytes.fromhex("28b52ffd 20 20 e2000000 850000 460003 8010 010001000100 02030302 00")
    BLOCKS_REFUSED.add("invalid/zstd-four-streams-of-four-literals.kvpack")
    shows = "four literals in four streams"
    add("zstd-four-streams-of-four-literals", "container-21", "InvalidPayload", shows, lambda: of_frame(four, 32, 1), either=True)


def add_checksums() -> None:
    """Add files with the feature ``zstd-checksum``: one frame with a checksum, and one without."""
    content = letters(1280, 2)

    def of_file(*, checksum: bool) -> bytes:
        stored = zstandard.ZstdCompressor(write_checksum=checksum).compress(content)
        return of_frame(stored, len(content), 16, edit("ignorable", {"zstd-checksum": b""}))

    shows = "a frame with a checksum in a file that declares checksums"
    add_valid("zstd-checksum-said", shows, lambda: of_file(checksum=True), "container-65", "container-33")
    shows = "a frame without a checksum in a file that declares checksums"
    add("zstd-checksum-missing", "container-65", "InvalidPayload", shows, lambda: of_file(checksum=False))
