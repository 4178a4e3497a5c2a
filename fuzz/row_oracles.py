"""Checks of packed rows, whose bytes another process may have written. Imports torch."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from fuzz.byte_mutator import mutate_bytes, mutate_numbers
from fuzz.header_mutator import mutate_header
from fuzz.reader_oracles import check_readers
from kvpack.file.row import FRAME_BYTES, MAGIC, write_checksum
from kvpack.pages import PageBuffer, PageCodec, PageGeometry
from support.second_decoder import decoder

if TYPE_CHECKING:
    import random

    from fuzz.file_mutator import Vocabulary

NAMESPACE = bytes(range(32))
PAGES = (
    ("raw", PageGeometry(2, 1, 3, 8, 4)),
    ("raw", PageGeometry(1, 1, 2, 8, 8, "fp8_e4m3")),
    ("raw", PageGeometry(1, 2, 2, 24, None, "u8")),
    ("kv=group:b=4,g=4;layers=0:k=raw", PageGeometry(2, 1, 3, 8, 4)),
    ("kv=group:b=2,g=4,axis=token", PageGeometry(1, 2, 6, 8, 8, "fp16")),
    ("kivi-2-u8", PageGeometry(1, 1, 33, 32, 32)),
    ("octopus-3", PageGeometry(1, 2, 2, 64, 64)),
    ("kv=scalar:b=3,channel_scale=fp16", PageGeometry(1, 1, 4, 32, None)),
    ("k=quaternion:s=24,r=3;v=angle:n=64", PageGeometry(1, 1, 3, 32, 32)),
    ("kv=polar:b=4.2.2", PageGeometry(1, 1, 2, 32, 32, "fp32")),
    ("k=minifloat:element=e4m3;v=minifloat:element=e2m1,scales=e4m3", PageGeometry(2, 2, 3, 16, 16)),
)
"""Pages with every codec and every dtype."""


def make_row(codec: PageCodec) -> bytes:
    """Return the row of a page of random values."""
    geometry, source, row = codec.geometry, torch.Generator().manual_seed(0), bytearray(codec.nbytes)
    shape = (1, geometry.layers, geometry.heads, geometry.tokens)
    samples = [torch.randn(*shape, dim, generator=source) for dim in geometry.dims.values()]
    values = [(x * 40 + 128).clamp(0, 255).to(torch.uint8) if geometry.dtype == "u8" else x.to(geometry.torch_dtype) for x in samples]
    (refused,) = codec.encode_into(PageBuffer(geometry, *values), [0], [row], keys=[b"a key"])
    assert refused is None, refused
    return bytes(row)


class RowOracle:
    """Oracle that checks how codecs decode rows, and compares them with the second decoder."""

    def __init__(self) -> None:
        codecs = [PageCodec(recipe, geometry, namespace=NAMESPACE) for recipe, geometry in PAGES]
        self._codecs = {codec.layout.description: codec for codec in codecs}
        self.rows = [make_row(codec) for codec in codecs]

    def mutate(self, data: bytes, vocabulary: Vocabulary, source: random.Random, max_bytes: int) -> bytes:
        """Return a mutated row. Usually, its length and checksum match its new contents."""
        if len(data) < FRAME_BYTES or source.random() < 0.05:
            return mutate_bytes(data, source, max_bytes)
        size = min(struct.unpack_from("<I", data, 96)[0], len(data) - FRAME_BYTES)
        description, begin = data[FRAME_BYTES : FRAME_BYTES + size], FRAME_BYTES + size + -size % 64
        streams, frame, kind = data[begin:], data[:FRAME_BYTES], source.randrange(8)
        if kind == 0:
            frame = mutate_bytes(frame, source)[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0")
        elif kind == 1:
            description = mutate_header(description, vocabulary, source)
        elif kind == 2:
            streams = mutate_bytes(streams, source, max_bytes)
        else:
            streams = mutate_numbers(streams, source.choice(("U8", "U16", "F16", "F32")), source)
        padded = description + bytes(-len(description) % 64)
        row = bytearray((frame + padded + streams)[:max_bytes])
        row += bytes(-len(row) % 64)
        if kind != 0:
            struct.pack_into("<Q", row, 16, len(row))
            struct.pack_into("<I", row, 96, len(description))
        codec = self._codecs.get(description)
        if codec is not None and len(row) == codec.nbytes and source.random() < 0.9:
            for first, last in codec.layout.pads:
                row[first:last] = bytes(last - first)
        if source.random() < 0.95:
            write_checksum(memoryview(row))
        return bytes(row)

    def check(self, data: bytes) -> bool:
        """Return True if a row is accepted. A refused row must not cause any writes, and no row may crash a codec."""
        codec = self._described_codec(data)
        pages, values = _empty(codec)
        (refused,) = codec.decode_into([data], pages, [0], check_values=True)
        if refused is not None:
            assert not any(x.view(torch.uint8).any() for x in values), f"values were written, and then: {refused}"
        codec.decode_into([data], pages, [0])
        return refused is None

    def compare(self, data: bytes) -> None:
        """Check that other readers accept the same rows as a codec created from their description.

        They must decode the same values within the codec's tolerance.
        """
        codec = self._described_codec(data)
        pages, values = _empty(codec)
        (refused,) = codec.decode_into([data], pages, [0], check_values=True)
        read, rule = None, ""
        try:
            read = decoder.read_row(data)
        except decoder.Refused as refusal:
            rule = str(refusal)
        check_readers(data, ".row", (), read and read.page, rule)
        if read is None:
            assert refused is not None, "the second decoder refuses a row that the library accepts"
            return
        size = int.from_bytes(data[96:100], "little")
        if read.namespace != NAMESPACE or data[FRAME_BYTES : FRAME_BYTES + size] != codec.layout.description:
            assert refused is not None, "a row of a different page was accepted"
            return
        assert refused is None, f"the second decoder accepts a row that the library refuses: {refused}"
        sides = [side for layer in read.page.layers for side in layer.values() if side]
        expected = torch.tensor([float(value) for side in sides for value in side.values], dtype=torch.float64)
        tolerances = torch.tensor([float(value) for side in sides for value in side.tolerances], dtype=torch.float64)
        opaque = sides[0].codec.id == "opaque"
        actual = torch.cat([
            (x.view(torch.uint8) if opaque else x)[0, layer].flatten().to(torch.float64)
            for layer in range(codec.geometry.layers)
            for x in values
        ])  # fmt: skip
        spread = 0.0 if opaque else {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-23}.get(codec.geometry.dtype, 2**-3)
        kept = expected.isfinite() & (expected.abs() < torch.finfo(torch.float16).max) & actual.isfinite()
        error = (actual - expected).abs() - tolerances - spread * expected.abs() - (0 if opaque else 2**-16)
        assert not (error[kept] > 0).any(), f"off by {error[kept].max()}"

    def _described_codec(self, data: bytes) -> PageCodec:
        """Return the page codec that a row describes, or any codec if the description is invalid."""
        size = int.from_bytes(data[96:100], "little")
        description = data[FRAME_BYTES : FRAME_BYTES + size] if data[: len(MAGIC)] == MAGIC else b""
        return self._codecs.get(description, next(iter(self._codecs.values())))


def _empty(codec: PageCodec) -> tuple[PageBuffer, list[torch.Tensor]]:
    geometry = codec.geometry
    shape = (1, geometry.layers, geometry.heads, geometry.tokens)
    values = [torch.zeros(*shape, dim).to(geometry.torch_dtype) for dim in geometry.dims.values()]
    return PageBuffer(geometry, *values), values
