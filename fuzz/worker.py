"""Run one target in its own process, with atheris or with a plain random driver.

    python -m fuzz.worker container --seconds 60 --seed 1
    python -m fuzz.worker container --repeat FILE

With atheris, libFuzzer is guided by coverage of kvpack's bytecode. The random driver mutates seeds without guidance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuzz.session import Report, Session
    from fuzz.targets import Target

TIMEOUT_SECONDS = 30
"""Time in seconds on one input after which a run ends. More than one second counts as a hang."""
_LIBFUZZER = ("-len_control=0", "-rss_limit_mb=0", f"-timeout={TIMEOUT_SECONDS}", "-verbosity=1", "-print_pcs=0")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--driver", choices=("atheris", "random"), help="fuzzing engine (default: atheris if it is installed)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--executions", type=int, help="end after this many inputs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lines", type=float, default=0.0, help="seconds for measuring covered lines after the run")
    parser.add_argument("--found", type=Path, default=Path("fuzz-found"), help="folder for inputs that reach new code")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="folder for failing inputs")
    parser.add_argument("--report", type=Path, help="file for the report as JSON (default: standard output)")
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="run only this input")
    return parser.parse_args(words)


def main() -> int:
    arguments = parse_arguments()
    if arguments.repeat:
        return _repeat_input(arguments.target, arguments.repeat)
    driver = arguments.driver or ("atheris" if _has_atheris() else "random")
    with _instrumentation(driver):
        from fuzz.seeds import committed_inputs
        from fuzz.session import Report, Session, resident_mib
        from fuzz.targets import TARGETS

        target = TARGETS[arguments.target]()
        libraries, files = resident_mib("VmRSS"), resident_mib("RssFile")
        inputs = [*target.seeds, *committed_inputs(arguments.target)]
        # Run a check once, so that modules that it imports lazily are instrumented too.
        for data in inputs[:: max(1, len(inputs) // 64)]:
            with contextlib.suppress(Exception):
                target.check(data)
    report = Report(arguments.target, driver, arguments.seed, memory_of_libraries=libraries, memory_of_files=files)
    session = Session(report, target, arguments.seconds, arguments.executions, arguments.failures)

    def finish() -> None:
        session.finish()
        if arguments.lines:
            _measure_lines(report, target, [*inputs, *_files_in(arguments.found)], arguments.lines)
        _write(report, arguments.report)

    if driver == "atheris":
        _run_atheris(session, inputs, arguments, finish)
    else:
        run_random(session, inputs, arguments.seed)
        finish()
    return 0


def _has_atheris() -> bool:
    try:
        import atheris  # noqa: F401
    except ImportError:
        return False
    return True


def _instrumentation(driver: str) -> Any:
    """Return a context in which modules of kvpack are imported with coverage counters, for atheris."""
    if driver != "atheris":
        return contextlib.nullcontext()
    import atheris

    return atheris.instrument_imports(include=["kvpack"])


def _run_atheris(session: Session, inputs: list[bytes], arguments: argparse.Namespace, finish: Any) -> None:
    import atheris

    arguments.found.mkdir(parents=True, exist_ok=True)
    arguments.failures.mkdir(parents=True, exist_ok=True)
    folder = arguments.found.parent / f"{arguments.found.name}.seeds"
    folder.mkdir(exist_ok=True)
    for number, data in enumerate(inputs):
        (folder / f"{number:05}").write_bytes(data)

    def one_input(data: bytes) -> None:
        session.run(data)
        if session.is_over:
            finish()
            # There is no other way to end libFuzzer from here, and all results have been written.
            os._exit(0)

    def changed(data: bytes, max_bytes: int, seed: int) -> bytes:
        return session.target.mutate(data, random.Random(seed))[:max_bytes]

    words = [*_LIBFUZZER, f"-seed={arguments.seed}", f"-max_len={session.target.max_bytes}"]
    words += [f"-artifact_prefix={arguments.failures}/native-{session.report.target}-", str(arguments.found), str(folder)]
    atheris.Setup([sys.argv[0], *words], one_input, custom_mutator=changed)
    atheris.Fuzz()


def run_random(session: Session, inputs: list[bytes], seed: int) -> None:
    """Run the seeds, followed by mutations of seeds and of accepted mutations. If the process dies, the current input remains on disk."""
    source, pool = random.Random(seed), list(inputs)
    session.failures.mkdir(parents=True, exist_ok=True)
    running = session.failures / f"native-{session.report.target}-{os.getpid()}"

    def too_long(*_: object) -> None:
        raise TimeoutError(f"an input took more than {TIMEOUT_SECONDS} seconds")

    signal.signal(signal.SIGALRM, too_long)
    with running.open("wb", buffering=0) as file:
        while not session.is_over:
            number = session.report.executions
            if number < len(inputs):
                current = inputs[number]
            else:
                current = session.target.mutate(source.choice(pool), source)[: session.target.max_bytes]
            os.pwrite(file.fileno(), current, 0)
            os.ftruncate(file.fileno(), len(current))
            signal.alarm(TIMEOUT_SECONDS)
            accepted = session.report.accepted
            session.run(current)
            if number >= len(inputs) and session.report.accepted > accepted and source.random() < 0.1:
                if len(pool) < 4 * len(inputs):
                    pool.append(current)
                else:
                    pool[source.randrange(len(inputs), len(pool))] = current
    signal.alarm(0)
    running.unlink()


def _measure_lines(report: Report, target: Target, inputs: list[bytes], seconds: float) -> None:
    from fuzz.line_coverage import covered_lines

    report.lines = covered_lines(target.check, inputs, seconds)


def _files_in(folder: Path) -> list[bytes]:
    paths = sorted(folder.glob("*")) if folder.is_dir() else []
    return [path.read_bytes() for path in paths if path.is_file()]


def _repeat_input(name: str, path: Path) -> int:
    """Run one input and let its exception propagate."""
    from fuzz.targets import TARGETS

    target, data = TARGETS[name](), path.read_bytes()
    print(f"{path}: {'accepted' if target.check(data) else 'refused'}")
    if target.compare is not None:
        target.compare(data)
        print(f"{path}: the other readers agree")
    return 0


def _write(report: Report, path: Path | None) -> None:
    from fuzz.session import as_dict

    text = json.dumps(as_dict(report), indent=1)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
