"""Tests of files and rows that earlier versions of kvpack wrote, one per preset: they open, decode unchanged, and can be extended."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file

import kvpack
from kvpack.coding.bases import Basis
from kvpack.coding.presets import PUBLISHED
from support.second_decoder import decoder
from support.written_files import (
    BASIS,
    FOLDER,
    GEOMETRY,
    MANIFEST,
    NAMES,
    PAGE_KEYS,
    PRESETS,
    ROW,
    VALUES,
    buffer,
    files,
    pairs,
    random_pool,
    sample_values,
    shape,
)

TOLERANCE = 2**-18
"""Tolerance relative to a file's largest value, as for golden files."""


def opened(name: str) -> kvpack.Cache:
    return kvpack.load(PRESETS / f"{name}.kvpack", basis=None if name in PUBLISHED else BASIS)


def assert_near(found: torch.Tensor, values: torch.Tensor) -> None:
    torch.testing.assert_close(found, values, rtol=0.0, atol=TOLERANCE * values.abs().max().item())


def test_files_were_not_changed_added_or_lost() -> None:
    manifest = json.loads(MANIFEST.read_text())["files"]
    assert {str(path.relative_to(FOLDER)) for path in files()} == set(manifest)
    for name, digest in manifest.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize("name", NAMES)
def test_a_file_decodes_to_the_recorded_values(name: str) -> None:
    assert_near(sample_values(opened(name)), load_file(VALUES)[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_from_a_file_can_be_extended(name: str, tmp_path: object) -> None:
    """Appending tokens changes neither the loaded tokens in memory nor those in the next file."""
    basis = None if name in PUBLISHED else Basis.load(BASIS)
    cache = opened(name)
    layers, heads, tokens, dim = shape(name)
    longer = cache.append(pairs(f"{name} continued", layers, heads, 3, dim))
    kvpack.save(longer, f"{tmp_path}/longer.kvpack")
    again = kvpack.load(f"{tmp_path}/longer.kvpack", basis=basis)
    assert again.tokens == longer.tokens == tokens + 3
    for layer, grown in zip(cache, again, strict=True):
        for old, new in zip(layer.unpack(torch.float32), grown.unpack(torch.float32), strict=True):
            assert old is not None
            assert new is not None
            assert_near(new[:, :, :tokens], old)


def test_a_basis_can_be_opened() -> None:
    assert hashlib.sha256(BASIS.read_bytes()).digest() == Basis.load(BASIS).digest


def test_a_row_opens_with_its_recorded_recipe() -> None:
    recorded, decoded = load_file(FOLDER / "page.safetensors")["values"], torch.zeros_like(random_pool())
    with kvpack.pages.PageCodec(kvpack.Recipe.from_recorded("octopus-4"), GEOMETRY) as codec:
        assert codec.decode_into([ROW.read_bytes()], buffer(decoded), [0], keys=PAGE_KEYS[:1]) == [None]
    assert torch.equal(decoded[0], recorded)


def test_a_file_that_names_a_preset_can_be_extended() -> None:
    """The extension uses the recipe that the preset named when the file was written, even if the preset has changed."""
    cache = opened("octopus-4")
    assert cache.recipe == "octopus-4"
    live = kvpack.LiveCache.of(cache)
    assert live.freeze().recipe == "k=octahedral:b=4;v=group:b=4"


def test_a_row_opens_with_its_page_codec() -> None:
    """A row opens with its page codec. If this version describes pages differently, the row is refused as another page's.

    Its values are right in either case.
    """
    recorded = load_file(FOLDER / "page.safetensors")["values"]
    read = decoder.read_row(ROW.read_bytes())
    values = [float(value) for layer in read.page.layers for side in layer.values() for value in side.values]
    assert_near(torch.tensor(values).to(torch.bfloat16).float(), recorded.float().flatten())
    decoded = torch.zeros_like(random_pool())
    with kvpack.pages.PageCodec("octopus-4", GEOMETRY) as codec:
        (refused,) = codec.decode_into([ROW.read_bytes()], buffer(decoded), [0], keys=PAGE_KEYS[:1])
    if refused is None:
        assert torch.equal(decoded[0], recorded)
    else:
        assert "is the row of a different page: " in str(refused)
        assert not decoded.any()
