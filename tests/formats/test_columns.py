"""Tests of bit packing against an integer reference that follows spec/README.md, and with every kind of invalid word."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpack.formats.columns import MAX_FIELDS, Columns, default_fields, row_bytes
from kvpack.formats.errors import InvalidParameter, InvalidPayload
from support.strategies import digits, max_fields, packings, with_poisoned_padding

INVALID = [
    pytest.param(0, (4,), 1, (), "the number of symbols is 0, expected at least 1", id="no symbols"),
    pytest.param(4, (), 1, (), "expected one or more integers from 2 to 65536", id="no digits"),
    pytest.param(4, (1,), 1, (), "expected one or more integers from 2 to 65536", id="base 1"),
    pytest.param(4, (65537,), 1, (), "expected one or more integers from 2 to 65536", id="base above 65536"),
    pytest.param(4, (4,), 0, (), "the number of fields is 0, expected 1 to 128", id="no fields"),
    pytest.param(4, (4,), 129, (), "the number of fields is 129, expected 1 to 128", id="too many fields"),
    pytest.param(4, (2,), 10**18, (), "expected 1 to 128", id="absurd fields"),
    pytest.param(64, (8,), 43, (), "at most 16 bytes", id="17 bytes"),
    pytest.param(64, (3,), 34, (), "2\\^53 values", id="above 2^53 values"),
    pytest.param(64, (3, 2), 21, (), "2\\^53 values", id="above 2^53 values in two digits"),
    pytest.param(4, (4,), 1, (5,), "one per base, each from 1 to its base", id="alphabet above base"),
    pytest.param(4, (4,), 1, (0,), "one per base, each from 1 to its base", id="empty alphabet"),
    pytest.param(4, (4, 4), 1, (4,), "one per base", id="alphabet missing"),
]

BAD_WORDS = [
    pytest.param(Columns(5, (8,), 3), [0, 1 << 9], "spare bits of word at \\[0, 1\\]", id="spare bit above the last field"),
    pytest.param(Columns(5, (16,), 3), [0, 1 << 8], "spare bits of word at \\[0, 1\\] is 256, expected at most 0", id="spare bits"),
    pytest.param(Columns(3, (256,), 1), [0, 1 << 8], "spare bits of word", id="odd tail byte of bit fields"),
    pytest.param(Columns(3, (200,), 1), [0, 1 << 8], "the unused byte at \\[0, 3\\] is 1", id="odd tail byte"),
    pytest.param(Columns(4, (9,), 4), [9**4], "column at \\[0, 0\\] is 6561, expected at most 6560", id="value above base^F"),
    pytest.param(Columns(7, (9,), 5), [0, 2 * 9**3], "unused field 3 at \\[0, 1\\] is 2, expected at most 0", id="unused field"),
    pytest.param(Columns(4, (16,), 4, (9,)), [0x0900], "symbol of field 2 at \\[0, 0\\] is 9, expected at most 8", id="digit"),
    pytest.param(Columns(2, (6,), 2, (5,)), [5], "symbol of field 0", id="digit outside its alphabet, base not a power of two"),
    pytest.param(Columns(2, (4, 8), 2, (4, 6)), [7 << 4], "symbol of field 0 at \\[0, 0\\] is 7, expected at most 5", id="second alphabet"),
]


def reference_planes(packing: Columns, row: list[list[int]]) -> list[list[int]]:
    """Return the planes of one row, computed with Python integers and bytes as spec/README.md describes."""
    n, fields = packing.symbols, packing.fields
    width = math.ceil(n / fields)
    quantity = next(q for q in range(1, 17) if 256**q >= math.prod(packing.bases) ** fields)
    columns = []
    for c in range(width):
        value, place = 0, 1
        for symbols, base in zip(row, packing.bases, strict=True):
            for k in range(fields):
                value += place * (symbols[k * width + c] if k * width + c < n else 0)
                place *= base
        columns.append(value.to_bytes(quantity, "little"))
    planes = [[column[2 * p] + 256 * column[2 * p + 1] for column in columns] for p in range(quantity // 2)]
    if quantity % 2:
        last = [column[-1] for column in columns]
        planes += reference_planes(Columns(width, (256,), 2), [last])
    return planes


@given(st.data())
def test_packing_follows_the_specification_and_is_reversible(data: st.DataObject) -> None:
    packing = data.draw(packings())
    values = data.draw(digits(packing))
    planes = packing.pack([with_poisoned_padding(torch.tensor(digit)) for digit in values])
    expected = [reference_planes(packing, [digit[row] for digit in values]) for row in range(2)]
    assert [plane.dtype for plane in planes] == [torch.uint16] * len(planes)
    assert [[plane[row].tolist() for plane in planes] for row in range(2)] == expected
    assert packing.planes == tuple(map(len, expected[0]))
    assert packing.row_bytes == row_bytes(packing.symbols, packing.bases, packing.fields) == 2 * sum(map(len, expected[0]))
    unpacked = packing.unpack([with_poisoned_padding(plane) for plane in planes])
    assert [digit.tolist() for digit in unpacked] == values
    assert all(digit.dtype == torch.int32 for digit in unpacked)
    packing.check([plane.numpy() for plane in planes], "x")


@given(st.data())
def test_check_accepts_exactly_the_packed_words(data: st.DataObject) -> None:
    packing = data.draw(packings())
    count = sum(packing.planes)
    words = data.draw(st.lists(st.one_of(st.integers(0, 0xFFFF), st.integers(0, 3)), min_size=count, max_size=count))
    ends = [sum(packing.planes[: p + 1]) for p in range(len(packing.planes))]
    planes = [numpy.array([words[end - size : end]], dtype=numpy.uint16) for end, size in zip(ends, packing.planes, strict=True)]
    unpacked = packing.unpack([torch.from_numpy(plane) for plane in planes])
    valid = all(bool((digit < alphabet).all()) for digit, alphabet in zip(unpacked, packing.alphabets, strict=True))
    if valid:
        repacked = packing.pack(unpacked)
        valid = all(numpy.array_equal(a.numpy(), b) for a, b in zip(repacked, planes, strict=True))
    if valid:
        packing.check(planes, "x")
    else:
        with pytest.raises(InvalidPayload, match=r"^x"):
            packing.check(planes, "x")


@pytest.mark.parametrize(("packing", "words", "message"), BAD_WORDS)
def test_an_invalid_word_is_named(packing: Columns, words: list[int], message: str) -> None:
    assert sum(packing.planes) == len(words)
    packing.check([numpy.zeros((1, size), numpy.uint16) for size in packing.planes], "layers[3].k.codes")
    plane = numpy.array([words], numpy.uint16)
    with pytest.raises(InvalidPayload, match=rf"^layers\[3\]\.k\.codes(, plane 0)?: .*{message}"):
        packing.check([plane], "layers[3].k.codes")


def test_a_digit_above_bit_64_of_a_wide_column_is_checked() -> None:
    packing = Columns(12, (1024,), 12, (576,))
    (digit,) = packing.unpack([torch.full((1, 1), 0, dtype=torch.uint16)] * 8)
    digit[0, 11] = 576
    planes = [plane.numpy() for plane in Columns(12, (1024,), 12).pack([digit])]
    with pytest.raises(InvalidPayload, match=r"symbol of field 11 at .* is 576, expected at most 575"):
        packing.check(planes, "x")


@pytest.mark.parametrize(("symbols", "bases", "fields", "alphabets", "message"), INVALID)
def test_a_packing_outside_the_limits_is_refused(
    symbols: int, bases: tuple[int, ...], fields: int, alphabets: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InvalidParameter, match=message):
        Columns(symbols, bases, fields, alphabets)


@pytest.mark.parametrize(
    ("symbols", "bases", "fields"),
    [
        pytest.param(128, (2,), MAX_FIELDS, id="128 fields of one bit"),
        pytest.param(64, (8,), 42, id="16 bytes"),
        pytest.param(64, (3,), 33, id="just below 2^53 values"),
        pytest.param(3, (65536, 65536), 4, id="the largest base"),
        pytest.param(3, (4,), 8, id="more fields than symbols"),
    ],
)
def test_the_widest_columns_are_packed_and_unpacked(symbols: int, bases: tuple[int, ...], fields: int) -> None:
    packing = Columns(symbols, bases, fields)
    largest = [torch.full((1, symbols), base - 1) for base in bases]
    for unpacked, digit in zip(packing.unpack(packing.pack(largest)), largest, strict=True):
        assert unpacked.tolist() == digit.tolist()


@given(st.integers(1, 60), st.lists(st.integers(2, 300), min_size=1, max_size=2))
def test_default_fields_minimize_the_number_of_bytes(symbols: int, bases: list[int]) -> None:
    best = default_fields(symbols, bases)
    sizes = {f: row_bytes(symbols, bases, f) for f in range(1, min(max_fields(bases), symbols) + 1)}
    assert sizes[best] == min(sizes.values())
    widths = {f: Columns(symbols, tuple(bases), f).column_bytes for f, size in sizes.items() if size == sizes[best]}
    assert widths[best] == min((width for width in widths.values() if width > 1), default=1)


@pytest.mark.parametrize(
    ("symbols", "bases", "fields", "size"),
    [
        pytest.param(128, (4,), 8, 32, id="2 bits"),
        pytest.param(128, (8,), 8, 48, id="3 bits"),
        pytest.param(128, (16,), 4, 64, id="4 bits"),
        pytest.param(64, (9,), 5, 26, id="base 9"),
        pytest.param(32, (3,), 8, 8, id="base 3"),
        pytest.param(43, (256,), 2, 44, id="octets"),
    ],
)
def test_default_fields_of_common_streams_are_unchanged(symbols: int, bases: tuple[int, ...], fields: int, size: int) -> None:
    assert default_fields(symbols, bases) == fields
    assert row_bytes(symbols, bases, fields) == size


def test_default_fields_refuse_a_symbol_that_fits_in_no_column() -> None:
    with pytest.raises(InvalidParameter, match="does not fit in a column"):
        default_fields(4, (65535,) * 4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("packing", [Columns(20, (8,), 8), Columns(20, (9,), 5), Columns(20, (5, 2), 12), Columns(20, (8, 4), 20)], ids=str)
def test_digits_of_any_dtype_are_packed_alike(dtype: torch.dtype, packing: Columns) -> None:
    values = [torch.arange(20).repeat(2, 1) % base for base in packing.bases]
    expected = [plane.tolist() for plane in packing.pack(values)]
    assert [plane.tolist() for plane in packing.pack([value.to(dtype) for value in values])] == expected


@pytest.mark.parametrize("shape", [(0,), (2, 3, 0), (2, 0, 5)], ids=str)
def test_zero_rows_are_packed_to_zero_rows(shape: tuple[int, ...]) -> None:
    packing = Columns(20, (8, 3), 5)
    planes = packing.pack([torch.zeros(*shape, 20)] * 2)
    assert [plane.shape for plane in planes] == [(*shape, words) for words in packing.planes]
    assert [digit.shape for digit in packing.unpack(planes)] == [(*shape, 20)] * 2
    packing.check([plane.numpy() for plane in planes], "x")
