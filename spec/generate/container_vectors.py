"""Conformance vectors with an invalid front, frame, limit or version, and files of later versions with parts that readers skip."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgpack

from spec.generate.invalid_vectors import GROUP, RAW, Invalid, add, add_header
from spec.generate.valid_vectors import Valid
from support.file_parts import Parts, compress, edit, frame, keys_file, raw_frame, repeated_frame
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Callable

UNSUPPORTED: dict[str, Invalid | Valid] = {}

PLAIN = keys_file(RAW, runs=(4,), heads=1)


def in_text(old: str, new: str) -> bytes:
    """Return ``PLAIN`` with ``old`` replaced by ``new`` in its JSON header. Trailing spaces keep the header's length."""
    length = int.from_bytes(PLAIN[:8], "little")
    text = PLAIN[8 : 8 + length].decode()
    assert old in text
    other = text.replace(old, new, 1).rstrip(" ").encode()
    return PLAIN[:8] + other.ljust(length, b" ") + PLAIN[8 + length :]


def with_length(spaces: int) -> bytes:
    """Return ``PLAIN`` with ``spaces`` more spaces at the end of its JSON header."""
    length = int.from_bytes(PLAIN[:8], "little")
    return (length + spaces).to_bytes(8, "little") + PLAIN[8 : 8 + length] + b" " * spaces + PLAIN[8 + length :]


def add_all() -> None:
    for add_vectors in (add_front, add_msgpack, add_frames, add_limits, add_unsupported):
        add_vectors()


def add_front() -> None:
    add("json-header-of-4097", "container-3", "InvalidHeader", "8 + L is 4097", lambda: with_length(1))
    add("file-too-short", "container-4", "Truncated", "the last byte is missing", lambda: PLAIN[:-1])
    add("file-too-long", "container-4", "Truncated", "a zero byte after the last tensor", lambda: PLAIN + b"\0")
    add(
        "file-with-a-pad-at-its-end",
        "container-4",
        "Truncated",
        "a pad after the last tensor",
        lambda: PLAIN + bytes(-len(PLAIN) % 64),
    )
    add("file-ends-in-the-header", "container-4", "Truncated", "the file ends within kvpack.header", lambda: PLAIN[:4110])
    number = PLAIN.index(b'"kvpack":"1 ') + len(b'"kvpack":"1')
    add(
        "file-ends-before-the-major-number",
        "container-4",
        "Truncated",
        "the file ends after the first bytes of the JSON header",
        lambda: PLAIN[: number - 1],
    )
    add(
        "file-ends-in-the-major-number",
        "container-4",
        "Truncated",
        "the file ends after a digit of the major number",
        lambda: PLAIN[:number],
    )
    text = PLAIN[number + 1 : number + 33].decode()
    assert text != text.upper()
    add("digest-in-upper-case", "container-5", "InvalidHeader", "a digest with uppercase letters", lambda: in_text(text, text.upper()))
    add("file-ends-in-the-json-header", "container-4", "Truncated", "the file ends within the JSON header", lambda: PLAIN[:300])
    add(
        "file-ends-in-the-first-entry",
        "container-4",
        "Truncated",
        "the file ends within the entry of kvpack.header",
        lambda: PLAIN[:120],
    )
    for name, data, shows in (
        ("empty", b"", "no bytes"),
        ("beginning-alone", PLAIN[:40], "the file ends within the first key of the JSON header"),
        ("space-first", in_text('{"__metadata__":', '{ "__metadata__":'), "a space after the first brace"),
        ("format", in_text('"format":"kvpack"', '"format":"kvpacK"'), "another format"),
        ("metadata-order", in_text('"format":"kvpack",', ""), "__metadata__ without format"),
    ):
        add(f"json-header-{name}", "container-5", "NotKvpack", shows, lambda d=data: d)
    for name, old, new, shows in (
        ("version-0", '"kvpack":"1 ', '"kvpack":"0 ', "the major number is 0"),
        ("version-01", '"kvpack":"1 ', '"kvpack":"01 ', "a major number with a leading zero"),
        ("two-spaces", '"kvpack":"1 ', '"kvpack":"1  ', "two spaces before the digest"),
        (
            "dtype-of-the-header",
            '"kvpack.header":{"dtype":"U8"',
            '"kvpack.header":{"dtype":"I8"',
            "kvpack.header with dtype I8",
        ),
        ("more-metadata", '"},"kvpack.header"', '","more":"x"},"kvpack.header"', "__metadata__ with an additional key"),
        ("name-of-a-pad", "kvpack.pad.0", "kvpack.pad.1", "the first pad has the number 1"),
        ("dtype", '"0.k.values":{"dtype":"F16"', '"0.k.values":{"dtype":"I16"', "a tensor with another dtype of equal size"),
        ("offset-with-a-zero", '"data_offsets":[0,', '"data_offsets":[00,', "an offset with a leading zero"),
        ("space", '"shape":[1,1,4,3]', '"shape":[1, 1,4,3]', "a space within a shape"),
    ):
        add(f"json-header-{name}", "container-5", "InvalidHeader", shows, lambda o=old, n=new: in_text(o, n))
    add("json-header-of-two-pages", "container-5", "InvalidHeader", "4096 extra spaces at the end", lambda: with_length(4096))
    add("json-header-tab", "container-5", "InvalidHeader", "a tab instead of a space at the end", lambda: in_text("}} ", "}}\t"))
    add("digest-of-a-tensor", "container-20", "DigestMismatch", "a flipped bit of a tensor", lambda: PLAIN[:-1] + bytes([PLAIN[-1] ^ 1]))
    start = 8 + int.from_bytes(PLAIN[:8], "little")
    at = PLAIN.index(b"test", start)
    add(
        "digest-of-the-header",
        "container-20",
        "DigestMismatch",
        "a changed letter of recipe in kvpack.header",
        lambda: PLAIN[:at] + b"T" + PLAIN[at + 1 :],
    )
    pad = PLAIN.rindex(Parts.of(PLAIN).tensors[0]) - 1
    assert not PLAIN[pad]
    add("pad", "container-19", "InvalidPayload", "a pad with a nonzero byte", lambda: PLAIN[:pad] + b"\1" + PLAIN[pad + 1 :])


