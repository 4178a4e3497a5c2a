"""Conformance vectors in which a parameter of an unused codec is the file's only fault."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from spec.generate.invalid_vectors import (
    ANGLE,
    EIGHT_BIT,
    GROUP,
    KLT,
    LOSSLESS,
    MINIFLOAT,
    MXFP8,
    NVFP4,
    OCTAHEDRAL,
    POLAR,
    QUATERNION,
    RAW,
    SCALAR,
    TRANSFORM,
    add,
)
from support.file_parts import Parts, entry_at, keys_file
from support.strategies import create

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

ONE_WIDTH = create("scalar", 10, b="2", rotation="none")
NORMS = create("angle", 6, n="8", norm="fp32", rotation="none")
HALF = create("polar", 6, b="2", rotation="none")
SIDECARS = create("group", 8, b="2", channel_scale="fp16", outliers="3", qjl="fp16", sinks="1", raw_tokens="fp16")
WIDE = create("group", 260, b="2", block_rotation="20", channel_order="u16")

CODED = (GROUP, OCTAHEDRAL, QUATERNION, ANGLE, SCALAR, POLAR)

Broken = tuple[str, "Codec", dict[str, Any], str]
"""Suffix of a vector's name, a codec, its changed parameters, and the purpose of the vector."""


def ascending(count: int) -> bytes:
    """Return a table of ``count`` ascending numbers in [0, 1]."""
    return struct.pack(f"<{count}f", *(number / count for number in range(count)))


def add_all() -> None:
    for codec_id, broken in PARAMETERS.items():
        for name, codec, changes, shows in broken:
            add_alone(f"{codec_id}-{name}", f"{codec_id}-2", codec, changes, shows)
    for name, codec, table, value in (
        ("scalar-low-table", SCALAR, "magnitude_table", -0.5),
        ("scalar-high-table", SCALAR, "high_magnitude_table", -0.5),
        ("polar-angles", POLAR, "angle_table", -0.5),
    ):
        changed = struct.pack("<f", value) + codec.params()[table][4:]
        add_alone(f"{name}-negative", f"{codec.id}-4", codec, {table: changed}, f"{table} begins with {value}")
    add_alone("group-scale-dtype-unknown", "group-4", EIGHT_BIT, {"scale_dtype": "other"}, "scale_dtype is other")
    add_alone("scalar-all-high", "scalar-5", SCALAR, {"high_channels": b"\xff\x03"}, "all channels are high")
    beyond = {"high_channels": b"\x1f\x04"}
    add_alone("scalar-high-beyond", "scalar-6", SCALAR, beyond, "a high channel beyond the last channel")
    for codec in CODED:
        shows = f"a Hadamard rotation at head dim {codec.dim}"
        add_alone(f"{codec.id}-hadamard", "front-7", codec, {"rotation_kind": "hadamard"}, shows)
    add_fields()
    add_sidecars()
    for element in ("e4m3", "e5m2"):
        shows = f"{element} elements in blocks with e4m3 scales"
        add_alone(f"minifloat-{element}-of-e4m3-scales", "minifloat-4", NVFP4, {"element": element}, shows)
    for codec in (*CODED, MINIFLOAT, LOSSLESS, KLT):
        names = list(codec.params()["fields"])
        add_alone(f"{codec.id}-fields-array", f"{codec.id}-2", codec, {"fields": names}, "fields is an array")
    seeds = [(codec, "seed") for codec in CODED]
    for codec, seed in [*seeds, (QUATERNION, "rotation_seed"), (SIDECARS, "qjl.seed")]:
        name = f"{codec.id}-{seed}".replace("_", "-").replace(".", "-")
        add_alone(f"{name}-negative", "container-10", codec, {seed: -1}, f"{seed} is -1")
        if seed != "qjl.seed":
            add_alone(f"{name}-string", f"{codec.id}-2", codec, {seed: "0"}, f"{seed} is a string")


