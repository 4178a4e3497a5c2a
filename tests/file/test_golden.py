"""Tests of golden files: kvpack writes the same bytes and reads the same values, and the files never change."""

from __future__ import annotations

import hashlib
import json
import struct

import numpy
import pytest
import torch

import kvpack
from kvpack.file import container
from support.golden_files import FILES, FOLDER, MANIFEST, expected_path, expected_values, file_path, golden_cache, recipe_codecs

TOLERANCE = 2**-18
"""Tolerance relative to a file's largest value: well above the rounding of float32 decoders, and far below one code."""


def test_files_were_not_changed_added_or_lost() -> None:
    manifest = json.loads(MANIFEST.read_text())
    assert set(manifest) == set(FILES)
    for name, digests in manifest.items():
        for path in (file_path(name), expected_path(name)):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == digests[path.suffix[1:]], path.name
    assert {path.stem for path in FOLDER.iterdir()} == {*FILES, "manifest"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_written_byte_for_byte(name: str, tmp_path: object) -> None:
    file = container.open_file(file_path(name))
    stored = {side: file.header.codecs[entry.codec] for side, entry in file.header.layers[0].sides()}
    path = f"{tmp_path}/again.kvpack"
    kvpack.save(golden_cache(name, stored), path)
    with open(path, "rb") as again:
        assert again.read() == file_path(name).read_bytes()


@pytest.mark.parametrize("name", FILES)
def test_a_file_decodes_to_the_stored_values(name: str) -> None:
    values = torch.from_numpy(numpy.fromfile(expected_path(name), "<f4"))
    assert torch.isfinite(values).all()
    found = expected_values(kvpack.load(file_path(name)))
    atol = TOLERANCE * values.abs().max().item() if len(values) else 0.0
    torch.testing.assert_close(found, values, rtol=0.0, atol=atol)


@pytest.mark.parametrize("name", FILES)
def test_recipes_still_give_the_same_codecs(name: str) -> None:
    file = container.open_file(file_path(name))
    for side, codec in recipe_codecs(name).items():
        stored = file.header.codecs[dict(file.header.layers[0].sides())[side].codec].params()
        today = codec.params()
        assert list(today) == list(stored)
        for key, value in stored.items():
            if key.endswith("_table"):
                assert struct.unpack(f"<{len(value) // 4}f", today[key]) == pytest.approx(
                    struct.unpack(f"<{len(value) // 4}f", value), rel=1e-6
                )
            else:
                assert today[key] == value
