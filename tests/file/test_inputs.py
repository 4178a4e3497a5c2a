"""The inputs recorded in a cache stay correct in slices and joins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import kvpack
from kvpack.cache.cache import Cache, concat
from kvpack.cache.packing import pack
from kvpack.file.inputs import WITHOUT_IDS, Inputs
from kvpack.file.sources import MAX_NAMED, Source, clause, first_difference, parse_sources
from kvpack.formats.errors import InvalidParameter

EMBEDDINGS = "tokens 8 to 11 came from embeddings, not from token ids"


def ids(*values: int) -> bytes:
    return numpy.array(values, "<u4").tobytes()


def cache_of(tokens: int, start: int, inputs: Inputs | None) -> Cache:
    side = torch.randn(1, 2, tokens, 32, generator=torch.Generator().manual_seed(start))
    return replace(pack([(side, side)], "kv=raw:dtype=fp32", start=start), inputs=inputs)


def test_a_prefix_before_the_first_undetermined_input_is_determined() -> None:
    cache = cache_of(12, 0, Inputs(ids(*range(12)), (EMBEDDINGS,), (8,)))
    assert cache[:, :8].inputs == Inputs(ids(*range(8)))
    assert cache[:, :9].inputs == Inputs(ids(*range(9)), (EMBEDDINGS,), (8,))


def test_later_tokens_depend_on_earlier_undetermined_inputs() -> None:
    cache = cache_of(16, 0, Inputs(ids(*range(16)), (EMBEDDINGS,), (8,)))
    assert cache[:, 12:].inputs == Inputs(ids(12, 13, 14, 15), (EMBEDDINGS,), (8,))


def test_slices_of_a_cache_that_starts_later_keep_their_inputs() -> None:
    cache = cache_of(8, 4, Inputs(ids(1, 2, 3, 4), (EMBEDDINGS,), (8,)))
    assert cache[:, :4].inputs == Inputs(ids(1, 2, 3, 4))
    assert cache[:, 2:5].inputs == Inputs(ids(3, 4), (EMBEDDINGS,), (8,))


def test_ids_of_joined_caches_are_known_up_to_the_first_gap() -> None:
    first, second = cache_of(4, 0, Inputs(ids(1, 2, 3, 4))), cache_of(4, 4, Inputs(ids(5, 6, 7, 8), (EMBEDDINGS,), (6,)))
    assert concat([first, second]).inputs == Inputs(ids(*range(1, 9)), (EMBEDDINGS,), (6,))
    partly = replace(first, inputs=Inputs(ids(1, 2, 3)))
    assert concat([partly, second]).inputs == Inputs(ids(1, 2, 3), (f"token 3 {WITHOUT_IDS}", EMBEDDINGS), (3, 6))
    unknown = replace(first, inputs=None)
    assert concat([unknown, second]).inputs == Inputs(b"", (EMBEDDINGS,), (6,))
    assert concat([first, replace(second, inputs=None)]).inputs == Inputs(ids(1, 2, 3, 4), (f"tokens 4 to 7 {WITHOUT_IDS}",), (4,))
    assert concat([unknown, replace(second, inputs=None)]).inputs is None


def test_a_selected_sequence_keeps_its_source() -> None:
    one, two = Source("1" * 32, "a" * 32), Source("", "b" * 32)
    inputs = Inputs(ids(1, 2), (EMBEDDINGS, clause((one, two))), (8, 0))
    assert [parse_sources(text) for text in inputs.select([1, 0, 1], 0).undetermined] == [None, (two, one, two)]
    assert inputs.select([0], 0).undetermined == (EMBEDDINGS, clause((one,)))
    shared = Inputs(b"", (clause((one,)),))
    assert shared.select([2, 0], 0) == shared
    # Of fewer sequences than the batch, nobody knows which are meant.
    assert inputs.select([2], 0).undetermined == inputs.undetermined
    assert parse_sources(clause((one, two))[:-1]) is None
    assert parse_sources(EMBEDDINGS) is None


def test_sources_leave_room_for_other_inputs() -> None:
    sources = tuple(Source(f"{number:032x}", f"{number:032x}") for number in range(MAX_NAMED + 1))
    inputs = Inputs(ids(1, 2), (EMBEDDINGS, clause(sources[1:])), (8, 0))
    assert Inputs.from_bytes(inputs.to_bytes()) == inputs
    assert parse_sources(inputs.undetermined[1]) == sources[1:]
    assert clause(sources) == "tokens depend on what an encoder was given"


def test_a_source_has_the_input_or_the_output_of_another() -> None:
    one, rounded, other = Source("1" * 32, "a" * 32), Source("1" * 32, "b" * 32), Source("2" * 32, "c" * 32)
    assert first_difference((one,), (rounded,)) is None
    assert first_difference((one,), (Source("3" * 32, "a" * 32),)) is None
    assert first_difference((Source("", "b" * 32),), (Source("", "c" * 32),)) == 0
    assert first_difference((one, one), (rounded, other)) == 1
    assert first_difference((one,), (one, one, other)) == 2
    assert first_difference((one,), (Source("", "a" * 32),)) is None
    assert first_difference((rounded,), (Source("", "a" * 32),)) == 0
    assert first_difference((one, one, one), (one, one)) == 0


def test_a_slice_depends_only_on_inputs_before_it(tmp_path: Path) -> None:
    one = cache_of(12, 0, Inputs(ids(*range(12))))
    other = cache_of(12, 0, Inputs(ids(*range(3), 50, *range(4, 12))))
    kvpack.save(other, tmp_path / "other")
    told = r"^caches\[1\] was computed after different tokens: the id of sequence 0 at position 3 was 50, but here it is 3: "
    for tail in (other[:, 8:], other[:, 2:][:, 6:], kvpack.load(tmp_path / "other", tokens=(8, 12))):
        with pytest.raises(InvalidParameter, match=told):
            concat([one[:, :8], tail])
        with pytest.raises(InvalidParameter, match=told.replace("1", "2", 1)):
            concat([one[:, :4], one[:, 4:8], tail])
    for tail in (one[:, 8:], one[:, 2:][:, 6:]):
        assert concat([one[:, :8], tail]).inputs == one.inputs
    with pytest.raises(InvalidParameter, match="the id of sequence 0 at position 3 was 50"):
        concat([one[:, 6:8], other[:, 8:]])
    with pytest.raises(InvalidParameter, match="the id of sequence 0 at position 3 was 50"):
        concat([one[:, :6], concat([other[:, 6:8], other[:, 8:]])])
    # What came before a difference, and pieces of which nothing is known, may be joined.
    assert concat([one[:, :3], other[:, 3:]]).inputs == other.inputs
    assert concat([replace(one, inputs=None)[:, :8], other[:, 8:]]).tokens == 12


def test_a_saved_slice_depends_only_on_inputs_before_it(tmp_path: Path) -> None:
    def saved(cache: kvpack.Cache) -> kvpack.Cache:
        kvpack.save(cache, tmp_path / "slice")
        return kvpack.load(tmp_path / "slice")

    one = cache_of(12, 0, Inputs(ids(*range(12))))
    other = cache_of(12, 0, Inputs(ids(*range(3), 50, *range(4, 12))))
    told = r"^caches\[1\] was computed after different tokens: the SHA-256 of the ids of sequence 0 before position {} differs: join only"
    for tail in (saved(other[:, 8:]), saved(saved(other[:, 8:])[:, :2]), saved(saved(other)[:, 8:])):
        with pytest.raises(InvalidParameter, match=told.format(8)):
            concat([one[:, :8], tail])
    with pytest.raises(InvalidParameter, match=told.format(6)):
        concat([saved(one[:, 6:8]), other[:, 8:]])
    for head in (one, saved(one)):
        assert concat([saved(head[:, :8]), saved(head[:, 8:])]).inputs == one.inputs
        assert concat([saved(head[:, 6:8]), head[:, 8:]]).inputs == one[:, 6:].inputs
    # Neither file has the ids in between, and those of a hand-made slice are not known.
    assert concat([saved(one[:, 6:8]), saved(other[:, 8:])]).tokens == 6
    for parts in (
        [one[:, :6], concat([saved(one[:, 6:8]), saved(other[:, 8:])])],
        [one[:, :8], saved(other[:, 6:])[:, 2:]],
        [saved(one[:, 6:])[:, :2], saved(other[:, 6:])[:, 2:]],
    ):
        with pytest.raises(InvalidParameter, match=told.format("[68]")):
            concat(parts)
    assert concat([saved(one[:, 6:])[:, :2], saved(one[:, 6:])[:, 2:]]).inputs == one[:, 6:].inputs
    assert concat([one[:, :8], saved(cache_of(4, 8, Inputs(ids(8, 9, 10, 11))))]).inputs == one.inputs


def test_a_saved_row_depends_only_on_its_own_inputs(tmp_path: Path) -> None:
    rows = (ids(*range(8)), ids(*range(20, 28)))
    side = torch.randn(2, 2, 8, 32, generator=torch.Generator().manual_seed(0))
    batch = replace(pack([(side, side)], "kv=raw:dtype=fp32"), inputs=Inputs.from_rows(rows, (), (), 0))
    kvpack.save(batch[:, 5:], tmp_path / "slice")
    tail = kvpack.load(tmp_path / "slice")
    for kept in ([0, 1], [1, 0], [1]):
        assert torch.equal(concat([batch[:, :5].select(kept), tail.select(kept)]).token_ids, batch.select(kept).token_ids)
    with pytest.raises(InvalidParameter, match="SHA-256 of the ids of sequence 0 before position 5 differs"):
        concat([batch[:, :5].select([0]), tail.select([1])])


def test_a_batch_slice_depends_only_on_its_own_rows() -> None:
    rows = (ids(*range(8)), ids(*range(20, 28)))
    side = torch.randn(2, 2, 8, 32, generator=torch.Generator().manual_seed(0))
    batch = replace(pack([(side, side)], "kv=raw:dtype=fp32"), inputs=Inputs.from_rows(rows, (), (), 0))
    for kept in ([0, 1], [1, 0], [1]):
        assert torch.equal(concat([batch[:, :5].select(kept), batch[:, 5:].select(kept)]).token_ids, batch.select(kept).token_ids)
    for first, second in (([0, 1], [1, 0]), ([0, 0], [0, 1])):
        with pytest.raises(InvalidParameter, match=r"was computed after different tokens: the id of sequence \d at position \d was"):
            concat([batch[:, :5].select(first), batch[:, 5:].select(second)])
    with pytest.raises(InvalidParameter, match="the id of sequence 0 at position 4 was 24, but here it is 4"):
        concat([batch[:, :5].select([0]), batch[:, 5:].select([1])])


def test_slicing_and_joining_are_inverse() -> None:
    cache = cache_of(16, 0, Inputs(ids(*range(16)), (EMBEDDINGS, "tokens 12 to 15 were computed in training mode"), (8, 12)))
    assert concat([cache[:, :9], cache[:, 9:]]).inputs == cache.inputs


def test_layer_operations_keep_the_inputs() -> None:
    inputs = Inputs(ids(*range(8)), (EMBEDDINGS,), (8,))
    cache = cache_of(12, 0, inputs)
    side = torch.randn(1, 2, 3, 32)
    for other in (cache.convert("raw"), cache.to("cpu"), cache.append([(side, side)])):
        assert other.inputs == inputs


def test_tokens_with_unknown_ids_are_named_whatever_their_origin(tmp_path: Path) -> None:
    side = torch.randn(1, 2, 3, 32)
    named = Inputs(ids(*range(12)), (f"tokens 12 to 14 {WITHOUT_IDS}",), (12,))
    cache = cache_of(12, 0, Inputs(ids(*range(12))))
    longer = cache.append([(side, side)])
    assert longer.inputs == named
    assert longer.append([(side, side)]).inputs == named
    assert longer[:, :12].inputs == cache.inputs
    assert longer[:, 12:].inputs == Inputs(b"", named.undetermined, named.starts)
    assert kvpack.pack([(torch.randn(1, 2, 15, 32),) * 2], "raw", inputs=Inputs(ids(*range(12)))).inputs == named
    old = longer.contents
    assert replace(longer, inputs=Inputs(ids(*range(12)))).contents == old, (
        "a file without the clause was not read like one of an earlier version"
    )
    rows = Inputs.from_rows((ids(1, 2), ids(1, 3)), (), (), 0)
    batch = replace(cache_of(2, 0, None).select([0, 0]), inputs=rows).append([(side.expand(2, -1, -1, -1),) * 2])
    assert batch.select([1]).inputs == Inputs(ids(1, 3), (f"tokens 2 to 4 {WITHOUT_IDS}",), (2,))


def test_undetermined_inputs_after_an_unknown_token_are_kept_in_every_part() -> None:
    cache = cache_of(12, 0, Inputs(undetermined=("everything was computed under autocast to bfloat16",)))
    assert cache[:, :1].inputs == cache.inputs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_ids": b"123"}, "4 for each id, but got 3 bytes"),
        ({"token_ids": [1, 2]}, "4 for each id, but got a list"),
        ({"undetermined": ("",)}, "expected a tuple of nonempty strings"),
        ({"undetermined": ("a", "b"), "starts": (1,)}, "starts has 1 positions, but undetermined has 2 clauses"),
    ],
)
def test_invalid_inputs_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        Inputs(**arguments)


def test_a_file_keeps_the_inputs(tmp_path: Path) -> None:
    for inputs in (
        None,
        Inputs(),
        Inputs(ids(1, 2, 3), (f"tokens 3 to 11 {WITHOUT_IDS}",), (3,)),
        Inputs(ids(*range(12)), (EMBEDDINGS, "tokens 9 to 9 \u00fc"), (8, 9)),
    ):
        kvpack.save(cache_of(12, 0, inputs), tmp_path / "file")
        assert kvpack.load(tmp_path / "file").inputs == inputs
        assert (tmp_path / "file").stat().st_size == cache_of(12, 0, inputs).nbytes


def test_inputs_beyond_the_header_limit_are_partially_kept() -> None:
    many = Inputs(ids(*range(20000)), (EMBEDDINGS,), (8,))
    found = Inputs.from_bytes(many.to_bytes())
    assert (found.undetermined, found.starts) == (many.undetermined, many.starts)
    assert many.token_ids.startswith(found.token_ids)
    assert found.tokens > 16000
    crowded = Inputs(b"", tuple(f"token {number} came from embeddings" for number in range(2000)), tuple(range(5, 2005)))
    assert Inputs.from_bytes(crowded.to_bytes()) == Inputs(b"", ("more than a file lists",), (5,))


CUT = [b"", b"\x02" + bytes(7) + b"1234", bytes(8) + b"1", bytes(8) + bytes(12), bytes(8) + bytes(8) + b"\x01\x00\x00\x00\xff"]


@pytest.mark.parametrize("data", CUT)
def test_invalid_bytes_determine_nothing(data: bytes) -> None:
    found = Inputs.from_bytes(data)
    assert found == Inputs(undetermined=("its inputs are recorded in an unknown form",))


@pytest.mark.parametrize(
    ("size", "start", "known"), [(32, 5, True), (64, 5, True), (33, 5, False), (96, 5, False), (0, 5, False), (32, 0, False)]
)
def test_earlier_ids_have_one_digest_per_sequence_or_one_for_all(size: int, start: int, known: bool) -> None:
    inputs = Inputs.from_features({"inputs": Inputs().to_bytes(), "earlier-ids": bytes(size)}, batch=2, start=start)
    assert inputs is not None
    assert bool(inputs.earlier) == known


@pytest.mark.parametrize(("sequences", "stored"), [(2048, True), (2049, False)])
def test_digests_that_do_not_fit_are_omitted(sequences: int, stored: bool) -> None:
    inputs = Inputs(earlier={5: tuple(number.to_bytes(32, "little") for number in range(sequences))})
    assert ("earlier-ids" in inputs.to_features(5)[1]) == stored