def add_alone(name: str, rule: str, codec: Codec, changes: dict[str, Any], shows: str) -> None:
    """Add a file without layers whose only codec has ``changes`` by parameter name. Dots separate the keys of nested maps."""

    def alone() -> bytes:
        parts = Parts.of(keys_file(codec))
        parts.header["layers"], parts.header["tensors"], parts.tensors = [], [], []
        for path, value in changes.items():
            above, _, last = f"codecs.0.{path}".rpartition(".")
            entry_at(parts, above)[last] = value
        return parts.joined()

    add(f"codec-alone-{name}", rule, "InvalidHeader", f"{shows}; no side uses the codec", alone)


def ranges(codec: Codec, *bounds: tuple[str, int, int]) -> list[Broken]:
    """Return, for each parameter, the integers just below and just above its range. A negative bound means that there is no bound."""
    found: list[Broken] = []
    for name, below, above in bounds:
        found += [
            (f"{name}-{value}".replace("_", "-"), codec, {name: value}, f"{name} is {value}") for value in (below, above) if value >= 0
        ]
    return found


def words(codec: Codec, *names: str) -> list[Broken]:
    """Return, for each parameter, a word that no codec defines."""
    return [(f"{name}-unknown".replace("_", "-"), codec, {name: "other"}, f"{name} is other") for name in names]


