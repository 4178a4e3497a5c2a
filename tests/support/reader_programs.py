"""Run the programs of the readers in spec/readers, and compare their answers. See spec/readers/README.md."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy

ROOT = Path(__file__).resolve().parents[2]
READERS_FOLDER = ROOT / "spec" / "readers"
PROGRAMS_FOLDER = ROOT / "tests" / "support" / "readers"
BUILD_FOLDER = ROOT / "build" / "readers"
C_OPTIONS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover")
"""Compiler options for the C reader. Warnings are errors, and out-of-bounds access or undefined behavior aborts the program."""
READERS = {"c": ("cc", *C_OPTIONS), "javascript": ("node", str(PROGRAMS_FOLDER / "answer.mjs"))}
"""The command that starts each reader: its program, or its compiler."""
ENTRY_READERS = ("c", "javascript")
"""Readers whose programs also read store entries."""

FRAME_RULE, FRAME_SECTION = "container-21", "container.md, zstd"
"""Name of the rule about malformed Zstandard frames in the readers and in the second decoder.

Decoders may accept different frames.
"""


class Answer(NamedTuple):
    """A reader's answer about a file: its values and the other reported fields, or the error class and the rule of its refusal."""

    kind: str
    rule: str
    values: Any
    facts: dict[str, Any]

    @property
    def accepted(self) -> bool:
        return self.kind == "ok"


@dataclass(frozen=True)
class Reader:
    """A running reader program."""

    name: str
    process: subprocess.Popen[str]
    folder: Path

    def read(self, path: Path, bases: Sequence[Path] = (), entry: Mapping[str, str] | None = None) -> Answer:
        """Return the answer for the file at ``path``, or for the store entry ``entry`` in it. Raises RuntimeError if the program ends."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        output = self.folder / f"{self.name}.values"
        output.unlink(missing_ok=True)
        fields = [path, output, *bases, *(f"{name}={value}" for name, value in (entry or {}).items())]
        self.process.stdin.write("\t".join(map(str, fields)) + "\n")
        self.process.stdin.flush()
        kind, _, rest = self.process.stdout.readline().rstrip("\n").partition("\t")
        if not kind:
            raise RuntimeError(f"the program of {self.name} ended with {self.process.wait()} on {path}")
        if kind == "ok":
            return Answer(kind, "", numpy.fromfile(output, "<f4"), json.loads(rest))
        return Answer(kind, rest.partition("\t")[0], None, {})


def missing_reason(name: str) -> str | None:
    """Return the reason why a reader cannot run here, or None if it can."""
    program = READERS[name][0]
    return None if shutil.which(program) else f"{program} is not installed"


def _command(name: str) -> Sequence[str]:
    """Return the command that runs a reader. The C reader is compiled into ``BUILD_FOLDER`` when its sources have changed."""
    if name != "c":
        return READERS[name]
    folder, source = READERS_FOLDER / "c", PROGRAMS_FOLDER / "answer.c"
    digest = hashlib.sha256(" ".join(READERS[name]).encode())
    for path in [source, *sorted([*folder.glob("*.c"), *folder.glob("*.h")])]:
        digest.update(path.read_bytes())
    program = BUILD_FOLDER / digest.hexdigest()[:16]
    if not program.exists():
        BUILD_FOLDER.mkdir(parents=True, exist_ok=True)
        made = program.with_suffix(f".{os.getpid()}")
        subprocess.run([*READERS[name], f"-I{folder}", str(source), "-lm", "-o", str(made)], check=True)
        made.replace(program)
    return (str(program),)


@contextmanager
def start_reader(name: str) -> Iterator[Reader]:
    """Start a reader's program, which ends when the context exits."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(_command(name), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        try:
            yield Reader(name, process, Path(folder))
        finally:
            process.communicate()


@cache
def start_all_readers() -> tuple[Reader, ...]:
    """Start all readers that can run here and return them. Their programs end with this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    return tuple(stack.enter_context(start_reader(name)) for name in READERS if missing_reason(name) is None)


@cache
def write_bases(bases: tuple[bytes, ...]) -> tuple[Path, ...]:
    """Write bases to temporary files, which are deleted with this process, and return their paths."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    paths = tuple(Path(folder.name, f"{number}.kvbasis") for number in range(len(bases)))
    for path, data in zip(paths, bases, strict=True):
        path.write_bytes(data)
    return paths


def differences(readers: Sequence[Reader], data: bytes, suffix: str, bases: Sequence[Path], file: Any, rule: str) -> Iterator[str]:
    """Yield every difference between ``readers`` and the second decoder.

    ``file`` is what the decoder read from ``data``, or None if it refused the data by ``rule``.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"x{suffix}")
        path.write_bytes(data)
        for reader in readers:
            answer = reader.read(path, bases)
            frame = answer.rule == FRAME_RULE or rule.startswith(FRAME_SECTION)
            if answer.accepted != (file is not None) and not frame:
                yield f"the second decoder: {rule or 'accepts'}, and {reader.name}: {answer.rule or 'accepts'}"
            if answer.accepted and file is not None:
                yield from _value_differences(reader.name, answer.values, file)


def _value_differences(name: str, found: Any, file: Any) -> Iterator[str]:
    sides = [side for layer in file.layers for side in layer.values() if side]
    values = numpy.array([value for side in sides for value in side.values], numpy.float64)
    allowed = numpy.array([bound for side in sides for bound in side.tolerances], numpy.float64)
    if found.shape != values.shape:
        yield f"{name} decodes {len(found)} values, and the second decoder {len(values)}"
        return
    with numpy.errstate(invalid="ignore"):
        same = (found == values) | (numpy.isnan(found) & numpy.isnan(values))
        # The order of binary32 sums determines which of them are finite.
        same |= (allowed > 0) & (~numpy.isfinite(found) | ~numpy.isfinite(values) | (numpy.abs(found - values) <= allowed))
        # Subnormal results may be rounded differently.
        same |= (numpy.abs(found) < 2.0**-126) & (numpy.abs(values) < 2.0**-126) & (allowed > 0)
    if not same.all():
        at = int((~same).argmax())
        yield f"{name} decodes value {at} to {found[at]}, and the second decoder to {values[at]}, with a tolerance of {allowed[at]}"
