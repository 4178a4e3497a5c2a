"""The ids of each row, and its hidden tokens, stay with the tokens to which they belong."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpack
from kvpack.cache.cache import Cache, concat
from kvpack.file.hidden_tokens import FEATURE, HiddenRange, list_features, parse_hidden_ranges
from kvpack.file.inputs import IDS_LEFT_OUT, MAX_IDS, PADDED, ROWS_DIFFER, Inputs, differing_ids_clause, split_feature
from kvpack.formats.errors import InvalidHeader, InvalidParameter, LimitExceeded

if TYPE_CHECKING:
    from pathlib import Path

PADDING = f"tokens 0 to 11 {PADDED}"


def ids(*values: int) -> bytes:
    return numpy.array(values, "<u4").tobytes()


def of_rows(*rows: list[int], hidden: tuple[Any, ...] = ()) -> Inputs:
    """Return the inputs of a cache that begins at position 0, and whose rows have these ids."""
    same = next((n for n, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1), len(rows[0]))
    told = [(PADDING, 0)] if hidden else []
    if same < len(rows[0]):
        told.append((differing_ids_clause(same, len(rows[0])), same))
    known = tuple(ids(*row) for row in rows) if same < len(rows[0]) else ()
    return Inputs(ids(*rows[0][:same]), tuple(text for text, _ in told), tuple(start for _, start in told), known, hidden)


def cache_of(inputs: Inputs | None, batch: int, tokens: int = 12) -> Cache:
    k, v = (torch.randn(batch, 2, tokens, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    return kvpack.pack([(k, v)], "kv=raw:dtype=fp32", inputs=inputs)


ROWS = [[7, 8, *range(10, 20)], [7, 8, *range(30, 40)], [7, 8, *range(50, 60)]]
HIDDEN = (HiddenRange(0, 0, 5), HiddenRange(2, 0, 2), HiddenRange(2, 4, 6))


def test_a_file_keeps_the_ids_of_each_row_and_the_hidden_tokens(tmp_path: Path) -> None:
    cache = cache_of(of_rows(*ROWS, hidden=HIDDEN), 3)
    kvpack.save(cache, tmp_path / "file")
    found = kvpack.load(tmp_path / "file").inputs
    assert found == cache.inputs
    assert found is not None
    assert found.rows == tuple(ids(*row) for row in ROWS)
    assert found.hidden == HIDDEN
    assert not found.rows_are_unknown
    assert (tmp_path / "file").stat().st_size == cache.nbytes
    for layers, tokens in ((None, (0, 4)), ([0], (3, 12))):
        part = kvpack.load(tmp_path / "file", layers=layers, tokens=tokens)
        assert part.inputs == cache[:, slice(*tokens)].inputs


def test_a_cache_returns_the_ids_of_each_sequence() -> None:
    assert cache_of(of_rows(*ROWS), 3).token_ids.tolist() == ROWS
    assert cache_of(of_rows(ROWS[0], ROWS[0]), 2).token_ids.tolist() == [ROWS[0]] * 2
    assert cache_of(of_rows(*ROWS), 3)[:, 3:5].token_ids.tolist() == [row[3:5] for row in ROWS]
    assert cache_of(None, 2).token_ids.shape == (2, 0)
    assert cache_of(Inputs(ids(2**32 - 1)), 1).token_ids.tolist() == [[2**32 - 1]]


def test_identical_rows_are_stored_once() -> None:
    same = of_rows([1, 2, 3], [1, 2, 3])
    assert same == Inputs(ids(1, 2, 3))
    assert cache_of(of_rows(*ROWS), 3)[:, :2].inputs == Inputs(ids(7, 8))
    assert cache_of(of_rows(*ROWS), 3).select([1, 1]).inputs == Inputs(ids(*ROWS[1]))


def test_ids_with_a_wrong_number_of_rows_are_ignored() -> None:
    required, features = of_rows(*ROWS).to_features()
    assert required == ()
    assert Inputs.from_features(features, batch=3) == of_rows(*ROWS)
    absent = replace(of_rows(*ROWS), rows=())
    assert Inputs.from_features(features, batch=2) == absent
    data = features["row-ids.0"]
    for other in (data[:-1], data + b"\0", b"", data[:12], (2).to_bytes(4, "little") + data[4:]):
        found = Inputs.from_features({**features, "row-ids.0": other}, batch=3)
        assert found == absent
        assert found is not None
        assert found.rows_are_unknown
    del features["row-ids.0"]
    assert Inputs.from_features(features, batch=3) == absent


def test_ids_beyond_the_tokens_are_ignored_without_using_memory() -> None:
    """A header of 4 MB can declare a million ids that thousands of sequences share."""
    batch = 4096
    own = struct.pack("<IQ", batch, 1) + numpy.arange(batch, dtype="<u4").tobytes()
    features = split_feature("token-ids", bytes(2**22)) | split_feature("row-ids", own)
    tracemalloc.start()
    try:
        found = Inputs.from_features(features, batch=batch, tokens=2)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert found == Inputs(ids(0, 0))
    assert Inputs.from_features(of_rows(*ROWS).to_features()[1], batch=3, tokens=3) == replace(
        of_rows(*ROWS), rows=tuple(row[:12] for row in of_rows(*ROWS).rows)
    )


def test_ids_of_sequences_are_known_without_an_explicit_clause() -> None:
    _, features = of_rows(*ROWS).to_features()
    features["inputs"] = Inputs(of_rows(*ROWS).token_ids).to_bytes()
    assert Inputs.from_features(features, batch=3) == of_rows(*ROWS)
    assert Inputs.from_features(features, batch=3, start=5).undetermined == (differing_ids_clause(7, 17),)  # type: ignore[union-attr]


def test_ids_that_do_not_fit_in_a_header_are_unknown(tmp_path: Path) -> None:
    tokens = MAX_IDS // 4 + 10
    rows = tuple(numpy.full(tokens, row, "<u4").tobytes() for row in range(4))
    inputs = Inputs(b"", (differing_ids_clause(0, tokens),), (0,), rows)
    k = torch.zeros(4, 1, tokens, 4, dtype=torch.bfloat16)
    kvpack.save(kvpack.pack([(k, None)], "k=group:b=2,g=4;v=raw", inputs=inputs), tmp_path / "file")
    found = kvpack.load(tmp_path / "file").inputs
    assert found is not None
    assert [len(row) // 4 for row in found.rows] == [MAX_IDS // 4] * 4
    assert found.rows_are_unknown
    assert found.undetermined[-1].endswith(IDS_LEFT_OUT)
    assert found.starts[-1] == MAX_IDS // 4
    assert not found.slice(0, MAX_IDS // 4, 0).rows_are_unknown


def test_selected_rows_keep_their_ids_and_padding() -> None:
    cache = cache_of(of_rows(*ROWS, hidden=HIDDEN), 3)
    assert cache.select([1]).inputs == Inputs(ids(*ROWS[1]))
    assert cache.select([0]).inputs == Inputs(ids(*ROWS[0]), (PADDING,), (0,), hidden=((0, 0, 5),))
    turned = cache.select([2, 1]).inputs
    assert turned is not None
    assert turned.rows == (ids(*ROWS[2]), ids(*ROWS[1]))
    assert turned.hidden == ((0, 0, 2), (0, 4, 6))
    # Rows that were different before the first token have other values, whatever their ids are from there on.
    later = cache_of(of_rows([1, 5, 6, *range(9)], [2, 5, 6, *range(9)]), 2)[:, 1:]
    assert later.inputs is not None
    assert later.inputs.rows == (ids(5, 6, *range(9)),) * 2
    again = later.select([1, 0]).inputs
    assert again is not None
    assert any(text.endswith(ROWS_DIFFER) for text in again.undetermined)
    assert later.select([1]).inputs == Inputs(ids(5, 6, *range(9)))


def test_inputs_recorded_for_another_number_of_tokens_are_refused() -> None:
    k = torch.zeros(2, 1, 12, 4)
    recorded = Inputs(ids(*range(12)), first=0, count=12)
    cache = kvpack.pack([(k, k)], "raw", inputs=recorded)
    assert cache.inputs == Inputs(ids(*range(12)))
    with pytest.raises(InvalidParameter, match=r"recorded for tokens \[0:12\] of a sequence, but the cache has tokens \[501:513\]"):
        kvpack.pack([(k, k)], "raw", start=501, inputs=recorded)
    with pytest.raises(InvalidParameter, match=r"recorded for tokens \[0:12\] of a sequence, but the cache has tokens \[0:10\]"):
        kvpack.pack([(k[:, :, :10], k[:, :, :10])], "raw", inputs=recorded)
    # Inputs of files and of packed caches were recorded for their tokens, too.
    with pytest.raises(InvalidParameter, match=r"inputs have 12 token ids per sequence, .*pass inputs\.slice\(0, 10, 0\); otherwise, omit"):
        kvpack.pack([(k[:, :, :10], k[:, :, :10])], "raw", inputs=cache.inputs)
    cropped = kvpack.pack([(k[:, :, :10], k[:, :, :10])], "raw", inputs=recorded.slice(0, 10, 0))
    assert cropped.token_ids.tolist() == [[*range(10)]] * 2
    with pytest.raises(InvalidParameter, match=r"starts at position 501, but its inputs start at position 0"):
        replace(cache, start=501)
    assert replace(cache, start=501, inputs=None).start == 501
    part = cache[:, 4:]
    assert part.inputs is not None
    with pytest.raises(InvalidParameter, match=r"recorded for tokens \[4:12\] of a sequence, but the cache has tokens \[0:8\]"):
        kvpack.pack([(k[:, :, :8], k[:, :, :8])], "raw", inputs=part.inputs)
    with pytest.raises(InvalidParameter, match="inputs are for 3 sequences, but the cache has 2"):
        kvpack.pack([(k, k)], "raw", inputs=of_rows(*ROWS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": (b"1234", b"12345678")}, "rows must all have the same length, a multiple of 4 bytes"),
        ({"rows": (b"123", b"123")}, "rows must all have the same length, a multiple of 4 bytes"),
        ({"token_ids": b"1234", "rows": (b"12345678", b"56781234")}, "but one row begins with different ids"),
    ],
)
def test_malformed_rows_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        Inputs(**arguments)


def test_hidden_tokens_are_checked_as_specified() -> None:
    def read(*stretches: tuple[int, int, int]) -> tuple[HiddenRange, ...]:
        _, ignorable = list_features([HiddenRange(*stretch) for stretch in stretches])
        return parse_hidden_ranges(ignorable[FEATURE], 2, 3, 9)

    assert read((0, 3, 4), (0, 5, 9), (1, 3, 9)) == ((0, 3, 4), (0, 5, 9), (1, 3, 9))
    for stretches, message in (
        ([(2, 3, 4)], "record 0 refers to sequence 2, but the file has 2"),
        ([(0, 2, 4)], r"positions \[2:4\], expected a range within \[3:9\]"),
        ([(0, 3, 10)], r"positions \[3:10\], expected a range within \[3:9\]"),
        ([(0, 4, 4)], r"positions \[4:4\], expected a range within \[3:9\]"),
        ([(0, 3, 4), (0, 4, 5)], r"is \(0, 4, 5\) after \(0, 3, 4\), expected ascending ranges"),
        ([(1, 3, 4), (0, 4, 5)], r"is \(0, 4, 5\) after \(1, 3, 4\), expected ascending ranges"),
    ):
        with pytest.raises(InvalidHeader, match=message):
            read(*stretches)
    with pytest.raises(LimitExceeded, match=r"hides 3277 ranges of tokens, but a file can have at most 3276: save fewer sequences"):
        list_features([HiddenRange(row, 0, 1) for row in range(3277)])


@dataclass
class Token:
    """The expected content of one cell of a batch: its id, and whether it is hidden."""

    id: int
    hidden: bool


def grid_of(cache: Cache) -> list[list[Token]]:
    """Return the tokens of each row as the inputs of ``cache`` record them."""
    inputs, batch = cache.inputs, cache[0].k.batch
    assert inputs is not None
    rows = [numpy.frombuffer(row, "<u4").tolist() for row in inputs.known_ids]
    rows = rows if len(rows) > 1 else rows * batch
    hidden = {(row, place) for row, start, stop in inputs.hidden for place in range(start, stop)}
    return [[Token(one, (row, cache.start + place) in hidden) for place, one in enumerate(ids)] for row, ids in enumerate(rows)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ids_follow_the_values_computed_from_them(data: st.DataObject, tmp_path: Path) -> None:
    """Every value encodes its row and token, so ids can be compared with values after any cut, join, selection or save."""
    batch, tokens = data.draw(st.integers(1, 3)), 12
    cells = [[data.draw(st.integers(0, 2)) for _ in range(tokens)] for _ in range(batch)]
    pads = [data.draw(st.integers(0, 4)) for _ in range(batch)]
    hidden = tuple(HiddenRange(row, 0, pad) for row, pad in enumerate(pads) if pad)
    # A value of the key is the id of its token, and of the value whether it is hidden.
    k = torch.tensor(cells, dtype=torch.float32)[:, None, :, None].expand(-1, 1, -1, 4)
    v = (torch.arange(tokens) < torch.tensor(pads)[:, None]).float()[:, None, :, None].expand(-1, 1, -1, 4)
    cache = kvpack.pack([(k, v)], "kv=raw:dtype=fp32", inputs=of_rows(*cells, hidden=hidden))
    for _ in range(data.draw(st.integers(1, 6))):
        kind = data.draw(st.sampled_from(["slice", "select", "join", "save", "convert", "append"]))
        if kind == "slice":
            start = data.draw(st.integers(0, cache.tokens))
            cache = cache[:, start : data.draw(st.integers(start, cache.tokens))]
        elif kind == "select":
            cache = cache.select(data.draw(st.lists(st.integers(0, cache[0].k.batch - 1), min_size=1, max_size=3)))
        elif kind == "join":
            at = data.draw(st.integers(0, cache.tokens))
            cache = concat([cache[:, :at], cache[:, at:]])
        elif kind == "save":
            kvpack.save(cache, tmp_path / "file")
            cache = kvpack.load(tmp_path / "file")
        elif kind == "append":
            cache = cache.append([(torch.zeros(cache[0].k.batch, 1, 0, 4),) * 2])
        else:
            cache = cache.convert("kv=raw:dtype=fp32")
        assert cache[0].k is not None
        assert cache[0].v is not None
        found = [[[token.id, token.hidden] for token in row] for row in grid_of(cache)]
        k, v = cache.unpack(torch.float32)[0]
        values = zip(k[:, 0, :, 0], v[:, 0, :, 0], strict=True)
        expected = [[[int(one), bool(two)] for one, two in zip(*row, strict=True)] for row in values]
        for mine, theirs in zip(found, expected, strict=True):
            # Fewer may be known; what is known is right.
            assert mine == theirs[: len(mine)]
        inputs = cache.inputs
        assert inputs is not None
        ends = {len(row) for row in found}
        assert ends == {cache.tokens} or any(text.endswith(ROWS_DIFFER) for text in inputs.undetermined)
        assert {(row, place) for row, line in enumerate(expected) for place, (_, hides) in enumerate(line) if hides} == {
            (row, place - cache.start) for row, start, stop in inputs.hidden for place in range(start, stop)
        }


@pytest.mark.parametrize(("sequences", "rows"), [(2, 3), (3, 2), (1, 2)])
def test_a_cache_has_ids_for_every_sequence(sequences: int, rows: int) -> None:
    """Otherwise a file would lose all ids, because readers ignore ids for another number of rows."""
    inputs = of_rows(*([first, *range(10, 21)] for first in range(rows)))
    with pytest.raises(InvalidParameter, match=f"^the cache has {sequences} sequences, but its inputs have token ids for {rows}: "):
        replace(cache_of(None, sequences), inputs=inputs)
    assert replace(cache_of(None, rows), inputs=inputs).inputs == inputs