def add_msgpack() -> None:
    parts = Parts.of(keys_file(GROUP))
    packed = msgpack.packb(parts.header)
    start = packed.index(b"\xa5start") + 6
    assert packed[start] == 3
    name = b"\xa4name\xa1x"
    for key, old, new, shows in (
        ("uint-8", packed[start - 6 : start + 1], b"\xa5start\xcc\x03", "a small integer as uint 8"),
        ("uint-64", packed[start - 6 : start + 1], b"\xa5start\xcf" + bytes(7) + b"\x03", "a small integer as uint 64"),
        ("int-8", packed[start - 6 : start + 1], b"\xa5start\xd0\x03", "a small integer in a signed form"),
        ("negative", packed[start - 6 : start + 1], b"\xa5start\xff", "a negative integer instead of a positive one"),
        ("float", packed[start - 6 : start + 1], b"\xa5start\xcb" + bytes.fromhex("4008000000000000"), "a float"),
        ("true", packed[start - 6 : start + 1], b"\xa5start\xc3", "true instead of an integer"),
        ("extension", packed[start - 6 : start + 1], b"\xa5start\xd4\x00\x03", "an extension type"),
        ("string-8", b"\xa4test", b"\xd9\x04test", "a short string as str 8"),
        ("string-not-utf-8", b"\xa4test", b"\xa4te\xff\xff", "a string that is not UTF-8"),
        ("string-surrogate", b"\xa4test", b"\xa4t\xed\xa0\x80", "a string with a surrogate"),
        ("string-overlong", b"\xa4test", b"\xa4te\xc1\xbf", "a string with an overlong code point"),
        ("binary-16", b"\xc4\x10", b"\xc5\x00\x10", "a digest as bin 16"),
        ("key-twice", b"\x81" + name, b"\x82" + name + name, "a duplicate key in model"),
        ("map-16", packed[:1], b"\xde\x00\x09", "a small map as map 16"),
        ("key-integer", name, b"\x01\xa1x", "a key of model that is an integer"),
        ("array-32", b"\xa4runs\x91", b"\xa4runs\xdd\x00\x00\x00\x01", "a small array as array 32"),
        ("byte-c1", packed[start - 6 : start + 1], b"\xa5start\xc1", "the byte c1, which starts no msgpack value"),
    ):
        assert packed.count(old, 0, None if len(old) > 1 else 1)
        add(f"msgpack-{key}", "container-10", "InvalidHeader", shows, lambda o=old, n=new: parts.joined(packed.replace(o, n, 1)))
    shows = "the byte c1 instead of an integer, followed by an unknown codec"
    later = packed.replace(b"\xa5start\x03", b"\xa5start\xc1").replace(b"\xa5group", b"\xa5later")
    add("msgpack-byte-c1-before-a-later-codec", "container-12", "UnknownCodec", shows, lambda: parts.joined(later))
    add("msgpack-more-bytes", "container-10", "InvalidHeader", "an extra byte after the map", lambda: parts.joined(packed + b"\0"))
    add("msgpack-fewer-bytes", "container-10", "InvalidHeader", "the map ends too early", lambda: parts.joined(packed[:-1]))
    shows = "the value of the last key, a digest, is missing"
    add("msgpack-value-missing", "container-10", "InvalidHeader", shows, lambda: parts.joined(packed[:-18]))
    shows = "an array with the keys and values of the map"
    add("msgpack-array", "container-10", "InvalidHeader", shows, lambda: parts.joined(b"\xdc\x00\x12" + packed[1:]))
    nested = packed.replace(b"\xa5start\x03", b"\xa5start" + b"\x91" * 2000 + b"\x03")
    add("msgpack-nested", "container-10", "InvalidHeader", "two thousand nested arrays", lambda: parts.joined(nested))
    for place in ("ignorable", "model"):
        for name_of_value, other in (("nil", None), ("an-array", [])):
            add_header(f"{place}-is-{name_of_value}", "container-11", GROUP, place, other, f"{place} is {name_of_value.replace('-', ' ')}")
    for place, value in (("ignorable", {"y": b"1", "x": b""}), ("model", {"\U00010000": "a", "\uffff": "b"})):
        shows = f"keys of {place} that do not ascend by code points"
        add(f"msgpack-order-of-{place}", "container-10", "InvalidHeader", shows, lambda p=place, v=value: keys_file(GROUP, edit(p, v)))