PARAMETERS: dict[str, list[Broken]] = {
    "raw": [*ranges(RAW, ("dim", 0, 1025)), *words(RAW, "dtype")],
    "group": [
        *ranges(GROUP, ("dim", 0, 1025), ("bits", 0, 9)),
        *words(GROUP, "axis", "rotation_kind", "token_scale"),
        ("size-2", GROUP, {"size": 2}, "size is 2"),
        ("size-48", GROUP, {"size": 48}, "size is 48"),
        ("size-256", GROUP, {"size": 256}, "size is 256"),
        ("seed-nil", GROUP, {"seed": None}, "seed is nil"),
        ("bits-string", GROUP, {"bits": "3"}, "bits is a string"),
        ("axis-integer", GROUP, {"axis": 0}, "axis is an integer"),
        ("fields-nil", GROUP, {"fields.codes": None}, "the F of a stream is nil"),
    ],
    "minifloat": [
        *ranges(MINIFLOAT, ("dim", 0, 1025)),
        *words(MINIFLOAT, "element", "granularity", "scale_dtype"),
        ("scale-dtype-of-blocks-unknown", MXFP8, {"scale_dtype": "other"}, "scale_dtype is other per block"),
        ("scales-of-blocks", MINIFLOAT, {"scale_dtype": "e4m3"}, "scale_dtype is e4m3 per token"),
        ("scales-of-tokens", MXFP8, {"scale_dtype": "fp16"}, "scale_dtype is fp16 per block"),
        ("blocks-of-fp32", NVFP4, {"scale_dtype": "fp32"}, "scale_dtype is fp32 per block"),
        ("element-integer", MINIFLOAT, {"element": 8}, "element is an integer"),
        ("granularity-nil", MINIFLOAT, {"granularity": None}, "granularity is nil"),
        ("fields-string", MINIFLOAT, {"fields.codes": "2"}, "the F of a stream is a string"),
    ],
    "klt": [
        ("dim-0", KLT, {"dim": 0, "widths": b"", "fields": {}}, "dim is 0, with widths for it"),
        ("dim-1025", KLT, {"dim": 1025, "widths": bytes([2] * 65)}, "dim is 1025, with widths for it"),
        ("widths-9", KLT, {"widths": b"\t", "fields": {"codes_9": 1}}, "widths is 9 for a run, and there is a stream for it"),
        ("widths-0", KLT, {"widths": b"\0", "fields": {}}, "widths is 0 for every run, and there is no stream"),
        ("basis-string", KLT, {"basis": "0" * 32}, "basis is a string"),
        ("widths-string", KLT, {"widths": "\2"}, "widths is a string"),
    ],
    "transform": [
        *ranges(TRANSFORM, ("dim", 0, 1025), ("layer", -1, 4096), ("step", -1, 256)),
        *words(TRANSFORM, "side", "scope"),
        ("basis-short", TRANSFORM, {"basis": bytes(31)}, "basis has 31 bytes"),
        ("basis-string", TRANSFORM, {"basis": "0" * 32}, "basis is a string"),
        ("chunk-0", TRANSFORM, {"chunk": 0}, "chunk is 0"),
        ("chunk-512", TRANSFORM, {"chunk": 512}, "chunk is 512"),
    ],
    "lossless": [
        *ranges(LOSSLESS, ("dim", 0, 1025)),
        *words(LOSSLESS, "dtype"),
        ("dtype-fp32", LOSSLESS, {"dtype": "fp32"}, "dtype is fp32"),
        ("chunk-0", LOSSLESS, {"chunk": 0}, "chunk is 0"),
        ("chunk-24", LOSSLESS, {"chunk": 24}, "chunk is 24"),
        ("chunk-512", LOSSLESS, {"chunk": 512}, "chunk is 512"),
        ("chunk-string", LOSSLESS, {"chunk": "16"}, "chunk is a string"),
        ("fields-nil", LOSSLESS, {"fields.signed_fractions": None}, "the F of a stream is nil"),
    ],
    "octahedral": [
        *ranges(OCTAHEDRAL, ("dim", 3, 1025)),
        ("b-dir-0", OCTAHEDRAL, {"b_dir": 0, "direction_table": b"\0\0"}, "b_dir is 0, and direction_table has 4 · 2^-1 bytes"),
        ("b-dir-9", OCTAHEDRAL, {"b_dir": 9, "direction_table": ascending(256), "fields.symbol": 1}, "b_dir is 9"),
        ("b-norm-9", OCTAHEDRAL, {"b_norm": 9, "norm_table": ascending(512), "fields.symbol": 1}, "b_norm is 9"),
        *words(OCTAHEDRAL, "arrangement", "norm", "rotation_kind"),
        ("direction-table-long", OCTAHEDRAL, {"direction_table": ascending(5)}, "direction_table has a number too many"),
        ("norm-table-short", OCTAHEDRAL, {"norm_table": ascending(1)}, "norm_table has a number too few"),
        ("norm-array", OCTAHEDRAL, {"norm": ["fp16"]}, "norm is an array"),
        ("direction-table-string", OCTAHEDRAL, {"direction_table": "\0" * 16}, "direction_table is a string"),
        ("norm-table-string", OCTAHEDRAL, {"norm_table": "\0" * 8}, "norm_table is a string"),
    ],
    "quaternion": [
        *ranges(QUATERNION, ("dim", 0, 1025), ("radius_bits", 0, 9)),
        ("secondary-0", QUATERNION, {"secondary": 0}, "secondary is 0"),
        ("secondary-2731-direct", QUATERNION, {"secondary": 2731, "fields.symbol": 1}, "secondary is 2731 and the arrangement direct"),
        (
            "secondary-4097",
            create("quaternion", 8, s="4096", r="4", rotation="none"),
            {"secondary": 4097, "fields": {"codeword_low": 2, "codeword_high": 1, "radius": 2}},
            "secondary is 4097",
        ),
        *words(create("quaternion", 8, s="5", r="4", rotation="none"), "arrangement"),
        *words(QUATERNION, "norm", "rotation_kind"),
    ],
    "angle": [
        *ranges(ANGLE, ("dim", 0, 1026), ("dim", 7, -1), ("bins", 1, -1), ("norm_bits", 0, 9)),
        ("bins-65537", ANGLE, {"bins": 65537, "fields.angle": 1}, "bins is 65537"),
        *words(ANGLE, "norm", "arrangement", "range", "rotation_kind"),
        ("norms-direct", NORMS, {"arrangement": "direct", "fields": {"symbol": 1}}, "norm is fp32 and the arrangement direct"),
        ("norms-with-bits", NORMS, {"norm_bits": 1, "fields": {"angle": 1, "norm_codes": 1}}, "norm is fp32 and norm_bits 1"),
        ("norms-with-a-range", NORMS, {"range": "fp32"}, "norm is fp32 and range too"),
    ],
    "scalar": [
        *ranges(ONE_WIDTH, ("dim", 1, 1025)),
        ("bits-0", ONE_WIDTH, {"bits": 0, "magnitude_table": b"\0\0"}, "bits is 0, and magnitude_table has 4 · 2^-1 bytes"),
        ("bits-9", ONE_WIDTH, {"bits": 9, "magnitude_table": ascending(256), "fields.codes": 1}, "bits is 9"),
        ("bits-high-equal", SCALAR, {"bits_high": 2, "high_magnitude_table": ascending(2)}, "bits_high is bits"),
        ("bits-high-9", SCALAR, {"bits_high": 9, "high_magnitude_table": ascending(256), "fields.codes_high": 1}, "bits_high is 9"),
        *words(SCALAR, "norm", "rotation_kind"),
        ("high-channels-long", SCALAR, {"high_channels": b"\x1f\0\0"}, "high_channels has a byte too many"),
        ("high-channels-alone", ONE_WIDTH, {"high_channels": b"\x1f\0"}, "high_channels without bits_high"),
        ("high-table-alone", ONE_WIDTH, {"high_magnitude_table": ascending(4)}, "high_magnitude_table without bits_high"),
        ("low-table-long", SCALAR, {"magnitude_table": ascending(4)}, "magnitude_table has two numbers too many"),
        ("high-table-short", SCALAR, {"high_magnitude_table": ascending(2)}, "high_magnitude_table has two numbers too few"),
        ("low-table-string", SCALAR, {"magnitude_table": "\0" * 8}, "magnitude_table is a string"),
        ("high-table-string", SCALAR, {"high_magnitude_table": "\0" * 16}, "high_magnitude_table is a string"),
        ("high-channels-string", SCALAR, {"high_channels": "\x1f\0"}, "high_channels is a string"),
    ],
    "polar": [
        *ranges(POLAR, ("dim", 7, 1026)),
        ("dim-0", HALF, {"dim": 0}, "dim is 0"),
        ("bits-empty", HALF, {"bits": ""}, "bits is empty"),
        ("bits-integer", HALF, {"bits": 2}, "bits is an integer"),
        ("angle-table-string", HALF, {"angle_table": ""}, "angle_table is a string"),
        ("bits-9", HALF, {"bits": "9", "fields.angles1": 1}, "bits is 9"),
        ("bits-0", HALF, {"bits": "0"}, "bits is 0"),
        ("bits-02", HALF, {"bits": "02"}, "bits is 02"),
        ("bits-space", HALF, {"bits": " 2"}, "bits begins with a space"),
        (
            "bits-of-four-levels",
            POLAR,
            {"bits": "2.3.1.1", "fields": {"angles1": 1, "angles2": 1, "angles3": 1}},
            "four levels of six channels",
        ),
        *words(POLAR, "norm", "rotation_kind"),
    ],
}


