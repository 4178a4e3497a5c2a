"""Parse the parts of a Zstandard frame (RFC 8878, 3.1.1): its header, and the type and section formats of every block."""

from __future__ import annotations

from dataclasses import dataclass

BLOCKS = ("raw", "repeated", "compressed")
LITERALS = ("raw", "repeated", "huffman", "treeless")
MODES = ("predefined", "repeated", "fse", "repeat")


@dataclass(frozen=True)
class Block:
    """A block of a Zstandard frame.

    A compressed block has a literals format, and sequence modes if it contains sequences.
    """

    kind: str
    literals: str = ""
    streams: int = 0
    size_format: int = 0
    tree: str = ""
    sequences: int = 0
    modes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Frame:
    single_segment: bool
    checksum: bool
    size_bytes: int
    blocks: tuple[Block, ...]


def anatomy(frame: bytes) -> Frame:
    """Return the parts of a valid Zstandard frame without a dictionary."""
    descriptor = frame[4]
    single = bool(descriptor >> 5 & 1)
    size_bytes = (int(single), 2, 4, 8)[descriptor >> 6]
    at = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3] + size_bytes
    blocks, last = [], 0
    while not last:
        header = int.from_bytes(frame[at : at + 3], "little")
        last, kind, size = header & 1, BLOCKS[header >> 1 & 3], header >> 3
        stored = 1 if kind == "repeated" else size
        blocks.append(compressed_block(frame[at + 3 : at + 3 + stored]) if kind == "compressed" else Block(kind))
        at += 3 + stored
    return Frame(single, bool(descriptor >> 2 & 1), size_bytes, tuple(blocks))


def compressed_block(data: bytes) -> Block:
    """Return the literals section and the header of the sequences section of a compressed block (RFC 8878, 3.1.1.3)."""
    literals, size_format = LITERALS[data[0] & 3], data[0] >> 2 & 3
    streams, tree = 0, ""
    if literals in ("raw", "repeated"):
        header_bytes, shift = {0: (1, 3), 2: (1, 3), 1: (2, 4), 3: (3, 4)}[size_format]
        size = int.from_bytes(data[:header_bytes], "little") >> shift
        at = header_bytes + (size if literals == "raw" else 1)
    else:
        header_bytes, bits = ((3, 10), (3, 10), (4, 14), (5, 18))[size_format]
        streams = 1 if size_format == 0 else 4
        at = header_bytes + (int.from_bytes(data[:header_bytes], "little") >> 4 + bits)
        if literals == "huffman":
            tree = "direct" if data[header_bytes] >= 128 else "fse"
    count, at = data[at], at + 1
    if count >= 128:
        more = 1 if count < 255 else 2
        extra = int.from_bytes(data[at : at + more], "little")
        count = (count - 128 << 8) + extra if more == 1 else extra + 0x7F00
        at += more
    modes = tuple(MODES[data[at] >> shift & 3] for shift in (6, 4, 2)) if count else ()
    return Block("compressed", literals, streams, size_format, tree, count, modes)
