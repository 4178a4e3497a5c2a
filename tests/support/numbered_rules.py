"""The numbered rules of spec/: the place of each, who must keep it, and the errors by which readers refuse a breach."""

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
"""The page of each prefix of rule numbers."""
KEPT_BY = ("refusal", "values", "conduct", "writer")

_MARK = re.compile(r"\[([a-z][a-z-]*-[1-9][0-9]*)\]")


@dataclass(frozen=True)
class Rule:
    """One row of rules.md; ``section`` is the second decoder's name for the place: page and heading."""

    number: str
    section: str
    kept_by: str
    errors: tuple[str, ...]


def marked(prefix: str) -> list[tuple[str, str, str]]:
    """Every rule of a page in its order: its number, the heading of level 2 above it, and its line."""
    found, heading = [], ""
    for line in (SPEC / PAGES[prefix]).read_text(encoding="utf-8").splitlines():
        heading = line[3:] if line.startswith("## ") else heading
        found += [(number, heading, line) for number in _MARK.findall(line)]
    return found


@cache
def rules() -> dict[str, Rule]:
    """The rules by number, in the order of rules.md."""
    sections = {number: f"{page}, {heading}".removesuffix(", ") for prefix, page in PAGES.items() for number, heading, _ in marked(prefix)}
    rows = re.findall(r"^\| ([a-z-]+-\d+) \| [^|]+ \| (\w+) \| ([^|]*) ?\|$", RULES.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        number: Rule(number, sections.get(number, ""), kept_by, tuple(re.findall(r"`(\w+)`", errors))) for number, kept_by, errors in rows
    }
