"""Vectors of store entries in spec/store-vectors. ``python -m spec.generate.store_vectors`` writes missing ones."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import kvpack
from spec.generate.expected import digest, read_manifest, write_manifest
from support.caches import random_pairs
from support.store_caches import entry_of

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).resolve().parents[2] / "spec" / "store-vectors"
MANIFEST = FOLDER / "manifest.json"
IDENTITY = {
    "model": "model",
    "recipe": "k=group:axis=channel,b=2,g=4;v=group:b=2,g=4",
    "weights": "w1",
    "dtype": "bfloat16",
    "tenant": "tenant ü",
}
IDS = list(range(100, 109))
CHUNK = 4
ENCRYPTION_KEYS = {f"k{size}": bytes(range(size)) for size in (16, 24, 32)}


@dataclass(frozen=True)
class Vector:
    """An entry vector: the entry, its requested key, the reader's encryption keys, and the expected result.

    ``read`` is the number of the chunk that is read, or None if the entry counts as absent. ``damaged`` is None if readers may decide.
    """

    shows: str
    rules: tuple[str, ...]
    make: Callable[[], bytes]
    chunk: int = 0
    keys: tuple[str, ...] = tuple(ENCRYPTION_KEYS)
    read: int | None = None
    damaged: bool | None = None
    tenant: str = field(default=IDENTITY["tenant"])


@cache
def chunks() -> list[bytes]:
    """Return the entries of two chunks as kvpack writes them."""
    made = kvpack.pack(random_pairs(1, len(IDS), dims=(8, 8), seed=0), IDENTITY["recipe"])
    with tempfile.TemporaryDirectory() as folder:
        store = kvpack.Store(folder, kvpack.Identity(**IDENTITY), chunk=CHUNK)
        store.save(IDS, made)
        return [Path(entry_of(store, IDS, number)).read_bytes() for number in range(2)]


@cache
def entry_keys() -> list[bytes]:
    return kvpack.Store("memory:", kvpack.Identity(**IDENTITY), chunk=CHUNK).keys(IDS)


def prefixed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def encrypted(name: str, chunk: int = 0, tenant: str = IDENTITY["tenant"]) -> bytes:
    """Return the encrypted entry of a chunk (store.md), with a nonce that is the same in every run."""
    head = b"kvpack-encrypted 1\n" + bytes([len(name)]) + name.encode()
    nonce = digest(name.encode())[:12].encode()
    associated = prefixed(head) + prefixed(entry_keys()[chunk]) + prefixed(tenant.encode())
    return sealed(head + nonce + AESGCM(ENCRYPTION_KEYS[name]).encrypt(nonce, chunks()[chunk], associated))


def sealed(data: bytes) -> bytes:
    return data + xxhash.xxh3_128_digest(data)


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def vectors() -> dict[str, Vector]:
    """Return all vectors by name."""
    clear, absent = (), ("store-5",)
    k32 = encrypted("k32")
    return {
        "chunk-0": Vector("the first chunk", ("store-2", "store-3"), lambda: chunks()[0], keys=clear, read=0),
        "chunk-1": Vector("a chunk with another parent", ("store-2", "store-3"), lambda: chunks()[1], 1, clear, 1),
        "chunk-of-another-key": Vector("the entry of another chunk", ("store-2",), lambda: chunks()[0], 1, clear),
        "chunk-damaged": Vector("a flipped bit", ("store-3",), lambda: flipped(chunks()[0], -1), keys=clear, damaged=True),
        "encrypted-16": Vector("an encryption key of 16 bytes", absent, lambda: encrypted("k16"), read=0),
        "encrypted-24": Vector("an encryption key of 24 bytes", absent, lambda: encrypted("k24"), read=0),
        "encrypted-32": Vector("an encryption key of 32 bytes", absent, lambda: k32, read=0),
        "encrypted-by-another-key": Vector(
            "an encryption key that the reader does not have", absent, lambda: k32, keys=("k16", "k24"), damaged=False
        ),
        "encrypted-without-keys": Vector("a reader without keys", absent, lambda: k32, keys=clear, damaged=False),
        "encrypted-for-another-tenant": Vector("an entry of another tenant", absent, lambda: k32, tenant="tenant", damaged=False),
        "encrypted-of-another-chunk": Vector("the entry of another chunk", absent, lambda: k32, 1, damaged=False),
        "encrypted-with-another-tag": Vector("a wrong authentication tag", absent, lambda: sealed(flipped(k32[:-16], -1)), damaged=False),
        "encrypted-damaged": Vector("a flipped bit", ("store-31",), lambda: flipped(k32, 1000), damaged=True),
        "encrypted-cut": Vector("an entry that ends within the tag", ("store-5",), lambda: sealed(k32[:50]), damaged=True),
        "encrypted-by-version-2": Vector(
            "a later version of the encryption", absent, lambda: k32.replace(b"encrypted 1\n", b"encrypted 2\n", 1), damaged=False
        ),
        "clear-among-encrypted": Vector("an unencrypted entry, for a reader with keys", absent, lambda: chunks()[0], damaged=True),
    }


def described(vector: Vector) -> dict[str, Any]:
    """Return the fields of a vector in the manifest, without those computed from its bytes."""
    line: dict[str, Any] = {"shows": vector.shows, "rules": list(vector.rules), "key": entry_keys()[vector.chunk].hex()}
    line |= {"tenant": vector.tenant, "encryption_keys": {name: ENCRYPTION_KEYS[name].hex() for name in vector.keys}}
    if vector.read is None:
        return line | ({} if vector.damaged is None else {"damaged": vector.damaged})
    number = vector.read
    parent = {"parent": entry_keys()[number - 1].hex()} if number else {}
    return line | {
        "file": f"chunk-{number}.entry",
        "identity": IDENTITY,
        **parent,
        "start": CHUNK * number,
        "chunk_ids": IDS[CHUNK * number : CHUNK * number + CHUNK],
    }


def manifest() -> dict[str, dict[str, Any]]:
    """Return the manifest line of every vector, by file."""
    return read_manifest(MANIFEST) if MANIFEST.exists() else {}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    lines = manifest()
    for name, vector in vectors().items():
        if f"{name}.entry" not in lines:
            data = vector.make()
            (FOLDER / f"{name}.entry").write_bytes(data)
            lines[f"{name}.entry"] = described(vector) | {"sha256": digest(data)}
    write_manifest(MANIFEST, lines)


if __name__ == "__main__":
    main()
