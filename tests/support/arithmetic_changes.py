"""Show that the conformance vectors detect every change of an arithmetic step in the second decoder.

``python -m support.arithmetic_changes`` changes one operator, number or rounding at a time, and decodes the vectors that reach it, which
takes a few minutes. It prints the changes that no vector catches, and fails if any of them is not listed with a reason in
``arithmetic_survivors.txt``. A vector catches a change if a value no longer agrees with the manifest, when the decoder refuses or fails, or
when a tolerance that it computes no longer matches the manifest.
"""

from __future__ import annotations

import argparse
import ast
import operator
import signal
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from spec.generate import page_vectors
from spec.generate.expected import sides_of, values_of
from spec.generate.vector_files import FOLDER, bases, manifest
from support.guards import Guard, forget, functions, remove_guard, tree
from support.second_decoder import FOLDER as DECODER
from support.second_decoder import MODULES, decoder, decompress
from support.vector_checks import Expected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIST = Path(__file__).with_name("arithmetic_survivors.txt")
MAX_SECONDS = 20
"""Number of seconds after which a change counts as caught. Decoding a vector normally takes a few seconds of CPU time at most."""
ARITHMETIC = (
    *("codecs", "basis_lookup", "rans", "directions", "norms", "rotation", "generator", "packing", "conventions", "values", "row"),
    *("contents", "token_ids", "metadata", "xxh3"),
)
"""Modules that compute the values that a reader returns. The other modules only check."""
OTHER_OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
ROUNDINGS = ("f32", "f16")
CHECKS = ("require", "refuse", "Refused")


def changes_of(path: Path) -> list[Guard]:
    """Return every change of a module. A change is named by its function and its new text, as a guard is."""
    found = []
    for where, top, function in functions(tree(path)):
        places = {node: number for number, node in enumerate(ast.walk(top))}
        for statement in function.body:
            for node, parent in _computed_expressions(statement, statement):
                for text, change in _changes(node, parent):
                    found.append(Guard(path, where, range(node.lineno, (node.end_lineno or 0) + 1), text, places[node], change))
    return found


def _computed_expressions(node: ast.AST, parent: ast.AST) -> Iterator[tuple[Any, ast.AST]]:
    """Yield the expressions in a statement that compute values, each with its parent.

    Checks, messages, annotations and defaults are skipped.
    """
    if isinstance(node, (ast.JoinedStr, ast.arguments, ast.Assert)):
        return
    if isinstance(node, ast.Call) and _called_name(node) in (*CHECKS, "take_parameters"):
        return
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.UnaryOp, ast.Constant, ast.Call)):
        yield node, parent
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST) and name not in ("annotation", "returns", "decorator_list"):
                yield from _computed_expressions(child, node)


def _called_name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _changes(node: Any, parent: ast.AST) -> Iterator[tuple[str, Callable[[Any], ast.AST]]]:
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OTHER_OPERATORS and not _is_text(node):
        other = OTHER_OPERATORS[type(node.op)]()
        yield f"{ast.unparse(node)} with {type(other).__name__}", lambda it: _with_operator(it, other)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert)):
        yield f"{ast.unparse(node)} without {type(node.op).__name__}", lambda it: it.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        within = ast.unparse(parent).split("\n")[0]
        yield f"{node.value!r} as {node.value + 1!r} in {within}", lambda it: ast.Constant(it.value + 1)
    elif isinstance(node, ast.Call) and _called_name(node) in ROUNDINGS:
        yield f"{ast.unparse(node)} without rounding", lambda it: it.args[0]


def _with_operator(node: Any, other: ast.operator) -> Any:
    node.op = other
    return node


def _is_text(node: Any) -> bool:
    """Return True if a node concatenates lists, strings or bytes, because any other operator would raise an error there."""
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    return any(isinstance(one, (ast.List, ast.ListComp, ast.Tuple, ast.JoinedStr)) for one in sides)