def add_frames() -> None:
    def add_frame(name: str, rule: str, shows: str, change: Callable[[bytes], bytes]) -> None:
        add(f"zstd-{name}", rule, "InvalidPayload", shows, lambda: keys_file(RAW, frame(change), runs=(4,), heads=1))

    def of_nothing(stored: bytes) -> Callable[[], bytes]:
        return lambda: keys_file(RAW, frame(lambda raw: stored), runs=(), tail=0)

    nothing = bytes.fromhex("28b52ffd 00 00 010000")
    shows = "an empty frame without a content size, for a tensor without bytes"
    add("zstd-size-missing-of-nothing", "container-22", "InvalidPayload", shows, of_nothing(nothing))
    shows = "a skippable frame instead of an empty one"
    add("zstd-skippable-of-nothing", "container-21", "InvalidPayload", shows, of_nothing(bytes.fromhex("502a4d18 00000000")))
    add_frame(
        "other-magic", "container-21", "the magic number of an older Zstandard version", lambda raw: b"\x27" + raw_frame(raw, "20 18")[1:]
    )
    skippable = bytes.fromhex("502a4d18 00000000")
    add_frame("cut-off-in-its-header", "container-21", "the first six bytes of a frame", lambda raw: compress(raw)[:6])
    add_frame("no-frame", "container-21", "uncompressed values with the filter zstd", lambda raw: raw)
    add_frame("cut-off", "container-21", "a frame without its last byte", lambda raw: compress(raw)[:-1])
    add_frame(
        "two-frames",
        "container-21",
        "values in two frames, each with a part of the bytes",
        lambda raw: compress(raw[:6]) + compress(raw[6:]),
    )
    add_frame("empty-frame-after", "container-21", "a frame followed by an empty frame", lambda raw: compress(raw) + compress(b""))
    add_frame("skippable-before", "container-21", "a skippable frame first", lambda raw: skippable + compress(raw))
    add_frame("skippable-after", "container-21", "a skippable frame at the end", lambda raw: compress(raw) + skippable)
    add_frame("reserved-bit", "container-21", "a frame with its reserved bit set", lambda raw: raw_frame(raw, "28 18"))
    add_frame("reserved-block", "container-21", "a block with the reserved type", lambda raw: raw_frame(raw, "20 18", 3))
    add_frame("size-missing", "container-22", "a frame without a content size", lambda raw: compress(raw, write_content_size=False))
    add_frame("size-more", "container-23", "a frame whose content is a byte longer than the tensor", lambda raw: compress(raw + b"0"))
    add_frame("size-less", "container-23", "a frame whose content is a byte shorter than the tensor", lambda raw: compress(raw[:-1]))
    add_frame("size-64-bits", "container-23", "a frame that declares 2^64 - 1 bytes", lambda raw: raw_frame(raw, "e0 ffffffffffffffff"))
    add_frame(
        "content-more",
        "container-24",
        "blocks of 4 MiB in a frame that declares 24 bytes",
        lambda raw: repeated_frame(len(raw), [2**17] * 32),
    )
    add_frame(
        "content-less",
        "container-24",
        "blocks with one byte less than the frame declares",
        lambda raw: repeated_frame(len(raw), [len(raw) - 1]),
    )
    add_frame("dictionary", "container-25", "a frame that requires dictionary 7", lambda raw: raw_frame(raw, "21 07 18"))
    add_frame("window", "container-26", "a window of 9 MiB, above the limit of 8 MiB", lambda raw: raw_frame(raw, "80 69 18000000"))

    def add_empty_frame(name: str, shows: str, data: str) -> None:
        empty = frame(lambda raw: bytes.fromhex("28b52ffd" + data))
        add(f"zstd-{name}", "container-21", "InvalidPayload", shows, lambda: keys_file(RAW, empty, runs=(), heads=1))

    add_empty_frame("no-content-without-blocks", "an empty frame that ends before its block", "2000")
    add_empty_frame("no-content-without-last-block", "an empty frame whose only block is not marked as the last", "2000 000000")
    add_empty_frame("no-content-byte-after", "an empty frame followed by a byte", "2000 010000 00")
    add_empty_frame("no-content-block", "a frame that declares no content, with a block of the reserved type", "2000 070000")
    add(
        "zstd-ratio",
        "container-29",
        "LimitExceeded",
        "a tensor with 24 bytes but without stored bytes",
        lambda: keys_file(RAW, frame(lambda raw: b""), runs=(4,), heads=1),
    )


