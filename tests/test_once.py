"""Objects that the workers of a test run share are created once."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import shared_folders


def test_a_folder_is_filled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    filled: list[Path] = []

    def fill(folder: Path) -> None:
        filled.append(folder)
        (folder / "a").write_text(str(len(filled)), encoding="utf-8")

    found = [shared_folders.shared_folder(tmp_path_factory, "filled-once", fill) for _ in range(2)]
    assert len(filled) == 1
    assert [(path / "a").read_text(encoding="utf-8") for path in found] == ["1", "1"]


def test_a_folder_that_could_not_be_filled_is_retried(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ZeroDivisionError):
        shared_folders.shared_folder(tmp_path_factory, "tried-again", lambda folder: 1 / 0)
    assert list(shared_folders.shared_folder(tmp_path_factory, "tried-again", lambda folder: None).iterdir()) == []
