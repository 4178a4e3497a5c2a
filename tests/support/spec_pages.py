"""Parse the pages of the specification into sections and tables."""

from __future__ import annotations

import re
from pathlib import Path

SPEC = Path(__file__).resolve().parents[2] / "spec"


Table = list[dict[str, str]]


def section(page: Path, heading: str) -> str:
    """Return the text below the heading ``heading``, up to the next heading of the same or a higher level."""
    lines = page.read_text(encoding="utf-8").split("\n")
    first = next(i for i, line in enumerate(lines) if re.fullmatch(rf"#+ {re.escape(heading)}", line))
    level = lines[first].split(" ")[0]
    last = next((i for i in range(first + 1, len(lines)) if re.match(rf"#{{1,{len(level)}}} ", lines[i])), len(lines))
    return "\n".join(lines[first + 1 : last])


def tables(text: str) -> list[Table]:
    """Return the Markdown tables in ``text``. Each row maps column headings to cells without backticks."""
    found = []
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE):
        head, _, *rows = ([cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in block.strip().split("\n"))
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def table(text: str, *columns: str) -> Table:
    """Return the only table in ``text`` that has the column headings ``columns``."""
    (found,) = (rows for rows in tables(text) if tuple(rows[0]) == columns)
    return found
