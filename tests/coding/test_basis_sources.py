"""Tests of folders of bases: the right basis is found whatever other files exist, which take no memory and cause a warning."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack import cli
from kvpack.coding import basis_sources
from kvpack.coding.bases import Basis
from kvpack.coding.basis_files import MAX_FILE_BYTES
from kvpack.coding.basis_sources import find_basis
from kvpack.errors import InvalidParameter, KvpackError, KvpackWarning, LimitExceeded, MissingBasis, MissingFile, NotKvpack
from support.klt_bases import random_basis

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = {(0, "k"): (2, 16), (0, "v"): (2, 16)}


def sparse(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


def with_front(path: Path, size: int) -> None:
    """Write a file of ``size`` bytes that begins like a basis, and is longer than its header declares."""
    path.write_bytes(random_basis(SHAPES, 1, seed="front"))
    os.truncate(path, size)


BAD: dict[str, Callable[[Path], object]] = {
    "5 GiB of nothing": lambda path: sparse(path, 5 * 2**30),
    "2 GiB of nothing": lambda path: sparse(path, 2 * 2**30),
    "2 GiB after a basis": lambda path: with_front(path, 2 * 2**30),
    "a truncated basis": lambda path: with_front(path, 5000),
    "an empty file": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("a basis"),
    "a cache": lambda path: kvpack.save(kvpack.pack([(torch.zeros(1, 1, 2, 16),) * 2], "raw"), path),
    "a FIFO": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a loop": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bases").mkdir()
    return tmp_path / "bases"


@pytest.fixture
def good(folder: Path) -> Basis:
    """Write a basis that is larger than the small files and sorts after all other files, and return it."""
    data = random_basis(SHAPES, 1)
    (folder / "z.kvbasis").write_bytes(data)
    return Basis.from_bytes(data)


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_file_in_the_folder_is_harmless(name: str, folder: Path, good: Basis) -> None:
    BAD[name](folder / "a.kvbasis")
    missing = bytes(32)
    tracemalloc.start()
    skipped = r"a\.kvbasis was skipped in the search for the basis 0{64}: "
    with pytest.warns(KvpackWarning, match=skipped), pytest.raises(MissingBasis):
        find_basis(folder, missing)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 2**24
    # Smaller files come first, and those are looked at before the right one is found.
    smaller = "GiB" not in name
    with pytest.warns(KvpackWarning) if smaller else contextlib.nullcontext():
        assert find_basis(folder, good.digest).digest == good.digest


def test_files_with_other_names_are_not_opened(folder: Path, good: Basis) -> None:
    for name in ("a.kvpack", "b.kvbasis.progress", ".c.kvbasis~", "kvbasis"):
        BAD["text"](folder / name)
    assert find_basis(folder, good.digest).digest == good.digest


def test_non_string_names_are_refused(folder: Path, good: Basis) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.kvbasis")).write_bytes(b"x")
    with pytest.warns(KvpackWarning, match="was skipped"):
        assert find_basis(folder, good.digest).digest == good.digest


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read all files")
def test_an_unreadable_folder_is_reported(folder: Path, good: Basis) -> None:
    folder.chmod(0)
    with pytest.raises(MissingFile, match="as a folder of bases: Permission denied"):
        find_basis(folder, good.digest)
    folder.chmod(0o700)


def test_a_folder_that_cannot_be_opened_is_reported(folder: Path, good: Basis, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(basis_sources.os, "scandir", refused)
    with pytest.raises(MissingFile, match="bases: could not be opened as a folder of bases: Permission denied"):
        find_basis(folder, good.digest)


@pytest.mark.parametrize(("name", "error"), [("5 GiB of nothing", LimitExceeded), ("2 GiB of nothing", NotKvpack), ("a FIFO", MissingFile)])
def test_an_invalid_file_given_by_name_is_refused_before_it_is_read(
    name: str, error: type[KvpackError], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.kvbasis"
    BAD[name](path)
    tracemalloc.start()
    with pytest.raises(error, match=r"a\.kvbasis"):
        Basis.load(path)
    assert cli.main(["recipes", "klt-2", "--basis", str(path)]) in (1, 2, 3)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    assert "a.kvbasis" in capsys.readouterr().err
    assert MAX_FILE_BYTES < 5 * 2**30


@pytest.mark.scenario
def test_the_process_grows_by_less_than_64_mib(folder: Path, good: Basis) -> None:
    """The limit includes the memory of libraries and file mappings."""
    for name in ("5 GiB of nothing", "2 GiB of nothing", "2 GiB after a basis"):
        BAD[name](folder / f"{name}.kvbasis")
    script = (
        "import resource, sys, warnings\n"
        "from kvpack.coding.basis_sources import find_basis\n"
        "from kvpack.errors import MissingBasis\n"
        "warnings.simplefilter('ignore')\n"
        "find_basis(sys.argv[1], bytes.fromhex(sys.argv[2]))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    find_basis(sys.argv[1], bytes(32))\n"
        "except MissingBasis:\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder), good.digest.hex()], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 * 1024


def test_non_numeric_bits_are_refused(good: Basis) -> None:
    for bits in ("2", None, float("nan"), float("inf"), -1, 0, 9, [2]):
        with pytest.raises(InvalidParameter, match=r"bits is .*, expected 0\.25 to 8 bits per value"):
            good.widths(bits)  # type: ignore[arg-type]
