"""Run the fuzz targets, each in its own process, and print a table of results.

    python -m fuzz.run --seconds 60
    python -m fuzz.run --target container --target header --executions 1000000

Exits with 1 if an input crashed a target, made it hang, or needed too much memory, or if a target died. Every failing input is saved as a
file, and the command that repeats it is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fuzz.summary import coverage_lines, print_report, problems
from fuzz.targets import TARGETS
from support.reader_programs import READERS, missing_reason

_STATUS = re.compile(r"^#\d+\s.*\bcov: (\d+) ft: (\d+)", re.MULTILINE)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of the whole run in seconds, shared by all targets (default 60)"
    )
    parser.add_argument("--executions", type=int, help="end each target after this many inputs")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="run only this target; may be repeated")
    parser.add_argument("--share", type=int, default=1, metavar="N", help="run every Nth target; the seed selects which (default 1: all)")
    parser.add_argument("--seed", type=int, default=1, help="random seed (default 1)")
    parser.add_argument("--driver", choices=("atheris", "random"), help="fuzzing engine (default: atheris if it is installed)")
    parser.add_argument("--processes", type=int, default=1, help="number of concurrent targets (default 1)")
    parser.add_argument("--lines", type=float, default=5.0, help="seconds per target for measuring covered lines (default 5)")
    parser.add_argument("--found", type=Path, help="folder for inputs that reach new code; the run continues from its inputs")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="folder for failing inputs (default fuzz-failures)")
    parser.add_argument("--json", action="store_true", help="print the reports as one JSON value instead of a table")
    return parser.parse_args(words)


def select_targets(arguments: argparse.Namespace) -> list[str]:
    """Return the names of the targets to run, in the order of the table."""
    names = arguments.target or list(TARGETS)
    return names[arguments.seed % arguments.share :: arguments.share]


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the targets, and return their reports."""
    names = select_targets(arguments)
    seconds = arguments.seconds * min(arguments.processes, len(names)) / len(names)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.processes) as pool:
        found = arguments.found or Path(folder)
        return list(pool.map(lambda name: _run_worker(name, seconds, found / name, Path(folder) / f"{name}.json", arguments), names))


def _run_worker(name: str, seconds: float, corpus_folder: Path, path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one target and return its report. A process that ends without a report counts as a crash."""
    corpus_folder.parent.mkdir(parents=True, exist_ok=True)
    words = [name, "--seconds", str(seconds), "--seed", str(arguments.seed), "--lines", str(arguments.lines), "--report", str(path)]
    words += ["--found", str(corpus_folder), "--failures", str(arguments.failures)]
    words += ["--driver", arguments.driver] if arguments.driver else []
    words += ["--executions", str(arguments.executions)] if arguments.executions else []
    if sys.stderr.isatty():
        print(f"{time.strftime('%H:%M:%S')} {name}: {seconds:.0f} s", file=sys.stderr)
    before = set(arguments.failures.glob(f"native-{name}-*"))
    command = [sys.executable, "-m", "fuzz.worker", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        # This is far longer than a target takes to start and to measure coverage, so only a worker that hangs is killed.
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", timeout=2 * seconds + 600)
        code, output = ended.returncode, ended.stderr
    except subprocess.TimeoutExpired as error:
        code, output = -1, f"did not end after {error.timeout:.0f} seconds"
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"target": name, "crashes": [], "hangs": []}
    if code or not path.exists():
        report["crashes"].append(f"the worker ended with {code}:\n{output[-2000:]}")
    # Ignore files that an earlier run left.
    report["crashes"] += [str(kept) for kept in sorted(arguments.failures.glob(f"native-{name}-*")) if kept not in before]
    status = _STATUS.findall(output)
    if status:
        report["edges"], report["features"] = map(int, status[-1])
    return report


def main() -> int:
    """Run the command line."""
    arguments = parse_arguments()
    for name in READERS:
        if reason := missing_reason(name):
            print(f"{name}: no oracle, because {reason}", file=sys.stderr)
    reports = run(arguments)
    failures = problems(reports)
    if arguments.json:
        print(json.dumps({"targets": reports, "coverage": coverage_lines(reports), "problems": failures}, indent=1))
    else:
        print_report(reports, failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
