"""A figure from a paper next to the figure measured here, and the verdict."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

TOLERANCE = 0.02
"""Maximum relative deviation of a measured figure from the published one."""

_RELATIONS = {">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class Row:
    """A figure ``name`` of ``table``, as ``measured`` and as ``published``.

    ``relation`` is the paper's claim: "=" the published value, ">" more or "<" less than it. If the figures differ for a known reason,
    ``note`` states it in one line, and ``expected`` is the resulting range.
    """

    table: str
    name: str
    measured: float
    published: float
    relation: str = "="
    expected: tuple[float, float] | None = None
    note: str = ""

    @property
    def deviation(self) -> float | None:
        """Relative deviation of the measured from the published value, or None for a relation."""
        return self.measured / self.published - 1 if self.relation == "=" else None

    @property
    def verdict(self) -> str:
        """The verdict: within (the tolerance), holds (a relation), explained (only within the expected range), or differs."""
        if self.deviation is not None and abs(self.deviation) <= TOLERANCE:
            return "within"
        if self.relation in _RELATIONS and _RELATIONS[self.relation](self.measured, self.published):
            return "holds"
        if self.expected is not None and self.expected[0] <= self.measured <= self.expected[1]:
            return "explained"
        return "differs"

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values; a number that is not finite, which JSON cannot represent, is None."""
        return {
            "table": self.table,
            "name": self.name,
            "measured": _finite(self.measured),
            "relation": self.relation,
            "published": self.published,
            "deviation": _finite(self.deviation),
            "expected": list(self.expected) if self.expected else None,
            "verdict": self.verdict,
            "note": self.note,
        }


def around(value: float) -> tuple[float, float]:
    """Return the range within the tolerance of ``value``."""
    return value * (1 - TOLERANCE), value * (1 + TOLERANCE)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