def add_limits() -> None:
    for name, codec, path, value in (
        ("start", GROUP, "start", 2**40),
        ("batch", GROUP, "layers.0.k.batch", 65537),
        ("heads", GROUP, "layers.0.k.heads", 65537),
        ("run", GROUP, "layers.0.k.runs", [2**40]),
        ("tokens", GROUP, "layers.0.k.runs", [2**40 - 1]),
        ("tail", GROUP, "layers.0.k.tail", 2**64 - 1),
        ("window", GROUP, "layers.0.k.window", 2**40),
        ("string", GROUP, "recipe", "x" * 4097),
        ("names", GROUP, "model", {f"{number:03}": "" for number in range(257)}),
    ):
        add_header(f"limit-of-{name}", "container-29", codec, path, value, f"{name} above its limit", "LimitExceeded")
    for name in ("batch", "heads"):
        shows = f"{name} above its limit, and no tokens: tensors without bytes agree with it"
        add(f"limit-of-{name}-without-tokens", "container-29", "LimitExceeded", shows, lambda n=name: without_tokens(n))
    length = 2**24 + 4088
    add(
        "limit-of-the-json-header",
        "container-29",
        "LimitExceeded",
        "a JSON header of 4096 bytes more than allowed",
        lambda: length.to_bytes(8, "little") + PLAIN[8:],
    )
    size = str(2**23 + 1)
    told = Parts.of(PLAIN)
    whole = f'"shape":[{len(msgpack.packb(told.header))}],"data_offsets":[0,{len(msgpack.packb(told.header))}]'
    other = f'"shape":[{size}],"data_offsets":[0,{size}]'
    add(
        "limit-of-the-header",
        "container-29",
        "LimitExceeded",
        "kvpack.header one byte above its limit",
        lambda: in_text(whole, other),
    )
    add("stored-bytes-of-65-bits", "container-17", "InvalidHeader", "a tensor of 2^65 bytes, which overflows 64 bits to 0", overflowing)

    add("limit-of-the-file", "container-29", "LimitExceeded", "a tensor of 2^61 bytes in a file that is shorter", too_large)