@dataclass
class Reading:
    """A vector, and the ``functions`` of the decoder that decoding it calls."""

    name: str
    decode: Callable[[], Any]
    folder: Path
    line: dict[str, Any]
    functions: frozenset[tuple[str, int]] = frozenset()
    seconds: float = 0.0

    def agrees(self) -> bool:
        def stop(*_: object) -> None:
            raise TimeoutError

        before = signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        try:
            return self._same(self.decode())
        except Exception:
            return False
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    def _same(self, file: Any) -> bool:
        expected = Expected.of(self.folder, self.line)
        bounds = numpy.array([tolerance for side in sides_of(file) for tolerance in side.tolerances])
        with numpy.errstate(all="ignore"):
            within = (expected.tolerances <= bounds) & (expected.tolerances >= bounds * (1 - 2.0**-23))
            if bounds.shape != expected.values.shape or not within.all() or expected.differs_from(values_of(file)).any():
                return False
        if "token_ids" in self.line:
            ids = numpy.fromfile(self.folder / self.line["token_ids"], "<u4")
            if not numpy.array_equal(numpy.array(file.token_ids, "<u4").ravel(), ids):
                return False
        if "undetermined" in self.line:
            undetermined = file.undetermined
            if self.line["undetermined"] != (None if undetermined is None else [[str(at), text] for at, text in undetermined]):
                return False
        return "metadata" not in self.line or bool(file.metadata == self.line["metadata"])


@cache
def readings() -> list[Reading]:
    """Return all vectors that can be decoded, fastest first."""
    found = []
    for name, line in manifest().items():
        if "values" in line:
            data, given = (FOLDER / name).read_bytes(), bases(line)
            found.append(Reading(name, lambda d=data, b=given: decoder.read(d, decompress, b), FOLDER, line))  # type: ignore[misc]
    for name, line in page_vectors.manifest().items():
        if "values" in line:
            data, given = (page_vectors.FOLDER / name).read_bytes(), page_vectors.bases(line)
            decode = lambda d=data, b=given: decoder.read_row(d, b).page  # type: ignore[misc] # noqa: E731
            found.append(Reading(name, decode, page_vectors.FOLDER, line))
    for reading in found:
        _trace(reading)
    return sorted(found, key=operator.attrgetter("seconds"))


def _trace(reading: Reading) -> None:
    called = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(DECODER)):
            called.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    forget()
    begin = time.perf_counter()
    sys.setprofile(note)
    try:
        assert reading.agrees(), reading.name
    finally:
        sys.setprofile(None)
    reading.functions, reading.seconds = frozenset(called), time.perf_counter() - begin


def catching_vector(change: Guard) -> str | None:
    """Return the name of the first vector that catches a change, or None."""
    lines = _lines(change)
    reached = [one for one in readings() if any(path == str(change.path) and line in lines for path, line in one.functions)]
    with remove_guard(change):
        return next((one.name for one in reached if not one.agrees()), None)


def _lines(change: Guard) -> range:
    """Return the line numbers of the function that contains a change."""
    (node,) = (one for where, _, one in functions(tree(change.path)) if where == change.where)
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return range(first, (node.end_lineno or 0) + 1)


def all_changes() -> list[Guard]:
    modules = [path for path in MODULES if path.relative_to(DECODER).with_suffix("").parts[0] in ARITHMETIC]
    return [change for path in modules for change in changes_of(path)]


def documented_changes() -> dict[str, str]:
    """Return the changes that no vector is expected to catch, each with the documented reason."""
    lines = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    return dict(line.rsplit(" -> ", 1) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="change only these modules of the decoder, such as codecs/klt.py")
    modules = parser.parse_args().modules
    changes = [change for change in all_changes() if not modules or change.path.relative_to(DECODER).as_posix() in modules]
    survivors = 0
    for change in changes:
        if catching_vector(change) is None:
            survivors += 1
            print(f"{change.name} -> {documented_changes().get(change.name, 'SURVIVES')}", flush=True)
    unlisted = [change.name for change in changes if change.name in documented_changes()]
    print(f"{len(changes)} changes, {survivors} of which no vector catches; {len(unlisted)} are listed with a reason", file=sys.stderr)
    return 1 if survivors > len(unlisted) else 0


if __name__ == "__main__":
    sys.exit(main())
