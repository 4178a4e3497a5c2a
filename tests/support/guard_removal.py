"""Show that every guard of the readers matters: without it, a conformance vector or a test fails.

``python -m support.guard_removal`` checks all guards in a few minutes. It first uses the invalid vectors, in this process, and then the
tests that ``guards_by_test.txt`` names for the remaining guards. It prints a row for each guard and fails if removing one goes unnoticed.
``--find`` searches the tests of each remaining guard's module, and writes that list.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvpack.coding.bases import Basis
from kvpack.pages import PageBuffer, PageCodec
from spec.generate import page_vectors
from spec.generate.vector_files import FOLDER, bases, manifest, refused_by_decompressors
from support.guards import LIBRARY, ROOT, Guard, guards_of, remove_guard
from support.numbered_rules import rules
from support.second_decoder import FOLDER as DECODER
from support.second_decoder import MODULES, decoder, decompress
from support.vector_checks import verify

if TYPE_CHECKING:
    from collections.abc import Callable

LIST = Path(__file__).with_name("guards_by_test.txt")
SECONDS = 5
"""Number of seconds after which a read without a guard counts as an endless loop. Refusing a vector takes milliseconds."""
HEADER_TESTS = [
    "file/test_header.py::test_errors_name_the_broken_rule",
    "file/test_header.py::test_writers_enforce_the_limits",
    "file/test_header.py::test_invalid_strings_are_not_written",
    "spec/test_guards.py::test_entries_are_named",
    "spec/test_guards.py::test_no_writer_can_name_a_required_feature",
    "file/test_header.py::test_only_canonical_headers_are_read",
    "file/test_header.py::test_a_header_above_its_limit_is_refused_before_reading",
    "file/test_header.py::test_many_empty_containers_need_little_memory",
]
TESTS = {
    "columns": [
        "formats/test_columns.py::test_a_packing_outside_the_limits_is_refused",
        "formats/test_columns.py::test_default_fields_refuse_a_symbol_that_fits_in_no_column",
    ],
    "container": [
        "file/test_container.py::test_paths_without_a_regular_file_are_refused",
        "file/test_container.py::test_a_memory_limit_covers_the_file_and_its_decoded_size",
        "spec/test_guards.py::test_a_memory_limit_holds_for_bytes_in_memory",
    ],
    "front": [
        *HEADER_TESTS,
        "file/test_container.py::test_a_json_header_above_its_limit_is_not_written",
        "file/test_container.py::test_a_file_above_its_limit_is_not_written",
        "file/test_container.py::test_wrong_json_lengths_are_refused",
    ],
    "zstd": [
        "file/test_container.py::test_frames_of_another_form_are_refused",
        "file/test_container.py::test_an_empty_frame_is_read_to_its_end",
    ],
    "checks": HEADER_TESTS,
    "header": HEADER_TESTS,
    "row": [
        "pages/test_page_codec.py::test_rows_name_their_page",
        "spec/test_guards.py::test_parts_of_a_frame_have_their_sizes",
        "spec/test_guards.py::test_no_row_is_longer_than_its_checksum_supports",
    ],
}
"""Tests of each library module other than those of codecs and sidecars."""
DECODER_TESTS = [
    "spec/test_guards.py::test_the_second_decoder_needs_a_decompressor",
    "spec/test_decoder.py::test_a_cache_is_not_a_basis",
]
CODEC_TESTS = [
    "spec/test_guards.py::test_the_guard_that_knows_the_parameter_names_it",
    "spec/test_guards.py::test_a_seed_has_at_most_64_bits",
    "spec/test_guards.py::test_encoder_only_options_are_checked_too",
]


@dataclass
class Reading:
    """A file that a reader refuses.

    ``refusal`` is the outcome, and ``frames`` are the lines of code in the traceback of the refusal.
    """

    name: str
    read: Callable[[], Any]
    refusal: str | None = None
    frames: set[tuple[str, int]] = field(default_factory=set)

    def outcome(self) -> str | None:
        """Read the file and return the section of the violated rule or the name of an error, or None if the file is accepted."""
        self.frames = set()

        def stop(*_: object) -> None:
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            self.read()
        except Exception as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            found: BaseException | None = error
            while found is not None:
                frames = traceback.walk_tb(found.__traceback__)
                # formats/ is imported through a link.
                self.frames |= {(os.path.realpath(frame.f_code.co_filename), line) for frame, line in frames}
                found = found.__context__
            return error.rule if isinstance(error, decoder.Refused) else type(error).__name__
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return None


@cache
def readings(second: bool) -> list[Reading]:
    """Return all files that the library or, if ``second`` is True, the second decoder refuses."""
    lines = {file: line for file, line in manifest().items() if "error" in line and "either" not in line}
    files = {file: ((FOLDER / file).read_bytes(), line["rules"][0]) for file, line in lines.items()}
    found = []
    for name, (data, number) in files.items():
        given = bases(lines[name])
        if second:
            unzip = decompress if number == "container-24" or name in refused_by_decompressors() else lambda frame, size: bytes(size)
            reading = Reading(name, lambda d=data, u=unzip, b=given: decoder.read(d, u, b))  # type: ignore[misc]
            expected = rules()[number].section
        else:
            known = [Basis.from_bytes(basis) for basis in given]
            reading = Reading(name, lambda d=data, b=known: verify(d, b))  # type: ignore[misc]
            expected = manifest()[name]["error"]
        reading.refusal = reading.outcome()
        assert reading.refusal == expected, name
        found.append(reading)
    return [*found, *_rows(second)]


def _rows(second: bool) -> list[Reading]:
    """Return all rows that the library or, if ``second`` is True, the second decoder refuses."""
    found = []
    for name, line in page_vectors.manifest().items():
        if "rule" in line:
            data = (page_vectors.FOLDER / name).read_bytes()
            reading = Reading(name, lambda d=data: (decoder.read_row if second else _read_row)(d))  # type: ignore[misc]
            reading.refusal = reading.outcome()
            assert reading.refusal == rules()[line["rule"]].section if second else reading.refusal, name
            found.append(reading)
    return found


def _read_row(data: bytes) -> None:
    """Decode a row as a page with the small geometry of the vectors."""
    small = page_vectors.SMALL
    codec = PageCodec("raw", small, namespace=page_vectors.NAMESPACE)
    values = [torch.zeros(1, small.layers, small.heads, small.tokens, dim).to(small.torch_dtype) for dim in small.dims.values()]
    (refused,) = codec.decode_into([data], PageBuffer(small, *values), [0])
    if refused is not None:
        raise refused


def catching_file(guard: Guard) -> str | None:
    """Return the first file whose outcome changes without ``guard``, or None.

    Only files whose refusal passes through the guard are tried.
    """
    files = readings(guard.path.is_relative_to(DECODER))
    touched = [one for one in files if any((str(guard.path), line) in one.frames for line in guard.lines)]
    with remove_guard(guard):
        for reading in touched:
            frames = reading.frames
            changed = reading.outcome() != reading.refusal
            reading.frames = frames
            if changed:
                return reading.name
    return None


def all_guards() -> list[Guard]:
    return [guard for path in (*LIBRARY, *MODULES) for guard in guards_of(path)]


def listed() -> dict[str, str]:
    """Return the guards that no file covers, each with the test that fails without it, or with the reason why no test can."""
    lines = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    return dict(line.split(" -> ", 1) for line in lines if " -> " in line)


class FirstFailure:
    """A pytest plugin that remembers the first test that failed."""

    name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid.partition("[")[0].rpartition("/")[2]


def failing_test(guard: Guard, tests: list[str]) -> str | None:
    """Return the first of ``tests`` that fails without ``guard``, or None. A forked child runs them, so torch is imported only once."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        seen, nothing = FirstFailure(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        paths = [str(ROOT / "tests" / test) for test in tests]
        with remove_guard(guard):
            status = pytest.main(["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", *paths], plugins=[seen])
        os.write(writing, (seen.name or "").encode())
        os._exit(0 if status == (1 if seen.name else 0) else 2)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = answer.read()
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"the tests {' '.join(tests)} could not be run")
    return found or None


def tests_of(path: Path) -> list[str]:
    return DECODER_TESTS if path.is_relative_to(DECODER) else TESTS.get(path.stem, CODEC_TESTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--find", action="store_true", help="find a test for every guard that no file covers, and write the list")
    find = parser.parse_args().find
    known, kept, survivors, by_file = listed(), {}, 0, 0
    guards = all_guards()
    for guard in guards:
        shown = catching_file(guard)
        by_file += shown is not None
        if shown is None:
            shown = known.get(guard.name)
            if shown is not None and "::" in shown:
                shown = failing_test(guard, [shown])
            if shown is None and find:
                shown = failing_test(guard, tests_of(guard.path))
            if shown is not None:
                kept[guard.name] = shown
        survivors += shown is None
        print(f"{guard.path.relative_to(ROOT)}:{guard.lines[0]}: {guard.text} -> {shown or 'SURVIVES'}", flush=True)
    if find:
        LIST.write_text("".join(f"{name} -> {test}\n" for name, test in kept.items()), encoding="utf-8")
    print(f"{len(guards)} guards: {by_file} covered by a file, {len(kept)} by a test or a reason, {survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
