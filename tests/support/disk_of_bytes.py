"""A disk without blocks, whose folders take nothing: a budget then says how many entries fit."""

from __future__ import annotations

from typing import Any

from kvpack.store import folder


def install(patch: Any) -> None:
    """Let every folder of this process, and of those that it forks, be on such a disk; ``patch`` is pytest's."""
    patch.setattr(folder, "block_bytes", lambda path: 1)
    patch.setattr(folder, "taken_by", lambda *paths: 0)
