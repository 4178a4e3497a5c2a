"""Tests of damage: a file with any flipped bit, missing byte or foreign block is refused, and the message names the damaged part."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpack
from kvpack.file import container, front
from kvpack.file.header import Contents, LayerEntry
from kvpack.formats.errors import DigestMismatch, InvalidPayload, KvpackError, NotKvpack, Truncated
from support.caches import RECIPES, random_pairs
from support.small_files import KINDS, arrays_of, contents, side, small_file
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kvpack.formats.base import Codec


@pytest.fixture
def one_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache the parsed kvpack.header by its bytes, because these tests damage everything around it and leave it intact."""
    monkeypatch.setattr(front, "parse_header", cache(front.parse_header))


def refusal(data: bytes | bytearray | memoryview) -> str:
    """Return the message with which a reader refuses ``data``. The test fails on any exception other than KvpackError."""
    try:
        container.open_bytes(data).verify()
    except KvpackError as error:
        return str(error)
    raise AssertionError("damage was not found")


def is_about(name: str, message: str) -> bool:
    """Return True if a message names this part of the file and no longer name that begins like it."""
    return f"{name}: " in message or f"{name} is " in message


def parts(data: bytes) -> list[tuple[int, int, str]]:
    """Return the begin, the end, and the message's name of every part of a file. Padding has the name of the tensor after it."""
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    del entries["__metadata__"]
    found = [(0, 8 + length, "JSON header")]
    begin = 8 + length
    for name, entry in entries.items():
        if not name.startswith("kvpack.pad."):
            end = 8 + length + entry["data_offsets"][1]
            found.append((begin, end, f"bytes: {name}"))
            begin = end
    return found