def add_fields() -> None:
    """Add numbers of fields that make a column too large, with one vector for each limit."""
    bits = create("group", 5, b="1", g="16")
    for name, codec, fields, shows in (
        ("0", GROUP, {"codes": 0}, "empty fields"),
        ("129", bits, {"codes": 129}, "129 fields of a bit"),
        ("of-minifloat", MINIFLOAT, {"codes": 17}, "a column of 17 fields of 8 bits"),
        ("of-klt", KLT, {"codes_2": 65}, "a column of 65 fields of 2 bits"),
        ("of-lossless", LOSSLESS, {"signed_fractions": 17}, "a column of 17 fields of 8 bits"),
        ("of-octahedral", OCTAHEDRAL, {"symbol": 19}, "a column of 19 fields of 7 bits"),
        ("of-scalar", SCALAR, {"codes": 8, "codes_high": 43}, "a column of 129 bits of codes_high"),
        ("of-polar", POLAR, {**POLAR.params()["fields"], "angles2": 43}, "a column of 129 bits of angles2"),
        ("of-129-bits", GROUP, {"codes": 43}, "a column with 129 bits"),
        ("of-64-bits", bits, {"codes": 2**64 - 1}, "the largest number of fields that fits in msgpack"),
        ("of-two-digits", QUATERNION, {"symbol": 12}, "a column of 12 fields of 7 and 4 bits"),
        ("of-2-to-the-53", create("angle", 128, n="3", norm="linear3", rotation="none"), {"angle": 34, "norm_codes": 1}, "3^34 values"),
    ):
        add_alone(f"fields-{name}", "front-5", codec, {"fields": fields}, shows)


