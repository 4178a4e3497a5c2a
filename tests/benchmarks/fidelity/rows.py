"""A paper's figure, the figure measured here, and the verdict on the two."""

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
    """A figure of a paper: its ``table`` and ``name``, the ``measured`` value and the ``published`` one.

    ``relation`` is the paper's claim about the value: "=" for equal to the published value, ">" for more, "<" for less. If the figures
    differ for a known reason, ``note`` states the reason in one line, and ``expected`` is the range that results from it.
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
        """Relative deviation of the measured from the published value, or None if the claim is a relation."""
        return self.measured / self.published - 1 if self.relation == "=" else None

    @property
    def verdict(self) -> str:
        """The verdict: "within" the tolerance, "holds" for a relation, "explained" if only within the expected range, or "differs"."""
        if self.deviation is not None and abs(self.deviation) <= TOLERANCE:
            return "within"
        if self.relation in _RELATIONS and _RELATIONS[self.relation](self.measured, self.published):
            return "holds"
        if self.expected is not None and self.expected[0] <= self.measured <= self.expected[1]:
            return "explained"
        return "differs"

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values. Numbers that are not finite become None, because JSON cannot represent them."""
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
    """Return the range of values that are within the tolerance of ``value``."""
    return value * (1 - TOLERANCE), value * (1 + TOLERANCE)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
