"""Tests of files on disk: modes, links, read-only files, and files left by killed writers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import signal
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvpack.file import atomic
from kvpack.file.atomic import remove_dead, replace_file, write_file
from kvpack.formats.errors import WriteFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATA = [memoryview(b"new bytes")]


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o000, 0o666), (0o777, 0o000)])
def test_a_new_file_has_the_mode_from_the_umask(mask: int, expected: int, tmp_path: Path) -> None:
    with umask(mask):
        write_file(tmp_path / "a", DATA)
        assert mode(tmp_path / "a") == expected
        assert os.umask(mask) == mask, "the host's umask was changed"
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_system_need_not_support_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fchmod(descriptor: int, mode: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "fchmod", fchmod)
    write_file(tmp_path / "a", DATA)
    assert (tmp_path / "a").read_bytes() == DATA[0]


def test_a_save_completes_while_another_one_cleans_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = atomic._create

    def create_and_sweep(folder: str, *, mode: int = 0o600) -> tuple[int, str]:
        made = create(folder, mode=mode)
        if mode != 0o600:
            assert remove_dead(folder).removed == [made[1]]
        return made

    monkeypatch.setattr(atomic, "_create", create_and_sweep)
    with umask(0o022):
        write_file(tmp_path / "a", DATA)
    assert (os.listdir(tmp_path), mode(tmp_path / "a"), (tmp_path / "a").read_bytes()) == (["a"], 0o644, b"new bytes")


def test_an_empty_path_is_named() -> None:
    with pytest.raises(WriteFailed, match=r"^'': could not be written"):
        write_file("", DATA)


@pytest.mark.parametrize("old", [0o600, 0o664, 0o640, 0o755])
def test_an_old_file_keeps_its_mode(old: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "a").chmod(old)
    write_file(tmp_path / "a", DATA)
    assert (mode(tmp_path / "a"), (tmp_path / "a").read_bytes()) == (old, b"new bytes")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")
def test_an_old_file_keeps_its_owner_and_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "a").chmod(0o674)
    os.chown(tmp_path / "a", 1234, 2345)
    write_file(tmp_path / "a", DATA)
    status = (tmp_path / "a").stat()
    assert (status.st_uid, status.st_gid, mode(tmp_path / "a")) == (1234, 2345, 0o674)

    def refused(*_: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", refused)
    write_file(tmp_path / "a", DATA)
    assert mode(tmp_path / "a") == 0o644, "the writer's group got access to another group's file"


def test_an_unfinished_file_is_private_until_it_is_complete(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "old").chmod(0o666)
    for name in ("old", "new"):
        seen = []

        def write(descriptor: int, seen: list[int] = seen) -> int:
            seen += [mode(path) for path in tmp_path.iterdir() if path.name.endswith(atomic.LOCKED_SUFFIX)]
            return os.write(descriptor, b"new bytes")

        with umask(0):
            replace_file(tmp_path / name, write)
        assert seen == [0o600]
        assert mode(tmp_path / name) == 0o666


def test_entries_of_stores_stay_private_and_replace_links(tmp_path: Path) -> None:
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "target").write_bytes(b"another file")
    (tmp_path / "entry").symlink_to("target")
    with umask(0):
        write_file(tmp_path / "entry", DATA, unfinished=str(tmp_path / "unfinished"))
    assert not (tmp_path / "entry").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"another file"
    assert mode(tmp_path / "entry") == 0o600


@pytest.mark.parametrize("exists", [True, False], ids=["a file", "nothing"])
def test_a_link_is_followed(exists: bool, tmp_path: Path) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    if exists:
        (folder / "x").write_bytes(b"old")
        (folder / "x").chmod(0o640)
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to("real/x")
    with umask(0o022):
        write_file(tmp_path / "first", DATA)
    assert (tmp_path / "first").is_symlink()
    assert (tmp_path / "second").is_symlink()
    assert (folder / "x").read_bytes() == b"new bytes"
    assert mode(folder / "x") == (0o640 if exists else 0o644)
    assert os.listdir(folder) == ["x"]


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(WriteFailed, match="Too many levels of symbolic links"):
        write_file(tmp_path / "a", DATA)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("through_link", [False, True])
def test_a_read_only_file_is_refused(through_link: bool, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "a").chmod(0o444)
    (tmp_path / "link").symlink_to("a")
    path = tmp_path / ("link" if through_link else "a")
    with pytest.raises(OSError, match=r"read-only for this user \(mode 0444, owner \d+\): make it writable with chmod") as caught:
        write_file(path, DATA)
    assert isinstance(caught.value, WriteFailed)
    assert (caught.value.errno, caught.value.filename, caught.value.exit_code) == (errno.EACCES, str(path), 3)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert ((tmp_path / "a").read_bytes(), mode(tmp_path / "a")) == (b"old", 0o444)
    (tmp_path / "a").chmod(0o644)
    write_file(path, DATA)
    assert (tmp_path / "a").read_bytes() == b"new bytes"


_KILLED = """
import os, signal, sys
from kvpack.file.atomic import replace_file
def write(descriptor):
    os.write(descriptor, b"half of the")
    print("writing", flush=True)
    sys.stdin.read() if sys.argv[2] == "wait" else os.kill(os.getpid(), signal.SIGKILL)
    return 0
