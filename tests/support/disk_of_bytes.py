"""Emulate a disk without blocks, where folders take no space, so that a budget determines how many entries fit."""

from __future__ import annotations

from typing import Any

from kvpack.store import folder


def install(patch: Any) -> None:
    """Patch this process, and those that it forks, so that every folder is on such a disk; ``patch`` is pytest's monkeypatch."""
    patch.setattr(folder, "block_bytes", lambda path: 1)
    patch.setattr(folder, "allocated_bytes", lambda *paths: 0)
