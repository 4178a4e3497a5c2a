"""Digests of checkpoints cover every byte, unchanged files are not read again, and other users cannot influence the digests."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvpack import Identity
from kvpack.errors import MissingFile
from kvpack.identity import engine_identity

DIM = 256


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(engine_identity, "SETTLED_SECONDS", 0.0)
    return tmp_path / "cache" / "kvpack-checkpoints"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the path of every file that is read is appended."""
    paths, digest = [], engine_identity.digest_file_bytes

    def noted(path: str, size: int) -> str:
        paths.append(os.path.basename(path))
        return digest(path, size)

    monkeypatch.setattr(engine_identity, "digest_file_bytes", noted)
    return paths


def folder(path: Path, scale: float = 0.01) -> Path:
    """Write and return a checkpoint of 16 layers with the scales of an fp8 cache."""
    path.mkdir()
    generator = torch.Generator().manual_seed(0)
    weights = {f"layers.{n}.k_proj.weight": torch.randn(DIM, DIM // 4, generator=generator).bfloat16() for n in range(16)}
    weights |= {f"layers.{n}.self_attn.{side}_scale": torch.tensor(scale) for n in range(16) for side in "kv"}
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text('{"rope_theta": 10000.0}')
    return path


def weights(path: Path, **options: Any) -> str:
    return Identity.of_engine(path, "raw", kv_dtype="fp8_e4m3", layout="d", **options).weights


def test_a_fifo_among_the_weights_is_refused(tmp_path: Path) -> None:
    os.mkfifo(folder(tmp_path / "a") / "more.safetensors")
    with pytest.raises(MissingFile, match="is a FIFO, expected a regular file"):
        weights(tmp_path / "a")


def test_recalibrated_scales_change_the_digest(tmp_path: Path) -> None:
    first, second = (weights(folder(tmp_path / name, scale)) for name, scale in (("a", 0.01), ("b", 0.05)))
    assert first != second
    assert first.startswith("files-xxh3:")


@pytest.mark.parametrize("piece", [1 << 12, 1 << 26])
def test_every_changed_byte_changes_the_digest(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_identity, "PIECE_BYTES", piece)
    path = folder(tmp_path / "m")
    file = path / "model.safetensors"
    data, found = file.read_bytes(), {weights(path)}
    source = random.Random(0)
    places = [0, len(data) - 1, *(source.randrange(len(data)) for _ in range(10))]
    for place in places:
        edited = bytearray(data)
        edited[place] ^= 1 << source.randrange(8)
        file.write_bytes(edited)
        found.add(weights(path))
    file.write_bytes(data + b"\0")
    found.add(weights(path))
    assert len(found) == len(places) + 2
    file.write_bytes(data)
    assert weights(path) in found
    file.rename(path / "other.safetensors")
    assert weights(path) not in found


def test_a_file_is_reread_if_it_may_have_changed(tmp_path: Path, read: list[str]) -> None:
    path = folder(tmp_path / "m")
    file = path / "model.safetensors"
    first = weights(path)
    assert (weights(path), read) == (first, ["model.safetensors"])
    # In place, with its size and modification time put back.
    status, data = file.stat(), bytearray(file.read_bytes())
    data[-1] ^= 1
    with file.open("r+b") as opened:
        opened.write(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights(path) != first
    assert len(read) == 2
    data[-1] ^= 1
    (path / "new").write_bytes(data)
    os.replace(path / "new", file)
    assert weights(path) == first
    assert len(read) == 3
    assert weights(path, revision="abc") == "abc"
    assert len(read) == 3


def test_a_recently_written_file_is_always_reread(tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that follows immediately may leave the same timestamp."""
    monkeypatch.setattr(engine_identity, "SETTLED_SECONDS", 60.0)
    path = folder(tmp_path / "m")
    assert weights(path) == weights(path)
    assert len(read) == 2


def test_other_processes_find_the_digest(tmp_path: Path, cache: Path) -> None:
    path = folder(tmp_path / "m")
    found = weights(path)
    code = (
        "import sys\nfrom pathlib import Path\nfrom kvpack.identity import engine_identity as ids\n"
        "def read(*_): raise AssertionError\nids.digest_file_bytes = read\nprint(ids.checkpoint_digest(Path(sys.argv[1])))"
    )
    assert subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, text=True).stdout.strip() == found
    kept = list(cache.glob("*.json"))
    assert len(kept) == len(list(cache.glob("lock-?"))) == len(list(cache.iterdir())) / 2 == 1
    assert kept[0].stat().st_mode & 0o777 == 0o600
    assert cache.stat().st_mode & 0o777 == 0o700


def test_digests_that_others_may_have_written_are_not_used(tmp_path: Path, cache: Path, read: list[str]) -> None:
    path = folder(tmp_path / "m")
    found = weights(path)
    (kept,) = cache.glob("*.json")
    text = kept.read_text()
    for content in (text[:-9], "[" * 10_000, "{}", text.replace('"digest": "', '"digest": "0'), text.replace("model.safe", "other.safe")):
        kept.write_text(content)
        assert weights(path) == found
        assert len(read) > 1
        read.clear()
        read.append("")
    forged = text[: text.index('"digest"')] + f'"digest": "{"0" * 64}"}}'
    kept.write_text(forged)
    kept.chmod(0o622)
    assert weights(path) == found
    kept.write_text(forged)
    cache.chmod(0o777)
    assert weights(path) == found
    cache.chmod(0o700)
    kept.unlink()
    kept.symlink_to(path / "config.json")
    assert weights(path) == found


@pytest.mark.parametrize("place", ["a file", "nothing may be written", "no home"])
def test_files_are_always_reread_without_a_cache_folder(
    place: str, tmp_path: Path, cache: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(tmp_path / "m")
    if place == "a file":
        cache.parent.mkdir()
        cache.write_bytes(b"")
    elif place == "no home":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    else:
        monkeypatch.setattr(os, "makedirs", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
    assert weights(path) == weights(path)
    assert len(read) == 2
