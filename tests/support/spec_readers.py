"""Compare the readers in spec/readers with the vectors, the library and the second decoder.

Each reader is a program (see spec/readers/README.md). ``python -m support.spec_readers`` has three parts: all vectors, files that the
library writes for random recipes and shapes, and random mutations of both. It prints every difference, saves the files that cause one, and
exits with 1 if there are any. If a reader's program cannot run here, the reader is skipped and the reason is printed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import numpy
import torch
from hypothesis import strategies as st

import kvpack
from fuzz import seeds
from fuzz.file_mutator import Vocabulary, mutate_file
from fuzz.oracles import MAX_COMPARED_BYTES
from fuzz.row_oracles import RowOracle
from kvpack.coding.bases import Basis
from kvpack.coding.basis_sources import with_bases
from kvpack.file import container
from kvpack.file.header import layout_bytes
from kvpack.formats.errors import KvpackError
from spec.generate.expected import read_manifest
from spec.generate.page_vectors import FOLDER as ROW_FOLDER
from spec.generate.page_vectors import manifest as row_manifest
from spec.generate.vector_files import FOLDER, manifest
from support.reader_programs import ENTRY_READERS, READERS, ROOT, Answer, Reader, differences, missing_reason, start_reader, write_bases
from support.second_decoder import decoder, decompress
from support.strategies import CASES, CONTENTS, DIMS, SIDECAR_DIMS, SIDECARS, contents
from support.vector_checks import Expected

ENTRY_FOLDER = ROOT / "spec" / "store-vectors"
MAX_MUTATED_BYTES = 1 << 14
INTACT = ("LimitExceeded", "OutOfMemory", "Undecryptable", "UnknownCodec", "UnsupportedVersion")
"""Error classes of entries that are refused, but not damaged."""


def vector_differences(reader: Reader) -> Iterator[str]:
    """Yield the differences between a reader and the lines of both manifests (spec/vectors.md, Agreement)."""
    for folder, lines in ((FOLDER, manifest()), (ROW_FOLDER, row_manifest())):
        for file, line in lines.items():
            bases = [folder / line["basis"]] if line.get("basis") else []
            problem = _line_difference(reader.read(folder / file, bases), folder, line)
            if problem:
                yield f"{file}: {problem}"


def entries() -> dict[str, dict[str, Any]]:
    """Return the manifest's line for the file of every store entry."""
    return read_manifest(ENTRY_FOLDER / "manifest.json")


def entry_differences(reader: Reader) -> Iterator[str]:
    """Yield the differences between a reader and the manifest of store entries (spec/vectors.md, Store entries)."""
    for file, line in entries().items():
        wanted = {"key": line["key"], "tenant": line["tenant"]} | {name: str(line[name]) for name in ("parent", "start") if name in line}
        wanted |= {f"secret.{name}": key for name, key in line["encryption_keys"].items()}
        wanted |= {f"identity.{name}": text for name, text in line.get("identity", {}).items() if name != "tenant"}
        answer = reader.read(ENTRY_FOLDER / file, entry=wanted)
        if "file" in line:
            clear = reader.read(Path(shutil.copyfile(ENTRY_FOLDER / line["file"], reader.folder / "x.kvpack")))
            if not answer.accepted or not clear.accepted or not numpy.array_equal(answer.values, clear.values):
                yield f"{file}: should be accepted, but the answer is {answer.kind} by {answer.rule}"
        elif answer.accepted or ("damaged" in line and (answer.kind in INTACT) == line["damaged"]):
            yield f"{file}: should be absent {'and damaged' if line.get('damaged') else 'not damaged'}, and the answer is {answer.kind}"


def _line_difference(answer: Answer, folder: Path, line: Mapping[str, Any]) -> str | None:
    if "error" in line:
        agrees = answer.kind == line["error"] or (answer.accepted and line.get("either", False))
        return None if agrees else f"should be refused as {line['error']}, but the answer is {answer.kind}"
    if not answer.accepted:
        return f"should be decoded, but is refused as {answer.kind} by {answer.rule}"
    expected = Expected.of(folder, dict(line))
    if answer.values.shape != expected.values.shape:
        return f"has {len(expected.values)} values, but {len(answer.values)} are decoded"
    differing = expected.differs_from(answer.values)
    if differing.any():
        return f"{differing.sum()} values differ, the first at {differing.argmax()}"
    for key, value in answer.facts.items():
        # A line lists the layers' starts only if one differs from the file's start.
        expected_fact = line.get(key, {"starts": value, "hidden": [], "metadata_entries": [], "states": {}}.get(key))
        if expected_fact != value:
            return f"{key} are to be {expected_fact}, and the answer is {value}"
    return None


def library_accepts(data: bytes, bases: Sequence[bytes]) -> bool | None:
    """Return whether the library accepts a file, or None if the file is too large to compare."""
    try:
        opened = container.open_bytes(data)
        if sum(map(layout_bytes, opened.header.layouts.values())) > MAX_COMPARED_BYTES:
            return None
        opened.verify()
        if not opened.header.is_basis:
            opened.header = with_bases(opened.header, [Basis.from_bytes(basis) for basis in bases])
            opened.verify()
    except KvpackError:
        return False
    return True


