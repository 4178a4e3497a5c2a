"""Rows of the tables of bench serve. If a measurement fails, its row contains the error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Result = TypeVar("Result")

DYNAMIC, FLASH = "DynamicCache", "DynamicCache, flash"
OUT_OF_MEMORY_ERROR = "does not fit"
"""Error of a cache that does not fit in memory."""
TIMES = ("step_seconds", "eager_seconds", "generate_seconds", "graph_seconds", "cache_bytes", "peak_bytes")


def measured_row(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the row that ``measure`` returns for the cache ``name``. If it fails, return a row with the ``error``."""
    result, error = try_measure(measure)
    row: dict[str, Any] = {"cache": name, **dict.fromkeys(TIMES), **(result or {})}
    return row if error is None else {**row, "error": error}


def try_measure(measure: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """Return the result of ``measure`` and None. If it fails, return None and the text of the error on one line."""
    try:
        return measure(), None
    except torch.OutOfMemoryError:
        return None, OUT_OF_MEMORY_ERROR
    except Exception as error:
        return None, f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
