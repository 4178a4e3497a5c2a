"""One cell of the matrix: a fault that is applied to a kind of store, and the guarantees that the store violated."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Note = Callable[[str, int], None]

MAX_SHOWN = 20


@dataclass
class Cell:
    """The results of one cell.

    ``counts`` are counters by name, such as cases and verified reads. ``problems`` are sentences, at most as many as are shown.
    """

    kind: str
    fault: str
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    skipped: str = ""
    seconds: float = 0.0
    processor_seconds: float = 0.0
    progress: Callable[[str], None] | None = None

    @property
    def found(self) -> int:
        """Return the total number of verified reads, chunks found after a fault, and so on. A total of 0 means that nothing was checked."""
        return sum(self.counts[name] for name in ("hits", "chunks_found", "chunks_left", "own_hits", "saves"))

    def problem(self, text: str) -> None:
        self.counts["problems"] += 1
        if len(self.problems) < MAX_SHOWN:
            self.problems.append(text)

    @contextlib.contextmanager
    def recording_problems(self, what: str) -> Iterator[None]:
        """Record an exception in the block as a problem."""
        try:
            yield
        except (Exception, AssertionError) as error:
            self.problem(f"{what}: {describe_error(error)}")

    def report_done(self, cases: int = 1, *, of: int | None = None) -> None:
        """Count finished cases and report progress."""
        self.counts["cases"] += cases
        if self.progress is not None:
            self.progress(f"{self.counts['cases']:,}" + (f" of {of:,}" if of else ""))

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "fault": self.fault,
            "seconds": round(self.seconds, 1),
            "processor_seconds": round(self.processor_seconds, 1),
            "skipped": self.skipped,
            "counts": dict(self.counts),
            "problems": self.problems,
        }


def describe_error(error: BaseException) -> str:
    """Return one line that describes an exception and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {error} ({where})"


def fork(work: Callable[[Note], None], notes: str) -> int:
    """Fork a child that calls ``work(note)`` and exits. Return its process id.

    Notes and exceptions are written to the file ``notes``.
    """
    sys.stdout.flush()
    with warnings.catch_warnings():
        # Python 3.12 and later warn about forks in processes with threads. The children here wait for no thread of the parent.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return process
    code = 1
    try:
        descriptor = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

        def note(text: str, count: int = 1) -> None:
            os.write(descriptor, json.dumps([text, count]).encode() + b"\n")

        try:
            work(note)
            code = 0
        except BaseException as error:
            note(f"problem: a child: {describe_error(error)}", 1)
    finally:
        os._exit(code)


def read_notes(notes: str, cell: Cell) -> None:
    """Add the notes of children to the cell's problems and counts, and clear the file."""
    if not os.path.exists(notes):
        return
    with open(notes, encoding="utf-8") as file:
        for line in file:
            text, count = json.loads(line)
            if text.startswith("problem: "):
                cell.problem(text.removeprefix("problem: "))
            else:
                cell.counts[text] += count
    os.truncate(notes, 0)