def without_tokens(name: str) -> bytes:
    """Return a file whose keys have no tokens, but 65537 sequences or heads."""
    parts = Parts.of(keys_file(RAW, runs=(), tail=0))
    parts.header["layers"][0]["k"][name] = 65537
    parts.header["tensors"][0][2][("batch", "heads").index(name)] = 65537
    return parts.joined()


def too_large() -> bytes:
    """Return a file whose keys have 2^16 sequences and heads and 2^28 tokens with one F16 channel.

    Their tensor is listed with its full size, but no bytes of it are stored.
    """
    parts = Parts.of(overflowing())
    parts.header["layers"][0]["k"]["runs"] = [2**28]
    parts.header["tensors"][0][2:5] = [[2**16, 2**16, 2**28, 1], "none", 2**61]
    return parts.joined(keep_sizes=True)


def overflowing() -> bytes:
    """Return a file whose keys have 2^16 sequences and heads and 2^32 tokens with one F16 channel. Their tensor is empty."""
    parts = Parts.of(keys_file(create("raw", 1, dtype="fp16"), runs=(), tail=0, heads=1))
    parts.header["layers"][0]["k"].update(batch=2**16, heads=2**16, runs=[2**32])
    parts.header["tensors"][0][2] = [2**16, 2**16, 2**32, 1]
    return parts.joined()


def add_unsupported() -> None:
    def unsupported(name: str, rule: str, error: str, shows: str, make: Callable[[], bytes]) -> None:
        UNSUPPORTED[name] = Invalid(shows, rule, error, make)

    later = "UnsupportedVersion"
    unsupported("version-2", "container-6", later, "the major number 2", lambda: in_text('"kvpack":"1 ', '"kvpack":"2 '))
    unsupported(
        "version-999999999", "container-6", later, "the largest major number", lambda: in_text('"kvpack":"1 ', '"kvpack":"999999999 ')
    )
    unsupported(
        "version-2-of-another-form",
        "container-6",
        later,
        "major number 2, with everything else different",
        lambda: (4000).to_bytes(8, "little") + PLAIN[8:].split(b'"1 ')[0] + b'"2"}}' + b"?" * 200,
    )
    unsupported("format-2", "container-32", later, "format 2 in kvpack.header", lambda: keys_file(GROUP, edit("format", 2)))
    unsupported(
        "format-2-with-other-keys",
        "container-32",
        later,
        "format 2, with unknown keys",
        lambda: keys_file(GROUP, edit("format", 2), edit("more", 1)),
    )
    unsupported("required-feature", "container-7", later, "a required feature", lambda: keys_file(GROUP, edit("required", ["new-feature"])))
    shows = "a required feature, with unknown keys that it may define"
    unsupported(
        "required-feature-with-other-keys",
        "container-7",
        later,
        shows,
        lambda: keys_file(GROUP, edit("required", ["new-feature"]), edit("more", 1)),
    )
    more = edit("more", {"new": [1.5, True, -1, msgpack.ExtType(3, b"x"), [[[[1]]]]]})
    shows = "format 2, with values of unknown types nested more deeply than in this version"
    unsupported("format-2-with-other-types", "container-32", later, shows, lambda: keys_file(GROUP, edit("format", 2), more))
    shows = "a required feature, with values of unknown types nested more deeply than in this version"
    required = edit("required", ["new-feature"])
    unsupported("required-feature-with-other-types", "container-7", later, shows, lambda: keys_file(GROUP, required, more))
    unsupported("codec", "container-12", "UnknownCodec", "an unknown codec", lambda: keys_file(GROUP, edit("codecs.0.id", "new-codec")))
    shows = "an unknown codec that no side uses"
    unsupported(
        "codec-without-a-side",
        "container-12",
        "UnknownCodec",
        shows,
        lambda: keys_file(GROUP, lambda parts: parts.header["codecs"].append({"id": "new-codec"})),
    )
    add_news(unsupported)
    features = {"a-feature": bytes(range(256)), "new-feature": b""}
    shows = "two unknown ignorable features, which readers skip"
    UNSUPPORTED["ignorable-features"] = Valid(shows, ("container-8",), lambda: keys_file(GROUP, edit("ignorable", features)))


