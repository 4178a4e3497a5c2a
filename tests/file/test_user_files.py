"""Tests of files that a user names: only regular files are accepted, and files that are too long are not read."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvpack
from kvpack.coding.recipes import parse_recipe
from kvpack.evaluation.models import read_text as read_measured_text
from kvpack.file.user_files import open_regular, read_bytes, read_json, read_text, read_text_and_mode
from kvpack.formats.errors import InvalidParameter, KvpackError, LimitExceeded, MissingFile
from kvpack.store.transfer import read_exported
from kvpack.tuning.journal import open_journal


def test_regular_files_are_read_as_bytes_text_or_json(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbf[1, 2]")
    assert read_bytes(path, 9, "a file") == b"\xef\xbb\xbf[1, 2]"
    assert read_text(path, 9, "a file") == "[1, 2]"
    assert read_json(os.fsencode(path), 9, "a file") == [1, 2]
    path.chmod(0o640)
    assert read_text_and_mode(path, 9) == ("[1, 2]", 0o640)
    path.write_bytes(b"")
    assert read_bytes(path, 0, "a file") == b""


@pytest.mark.parametrize("size", [0, 5, 2**20, 3 * 2**20 + 1])
def test_the_size_limit_is_exact(size: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    assert len(read_bytes(path, size, "a file")) == size
    path.write_bytes(b"x" * (size + 1))
    with pytest.raises(LimitExceeded, match=f"^{path}: exceeds the maximum of {size} bytes for a key file$"):
        read_bytes(path, size, "a key file")


def test_a_sparse_file_is_read_only_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(LimitExceeded):
        read_bytes(path, 2**20, "a file")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"ab\xff", InvalidParameter, ": byte 2 is not valid UTF-8: convert the text to UTF-8"),
        (b"[" * 100_000, InvalidParameter, ": the JSON is nested too deeply, expected a JSON array"),
        (b"[1,", InvalidParameter, r" is not a JSON array: .*line 1"),
        (b'{"a":' * 100_000, InvalidParameter, ": the JSON is nested too deeply, expected a JSON array"),
        (b"", InvalidParameter, r" is not a JSON array: .*line 1"),
        (b"1" * 5000, InvalidParameter, " is not a JSON array: .*digits"),
    ],
    ids=["not UTF-8", "deep", "cut", "deep map", "empty", "long number"],
)
def test_invalid_json_is_refused(content: bytes, error: type[KvpackError], message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(error, match=f"^{path}{message}"):
        read_json(path, 2**20, "a JSON array")


# Whatever opens a file that a user names, with a path that could make it wait or read for ever.

OPENERS: dict[str, Callable[[Any], object]] = {
    "open_regular": open_regular,
    "load": kvpack.load,
    "a recipe file": lambda path: parse_recipe(Path(path)),
    "token ids": lambda path: read_exported(Path(__file__).parents[1] / "golden" / "raw-bf16.kvpack", path, ""),
    "measurements": lambda path: open_journal(path, [], 4096),
    "a text": lambda path: read_measured_text(path, Path("."), 1000),
}


@pytest.fixture
def special(tmp_path: Path) -> dict[str, str]:
    os.mkfifo(tmp_path / "FIFO")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    paths = {f"a {name}": str(tmp_path / name) for name in ("FIFO", "folder", "loop")}
    return {**paths, "a device": "/dev/zero"}


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a device", "a loop"])
@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)
def test_files_that_are_not_regular_are_refused_at_once(opener: Callable[[Any], object], kind: str, special: dict[str, str]) -> None:
    path = special[kind]
    raised: list[BaseException] = []

    def call() -> None:
        try:
            opener(path)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the call did not return"
    assert isinstance(raised[0], MissingFile)
    message = ": Too many levels of symbolic links" if kind == "a loop" else f"is {kind}, expected "
    assert str(raised[0]).startswith(f"{path}: ")
    assert message in str(raised[0])


def test_a_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    path = tmp_path / "no.kvpack"
    with pytest.raises(FileNotFoundError) as raised:
        kvpack.load(path)
    error = raised.value
    assert isinstance(error, MissingFile)
    assert (error.errno, error.filename, error.strerror) == (errno.ENOENT, str(path), "No such file or directory")
    assert str(error) == f"{path}: could not be opened: No such file or directory: check the path"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.errno, copy.filename) == (MissingFile, str(error), error.errno, error.filename)
    with pytest.raises(OSError, match="is a folder") as of_folder:
        kvpack.load(tmp_path)
    assert of_folder.value.errno == errno.EISDIR


def test_a_socket_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(MissingFile, match="is a socket, expected a regular file"):
            open_regular(tmp_path / "socket")


@pytest.mark.parametrize("path", [None, 3, 1.5, ["x"], {}], ids=repr)
def test_values_that_are_not_paths_are_refused(path: Any) -> None:
    found = "None" if path is None else f"a {type(path).__name__}"
    with pytest.raises(InvalidParameter, match=f"^path is {found}, expected a str or os.PathLike, such as 'prompt.kvpack'$"):
        kvpack.load(path)


def test_an_empty_path_is_named() -> None:
    with pytest.raises(MissingFile, match=r"^'': could not be opened: No such file"):
        kvpack.load("")


def test_a_recipe_file_that_is_not_text_is_an_invalid_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.txt"
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidParameter, match="not valid UTF-8"):
        parse_recipe(path)
