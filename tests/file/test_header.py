"""Tests of the header: round trips, and every rule refuses violations by name."""

from __future__ import annotations

import copy
import dataclasses
import re
import struct
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvpack.file import limits
from kvpack.file.front import pack_header, parse_header
from kvpack.file.header import Contents, Header, LayerEntry, SideEntry, TensorEntry, layout_bytes, list_features, side_tensors
from kvpack.file.header_scan import unknown_features
from kvpack.file.limits import MAX_BINARY_BYTES, MAX_HEADER_BYTES, MAX_NAMES, MAX_STRING_BYTES, MAX_TOKENS
from kvpack.formats.errors import InvalidHeader, KvpackError, LimitExceeded, UnknownCodec, UnsupportedVersion
from kvpack.formats.key_mean import KeyMean
from kvpack.formats.streams import Layout
from support.small_files import KINDS, contents, header_map, side
from support.strategies import CASES, codecs, create

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import DrawFn

SPECIFICATION = Path(__file__).parents[2] / "spec" / "container.md"


def with_tensors(made: Contents) -> Header:
    tensors = (
        TensorEntry(name, layout.dtype, layout.shape, "none", layout_bytes(layout), bytes(16)) for name, layout in made.layouts.items()
    )
    return Header.from_contents(made, tuple(tensors))


@st.composite
def any_contents(draw: DrawFn) -> Contents:
    listed = draw(st.lists(st.sampled_from(sorted(CASES)).flatmap(codecs), min_size=1, max_size=3))
    layers = []
    for _ in range(draw(st.integers(0, 4))):
        batch, tokens = draw(st.integers(1, 3)), draw(st.integers(0, 300))
        sides = []
        for name in "kv":
            # Values have no means of keys.
            allowed = [number for number, codec in enumerate(listed) if name == "k" or codec.sidecar(KeyMean) is None]
            if not allowed:
                sides.append(None)
                continue
            index = draw(st.sampled_from(allowed))
            group, layouts = listed[index].group_tokens, listed[index].layout(1, 1, 0)
            tail = draw(st.integers(0, tokens))
            several = group > 1 or any(layout.per == "run" for layout in layouts.values())
            cut = draw(st.integers(0, tokens - tail)) if several else 0
            rows = tuple((name, draw(st.integers(0, MAX_TOKENS))) for name, layout in layouts.items() if layout.per == "entry")
            runs = tuple(run for run in (cut, tokens - tail - cut) if run)
            dtype, window = draw(st.sampled_from(("bf16", "fp16", "fp32"))), group * draw(st.integers(0, 3))
            entry = side(index, batch=batch, heads=draw(st.integers(1, 9)), runs=runs, tail=tail, tail_dtype=dtype, window=window)
            sides.append(draw(st.sampled_from((dataclasses.replace(entry, entries=rows), None))))
        layers.append(LayerEntry(*sides))
    names = st.text(max_size=9)
    return Contents(
        codecs=tuple(listed),
        layers=tuple(layers),
        model=draw(st.dictionaries(names, names, max_size=3)),
        recipe=draw(names),
        start=draw(st.integers(0, MAX_TOKENS)),
        required=tuple(list_features(listed)),
        ignorable=draw(st.dictionaries(names, st.binary(max_size=9), max_size=3)),
    )


@pytest.mark.scenario
@given(any_contents())
def test_parsed_headers_equal_packed_headers(made: Contents) -> None:
    header = with_tensors(made)
    assert parse_header(pack_header(header)) == header


def test_the_order_of_names_does_not_change_the_bytes() -> None:
    first = Contents(codecs=(), layers=(), model={"a": "1", "b": "2"}, ignorable={"c": b"3", "d": b"4"})
    other = Contents(codecs=(), layers=(), model={"b": "2", "a": "1"}, ignorable={"d": b"4", "c": b"3"})
    assert pack_header(with_tensors(first)) == pack_header(with_tensors(other))


