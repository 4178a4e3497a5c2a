"""Compare the papers' figures with this library's measurements of its own codecs on packed streams (``make bench-fidelity``)."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from kvpack.formats.errors import InvalidParameter
from kvpack.output import print_table

from . import hqmq, octopus, oscar, turboangle
from .measure import Settings
from .rows import TOLERANCE, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.coding.encoding import Progress

__all__ = ["LARGEST_SEED", "PAPERS", "Settings", "run", "show"]

PAPERS = {
    "octopus": ("OCTOPUS", octopus.SECTIONS),
    "hqmq": ("HQMQ", hqmq.SECTIONS),
    "turboangle": ("TurboAngle", turboangle.SECTIONS),
    "oscar": ("OScaR", oscar.SECTIONS),
}
"""For each paper: its title, and the functions that return its rows."""

LARGEST_SEED = 2**32 - 1


def run(papers: Sequence[str] = (), settings: Settings | None = None, *, progress: Progress | None = None) -> dict[str, Any]:
    """Measure the figures of ``papers`` (keys of PAPERS, or all if empty) and return them as JSON values.

    Two runs with the same seed and number of threads return the same report. Raises InvalidParameter for a seed out of range.
    """
    settings = settings or Settings()
    if not 0 <= settings.seed <= LARGEST_SEED:
        raise InvalidParameter(f"--seed is {settings.seed}, expected an integer from 0 to {LARGEST_SEED}")
    chosen = [paper for paper in PAPERS if paper in papers or not papers]
    sections = [(paper, section) for paper in chosen for section in PAPERS[paper][1]]
    rows: list[tuple[str, Row]] = []
    for done, (paper, section) in enumerate(sections, 1):
        with torch.inference_mode():
            rows += [(PAPERS[paper][0], row) for row in section(settings)]
        if progress:
            progress(done, len(sections))
    return {
        "seed": settings.seed,
        "quick": settings.quick,
        "threads": torch.get_num_threads(),
        "tolerance": TOLERANCE,
        "verdicts": Counter(row.verdict for _, row in rows),
        "rows": [{"paper": paper, **row.as_json()} for paper, row in rows],
    }


def show(report: dict[str, Any]) -> None:
    """Print one table for each of the papers' tables, followed by the notes on its rows."""
    columns = ["figure", "measured", "published", "deviation", "verdict"]
    for (paper, table), group in groupby(report["rows"], lambda row: (row["paper"], row["table"])):
        rows = list(group)
        notes = list(dict.fromkeys(row["note"] for row in rows if row["note"]))
        lines = []
        for row in rows:
            relation = "" if row["relation"] == "=" else f"{row['relation']} "
            mark = f" [{notes.index(row['note']) + 1}]" if row["note"] else ""
            deviation = "" if row["deviation"] is None else f"{row['deviation']:+.1%}"
            lines.append([row["name"], _text(row["measured"]), relation + _text(row["published"]), deviation, row["verdict"] + mark])
        print_table(f"{paper}, {table}", columns, lines)
        for number, note in enumerate(notes, 1):
            print(f"[{number}] {note}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report["verdicts"].items())
    print(f"\n{len(report['rows'])} numbers: {counts}.")
    print(f"within: at most {report['tolerance']:.0%} from the published value. holds: the measurement has the paper's order.")
    print("explained: off by more, as expected for the reason in the note. differs: off by more for an unknown reason.")


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