def add_news(unsupported: Callable[[str, str, str, str, Callable[[], bytes]], None]) -> None:
    """Add headers with new features that current rules call damaged. The unsupported feature must be reported first."""
    recipe = b"\xa4test"
    damage: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
        "an-integer-key": ("a key of the header that is an integer", lambda packed: b"\x8a\x01\x02" + packed[1:]),
        "a-string-not-utf-8": ("a string that is not UTF-8", lambda packed: packed.replace(recipe, b"\xa4te\xff\xff")),
        "a-long-string": ("a string of 4097 bytes", lambda packed: packed.replace(recipe, b"\xda\x10\x01" + b"x" * 4097)),
        "a-cut-array": ("a header that ends within the last array", lambda packed: packed[:-19]),
        "deep-nesting": ("two thousand nested arrays", lambda packed: packed.replace(recipe, b"\x91" * 2000 + b"\xc0")),
    }
    later, unknown = "UnsupportedVersion", "UnknownCodec"
    required = edit("required", ["new-feature"])
    two = lambda parts: parts.header["codecs"].append({"id": "new-codec", "dim": 1})  # noqa: E731
    for name, rule, error, shows, change in (
        ("format-2", "container-32", later, "format 2", edit("format", 2)),
        ("required-feature", "container-7", later, "a required feature", required),
        ("codec", "container-12", unknown, "an unknown codec", two),
    ):
        for of, (what, apply) in damage.items():
            make = lambda c=change, a=apply: with_header(a, c)  # noqa: E731
            unsupported(f"{name}-with-{of}", rule, error, f"{shows}, and {what}", make)
    last = lambda parts: parts.header.update(format=parts.header.pop("format") + 1)  # noqa: E731
    unsupported("format-2-last", "container-32", later, "format 2 as the last key", lambda: with_header(bytes, last))
    shows = "format 2, an unknown feature and an unknown codec"
    unsupported("format-2-and-others", "container-32", later, shows, lambda: with_header(bytes, edit("format", 2), required, two))
    shows = "an unknown feature and an unknown codec"
    unsupported("required-feature-and-codec", "container-7", later, shows, lambda: with_header(bytes, required, two))
    for name, feature, shows in (
        ("not-utf-8", b"\xa4te\xff\xff", "a required feature whose name is not UTF-8"),
        ("of-4097-bytes", b"\xda\x10\x01" + b"x" * 4097, "a required feature with a name of 4097 bytes"),
    ):
        put = lambda packed, f=feature: packed.replace(b"\xa8required\x90", b"\xa8required\x91" + f)  # noqa: E731
        unsupported(f"required-feature-{name}", "container-7", later, shows, lambda p=put: with_header(p))
    shows = "an unknown codec after one with an unknown parameter"
    unsupported("codec-after-a-parameter", "container-12", unknown, shows, lambda: with_header(bytes, two, edit("codecs.0.new", 1)))
    shows = "an unknown codec, and unknown keys in the header"
    unsupported("codec-with-other-keys", "container-12", unknown, shows, lambda: with_header(bytes, two, edit("more", 1)))


def with_header(apply: Callable[[bytes], bytes], *changes: Callable[[Parts], object]) -> bytes:
    """Return a file whose header is changed by ``changes``, packed, and then changed as bytes by ``apply``."""
    parts = Parts.of(keys_file(GROUP))
    for change in changes:
        change(parts)
    packed = msgpack.packb(parts.header)
    assert apply is bytes or apply(packed) != packed
    return parts.joined(apply(packed))
