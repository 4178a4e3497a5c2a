"""Tests of the container: files are read back unchanged, any safetensors tool opens them, and failed writes leave no files."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import socket
import stat
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy
import pytest
import safetensors
import safetensors.numpy
import torch
import zstandard

from kvpack.file import atomic, container, zstd
from kvpack.file.atomic import TEMPORARY_PREFIX, TEMPORARY_SUFFIX, write_file
from kvpack.file.header import Contents, LayerEntry
from kvpack.file.limits import MAX_JSON_BYTES, MAX_RATIO, MAX_WINDOW_BYTES
from kvpack.formats.errors import (
    DigestMismatch,
    InvalidHeader,
    InvalidParameter,
    InvalidPayload,
    LimitExceeded,
    MissingFile,
    NotKvpack,
    OutOfBounds,
    Truncated,
    UnsupportedVersion,
    WriteFailed,
)
from support.file_parts import change_file, edit, file_of, random_side
from support.small_files import KINDS, arrays_of, contents, side, small_file
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROOT = Path(__file__).parents[2]
TORCH_DTYPES = {"U8": torch.uint8, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def json_of(data: bytes) -> tuple[dict[str, Any], int]:
    """Return the JSON header, parsed by the standard library, and the offset of the data section."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), 8 + length


def raw_contents(values: numpy.ndarray[Any, Any]) -> tuple[Contents, dict[str, Any]]:
    """Return the contents of a file with one fp32 side that holds ``values``."""
    made = Contents(codecs=(create("raw", 16, dtype="fp32"),), layers=(LayerEntry(side(0, values.size // 16), None),))
    return made, {"0.k.values": values.astype(numpy.float32)}


def any_values(count: int) -> numpy.ndarray[Any, Any]:
    """Return random values that do not compress."""
    return numpy.random.default_rng(0).integers(0, 2**32, count, numpy.uint32).view(numpy.float32)


def few_values(count: int) -> numpy.ndarray[Any, Any]:
    """Return values that compress to about a tenth of their size."""
    return numpy.random.default_rng(0).integers(0, 7, count)


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read_back_as_written(kind: str, compress: bool, tmp_path: Path) -> None:
    made = contents(kind)
    arrays = arrays_of(made)
    size = container.write(tmp_path / "a", made, arrays, compress=compress, durable=True)
    with container.open_file(tmp_path / "a") as file:
        assert (file.size, os.path.getsize(tmp_path / "a")) == (size, size)
        framed = any(tensor.filter == "zstd" for tensor in file.header.tensors)
        expected = replace(made, ignorable={**made.ignorable, zstd.FEATURE: b""}) if framed else made
        assert Contents(**{name: getattr(file.header, name) for name in Contents.__dataclass_fields__}) == expected
        assert list(file.tensors) == list(made.layouts) == list(arrays)
        for name, array in arrays.items():
            assert file.tensor(name) == memoryview(array) or (not array.size and not file.tensor(name)), name
        file.verify()


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_known_before_writing(kind: str, tmp_path: Path) -> None:
    made = contents(kind)
    assert container.file_size(made) == len(small_file(kind)) == container.write(tmp_path / "a", made, arrays_of(made))


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_writing_is_deterministic(kind: str, compress: bool, tmp_path: Path) -> None:
    made = contents(kind)
    container.write(tmp_path / "a", made, arrays_of(made), compress=compress)
    assert (tmp_path / "a").read_bytes() == small_file(kind, compress=compress)


@pytest.mark.parametrize("kind", KINDS)
def test_the_official_library_reads_the_same_tensors(kind: str, tmp_path: Path) -> None:
    made = contents(kind)
    arrays = arrays_of(made)
    container.write(tmp_path / "a", made, arrays)
    with safetensors.safe_open(tmp_path / "a", framework="pt") as official:
        assert official.metadata()["format"] == "kvpack"
        assert [name for name in official.keys() if not name.startswith("kvpack.")] == sorted(arrays)  # noqa: SIM118 - no dict
        for name, layout in made.layouts.items():
            tensor = official.get_tensor(name)
            assert (tensor.dtype, tuple(tensor.shape)) == (TORCH_DTYPES[layout.dtype], layout.shape), name
            assert tensor.flatten().view(torch.uint8).numpy().tobytes() == bytes(arrays[name]), name


def test_the_official_library_reads_compressed_tensors_as_bytes(tmp_path: Path) -> None:
    made, arrays = raw_contents(few_values(4096))
    container.write(tmp_path / "a", made, arrays, compress=True)
    frame = safetensors.numpy.load_file(tmp_path / "a")["0.k.values"]
    assert frame.dtype == numpy.uint8
    assert zstandard.ZstdDecompressor().decompress(frame.tobytes()) == arrays["0.k.values"].tobytes()


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_aligned_and_pads_are_zero(kind: str, compress: bool) -> None:
    data = small_file(kind, compress=compress)
    entries, start = json_of(data)
    del entries["__metadata__"]
    assert start % 4096 == 0
    assert next(iter(entries)) == "kvpack.header"
    end, pads = 0, 0
    for name, entry in entries.items():
        begin, stop = entry["data_offsets"]
        assert begin == end, f"{name} leaves a hole or overlaps"
        end = stop
        if name.startswith("kvpack.pad."):
            assert (name, entry["dtype"], entry["shape"]) == (f"kvpack.pad.{pads}", "U8", [stop - begin])
            assert 0 < stop - begin < 64
            assert not any(data[start + begin : start + stop])
            pads += 1
        elif name != "kvpack.header":
            assert begin % 64 == 0, name
    assert start + end == len(data)
    assert not name.startswith("kvpack.pad."), "a file ends with a payload tensor"


def test_tensors_are_ordered_by_layer_with_keys_first() -> None:
    names = [name for name in json_of(small_file("group"))[0] if name[0].isdigit()]
    assert names == ["0.k.codes.0", "0.k.scales", "0.k.tail", "0.v.codes.0", "0.v.scales", "0.v.token_scale", "0.v.tail"]


def test_tensors_are_private_writable_and_outlive_the_file(tmp_path: Path) -> None:
    made = contents("group")
    container.write(tmp_path / "a", made, arrays_of(made))
    before = (tmp_path / "a").read_bytes()
    with container.open_file(tmp_path / "a") as file:
        view = file.tensor("0.k.scales")
    assert any(view)
    torch.frombuffer(view, dtype=torch.float16).zero_()
    assert not any(view)
    assert (tmp_path / "a").read_bytes() == before


@pytest.mark.parametrize("replaced", [False, True], ids=["unlinked", "replaced"])
def test_an_open_file_survives_the_removal_of_its_name(replaced: bool, tmp_path: Path) -> None:
    made = contents("group")
    container.write(tmp_path / "a", made, arrays_of(made, seed=1))
    with container.open_file(tmp_path / "a") as file:
        if replaced:
            container.write(tmp_path / "a", made, arrays_of(made, seed=2))
        else:
            (tmp_path / "a").unlink()
        file.verify()
        assert file.tensor("0.k.tail") == memoryview(arrays_of(made, seed=1)["0.k.tail"])


def test_a_closed_file_refuses_to_read_tensors(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(small_file())
    file = container.open_file(tmp_path / "a")
    file.close()
    file.close()
    with pytest.raises(ValueError, match="released"):
        file.tensor("0.k.tail")


def test_closed_and_refused_files_leave_no_open_descriptor(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(small_file())
    (tmp_path / "b").write_bytes(small_file()[:-1])
    before = len(os.listdir("/proc/self/fd"))
    held: list[object] = []
    for _ in range(3):
        file = container.open_file(tmp_path / "a")
        file.close()
        with pytest.raises(Truncated) as caught:
            container.open_file(tmp_path / "b")
        held += [file, caught.value]
    assert len(os.listdir("/proc/self/fd")) == before


def test_unknown_names_are_out_of_bounds() -> None:
    file = container.open_bytes(small_file("raw"))
    for name in ("kvpack.header", "kvpack.pad.0", "0.k", ""):
        with pytest.raises(OutOfBounds, match=f"bytes has no tensor '{name}'"):
            file.tensor(name)
    for layer, name in ((1, "k"), (2, "v"), (3, "k"), (-1, "v"), (0, "q")):
        with pytest.raises(OutOfBounds, match=f"has no keys or values {layer}.{name}"):
            file.read_side(layer, name)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    made, arrays = raw_contents(numpy.zeros(3 * 2**20))
    seen: list[tuple[int, int]] = []
    size = container.write(tmp_path / "a", made, arrays, progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)
    seen.clear()
    container.open_bytes(small_file("raw")).verify(lambda *counts: seen.append(counts))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len(seen) == 3
    assert seen[-1][0] == seen[-1][1]


# What may not be written.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda arrays: arrays.pop("0.k.tail"), InvalidParameter, "missing 0.k.tail, unknown none"),
        (lambda arrays: arrays.update({"0.k.tial": b""}), InvalidParameter, "missing none, unknown 0.k.tial"),
        (lambda arrays: arrays.update({"0.k.tail": bytes(15)}), InvalidParameter, r"0\.k\.tail has 15 bytes, expected 16"),
        (lambda arrays: arrays.update({"0.k.tail": numpy.zeros((8, 2), "u2").T[:1]}), InvalidParameter, r"0\.k\.tail is not C-contiguous"),
    ],
    ids=["missing", "unknown", "size", "strides"],
)
def test_unsuitable_arrays_are_refused_before_writing(
    change: Callable[[Any], Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    made = contents("group")
    arrays = arrays_of(made)
    change(arrays)
    with pytest.raises(error, match=message):
        container.write(tmp_path / "a", made, arrays)
    assert not list(tmp_path.iterdir())


def test_a_file_without_layers_can_be_written() -> None:
    data = container.to_bytes(Contents(codecs=(), layers=()), {})
    container.open_bytes(data).verify()
    assert safetensors.numpy.load(data).keys() == {"kvpack.header"}


def test_a_json_header_above_its_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpack.file.front.MAX_JSON_BYTES", 4000)
    with pytest.raises(LimitExceeded, match="the JSON header has 4088 bytes, but the maximum is 4000"):
        small_file()


def test_the_limit_of_a_json_header_applies_to_the_stored_size(monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(*[(random_side(create("raw", 1, dtype="fp16"), (1,), 0, heads=1), None)] * 40)
    end = 8 + int.from_bytes(data[:8], "little")
    assert end == 8192
    cut = (4088).to_bytes(8, "little") + data[8:4096] + data[end:]
    monkeypatch.setattr("kvpack.file.front.MAX_JSON_BYTES", 4088)
    with pytest.raises(InvalidHeader, match="the JSON header does not match"):
        container.open_bytes(cut)


def test_a_file_above_its_limit_is_not_written() -> None:
    half = side(0, 2**15, batch=65536, heads=65536)
    made = Contents(codecs=(create("raw", 1024, dtype="fp32"),), layers=(LayerEntry(half, None),))
    assert container.file_size(made) == 4096 + 256 + 2**59
    with pytest.raises(LimitExceeded, match=r"the file has 11529215046068\d+ bytes, but the maximum is 1152921504606846975"):
        container.file_size(Contents(codecs=made.codecs, layers=(LayerEntry(half, half),)))


# Failing writes.


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(TEMPORARY_PREFIX) or name.endswith(TEMPORARY_SUFFIX)]


def test_a_file_replaces_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    made = contents("group")
    container.write(tmp_path / "a", made, arrays_of(made))
    assert (tmp_path / "a").read_bytes() == small_file()
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.EACCES, errno.ESTALE], ids=errno.errorcode.get
)
@pytest.mark.parametrize("call", ["open", "writev", "fsync", "close", "replace"])
def test_any_failing_call_keeps_the_old_file(call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"old")
    made = contents("group")
    real = getattr(os, call)

    def failing(*arguments: Any, **options: Any) -> Any:
        if call == "close":
            real(*arguments)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(WriteFailed) as caught:
            container.write(tmp_path / "a", made, arrays_of(made), durable=True)
    assert str(caught.value) == f"{tmp_path / 'a'}: could not be written: {os.strerror(number)}"
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_an_interrupt_leaves_no_trace(calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpack.file.atomic._PIECE_BYTES", 2**12)
    left = calls

    def interrupt(done: int, total: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    made, arrays = raw_contents(numpy.zeros(2**18))
    with pytest.raises(KeyboardInterrupt):
        container.write(tmp_path / "a", made, arrays, progress=interrupt)
    assert not os.listdir(tmp_path)


def test_a_device_or_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "null").symlink_to(os.devnull)
    for name in ("fifo", "null"):
        with pytest.raises(WriteFailed, match=f"{name}: could not be written, because it is not a regular file"):
            write_file(tmp_path / name, [memoryview(b"new")])
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert (tmp_path / "null").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, pieces: real(descriptor, [pieces[0][:1000]]))
    made = contents("raw")
    container.write(tmp_path / "a", made, arrays_of(made))
    assert (tmp_path / "a").read_bytes() == small_file("raw")


def test_durable_syncs_the_file_before_the_rename_and_then_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(descriptor: int) -> None:
        calls.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    def seen_replace(source: str, target: str) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    made = contents("raw")
    container.write(tmp_path / "a", made, arrays_of(made), durable=True)
    assert calls == ["sync file", "rename", "sync folder"]
    calls.clear()
    container.write(tmp_path / "a", made, arrays_of(made))
    assert calls == ["rename"]


def test_a_folder_that_cannot_be_synced_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    made = contents("raw")
    with pytest.raises(WriteFailed, match="written, but its folder could not be synced: Input/output error"):
        container.write(tmp_path / "a", made, arrays_of(made), durable=True)
    assert (tmp_path / "a").read_bytes() == small_file("raw")


@pytest.mark.parametrize(
    "target",
    ["missing/a", "file/a", "folder", "a\0b", "a" * 300],
    ids=["no folder", "no folder but a file", "a folder", "zero byte", "long name"],
)
def test_unwritable_locations_are_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    made = contents("raw")
    with pytest.raises(WriteFailed, match="could not be written"):
        container.write(f"{tmp_path}/{target}", made, arrays_of(made))
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_file_size_limit_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    made, arrays = raw_contents(numpy.zeros(2**20))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(WriteFailed, match="File too large"):
            container.write(tmp_path / "a", made, arrays)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of one megabyte and yield its path."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting a file system needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_keeps_the_old_file(small_disk: Path) -> None:
    made, arrays = raw_contents(numpy.zeros(2**16))
    size = container.write(small_disk / "a", made, arrays)
    with pytest.raises(WriteFailed, match="No space left on device"):
        container.write(small_disk / "a", *raw_contents(numpy.ones(2**18)))
    assert os.listdir(small_disk) == ["a"]
    assert os.path.getsize(small_disk / "a") == size
    container.open_file(small_disk / "a").verify()


def test_a_read_only_file_system_is_refused(small_disk: Path) -> None:
    (small_disk / "a").write_bytes(small_file())
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    made = contents("raw")
    with pytest.raises(WriteFailed, match="Read-only file system"):
        container.write(small_disk / "b", made, arrays_of(made))
    container.open_file(small_disk / "a").verify()


# What is no file of ours.


def test_paths_without_a_regular_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for path, message in {
            tmp_path / "missing": "could not be opened: No such file or directory",
            tmp_path: "is a folder, expected a regular file",
            tmp_path / "fifo": "is a FIFO, expected a regular file",
            tmp_path / "socket": "is a socket, expected a regular file",
            "/dev/null": "is a device, expected a regular file",
            "a\0b": "could not be opened: embedded null byte",
        }.items():
            with pytest.raises(MissingFile, match=message) as caught:
                container.open_file(path)
            assert str(caught.value).startswith(f"{path}: ")


OTHER_FORMATS = {
    "empty": (b"", "is empty, not a kvpack file"),
    "seven bytes": (bytes(7), "is only 7 bytes long, not a kvpack file"),
    "eight zeros": (bytes(8), "is not a kvpack file: bytes 8 to "),
    "a page of zeros": (bytes(4096), "is not a kvpack file: bytes 8 to "),
    "text": (b"Call me Ishmael. Some years ago, never mind how long precisely", "is not a kvpack file: bytes 8 to "),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(40), "is a GGUF file, not a kvpack file"),
    "zip": (b"PK\x03\x04" + bytes(40), "is a zip archive, such as a PyTorch checkpoint, not"),
    "gzip": (b"\x1f\x8b" + bytes(60), "is a gzip file, not"),
    "a web page": (b"<!DOCTYPE html>" + bytes(60), "is a web page or XML, not"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "is a Git LFS pointer"),
    "numpy": (b"\x93NUMPY\x01\0" + bytes(40), "is a NumPy array, not"),
    "zstd": (zstandard.ZstdCompressor().compress(bytes(99)), "is a zstd frame, not"),
    "safetensors": (safetensors.numpy.save({"a": numpy.zeros(3)}), "is a safetensors file, but not a kvpack file"),
    "safetensors with metadata": (safetensors.numpy.save({"a": numpy.zeros(3)}, {"format": "pt"}), "is a safetensors file, but not"),
}


@pytest.mark.parametrize("kind", OTHER_FORMATS)
def test_errors_name_other_formats(kind: str, tmp_path: Path) -> None:
    data, message = OTHER_FORMATS[kind]
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(NotKvpack, match=message) as caught:
        container.open_file(tmp_path / "a")
    assert str(caught.value).startswith(f"{tmp_path / 'a'}: ")
    with pytest.raises(NotKvpack, match=message):
        container.open_bytes(data)


def with_json(data: bytes, change: Callable[[bytes], bytes], *, length: int | None = None) -> bytes:
    """Return ``data`` with another JSON header of any length, and the data section moved to a multiple of 4096."""
    end = 8 + int.from_bytes(data[:8], "little")
    text = change(data[8:end].rstrip())
    text += b" " * (-(8 + len(text)) % 4096)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data[end:]


PAD = b'"kvpack.pad.0"'
OTHER_JSON: dict[str, tuple[Callable[[bytes], bytes], type[Exception], str]] = {
    "newer version": (
        lambda text: text.replace(b'"1 ', b'"2 '),
        UnsupportedVersion,
        "written by a newer kvpack in format 2, but this one reads format 1",
    ),
    "much newer version": (lambda text: text.replace(b'"1 ', b'"17"}} '), UnsupportedVersion, "format 17, but this one reads format 1"),
    "version zero": (lambda text: text.replace(b'"1 ', b'"0 '), InvalidHeader, "does not begin with the metadata of format 1"),
    "another format": (lambda text: text.replace(b'"kvpack","kvpack"', b'"pt","kvpack"'), NotKvpack, "is a safetensors file, but not"),
    "an entry twice": (
        lambda text: text[:-1] + b"," + text[text.index(PAD) : -1] + b"}",
        InvalidHeader,
        "does not match kvpack.header at byte ",
    ),
    "an entry more": (
        lambda text: text[:-1] + b',"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        InvalidHeader,
        "does not match kvpack.header at byte ",
    ),
    "an entry less": (lambda text: text[: text.rindex(b',"')] + b"}", InvalidHeader, "does not match kvpack.header at byte "),
    "deeply nested": (lambda text: text[:-1] + b',"a":' + b"[" * 100_000, InvalidHeader, "does not match kvpack.header at byte "),
    "spaces between": (lambda text: text.replace(b'},"kv', b'}, "kv'), InvalidHeader, "does not begin with the metadata of format 1"),
    "a space at the end": (lambda text: text[:-1] + b" }", InvalidHeader, "does not match kvpack.header at byte "),
    "another page of padding": (lambda text: text + b" " * 4096, InvalidHeader, "does not match kvpack.header at byte 1 of"),
    "another name": (lambda text: text.replace(b"0.k.values", b"0.v.values", 1), InvalidHeader, "does not match kvpack.header at byte "),
    "another digest": (lambda text: text.replace(text[47:79], b"0" * 32), DigestMismatch, "kvpack.header is damaged"),
    "header tensor of no bytes": (
        lambda text: text.replace(b'"shape":[', b'"shape":[0', 1),
        InvalidHeader,
        "does not begin with the metadata",
    ),
    "header tensor of eight digits": (
        lambda text: re.sub(rb'("shape":\[|\[0,)\d+\]', rb"\g<1>10000000]", text, count=2),
        InvalidHeader,
        "does not begin with the metadata",
    ),
    "header tensor above its limit": (
        lambda text: re.sub(rb'("shape":\[|\[0,)\d+\]', rb"\g<1>8388609]", text, count=2),
        LimitExceeded,
        "8388609 bytes, but the maximum is 8388608",
    ),
    "header tensor beyond the end": (
        lambda text: re.sub(rb'("shape":\[|\[0,)\d+\]', rb"\g<1>99999]", text, count=2),
        Truncated,
        "kvpack.header ends at 104095",
    ),
}


@pytest.mark.parametrize("kind", OTHER_JSON)
def test_noncanonical_json_headers_are_refused(kind: str) -> None:
    change, error, message = OTHER_JSON[kind]
    data = small_file("raw")
    container.open_bytes(with_json(data, lambda text: text)).verify()
    other = with_json(data, change)
    assert other != data
    with pytest.raises(error, match=message):
        container.open_bytes(other)


@pytest.mark.parametrize(
    ("length", "error", "message"),
    [
        (0, InvalidHeader, "ends at byte 8, expected a multiple of 4096"),
        (4089, InvalidHeader, "ends at byte 4097, expected a multiple of 4096"),
        (2**24 + 4088, LimitExceeded, f"has 16781304 bytes, but the maximum is {MAX_JSON_BYTES}"),
        (2**64 - 1, LimitExceeded, "has 18446744073709551615 bytes"),
        (2**23 - 8, Truncated, "its JSON header ends at byte 8388608"),
    ],
)
def test_wrong_json_lengths_are_refused(length: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        container.open_bytes(with_json(small_file("raw"), lambda text: text, length=length))


# memory_limit and zstd.


def test_a_memory_limit_covers_the_file_and_its_decoded_size(tmp_path: Path) -> None:
    made, arrays = raw_contents(few_values(2**16))
    size = container.write(tmp_path / "a", made, arrays)
    container.open_file(tmp_path / "a", memory_limit=size).verify()
    with pytest.raises(LimitExceeded, match=f"a: has {size} bytes, but memory_limit is {size - 1}"):
        container.open_file(tmp_path / "a", memory_limit=size - 1)
    assert container.write(tmp_path / "a", made, arrays, compress=True) < 2**16
    container.open_file(tmp_path / "a", memory_limit=2**18).verify()
    with pytest.raises(LimitExceeded, match="a: its decoded tensors take up 262144 bytes, but memory_limit is 262143"):
        container.open_file(tmp_path / "a", memory_limit=2**18 - 1)


@pytest.mark.parametrize(
    ("values", "chosen"),
    [(any_values(2**12), "none"), (few_values(2**12), "zstd"), (numpy.zeros(2**16), "none")],
    ids=["saves too little", "saves enough", "above the ratio that readers allow"],
)
def test_zstd_is_used_only_where_it_saves_space(values: Any, chosen: str) -> None:
    made, arrays = raw_contents(values)
    data = container.to_bytes(made, arrays, compress=True)
    file = container.open_bytes(data)
    assert file.tensors["0.k.values"].filter == chosen
    assert file.tensor("0.k.values") == arrays["0.k.values"].tobytes()
    file.verify()


def stored_as(frame: bytes, made: Contents, arrays: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> container.File:
    """Return a file whose tensor is stored as the zstd frame ``frame``, and which does not declare frame checksums."""
    monkeypatch.setattr(container, "compress_frame", lambda raw: frame)
    return container.open_bytes(change_file(container.to_bytes(made, arrays, compress=True), edit("ignorable", {})))


def frame_header(window: int) -> bytes:
    """Return the start of a zstd frame with a window of 2^``window`` bytes."""
    return b"\x28\xb5\x2f\xfd" + bytes([0b10000000, (window - 10) << 3])


RAW = numpy.arange(2**12, dtype=numpy.float32).tobytes()
DICTIONARY = zstandard.ZstdCompressionDict(RAW[:4096], dict_type=zstandard.DICT_TYPE_RAWCONTENT)
FRAME = zstandard.ZstdCompressor().compress(RAW)
STREAM = zstandard.ZstdCompressor().compressobj()
BAD_FRAMES = {
    "more than declared": (zstandard.ZstdCompressor().compress(RAW + b"a"), "declares 16385 bytes, but the shape needs 16384"),
    "less than declared": (zstandard.ZstdCompressor().compress(RAW[1:]), "declares 16383 bytes"),
    "a lie about more": (FRAME[:5] + struct.pack("<H", 16384 - 256 - 1) + FRAME[7:], "declares 16383 bytes"),
    "a lie about less": (
        zstandard.ZstdCompressor().compress(RAW + b"a").replace(struct.pack("<H", 16385 - 256), struct.pack("<H", 16384 - 256), 1),
        "expected a single complete zstd frame",
    ),
    "a lie about much": (b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**40) + FRAME[7:], "declares 1099511627776 bytes"),
    "no size": (STREAM.compress(RAW) + STREAM.flush(), "declares 18446744073709551615 bytes"),
    "two frames": (FRAME + FRAME, "expected a single complete zstd frame"),
    "a byte more": (FRAME + b"\0", "expected a single complete zstd frame"),
    "a byte less": (FRAME[:-1], "expected a single complete zstd frame"),
    "a frame to skip first": (b"\x50\x2a\x4d\x18\x01\0\0\0a" + FRAME, "begins with 502a4d18, but zstd frames begin with 28b52ffd"),
    "no frame": (RAW[:100], "begins with 00000000, but zstd frames begin with 28b52ffd"),
    "a dictionary": (b"\x28\xb5\x2f\xfd\x61\x07" + FRAME[5:], "needs the dictionary 7, but dictionaries are not allowed"),
    "a window above the limit": (
        frame_header(24) + struct.pack("<I", len(RAW)) + FRAME[7:],
        f"has a window of 16777216 bytes, but the maximum is {MAX_WINDOW_BYTES}",
    ),
    "a reserved bit": (FRAME[:4] + bytes([FRAME[4] | 8]) + FRAME[5:], "expected a single complete zstd frame"),
}


@pytest.mark.parametrize("kind", BAD_FRAMES)
def test_frames_of_another_form_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frame, message = BAD_FRAMES[kind]
    made, arrays = raw_contents(numpy.frombuffer(RAW, numpy.float32))
    file = stored_as(frame, made, arrays, monkeypatch)
    with pytest.raises(InvalidPayload, match=message) as caught:
        file.tensor("0.k.values")
    assert str(caught.value).startswith("bytes: 0.k.values: ")


@pytest.mark.parametrize(
    ("frame", "accepted"),
    [
        ("2000 010000", True),
        ("2400 010000 99e9d851", True),
        ("2000", False),
        ("2000 000000", False),
        ("2000 010000 00", False),
        ("2000 070000", False),
        ("2000 0b0000 00", False),
        ("2400 010000 99e9d850", False),
        ("2400 010000", False),
    ],
    ids=["frame", "checksum", "no block", "no last block", "a byte more", "reserved block", "a byte", "another checksum", "no checksum"],
)
def test_an_empty_frame_is_read_to_its_end(frame: str, accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Contents(codecs=(create("raw", 4, dtype="fp16"),), layers=(LayerEntry(side(0, 0), None),))
    file = stored_as(bytes.fromhex("28b52ffd" + frame), made, {"0.k.values": b""}, monkeypatch)
    if accepted:
        assert len(file.tensor("0.k.values")) == 0
    else:
        with pytest.raises(InvalidPayload, match=r"^bytes: 0\.k\.values: expected a single complete zstd frame"):
            file.tensor("0.k.values")


def test_a_frame_that_declares_no_content_cannot_expand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame consists of blocks of four bytes that each repeat one byte 131,072 times, and has a matching window."""
    made = Contents(codecs=(create("raw", 4, dtype="fp16"),), layers=(LayerEntry(side(0, 0), None),))
    bomb = bytes.fromhex("28b52ffd 80 38 00000000") + bytes.fromhex("020010 00") * 2**14 + bytes.fromhex("010000")
    assert zstandard.get_frame_parameters(bomb).content_size == 0
    file = stored_as(bomb, made, {"0.k.values": b""}, monkeypatch)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidPayload, match="expected a single complete zstd frame"):
            file.tensor("0.k.values")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_written_frames_and_files_declare_checksums(tmp_path: Path) -> None:
    """An edited frame without a checksum is refused, unless the file does not declare frame checksums."""
    made = contents("raw")
    arrays = {name: numpy.zeros_like(array) for name, array in arrays_of(made).items()}
    data = container.to_bytes(made, arrays, compress=True)
    with container.open_bytes(data) as file:
        assert file.header.ignorable[zstd.FEATURE] == b""
        name = next(name for name, tensor in file.tensors.items() if tensor.filter == "zstd")
        file.verify()
        raw = bytes(file.tensor(name))
    without = change_file(data, lambda parts: parts.store(name, zstandard.ZstdCompressor().compress(raw), "zstd"))
    with container.open_bytes(without) as file, pytest.raises(InvalidPayload, match=f"{name}: the zstd frame has no content checksum"):
        file.verify()
    with container.open_bytes(change_file(without, edit("ignorable", {}))) as file:
        assert bytes(file.tensor(name)) == raw
    assert zstd.FEATURE not in container.open_bytes(container.to_bytes(made, arrays)).header.ignorable


def test_a_small_frame_cannot_declare_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame of 32 KiB can decode to a gigabyte, so the largest ratio that the header declares bounds the allocation."""
    made = Contents(codecs=(create("raw", 1024, dtype="fp32"),), layers=(LayerEntry(side(0, 2**18), None),))
    frame = zstandard.ZstdCompressor().compress(bytes(2**20))
    assert len(frame) * MAX_RATIO < 2**20
    monkeypatch.setattr(container, "compress_frame", lambda raw: frame)
    monkeypatch.setattr(container, "layout_bytes", lambda layout: 0)
    with pytest.raises(LimitExceeded, match=rf"stored_bytes is {len(frame)} for 1073741824 decoded bytes, but the ratio may"):
        container.to_bytes(made, {"0.k.values": b""}, compress=True)


def test_writer_overhead_is_at_most_three_percent() -> None:
    random = numpy.random.default_rng(0).bytes(100_000)
    assert zstd.compress_frame(memoryview(random[:98_000] + bytes(2_000))) is None
    frame = zstd.compress_frame(memoryview(random[:96_000] + bytes(4_000)))
    assert frame is not None
    assert 95_000 < len(frame) <= 97_000


# Imports.


def test_a_header_is_read_without_torch_or_numpy(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(small_file())
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from kvpack.file import container; "
        "container.open_file(sys.argv[2]).tensor('0.k.tail'); "
        "print(*sorted({'torch', 'numpy', 'zstandard', 'json'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program, ROOT, tmp_path / "a"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_header_tensor_matches_the_specification() -> None:
    data = small_file("raw")
    entries, start = json_of(data)
    begin, end = entries["kvpack.header"]["data_offsets"]
    assert begin == 0
    assert msgpack.unpackb(data[start : start + end])["tensors"][0][:5] == ["0.k.values", "BF16", [1, 1, 3, 1], "none", 6]


def test_blocks_are_reserved_only_for_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved blocks are not flushed before a rename, so a replaced file's old bytes would be lost in a power failure."""
    reserved = []
    monkeypatch.setattr(atomic, "_FALLOCATE", lambda descriptor, mode, at, nbytes: reserved.append((mode, at.value, nbytes.value)))
    small, large = (memoryview(bytes(nbytes)) for nbytes in (2**20 - 1, 2**20))
    for pieces in ([small], [large, small], [large]):
        atomic.write_file(tmp_path / f"{len(pieces)}-{len(pieces[0])}", pieces)
    assert reserved == [(0, 0, 2**21 - 1), (0, 0, 2**20)]
    atomic.write_file(tmp_path / f"1-{2**20}", [large])
    assert len(reserved) == 2


def test_a_file_system_that_cannot_reserve_blocks_is_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = memoryview(bytes(range(256)) * 2**13)
    monkeypatch.setattr(atomic, "_FALLOCATE", lambda *_: -1)
    atomic.write_file(tmp_path / "refused", [data])
    monkeypatch.setattr(atomic, "_FALLOCATE", None)
    atomic.write_file(tmp_path / "unknown", [data])
    assert (tmp_path / "refused").read_bytes() == (tmp_path / "unknown").read_bytes() == data
