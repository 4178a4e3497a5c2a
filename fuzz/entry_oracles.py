"""Checks of the reader of store entries, which another process may have written. Imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgpack
import torch
import xxhash

import kvpack
from fuzz.byte_mutator import mutate_numbers
from fuzz.file_mutator import mutate_file, repair, split_file
from kvpack.file import container
from kvpack.formats.errors import KvpackError
from kvpack.store.entries import FEATURE, EntryReader, to_pieces
from kvpack.store.keys import KEY_BYTES, chunk_links

if TYPE_CHECKING:
    import random

    from fuzz.file_mutator import Vocabulary
    from kvpack.cache.cache import Cache
    from support.parts import Parts

CHUNK = 16
RECIPES = ("kv=group:b=4,g=16", "k=octahedral:b=2;v=raw", "kv=scalar:b=2,channel_scale=fp16")
MODEL = {"name": "model"}
_DIGEST = slice(2 * KEY_BYTES, 2 * KEY_BYTES + 16)


def make_entries(recipe: str, chunks: int = 2) -> list[bytes]:
    """Return the store entries of a chain of ``chunks`` chunks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, chunks * CHUNK, 16, generator=generator)
    cache = kvpack.pack([(x, x)], recipe, model=MODEL)
    ids = b"".join(number.to_bytes(4, "little") for number in range(chunks * CHUNK))
    return [
        b"".join(to_pieces(cache[:, number * CHUNK : (number + 1) * CHUNK], key, parent, part, inputs))
        for number, (key, parent, part, inputs) in enumerate(chunk_links(bytes(KEY_BYTES), ids, CHUNK, [b"", *[b"image"] * (chunks - 1)]))
    ]


def mutate_entry(data: bytes, vocabulary: Vocabulary, source: random.Random, max_bytes: int) -> bytes:
    """Return a mutated entry. Usually, the digest in its header is repaired to match the payload."""
    if source.random() < 0.1:
        front = 8 + int.from_bytes(data[:8], "little")
        return data[:front] + mutate_numbers(data[front:], "U8", source)
    mutated = mutate_file(data, vocabulary, source, max_bytes)
    parts = split_file(mutated)
    if parts is None or source.random() < 0.1:
        return mutated
    ignorable = parts.header.get("ignorable")
    named = ignorable.get(FEATURE) if isinstance(ignorable, dict) else None
    if not isinstance(named, bytes) or len(named) < _DIGEST.stop:
        return mutated
    parts.header["ignorable"][FEATURE] = named[: _DIGEST.start] + _payload_digest(mutated, parts) + named[_DIGEST.stop :]
    return repair(parts) or mutated


class EntryOracle:
    """Oracle that compares a reader that knows the shapes of entries with one that parses every entry in full."""

    def __init__(self) -> None:
        self.chains = {recipe: make_entries(recipe) for recipe in RECIPES}
        self._knowing = {recipe: self._reader(recipe) for recipe in RECIPES}
        for recipe, chain in self.chains.items():
            assert len(_read(self._knowing[recipe], chain, _keys(chain)) or []) == len(chain)

    def check(self, data: bytes) -> bool:
        """Return True if the parsing reader accepts the entry. Fails if the other reader returns a different cache."""
        try:
            header = container.open_bytes(data).header
            recipe, number, key = header.recipe, header.start // CHUNK, header.ignorable.get(FEATURE, b"")[:KEY_BYTES]
        except KvpackError:
            recipe, number, key = RECIPES[0], 0, bytes(KEY_BYTES)
        if recipe not in RECIPES or number > 1:
            recipe, number = RECIPES[0], 0
        before = self.chains[recipe][:number]
        chain, keys = [*before, data], [*_keys(before), key]
        parsed, quick = _read(self._reader(recipe), chain, keys), _read(self._knowing[recipe], chain, keys)
        accepted = parsed is not None
        if not accepted and quick is not None and (other := _repair_digests(data)) is not None:
            # The digests of tensors may be wrong, because readers may check only the digest of the payload (spec/store.md, Entries).
            parsed = _read(self._reader(recipe), [*before, other], keys)
        assert (parsed is None) == (quick is None), f"parsed: {parsed}; by its shape: {quick}"
        if parsed is not None and quick is not None:
            _assert_same(parsed[-1], quick[-1])
        return accepted

    def _reader(self, recipe: str) -> EntryReader:
        return EntryReader(MODEL, recipe, CHUNK, check_values=False)


def _payload_digest(data: bytes, parts: Parts) -> bytes:
    start, header = 8 + int.from_bytes(data[:8], "little"), len(msgpack.packb(parts.header))
    return xxhash.xxh3_128_digest(data[start + header + -header % 64 :])


def _repair_digests(data: bytes) -> bytes | None:
    """Return the entry with correct digests of its tensors, or None if the digest of its payload is wrong."""
    parts = split_file(data)
    if parts is None or parts.header["ignorable"][FEATURE][_DIGEST] != _payload_digest(data, parts):
        return None
    return repair(parts)


def _keys(chain: list[bytes]) -> list[bytes]:
    return [container.open_bytes(data).header.ignorable[FEATURE][:KEY_BYTES] for data in chain]


def _read(reader: EntryReader, chain: list[bytes], keys: list[bytes]) -> list[Cache] | None:
    try:
        return list(reader.read([bytearray(data) for data in chain], keys))
    except KvpackError:
        return None


def _assert_same(one: Cache, other: Cache) -> None:
    assert (one.start, one.recipe, dict(one.model), len(one)) == (other.start, other.recipe, dict(other.model), len(other))
    for layer, like in zip(one, other, strict=True):
        assert layer.sides.keys() == like.sides.keys()
        for name, side in layer.sides.items():
            # An entry may have several runs, which no seed has.
            assert len(side.runs) == len(like.sides[name].runs)
            for page, same in zip(side.runs, like.sides[name].runs, strict=True):
                assert page.tokens == same.tokens
                for stream, tensor in page.streams.items():
                    assert tensor.dtype == same.streams[stream].dtype
                    assert tensor.shape == same.streams[stream].shape
                    same_bytes = same.streams[stream].contiguous().view(torch.uint8)
                    assert tensor.contiguous().view(torch.uint8).equal(same_bytes), f"{name}.{stream}"
