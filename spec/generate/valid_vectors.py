"""Conformance vectors that every reader of their profile must decode: parameters at their limits, odd shapes and special values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from support.file_parts import (
    change_file,
    compress,
    edit,
    file_of,
    frame,
    keys_file,
    overwrite,
    random_side,
    raw_frame,
    repeated_frame,
)
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.base import Codec


@dataclass(frozen=True)
class Valid:
    """A valid vector: its purpose, the rules that a correct decoder follows, and its bytes."""

    shows: str
    rules: tuple[str, ...]
    make: Callable[[], bytes]
    basis: str = ""
    """Name of the file with the basis that a reader receives."""


VALID: dict[str, Valid] = {}


def add(name: str, shows: str, make: Callable[[], bytes], *rules: str, basis: str = "") -> None:
    assert name not in VALID
    VALID[name] = Valid(shows, rules, make, basis)


def add_all() -> None:
    for add_vectors in (
        add_raw,
        add_group,
        add_octahedral,
        add_quaternion,
        add_angle,
        add_polar,
        add_scalar,
        add_minifloat,
        add_usual_head_dims,
        add_container,
    ):
        add_vectors()


def with_fields(codec: Codec, *fields: int) -> Codec:
    """Return ``codec`` with these numbers of fields per column, one per code stream."""
    return dataclasses.replace(codec, fields=tuple((name, count) for name, count in zip(codec.packings(), fields, strict=True)))  # type: ignore[call-arg]


def add_raw() -> None:
    specials = {
        "bf16": "0000 0080 0100 ff80 807f 80ff c07f 01ff",
        "fp16": "0000 0080 0100 ff83 007c 00fc 007e 01fe",
        "fp32": "00000000 00000080 01000000 ffff7f80 0000807f 000080ff 0000c07f 0100c0ff",
    }
    for dtype, values in specials.items():
        codec = create("raw", 4, dtype=dtype)
        shows = f"{dtype}: zeros of both signs, subnormal and largest subnormal numbers, infinities, NaN"
        add(
            f"raw-{dtype}-special-values",
            shows,
            lambda c=codec, v=values: keys_file(c, overwrite("0.k.values", 0, v), tail=0),
            "raw-3",
            "front-12",
        )
    add("raw-one-channel", "head dim 1, two sequences", lambda: keys_file(create("raw", 1, dtype="fp16"), batch=2), "raw-3")
    add(
        "raw-1024-channels",
        "the largest head dim",
        lambda: keys_file(create("raw", 1024, dtype="bf16"), runs=(1,), tail=0, heads=1),
        "raw-3",
    )


def add_group() -> None:
    dims, sizes, scales = (1, 2, 3, 7, 12, 20, 28, 129), ("4", "8", "16", "32", "64", "128", "4", "8"), ("none", "fp16", "fp32")
    for number, (dim, size) in enumerate(zip(dims, sizes, strict=True)):
        words = {"b": str(number + 1), "g": size, "token_scale": scales[number % 3], "axis": ("token", "channel")[number // 2 % 2]}
        if dim in (12, 20, 28):
            words |= {"rotation": ("hadamard", "signed-hadamard")[number % 2], "seed": "18446744073709551615"}
        runs = (3, int(size) + 1) if words["axis"] == "token" and int(size) < 32 else (2,)
        rules = ("front-12", *(["front-8"] if "rotation" in words else []))
        codec = create("group", dim, **words)
        shows = f"{number + 1} bits, head dim {dim}, groups of {size} along {words['axis']}s, token_scale {words['token_scale']}"
        add(f"group-dim-{dim}", shows, lambda c=codec, r=runs: keys_file(c, runs=r), *rules)
    small = create("group", 5, b="3", g="4", axis="channel")
    for count, shows in ((1, "one field per column"), (42, "more fields than channels, in columns with 16 bytes")):
        codec = with_fields(small, count)
        add(f"group-fields-{count}", shows, lambda c=codec: keys_file(c), "front-12")
    wide = with_fields(create("group", 130, b="1", g="128", axis="channel"), 128)
    add("group-fields-128", "the most fields per column, and a second column with two symbols", lambda: keys_file(wide), "front-12")
    subnormal = overwrite("0.k.scales", 0, "0100 0000 0180 ff83 0200 0100")
    plain = create("group", 4, b="2", g="4", axis="channel")
    shows = "subnormal scales and centers of either sign"
    add("group-subnormal-scales", shows, lambda: keys_file(plain, subnormal, tail=0), "group-6", "front-1")
    scaled = create("group", 4, b="2", g="4", axis="channel", token_scale="fp16")
    token_scale = overwrite("0.k.token_scale", 0, "0100 ff83")
    add("group-subnormal-token-scales", "subnormal token scales", lambda: keys_file(scaled, token_scale, tail=0), "front-1")
    eight = create("group", 5, b="2", g="4", axis="channel", scales="u8")
    span = overwrite("0.k.scale_range", 0, "0000 000c 0000 008c 0002 0090 0000 0000")
    add(
        "group-8-bit-scales-subnormal",
        "8-bit scales that decode to subnormal binary16 numbers",
        lambda: keys_file(eight, span),
        "group-5",
        "front-1",
    )
    widest = overwrite("0.k.scale_range", 0, "fe3b 0000 013c fedb 0000 f85b 0000 f8db")
    add("group-8-bit-scales-largest", "8-bit scales near the largest binary16 number", lambda: keys_file(eight, widest), "front-12")


def add_octahedral() -> None:
    corners = ((4, 1, 0), (5, 1, 8), (6, 8, 0), (12, 8, 8), (20, 3, 1), (28, 2, 2))
    for number, (dim, b_dir, b_norm) in enumerate(corners):
        for arrangement in ("dense", "direct"):
            rotation = ("none", "hadamard", "signed-hadamard")[number % 3] if dim in (4, 12, 20, 28) else "none"
            words = {"b_dir": str(b_dir), "b_norm": str(b_norm), "arrangement": arrangement, "norm": ("fp16", "fp32")[number % 2]}
            codec = create("octahedral", dim, rotation=rotation, **words)
            shows = f"b_dir {b_dir}, b_norm {b_norm}, {arrangement}, head dim {dim}, rotation {rotation}"
            add(f"octahedral-{b_dir}-{b_norm}-{arrangement}", shows, lambda c=codec: keys_file(c), "octahedral-6", "front-12")
    small = create("octahedral", 4, b="2", rotation="none")
    shows = "negative and subnormal norms, and norms of zero"
    add(
        "octahedral-special-norms",
        shows,
        lambda: keys_file(small, overwrite("0.k.norm", 0, "01bc 0100 0080"), tail=0),
        "front-1",
        "octahedral-6",
        "octahedral-10",
    )


def add_quaternion() -> None:
    corners = (
        ("1", "1", 1, "dense"),
        ("3", "8", 5, "dense"),
        ("2730", "8", 6, "direct"),
        ("4096", "2", 9, "dense"),
        ("7", "3", 12, "dense"),
    )
    for secondary, radius, dim, arrangement in corners:
        rotation = "signed-hadamard" if dim == 12 else "none"
        words = {"s": secondary, "r": radius, "arrangement": arrangement, "norm": "fp32" if dim == 9 else "fp16", "seed": str(dim)}
        codec = create("quaternion", dim, rotation=rotation, rotation_seed="5", **words)
        shows = f"{secondary} secondary quaternions, {radius} bits per radius, {arrangement}, head dim {dim}, rotation {rotation}"
        add(f"quaternion-{secondary}-{radius}-{arrangement}", shows, lambda c=codec: keys_file(c), "quaternion-4", "front-12")
    small = create("quaternion", 4, s="2", r="2", rotation="none")
    shows = "subnormal and negative scales, and scales of zero"
    scales = overwrite("0.k.scale", 0, "0100 ff83 0080")
    add("quaternion-special-scales", shows, lambda: keys_file(small, scales), "quaternion-5", "front-1", "quaternion-7")


def add_angle() -> None:
    corners = (
        ("2", "fp32", 2, "dense", "fp16"),
        ("3", "log1", 4, "dense", "fp32"),
        ("3", "linear8", 6, "direct", "fp32"),
        ("65536", "linear1", 6, "dense", "fp16"),
        ("65535", "log8", 6, "dense", "fp16"),
        ("100", "linear4", 24, "direct", "fp16"),
        ("96", "log4", 40, "dense", "fp16"),
        ("20", "linear3", 80, "dense", "fp16"),
        ("5", "linear3", 80, "dense", "fp16"),
    )
    for bins, norm, dim, arrangement, span in corners:
        rotation = "signed-hadamard" if dim >= 24 else "none"
        codec = create("angle", dim, n=bins, norm=norm, arrangement=arrangement, range=span, rotation=rotation)
        shows = f"{bins} bins ({', '.join(codec.packings())}), norms {norm}, range {span}, head dim {dim}, rotation {rotation}"
        add(f"angle-{bins}-{norm}-{arrangement}", shows, lambda c=codec: keys_file(c), "angle-4", "front-12")
    small = create("angle", 4, n="8", norm="linear2", rotation="none")
    span = overwrite("0.k.range", 0, "0100 0000 ff83 0100")
    add("angle-special-ranges", "subnormal and negative steps and minima", lambda: keys_file(small, span), "angle-5", "front-1")
    logarithmic = create("angle", 4, n="8", norm="log2", rotation="none")
    zero = overwrite("0.k.range", 0, "0000 fffb")
    add("angle-zero-by-logarithm", "a zero token: the smallest logarithm, -65504", lambda: keys_file(logarithmic, zero), "angle-4")


def add_polar() -> None:
    corners = (("1", 2, "fp16"), ("8.1.8", 6, "fp32"), ("3.3", 10, "fp16"), ("2", 28, "fp16"), ("1.2.3.4.5.4.3.2.1.1", 1024, "fp16"))
    for levels, dim, norm in corners:
        rotation = "hadamard" if dim == 28 else "none"
        codec = create("polar", dim, b=levels, norm=norm, rotation=rotation)
        shows = f"bits {levels} at head dim {dim}, radii {norm}, rotation {rotation}"
        add(f"polar-dim-{dim}", shows, lambda c=codec: keys_file(c, runs=(1,), tail=0), "polar-5", "front-12")
    small = create("polar", 4, b="2", rotation="none")
    shows = "subnormal and negative radii, and radii of zero"
    add("polar-special-radii", shows, lambda: keys_file(small, overwrite("0.k.radius", 0, "0100 ff83 0080")), "polar-6", "front-1")


def add_scalar() -> None:
    corners: tuple[tuple[int, dict[str, str]], ...] = (
        (2, {"b": "1"}),
        (3, {"b": "8", "norm": "fp32"}),
        (9, {"b": "7", "high": "8", "share": "8"}),
        (12, {"b": "1", "high": "2", "share": "1", "rotation": "signed-hadamard"}),
        (17, {"b": "4", "high": "6"}),
    )
    for dim, words in corners:
        codec = create("scalar", dim, **{"rotation": "none", **words})
        shows = f"head dim {dim}, {', '.join(f'{name} {value}' for name, value in words.items())}"
        add(f"scalar-dim-{dim}", shows, lambda c=codec: keys_file(c), "scalar-7", "front-12")
    scattered = create("scalar", 10, b="2", high="3", share="4", rotation="none")
    channels = edit("codecs.0.high_channels", b"\x95\x00")
    add("scalar-scattered-channels", "scattered high channels", lambda: keys_file(scattered, channels), "scalar-7")
    small = create("scalar", 4, b="2", rotation="none")
    shows = "subnormal and negative norms, and norms of zero"
    add("scalar-special-norms", shows, lambda: keys_file(small, overwrite("0.k.norm", 0, "0100 ff83 0080")), "scalar-7", "front-1")


def add_minifloat() -> None:
    corners: tuple[tuple[int, dict[str, str]], ...] = (
        (1, {"element": "e4m3"}),
        (5, {"element": "e5m2", "per": "head", "scales": "fp16"}),
        (7, {"element": "e2m1", "per": "token", "scales": "fp32"}),
        (31, {"element": "e4m3", "scales": "e8m0"}),
        (33, {"element": "e5m2", "scales": "e8m0"}),
        (70, {"element": "e2m1", "scales": "e8m0"}),
        (20, {"element": "e2m1", "scales": "e4m3"}),
        (128, {"element": "e2m1", "scales": "e4m3"}),
        (576, {"element": "e4m3", "per": "token", "scales": "fp16"}),
    )
    for dim, words in corners:
        codec = create("minifloat", dim, **words)
        shows = f"head dim {dim}, {', '.join(f'{name} {value}' for name, value in words.items())}"
        add(f"minifloat-dim-{dim}", shows, lambda c=codec: keys_file(c, heads=1), "front-12")
    for element, finite in (("e4m3", [*range(0x7F), *range(0x80, 0xFF)]), ("e5m2", [*range(0x7C), *range(0x80, 0xFC)])):
        codec = create("minifloat", len(finite), element=element)
        half = len(finite) // 2
        words_of_all = bytes(code for pair in zip(finite[:half], finite[half:], strict=True) for code in pair).hex()
        change = overwrite("0.k.codes.0", 0, words_of_all), overwrite("0.k.scale", 0, "0000803f")
        shows = f"every finite {element}: zeros of both signs, subnormal numbers, the largest"
        add(
            f"minifloat-all-{element}",
            shows,
            lambda c=codec, e=change: keys_file(c, *e, runs=(1,), tail=0, heads=1),
            "minifloat-9",
            "front-12",
        )
    codes = overwrite("0.k.codes.0", 0, "40c8 51d9 62ea 73fb")
    every = create("minifloat", 16, element="e2m1")
    shows = "every e2m1 element, with a negative scale"
    turned = codes, overwrite("0.k.scale", 0, "000080bf")
    add("minifloat-all-e2m1", shows, lambda: keys_file(every, *turned, runs=(1,), tail=0, heads=1), "minifloat-9", "front-12")
    least = create("minifloat", 64, element="e4m3", scales="e8m0")
    smallest = overwrite("0.k.codes.0", 0, "7e01 78fe 3c7e 0008"), overwrite("0.k.block_scales", 0, "0001")
    shows = "the e8m0 codes 0 and 1: 2^-127, which is subnormal, and 2^-126"
    add("minifloat-smallest-e8m0", shows, lambda: keys_file(least, *smallest, runs=(1,), tail=0, heads=1), "minifloat-5", "front-12")
    largest = overwrite("0.k.codes.0", 0, "38" * 64), overwrite("0.k.block_scales", 0, "fe7f")
    shows = "the largest power of two in e8m0"
    add("minifloat-largest-e8m0", shows, lambda: keys_file(least, *largest, runs=(1,), tail=0, heads=1), "front-12", "minifloat-13")
    small = create("minifloat", 4, element="e4m3", per="token", scales="fp16")
    shows = "subnormal and negative scales, and scales of zero"
    add("minifloat-special-scales", shows, lambda: keys_file(small, overwrite("0.k.scale", 0, "0100 ff83 0080")), "front-1", "front-12")
    nvfp4 = create("minifloat", 48, element="e2m1", scales="e4m3")
    special = overwrite("0.k.block_scales", 0, "00017e"), overwrite("0.k.global_scale", 0, "ffff7f00")
    shows = "e4m3 scales of zero, of the smallest and of the largest value, and a subnormal global scale"
    add("minifloat-special-e4m3-scales", shows, lambda: keys_file(nvfp4, *special, runs=(1,), tail=0, heads=1), "front-12", "minifloat-9")
    plain = create("minifloat", 6, element="e4m3", per="token", scales="fp16")
    for count, shows in (
        (1, "one field per column, packed in pairs of columns"),
        (3, "columns with three bytes"),
        (16, "more fields than channels, in columns with 16 bytes"),
    ):
        codec = with_fields(plain, count)
        add(f"minifloat-fields-{count}", shows, lambda c=codec: keys_file(c), "front-12")


def add_usual_head_dims() -> None:
    """Add every codec at common head dims, with the settings of a recipe."""
    words: dict[str, dict[str, str]] = {
        "group": {"b": "2", "g": "32", "axis": "channel", "rotation": "hadamard"},
        "octahedral": {"b": "3"},
        "quaternion": {"s": "24", "r": "3"},
        "angle": {"n": "128", "norm": "linear8"},
        "polar": {"b": "3"},
        "scalar": {"b": "2", "high": "3"},
    }
    dims = ((64, 80), (96, 112), (128, 192), (224, 256), (80, 128), (128, 96))
    for (codec_id, options), pair in zip(words.items(), dims, strict=True):
        k, v = (create(codec_id, dim, **options) for dim in pair)
        shows = f"keys of head dim {k.dim} and values of head dim {v.dim}, rotated"
        make = lambda k=k, v=v: file_of((random_side(k, (1,), 0, heads=1), random_side(v, (1,), 0, heads=1)))  # noqa: E731
        add(f"{codec_id}-dims-{k.dim}-and-{v.dim}", shows, make, "front-8", "front-12")


def add_container() -> None:
    raw, group = create("raw", 3, dtype="fp16"), create("group", 6, b="2", g="4")
    add("no-layers", "no layers, no codecs, no tensors", lambda: file_of())
    add(
        "absent-sides",
        "layers without keys, without values, and without both",
        lambda: file_of((None, random_side(raw)), (None, None), (random_side(group), None)),
    )
    sides = [
        random_side(group, (5, 4, 1), 2, 2, 3, "fp32"),
        random_side(raw, (), 12, 2, 1, "fp16"),
        random_side(group, (4,), 0),
        random_side(raw, (4,), 0),
    ]
    add(
        "layers-of-two-shapes",
        "layers with different batch sizes, heads, tokens and codecs; sides with different runs and tails",
        lambda: file_of((sides[0], sides[1]), (sides[2], sides[3])),
    )
    add("no-tokens-in-runs", "only a tail", lambda: keys_file(group, runs=(), tail=3))
    twice = change_file(keys_file(group), lambda parts: parts.header["codecs"].extend([raw.params(), group.params()]))
    add("unused-codecs", "a codec that no side uses, and a codec that is listed twice", lambda: twice)
    names = {"\uffff": "a", "\U00010000": "b"}
    add(
        "model-beyond-ascii",
        "keys of model in the order of code points, which differs from that of UTF-16",
        lambda: keys_file(raw, edit("model", names)),
    )
    limits = edit("start", 2**40 - 1), edit("recipe", "x" * 4096), edit("layers.0.k.window", 2**40 - 4)
    add("largest-numbers", "start, window and a string at their limits", lambda: keys_file(group, *limits))
    frames: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
        "zstd": ("a frame", compress),
        "zstd-checksum": ("a frame with a content checksum", lambda values: compress(values, write_checksum=True)),
        "zstd-repeated-bytes": (
            "a frame with a block that repeats a byte, and an empty block",
            lambda values: repeated_frame(len(values), [len(values)]),
        ),
        "zstd-dictionary-0": ("a frame with Dictionary_ID 0", lambda values: raw_frame(values, "21 00 18")),
        "zstd-largest-window": ("a frame with the largest window", lambda values: raw_frame(values, "80 68 18000000")),
    }
    for name, (shows, change) in frames.items():
        add(name, shows, lambda c=change: keys_file(raw, frame(c), runs=(4,), heads=1))
    add("zstd-no-content", "an empty frame, for a tensor without bytes", lambda: keys_file(raw, frame(compress), runs=()))
