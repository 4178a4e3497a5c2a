"""Run a target: time and count every input, save failing inputs as files, and report the results."""

from __future__ import annotations

import dataclasses
import hashlib
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz.targets import Target

HANG_SECONDS = 1.0
MAX_FAILURES = 20


@dataclass
class Report:
    """Results of a run. Memory figures are resident memory in MiB: after the imports, before the first input, and at the peak.

    ``memory_of_files`` is the part that is mapped from library files, which all processes share.
    """

    target: str
    driver: str
    seed: int
    executions: int = 0
    accepted: int = 0
    compared: int = 0
    seconds: float = 0.0
    memory_of_libraries: float = 0.0
    memory_of_files: float = 0.0
    memory_peak: float = 0.0
    slowest_seconds: float = 0.0
    slowest_input: str = ""
    features: int = 0
    edges: int = 0
    lines: dict[str, list[int]] = field(default_factory=dict)
    hangs: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)


class Session:
    """Run of a target's inputs for ``seconds`` seconds or ``executions`` inputs. Failing inputs are written to ``failures``."""

    def __init__(self, report: Report, target: Target, seconds: float, executions: int | None, failures: Path) -> None:
        self.report, self.target, self.failures = report, target, failures
        self._most = executions
        self._seen: set[str] = set()
        self._start = time.perf_counter()
        self._end = self._start + seconds

    @property
    def is_over(self) -> bool:
        now = time.perf_counter()
        return now >= self._end or (self._most is not None and self.report.executions >= self._most) or len(self._seen) >= MAX_FAILURES

    def run(self, data: bytes) -> None:
        """Check and time one input. One in ``every`` inputs is also compared."""
        report, target = self.report, self.target
        accepted = False
        # Measure the CPU time of this thread, because an input is not hanging while another process uses the core.
        before = time.thread_time()
        try:
            accepted = target.check(data)
        except Exception as error:
            self._record_failure(data, error)
        seconds = time.thread_time() - before
        report.executions += 1
        report.accepted += accepted
        if seconds > report.slowest_seconds:
            report.slowest_seconds, report.slowest_input = seconds, hashlib.sha256(data).hexdigest()[:16]
            self._slowest = data
        if seconds > HANG_SECONDS:
            report.hangs.append(self._save_input(data, "hang"))
        if target.compare is not None and stable_hash(data) % target.every == 0:
            report.compared += 1
            try:
                target.compare(data)
            except Exception as error:
                self._record_failure(data, error)

    def finish(self) -> Report:
        """Return the report, and write the slowest input to a file."""
        self.report.seconds = time.perf_counter() - self._start
        self.report.memory_peak = resident_mib("VmHWM")
        if self.report.executions:
            self.report.slowest_input = self._save_input(self._slowest, "slowest")
        return self.report

    def _record_failure(self, data: bytes, error: Exception) -> None:
        """Save the first input for each distinct location and kind of failure."""
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}:{type(error).__name__}"
        if place not in self._seen:
            self._seen.add(place)
            path = self._save_input(data, "crash")
            text = "".join(traceback.format_exception(error, limit=-6))
            self.report.crashes.append(f"{path}\n{text}")

    def _save_input(self, data: bytes, kind: str) -> str:
        self.failures.mkdir(parents=True, exist_ok=True)
        path = self.failures / f"{kind}-{self.report.target}-{hashlib.sha256(data).hexdigest()[:16]}"
        path.write_bytes(data)
        return str(path)


def stable_hash(data: bytes) -> int:
    """Return a number that is the same in every run, so that the choice of compared inputs does not depend on their order."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big")


def resident_mib(name: str) -> float:
    """Return a resident memory figure of this process in MiB: ``VmRSS`` (current), ``RssFile`` (mapped from files) or ``VmHWM`` (peak).

    Returns 0 if the system does not report it.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), 0.0)


def as_dict(report: Report) -> dict[str, object]:
    return dataclasses.asdict(report)