def test_fields_match_the_specification() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", SPECIFICATION.read_text().split("## Fields")[1].split("\n## ")[0], re.MULTILINE)
    top = header_map()
    sides = [field.name for field in dataclasses.fields(SideEntry)]
    assert rows == [*top, *sides, *(field.name for field in dataclasses.fields(TensorEntry))]


def test_limits_match_the_specification() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", SPECIFICATION.read_text(), re.MULTILINE)
    assert {name: int(value.replace(",", "")) for name, value in rows} == {
        name: value for name, value in vars(limits).items() if name.startswith("MAX_")
    }


def test_every_run_starts_a_new_row_of_token_groups() -> None:
    codec = create("group", 4, "k", b="2", g="16", token_scale="fp16")
    found = side_tensors(codec, side(0, runs=(1, 16, 17), heads=2, tail=5), "9.k.")
    assert found == {
        "9.k.codes.0": Layout("U16", (1, 2, 34, 1)),
        "9.k.scales": Layout("F16", (1, 2, 1 + 1 + 2, 4, 2), 16),
        "9.k.token_scale": Layout("F16", (1, 1, 34)),
        "9.k.tail": Layout("BF16", (1, 2, 5, 4)),
    }


def test_a_side_without_packed_tokens_still_has_its_streams() -> None:
    codec = create("group", 4, "k", b="2", g="16")
    assert {name: layout.shape for name, layout in side_tensors(codec, side(0, 0)).items()} == {
        "codes.0": (1, 1, 0, 1),
        "scales": (1, 1, 0, 4, 2),
    }