def flip_each(data: bytes, bits: Iterable[int]) -> None:
    damaged = bytearray(data)
    for begin, end, name in parts(data):
        for bit in bits if name == "JSON header" else range(8 * begin, 8 * end):
            damaged[bit // 8] ^= 1 << bit % 8
            message = refusal(damaged)
            damaged[bit // 8] ^= 1 << bit % 8
            if name == "JSON header":
                assert any(word in message for word in ("JSON header", "kvpack file", "newer kvpack", "kvpack.header is damaged")), (
                    bit,
                    message,
                )
            else:
                assert is_about(name, message), (bit, message)
    assert damaged == data


@pytest.mark.usefixtures("one_parse")
def test_every_flipped_bit_of_a_file_is_refused() -> None:
    made = Contents(codecs=(create("raw", 4, dtype="fp16"),), layers=(LayerEntry(side(0), None),))
    data = container.to_bytes(made, arrays_of(made))
    flip_each(data, range(8 * parts(data)[0][1]))


@pytest.mark.scenario
@pytest.mark.usefixtures("one_parse")
@pytest.mark.parametrize(
    ("kind", "compress"), [("group", False), ("raw", False), ("empty", False), ("raw", True)], ids=["group", "raw", "empty", "zstd"]
)
def test_every_flipped_bit_of_other_files_is_refused(kind: str, compress: bool) -> None:
    """All bits are tested, except that only every fourth byte of the JSON header is, with one bit each."""
    data = small_file(kind, compress=compress)
    generator = random.Random(0)
    flip_each(data, [8 * byte + generator.randrange(8) for byte in range(0, parts(data)[0][1], 4)])


@pytest.mark.usefixtures("one_parse")
@pytest.mark.parametrize("recipe", RECIPES)
def test_flipped_bits_of_every_codec_are_refused(recipe: str, tmp_path: Path) -> None:
    kvpack.save(kvpack.pack(random_pairs(2, 70), recipe), tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    container.open_bytes(data).verify()
    damaged = bytearray(data)
    generator = random.Random(0)
    for begin, end, name in parts(data)[1:]:
        # A tensor without bytes, where nothing is stored as it is, may need no pad.
        for bit in [] if begin == end else [8 * begin, 8 * end - 1, *(generator.randrange(8 * begin, 8 * end) for _ in range(8))]:
            damaged[bit // 8] ^= 1 << bit % 8
            assert is_about(name, refusal(damaged))
            damaged[bit // 8] ^= 1 << bit % 8


@pytest.mark.scenario
@pytest.mark.usefixtures("one_parse")
@pytest.mark.parametrize("kind", KINDS)
def test_every_truncated_file_is_refused(kind: str) -> None:
    data = small_file(kind)
    view = memoryview(data)
    for size in range(len(data)):
        with pytest.raises((Truncated, NotKvpack), match=f"has {size} bytes" if size > 300 else "kvpack file|has ") as caught:
            container.open_bytes(view[:size])
        assert size < 64 or isinstance(caught.value, Truncated), size


@pytest.mark.parametrize(
    "more", [b"\0", b" ", bytes(64), bytes(4096), b"a", small_file("raw")], ids=["zero", "space", "pad", "page", "a", "file"]
)
def test_appended_bytes_are_refused(more: bytes) -> None:
    data = small_file()
    with pytest.raises(Truncated, match=f"has {len(data + more)} bytes, but its header declares {len(data)}"):
        container.open_bytes(data + more)


def test_every_zeroed_page_and_block_is_refused() -> None:
    made = Contents(codecs=(create("raw", 64, dtype="bf16"),), layers=(LayerEntry(side(0, 100), side(0, 100)),))
    data = container.to_bytes(made, arrays_of(made))
    assert len(data) > 7 * 4096
    for block in (512, 4096):
        for at in range(0, len(data), block):
            end = min(at + block, len(data))
            if any(data[at:end]):
                refusal(data[:at] + bytes(end - at) + data[end:])


def test_swapped_tensors_are_refused() -> None:
    made = Contents(codecs=(create("raw", 16, dtype="bf16"),), layers=(LayerEntry(side(0), side(0)),) * 2)
    data = container.to_bytes(made, arrays_of(made))
    ends = {name: end for _, end, name in parts(data)[2:]}
    assert list(ends) == ["bytes: 0.k.values", "bytes: 0.v.values", "bytes: 1.k.values", "bytes: 1.v.values"]
    for (first, a), (_, b) in itertools.combinations(ends.items(), 2):
        swapped = bytearray(data)
        swapped[a - 96 : a], swapped[b - 96 : b] = data[b - 96 : b], data[a - 96 : a]
        assert is_about(first, refusal(swapped))


def test_parts_of_two_files_cannot_be_mixed() -> None:
    made = contents("group")
    one, other = container.to_bytes(made, arrays_of(made, 1)), container.to_bytes(made, arrays_of(made, 2))
    assert len(one) == len(other)
    for begin, end, name in parts(one):
        message = refusal(one[:begin] + other[begin:end] + one[end:])
        assert is_about(name, message) or "kvpack.header is damaged" in message


@given(st.data())
def test_arbitrary_changes_are_refused(data: st.DataObject) -> None:
    whole = small_file(data.draw(st.sampled_from(KINDS)), compress=data.draw(st.booleans()))
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 64))] = data.draw(st.binary(max_size=64))
    if damaged != whole:
        refusal(damaged)


@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_files_are_refused(data: bytes, plausible: bool) -> None:
    refusal((4088).to_bytes(8, "little") + small_file()[8:80] + data if plausible else data)


def test_a_damaged_tensor_does_not_affect_the_others() -> None:
    data = bytearray(small_file())
    end = next(end for _, end, name in parts(bytes(data)) if "0.k.tail" in name)
    data[end - 1] ^= 1
    file = container.open_bytes(data)
    with pytest.raises(DigestMismatch, match=r"^bytes: 0\.k\.tail is damaged: its 16 bytes have digest \w{32}, expected \w{32}: copy"):
        file.tensor("0.k.tail")
    file.read_side(0, "v")
    with pytest.raises(DigestMismatch):
        file.read_side(0, "k")


def test_a_digest_is_checked_only_before_the_first_use() -> None:
    data = bytearray(small_file())
    file = container.open_bytes(data)
    file.tensor("0.k.tail")
    end = next(end for _, end, name in parts(bytes(data)) if "0.k.tail" in name)
    data[end - 1] ^= 1
    assert file.tensor("0.k.tail")[-1] == data[end - 1]
    with pytest.raises(DigestMismatch):
        container.open_bytes(data).tensor("0.k.tail")


def broken(codec: Codec, change: Any, name: str) -> bytes:
    """Return a file with invalid values and correct digests."""
    made = Contents(codecs=(codec,), layers=(LayerEntry(side(0, 20), None),))
    arrays = {key: torch.from_numpy(array.copy()) for key, array in arrays_of(made).items()}
    change(arrays[f"0.k.{name}"])
    return container.to_bytes(made, {key: array.numpy() for key, array in arrays.items()})


KEYS = {"b": "3", "g": "16"}


@pytest.mark.parametrize(
    ("words", "name", "change", "message"),
    [
        (
            KEYS,
            "codes.0",
            lambda a: a.view(torch.uint16).fill_(0xFFFF),
            r"0\.k\.codes, plane 0: spare bits of word at \[0, 0, 0, 0\] is 61440, expected at most 0",
        ),
        (KEYS, "scales", lambda a: a.view(torch.float16)[5:6].fill_(torch.nan), r"0\.k\.scales: the value at \[0, 0, 0, 2, 1\] is nan"),
        (
            KEYS | {"token_scale": "fp32"},
            "token_scale",
            lambda a: a.view(torch.float32)[3:4].fill_(-torch.inf),
            r"0\.k\.token_scale: .* at \[0, 0, 3\] is -inf",
        ),
    ],
    ids=["spare bit", "scale", "token scale"],
)
def test_values_that_no_writer_produces_are_refused(words: dict[str, str], name: str, change: Any, message: str) -> None:
    """The digests match, as in a forged file, so the codec's own rules must refuse the values."""
    data = broken(create("group", 4, "k", **words), change, name)
    file = container.open_bytes(data)
    assert file.tensor(f"0.k.{name}") is not None
    with pytest.raises(InvalidPayload, match=f"^bytes: {message}"):
        file.verify()


def test_raw_values_may_be_arbitrary() -> None:
    data = broken(create("raw", 3, dtype="fp16"), lambda a: a.fill_(0xFF), "values")
    file = container.open_bytes(data)
    file.verify()
    assert numpy.isnan(numpy.frombuffer(file.tensor("0.k.values"), "<f2")).all()
