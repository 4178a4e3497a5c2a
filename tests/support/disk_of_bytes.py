"""Emulate a disk on which files take exactly their size and folders nothing, so that a budget determines how many entries fit."""

from __future__ import annotations

from typing import Any

from kvpack.store import folder


def install(patch: Any) -> None:
    """Patch this process and its forks so that every folder is on such a disk; ``patch`` is pytest's monkeypatch."""
    patch.setattr(folder, "block_bytes", lambda path: 1)
    patch.setattr(folder, "allocated_bytes", lambda *paths: 0)
