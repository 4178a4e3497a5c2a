"""Headers that match a known one are recognized without parsing, and no other header is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpack.store import header_template
from kvpack.store.catalog import read_catalog
from kvpack.store.counters import Counters
from kvpack.store.directory import Directory
from kvpack.store.entries import FEATURE, open_entry
from kvpack.store.header_template import HeaderTemplate, HeaderTemplates
from support.store_caches import CHUNK, UNIFORM_IDENTITY, open_store, prompt, save

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from kvpack.store.catalog import Catalog


def catalog(folder: Path) -> Catalog:
    return read_catalog(Directory(folder, Counters()))


def test_a_catalog_is_the_same_with_and_without_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path, UNIFORM_IDENTITY) as store, open_store(tmp_path, UNIFORM_IDENTITY, chunk=2 * CHUNK) as other:
        save(store, prompt(12))
        save(store, prompt(3, seed=1))
        save(other, prompt(12, seed=2))
    found = catalog(tmp_path)
    monkeypatch.setattr(HeaderTemplates, "match", lambda self, data: None)
    parsed = catalog(tmp_path)
    assert len(found.entries) == 21
    assert found.entries == parsed.entries
    assert found.unreadable == parsed.unreadable == {}


def test_changed_bytes_are_noticed_with_and_without_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path, UNIFORM_IDENTITY) as store:
        save(store, prompt(3))
        keys = store.keys(prompt(3))
    paths = [tmp_path / key.hex()[0] / key.hex()[1] / key.hex() for key in keys]
    data, matched = [path.read_bytes() for path in paths], 0
    with open_entry(data[0], keys[0]) as file:
        template = HeaderTemplate.from_file(file, FEATURE)
    assert template.match(memoryview(data[1])) is not None
    for place in range(template.payload):
        changed = bytearray(data[1])
        changed[place] ^= 0x55
        assert template.match(memoryview(changed)) is None, "a changed header was not noticed"
    for place in range(template.header_bytes):
        changed = bytearray(data[1])
        at = len(template.text) + place
        changed[at] ^= 0x55
        header = bytes(changed[len(template.text) :][: template.header_bytes])
        changed[header_template.DIGEST_SLICE] = header_template.xxhash.xxh3_128_hexdigest(header).encode()
        if template.match(memoryview(changed)) is None or place % 5:
            continue
        # What has another digest, start or feature is an entry like any other: its key tells whether it belongs there.
        matched += 1
        paths[1].write_bytes(changed)
        found = catalog(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(HeaderTemplates, "match", lambda self, data: None)
            parsed = catalog(tmp_path)
        assert found.entries == parsed.entries
        assert {key: type(error) for key, error in found.unreadable.items()} == {
            key: type(error) for key, error in parsed.unreadable.items()
        }
    assert matched > 10
