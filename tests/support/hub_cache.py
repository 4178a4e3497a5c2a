"""A huggingface_hub cache that contains models, for a process that is offline."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import constants

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "5" * 40


def go_offline(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Use ``folder`` as huggingface_hub's cache, and make the hub unreachable."""
    patch.setattr(constants, "HF_HUB_CACHE", str(folder))
    patch.setattr(constants, "HF_HUB_OFFLINE", True)


def add_model(cache: Path, name: str, source: Path | None = None) -> Path:
    """Copy a model into ``cache`` under the hub name ``name``, and return its snapshot.

    ``source`` is the model's folder, by default that of the demo's model.
    """
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    held = files("kvpack.demo") / "tinylm" if source is None else source
    for file in held.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    return snapshot
