"""The readers in other languages agree with all vectors, and the comparison detects differences."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from kvpack.file import container
from spec.generate.vector_files import FOLDER, manifest
from support import file_parts, spec_readers
from support.parts import Parts
from support.reader_programs import ENTRY_READERS, PROGRAMS_FOLDER, READERS, READERS_FOLDER, Answer
from support.vector_checks import Expected

LINES = manifest()
PLACES = ("model", "recipe", "start", "codecs.0", "layers.0", *(f"layers.0.{name}" for name in ("k", "v", "k.runs", "k.tail_dtype")))
DECODED = "valid/group-dim-3.kvpack"
REFUSED = "invalid/header-batch-0.kvpack"


@pytest.mark.scenario
@pytest.mark.parametrize("name", READERS)
def test_a_reader_agrees_with_all_vectors(name: str) -> None:
    if reason := spec_readers.missing_reason(name):
        pytest.skip(reason)
    with spec_readers.start_reader(name) as reader:
        assert list(spec_readers.vector_differences(reader)) == []


@pytest.mark.scenario
@pytest.mark.parametrize("name", ENTRY_READERS)
def test_a_reader_agrees_with_all_store_entries(name: str) -> None:
    if reason := spec_readers.missing_reason(name):
        pytest.skip(reason)
    with spec_readers.start_reader(name) as reader:
        assert list(spec_readers.entry_differences(reader)) == []


def test_another_error_class_for_an_entry_is_a_difference(tmp_path: Path) -> None:
    answers = {name: "DigestMismatch" if line.get("damaged") else "Undecryptable" for name, line in spec_readers.entries().items()}

    def read(path: Path, bases: object = (), entry: object = None) -> Answer:
        line = spec_readers.entries().get(path.name, {"file": path.name})
        return Answer("ok", "", numpy.zeros(1, "f4"), {}) if "file" in line else Answer(answers[path.name], "", None, {})

    reader = SimpleNamespace(name="x", read=read, folder=tmp_path)
    assert list(spec_readers.entry_differences(reader)) == []
    answers |= {"encrypted-damaged.entry": "Undecryptable", "encrypted-by-another-key.entry": "DigestMismatch"}
    assert len(list(spec_readers.entry_differences(reader))) == 2


@pytest.mark.scenario
@pytest.mark.parametrize("name", READERS)
def test_a_reader_refuses_values_of_other_types(name: str, tmp_path: Path) -> None:
    """Every value of the header is replaced in turn by 0, "", nil, and an empty array, map or bytes.

    Many languages treat these values as false.
    """
    if reason := spec_readers.missing_reason(name):
        pytest.skip(reason)
    path = tmp_path / "x.kvpack"
    whole = (FOLDER / DECODED).read_bytes()
    wrong = []
    with spec_readers.start_reader(name) as reader:
        for place in PLACES:
            for value in (0, "", [], {}, b"", None):
                parts = Parts.of(whole)
                old = file_parts.entry_at(parts, place)
                if type(value) is type(old) or (value is None and place in ("layers.0.k", "layers.0.v")):
                    continue
                file_parts.edit(place, value)(parts)
                path.write_bytes(parts.joined())
                answer = reader.read(path)
                if (answer.kind, answer.rule) != ("InvalidHeader", "container-11"):
                    wrong.append((place, value, answer.kind, answer.rule))
    assert wrong == []


def test_another_error_class_is_a_difference() -> None:
    line = LINES[REFUSED]
    assert spec_readers._line_difference(Answer(line["error"], "container-11", None, {}), FOLDER, line) is None
    for answer in (Answer("Truncated", "container-4", None, {}), Answer("ok", "", numpy.zeros(0, "f4"), {})):
        assert spec_readers._line_difference(answer, FOLDER, line) is not None


def test_other_values_and_other_metadata_are_differences() -> None:
    line = LINES[DECODED]
    values = Expected.of(FOLDER, line).values
    right = Answer("ok", "", values, {"offsets": None, "hidden": [], "states": {}, "starts": [3]})
    assert spec_readers._line_difference(right, FOLDER, line) is None
    moved = values.copy()
    moved[-1] = numpy.nextafter(moved[-1], numpy.float32(9))
    for answer in (
        Answer("InvalidHeader", "group-1", None, {}),
        Answer("ok", "", moved, {}),
        Answer("ok", "", values[1:], {}),
        Answer("ok", "", values, {"offsets": [1]}),
        Answer("ok", "", values, {"hidden": [[0, 1, 2]]}),
    ):
        assert spec_readers._line_difference(answer, FOLDER, line) is not None


def test_accepting_a_refused_file_is_a_difference() -> None:
    data = (FOLDER / DECODED).read_bytes()
    values = Expected.of(FOLDER, LINES[DECODED]).values
    accepting = SimpleNamespace(name="x", read=lambda path, bases: Answer("ok", "", values, {}))
    refusing = SimpleNamespace(name="x", read=lambda path, bases: Answer("InvalidHeader", "group-1", None, {}))
    assert list(spec_readers.file_differences([accepting], data, [])) == []
    assert list(spec_readers.file_differences([refusing], data, [])) != []
    damaged = bytearray(data)
    damaged[len(container.open_bytes(data).front.text) + 200] ^= 1
    assert list(spec_readers.file_differences([refusing], bytes(damaged), [])) == []
    assert list(spec_readers.file_differences([accepting], bytes(damaged), [])) != []


def test_a_difference_in_a_packed_page_is_found() -> None:
    folder = FOLDER.parent / "row-vectors"
    values = numpy.fromfile(folder / "raw.f32", "<f4")
    right = SimpleNamespace(name="x", read=lambda path, bases: Answer("ok", "", values, {}))
    wrong = SimpleNamespace(name="x", read=lambda path, bases: Answer("ok", "", values + numpy.float32(1), {}))
    refusing = SimpleNamespace(name="x", read=lambda path, bases: Answer("DigestMismatch", "row-4", None, {}))
    whole, damaged = ((folder / f"{name}.row").read_bytes() for name in ("raw", "damaged"))
    assert [bool(list(spec_readers.row_differences([one], whole))) for one in (right, wrong, refusing)] == [False, True, True]
    assert [bool(list(spec_readers.row_differences([one], damaged))) for one in (right, refusing)] == [True, False]


def test_lines_fit_their_columns() -> None:
    sources = [path for folder in ("readers", "viewer") for path in (spec_readers.ROOT / "spec" / folder).rglob("*.[chj]*")]
    sources = [path for path in [*sources, *PROGRAMS_FOLDER.iterdir()] if path.suffix in (".c", ".h", ".js", ".mjs")]
    assert len(sources) > 30
    for path in sources:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 110, f"{path}:{number}"


def test_the_reader_in_c_has_at_most_3000_lines() -> None:
    sources = [path for path in (READERS_FOLDER / "c").iterdir() if path.suffix in (".c", ".h")]
    assert 0 < sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources) <= 3000


def test_the_reader_in_c_is_formatted() -> None:
    if (program := shutil.which("clang-format")) is None:
        pytest.skip("clang-format is not installed")
    sources = [path for folder in (READERS_FOLDER / "c", PROGRAMS_FOLDER) for path in folder.iterdir() if path.suffix in (".c", ".h")]
    style = f"--style=file:{READERS_FOLDER / 'c' / '.clang-format'}"
    subprocess.run([program, style, "--dry-run", "-Werror", *map(str, sources)], check=True)