def file_differences(readers: Sequence[Reader], data: bytes, bases: Sequence[Path]) -> Iterator[str]:
    """Yield the differences between the library, the second decoder and ``readers`` for a file that may use ``bases``."""
    given = [basis.read_bytes() for basis in bases]
    accepts = library_accepts(data, given)
    if accepts is None:
        return
    try:
        file, rule = decoder.read(data, decompress, given), ""
    except decoder.Refused as refused:
        file, rule = None, str(refused)
    if accepts != (file is not None):
        yield f"the library {'accepts' if accepts else 'refuses'} it, and the second decoder: {rule or 'accepts'}"
    yield from differences(readers, data, ".kvpack", bases, file, rule)


def row_differences(readers: Sequence[Reader], data: bytes) -> Iterator[str]:
    """Yield the differences between the second decoder and ``readers`` for a packed page without a basis."""
    try:
        file, rule = decoder.read_row(data).page, ""
    except decoder.Refused as refused:
        file, rule = None, str(refused)
    yield from differences(readers, data, ".row", [], file, rule)


@st.composite
def codec_words(draw: st.DrawFn, side: str, dim: int) -> str:
    """Draw a codec clause of a recipe with any options and sidecars that do not need a basis."""
    name = draw(st.sampled_from([name for name in CASES if name not in ("klt", "transform")]))
    words = draw(CASES[name].options)
    if name not in ("raw", "lossless"):
        fitting = sorted(kind for kind, dims in SIDECAR_DIMS.items() if dim in dims and kind not in ("balanced", "raw_tokens"))
        for kind in draw(st.sets(st.sampled_from(fitting))):
            words = words | draw(SIDECARS[kind])
    return name + ":" + ",".join(f"{option}={value}" for option, value in sorted(words.items()))


@st.composite
def written_file(draw: st.DrawFn) -> bytes:
    """Draw a file that the library writes, with random codecs for both sides, and random shapes, contents and filters."""
    dims = [draw(st.sampled_from([dim for dim in DIMS if dim <= 128])) for _ in "kv"]
    recipe = f"k={draw(codec_words('k', dims[0]))};v={draw(codec_words('v', dims[1]))}"
    batch, heads, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 40))
    sides = []
    for dim in dims:
        kind, number = draw(st.sampled_from(CONTENTS)), draw(st.integers(0, 2**32 - 1))
        sides.append(contents(kind, (batch, heads, tokens, dim), number))
    try:
        cache = kvpack.pack([(sides[0], sides[1])], recipe)
    except KvpackError:
        hypothesis.reject()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.kvpack")
        kvpack.save(cache, path, compress=draw(st.booleans()))
        return path.read_bytes()


def fresh_files(count: int, number: int, visit: Callable[[bytes], None]) -> None:
    """Call ``visit`` with ``count`` new files that the library writes."""
    left = count

    @hypothesis.seed(number)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(written_file())
    def run(data: bytes) -> None:
        nonlocal left
        left -= 1
        visit(data)

    run()
    print(f"{count - left} files newly written by the library")


def mutations(seconds: float, number: int, files: Sequence[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield mutations of ``files`` and of packed pages for ``seconds`` seconds, each with True if it is a packed page."""
    source, vocabulary = random.Random(number), Vocabulary.of(files)
    oracle = RowOracle()
    rows = [*oracle.rows, *seeds.rows()]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if source.random() < 0.15:
            yield oracle.mutate(source.choice(rows), vocabulary, source, MAX_MUTATED_BYTES), True
        else:
            yield mutate_file(source.choice(files), vocabulary, source, MAX_MUTATED_BYTES), False


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to spend on mutations (default 60)")
    parser.add_argument("--files", type=int, default=500, help="number of new files written by the library (default 500)")
    parser.add_argument("--seed", type=int, default=1, help="random seed (default 1)")
    parser.add_argument("--failures", type=Path, default=Path("reader-failures"), help="folder for files that cause a difference")
    parser.add_argument("--reader", action="append", choices=sorted(READERS), help="run only this reader; may be repeated")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    problems = 0

    def report(problem: str, data: bytes | None = None) -> None:
        nonlocal problems
        problems += 1
        if data is not None:
            arguments.failures.mkdir(parents=True, exist_ok=True)
            path = arguments.failures / f"{problems}.kvpack"
            path.write_bytes(data)
            problem = f"{path}: {problem}"
        print(problem, file=sys.stderr)

    with ExitStack() as stack:
        readers = []
        for name in arguments.reader or READERS:
            reason = missing_reason(name)
            if reason:
                print(f"{name}: skipped, because {reason}")
            else:
                readers.append(stack.enter_context(start_reader(name)))
        if not readers:
            return 0
        for reader in readers:
            for problem in vector_differences(reader):
                report(f"{reader.name}: {problem}")
            print(f"{reader.name}: {len(manifest()) + len(row_manifest())} vectors")
            if reader.name in ENTRY_READERS:
                for problem in entry_differences(reader):
                    report(f"{reader.name}: {problem}")
                print(f"{reader.name}: {len(entries())} store entries")
        bases = write_bases(seeds.bases())
        fresh: list[bytes] = []

        def visit(data: bytes) -> None:
            fresh.append(data)
            for problem in file_differences(readers, data, []):
                report(problem, data)

        fresh_files(arguments.files, arguments.seed, visit)
        small = [data for data in fresh if len(data) <= MAX_MUTATED_BYTES]
        count = 0
        for data, is_row in mutations(arguments.seconds, arguments.seed, [*seeds.kvpack_files(), *small]):
            for problem in row_differences(readers, data) if is_row else file_differences(readers, data, bases):
                report(problem, data)
            count += 1
        print(f"{count} mutated files and packed pages, {problems} differences")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
