"""Conformance vectors with invalid codec parameters, codes or numbers. Each one breaks one rule."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from spec.generate.invalid_vectors import (
    ANGLE,
    CODECS,
    EIGHT_BIT,
    GROUP,
    MINIFLOAT,
    MXFP8,
    NVFP4,
    OCTAHEDRAL,
    POLAR,
    QUATERNION,
    SCALAR,
    add,
    add_header,
    add_payload,
)
from support.file_parts import edit, keys_file, reorder
from support.strategies import create

if TYPE_CHECKING:
    from kvpack.formats.base import Codec


def add_all() -> None:
    for add_vectors in (add_parameters, add_tables, add_packing, add_numbers, add_minifloats, add_scales_per_head):
        add_vectors()


def add_parameters() -> None:
    outside: dict[str, list[tuple[str, Any]]] = {
        "raw": [("dim", 0), ("dim", 1025), ("dim", "3"), ("dtype", "fp64")],
        "group": [
            ("dim", 1025),
            ("bits", 0),
            ("bits", 9),
            ("axis", "head"),
            ("size", 12),
            ("seed", "0"),
            ("fields", {"codes": "5"}),
            ("rotation_kind", "givens"),
        ],
        "octahedral": [
            ("dim", 3),
            ("b_dir", 9),
            ("b_norm", 9),
            ("arrangement", "sparse"),
            ("norm", "bf16"),
            ("direction_table", bytes(4)),
            ("norm_table", bytes(9)),
        ],
        "quaternion": [("secondary", 0), ("secondary", 2731), ("radius_bits", 9), ("rotation_seed", "1")],
        "angle": [("dim", 7), ("bins", 1), ("bins", 65537), ("norm_bits", 0), ("norm_bits", 9), ("range", "bf16")],
        "scalar": [("bits", 0), ("bits_high", 2), ("high_channels", b"\x1f"), ("high_channels", b""), ("magnitude_table", bytes(4))],
        "minifloat": [
            ("dim", 0),
            ("dim", 1025),
            ("element", "e3m2"),
            ("granularity", "channel"),
            ("scale_dtype", "bf16"),
            ("scale_dtype", "e8m0"),
            ("fields", {"codes": "2"}),
        ],
        "lossless": [
            ("dim", 0),
            ("dim", 1025),
            ("dtype", "fp32"),
            ("chunk", 8),
            ("chunk", 48),
            ("chunk", 512),
            ("fields", {"signed_fractions": "2"}),
        ],
        "klt": [
            ("dim", 0),
            ("dim", 1025),
            ("basis", bytes(31)),
            ("layer", 4096),
            ("side", "q"),
            ("rows", "bf16"),
            ("widths", bytes([9])),
            ("widths", bytes([2, 2])),
            ("widths", bytes([0])),
            ("gain", "fp32"),
        ],
        "transform": [
            ("dim", "3"),
            ("chunk", 48),
        ],
        "polar": [("dim", 5), ("bits", "2.3.1.1"), ("bits", "2.9.1"), ("bits", "2.3."), ("bits", ""), ("angle_table", "")],
    }
    for codec_id, codec in CODECS.items():
        names = list(codec.params())
        add(
            f"{codec_id}-parameter-missing",
            f"{codec_id}-1",
            "InvalidHeader",
            "a parameter is missing",
            lambda c=codec, n=names: keys_file(c, reorder("codecs.0", *n[:-1])),
        )
        add(
            f"{codec_id}-parameter-unknown",
            f"{codec_id}-1",
            "InvalidHeader",
            "an additional parameter",
            lambda c=codec, n=names: keys_file(c, reorder("codecs.0", *n, "more")),
        )
        swapped = [*names[:-2], *names[:-3:-1]]
        add(
            f"{codec_id}-parameters-swapped",
            f"{codec_id}-1",
            "InvalidHeader",
            "the last two parameters in the wrong order",
            lambda c=codec, n=swapped: keys_file(c, reorder("codecs.0", *n)),
        )
        for number, (parameter, value) in enumerate(outside[codec_id]):
            shown = f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)
            add_header(
                f"{codec_id}-parameter-{number + 1}", f"{codec_id}-2", codec, f"codecs.0.{parameter}", value, f"{parameter} is {shown}"
            )
        if codec_id not in ("raw", "transform"):
            fields = dict(codec.fields)  # type: ignore[attr-defined]
            other = {f"{name}s": count for name, count in fields.items()}
            add_header(
                f"{codec_id}-fields-of-others", f"{codec_id}-3", codec, "codecs.0.fields", other, "fields with the names of other streams"
            )
            add_header(
                f"{codec_id}-fields-missing",
                f"{codec_id}-3",
                codec,
                "codecs.0.fields",
                dict(list(fields.items())[1:]),
                "fields without one of the streams",
            )
            more = fields | {"more": 1}
            add_header(f"{codec_id}-fields-unknown", f"{codec_id}-3", codec, "codecs.0.fields", more, "fields with an additional stream")
    direct = create("angle", 6, n="8", norm="fp32", rotation="none")
    add_header("angle-norms-direct", "angle-2", direct, "codecs.0.arrangement", "direct", 'arrangement "direct" with norms in binary32')
    both = dict(reversed(dict(SCALAR.fields).items()))  # type: ignore[attr-defined]
    add_header("scalar-fields-swapped", "scalar-3", SCALAR, "codecs.0.fields", both, "fields with streams in the wrong order")
    add(
        "group-scale-dtype-fp16",
        "group-4",
        "InvalidHeader",
        "scale_dtype with its default, which must be omitted",
        lambda: keys_file(GROUP, lambda parts: parts.header["codecs"][0].update(scale_dtype="fp16")),
    )
    add_header("group-scale-dtype-unknown", "group-4", EIGHT_BIT, "codecs.0.scale_dtype", "u16", "scale_dtype is u16")


def add_scales_per_head() -> None:
    shared, per_head = (create("group", 5, b="2", g="4", axis="channel", token_scale=scale) for scale in ("fp16", "fp16-per-head"))
    feature = "token-scale-per-head"
    add_header(
        "token-scale-per-head-not-required",
        "container-61",
        per_head,
        "required",
        [],
        "token scales per head without the feature that they require",
    )
    add_header(
        "token-scale-per-head-required-of-none",
        "container-61",
        shared,
        "required",
        [feature],
        "the required feature without token scales per head",
    )
    for name, codec, scale, required in (("shared", per_head, "fp16", []), ("per-head", shared, "fp16-per-head", [feature])):
        changes = edit("codecs.0.token_scale", scale), edit("required", required)
        shows = f"token_scale is {scale}, and the tensor has the shape of {codec.token_scale}"  # type: ignore[attr-defined]
        make = lambda codec=codec, changes=changes: keys_file(codec, *changes, heads=3)  # noqa: E731
        add(f"token-scale-of-another-shape-{name}", "container-16", "InvalidHeader", shows, make)


def add_tables() -> None:
    nan, above, one = "0000c07f", "0100803f", "0000803f"
    for name, table, shows in (
        ("equal", bytes(8), "two numbers that are equal"),
        ("descending", bytes.fromhex(one + "0000003f"), "numbers that descend"),
        ("above-1", bytes.fromhex(one + above), "a number above 1"),
        ("negative", bytes.fromhex("000080bf" + one), "a negative number"),
        ("nan", bytes.fromhex("00000000" + nan), "a number that is no number"),
    ):
        add_header(f"octahedral-table-{name}", "octahedral-4", OCTAHEDRAL, "codecs.0.norm_table", table, f"norm_table has {shows}")
        if name != "negative":
            add_header(f"scalar-table-{name}", "scalar-4", SCALAR, "codecs.0.magnitude_table", table, f"magnitude_table has {shows}")
    first = POLAR.angle_table  # type: ignore[attr-defined]
    add_header(
        "polar-table-above-right-angle",
        "polar-4",
        POLAR,
        "codecs.0.angle_table",
        first[:-4] + bytes.fromhex("db0fc93f"),
        "the largest angle is the smallest binary32 above pi / 2",
    )
    add_header(
        "polar-table-descending",
        "polar-4",
        POLAR,
        "codecs.0.angle_table",
        first[4:8] + first[:4] + first[8:],
        "angles that are not ascending",
    )
    add_header("polar-table-nan", "polar-4", POLAR, "codecs.0.angle_table", first[:-4] + bytes.fromhex(nan), "an angle that is NaN")
    add_header("polar-table-short", "polar-4", POLAR, "codecs.0.angle_table", first[:-4], "a table with one angle too few")
    add_header(
        "polar-table-long", "polar-4", POLAR, "codecs.0.angle_table", first + bytes.fromhex("0000803f"), "a table with one angle too many"
    )
    add_header("scalar-no-high-channel", "scalar-5", SCALAR, "codecs.0.high_channels", b"\0\0", "no channel is high")
    add_header("scalar-high-channels-alone", "scalar-5", SCALAR, "codecs.0.high_channels", b"\xff\x03", "all channels are high")
    add_header(
        "scalar-high-channel-beyond", "scalar-6", SCALAR, "codecs.0.high_channels", b"\x1f\x04", "a high channel beyond the last channel"
    )


def add_packing() -> None:
    half = dataclasses.replace(GROUP, fields=(("codes", 3),))  # type: ignore[type-var]
    odd = dataclasses.replace(GROUP, fields=(("codes", 2),))  # type: ignore[type-var]
    exact = create("angle", 128, n="3", norm="linear3", rotation="none")
    add_payload("digit-of-a-codeword", "front-2", QUATERNION, "symbol.0", 0, "7f00", "a codeword within its base, but not below 24 S")
    add_payload("digit-of-a-bin", "front-2", ANGLE, "angle.0", 0, "7f", "a bin within its base, but not below bins")
    add_payload("field-without-a-symbol", "front-3", half, "codes.0", 2, "4000", "a nonzero field of bits without a symbol")
    add_payload(
        "field-without-a-symbol-of-3",
        "front-3",
        exact,
        "angle.0",
        exact.packings()["angle"].planes[0] * 2 - 2,
        unused_field(exact),
        "a nonzero field of base 3 without a symbol",
    )
    add_payload("bits-above-a-column", "front-4", GROUP, "codes.0", 1, "80", "a bit above the fields of a column is set")
    add_payload(
        "bits-above-a-column-of-two-digits", "front-4", QUATERNION, "symbol.0", 1, "08", "a bit above the fields of both digits is set"
    )
    add_payload("byte-without-a-column", "front-4", odd, "codes.0", 3, "01", "the unused high byte of the last word")
    add_payload("value-above-a-column", "front-4", exact, "angle.0", 0, "ffff", "a column with a value above 3^F - 1")
    odd_of_3 = dataclasses.replace(exact, fields=(("angle", 5), ("norm_codes", 5)))  # type: ignore[type-var]
    shows = "the high byte of the last word for 13 columns of base 3"
    add_payload("byte-without-a-column-of-3", "front-4", odd_of_3, "angle.0", 13, "01", shows)
    for codec, count, name, shows in (
        (GROUP, 0, "none", "empty fields"),
        (GROUP, 129, "129", "129 fields"),
        (GROUP, 43, "of-129-bits", "a column with 129 bits"),
        (GROUP, 2**64 - 1, "of-64-bits", "the largest number of fields that fits in msgpack"),
    ):
        add_header(f"fields-{name}", "front-5", codec, "codecs.0.fields", {"codes": count}, shows)
    add_header(
        "fields-of-2-to-the-53",
        "front-5",
        exact,
        "codecs.0.fields",
        {"angle": 34, "norm_codes": 1},
        "a column of base 3 with more than 2^53 values",
    )
    rotated = {"group": GROUP, "octahedral": OCTAHEDRAL, "quaternion": QUATERNION, "angle": ANGLE, "scalar": SCALAR, "polar": POLAR}
    for number, (codec_id, codec) in enumerate(rotated.items()):
        kind = ("hadamard", "signed-hadamard")[number % 2]
        add_header(f"rotation-of-{codec_id}", "front-7", codec, "codecs.0.rotation_kind", kind, f"{kind} at head dim {codec.dim}")


def unused_field(codec: Codec) -> str:
    """Return the bytes of a column whose highest field is 1 and whose other fields are 0."""
    packing = codec.packings()["angle"]
    assert packing.fields * packing.width > packing.symbols
    assert packing.column_bytes == 2
    return int(packing.bases[0] ** (packing.fields - 1)).to_bytes(2, "little").hex()


def add_numbers() -> None:
    norms = create("angle", 4, n="8", norm="fp32", rotation="none")
    for codec, stream, value in (
        (GROUP, "scales", "007c"),
        (EIGHT_BIT, "scale_range", "00fc"),
        (EIGHT_BIT, "token_scale", "000080ff"),
        (OCTAHEDRAL, "norm", "01fe"),
        (QUATERNION, "scale", "007e"),
        (ANGLE, "range", "007c"),
        (norms, "norm", "0000c07f"),
        (SCALAR, "norm", "00fc"),
        (POLAR, "radius", "ffff"),
    ):
        add_payload(
            f"not-finite-{codec.id}-{stream}".replace("_", "-"),
            "front-13",
            codec,
            stream,
            0,
            value,
            f"{stream} of {codec.id} is not finite",
        )
    add_payload("octahedral-padding-triplet", "octahedral-5", OCTAHEDRAL, "symbol.0", 4, "01", "a nonzero triplet beyond the last one")
    add_payload(
        "group-range-too-wide",
        "group-7",
        EIGHT_BIT,
        "scale_range",
        0,
        "803c0000",
        "a scale that would be infinite for k = 255, even if that does not occur",
    )
    add_payload(
        "group-minimum-too-large",
        "group-7",
        EIGHT_BIT,
        "scale_range",
        6,
        "005c",
        "a center that would be infinite for k = 0, even if that does not occur",
    )


def add_minifloats() -> None:
    """Add vectors with elements and scales that are not finite, in every byte of a word and in words of every plane."""
    fp8 = create("minifloat", 6, element="e4m3")
    e5m2 = create("minifloat", 6, element="e5m2")
    wide = dataclasses.replace(fp8, fields=(("codes", 4),))  # type: ignore[type-var]
    odd = dataclasses.replace(fp8, fields=(("codes", 3),))  # type: ignore[type-var]
    for name, codec, stream, at, value, shows in (
        ("e4m3-nan", fp8, "codes.0", 0, "7f", "an e4m3 NaN in the low byte of a word"),
        ("e4m3-nan-high", fp8, "codes.0", 5, "7f", "an e4m3 NaN in the high byte of a word"),
        ("e4m3-negative-nan", MINIFLOAT, "codes.0", 4, "ff", "an e4m3 NaN with the sign set"),
        ("e4m3-nan-second-plane", wide, "codes.1", 2, "7f", "an e4m3 NaN in the second plane of columns of four bytes"),
        ("e4m3-nan-last-bytes", odd, "codes.1", 0, "ff", "an e4m3 NaN in the last byte of a column of three"),
        ("e5m2-infinity", e5m2, "codes.0", 2, "7c", "an e5m2 infinity"),
        ("e5m2-negative-infinity", e5m2, "codes.0", 3, "fc", "an e5m2 infinity with the sign set"),
        ("e5m2-nan", MXFP8, "codes.0", 0, "7d", "the smallest e5m2 NaN code"),
        ("e5m2-largest-nan", MXFP8, "codes.0", 1, "ff", "the largest e5m2 NaN code"),
    ):
        add_payload(f"minifloat-{name}", "minifloat-6", codec, stream, at, value, shows)
    mxfp4 = create("minifloat", 40, element="e2m1", scales="e8m0")
    add_payload("minifloat-e8m0-nan", "minifloat-7", MXFP8, "block_scales", 1, "ff", "NaN as an e8m0 scale")
    add_payload("minifloat-e8m0-nan-of-mxfp4", "minifloat-7", mxfp4, "block_scales", 7, "ff", "NaN as the e8m0 scale of the last block")
    for name, value, shows in (
        ("nan", "7f", "an e4m3 scale that is NaN"),
        ("negative-nan", "ff", "an e4m3 scale that is NaN with the sign set"),
        ("negative-zero", "80", "an e4m3 scale of zero with the sign set"),
        ("negative", "b8", "an e4m3 scale of -1"),
    ):
        add_payload(f"minifloat-scale-{name}", "minifloat-8", NVFP4, "block_scales", 1, value, shows)
    for codec, stream, value in (
        (MINIFLOAT, "scale", "007c"),
        (create("minifloat", 6, per="head"), "scale", "000080ff"),
        (NVFP4, "global_scale", "0000c07f"),
    ):
        name = f"not-finite-minifloat-{codec.granularity}".replace("_", "-")  # type: ignore[attr-defined]
        add_payload(name, "front-13", codec, stream, 0, value, f"{stream} per {codec.granularity} is not finite")  # type: ignore[attr-defined]
    uneven = create("minifloat", 5, element="e4m3")
    add_payload("minifloat-field-without-a-symbol", "front-3", uneven, "codes.0", 5, "38", "a nonzero element in a field without a channel")
