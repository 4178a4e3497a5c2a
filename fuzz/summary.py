"""Summary of a run's reports: a table, the covered lines, and the failures."""

from __future__ import annotations

from typing import Any

from fuzz.line_coverage import READERS, runnable_lines
from kvpack.output import print_table

MAX_MEMORY_MIB = 256.0
"""Maximum memory of a process in MiB, without library code mapped from files. PyTorch alone needs 75 MiB."""
MAX_GROWTH_MIB = 80.0
"""Maximum memory in MiB that a run may add to that of the libraries.

The libraries' memory includes more than 140 MiB for PyTorch and 30 MiB for libFuzzer's tables.
"""
ENCODER_MIB = {"append": 40.0}
"""Additional memory in MiB of targets that encode their inputs. Encoders keep search tables, within the limit of kvpack.file.footprint."""


def problems(reports: list[dict[str, Any]]) -> list[str]:
    """Return all failures of a run, each with the command that repeats it."""
    failures = []
    for report in reports:
        name = report["target"]
        for kind in ("crashes", "hangs"):
            for text in report[kind]:
                path = text.partition("\n")[0]
                repeat = f"\n  PYTHONPATH=tests python -m fuzz.worker {name} --repeat {path}" if "ended with" not in path else ""
                failures.append(f"{name}: {kind}: {text}{repeat}")
        growth = report.get("memory_peak", 0.0) - report.get("memory_of_libraries", 0.0)
        more = ENCODER_MIB.get(name, 0.0)
        if growth > MAX_GROWTH_MIB + more:
            failures.append(f"{name}: inputs took {growth:.0f} MiB more than the libraries, but the limit is {MAX_GROWTH_MIB + more:.0f}")
        if (memory := _memory(report)) > MAX_MEMORY_MIB + more:
            failures.append(f"{name}: took {memory:.0f} MiB, but the limit is {MAX_MEMORY_MIB + more:.0f}")
        if not report.get("executions"):
            failures.append(f"{name}: no input was run")
    return failures


def _memory(report: dict[str, Any]) -> float:
    """Return the peak of the process's own memory."""
    return float(report.get("memory_peak", 0.0) - report.get("memory_of_files", 0.0))


def coverage_lines(reports: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Return the covered and the runnable lines of all targets, by file."""
    covered: dict[str, set[int]] = {}
    for report in reports:
        for name, lines in report.get("lines", {}).items():
            covered.setdefault(name, set()).update(lines)
    return {name: [len(covered.get(name, set()) & lines), len(lines)] for name, lines in sorted(runnable_lines().items()) if lines}


def print_report(reports: list[dict[str, Any]], failures: list[str]) -> None:
    """Print the table, the covered lines of the readers and of formats/, and the failures."""
    columns = ["target", "driver", "executions", "a second", "accepted", "compared", "resident", "memory", "inputs'", "slowest"]
    columns += ["edges", "features", "lines of formats/", "crashes", "hangs"]
    print_table("fuzz targets", columns, [_row(report) for report in reports], text_columns=2)
    total = sum(report.get("executions", 0) for report in reports)
    print(f"{total:,} executions; the slowest input is in ms")
    print("resident: peak in MiB; memory: peak without mapped library files; inputs': growth after the libraries were loaded")
    lines = coverage_lines(reports) if any(report.get("lines") for report in reports) else {}
    for what, names in (
        ("readers", [f"kvpack/file/{name}.py" for name in READERS]),
        ("formats/", [name for name in lines if name.startswith("formats/")]),
    ):
        counts = [lines[name] for name in names if name in lines]
        covered, all_lines = sum(count[0] for count in counts), sum(count[1] for count in counts)
        if counts:
            print(f"lines of {what}: {covered} of {all_lines} ({100 * covered / all_lines:.1f} %)")
    for text in failures:
        print(f"\n{text}")
    print(f"\n{len(failures)} failures" if failures else "no failure")


def _row(report: dict[str, Any]) -> list[str]:
    executions, seconds = report.get("executions", 0), report.get("seconds", 0.0)
    in_formats = sum(len(lines) for name, lines in report.get("lines", {}).items() if name.startswith("formats/"))
    peak = report.get("memory_peak", 0.0)
    return [
        report["target"],
        report.get("driver", ""),
        f"{executions:,}",
        f"{executions / seconds:,.0f}" if seconds else "",
        f"{100 * report.get('accepted', 0) / max(1, executions):.0f} %",
        f"{report.get('compared', 0):,}",
        f"{peak:.0f}",
        f"{_memory(report):.0f}",
        f"{peak - report.get('memory_of_libraries', 0.0):.0f}",
        f"{1e3 * report.get('slowest_seconds', 0.0):.1f}",
        str(report.get("edges", 0) or ""),
        str(report.get("features", 0) or ""),
        str(in_formats or ""),
        str(len(report["crashes"])),
        str(len(report["hangs"])),
    ]
