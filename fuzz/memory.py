"""Measurement of the memory that one input needs: the growth of resident memory, including libraries' buffers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fuzz.session import resident_mib
from kvpack.file.footprint import CONSTANT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def measure_growth(action: Callable[[], object]) -> float | None:
    """Return the growth of the process in MiB while ``action`` runs, or None if the system does not report it."""
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return None
    before, files = resident_mib("VmRSS"), resident_mib("RssFile")
    action()
    # Subtract library code, which is mapped from files when it first runs or after the system has dropped it.
    return resident_mib("VmHWM") - before - max(0.0, resident_mib("RssFile") - files)


def check_growth(action: Callable[[], bool], memory_limit: int) -> bool:
    """Run ``action`` and return its result.

    Raises AssertionError if memory grows by more than ``memory_limit`` plus the constant that kvpack documents.
    """
    result = False

    def noted() -> None:
        nonlocal result
        result = action()

    taken, allowed = measure_growth(noted), (memory_limit + CONSTANT_BYTES) / 2**20
    assert taken is None or taken <= allowed, f"took {taken:.0f} MiB, but the limit is {allowed:.0f} MiB (memory_limit plus a constant)"
    return result
