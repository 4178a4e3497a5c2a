"""Conformance vectors with rows for several sequences, heads and runs, and with sidecars that interact."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING, Any

from kvpack.formats.channel_order import ChannelOrder
from kvpack.formats.group import TOKEN_SCALE_DTYPES
from kvpack.formats.outliers import Outliers
from spec.generate.invalid_vectors import ANGLE, MINIFLOAT, MXFP8, OCTAHEDRAL, POLAR, QUATERNION, SCALAR, add
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import Parts, edit, keys_file, overwrite
from support.strategies import create, with_sidecar

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.base import Codec

EVERY = {
    "channel_scale": "fp32",
    "channel_order": "u8",
    "outliers": "3",
    "qjl": "fp16",
    "sinks": "1",
    "raw_tokens": "fp16",
}
"""Options that request all sidecars except block rotation."""


def add_all() -> None:
    add_rows()
    add_sidecars()
    add_runs()
    add_flags()


def rows(name: str, shows: str, codec: Codec, *rules: str, runs: tuple[int, ...] = (5, 4, 1), **options: Any) -> None:
    add_valid(name, shows, lambda: keys_file(codec, runs=runs, batch=2, heads=3, **options), *rules)


def add_rows() -> None:
    """Add streams with one row per sequence, head or run, in which a wrong row gives wrong values."""
    for axis in ("token", "channel"):
        for scale in TOKEN_SCALE_DTYPES:
            codec = create("group", 6, b="3", g="4", axis=axis, token_scale=scale)
            shows = f"{scale} token scales of two sequences, in three runs of groups along {axis}s"
            rules = ("front-12", *(("container-61",) if codec.scale_per_head else ()))  # type: ignore[attr-defined]
            rows(f"group-rows-of-token-scales-{axis}-{scale}", shows, codec, *rules)
        codec = create("group", 6, b="3", g="4", axis=axis, scales="u8")
        rows(f"group-rows-of-8-bit-scales-{axis}", f"a row of scale_range for each of three runs, groups along {axis}s", codec, "front-12")
    for codec in (
        create("raw", 3, dtype="bf16"),
        create("octahedral", 7, b="3", arrangement="direct", rotation="none"),
        create("quaternion", 7, s="5", r="4", rotation="none"),
        create("angle", 6, n="100", norm="log4", rotation="none"),
        create("polar", 6, b="2.3.1", rotation="none"),
        create("scalar", 7, b="2", high="3", rotation="none"),
    ):
        rule = "raw-3" if codec.id == "raw" else "front-12"
        rows(f"{codec.id}-rows", "two sequences and three heads", codec, rule, runs=(3,), tail=2, tail_dtype="fp16")
    norms = create("angle", 6, n="8", norm="fp32", rotation="none")
    rows("angle-rows-of-norms", "norms in binary32 for two sequences and three heads", norms, "front-12", runs=(3,))
    for words, shows in (
        ({"per": "tensor"}, "one scale for each of three runs"),
        ({"per": "head", "scales": "fp16"}, "one scale for each of three runs and three heads"),
        ({"element": "e2m1", "scales": "e4m3"}, "one global scale for each of three runs"),
    ):
        codec = create("minifloat", 6, **words)
        rows(f"minifloat-rows-of-{words.get('per', 'block')}", f"{shows}, of two sequences", codec, "front-12")
    rows("minifloat-rows-of-token", "a scale per token and head", create("minifloat", 6, per="token"), "front-12", runs=(7,))


def add_sidecars() -> None:
    scaled = create("group", 6, b="2", axis="channel", channel_scale="fp16")
    scaled = with_sidecar(scaled, ChannelOrder(6, "u16"))
    rows("side-car-order-and-scale", "an order followed by a scale, for each head in three runs", scaled, "side-cars-10", tail=0)
    for kind, dim, block in (("signed-hadamard", 24, "12"), ("hadamard", 12, "4")):
        both = create("group", dim, b="2", axis="channel", rotation=kind, block_rotation=block)
        shows = f"the codec's rotation {kind}, and then blocks of {block} channels"
        rows(f"side-car-{kind}-and-blocks", shows, both, "side-cars-10", "front-8", runs=(2,), tail=0)
    for kind in ("none", "signed-hadamard"):
        for axis in ("token", "channel"):
            codec = create("group", 16, b="2", g="4", axis=axis, rotation=kind, token_scale="fp32", block_rotation="4", **EVERY)
            shows = f"all side-cars of three runs of groups along {axis}s, two sequences and three heads, rotation {kind}"
            rows(f"side-cars-all-{kind}-{axis}", shows, codec, "side-cars-10", "front-12")
    words = {"scales": "u8", "token_scale": "fp16-per-head", "channel_scale": "fp16", "raw_first": "1"}
    codec = create("group", 16, b="2", g="4", axis="token", rotation="hadamard", **words)
    shows = "token scales per head and raw positions: two required features of one codec"
    rows("group-token-scales-per-head-and-raw-positions", shows, codec, "container-61", "container-55", "side-cars-10", "front-8")
    codec = create("scalar", 6, b="2", rotation="none", sinks="1", raw_tokens="fp32")
    none = without_entries("raw_token_flags", "raw_tokens")
    shows = "an empty last tensor, so that the file ends with a pad"
    add_valid("side-car-last-without-entries", shows, lambda: keys_file(codec, none, runs=(3,), tail=0), "side-cars-10")
    add_subnormal()


def without_entries(flags: str, stream: str) -> Callable[[Parts], None]:
    """Return a change that sets all ``flags`` to 0 and removes the entries of ``stream``."""

    def apply(parts: Parts) -> None:
        number, entries = parts.tensor(f"0.k.{flags}"), parts.tensor(f"0.k.{stream}")
        parts.tensors[number] = bytes(len(parts.tensors[number]))
        parts.header["layers"][0]["k"]["entries"][stream] = parts.header["tensors"][entries][2][2] = 0
        parts.tensors[entries] = b""

    return apply


def subnormal(names: tuple[str, ...], dtype: str = "F16") -> Callable[[Parts], None]:
    """Return a change that fills tensors, except channel scales, with subnormal numbers of either sign."""

    size, top = (2, 1 << 10) if dtype == "F16" else (4, 1 << 23)

    def apply(parts: Parts) -> None:
        for name in names:
            source, number = random.Random(name), parts.tensor(f"0.k.{name}")
            signs = 1 if name == "channel_scale" else 2
            drawn = (source.randrange(1, top) | source.randrange(signs) << 8 * size - 1 for _ in range(len(parts.tensors[number]) // size))
            parts.tensors[number] = b"".join(value.to_bytes(size, "little") for value in drawn)

    return apply


def large_scales(parts: Parts) -> None:
    """Set scales and centers of groups near the largest binary16, so that their products with subnormal binary32 numbers are normal."""
    source, number = random.Random(1), parts.tensor("0.k.scales")
    count = len(parts.tensors[number]) // 2
    parts.tensors[number] = b"".join((source.randrange(29, 31) << 10 | source.randrange(1024)).to_bytes(2, "little") for _ in range(count))


def add_subnormal() -> None:
    words = {"outliers": "3", "qjl": "fp16", "sinks": "1", "raw_tokens": "fp16"}
    codec = create("group", 16, b="2", g="4", axis="channel", **words)
    numbers = subnormal(("outliers", "qjl_norm", "raw_tokens", "tail"))
    make = lambda: keys_file(codec, numbers, runs=(6,), tail=2, tail_dtype="fp16")  # noqa: E731
    add_valid("side-cars-subnormal", "subnormal numbers in outliers, qjl_norm, raw tokens and tail", make, "front-1", "side-cars-10")
    single = create("group", 6, b="2", g="4", axis="channel", token_scale="fp32")
    change = subnormal(("token_scale",), "F32")
    shows = "subnormal token scales in binary32 with normal products"
    add_valid("group-subnormal-fp32-token-scales", shows, lambda: keys_file(single, large_scales, change, runs=(4,), tail=0), "front-12")
    scaled = create("group", 6, b="2", g="4", axis="channel", channel_scale="fp32")
    factors = subnormal(("channel_scale",), "F32")
    shows = "subnormal channel scales in binary32 with normal products"
    make_scaled = lambda: keys_file(scaled, large_scales, factors, runs=(4,), tail=0)  # noqa: E731
    add_valid("side-car-subnormal-fp32-scale", shows, make_scaled, "side-cars-9", "side-cars-10")


def add_runs() -> None:
    """Add files with two runs for a codec that allows only one, because it encodes tokens one by one."""
    shows = "two runs of codec minifloat with scales per block, which encodes tokens one by one"
    add("two-runs-of-mxfp8", "container-18", "InvalidHeader", shows, lambda: keys_file(MXFP8, edit("layers.0.k.runs", [1, 1]), tail=0))
    for codec in (OCTAHEDRAL, QUATERNION, ANGLE, SCALAR, POLAR, MINIFLOAT):
        shows = f"two runs of {codec.id}, which encodes tokens one by one"
        make = lambda c=codec: keys_file(c, edit("layers.0.k.runs", [1, 1]), tail=0)  # noqa: E731
        add(f"two-runs-of-{codec.id}", "container-18", "InvalidHeader", shows, make)


def add_flags() -> None:
    three = create("group", 12, b="2", axis="channel", outliers="3")
    three = with_sidecar(three, Outliers(12, fields=2))
    change = without_entries("outlier_flags.0", "outliers"), overwrite("0.k.outlier_flags.0", 1, "02")
    shows = "a flag set in a field without a chunk"
    add("side-car-field-of-no-chunk", "front-3", "InvalidPayload", shows, lambda: keys_file(three, *change))
    raw = create("group", 6, b="2", axis="channel", sinks="1", raw_tokens="fp16")
    none = without_entries("raw_token_flags", "raw_tokens")
    add(
        "side-car-flag-2-of-one-entry",
        "side-cars-7",
        "InvalidPayload",
        "a flag of 2 with one entry, the number of nonzero flags",
        lambda: keys_file(raw, none, one_entry, overwrite("0.k.raw_token_flags", 1, "02"), runs=(3,), tail=0),
    )
    raw_codec = create("raw", 4, dtype="bf16")
    add(
        "side-car-of-raw-with-its-stream",
        "side-cars-1",
        "InvalidHeader",
        "channel_scale for codec raw, with its tensor",
        lambda: keys_file(raw_codec, scale_of_raw, tail=0),
    )


def one_entry(parts: Parts) -> None:
    """Add one entry to keys without raw tokens."""
    number = parts.tensor("0.k.raw_tokens")
    shape = parts.header["tensors"][number][2]
    parts.header["layers"][0]["k"]["entries"]["raw_tokens"] = shape[2] = 1
    parts.tensors[number] = bytes(2 * shape[3] * shape[4])


def scale_of_raw(parts: Parts) -> None:
    parts.header["codecs"][0]["channel_scale"] = "fp16"
    parts.header["tensors"].append(["0.k.channel_scale", "F16", [1, 2, 1, 4], "none", 0, b""])
    parts.tensors.append(struct.pack("<8e", *[1.0] * 8))
