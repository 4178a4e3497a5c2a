"""Metadata and long token ids are preserved in files, slices and conversions, refused if too large, and shown by inspect."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpack
from kvpack import cli
from kvpack.cache.cache import Cache, concat
from kvpack.file import container, metadata
from kvpack.file.inputs import MAX_IDS, Inputs, join_features, split_feature
from kvpack.formats.errors import InvalidParameter, LimitExceeded
from spec.decoder.metadata import take_metadata

if TYPE_CHECKING:
    from pathlib import Path

GIVEN = {"title": "a manual", "version": 3, "temperature": 0.5, "\u00fc": "", "least": -(2**63)}


def cache_of(tokens: int = 12, start: int = 0, **fields: Any) -> Cache:
    x = torch.randn(1, 2, tokens, 32, generator=torch.Generator().manual_seed(start))
    return kvpack.pack([(x, x)], "fp32", start=start, **fields)


def test_files_and_derived_caches_keep_metadata(tmp_path: Path) -> None:
    size = kvpack.save(cache_of(), tmp_path / "a", metadata=GIVEN)
    cache = kvpack.load(tmp_path / "a")
    assert dict(cache.metadata) == GIVEN
    assert cache.nbytes == size == (tmp_path / "a").stat().st_size
    x = torch.randn(1, 2, 3, 32)
    for made in (cache[:, :4], cache.convert("raw"), cache.append([(x, x)]), cache.select([0, 0]), concat([cache, cache_of(3, 12)])):
        kvpack.save(made, tmp_path / "b")
        assert dict(kvpack.load(tmp_path / "b").metadata) == GIVEN
    kvpack.save(cache, tmp_path / "b", metadata={"other": 1})
    assert dict(kvpack.load(tmp_path / "b").metadata) == {"other": 1}
    kvpack.save(cache, tmp_path / "b", metadata={})
    assert (tmp_path / "b").stat().st_size == cache_of().nbytes
    assert dict(kvpack.load(tmp_path / "b").metadata) == {}
    with pytest.raises(TypeError):
        cache.metadata["title"] = "another"  # type: ignore[index]


def test_a_stored_chunk_has_no_metadata(tmp_path: Path) -> None:
    kvpack.save(cache_of(512, model={"name": "m"}), tmp_path / "a", metadata=GIVEN)
    store = kvpack.Store(tmp_path / "store", kvpack.Identity(model="m", weights="w", recipe="fp32"))
    assert store.save(list(range(512)), kvpack.load(tmp_path / "a")) == 512
    assert dict(store.load(list(range(512)))[1].metadata) == {}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (["title"], InvalidParameter, r"metadata is a list, expected a dict such as \{'title': 'a manual', 'version': 3\}"),
        ([], InvalidParameter, "metadata is a list"),
        ({1: "a"}, InvalidParameter, "a name in metadata is 1, expected a nonempty string"),
        ({"": "a"}, InvalidParameter, "a name in metadata is '', expected a nonempty string"),
        ({"a": True}, InvalidParameter, r"metadata\['a'\] is True, expected a string, an integer or a finite float"),
        ({"a": None}, InvalidParameter, r"metadata\['a'\] is None"),
        ({"a": math.nan}, InvalidParameter, r"metadata\['a'\] is nan"),
        ({"a": math.inf}, InvalidParameter, r"metadata\['a'\] is inf"),
        ({"a": 2**63}, InvalidParameter, r"metadata\['a'\] is out of range for a signed 64-bit integer"),
        ({"a": -(2**63) - 1}, InvalidParameter, r"metadata\['a'\] is out of range for a signed 64-bit integer"),
        ({"a": 10**4000}, InvalidParameter, r"metadata\['a'\] is out of range for a signed 64-bit integer"),
        ({"a": "\ud800"}, InvalidParameter, r"metadata\['a'\] is '\\ud800', which UTF-8 cannot encode"),
        ({"\ud800": "a"}, InvalidParameter, "which UTF-8 cannot encode"),
        ({"a": "x" * 4097}, LimitExceeded, r"metadata\['a'\] has 4097 bytes, but the maximum is 4096"),
        ({"n" * 256: 1}, LimitExceeded, "a name in metadata has 256 bytes, but the maximum is 255"),
        ({str(at): at for at in range(257)}, LimitExceeded, "metadata has 257 entries, but the maximum is 256"),
        ({str(at): "x" * 4096 for at in range(16)}, LimitExceeded, "metadata, as stored, has 65654 bytes, but the maximum is 65536"),
    ],
    ids=lambda value: None if isinstance(value, type) else repr(value)[:20],
)
def test_metadata_that_does_not_fit_is_refused(given: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        kvpack.save(cache_of(), tmp_path / "a", metadata=given)
    assert not (tmp_path / "a").exists()


VALUES = st.text(max_size=20) | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)


@given(st.dictionaries(st.text(min_size=1, max_size=20), VALUES, max_size=8))
def test_any_metadata_is_read_as_written(given: dict[str, Any]) -> None:
    data = metadata.to_bytes(given)
    assert metadata.from_bytes(data) == take_metadata(data) == given


@given(
    st.binary(max_size=60) | st.lists(st.sampled_from([b"\x01a", b"\x01b", b"\x00", b"\x01", b"\x02", bytes(4), bytes(8)])).map(b"".join)
)
def test_both_readers_agree_on_any_bytes(data: bytes) -> None:
    assert metadata.from_bytes(data) == take_metadata(data)


def ids(count: int) -> bytes:
    return numpy.arange(count, dtype="<u4").tobytes()


@pytest.mark.parametrize("count", [16382, 16383, 20000, 70000])
def test_token_ids_may_need_several_features(count: int, tmp_path: Path) -> None:
    inputs = Inputs(ids(count), ("tokens 8 to 11 came from embeddings",), (8,))
    x = torch.zeros(1, 1, count, 4)
    cache = kvpack.pack([(x, x)], "bf16", inputs=inputs)
    kvpack.save(cache, tmp_path / "a")
    assert kvpack.load(tmp_path / "a").inputs == inputs
    assert cache.nbytes == (tmp_path / "a").stat().st_size
    assert kvpack.load(tmp_path / "a", tokens=count - 1).inputs == inputs.slice(0, count - 1, 0)
    with container.open_file(tmp_path / "a") as file:
        held = Inputs.from_bytes(file.header.ignorable["inputs"])
        assert join_features(file.header.ignorable, "token-ids") == (b"" if held == inputs else inputs.token_ids)


def test_token_ids_above_the_limit_are_partially_kept() -> None:
    found = Inputs.from_features(Inputs(ids(MAX_IDS + 5)).to_features()[1])
    assert found == Inputs(ids(MAX_IDS))


def test_an_exported_prefix_has_its_token_ids() -> None:
    assert Inputs.from_features(split_feature("token-ids", ids(20000))) == Inputs(ids(20000))
    assert Inputs.from_features({}) is None
    assert Inputs.from_features({"inputs": Inputs().to_bytes()}) == Inputs()


def test_token_ids_that_do_not_continue_the_inputs_are_ignored() -> None:
    stored = {"inputs": Inputs(ids(3)).to_bytes()}
    assert Inputs.from_features({**stored, "token-ids.0": ids(9)}) == Inputs(ids(9))
    for other in (ids(2), ids(9)[4:], ids(9)[:-1], b""):
        assert Inputs.from_features({**stored, "token-ids.0": other}) == Inputs(ids(3))


def test_inspect_shows_ids_and_metadata(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = Inputs(ids(12), ("tokens 8 to 11 came from embeddings",), (8,))
    kvpack.save(cache_of(inputs=inputs), tmp_path / "a", metadata={**GIVEN, "control": "\x1b[2J"})
    assert cli.main(["inspect", "--json", str(tmp_path / "a")]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["token_ids"], summary["undetermined"]) == (12, ["tokens 8 to 11 came from embeddings"])
    assert summary["metadata"] == {**GIVEN, "control": "\x1b[2J"}
    assert cli.main(["inspect", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out
    assert "token ids of the first 12 tokens; tokens 8 to 11 came from embeddings\n" in shown
    assert "title: a manual\n" in shown
    assert "control: \\x1b[2J\n" in shown
