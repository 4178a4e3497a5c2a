"""Conformance vectors of balanced keys: bases with balanced frames, files that use them, and malformed bases."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import TYPE_CHECKING, Any

from kvpack.formats.balanced import FrameMap
from spec.generate.invalid_vectors import RAW, add, add_header
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import change_file, edit, file_of, keys_file, move_to_end, overwrite, random_side
from support.klt_bases import balanced_basis
from support.strategies import create, with_sidecar

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.base import Codec
    from support.file_parts import Parts

ALONE, WITH_ROWS = "valid/basis-balanced.kvpack", "valid/basis-balanced-and-rows.kvpack"
ROWS = "valid/basis-two-layers.kvpack"
"""A basis without balanced frames."""

STATE = struct.Struct("<HBB8Q28s")
"""Layout of the record of a state: container.md, Layer states."""
DTYPES = ("U8", "U16", "F16", "BF16", "F32")
BYTES = (1, 2, 2, 2, 4)


def alone() -> bytes:
    """Return a basis with balanced frames for two of three layers with two heads each, and without rows."""
    return balanced_basis({0: (2, 6), 2: (2, 5)}, 3, "fp32")


def with_rows() -> bytes:
    """Return a basis with balanced frames in binary16, and with rows for the same keys and for values."""
    return balanced_basis({0: (2, 4)}, 1, "fp16", {(0, "k"): (2, 4), (0, "v"): (1, 4)})


def keys(codec_id: str, dim: int, *, layer: int = 0, frame: str = "balanced", of: Callable[[], bytes] = alone, **words: str) -> Codec:
    """Return a codec for keys that uses a basis's frames of one layer."""
    codec = create(codec_id, dim, "k", frame="balanced", **words)
    return with_sidecar(codec, FrameMap(dim, hashlib.sha256(of()).digest(), layer, frame))


def add_all() -> None:
    add_decoded()
    add_refused()
    add_refused_bases()


def add_decoded() -> None:
    add_valid("basis-balanced", "balanced frames in binary32 for two layers, with means and RoPE, without rows", alone, "basis-13")
    add_valid("basis-balanced-and-rows", "balanced frames in binary16, with rows", with_rows, "basis-3")
    every = {"channel_scale": "fp16", "qjl": "fp16", "raw_first": "1", "raw_dtype": "fp16"}
    for name, shows, codec, more in (
        ("balanced", "keys in balanced frames, with a codec without a rotation", keys("scalar", 6, b="2", rotation="none"), {}),
        (
            "balanced-rotated",
            "keys of two sequences in centered frames, with a rotated codec",
            keys("octahedral", 4, frame="centered", of=with_rows, b="3"),
            {"batch": 2},
        ),
        (
            "balanced-runs",
            "three runs of codec group, in the frames of layer 2",
            keys("group", 5, layer=2, b="3", g="4"),
            {"runs": (4, 8, 3)},
        ),
        (
            "balanced-order",
            "a channel order per run",
            keys("group", 6, b="3", g="4", block_rotation="2", channel_order="u8"),
            {"runs": (4, 3)},
        ),
        (
            "balanced-others",
            "balanced with other side-cars and raw tokens",
            keys("scalar", 4, of=with_rows, b="3", **every),
            {"runs": (3, 2)},
        ),
    ):
        basis = WITH_ROWS if codec.dim == 4 else ALONE
        add_valid(f"side-car-{name}", shows, lambda c=codec, m=more: keys_file(c, **m), "side-cars-10", "front-12", basis=basis)
    trellis = keys("trellis", 4, of=with_rows, b="4", states="256")
    values = create("scalar", 6, "v", b="2", rotation="none")
    shows = "keys with codec trellis, and values with another codec"
    add_valid(
        "side-car-balanced-trellis", shows, lambda: file_of((random_side(trellis), random_side(values))), "side-cars-10", basis=WITH_ROWS
    )


