"""Parse the numbered rules of spec/: where each rule is stated, whom it binds, and which errors readers raise for violations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SPEC = Path(__file__).resolve().parents[2] / "spec"
RULES = SPEC / "rules.md"
PAGES = {
    "front": "README.md",
    "container": "container.md",
    "side-cars": "side-cars.md",
    "rans": "rans.md",
    "basis": "basis.md",
    "store": "store.md",
    "row": "row.md",
    **{path.stem: f"codecs/{path.name}" for path in sorted((SPEC / "codecs").glob("*.md"))},
}
"""The first document for each prefix of rule numbers."""
EXTRA_DOCUMENTS = {"front": ("packing.md",)}
"""Further documents that contain rules with a prefix."""
ENFORCED_BY = ("refusal", "values", "conduct", "writer")

_MARK = re.compile(r"\[([a-z][a-z-]*-[1-9][0-9]*)\]")


@dataclass(frozen=True)
class Rule:
    """One row of rules.md. ``section`` is the place as the second decoder names it: page and heading."""

    number: str
    section: str
    enforced_by: str
    errors: tuple[str, ...]


def marked_rules(prefix: str) -> list[tuple[str, str, str]]:
    """Return every rule with ``prefix`` in textual order, each with its number, its document and level-2 heading, and its line."""
    result = []
    for document in documents(prefix):
        place = document
        for line in (SPEC / document).read_text(encoding="utf-8").splitlines():
            place = f"{document}, {line[3:]}" if line.startswith("## ") else place
            result += [(number, place, line) for number in _MARK.findall(line)]
    return result


def documents(prefix: str) -> tuple[str, ...]:
    """Return the documents that contain rules with ``prefix``."""
    return PAGES[prefix], *EXTRA_DOCUMENTS.get(prefix, ())


@cache
def rules() -> dict[str, Rule]:
    """Return the rules by number, in the order of rules.md."""
    sections = {number: place for prefix in PAGES for number, place, _ in marked_rules(prefix)}
    rows = re.findall(r"^\| ([a-z-]+-\d+) \| [^|]+ \| (\w+) \| ([^|]*) ?\|$", RULES.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        number: Rule(number, sections.get(number, ""), enforced_by, tuple(re.findall(r"`(\w+)`", errors)))
        for number, enforced_by, errors in rows
    }
