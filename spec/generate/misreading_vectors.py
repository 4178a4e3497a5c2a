"""The conformance vectors that tell plausible misreadings of the pages apart, each of which agrees with all vectors elsewhere."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgpack
import torch

from kvpack.coding.bases import Basis
from kvpack.formats.klt import Klt
from spec.generate import klt_vectors, lossless_vectors, transform_vectors
from spec.generate.container_vectors import UNSUPPORTED, in_text, with_header
from spec.generate.invalid_vectors import RAW, Invalid, add, add_payload
from spec.generate.metadata_vectors import integer
from spec.generate.metadata_vectors import valid as add_metadata
from spec.generate.parameter_vectors import add_alone
from spec.generate.side_car_vectors import ALL
from spec.generate.state_vectors import BF16, DATA, FEATURE, record, state
from spec.generate.valid_vectors import add as add_valid
from spec.generate.valid_vectors import with_fields
from support.file_parts import Parts, bits, changed, compressed, edit, file_of, frame, one_side, random_side, raw_frame
from support.klt_bases import codec_of, random_basis
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LATER, UNKNOWN = "UnsupportedVersion", "UnknownCodec"
_BODIES = {0xC8: b"\x03x", 0xC9: b"\x03x", 0xDC: b"\xc0", 0xDD: b"\xc0", 0xDE: b"\xa1x\xc0", 0xDF: b"\xa1x\xc0"}
"""What follows the head of an extension type, an array or a map of one byte or entry, by the first byte."""


def add_all() -> None:
    for add_vectors in (
        add_news_in_other_forms,
        add_news_twice,
        add_front,
        add_states,
        add_codecs,
        add_angles,
        add_side_cars,
        add_words,
        add_klt,
        add_bases,
        add_transform,
    ):
        add_vectors()


def unsupported(name: str, rule: str, error: str, shows: str, make: Callable[[], bytes]) -> None:
    UNSUPPORTED[name] = Invalid(shows, rule, error, make)


def add_news_in_other_forms() -> None:
    """What is new counts in any form of msgpack, and after values of any type."""

    def feature(packed: bytes) -> bytes:
        entries = b"\x01\xc0\x81\xa1x\xa1y\xdb" + struct.pack(">I", 11) + b"new-feature"
        return packed.replace(b"\xa8required\x90", b"\xda\x00\x08required\xdd" + struct.pack(">I", 4) + entries)

    def codec(packed: bytes) -> bytes:
        head, tail = packed.split(b"\xa6codecs\x91")
        unknown = b"\xdf\x00\x00\x00\x01\xd9\x02id\xdb\x00\x00\x00\x09new-codec"
        return head + b"\xa6codecs\xdc\x00\x04\xc0\x91\xa2id" + unknown + tail

    shows = "format 2 as a signed integer of 64 bits, whose key has a length of its own, in a map of the longest form"
    number = b"\xd9\x06format\xd3" + struct.pack(">q", 2)
    form = lambda packed: b"\xdf\x00\x00\x00\x09" + packed[1:].replace(b"\xa6format\x01", number)  # noqa: E731
    unsupported("format-2-in-other-forms", "container-32", LATER, shows, lambda: with_header(form))
    shows = "a required feature in the longest form, after an integer, nil and a map"
    unsupported("required-feature-in-other-forms", "container-7", LATER, shows, lambda: with_header(feature))
    shows = "an unknown codec in the longest forms, after nil and an array"
    unsupported("codec-in-other-forms", "container-12", UNKNOWN, shows, lambda: with_header(codec))
    others = [1.5, True, False, -1, -40, -(2**40), *(msgpack.ExtType(3, b"x" * count) for count in (0, 1, 2, 4, 8, 16, 17))]
    long = ((0xC5, 2), (0xC6, 4), (0xDA, 2), (0xDB, 4), (0xC8, 2), (0xC9, 4), (0xDC, 2), (0xDD, 4), (0xDE, 2), (0xDF, 4))
    sized = b"".join(bytes([form]) + bytes(count - 1) + b"\x01" + _BODIES.get(form, b"x") for form, count in long)
    before = b"\xa4more" + msgpack.packb([*others, *[0] * len(long)])[: -len(long)] + sized + b"\xa4half\xca" + struct.pack(">f", 0.5)
    shows = "a required feature after values of every type"
    put = lambda packed: b"\x8b" + before + packed[1:]  # noqa: E731
    feature_named = edit("required", ["new-feature"])
    unsupported("required-feature-after-other-types", "container-7", LATER, shows, lambda: with_header(put, feature_named))
    shows = "a required feature in an array that says three, at whose first entry the header ends"
    cut = lambda packed: packed[: packed.index(b"\xa8required\x90")] + b"\xa8required\x93\xabnew-feature"  # noqa: E731
    unsupported("required-feature-in-a-cut-array", "container-7", LATER, shows, lambda: with_header(cut))
    shows = "a header that ends within the name of a feature, which is not told"
    add("msgpack-cut-in-a-feature", "container-10", "InvalidHeader", shows, lambda: with_header(lambda packed: cut(packed)[:-1]))
    shows = "a header that ends within the map of an unknown codec, which is not told"
    half = lambda packed: packed.split(b"\xa6codecs\x91")[0] + b"\xa6codecs\x91\x82\xa2id\xa9new-codec"  # noqa: E731
    add("msgpack-cut-in-a-codec", "container-10", "InvalidHeader", shows, lambda: with_header(half))
    shows = "a feature named by bytes, which are no string"
    named = lambda packed: packed.replace(b"\xa8required\x90", b"\xa8required\x91\xc4\x0bnew-feature")  # noqa: E731
    add("header-required-bytes", "container-11", "InvalidHeader", shows, lambda: with_header(named))
    shows = "the codec opaque, which is one of rows"
    unsupported("codec-opaque", "container-12", UNKNOWN, shows, lambda: one_side(RAW, opaque))


def opaque(parts: Parts) -> None:
    """Lists the codec of rows, which no side uses."""
    parts.header["codecs"].append({"id": "opaque", "dim": 3})


def add_news_twice() -> None:
    """The first of several equal keys counts, for what is new."""
    first: tuple[tuple[str, str, str, bytes, bytes, bytes], ...] = (
        ("format-2", "container-32", LATER, b"\xa6format", b"\x02", b"\xc0"),
        ("required-feature", "container-7", LATER, b"\xa8required", b"\x91\xabnew-feature", b"\xc0"),
        ("codec", "container-12", UNKNOWN, b"\xa6codecs", b"\x91\x81\xa2id\xa9new-codec", b"\xc0"),
    )
    for name, rule, error, key, new, other in first:
        what = key[1:].decode()
        shows = f"{what} twice, of which the first is new"
        unsupported(
            f"{name}-first-of-two", rule, error, shows, lambda k=key, n=new: with_header(lambda packed: b"\x8a" + k + n + packed[1:])
        )
        for kind, value in (("known", b"\x01" if what == "format" else b"\x90"), ("nil", other)):
            shows = f"{what} twice, first {kind}, so that the second, which is new, does not count"
            make = lambda k=key, n=new, v=value: with_header(lambda packed: b"\x8b" + k + v + k + n + packed[1:])  # noqa: E731
            add(f"msgpack-{what}-{kind}-first-of-two", "container-10", "InvalidHeader", shows, make)
    ids = (("new-codec", "group"), ("group", "new-codec"), (1, "new-codec"))
    for number, pair in enumerate(ids):
        both = b"\x82" + b"".join(b"\xa2id" + msgpack.packb(one) for one in pair)
        make = lambda b=both: with_header(lambda packed: packed.replace(b"\xa6codecs\x91", b"\xa6codecs\x92" + b))  # noqa: E731
        if not number:
            shows = "the id of a codec twice, of which the first is unknown"
            unsupported("codec-first-of-two-ids", "container-12", UNKNOWN, shows, make)
        else:
            shows = f"the id of a codec twice, {pair[0]!r} and an unknown one, which does not count"
            add(f"msgpack-id-twice-{number}", "container-10", "InvalidHeader", shows, make)


def add_front() -> None:
    shows = "another dtype of kvpack.header in the JSON header, so that its format 2 is not looked at"
    add("json-header-dtype-of-a-later-format", "container-5", "InvalidHeader", shows, dtype_of_a_later_format)
    shows = "the major number begins with a zero, and would be 2"
    add("json-header-version-02", "container-5", "InvalidHeader", shows, lambda: in_text('"kvpack":"1 ', '"kvpack":"02 '))
    size = len(msgpack.packb(Parts.of(in_text("", "")).header))
    shows = "kvpack.header has a length of eight digits"
    entry, longer = (f'"shape":[{n}],"data_offsets":[0,{n}]' for n in (size, 12345678))
    add("json-header-length-of-8-digits", "container-5", "InvalidHeader", shows, lambda: in_text(entry, longer))
    for width, form in ((16, ">h"), (32, ">i"), (64, ">q")):
        old, new = b"\xa5start\x03", b"\xa5start" + bytes([0xD0 + width.bit_length() - 4]) + struct.pack(form, 2 ** (width // 2))
        shows = f"an integer in the signed form of {width} bits, which no unsigned form is shorter than"
        make = lambda o=old, n=new: with_header(lambda packed: packed.replace(o, n))  # noqa: E731
        add(f"msgpack-int-{width}", "container-10", "InvalidHeader", shows, make)
    shows = "tail_dtype of a side without a tail is no dtype"
    add(
        "header-tail-dtype-without-a-tail",
        "container-11",
        "InvalidHeader",
        shows,
        lambda: one_side(RAW, edit("layers.0.k.tail_dtype", "fp8"), tail=0),
    )
    add_valid(
        "zstd-unused-bit",
        "a frame whose unused bit is set",
        lambda: one_side(RAW, frame(lambda raw: raw_frame(raw, "30 18")), runs=(4,), tail=0, heads=1),
    )
    shows = "a frame of a single segment, whose content of a few bytes more than 8 MiB is its window"
    add("zstd-window-of-the-content", "container-26", "InvalidPayload", shows, wide_segment)
    names = integer("\uffff", 1) + integer("\U00010000", 2)
    add_metadata("beyond-ascii", "names by code points, which are not in the order of UTF-16", names)


def dtype_of_a_later_format() -> bytes:
    data = one_side(RAW, edit("format", 2))
    right = b'"kvpack.header":{"dtype":"U8"'
    assert data.count(right) == 1
    return data.replace(right, right.replace(b"U8", b"I8"))


def wide_segment() -> bytes:
    """A side of zeros in blocks that repeat a byte, and in stored ones, so that the ratio is within its limit."""
    codec = create("raw", 1024, dtype="bf16")
    size = 2**23 + 2048
    blocks, left = b"", size
    for kind, length in [(1, 2**17)] * 63 + [(0, 33000)]:
        blocks += (length << 3 | kind << 1).to_bytes(3, "little") + bytes(length if kind == 0 else 1)
        left -= length
    blocks += (left << 3 | 3).to_bytes(3, "little") + b"\0"
    stored = bytes.fromhex("28b52ffd a0") + size.to_bytes(4, "little") + blocks
    return one_side(codec, frame(lambda raw: stored), runs=(size // 2048,), tail=0, heads=1)


def add_states() -> None:
    """Records whose fault the list of tensors does not show."""

    def alone(name: str, rule: str, shows: str, records: Sequence[bytes], listed: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        def make() -> bytes:
            parts = Parts.of(file_of((None, None), states=[{"a": state("BF16", 1, 2)}]))
            parts.header["ignorable"][FEATURE] = b"".join(records)
            template = parts.header["tensors"][0]
            parts.header["tensors"] = [[where, "BF16", list(shape), "none", 0, template[5]] for where, shape in listed]
            parts.tensors = [bytes(2 * shape[0] * shape[1]) for _, shape in listed]
            return parts.joined()

        add(f"layer-state-{name}-alone", rule, "InvalidHeader", f"{shows}; the tensors are those that records would have", make)

    one, two = (1, 2), (2, 2)
    for name, text, listed in (("zero-within-a-name", "a\0b", "a"), ("dash", "a-b", "a-b"), ("line-feed", "a\n", "a\n")):
        alone(f"of-a-record-with-{name}", "container-43", f"the name {text!r}", [record(0, text, BF16, *one)], [(f"0.state.{listed}", one)])
    shows = "a state of a layer that the file does not have"
    alone("of-a-second-layer", "container-44", shows, [record(0, "a", BF16, *one), record(1, "a", BF16, *one)], [("0.state.a", one)])
    for name, shows, names in (("names-out-of-order", "names that do not ascend", "ba"), ("named-twice", "a name that occurs twice", "aa")):
        alone(name, "container-45", shows, [record(0, n, BF16, *one) for n in names], [(f"0.state.{n}", one) for n in names])
    shows = "states of one and of two sequences in a layer without sides"
    listed_two = [("0.state.a", one), ("0.state.b", two)]
    alone("of-two-numbers-of-sequences", "container-46", shows, [record(0, "a", BF16, *one), record(0, "b", BF16, *two)], listed_two)
    shows = "the feature is named and has no data, and there is no state"
    add("layer-state-without-data-alone", "container-41", "InvalidHeader", shows, lambda: one_side(RAW, edit("required", [FEATURE])))
    shows = "the feature has data and is not named, and there is no tensor of a state"
    data = edit(DATA.rpartition(".")[0], {FEATURE: record(0, "a", BF16, *one)})
    add("layer-state-without-the-name-alone", "container-41", "InvalidHeader", shows, lambda: one_side(RAW, data))
    wide = torch.zeros(1, 2**16 + 1, dtype=torch.uint8)
    wide[0, :400] = state("U8", 1, 400)
    shows = "a size above the largest number of sequences"
    make = lambda: changed(file_of((None, None), states=[{"a": wide}]), frame(compressed, "0.state.a"))  # noqa: E731
    add_valid("layer-state-of-65537-values", shows, make, "container-47")


def add_codecs() -> None:
    scalar = create("scalar", 4, b="2", rotation="none")
    ends = struct.pack("<2f", -0.0, 1.0)
    shows = "a table from -0 to 1"
    add_valid("scalar-table-of-0-and-1", shows, lambda: one_side(scalar, edit("codecs.0.magnitude_table", ends), tail=0), "scalar-7")
    single = create("scalar", 4, b="1", rotation="none")
    for name, value in (("nan", float("nan")), ("above-1", 1.5), ("negative", -0.5)):
        table = {"magnitude_table": struct.pack("<f", value)}
        add_alone(f"scalar-single-magnitude-{name}", "scalar-4", single, table, f"a table of the single magnitude {value}")
    high = create("scalar", 16, b="2", high="3", rotation="none")
    add_alone("scalar-none-high", "scalar-5", high, {"high_channels": bytes(2)}, "no channel is high")
    for codec in (create("transform", 256, chunk="256"), create("lossless", 256, dtype="bf16", chunk="256")):
        shows = f"a codec {codec.id} of 256 tokens of 256 channels, which no side uses"
        make = lambda c=codec: one_side(RAW, lambda parts: parts.header["codecs"].append({"id": c.id, **c.params()}))  # noqa: E731
        add_valid(f"{codec.id}-largest-chunk", shows, make)


def add_angles() -> None:
    """Codecs of angles: bins beyond the last in both arrangements, pairs at the ends of levels, and numbers of bits."""
    norms = create("angle", 6, n="8", norm="fp32", rotation="none")
    add_alone("angle-norm-bits-of-fp32", "angle-2", norms, {"norm_bits": 4}, "norm_bits is 4 and norms are fp32")
    direct = with_fields(create("angle", 6, n="100", norm="linear8", arrangement="direct", rotation="none"), 1)
    shows = "a bin that is not below bins, within its base, of the arrangement direct"
    add_payload("digit-of-a-direct-bin", "front-2", direct, "symbol.0", 0, "6400", shows)
    for dim, bits_ in ((18, "2.2.2"), (26, "1.1.1.1.1")):
        codec = create("polar", dim, b=bits_, rotation="none")
        shows = f"head dim {dim}: an odd number of radii, of which the last has fewer channels and passes on"
        add_valid(f"polar-dim-{dim}", shows, lambda c=codec: one_side(c, tail=0), "polar-5", "front-12")
    two = create("polar", 4, b="1.1", rotation="none")
    ends = struct.pack("<fI", -0.0, 0x3FC90FDA)
    shows = "a table from -0 to the largest number that is not above half of pi"
    add_valid("polar-table-of-0-and-half-pi", shows, lambda: one_side(two, edit("codecs.0.angle_table", ends), tail=0), "polar-5")
    one = create("polar", 2, b="1", rotation="none")
    for name, changes, shows in (
        ("bits-9", {"bits": "9"}, "bits is 9"),
        ("bits-02", {"bits": "02"}, "bits is 02"),
        ("bits-with-a-line-feed", {"bits": "2\n"}, "bits ends with a line feed"),
        ("dim-3", {"dim": 3}, "dim is 3"),
        ("two-levels-of-one-pair", {"bits": "1.1"}, "two levels of two channels"),
    ):
        add_alone(f"polar-pair-{name}", "polar-2", one, {**changes, "fields": {"angles1": 1}}, shows)


def add_side_cars() -> None:
    add_payload("side-car-scale-negative", "side-cars-6", ALL, "channel_scale", 0, "00bc", "a channel scale of -1")
    codec = create("group", 12, b="2", g="4", axis="channel", block_rotation="12")
    shows = "one block of all channels, of order 12"
    add_valid("side-car-block-of-the-head", shows, lambda: one_side(codec, tail=0), "side-cars-10", "front-8")
    add(
        "side-car-raw-token-too-many",
        "side-cars-5",
        "InvalidPayload",
        "an entry of raw tokens more than flags",
        lambda: one_side(ALL, add_a_raw_token),
    )


def add_a_raw_token(parts: Parts) -> None:
    number = parts.tensor("0.k.raw_tokens")
    shape = parts.header["tensors"][number][2]
    shape[2] += 1
    parts.header["layers"][0]["k"]["entries"]["raw_tokens"] += 1
    parts.tensors[number] += bytes(2 * shape[3] * shape[4])


def add_words() -> None:
    """Coders that no check of sums or last states stops."""
    codec = create("lossless", 40, dtype="bf16", chunk="16")
    shows = "a table that sums to 4096 + 65536, which is 4096 in 16 bits"

    def wrapped(parts: Parts) -> None:
        table = [0] * 256
        table[126], table[127] = 4096, 65535
        table[128] = 1
        parts.tensors[parts.tensor("0.k.frequencies")] = struct.pack("<256H", *table)

    add("lossless-frequencies-of-17-bits", "rans-1", "InvalidPayload", shows, lambda: one_side(codec, wrapped, tail=0, heads=1))
    table = {126: 256, 127: 1, 128: 3839}
    coded = lossless_vectors.changed_table(codec, lambda _: [table.get(symbol, 0) for symbol in range(256)])

    def without(counts: list[int], stored: list[int]) -> None:
        assert (counts, stored) == ([1], [0])
        counts[0] = 0
        stored.clear()

    shows = "a chunk without the word of 0 that it needs, whose states end right after one"
    make = lambda: changed(coded([0x3F80, *[0x3F00] * 39]), lossless_vectors.words(without))  # noqa: E731
    add("lossless-word-of-0-missing", "rans-3", "InvalidPayload", shows, make)


def add_klt() -> None:
    small = Klt.of(2, bytes(32), 0, "k", b"\1", "fp16", "fp16")

    def subnormal(parts: Parts) -> None:
        """Mean, matrix and table are subnormal in the first row of runs, or the gain is, and what they meet is large."""
        rows, gain = parts.tensor("0.k.rows"), parts.tensor("0.k.gain")
        size = len(parts.tensors[rows]) // 2
        values = [0.0] * size
        values[2:6] = [3.0, -20000.0, 5 * 2.0**-24, -7 * 2.0**-20]
        values[8:10] = [-(2.0**-24), 901 * 2.0**-24]
        values[0:2] = [-(2.0**-22), 3 * 2.0**-24]
        parts.tensors[rows] = struct.pack(f"<{size}e", *values)
        parts.tensors[gain] = struct.pack("<2e", 1.0, 3 * 2.0**-24)

    shows = "subnormal means, rows, tables and gains"
    add_valid("klt-subnormal", shows, lambda: one_side(small, subnormal, tail=0, heads=1), "front-1", "klt-8")
    basis = Basis.of_bytes(klt_vectors.two_layers())
    gained, odd = codec_of(basis, 0, "v", b"\2\1"), replace(codec_of(basis, 1, "v", b"\1", "none"), fields=(("codes_1", 8),))
    for name, rule, codec, heads, change, shows in (
        ("gain-nan", "front-13", gained, 2, bits("0.k.gain", 2, "007e"), "a gain that is not finite"),
        ("field-without-a-symbol", "front-3", odd, 1, bits("0.k.codes_1.0", 0, "80"), "a code in a field without a column"),
    ):
        make = lambda c=codec, h=heads, b=change: one_side(c, b, tail=0, heads=h)  # noqa: E731
        add(f"klt-{name}-without-the-basis", rule, "InvalidPayload", f"{shows}, and the reader is given no basis", make)


def add_bases() -> None:
    def last_nan(parts: Parts) -> None:
        number = parts.tensor("0.k.values")
        parts.tensors[number] = parts.tensors[number][:-2] + b"\x00\x7e"

    shows = "a NaN in the last row of a basis, one of those that have no meaning"
    make = lambda: changed(klt_vectors.two_layers(), last_nan)  # noqa: E731
    add("basis-nan-after-the-tables", "basis-4", "InvalidPayload", shows, make)

    def refused(name: str, rule: str, shows: str, change: Callable[[dict[str, Any]], Any]) -> None:
        make = lambda: changed(frames_of_heads(), transform_vectors.states(change))  # noqa: E731
        add(f"basis-frames-{name}", rule, "InvalidHeader", shows, make)

    shows = "a side of four heads by the rows of two"
    codec = codec_of(Basis.of_bytes(klt_vectors.two_layers()), 0, "k", b"\1", "none")
    make = lambda: one_side(codec, tail=0, heads=4)  # noqa: E731
    add("klt-basis-of-half-the-heads", "klt-7", "InvalidHeader", shows, make, basis=klt_vectors.BASIS)
    shows = "frames of heads with scales of a layer"
    refused("of-both-scopes", "basis-9", shows, lambda found: found.update({"v.scales": ("U8", (1, 1, 6))}))
    tables = "table.frequencies", "table.values"
    refused("without-tables", "basis-10", "frames, and no tables", lambda found: [found.pop(name) for name in tables])
    for name in tables:
        shows = f"{name} alone, in a basis without frames"
        table = state("U16", 1, 1, 4) if name == tables[0] else torch.zeros(1, 1, 3, dtype=torch.float16)
        make = lambda t=table, n=name: changed(rows_alone({n: t}), named_basis)  # noqa: E731
        add(f"basis-{name.replace('.', '-')}-alone", "basis-10", "InvalidHeader", shows, make)


def frames_of_heads() -> bytes:
    """A basis of one layer with values of two heads."""
    return random_basis({(0, "v"): (2, 3)}, 1, scopes={(0, "v"): "head"})


def rows_alone(states: dict[str, torch.Tensor]) -> bytes:
    """The rows of a basis of one side, with states."""
    return file_of((random_side(create("raw", 3, dtype="fp16"), (175,), 0, 1, 1), None), states=[states])


def named_basis(parts: Parts) -> None:
    parts.header["required"] = ["basis", *parts.header["required"]]


def add_transform() -> None:
    for name, rule, shows, change in (
        ("state-low", "rans-2", "a first state below 2^16", bits("0.k.states", 2, "0000")),
        ("columns-above", "transform-9", "4 columns of a head of 3", bits("0.k.columns", 2, "0400")),
    ):
        make = lambda c=change: changed(transform_vectors.one_value(), c)  # noqa: E731
        add(f"transform-{name}-without-the-basis", rule, "InvalidPayload", f"{shows}, and the reader is given no basis", make)
    shows = "a layer of four heads of 2 channels, by the frame of one of two heads of 4"
    of_layer = replace(transform_vectors.codec(0, "k"), dim=2, source=None)
    add(
        "transform-basis-of-as-many-channels",
        "transform-7",
        "InvalidHeader",
        shows,
        lambda: transform_vectors.empty(of_layer, 4),
        basis=transform_vectors.BASIS,
    )
