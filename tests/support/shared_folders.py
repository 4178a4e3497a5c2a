"""Share folders between all workers of a test run. The first worker that needs a folder fills it, and the others wait."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def shared_folder(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]) -> Path:
    """Return the folder ``name`` of this test run, which the first worker fills by calling ``fill`` with it."""
    base = factory.getbasetemp()
    # The folder of a worker is in the folder of the run.
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (run / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (run / name).exists():
            unfinished = factory.mktemp(name)
            fill(unfinished)
            unfinished.rename(run / name)
    return run / name