def add_refused() -> None:
    codec = keys("scalar", 6, b="2", rotation="none")
    digest = hashlib.sha256(alone()).digest()
    whole = {"basis": digest, "layer": 0, "frame": "balanced"}
    for name, value, shows in (
        ("string", "basis", "balanced is a string"),
        ("without-a-frame", {"basis": digest, "layer": 0}, "balanced without one of its keys"),
        ("digest-short", {**whole, "basis": digest[:31]}, "a digest with 31 bytes"),
        ("digest-string", {**whole, "basis": "0" * 32}, "a digest that is a string"),
        ("layer-4096", {**whole, "layer": 4096}, "layer 4096"),
        ("layer-string", {**whole, "layer": "0"}, "a layer that is a string"),
        ("frame-other", {**whole, "frame": "whole"}, "a frame that does not exist"),
        ("frame-integer", {**whole, "frame": 0}, "a frame that is an integer"),
        ("with-a-side", {**whole, "side": "k"}, "balanced has a fourth key"),
    ):
        add_header(f"side-car-balanced-{name}", "side-cars-3", codec, "codecs.0.balanced", value, shows)
    for name, rule, shows, change in (
        ("side-car-balanced-order", "side-cars-3", "the keys of balanced in the wrong order", move_to_end("codecs.0.balanced", "basis")),
        ("balanced-not-required", "container-63", "balanced keys without the feature that they require", edit("required", [])),
    ):
        add(name, rule, "InvalidHeader", shows, lambda c=change: keys_file(codec, c))
    scaled = keys("scalar", 6, b="2", rotation="none", channel_scale="fp16")
    last = move_to_end("codecs.0", "balanced")
    add("side-car-balanced-last", "side-cars-2", "InvalidHeader", "balanced is the last key", lambda: keys_file(scaled, last))
    add_header("balanced-required-of-none", "container-63", RAW, "required", ["balanced"], "the required feature without balanced keys")
    add_header("side-car-balanced-of-raw", "side-cars-1", RAW, "codecs.0.balanced", whole, "balanced frames for codec raw")
    add_bases_refused()


def add_bases_refused() -> None:
    codec = keys("scalar", 6, b="2", rotation="none")
    other = keys("scalar", 6, of=lambda: b"", b="2", rotation="none")
    for name, rule, shows, of, basis, more in (
        ("not-given", "side-cars-16", "no basis is given to the reader", codec, "", {}),
        ("of-another-digest", "side-cars-16", "a basis other than the given one", other, ALONE, {}),
        (
            "without-frames",
            "side-cars-17",
            "a layer without balanced frames",
            keys("scalar", 6, layer=1, b="2", rotation="none"),
            ALONE,
            {},
        ),
        (
            "without-the-layer",
            "side-cars-17",
            "a layer that is not in the basis",
            keys("scalar", 6, layer=9, b="2", rotation="none"),
            ALONE,
            {},
        ),
        (
            "of-another-dim",
            "side-cars-18",
            "a head dim that differs from that of the frames",
            keys("scalar", 5, b="2", rotation="none"),
            ALONE,
            {},
        ),
        ("of-other-heads", "side-cars-18", "four heads, but frames for two heads", codec, ALONE, {"heads": 4}),
        ("of-one-head", "side-cars-18", "one head, but frames for two heads", codec, ALONE, {"heads": 1}),
    ):
        error = "MissingBasis" if rule == "side-cars-16" else "InvalidHeader"
        add(f"balanced-basis-{name}", rule, error, shows, lambda c=of, m=more: keys_file(c, **m), basis=basis)


