"""Small files of a user: what is no such file is refused at once, by name."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from kvpack.formats.errors import InvalidParameter, LimitExceeded, MissingFile
from kvpack.user_files import read_json, read_text, read_text_and_mode

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_is_read_whole_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("größe\n")
    path.chmod(0o640)
    assert read_text_and_mode(path, 8) == ("größe\n", 0o640)
    with pytest.raises(LimitExceeded, match="has more than 7 bytes"):
        read_text(path, 7)
    assert read_json_of(tmp_path, "[1, 2]") == [1, 2]


def read_json_of(folder: Path, text: str) -> object:
    (folder / "json").write_text(text)
    return read_json(folder / "json", 10**6)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000])
def test_deep_json_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="nested too deep"):
        read_json_of(tmp_path, text)


@pytest.mark.parametrize("text", ["", "[1,", "nul"])
def test_what_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="json: is no JSON"):
        read_json_of(tmp_path, text)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"ab\xff")
    with pytest.raises(InvalidParameter, match="byte 2 is not UTF-8"):
        read_text(tmp_path / "file", 100)


def test_nothing_waits_and_nothing_grows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for name, message in {
            tmp_path / "fifo": "is a FIFO",
            tmp_path: "is a folder",
            "/dev/zero": "is a device",
            tmp_path / "socket": "could not be read",
            tmp_path / "nothing": "No such file",
            "nul\0": "null",
        }.items():
            with pytest.raises(MissingFile, match=message):
                read_text(name, 1 << 20)
