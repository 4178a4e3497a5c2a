"""One figure of a paper next to the figure measured here, and a verdict."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

TOLERANCE = 0.02
"""The largest relative deviation of a measured figure from the published one."""

_RELATIONS = {">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class Row:
    """A figure ``name`` of ``table``, as ``measured`` and as ``published``.

    ``relation`` is the paper's claim: "=" the published value, ">" more or "<" less than it.
    If a known reason leads elsewhere, ``note`` states it in one line and ``expected`` is the range that it leads to.
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
        """The relative deviation of the measured from the published value; None for a relation."""
        return self.measured / self.published - 1 if self.relation == "=" else None

    @property
    def verdict(self) -> str:
        """within (the tolerance), holds (a relation), explained (in the expected range, not within), or differs."""
        if self.deviation is not None and abs(self.deviation) <= TOLERANCE:
            return "within"
        if self.relation in _RELATIONS and _RELATIONS[self.relation](self.measured, self.published):
            return "holds"
        if self.expected is not None and self.expected[0] <= self.measured <= self.expected[1]:
            return "explained"
        return "differs"

    def as_json(self) -> dict[str, Any]:
        """The row as JSON values; a number that is not finite, which JSON cannot hold, is None."""
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
    """The range within the tolerance of ``value``."""
    return value * (1 - TOLERANCE), value * (1 + TOLERANCE)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
