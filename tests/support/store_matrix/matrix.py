"""Run cells of the matrix, one after another."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import redis_server
from support.store_matrix.cells import Cell
from support.store_matrix.errors import check_system_errors
from support.store_matrix.kills import check_kills
from support.store_matrix.kinds import KINDS, Kind, Place
from support.store_matrix.lookups import check_lookups
from support.store_matrix.memory import check_memory_limits
from support.store_matrix.namespaces import check_namespaces
from support.store_matrix.power import check_power_loss
from support.store_matrix.users import check_users

if TYPE_CHECKING:
    from collections.abc import Iterator

    Run = Callable[[Place, Cell, int, int], None]


@dataclass(frozen=True)
class Fault:
    """A fault, which ``run(place, cell, count, seed)`` applies to a place.

    A long run has ``many`` cases for each kind of store. A test has ``few`` cases for a plain folder, and a third of these for other kinds.
    """

    name: str
    run: Run
    few: int
    many: int
    what: str

    def cases_of_test(self, kind: str) -> int:
        return self.few if kind == "plain" else -(-self.few // 3)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", check_kills, 6, 1000, "processes killed"),
        Fault("errno", check_system_errors, 6, 2000, "calls that fail"),
        Fault("power loss", check_power_loss, 12, 1000, "crashes"),
        Fault("memory limit", check_memory_limits, 4, 64, "limits"),
        Fault("two users", check_users, 6, 16, "planted entries"),
        Fault("PID namespaces", check_namespaces, 6, 200, "saves"),
        Fault("isolation", check_lookups, 600, 143_000, "lookups"),
    )
}


@contextlib.contextmanager
def places(kind: Kind) -> Iterator[Place]:
    """Create a place of a kind, in memory if possible and with its own server if it needs one, and remove it afterwards."""
    with contextlib.ExitStack() as stack:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)))
        (root / "place").mkdir(mode=0o700)
        server = None
        if "Redis" in kind.tiers:
            (root / "server").mkdir(mode=0o700)
            server = stack.enter_context(redis_server.run_server(root / "server"))
        # In the cell with two users, users other than root access their folders through this one.
        root.chmod(0o755)
        yield Place(kind, root / "place", server)


def run_cell(kind: str, fault: str, count: int, seed: int = 0, progress: Callable[[str], None] | None = None) -> Cell:
    """Run one cell and return it. An exception is recorded as one of the cell's problems."""
    cell = Cell(kind, fault, progress=progress)
    if "Redis" in KINDS[kind].tiers and redis_server.SERVER is None:
        cell.skipped = "neither redis-server nor valkey-server is installed"
        return cell
    started, used = time.monotonic(), sum(os.times()[:4])
    with places(KINDS[kind]) as place, cell.recording_problems("running the fault"):
        FAULTS[fault].run(place, cell, count, seed)
    cell.seconds, cell.processor_seconds = time.monotonic() - started, sum(os.times()[:4]) - used
    return cell


def table(cells: list[Cell]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of a report."""
    columns = ["kind", "fault", "cases", "reads that hit", "problems", "seconds", ""]
    rows = []
    for cell in cells:
        what = FAULTS[cell.fault].what
        cases = f"{cell.counts['cases']:,} {what}"
        rows.append([cell.kind, cell.fault, cases, f"{cell.found:,}", f"{cell.counts['problems']:,}", f"{cell.seconds:,.0f}", cell.skipped])
    return columns, rows