replace_file(sys.argv[1], write)
"""


def unfinished(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(atomic.TEMPORARY_PREFIX)]


def killed_writer(folder: Path) -> None:
    process = subprocess.run([sys.executable, "-c", _KILLED, str(folder / "killed"), "die"], stdout=subprocess.DEVNULL, check=False)
    assert process.returncode == -signal.SIGKILL
    assert len(unfinished(folder)) == 1


def test_the_next_save_removes_the_file_of_a_killed_writer(tmp_path: Path) -> None:
    killed_writer(tmp_path)
    write_file(tmp_path / "a", DATA)
    assert os.listdir(tmp_path) == ["a"]


def test_the_file_of_a_running_writer_is_kept(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _KILLED, str(tmp_path / "slow"), "wait"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        (name,) = unfinished(tmp_path)
        # Neither its age nor a name with the number of no process makes it dead.
        os.utime(tmp_path / name, (0, 0))
        write_file(tmp_path / "a", DATA)
        assert remove_dead(str(tmp_path)) == ([], [str(tmp_path / name)])
        process.stdin.close()
        assert process.wait() == 0
    assert (tmp_path / "slow").read_bytes() == b"half of the"
    assert sorted(os.listdir(tmp_path)) == ["a", "slow"]


def test_only_files_of_dead_writers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, old, held = (tmp_path / f".kvpack-999999999-{name}.tmp" for name in ("aa-locked", "bb", "cc-locked"))
    for path in (dead, old, held, tmp_path / "mine.tmp", tmp_path / ".kvpack-notes"):
        path.write_bytes(b"part")
        os.utime(path, (0, 0))
    (tmp_path / ".kvpack-1-dd-locked.tmp").symlink_to("mine.tmp")
    (tmp_path / ".kvpack-1-ee-locked.tmp").mkdir()
    every = sorted(os.listdir(tmp_path))
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with monkeypatch.context() as patch:
            patch.setattr(atomic, "_LOCAL_FILE_SYSTEMS", {})
            removed, kept = remove_dead(str(tmp_path))
            assert (removed, sorted(kept)) == ([], sorted(map(str, (dead, old, held)))), (
                "a file that another host may have locked was removed"
            )
        with monkeypatch.context() as patch:
            patch.setattr(atomic, "try_lock", lambda descriptor: None)
            assert remove_dead(str(tmp_path)).removed == [], "a file was removed on a file system without locks"
        removed, kept = remove_dead(str(tmp_path))
        assert (removed, sorted(kept)) == ([str(dead)], sorted(map(str, (old, held))))
    assert sorted(os.listdir(tmp_path)) == [name for name in every if name != dead.name]
    assert remove_dead(str(tmp_path / "nowhere")) == ([], [])


def test_a_file_removed_by_another_process_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".kvpack-1-aa-locked.tmp").write_bytes(b"part")

    def gone(path: str, **_: bool) -> bool:
        os.unlink(path)
        raise FileNotFoundError

    monkeypatch.setattr(atomic, "remove_abandoned", gone)
    assert remove_dead(str(tmp_path)) == ([], [])