def add_refused_bases() -> None:
    def refused(name: str, rule: str, shows: str, *changes: Callable[[Parts], Any], of: Callable[[], bytes] = alone) -> None:
        error = "InvalidPayload" if rule == "basis-23" else "InvalidHeader"
        add(f"basis-balanced-{name}", rule, error, shows, lambda: change_file(of(), *changes))

    for name, shows, change in (
        ("of-integers", "balanced frames in 16-bit integers", state("k.balanced", dtype="U16")),
        ("of-bfloat16", "balanced frames in bfloat16", state("k.balanced", dtype="BF16")),
        ("not-square", "balanced frames with 5 rows for 6 channels", state("k.balanced", shape=(1, 2, 5, 6))),
        ("of-three-sizes", "balanced frames without a head axis", state("k.balanced", shape=(1, 6, 6))),
        ("of-one-size", "balanced frames with a one-dimensional shape", state("k.balanced", shape=(1,))),
        ("queries-of-one-head", "second moments of one of two heads", state("k.queries", shape=(1, 1, 6, 6))),
        ("queries-in-binary16", "second moments in binary16", state("k.queries", dtype="F16")),
        ("mean-of-five-channels", "a mean with 5 channels instead of 6", state("k.mean", shape=(1, 2, 5))),
        ("mean-in-binary16", "a mean in binary16", state("k.mean", dtype="F16")),
        ("of-no-channel", "centered frames with another dim than the balanced ones", state("k.centered", shape=(1, 2, 1, 1))),
        ("centered-in-integers", "centered frames in bytes", state("k.centered", dtype="U8")),
    ):
        refused(name, "basis-22", shows, change)
    refused(
        "of-another-dim",
        "basis-22",
        "balanced frames of 3 channels, with rows of 4 channels",
        state("k.balanced", shape=(1, 2, 3, 3)),
        of=with_rows,
    )
    refused(
        "of-other-heads",
        "basis-22",
        "balanced frames of 1 head, with rows of 2 heads",
        state("k.balanced", shape=(1, 1, 4, 4)),
        of=with_rows,
    )
    names = state("k.balanced", name="k.balancee"), state("k.centered", name="k.centeree")
    refused("missing", "basis-21", "a mean and second moments without frames", *names)
    refused("turned-too-far", "basis-13", "RoPE with 4 pairs for 6 balanced channels", state("rope.halves", shape=(1, 4)))
    for name, at, value in (
        ("k.balanced", 16, "0000c07f"),
        ("k.centered", 4, "000080ff"),
        ("k.queries", 0, "0000807f"),
        ("k.mean", 44, "000080ff"),
    ):
        shows = f"a value of {name} is not finite"
        refused(f"not-finite-{name.partition('.')[2]}", "basis-23", shows, overwrite(f"0.state.{name}", at, value))
    refused(
        "half-not-finite",
        "basis-23",
        "an infinity in a balanced frame in binary16",
        overwrite("0.state.k.balanced", 2, "007c"),
        of=with_rows,
    )


def state(kind: str, *, name: str | None = None, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> Callable[[Parts], None]:
    """Return a change of the state ``kind`` of layer 0 to another name, dtype or shape, with matching data."""

    def apply(parts: Parts) -> None:
        records = parts.header["ignorable"]["layer-state"]
        rows = [list(STATE.unpack_from(records, at)) for at in range(0, len(records), STATE.size)]
        row = next(row for row in rows if row[0] == 0 and row[-1].rstrip(b"\0").decode() == kind)
        sizes = row[3 : 3 + row[2]] if shape is None else list(shape)
        row[1] = row[1] if dtype is None else DTYPES.index(dtype)
        row[2:] = [len(sizes), *sizes, *[0] * (8 - len(sizes)), row[-1] if name is None else name.encode()]
        parts.header["ignorable"]["layer-state"] = b"".join(STATE.pack(*row) for row in rows)
        number = parts.tensor(f"0.state.{kind}")
        parts.header["tensors"][number][:3] = [f"0.state.{name or kind}", DTYPES[row[1]], sizes]
        size = math.prod(sizes) * BYTES[row[1]]
        parts.tensors[number] = parts.tensors[number][:size].ljust(size, b"\0")

    return apply
