"""The conformance vectors contain Zstandard frames with every form of header, block, literals and sequences in RFC 8878."""

from __future__ import annotations

from functools import cache

from spec.generate.vector_files import FOLDER
from support.frame_anatomy import LITERALS, MODES, Block, Frame, anatomy
from support.parts import Parts
from support.vector_checks import DECODED


@cache
def frames() -> list[Frame]:
    parts = [Parts.of((FOLDER / file).read_bytes()) for file in DECODED]
    stored = [(row[3], tensor) for one in parts for row, tensor in zip(one.header["tensors"], one.tensors, strict=True)]
    return [anatomy(tensor) for chosen, tensor in stored if chosen == "zstd"]


def blocks() -> list[Block]:
    return [block for frame in frames() for block in frame.blocks]


def test_vectors_have_frame_headers_of_every_form() -> None:
    assert {frame.single_segment for frame in frames()} == {True, False}
    assert {frame.checksum for frame in frames() if any(block.kind == "compressed" for block in frame.blocks)} == {True, False}
    assert {frame.size_bytes for frame in frames()} == {1, 2, 4, 8}


def test_vectors_have_blocks_of_every_type_next_to_each_other() -> None:
    pairs = {(a.kind, b.kind) for frame in frames() for a, b in zip(frame.blocks, frame.blocks[1:], strict=False)}
    assert {("raw", "compressed"), ("compressed", "raw"), ("compressed", "compressed"), ("compressed", "repeated")} <= pairs


def test_vectors_have_literals_of_every_form() -> None:
    assert {block.literals for block in blocks() if block.kind == "compressed"} == set(LITERALS)
    assert {block.size_format for block in blocks() if block.literals == "huffman"} == {0, 1, 2, 3}
    assert {block.size_format & 1 and block.size_format for block in blocks() if block.literals == "raw"} == {0, 1, 3}
    assert {block.streams for block in blocks() if block.literals == "treeless"} == {1, 4}
    assert {block.tree for block in blocks() if block.literals == "huffman"} == {"direct", "fse"}


def test_vectors_have_sequences_of_every_mode() -> None:
    for table in range(3):
        assert {block.modes[table] for block in blocks() if block.modes} == set(MODES)
    repeats = [(a, b) for frame in frames() for a, b in zip(frame.blocks, frame.blocks[1:], strict=False) if a.modes and b.modes]
    assert {a.modes[table] for a, b in repeats for table in range(3) if b.modes[table] == "repeat"} >= {"fse", "repeated"}
    counts = [block.sequences for block in blocks() if block.kind == "compressed"]
    assert {0 if count < 1 else 1 if count < 128 else 2 if count < 0x7F00 else 3 for count in counts} == {0, 1, 2, 3}
