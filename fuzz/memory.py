"""Measure the memory that one input takes: the growth of resident memory as the system reports it, including libraries' buffers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fuzz.session import resident
from kvpack.file.footprint import CONSTANT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def growth(action: Callable[[], object]) -> float | None:
    """Return the growth of the process in MiB while ``action`` runs; None where the system does not report it."""
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return None
    before, files = resident("VmRSS"), resident("RssFile")
    action()
    # Code of libraries that the system had dropped, or that runs for the first time, is mapped from their files.
    return resident("VmHWM") - before - max(0.0, resident("RssFile") - files)


def check_growth(action: Callable[[], bool], memory_limit: int) -> bool:
    """Run ``action`` and return its result. Raises AssertionError if memory grows by more than ``memory_limit`` plus the constant that
    kvpack documents."""
    result = False

    def noted() -> None:
        nonlocal result
        result = action()

    taken, allowed = growth(noted), (memory_limit + CONSTANT_BYTES) / 2**20
    assert taken is None or taken <= allowed, f"took {taken:.0f} MiB, the limit is {allowed:.0f}: memory_limit and the stated constant"
    return result
