"""The options of a store are declared once, and are the same for stores of chunks and of pages."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack.formats.errors import InvalidParameter
from kvpack.store.locations import FOLDER, KINDS
from kvpack.store.options import LocationOptions, StoreKeywords, StoreOptions
from support.foreign_values import GEOMETRY
from support.store_caches import IDENTITY

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [field.name for field in dataclasses.fields(StoreOptions)]


def test_keyword_arguments_are_the_fields() -> None:
    assert set(StoreKeywords.__annotations__) == set(NAMES)
    for store in (kvpack.Store, kvpack.PageStore):
        (options,) = (one for one in inspect.signature(store).parameters.values() if one.kind is one.VAR_KEYWORD)
        assert "StoreKeywords" in str(options.annotation)


def test_each_location_kind_has_its_options() -> None:
    known = {field.name for field in dataclasses.fields(LocationOptions)}
    taken = set().union(*(kind.options for kind in (*KINDS, FOLDER)))
    assert taken == known


def test_a_tier_has_the_options_of_its_location() -> None:
    assert {field.name for field in dataclasses.fields(kvpack.Tier)} == {"location"} | {f.name for f in dataclasses.fields(LocationOptions)}


@pytest.mark.parametrize("options", [{"max_entry_bytes": 0}, {"max_bytes": -1}, {"min_free": 1.5}, {"max_bytes": True}])
def test_invalid_counts_are_refused_by_both(options: dict[str, Any], tmp_path: Path) -> None:
    (name,) = options
    for opened in (lambda: kvpack.Store(tmp_path, IDENTITY, **options), lambda: kvpack.PageStore(tmp_path, IDENTITY, GEOMETRY, **options)):
        with pytest.raises(InvalidParameter, match=f"{name} is "):
            opened()


@pytest.mark.parametrize("timeout", [0, -1, "1", True, float("nan"), float("inf"), 1e10])
@pytest.mark.parametrize("location", ["redis://127.0.0.1:1", "s3://bucket/prefix"])
def test_an_invalid_timeout_is_refused(timeout: Any, location: str) -> None:
    with pytest.raises(InvalidParameter, match=r"timeout is .*, expected a number of seconds above 0 and at most 1,000,000,000"):
        kvpack.Store(location, IDENTITY, timeout=timeout)


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="max_byte"):
        kvpack.Store(tmp_path, IDENTITY, max_byte=1)
