"""Emulate a disk on which files take exactly their size and folders take nothing, so that budgets fit a known number of entries."""

from __future__ import annotations

from typing import Any

from kvpack.store import folder


def install(patch: Any) -> None:
    """Emulate the disk for every folder, in this process and its forks. ``patch`` is pytest's monkeypatch."""
    patch.setattr(folder, "block_bytes", lambda path: 1)
    patch.setattr(folder, "allocated_bytes", lambda *paths: 0)