def add_sidecars() -> None:
    for name, codec, changes, shows in (
        ("channel-scale-array", SIDECARS, {"channel_scale": ["fp16"]}, "channel_scale is an array"),
        ("channel-scale-bf16", SIDECARS, {"channel_scale": "bf16"}, "channel_scale is bf16"),
        ("channel-order-u8", WIDE, {"channel_order": "u8"}, "channel_order is u8 at head dim 260"),
        ("channel-order-u32", WIDE, {"channel_order": "u32"}, "channel_order is u32"),
        ("block-rotation-string", WIDE, {"block_rotation": "20"}, "block_rotation is a string"),
        ("block-rotation-0", WIDE, {"block_rotation": 0}, "block_rotation is 0"),
        ("block-rotation-1", WIDE, {"block_rotation": 1}, "block_rotation is 1"),
        ("block-rotation-8", WIDE, {"block_rotation": 8}, "block_rotation is 8 at head dim 260"),
        ("block-rotation-512", WIDE, {"block_rotation": 512}, "block_rotation is 512 at head dim 260"),
        ("outliers-nil", SIDECARS, {"outliers": None}, "outliers is nil"),
        ("outliers-fields-string", SIDECARS, {"outliers.fields": "2"}, "the F of outliers is a string"),
        ("outliers-more", SIDECARS, {"outliers.more": 1}, "outliers has a key too many"),
        ("qjl-fields-nil", SIDECARS, {"qjl.fields": None}, "the F of qjl is nil"),
        ("qjl-norm-bf16", SIDECARS, {"qjl.norm": "bf16"}, "the norm of qjl is bf16"),
        ("qjl-seed-string", SIDECARS, {"qjl.seed": "1"}, "the seed of qjl is a string"),
        ("raw-tokens-f64", SIDECARS, {"raw_tokens": "fp64"}, "raw_tokens is fp64"),
    ):
        add_alone(f"side-car-{name}", "side-cars-3", codec, changes, shows)
    add_alone("side-car-of-raw", "side-cars-1", RAW, {"channel_scale": "fp16"}, "a side-car for codec raw")
    add_alone("side-car-outliers-of-6-channels", "side-cars-4", HALF, {"outliers": {"fields": 1}}, "outliers of 6 channels")
    qjl = {"qjl": {"seed": 1, "norm": "fp16", "fields": 1}}
    add_alone("side-car-qjl-of-6-channels", "front-7", HALF, qjl, "qjl of 6 channels")
    add_alone("side-car-blocks-of-52", "front-7", WIDE, {"block_rotation": 52}, "blocks of 52 channels")
    for name in ("outliers", "qjl"):
        for count in (0, 129):
            add_alone(
                f"side-car-{name}-fields-{count}", "front-5", SIDECARS, {f"{name}.fields": count}, f"{name} has {count} fields a column"
            )