def put(*path: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a function that sets a value of a header. ``path`` contains the keys that lead to it, followed by the value."""

    def change(top: Any) -> None:
        *places, last, value = path
        for place in places:
            top = top[place]
        top[last] = value

    return change


def remove(*path: Any) -> Callable[[dict[str, Any]], Any]:
    def change(top: Any) -> None:
        *places, last = path
        for place in places:
            top = top[place]
        del top[last]

    return change


def reorder(top: dict[str, Any]) -> None:
    top["recipe"] = top.pop("recipe")


K, V, T = ("layers", 0, "k"), ("layers", 0, "v"), ("tensors", 2)

BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], type[KvpackError], str]] = {
    "newer format": (put("format", 2), UnsupportedVersion, r"written by a newer kvpack in format 2, but this one reads format 1"),
    "older format": (put("format", 0), InvalidHeader, r"^format is 0"),
    "format of another type": (put("format", True), InvalidHeader, r"^format is of type bool, expected int"),
    "no format": (remove("format"), InvalidHeader, r"^format is of type NoneType"),
    "required feature": (put("required", ["pages"]), UnsupportedVersion, r"needs the feature 'pages'"),
    "required of another type": (put("required", {}), InvalidHeader, r"^required is of type dict"),
    "required number": (put("required", [1]), InvalidHeader, r"^required\[0\] is of type int"),
    "too many required": (put("required", ["a"] * (MAX_NAMES + 1)), UnsupportedVersion, r"needs the feature 'a'"),
    "unknown key": (put("extra", 1), InvalidHeader, r"has the keys .*extra, expected format"),
    "key missing": (remove("recipe"), InvalidHeader, r"has the keys .*, expected format"),
    "keys in another order": (reorder, InvalidHeader, r"has the keys"),
    "ignorable string": (put("ignorable", {"a": "b"}), InvalidHeader, r"^ignorable\['a'\] is of type str, expected bytes"),
    "ignorable list": (put("ignorable", []), InvalidHeader, r"^ignorable is of type list"),
    "model number": (put("model", {"name": 1}), InvalidHeader, r"^model\['name'\] is of type int"),
    "model key of bytes": (put("model", {b"name": "a"}), InvalidHeader, r"^a name in model is of type bytes"),
    "recipe number": (put("recipe", 1), InvalidHeader, r"^recipe is of type int"),
    "start below": (put("start", -1), InvalidHeader, r"^start is -1, expected at least 0"),
    "start above": (put("start", 2**40), LimitExceeded, r"^start is 1099511627776, expected at most 1099511627775"),
    "codecs map": (put("codecs", {}), InvalidHeader, r"^codecs is of type dict"),
    "codec list": (put("codecs", 0, []), InvalidHeader, r"^codecs\[0\] is of type list"),
    "unknown codec": (put("codecs", 1, "id", "fractal"), UnknownCodec, r"codec 'fractal' is unknown, expected one of .*group"),
    "codec without id": (remove("codecs", 1, "id"), InvalidHeader, r"^codecs\[1\]\.id is of type NoneType"),
    "codec id list": (put("codecs", 1, "id", []), InvalidHeader, r"^codecs\[1\]\.id is of type list"),
    "codec parameter unknown": (
        put("codecs", 0, "extra", 1),
        InvalidHeader,
        r"^codecs\[0\]: codec group: unknown parameters extra",
    ),
    "codec parameter missing": (remove("codecs", 0, "bits"), InvalidHeader, r"^codecs\[0\]: .*missing parameters bits"),
    "codec parameter of bytes": (put("codecs", 0, b"extra", 1), InvalidHeader, r"^a key of codecs\[0\] is of type bytes"),
    "codec parameter out of range": (
        put("codecs", 0, "bits", 9),
        InvalidHeader,
        r"^codecs\[0\]: codec group: bits is 9, expected 1 to 8",
    ),
    "codec parameter of another type": (
        put("codecs", 0, "bits", True),
        InvalidHeader,
        r"^codecs\[0\]: codec group: bits is of type bool, expected int",
    ),
    "layers map": (put("layers", {}), InvalidHeader, r"^layers is of type dict"),
    "layer list": (put("layers", 0, []), InvalidHeader, r"^layers\[0\] is of type list"),
    "key to obey": (put("a\x1b[2J", 1), InvalidHeader, r"has the keys .*'a\\x1b\[2J', expected format"),
    "layer key": (put("layers", 0, "q", None), InvalidHeader, r"^layers\[0\] has the keys k, v, q"),
    "side list": (put(*K, []), InvalidHeader, r"^layers\[0\]\.k is of type list"),
    "side key missing": (remove(*K, "tail"), InvalidHeader, r"^layers\[0\]\.k has the keys"),
    "codec index": (put(*K, "codec", 2), InvalidHeader, r"^layers\[0\]\.k\.codec is 2, but the file has 2 codecs"),
    "codec index above the most codecs": (put(*K, "codec", 4096), InvalidHeader, r"^layers\[0\]\.k\.codec is 4096, but the file has 2"),
    "codec index of 64 bits": (put(*K, "codec", 2**64 - 1), InvalidHeader, r"^layers\[0\]\.k\.codec is 18446744073709551615, but the file"),
    "no batch": (put(*K, "batch", 0), InvalidHeader, r"^layers\[0\]\.k\.batch is 0, expected at least 1"),
    "batch above the limit": (put(*K, "batch", 65537), LimitExceeded, r"^layers\[0\]\.k\.batch is 65537, expected at most 65536"),
    "batch of another type": (put(*K, "batch", 1.0), InvalidHeader, r"^layers\[0\]\.k\.batch is of type float"),
    "heads above the limit": (put(*V, "heads", 65537), LimitExceeded, r"^layers\[0\]\.v\.heads is 65537"),
    "batches differ": (put(*K, "batch", 2), InvalidHeader, r"^layers\[0\]\.k\.batch is 2, but v\.batch is 1"),
    "tokens differ": (put(*K, "tail", 3), InvalidHeader, r"^layers\[0\]\.k\.tokens is 23, but v\.tokens is 22"),
    "runs number": (put(*K, "runs", 20), InvalidHeader, r"^layers\[0\]\.k\.runs is of type int"),
    "long runs": (put(*K, "runs", [1] * (2**17 + 1)), LimitExceeded, r"limits: 131073 exceeds max_array_len"),
    "empty run": (put(*K, "runs", [0, 20]), InvalidHeader, r"^layers\[0\]\.k\.runs\[0\] is 0, expected at least 1"),
    "run above the limit": (put(*K, "runs", [2**40]), LimitExceeded, r"^layers\[0\]\.k\.runs\[0\] is 1099511627776"),
    "runs above the limit": (put(*K, "runs", [2**39, 2**39]), LimitExceeded, r"^layers\[0\]\.k\.tokens is 1099511627778"),
    "runs of single tokens": (put(*V, "runs", [3, 17]), InvalidHeader, r"^layers\[0\]\.v\.runs has 2 entries, .* at most 1"),
    "tail dtype": (put(*K, "tail_dtype", "fp8"), InvalidHeader, r"^layers\[0\]\.k\.tail_dtype is 'fp8', expected one of bf16, fp16, fp32"),
    "tail dtype list": (put(*K, "tail_dtype", []), InvalidHeader, r"^layers\[0\]\.k\.tail_dtype is of type list"),
    "tail below": (put(*K, "tail", -1), InvalidHeader, r"^layers\[0\]\.k\.tail is -1, expected at least 0"),
    "tail above the limit": (put(*K, "tail", 2**40), LimitExceeded, r"^layers\[0\]\.k\.tail is 1099511627776, expected at most"),
    "window": (put(*K, "window", 33), InvalidHeader, r"^layers\[0\]\.k\.window is 33, expected a multiple of .* 16"),
    "tensors map": (put("tensors", {}), InvalidHeader, r"^tensors is of type dict"),
    "a tensor missing": (remove(*T), InvalidHeader, r"^tensors has 6 entries, expected 7 from the layers and codecs"),
    "tensor map": (put(*T, {}), InvalidHeader, r"^tensors\[2\] is \{\}, expected \[name, dtype"),
    "tensor short": (put(*T, ["a"]), InvalidHeader, r"^tensors\[2\] is \['a'\], expected"),
    "tensor name": (put(*T, 0, "0.k.tali"), InvalidHeader, r"^tensors\[2\]\.name is '0\.k\.tali', but the layers .* imply '0\.k\.tail'"),
    "tensor dtype": (put(*T, 1, "F16"), InvalidHeader, r"^tensors\[2\]\.dtype is 'F16', but the layers and codecs imply 'BF16'"),
    "tensor shape": (put(*T, 2, [1, 1, 4, 2]), InvalidHeader, r"^tensors\[2\]\.shape is \(1, 1, 4, 2\), but the layers and codecs imply"),
    "tensor shape of booleans": (
        put(*T, 2, [True, 1, 2, 4]),
        InvalidHeader,
        r"^tensors\[2\]\.shape is \[True, 1, 2, 4\], expected integers",
    ),
    "tensor shape string": (put(*T, 2, "a"), InvalidHeader, r"^tensors\[2\] is "),
    "filter": (put(*T, 3, "lz4"), InvalidHeader, r"^tensors\[2\]\.filter is 'lz4', expected one of none, zstd"),
    "stored bytes": (
        put(*T, 4, 15),
        InvalidHeader,
        r"^tensors\[2\]\.stored_bytes is 15, expected 16 for the shape without a filter \(0\.k\.tail\)",
    ),
    "stored bytes negative": (put(*T, 4, -1), InvalidHeader, r"^tensors\[2\]\.stored_bytes is -1, expected at least 0"),
    "stored bytes above the limit": (put(*T, 4, 2**60), LimitExceeded, r"^tensors\[2\]\.stored_bytes is \d+, expected at most \d+$"),
    "expansion": (
        lambda top: top["tensors"][2].__setitem__(slice(3, 5), ["zstd", 0]),
        LimitExceeded,
        r"^tensors\[2\]\.stored_bytes is 0 for 16 decoded",
    ),
    "digest length": (put(*T, 5, bytes(15)), InvalidHeader, r"^tensors\[2\]\.digest has 15 bytes, expected 16"),
    "digest string": (put(*T, 5, "0" * 16), InvalidHeader, r"^tensors\[2\]\.digest is of type str"),
    "long string": (
        put("recipe", "a" * (MAX_STRING_BYTES + 1)),
        LimitExceeded,
        r"not msgpack within the format's limits: 4097 exceeds max_str_len",
    ),
    "long binary": (put("ignorable", {"a": bytes(MAX_BINARY_BYTES + 1)}), LimitExceeded, r"limits: 65537 exceeds max_bin_len"),
    "long map": (put("model", {str(i): "" for i in range(MAX_NAMES + 1)}), LimitExceeded, r"limits: 257 exceeds max_map_len"),
    "nested map": (put("model", {"a": {"a": {}}}), InvalidHeader, r"^model\['a'\] is of type dict"),
    "extension type": (put("model", msgpack.ExtType(5, b"")), InvalidHeader, r"^model is of type ExtType"),
    "long extension type": (
        put("model", msgpack.ExtType(5, bytes(MAX_BINARY_BYTES + 1))),
        InvalidHeader,
        r"limits: 65538 exceeds max_ext_len",
    ),
    "not a map": (lambda top: top.clear(), InvalidHeader, r"^format is of type NoneType"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_errors_name_the_broken_rule(name: str) -> None:
    change, error, message = BROKEN[name]
    top = header_map()
    parse_header(msgpack.packb(top))
    change(top)
    with pytest.raises(error, match=message) as caught:
        parse_header(msgpack.packb(top))
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "late", [put("extra", 1), put("codecs", None), remove("tensors")], ids=["unknown key", "other type", "missing key"]
)
@pytest.mark.parametrize(
    ("early", "message"), [(put("format", 2), "format 2"), (put("required", ["pages"]), "feature 'pages'")], ids=["format", "feature"]
)
def test_a_newer_file_is_reported_as_newer_whatever_else_it_contains(early: Any, message: str, late: Any) -> None:
    top = header_map()
    early(top)
    late(top)
    with pytest.raises(UnsupportedVersion, match=message):
        parse_header(msgpack.packb(top))


FORMAT_2, FEATURE, CODEC = (put("format", 2), "format 2"), (put("required", ["pages"]), "'pages'"), (put("codecs", 1, "id", "new"), "'new'")
NEWS = {"format": (*FORMAT_2, UnsupportedVersion), "feature": (*FEATURE, UnsupportedVersion), "codec": (*CODEC, UnknownCodec)}
OTHER_BYTES: dict[str, Callable[[bytes], bytes]] = {
    "integer key": lambda data: b"\x8a\x01\x02" + data[1:],
    "no string key first": lambda data: b"\x8a\x92\xc0\xd9\x01a\xca" + bytes(4) + data[1:],
    "not UTF-8": lambda data: data.replace(b"\xa6kivi-3", b"\xa6kivi\xff\xff"),
    "long string": lambda data: data.replace(b"\xa6kivi-3", b"\xda\x10\x01" + b"x" * 4097),
    "long array": lambda data: data.replace(b"\xa6kivi-3", b"\xdd\x00\x02\x00\x01" + bytes(2**17 + 1)),
    "nested": lambda data: data.replace(b"\xa6kivi-3", b"\x91" * 5000 + b"\xc0"),
    "extension": lambda data: data.replace(b"\xa6kivi-3", b"\xc7\x03\x01abc"),
    "invalid byte": lambda data: data.replace(b"\xa6kivi-3", b"\xc1"),
    "cut array": lambda data: data[:-20],
    "cut string": lambda data: data[:-1],
    "more bytes": lambda data: data + b"\xa1",
    "other forms of keys": lambda data: data.replace(b"\xa6format", b"\xda\x00\x06format").replace(b"\xa2id", b"\xd9\x02id"),
    "first codec invalid": lambda data: data.replace(b"\xa4bits", b"\xa4bats", 1),
}


@pytest.mark.parametrize("bytes_of", OTHER_BYTES)
@pytest.mark.parametrize("new", NEWS)
def test_newer_features_are_reported_before_errors(new: str, bytes_of: str) -> None:
    top = header_map()
    change, message, error = NEWS[new]
    change(top)
    data = msgpack.packb(top)
    other = OTHER_BYTES[bytes_of](data)
    assert other != data
    with pytest.raises(error, match=message) as caught:
        parse_header(other)
    assert type(caught.value) is error


def test_format_is_reported_before_feature_and_feature_before_codec() -> None:
    top = header_map()
    top["codecs"][1]["id"] = "new"
    with pytest.raises(UnknownCodec, match="'new'"):
        parse_header(msgpack.packb(dict(reversed(top.items()))))
    top["required"] = [[], 1, "a\x1b" + "x" * 5000]
    with pytest.raises(UnsupportedVersion, match=r"the feature 'a\\x1bx{190,}, which") as caught:
        parse_header(msgpack.packb(dict(reversed(top.items()))))
    assert len(str(caught.value)) < 400
    top["format"] = 2**64 - 1
    with pytest.raises(UnsupportedVersion, match="format 18446744073709551615"):
        parse_header(msgpack.packb(dict(reversed(top.items()))))


def test_searching_for_newer_features_takes_little_time_and_memory() -> None:
    """The scan is linear in the number of bytes. A recursive scan would overflow the stack, and a step per value would take seconds."""
    for filling in (b"\x91", b"\x81", b"\x9f", b"\xdf\xff\xff\xff\xff", b"\x92\x01", b"\xa1x"):
        data = b"\x82\xa1x\xdd\xff\xff\xff\xff" + (filling * 2**18)[: 2**18]
        start = time.thread_time()
        assert unknown_features(data, (), ()) == (None, None, None)
        assert time.thread_time() - start < 2
        tracemalloc.start()
        unknown_features(data[: 2**16], (), ())
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()


def packed_values() -> st.SearchStrategy[object]:
    numbers = st.integers(-(2**63), 2**64 - 1) | st.integers(-40, 300)
    leaves = numbers | st.none() | st.booleans() | st.floats() | st.text(max_size=40) | st.binary(max_size=300)
    leaves |= st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20))
    keys = st.text(max_size=3) | numbers
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=20) | st.dictionaries(keys, inner, max_size=20))


@given(packed_values(), packed_values(), st.integers(0, 2**64 - 1))
@settings(max_examples=40)
def test_searching_for_newer_features_skips_values_of_any_type(first: object, second: object, version: int) -> None:
    data = b"\x85" + b"".join(map(msgpack.packb, (first, second, "format", version, second, first, "required", ["", "new"])))
    data += msgpack.packb("codecs") + b"\x93" + b"".join(map(msgpack.packb, (second, {"dim": first, "id": "raw"}, {"id": "fractal"})))
    assume(first not in ("format", "required", "codecs") and second not in ("format", "required", "codecs"))
    assert unknown_features(data, [""], ["raw"]) == (version, "new", "fractal")


@pytest.mark.parametrize(("first", "second", "unknown"), [("fractal", "raw", "fractal"), ("raw", "fractal", None), (1, "fractal", None)])
def test_the_first_of_several_codec_ids_is_used(first: object, second: object, unknown: str | None) -> None:
    data = b"\x81\xa6codecs\x91\x82" + b"".join(map(msgpack.packb, ("id", first, "id", second)))
    assert unknown_features(data, (), ["raw"]).codec == unknown


def test_a_later_codec_id_is_not_reported_as_unknown() -> None:
    top = header_map()
    codec = msgpack.packb(top["codecs"][0])
    twice = bytes([codec[0] + 1]) + codec[1:] + msgpack.packb("id") + msgpack.packb("fractal")
    with pytest.raises(InvalidHeader, match="the key id occurs twice"):
        parse_header(msgpack.packb(top).replace(codec, twice))


def test_a_newer_codec_is_reported_as_unknown_whatever_its_parameters() -> None:
    top = header_map()
    top["codecs"][1] = {"id": "fractal", "tree": [[1], {"a": b"b"}]}
    with pytest.raises(UnknownCodec, match="'fractal'"):
        parse_header(msgpack.packb(top))


OTHER_FORMS = {
    "a longer integer": lambda data: data.replace(b"\xa5start\x07", b"\xa5start\xcc\x07"),
    "a longer string": lambda data: data.replace(b"\xa6kivi-3", b"\xd9\x06kivi-3"),
    "a longer array": lambda data: data.replace(b"\xa8required\x90", b"\xa8required\xdc\x00\x00"),
    "a longer map": lambda data: data.replace(b"\xa9ignorable\x80", b"\xa9ignorable\xde\x00\x00"),
    "a longer binary": lambda data: re.sub(rb"\xc4\x10", b"\xc5\x00\x10", data, count=1),
    "a float": lambda data: data.replace(b"\xa5start\x07", b"\xa5start\xcb" + struct.pack(">d", 7)),
    "a key twice": lambda data: data.replace(b"\x81\xa4name\xa4test", b"\x82\xa4name\xa4fake\xa4name\xa4test"),
    "names not sorted": lambda data: data.replace(b"\x81\xa4name\xa4test", b"\x82\xa4name\xa4test\xa1a\xa0"),
    "trailing bytes": lambda data: data + b"\xc0",
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_only_canonical_headers_are_read(form: str) -> None:
    data = msgpack.packb(header_map())
    parse_header(data)
    other = OTHER_FORMS[form](data)
    assert other != data
    with pytest.raises(InvalidHeader):
        parse_header(other)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x91", b"\x81\xa1a", b"\x81\xc0\xc0", b"\x93" * 5000, b"\xa1\xff", b"\xd6\xff" + bytes(4), b"\xdf\0\0\1\0"],
)
def test_msgpack_values_other_than_maps_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidHeader, match=r"kvpack\.header|^format"):
        parse_header(data)


def test_a_header_above_its_limit_is_refused_before_reading() -> None:
    with pytest.raises(LimitExceeded, match=rf"has {MAX_HEADER_BYTES + 1} bytes, but the maximum is {MAX_HEADER_BYTES}"):
        parse_header(bytes(MAX_HEADER_BYTES + 1))


@pytest.mark.parametrize("container", [b"\x90", b"\x80"], ids=["arrays", "maps"])
def test_many_empty_containers_need_little_memory(container: bytes) -> None:
    """An empty container is one byte of msgpack but 64 bytes in memory, so half a megabyte of them would take 32 MB."""
    count = 2**17
    data = b"\x95" + 4 * (b"\xdd" + struct.pack(">I", count) + container * count) + b"\xc0"
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceeded, match=r"more than .* arrays and maps"):
            parse_header(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(data)


@pytest.mark.parametrize("layers", [0, 1, 19, 20, 4096])
def test_layers_without_sides_are_read(layers: int) -> None:
    header = with_tensors(Contents(codecs=(), layers=(LayerEntry(None, None),) * layers))
    assert parse_header(pack_header(header)) == header


def test_sizes_of_the_largest_layers_do_not_overflow() -> None:
    largest = side(0, batch=65536, heads=65536, runs=(MAX_TOKENS,))
    made = Contents(codecs=(create("raw", 1024, dtype="fp32"),), layers=(LayerEntry(largest, None),))
    assert layout_bytes(made.layouts["0.k.values"]) == 2**32 * MAX_TOKENS * 4096
    with pytest.raises(LimitExceeded, match=r"stored_bytes is \d+, expected at most 1152921504606846975"):
        with_tensors(made)


ENTRY = TensorEntry("0.k.values", "F16", (1,), "none", 2, bytes(16))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Contents(codecs=(create("raw", 4),) * 4097, layers=()), "codecs has 4097 entries, but the maximum is 4096"),
        (lambda: Contents(codecs=(), layers=(), required=("a",) * 257), "required has 257 entries, but the maximum is 256"),
        (lambda: Contents(codecs=(), layers=(LayerEntry(None, None),) * 4097), "layers has 4097 entries, but the maximum is 4096"),
        (
            lambda: Contents(codecs=(), layers=(), model=dict.fromkeys(map(str, range(257)), "")),
            "model has 257 entries, but the maximum is 256",
        ),
        (
            lambda: Contents(codecs=(), layers=(), ignorable={"a": bytes(65537)}),
            r"ignorable\['a'\] has 65537 bytes, but the maximum is 65536",
        ),
        (
            lambda: Header.from_contents(Contents(codecs=(), layers=()), (ENTRY,) * (2**17 + 1)),
            "tensors has 131073 entries, but the maximum is 131072",
        ),
        (lambda: side(0, runs=(1,) * (2**17 + 1)), "runs has 131073 entries, but the maximum is 131072"),
        (
            lambda: pack_header(with_tensors(Contents(codecs=(), layers=(), ignorable={str(i): bytes(65536) for i in range(128)}))),
            r"kvpack.header has 8\d{6} bytes, but the maximum is 8388608",
        ),
    ],
    ids=["codecs", "required", "layers", "names", "binary", "tensors", "runs", "header"],
)
def test_writers_enforce_the_limits(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(LimitExceeded, match=message):
        make()


@pytest.mark.parametrize("text", ["\ud800", "a" * (MAX_STRING_BYTES + 1)], ids=["surrogate", "long"])
def test_invalid_strings_are_not_written(text: str) -> None:
    with pytest.raises((InvalidHeader, LimitExceeded), match=r"^recipe "):
        Contents(codecs=(), layers=(), recipe=text)


@settings(max_examples=40)
@given(st.sampled_from(KINDS), st.data())
def test_changed_values_are_read_or_refused(kind: str, data: st.DataObject) -> None:
    """Parsing any header results in a Header or raises a KvpackError. Digests do not help here, because a forger can repair them."""
    top = header_map(kind)
    at: Any = top
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not (isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans())):
            break
        at = at[key]
    values = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3) | st.binary(max_size=17)
    at[key] = data.draw(
        st.recursive(values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3))
    )
    packed = msgpack.packb(top)
    try:
        header = parse_header(packed)
    except KvpackError:
        return
    assert pack_header(header) == packed


@settings(max_examples=40)
@given(st.sampled_from(KINDS), st.data())
def test_changed_bytes_are_read_or_refused(kind: str, data: st.DataObject) -> None:
    packed = bytearray(msgpack.packb(header_map(kind)))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        header = parse_header(bytes(packed))
    except KvpackError:
        return
    assert pack_header(header) == packed


def test_headers_are_immutable_values() -> None:
    header = with_tensors(contents("group"))
    assert header == copy.deepcopy(header)
    with pytest.raises(AttributeError):
        header.start = 8  # type: ignore[misc]


def test_headers_share_valid_codecs() -> None:
    good = header_map()
    first, second = (parse_header(msgpack.packb(good)).codecs for _ in range(2))
    assert all(one is other for one, other in zip(first, second, strict=True))
    name = next(name for name, value in good["codecs"][0].items() if type(value) is int)
    bad = copy.deepcopy(good)
    # Python's 4.0 equals 4; a header's does not.
    bad["codecs"][0][name] = float(good["codecs"][0][name])
    for _ in range(2):
        with pytest.raises(InvalidHeader, match=rf"^codecs\[0\]: .*{name} is of type float"):
            parse_header(msgpack.packb(bad))


def test_a_codec_nested_too_deeply_for_msgpack_is_refused() -> None:
    header = header_map()
    header["codecs"][0]["fields"] = "nested"
    nested = msgpack.packb(header).replace(msgpack.packb("nested"), b"\x91" * 800 + b"\x90")
    with pytest.raises(InvalidHeader, match=r"^codecs\[0\]: .*fields is"):
        parse_header(nested)


@pytest.mark.parametrize("change", ["names", "entries", "codec", "width"])
def test_noncanonical_values_are_refused(change: str) -> None:
    header = header_map()
    header["model"], header["start"] = {"a": "1", "b": "2"}, 0
    parse_header(msgpack.packb(header))
    if change == "names":
        header["model"] = {"b": "2", "a": "1"}
    elif change == "entries":
        header["layers"][0]["k"]["entries"] = {}
    elif change == "codec":
        header["codecs"][0] = dict(reversed(header["codecs"][0].items()))
    data = msgpack.packb(header)
    if change == "width":
        # An integer of 16 bits that fits 7.
        data = data.replace(msgpack.packb("start") + b"\x00", msgpack.packb("start") + b"\xcd\x00\x00")
    with pytest.raises(InvalidHeader, match="not canonical msgpack: re-encoding its values gives different bytes"):
        parse_header(data)
