"""Tests of position offsets of text after images: in files, in slices that reach the end of the cache, and in rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

import kvpack
from kvpack import cli
from kvpack.errors import InvalidHeader, LimitExceeded
from kvpack.file import container
from support.caches import random_pairs

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 32


def cache(*offsets: int, start: int = 0) -> kvpack.Cache:
    packed = kvpack.pack(random_pairs(2, TOKENS, batch=len(offsets)), "kivi-2;raw=0", start=start)
    return replace(packed, position_offsets=offsets)


def test_a_file_keeps_offsets(tmp_path: Path) -> None:
    kvpack.save(cache(-12, 3), tmp_path / "a")
    assert container.open_file(tmp_path / "a").header.required == ("position-offsets",)
    assert kvpack.load(tmp_path / "a").position_offsets == (-12, 3)
    kvpack.save(replace(cache(1), position_offsets=None), tmp_path / "b")
    assert container.open_file(tmp_path / "b").header.required == ()
    assert kvpack.load(tmp_path / "b").position_offsets is None


def test_a_part_keeps_offsets_only_if_it_ends_with_the_cache(tmp_path: Path) -> None:
    whole = cache(-12)
    kvpack.save(whole, tmp_path / "a")
    assert whole[:, 0:TOKENS].position_offsets == (-12,)
    assert whole[:, : TOKENS - 1].position_offsets is None
    assert kvpack.load(tmp_path / "a", tokens=(0, TOKENS)).position_offsets == (-12,)
    assert kvpack.load(tmp_path / "a", tokens=(0, 16)).position_offsets is None
    raw = replace(kvpack.pack(random_pairs(2, TOKENS), "raw"), position_offsets=(-12,))
    first, last = raw[:, 0:20], raw[:, 20:TOKENS]
    assert (first.position_offsets, last.position_offsets) == (None, (-12,))
    assert kvpack.concat([first, last]).position_offsets == (-12,)
    assert kvpack.concat([raw, replace(raw, start=TOKENS, position_offsets=None)]).position_offsets is None


def test_rows_keep_their_offsets() -> None:
    rows = cache(-12, 3)
    assert rows.select([1, 0, 1]).position_offsets == (3, -12, 3)
    assert rows.convert("raw").position_offsets == (-12, 3)
    assert rows.append(random_pairs(2, 5, batch=2)).position_offsets == (-12, 3)


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        ((-12, 3), InvalidHeader, r"offsets for 2 sequences, but layers\[0\]\.k has 1"),
        ((-TOKENS - 1,), InvalidHeader, r"32 \+ ignorable\['position-offsets'\]\[0\] is -1, expected at least 0"),
        ((2**40,), LimitExceeded, "expected at most"),
    ],
)
def test_invalid_offsets_are_refused(
    offsets: tuple[int, ...], error: type[kvpack.KvpackError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        kvpack.save(replace(cache(0), position_offsets=offsets), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_commands_keep_offsets(tmp_path: Path) -> None:
    kvpack.save(cache(-12), tmp_path / "a")
    assert cli.main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "raw"]) == 0
    assert kvpack.load(tmp_path / "b").position_offsets == (-12,)
    assert cli.main(["unpack", str(tmp_path / "a"), str(tmp_path / "dense")]) == 0
    assert cli.main(["pack", str(tmp_path / "dense"), str(tmp_path / "c"), "--recipe", "raw"]) == 0
    assert kvpack.load(tmp_path / "c").position_offsets == (-12,)


@pytest.mark.parametrize("given", ["3", "[]", "[true]", "[0.5]", f"[{2**41}]"])
def test_dense_files_with_invalid_offsets_are_refused(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = f'{{"start": 0, "model": {{}}, "position_offsets": {given}}}'
    save_file({"0.k": torch.zeros(1, 1, 4, 64)}, tmp_path / "dense", {"kvpack.unpacked": note})
    assert cli.main(["pack", str(tmp_path / "dense"), str(tmp_path / "out"), "--recipe", "raw"]) == 2
    assert "'kvpack.unpacked': 'position_offsets' is" in capsys.readouterr().err
