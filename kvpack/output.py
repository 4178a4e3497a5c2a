"""Output of commands: JSON, tables and progress. The library rich is imported only when needed."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvpack.coding.encoding import Progress


_COLUMN_GAP = 3
"""Number of characters between two columns of a table."""

_FIRST_LINE = 10.0
"""Seconds after which the first line of progress is printed without a terminal."""

_LINE_SPACING = 1.5
"""Factor by which the elapsed time has grown when the next line is printed. Three hours make 19 lines."""


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of text")


def print_json(value: Any) -> None:
    """Print ``value`` as JSON, with bytes as hexadecimal digits."""
    print(json.dumps(value, indent=2, default=lambda item: item.hex()))


def print_report(report: dict[str, Any], show: Callable[[dict[str, Any]], None] | str, arguments: argparse.Namespace) -> int:
    """Print ``report`` as JSON if ``--json`` is set; otherwise, print the text ``show``, or call ``show(report)``. Returns exit code 0."""
    if arguments.json:
        print_json(report)
    elif isinstance(show, str):
        print(printable_lines(show))
    else:
        show(report)
    return 0


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1) -> None:
    """Print a table. The first ``text_columns`` columns contain text, and the others contain numbers.

    On a terminal that is too narrow, text is wrapped between words. Cells are never truncated.
    """
    from rich.align import Align
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [list(row) for row in rows]
    cells = [[column, *(row[number] for row in rows)] for number, column in enumerate(columns)]
    widths = [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in cells]
    if sys.stdout.isatty():
        words = [max((cell_len(word) for cell in column for word in cell.split()), default=0) for column in cells[:text_columns]]
        _shrink(widths, words, shutil.get_terminal_size().columns - _COLUMN_GAP * len(widths))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for number, (column, width) in enumerate(zip(columns, widths, strict=True)):
        justify: Literal["left", "right"] = "left" if number < text_columns else "right"
        header = Align(Text(column), justify, vertical="bottom")
        table.add_column(header, justify=justify, no_wrap=number >= text_columns, width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    console.width = console.measure(table, options=console.options.update(width=1000)).maximum
    # Print without rich, which would exit with another code if the pipe is closed.
    with console.capture() as capture:
        console.print(table)
    print(f"\n{title}\n{capture.get()}", end="")


def _shrink(widths: list[int], minimums: Sequence[int], available: int) -> None:
    """Reduce ``widths`` in place, widest first, until their sum is at most ``available``, but no column below its minimum.

    Only the first columns have a minimum. The others keep their widths.
    """
    for _ in range(sum(widths) - available):
        spare = [(width, number) for number, (width, limit) in enumerate(zip(widths, minimums, strict=False)) if width > limit]
        if not spare:
            return
        widths[max(spare)[1]] -= 1


@contextlib.contextmanager
def progress(label: str) -> Iterator[Progress]:
    """Show progress on standard error, and yield a function that updates it.

    A terminal shows a bar. Otherwise, long work prints a few lines.
    """
    if not sys.stderr.isatty():
        yield _progress_lines(printable(label))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress as Bar

    # Redirected lines would go to standard error, and not to a pipe.
    with Bar(console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(escape(printable(label)))
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _progress_lines(label: str) -> Progress:
    """Return a function that prints progress as lines at increasing intervals. It prints nothing if the work is done soon."""
    began, due = time.monotonic(), _FIRST_LINE

    def update(done: int, total: int) -> None:
        nonlocal due
        elapsed = time.monotonic() - began
        if elapsed >= due and 0 < done < total:
            due = elapsed * _LINE_SPACING
            taken, left = (timedelta(seconds=round(seconds)) for seconds in (elapsed, elapsed * (total - done) / done))
            print(f"{label}: {100 * done // total}% after {taken}, about {left} left", file=sys.stderr, flush=True)

    return update


def step_counter(progress: Progress | None, total: int, done: int = 0) -> Callable[[], None]:
    """Return a function that reports one more completed step to ``progress`` on each call.

    ``done`` of ``total`` steps are already complete.
    """

    def step() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    return step


def bytes_text(count: int) -> str:
    """Return a byte count with thousands separators."""
    return f"{count:,}"


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return ``count`` with thousands separators, followed by ``noun``, or by ``plural`` (default: ``noun`` + s) unless ``count`` is 1."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def parse_seed(text: str) -> int:
    """Parse a command's random seed. Raises ArgumentTypeError for a number that PyTorch cannot use."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not an integer") from None
    if abs(number) >= 2**62:
        raise argparse.ArgumentTypeError(f"{text:.80} must be less than 2**62 in magnitude")
    return number


def printable_lines(text: str) -> str:
    """Escape the control characters in ``text`` as ``printable`` does, except line feeds."""
    return "\n".join(map(printable, text.split("\n")))


def printable(text: str) -> str:
    """Escape all control characters in ``text``, so that a terminal does not interpret them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
