"""Conformance vectors of sidecars: valid ones of the full profile, and malformed ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvpack.formats.qjl import DEFAULT_SEED, Qjl
from spec.generate.invalid_vectors import GROUP, RAW, add, add_header, add_payload
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import Parts, change_file, drop, edit, file_of, keys_file, move_to_end, overwrite, random_side
from support.strategies import create, with_sidecar

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.base import Codec

ALL = create("scalar", 16, "k", b="2", rotation="none", channel_scale="fp16", outliers="3", qjl="fp16", sinks="1", raw_tokens="fp16")
BLOCKS = create("group", 12, "k", b="2", axis="channel", block_rotation="4", channel_order="u8")
SIGNS = with_sidecar(create("group", 12, b="2", qjl="fp16"), Qjl(12, DEFAULT_SEED, "fp16", fields=8))
WIDE_BLOCKS = create("group", 260, "k", b="2", axis="channel", block_rotation="20", channel_order="u16")


POSITIONS = create("scalar", 6, "k", b="2", rotation="none", raw_first="1", raw_dtype="fp16")
MEANS = create("scalar", 6, "k", b="2", rotation="none", mean="8")


def add_all() -> None:
    add_decoded()
    add_refused()
    add_positions()
    add_refused_positions()
    add_key_means()
    add_refused_key_means()


def add_decoded() -> None:
    for name, shows, codec_id, dim, words, runs in (
        (
            "channel-scale",
            "channel scales in two runs, with a codec that encodes tokens one by one",
            "scalar",
            6,
            {"b": "2", "rotation": "none", "channel_scale": "fp16"},
            (1, 2),
        ),
        (
            "channel-scale-rotated",
            "channel scales in binary32 with a rotation",
            "group",
            12,
            {"b": "2", "axis": "channel", "rotation": "hadamard", "channel_scale": "fp32"},
            (2,),
        ),
        ("outliers", "outlier chunks of a rotated head", "octahedral", 20, {"b": "2", "outliers": "3"}, (2,)),
        ("outliers-of-groups", "outlier entries in two runs", "group", 8, {"b": "3", "g": "4", "outliers": "3"}, (5, 2)),
        ("qjl", "signs of the residuals of a rotated head", "quaternion", 20, {"s": "3", "r": "2", "qjl": "fp16"}, (2,)),
        (
            "qjl-not-rotated",
            "signs of residuals, with norms in binary32 and the largest seed",
            "angle",
            12,
            {"n": "8", "rotation": "none", "qjl": "fp32", "qjl_seed": "18446744073709551615"},
            (2,),
        ),
        ("raw-tokens", "tokens stored unencoded", "polar", 6, {"b": "2", "rotation": "none", "sinks": "1", "raw_tokens": "fp32"}, (3,)),
        ("block-rotation", "blocks of four channels", "group", 12, {"b": "2", "axis": "channel", "block_rotation": "4"}, (2,)),
        (
            "block-rotation-and-order",
            "blocks of four channels, with a channel order",
            "group",
            12,
            {"b": "2", "axis": "channel", "block_rotation": "4", "channel_order": "u8"},
            (2, 1),
        ),
        (
            "channel-order-u16",
            "a channel order with 260 channels",
            "group",
            260,
            {"b": "2", "axis": "channel", "block_rotation": "20", "channel_order": "u16"},
            (1,),
        ),
    ):
        codec = create(codec_id, dim, "k", **words)
        add_valid(f"side-car-{name}", shows, lambda c=codec, r=runs: keys_file(c, runs=r, tail=0), "side-cars-10", "front-12")
    add_valid(
        "side-cars",
        "four side-cars with two sequences and two runs",
        lambda: file_of((random_side(ALL, (3, 2), 1, 2), None)),
        "side-cars-10",
    )
    subnormal = overwrite("0.k.channel_scale", 0, "0100")
    add_valid("side-car-subnormal-scale", "a subnormal channel scale", lambda: keys_file(ALL, subnormal), "side-cars-9", "side-cars-10")


def add_refused() -> None:
    def changed(name: str, rule: str, shows: str, change: Callable[[Parts], Any], error: str = "InvalidHeader") -> None:
        add(f"side-car-{name}", rule, error, shows, lambda: keys_file(ALL, change))

    add_header("side-car-of-raw", "side-cars-1", RAW, "codecs.0.channel_scale", "fp16", "a side-car for codec raw")
    changed("order", "side-cars-2", "outliers as the last key", move_to_end("codecs.0", "outliers"))
    for number, (codec, path, value) in enumerate(
        (
            (ALL, "channel_scale", "bf16"),
            (ALL, "raw_tokens", 16),
            (ALL, "outliers", {}),
            (ALL, "qjl.norm", "fp64"),
            (WIDE_BLOCKS, "channel_order", "u8"),
            (BLOCKS, "block_rotation", 8),
        )
    ):
        shows = f"{path} is {value!r} at head dim {codec.dim}"
        add_header(f"side-car-value-{number + 1}", "side-cars-3", codec, f"codecs.0.{path}", value, shows)
    changed("qjl-order", "side-cars-3", "the keys of qjl in the wrong order", move_to_end("codecs.0.qjl", "seed"))
    add_header("side-car-outliers-of-5-channels", "side-cars-4", GROUP, "codecs.0.outliers", {"fields": 1}, "outliers with 5 channels")
    add_header(
        "side-car-qjl-of-5-channels", "front-7", GROUP, "codecs.0.qjl", {"seed": 1, "norm": "fp16", "fields": 1}, "qjl with 5 channels"
    )
    add_header("side-car-blocks-of-6", "front-7", BLOCKS, "codecs.0.block_rotation", 6, "blocks of six channels")
    changed("no-entries", "container-11", "a side without entries", drop("layers.0.k.entries"))
    changed("entries-missing", "container-11", "entries without one of the streams", drop("layers.0.k.entries.outliers"))
    changed(
        "entries-limit", "container-29", "a number of entries above its limit", edit("layers.0.k.entries.outliers", 2**40), "LimitExceeded"
    )
    changed("entry-too-many", "side-cars-5", "one entry more than flags", add_an_outlier, "InvalidPayload")
    changed(
        "flag-of-outliers",
        "side-cars-5",
        "a number of flags that differs from the number of outliers",
        turn_first_flag("0.k.outlier_flags.0"),
        "InvalidPayload",
    )
    changed(
        "flag-of-raw-tokens",
        "side-cars-5",
        "a number of flags that differs from the number of raw tokens",
        turn_first_flag("0.k.raw_token_flags"),
        "InvalidPayload",
    )
    add_payload("side-car-scale-0", "side-cars-6", ALL, "channel_scale", 0, "0000", "a channel scale of zero")
    add_payload("side-car-flag-2", "side-cars-7", ALL, "raw_token_flags", 0, "02", "a flag of 2")
    add_payload("side-car-channel-twice", "side-cars-8", BLOCKS, "channel_order", 0, "0000", "a channel order with a duplicate channel")
    add_payload(
        "side-car-channel-beyond", "side-cars-8", BLOCKS, "channel_order", 13, "0c", "a channel order with a channel beyond the head dim"
    )
    for stream, value in (("outliers", "00fc"), ("qjl_norm", "017c"), ("channel_scale", "007c")):
        add_payload(f"side-car-not-finite-{stream.replace('_', '-')}", "front-13", ALL, stream, 0, value, f"{stream} is not finite")
    changed("entries-array", "container-11", "entries is an array", edit("layers.0.k.entries", ["outliers", "raw_tokens"]))
    changed("entries-first", "container-11", "entries as the first key of a side", entries_first)
    changed(
        "flag-2-counted", "side-cars-7", "a flag of 2, with as many raw tokens as the sum of flags", count_a_flag_twice, "InvalidPayload"
    )
    add_payload("side-car-sign-of-no-channel", "front-3", SIGNS, "qjl_signs.0", 1, "80", "a sign set for a channel that does not exist")
    add_payload("side-car-of-scales-not-finite", "front-13", SIGNS, "scales", 0, "007c", "a non-finite scale in a codec with a side-car")
    add_payload("side-car-flag-of-no-chunk", "front-4", ALL, "outlier_flags.0", 1, "04", "a flag set for a chunk that does not exist")


def add_positions() -> None:
    def two_sequences(codec: Codec, *changes: Callable[[Parts], Any]) -> bytes:
        return keys_file(codec, *changes, runs=(5,), tail=1, batch=2)

    every = create("scalar", 16, "k", b="2", channel_scale="fp16", outliers="3", qjl="fp16", raw_first="1", raw_dtype="fp16")
    of_groups = create("group", 8, "k", b="2", g="4", raw_first="1")
    for name, shows, make in (
        ("raw-positions", "tokens of two sequences stored unencoded, with their positions", lambda: two_sequences(POSITIONS)),
        ("raw-positions-bf16", "raw tokens in three runs of codec group", lambda: keys_file(of_groups, runs=(4, 5, 2), seed="1")),
        ("raw-positions-fp32", "raw tokens in binary32", lambda: two_sequences(create("angle", 4, n="8", raw_first="1", raw_dtype="fp32"))),
        ("raw-positions-and-others", "raw tokens combined with all other side-cars", lambda: two_sequences(every)),
        (
            "raw-positions-of-klt",
            "raw tokens with a codec that has a basis",
            lambda: keys_file(create("klt", 7, rows="fp16", raw_first="1"), runs=(5,)),
        ),
        ("raw-positions-none", "no raw tokens", lambda: keys_file(POSITIONS, lambda parts: with_positions(parts, []))),
        ("raw-positions-unused", "two positions and an unused one", lambda: two_sequences(POSITIONS, unused)),
    ):
        add_valid(f"side-car-{name}", shows, make, "side-cars-10")


def add_refused_positions() -> None:
    def changed(name: str, shows: str, words: list[list[int]], rule: str = "side-cars-13", **more: Any) -> None:
        def make() -> bytes:
            return keys_file(POSITIONS, lambda parts: with_positions(parts, words, **more), runs=(5,), batch=2)

        add(f"side-car-raw-positions-{name}", rule, "InvalidPayload", shows, make)

    changed("twice", "a token that is listed twice as raw", [[2, 0, 0, 1], [2, 0, 0, 1]])
    changed("of-sequences-descend", "descending sequences of a token", [[2, 0, 0, 1], [2, 0, 0, 0]])
    changed("descend", "descending positions", [[3, 0, 0, 0], [2, 0, 0, 1]])
    changed("beyond", "a token after the packed ones", [[6, 0, 0, 0]])
    changed("far-beyond", "a token index with more than 32 bits", [[1, 0, 1, 0]])
    changed("sequence", "a sequence beyond the batch", [[2, 0, 0, 2]])
    changed("unused-of-a-sequence", "an unused position with a sequence", [[2, 0, 0, 0], [0, 0, 0, 1]])
    changed("unused-of-a-sequence-alone", "an unused position with a sequence, and values of 0", [[2, 0, 0, 0], [0, 0, 0, 1]], used=1)
    changed("behind-unused", "a position after an unused one", [[0, 0, 0, 0], [2, 0, 0, 0]])
    changed("unused-with-a-value", "an unused position with nonzero values", [[2, 0, 0, 0], [0, 0, 0, 0]], last="0080")
    changed("too-many", "more values than positions", [[2, 0, 0, 0]], "side-cars-12", values=2)
    changed("too-few", "fewer values than positions", [[2, 0, 0, 0], [3, 0, 0, 0]], "side-cars-12", values=1)
    add_header("side-car-raw-positions-fp8", "side-cars-3", POSITIONS, "codecs.0.raw_positions", "fp8", "raw_positions is fp8")
    add_header(
        "raw-positions-not-required", "container-55", POSITIONS, "required", [], "raw positions without the feature that they require"
    )
    add_header(
        "raw-positions-required-of-none", "container-55", RAW, "required", ["raw-positions"], "the required feature without raw positions"
    )


def add_key_means() -> None:
    every = {"channel_scale": "fp16", "outliers": "3", "qjl": "fp16", "raw_first": "1", "raw_dtype": "fp16"}
    for name, shows, codec, runs in (
        ("key-mean", "8-bit means in a run of two pages and a run of part of a page", MEANS, (9, 3)),
        (
            "key-mean-4-bits",
            "4-bit means of a rotated head",
            create("octahedral", 12, "k", b="2", arrangement="direct", mean="16", mean_bits="4"),
            (20,),
        ),
        ("key-mean-odd-dim", "4-bit means with five channels", create("group", 5, "k", b="2", axis="channel", mean="8"), (8, 1)),
        ("key-mean-and-others", "key_mean combined with all other side-cars", create("scalar", 16, "k", b="2", mean="8", **every), (9, 2)),
        ("key-mean-of-trellis", "means of pages of 1,024 tokens", create("trellis", 8, "k", b="2", states="256", mean="1024"), (3,)),
        (
            "key-mean-of-blocks",
            "means with a codec that scales blocks of channels",
            create("minifloat", 20, element="e2m1", scales="e4m3", mean="32"),
            (2,),
        ),
    ):
        rules = "side-cars-10", "front-12"
        add_valid(f"side-car-{name}", shows, lambda c=codec, r=runs: keys_file(c, runs=r, batch=2, heads=3), *rules)
    values = overwrite("0.k.key_mean", 0, "00 80 ff 7f 01 81"), overwrite("0.k.key_mean_scale", 0, "0100")
    add_valid(
        "side-car-key-mean-ends",
        "the smallest and the largest code, and a subnormal scale",
        lambda: keys_file(MEANS, *values),
        "side-cars-10",
    )
    scales = overwrite("0.k.key_mean_scale", 0, "00 80 ff fb")
    shows = "a scale of negative zero, and the most negative scale"
    add_valid("side-car-key-mean-scales", shows, lambda: keys_file(MEANS, scales, heads=2), "side-cars-10")


def add_refused_key_means() -> None:
    for number, (codec, path, value) in enumerate(
        (
            (MEANS, "key_mean", "8"),
            (MEANS, "key_mean.tokens", 12),
            (MEANS, "key_mean.tokens", 4),
            (MEANS, "key_mean.tokens", 2048),
            (MEANS, "key_mean.bits", 6),
            (MEANS, "key_mean.bits", "8"),
            (create("group", 5, "k", b="2", axis="channel", mean="8"), "key_mean.bits", 4),
        )
    ):
        shows = f"{path} is {value!r} at head dim {codec.dim}"
        add_header(f"side-car-key-mean-value-{number + 1}", "side-cars-3", codec, f"codecs.0.{path}", value, shows)
    add(
        "side-car-key-mean-order",
        "side-cars-3",
        "InvalidHeader",
        "the keys of key_mean in the wrong order",
        lambda: keys_file(MEANS, move_to_end("codecs.0.key_mean", "tokens")),
    )
    add_header("side-car-key-mean-window", "container-15", MEANS, "layers.0.k.window", 12, "a window of one and a half pages")
    groups = create("group", 8, "k", b="2", g="4")
    means = {"tokens": 8, "bits": 8}
    add_header(
        "side-car-key-mean-of-groups",
        "side-cars-15",
        groups,
        "codecs.0.key_mean",
        means,
        "key_mean with codec group and groups of four tokens",
    )
    add_payload("side-car-key-mean-not-finite", "front-13", MEANS, "key_mean_scale", 0, "007c", "a non-finite scale of a mean")
    add(
        "side-car-key-mean-of-values",
        "side-cars-14",
        "InvalidHeader",
        "values with key_mean",
        lambda: change_file(keys_file(MEANS), as_values),
    )
    add_header("key-mean-not-required", "container-62", MEANS, "required", [], "key means without the feature that they require")
    add_header("key-mean-required-of-none", "container-62", RAW, "required", ["key-mean"], "the required feature without key means")


def as_values(parts: Parts) -> None:
    """Move the keys of the only layer to its values."""
    layer = parts.header["layers"][0]
    layer["k"], layer["v"] = None, layer["k"]
    for tensor in parts.header["tensors"]:
        tensor[0] = tensor[0].replace("0.k.", "0.v.")


def unused(parts: Parts) -> None:
    with_positions(parts, [[1, 0, 0, 1], [4, 0, 0, 0], [0, 0, 0, 0]])


def with_positions(parts: Parts, words: list[list[int]], values: int | None = None, last: str = "0000", used: int | None = None) -> None:
    """Add these raw positions to the keys. Used values are 1, unused values are 0, and the last value is ``last``."""
    count = len(words) if values is None else values
    side = parts.header["layers"][0]["k"]
    for name, rows in (("raw_positions", len(words)), ("raw_values", count)):
        side["entries"][name] = parts.header["tensors"][parts.tensor(f"0.k.{name}")][2][2] = rows
    size = math.prod(parts.header["tensors"][parts.tensor("0.k.raw_values")][2][3:])
    if used is None:
        used = sum(any(word) for word in words) if values is None else count
    filled = bytes.fromhex("003c") * size * used + bytes(2 * size * (count - used))
    parts.tensors[parts.tensor("0.k.raw_positions")] = b"".join(word.to_bytes(2, "little") for row in words for word in row)
    parts.tensors[parts.tensor("0.k.raw_values")] = filled if last == "0000" else filled[:-2] + bytes.fromhex(last)


def entries_first(parts: Parts) -> None:
    side = parts.header["layers"][0]["k"]
    parts.header["layers"][0]["k"] = {"entries": side.pop("entries"), **side}


def count_a_flag_twice(parts: Parts) -> None:
    flags, rows = parts.tensor("0.k.raw_token_flags"), parts.tensor("0.k.raw_tokens")
    shape = parts.header["tensors"][rows][2]
    parts.tensors[flags] = bytes([2, *bytes(len(parts.tensors[flags]) - 1)])
    shape[2] = parts.header["layers"][0]["k"]["entries"]["raw_tokens"] = 2
    parts.tensors[rows] = bytes(2 * math.prod(shape))


def add_an_outlier(parts: Parts) -> None:
    number = parts.tensor("0.k.outliers")
    parts.header["layers"][0]["k"]["entries"]["outliers"] += 1
    parts.header["tensors"][number][2][2] += 1
    parts.tensors[number] += bytes(8)


def turn_first_flag(name: str) -> Callable[[Parts], None]:
    """Return a change that inverts the first flag of a tensor."""

    def apply(parts: Parts) -> None:
        first, *rest = parts.tensors[parts.tensor(name)]
        parts.tensors[parts.tensor(name)] = bytes([first ^ 1, *rest])

    return apply
