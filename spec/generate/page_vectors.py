"""Conformance vectors of rows in spec/row-vectors. ``python -m spec.generate.page_vectors`` writes missing ones."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import torch

from kvpack.coding.bases import Basis
from kvpack.coding.recipes import Recipe
from kvpack.pages import PageBuffer, PageCodec, PageGeometry
from spec.decoder.codecs import CODECS
from spec.decoder.header import take_header
from spec.decoder.row import checksum
from spec.decoder.row import opaque as opaque_codec
from spec.generate import core_reader
from spec.generate.expected import digest, read_manifest, sides_of, write_manifest, written_values
from support.second_decoder import decoder

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).resolve().parents[2] / "spec" / "row-vectors"
MANIFEST = FOLDER / "manifest.json"
BASIS = "../vectors/valid/basis-frames-256-symbols.kvpack"
KEY, NAMESPACE = b"an engine's key", bytes(range(32))
SMALL = PageGeometry(layers=2, heads=1, tokens=3, dim_k=8, dim_v=4)


@dataclass(frozen=True)
class Vector:
    """A row vector. ``shows`` describes its purpose. ``rule`` is the rule that it breaks, or None if readers decode it."""

    shows: str
    rule: str | None
    make: Callable[[], bytes]
    basis: str = ""
    """Name of the file with the basis that a reader receives, in the folder of rows."""


def row_of(recipe: str | Recipe, geometry: PageGeometry) -> bytes:
    """Return the row of a page of random values."""
    source = torch.Generator().manual_seed(0)

    def values(dim: int) -> torch.Tensor:
        shape = (1, geometry.layers, geometry.heads, geometry.tokens, dim)
        if geometry.dtype == "u8":
            return torch.randint(256, shape, dtype=torch.uint8, generator=source)
        return torch.randn(shape, generator=source).to(geometry.torch_dtype)

    # The vectors are from before recipes had a canonical text.
    codec = PageCodec(Recipe.from_recorded(recipe) if isinstance(recipe, str) else recipe, geometry, namespace=NAMESPACE)
    row = bytearray(codec.nbytes)
    pages = PageBuffer(geometry, *(values(dim) for dim in geometry.dims.values()))
    (refused,) = codec.encode_into(pages, [0], [row], keys=[KEY])
    assert refused is None, refused
    return bytes(row)


def sealed(row: bytes) -> bytes:
    """Return the row with a correct checksum."""
    zeroed = row[:24] + bytes(8) + row[32:]
    return row[:24] + checksum(zeroed).to_bytes(8, "little") + row[32:]


def changed(at: int, value: bytes) -> Callable[[], bytes]:
    """Return a function that creates a small row with other bytes and a matching checksum."""

    def make() -> bytes:
        row = row_of("raw", SMALL)
        return sealed(row[:at] + value + row[at + len(value) :])

    return make


def described(change: Callable[[dict[str, Any]], Any], recipe: str = "raw", geometry: PageGeometry = SMALL) -> Callable[[], bytes]:
    """Return a function that creates a small row with a changed description. The length is adjusted, so that nothing else is wrong."""

    def make() -> bytes:
        row = row_of(recipe, geometry)
        (size,) = struct.unpack_from("<I", row, 96)
        header = msgpack.unpackb(row[128 : 128 + size])
        change(header)
        packed = msgpack.packb(header)
        front = row[:96] + struct.pack("<I", len(packed)) + bytes(28) + packed
        streams = row[128 + size + -(128 + size) % 64 :]
        with contextlib.suppress(decoder.Refused):
            page = take_header(header, {**CODECS, "opaque": opaque_codec}, without_tensors=True)
            tensors = [tensor for layer in page.layers for one in layer.values() if one for tensor in one.tensors("")]
            streams = bytes(sum(-(-tensor.bytes // 64) * 64 for tensor in tensors))
        body = front + bytes(-len(front) % 64) + streams
        return sealed(body[:16] + struct.pack("<Q", len(body)) + body[24:])

    return make


def side(number: int, name: str, **values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header["layers"][number][name].update(values)


def damaged() -> bytes:
    row = bytearray(row_of("raw", SMALL))
    row[-50] ^= 4
    return bytes(row)


def vectors() -> dict[str, Vector]:
    """Return all vectors by name."""
    geometry = PageGeometry
    found = {
        "raw": Vector("two layers of uncompressed keys and values", None, lambda: row_of("raw", SMALL)),
        "two-codecs": Vector("layers with different codecs", None, lambda: row_of("kv=group:b=4,g=4;layers=0:k=raw", SMALL)),
        "token-groups": Vector(
            "a codec with token groups, the last of which is partial",
            None,
            lambda: row_of("kv=group:b=2,g=4,axis=token", geometry(1, 2, 6, 8, 8)),
        ),
        "token-scales-per-head": Vector(
            "a token scale for each of two heads, with the required feature",
            None,
            lambda: row_of("kv=group:b=2,g=4,axis=token,token_scale=fp16-per-head", geometry(1, 2, 6, 8, 8)),
        ),
        "octahedral": Vector("a rotated codec, fp16", None, lambda: row_of("octopus-3", geometry(1, 1, 2, 64, 64, "fp16"))),
        "latents": Vector(
            "MLA: latents in codec group, and an uncompressed rotary part",
            None,
            lambda: row_of("k=group:b=4,g=16,axis=channel;v=raw", geometry(2, 1, 2, 48, 8)),
        ),
        "one-side": Vector("pages with one side", None, lambda: row_of("kv=scalar:b=3", geometry(1, 1, 2, 16, None))),
        "fp8-opaque": Vector("fp8 as bytes", None, lambda: row_of("raw", geometry(1, 1, 2, 8, 8, "fp8_e4m3"))),
        "fp8-encoded": Vector(
            "fp8 encoded with another codec", None, lambda: row_of("kv=group:b=4,g=4", geometry(1, 1, 2, 8, 8, "fp8_e5m2"))
        ),
        "bytes": Vector("byte slots with one side", None, lambda: row_of("raw", geometry(1, 1, 2, 656, None, "u8"))),
        "binary32": Vector("fp32", None, lambda: row_of("raw", geometry(1, 1, 1, 3, 5, "fp32"))),
        "longer-memory": Vector("a row followed by other bytes in memory", None, lambda: row_of("raw", SMALL) + b"\xff" * 70),
        "by-a-basis": Vector("keys encoded with the rows of a basis", None, by_basis, BASIS),
        "damaged": Vector("one flipped bit", "row-4", damaged),
        "another-beginning": Vector("other first bytes", "row-1", changed(0, b"K")),
        "another-version": Vector("a row of version 2", "row-1", changed(11, b"2")),
        "beginning-not-zero": Vector("a nonzero unused byte among the first bytes", "row-1", changed(14, b"\1")),
        "frame-alone": Vector("the row ends within the frame", "row-1", lambda: row_of("raw", SMALL)[:127]),
        "length-unaligned": Vector("a length that is not a multiple of 64", "row-2", lambda: unaligned()),
        "length-of-zero": Vector("a length shorter than the frame", "row-2", changed(16, bytes(8))),
        "truncated": Vector("the last byte is missing", "row-2", lambda: row_of("raw", SMALL)[:-1]),
        "longer": Vector("64 bytes more than the streams need", "row-2", lambda: resized(64)),
        "shorter": Vector("64 bytes less than the streams need", "row-2", lambda: resized(-64)),
        "description-beyond-the-row": Vector("a description longer than the row", "row-3", changed(96, b"\xff\xff\xff\x7f")),
        "frame-not-zero": Vector("a nonzero unused byte in the frame", "row-3", changed(120, b"\1")),
        "stream-padding-not-zero": Vector("a nonzero byte after a stream", "row-3", lambda: ended(b"\1")),
        "description-padding-not-zero": Vector("a nonzero byte after the description", "row-3", padded),
        "with-tensors": Vector("a description that lists tensors", "row-3", described(lambda header: header.update(tensors=[[]]))),
        "with-a-feature": Vector(
            "a description with a required feature", "row-3", described(lambda header: header.update(required=["layer-state"]))
        ),
        "no-layers": Vector("a description without layers", "row-3", described(lambda header: header.update(layers=[]))),
        "with-a-start": Vector("a description with a start", "row-3", described(lambda header: header.update(start=1))),
        "with-a-model": Vector("a description with a model", "row-3", described(lambda header: header.update(model={"a": "b"}))),
        "without-a-dtype": Vector("a description without page-dtype", "row-3", described(lambda header: header.update(ignorable={}))),
        "with-another-entry": Vector(
            "an ignorable feature besides page-dtype", "row-3", described(lambda header: header["ignorable"].update({"x": b""}))
        ),
        "of-another-dtype": Vector(
            "a dtype that does not exist", "row-3", described(lambda header: header.update(ignorable={"page-dtype": b"fp4"}))
        ),
        "without-k": Vector("a layer without k", "row-3", described(lambda header: header["layers"][0].update(k=None))),
        "without-some-v": Vector("one of two layers without v", "row-3", described(lambda header: header["layers"][0].update(v=None))),
        "without-any-k": Vector(
            "layers with only v", "row-3", described(lambda header: [layer.update(k=None) for layer in header["layers"]])
        ),
        "of-other-tokens": Vector(
            "one layer with two tokens, and one with three",
            "row-3",
            described(lambda header: [side(1, name, runs=[2])(header) for name in "kv"]),
        ),
        "opaque-with-more-keys": Vector("an unknown parameter of opaque", "row-8", opaque(dtype="u8")),
        "opaque-of-no-bytes": Vector("opaque with 0 bytes", "row-8", opaque(dim=0)),
        "opaque-of-1025-bytes": Vector("opaque with 1,025 bytes", "row-8", opaque(dim=1025)),
        "opaque-of-text": Vector("opaque with a string as dim", "row-8", opaque(dim="8")),
        "of-two-sequences": Vector("sides with two sequences", "row-3", described(both(batch=2))),
        "of-two-runs": Vector("sides with two runs", "row-3", described(both(runs=[1, 2]), "kv=group:b=2,g=4,axis=token")),
        "of-no-runs": Vector("sides without runs or tokens", "row-3", described(both(runs=[]))),
        "with-entries": Vector(
            "a stream with a row per entry, and no entries", "row-3", described(outliers, "kv=group:b=2,g=4,axis=channel")
        ),
        "with-a-tail": Vector("sides with a tail", "row-3", described(both(tail=1))),
        "with-a-window": Vector("sides with a window", "row-3", described(both(window=4))),
        "of-other-heads": Vector(
            "one layer with two heads, and one with one head",
            "row-3",
            described(lambda header: [side(1, name, heads=2)(header) for name in "kv"]),
        ),
        "u8-by-raw": Vector(
            "bytes stored with codec raw", "row-6", described(lambda header: header.update(ignorable={"page-dtype": b"u8"}))
        ),
    }
    return found


def by_basis() -> bytes:
    basis = Basis.from_bytes((FOLDER / BASIS).read_bytes())
    return row_of(Recipe.from_recorded(f"kv=klt:bits=4,basis={basis.digest.hex()}", basis), PageGeometry(1, 1, 3, 4, None))


def opaque(**parameters: Any) -> Callable[[], bytes]:
    """Return a function that creates a row of bytes whose codec has these ``parameters``."""
    return described(lambda header: header["codecs"][0].update(parameters), geometry=PageGeometry(1, 1, 2, 8, None, "u8"))


def both(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: [side(number, name, **values)(header) for number in range(2) for name in "kv"]


def outliers(header: dict[str, Any]) -> None:
    """Add the sidecar outliers to every codec, although neither keys nor values use it."""
    for codec in header["codecs"]:
        codec["outliers"] = {"fields": 1}
    both(entries={"outliers": 0})(header)


def unaligned() -> bytes:
    row = row_of("raw", SMALL)
    return sealed(row[:16] + struct.pack("<Q", len(row) + 4) + row[24:] + bytes(4))


def resized(by: int) -> bytes:
    """Return a row with ``by`` more bytes at its end (fewer if negative) and a matching length."""
    row = row_of("raw", SMALL)
    row = row + bytes(by) if by > 0 else row[:by]
    return sealed(row[:16] + struct.pack("<Q", len(row)) + row[24:])


def ended(last: bytes) -> bytes:
    """Return a row with other padding at its end."""
    return sealed(row_of("raw", SMALL)[: -len(last)] + last)


def padded() -> bytes:
    row = row_of("raw", SMALL)
    (size,) = struct.unpack_from("<I", row, 96)
    assert (128 + size) % 64
    return sealed(row[: 128 + size] + b"\1" + row[129 + size :])


def bases(line: dict[str, Any]) -> list[bytes]:
    """Return the basis files that a reader of the vector receives, from its line of the manifest."""
    return [(FOLDER / line["basis"]).read_bytes()] if "basis" in line else []


def manifest() -> dict[str, dict[str, Any]]:
    """Return the manifest line of every vector, by file."""
    return read_manifest(MANIFEST)


def refusal(data: bytes) -> str:
    """Return the error class with which the library refuses a row, read as a page of the small geometry."""
    codec = PageCodec("raw", SMALL, namespace=NAMESPACE)
    values = [torch.zeros(1, SMALL.layers, SMALL.heads, SMALL.tokens, dim).to(SMALL.torch_dtype) for dim in SMALL.dims.values()]
    (error,) = codec.decode_into([data], PageBuffer(SMALL, *values), [0])
    assert error is not None
    return type(error).__name__


def written(file: str, vector: Vector) -> dict[str, Any]:
    """Write a vector. Returns its manifest line."""
    data = vector.make()
    (FOLDER / file).write_bytes(data)
    line: dict[str, Any] = {"shows": vector.shows}
    if vector.rule is not None:
        return line | {"rules": [vector.rule], "rule": vector.rule, "sha256": digest(data), "profile": "core", "error": refusal(data)}
    basis = {"basis": vector.basis} if vector.basis else {}
    page = decoder.read_row(data, bases(basis)).page
    return line | {"rules": rules_of(page), "sha256": digest(data)} | basis | profile_of(page) | written_values(FOLDER, file, page)


def rules_of(page: Any) -> list[str]:
    """Return the rules that a valid row demonstrates."""
    return ["row-5"] if {side.codec.id for side in sides_of(page)} == {"opaque"} else []


def profile_of(page: Any) -> dict[str, str]:
    """Return the smallest profile whose readers decode a row, and the error class with which core readers refuse it."""
    sides = sides_of(page)
    plain = all(side.codec.id in (*core_reader.CODECS, "opaque") and not side.codec.sidecars for side in sides)
    return {"profile": "core" if plain else "full"} | ({"core": "InvalidHeader"} if page.required or not plain else {})


def main() -> None:
    lines = manifest()
    for name, vector in vectors().items():
        if f"{name}.row" not in lines:
            lines[f"{name}.row"] = written(f"{name}.row", vector)
    write_manifest(MANIFEST, lines)


if __name__ == "__main__":
    main()
