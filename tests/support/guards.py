"""Find the guards in the source of the readers, and remove one of them from the running program.

A guard is a condition under which a reader refuses its input: an operand in the test of an ``if`` that ends in ``raise`` (or of a
``require`` in the second decoder), a bound, a choice or a type passed to a checking function, a call of such a function, a limit passed to
a library, or an ``except`` that turns another error into a refusal.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import copy
import importlib
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from kvpack.file import front
from support.second_decoder import FOLDER as DECODER
from support.second_decoder import MODULES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Change = Callable[[Any], ast.AST]
    Match = tuple[ast.stmt, ast.AST, str, Change]

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = [
    *sorted((ROOT / "formats").glob("*.py")),
    *(
        ROOT / "kvpack" / "file" / f"{name}.py"
        for name in (
            "basis",
            "checks",
            "container",
            "footprint",
            "header",
            "front",
            "hidden_tokens",
            "layer_positions",
            "layer_states",
            "payload",
            "position_offsets",
            "row",
            "zstd",
        )
    ),
]

OTHER_CLASSES = {"BasisRows", "Options"}
OTHER_FUNCTIONS = {
    "check_value",
    "create",
    "encode",
    "choose_range",
    "default_fields",
    "check_state",
    "list_features",
    "lloyd_max",
    "from_options",
    "pieces",
    "source_for",
    "check_heads",
    "inverse",
    "_flat_bytes",
}
"""Functions that no reader calls. They encode, create codecs for recipes, write files, or accept bases."""
OTHER_ERRORS = {"ValueTooLarge", "InvalidOption", "OutOfBounds"}
"""Errors of encoders, recipes and callers, which are not refusals."""

BOUNDS = {"check_integer": 2, "check_range": 3, "require_integer": 1, "is_integer": 1, "range": 0}
"""Functions with a minimum and a maximum as consecutive arguments, each with the index of the minimum."""
CONSTRUCTORS = {"self.packings()", "self.rotation", "self.packing"}
"""Expressions that are evaluated only because computing their value may raise an error."""
HUGE = 10**30


@dataclass(frozen=True)
class Guard:
    """A guard: the code ``text`` in the statement at ``lines`` of the function ``where`` in the file ``path``.

    To remove the guard, ``change`` replaces the node with the index ``place`` in the order of ``ast.walk`` over the function or class.
    """

    path: Path
    where: str
    lines: range
    text: str
    place: int
    change: Change

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT)}: {self.where}: {self.text}"

    @cached_property
    def code(self) -> CodeType:
        """Return the compiled code of the function without the guard."""
        names = self.where.split(".")
        top = copy.deepcopy(next(one for one in tree(self.path).body if getattr(one, "name", None) == names[0]))
        node = list(ast.walk(top))[self.place]
        changed = _Replace(node, self.change(copy.deepcopy(node))).visit(top)
        module = ast.fix_missing_locations(ast.Module([changed], []))
        code = compile(module, str(self.path), "exec", __future__.annotations.compiler_flag, dont_inherit=True)
        for name in names:
            code = next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name)
        return code


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, ast.copy_location(new, old)

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def guards_of(path: Path) -> list[Guard]:
    """Return every guard in those functions of ``path`` that a reader calls, in source order."""
    found = []
    for where, top, function in functions(tree(path)):
        places = {node: number for number, node in enumerate(ast.walk(top))}
        for statement, node, text, change in _in_function(function):
            lines = range(statement.lineno, (statement.end_lineno or 0) + 1)
            found.append(Guard(path, where, lines, text, places[node], change))
    return sorted(found, key=lambda guard: guard.lines[0])


def functions(module: ast.Module) -> Iterator[tuple[str, ast.stmt, ast.FunctionDef]]:
    """Yield (qualified name, enclosing statement, node) for every function and method. A nested function belongs to its outer one."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name not in OTHER_FUNCTIONS:
            yield node.name, node, node
        elif isinstance(node, ast.ClassDef) and node.name not in OTHER_CLASSES:
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and one.name not in OTHER_FUNCTIONS:
                    yield f"{node.name}.{one.name}", node, one


def _in_function(function: ast.FunctionDef) -> Iterator[Match]:
    """Yield, for each guard in a function, its statement, the node to change, the removed text, and the change."""
    conditional = set()
    for node in ast.walk(function):
        if isinstance(node, ast.If) and not node.orelse and _refuses(node.body[-1]):
            conditional.add(node.body[-1])
            for operand, text, change in _operands(node.test, refused_if=True):
                yield node, operand, text, change
        elif isinstance(node, ast.ExceptHandler) and _refuses(node.body[-1]):
            conditional.add(node.body[-1])
            yield node.body[-1], node.body[-1], f"except {ast.unparse(node.type) if node.type else ''}", lambda _: ast.Raise()
    for statement in ast.walk(function):
        if isinstance(statement, ast.stmt) and not isinstance(statement, ast.FunctionDef):
            if statement not in conditional and (_refuses(statement) or _checks(statement)):
                yield statement, statement, ast.unparse(statement).split("\n")[0], _no_op
            for node in _expressions(statement):
                for operand, text, change in _arguments(node):
                    yield statement, operand, text, change


def _no_op(statement: ast.stmt) -> ast.stmt:
    """Return a statement without effect that refers to the class as ``statement`` does, so that the function keeps its closure."""
    return ast.parse("super()").body[0] if "super()" in ast.unparse(statement) else ast.Pass()


def _refuses(statement: ast.stmt) -> bool:
    """Return True if a statement raises a reader's error, rather than only adding a location to one."""
    if isinstance(statement, ast.Raise) and isinstance(statement.exc, ast.Call):
        return _called_name(statement.exc) not in {*OTHER_ERRORS, "prefix_error", "type"}
    return isinstance(statement, ast.Expr) and _called_name(statement.value) == "refuse"


def _checks(statement: ast.stmt) -> bool:
    """Return True if the only purpose of a statement is to refuse input."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return (
            _called_name(statement.value).lstrip("_").startswith(("check", "require", "refuse")) or ast.unparse(statement) in CONSTRUCTORS
        )
    value = statement.value if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "_" else None
    return value is not None and set(ast.unparse(value).strip("()").split(", ")) <= CONSTRUCTORS


def _called_name(node: ast.expr | None) -> str:
    """Return the name of the called function without the object before it."""
    if isinstance(node, ast.Call):
        inner = node.func
        return inner.attr if isinstance(inner, ast.Attribute) else inner.id if isinstance(inner, ast.Name) else _called_name(inner)
    return ""


def _operands(test: ast.expr, *, refused_if: bool) -> Iterator[tuple[ast.expr, str, Change]]:
    """Yield the conditions in ``test`` that each cause a refusal on their own."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operands(test.operand, refused_if=not refused_if)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or if refused_if else ast.And):
        for operand in test.values:
            yield from _operands(operand, refused_if=refused_if)
    elif (
        isinstance(test, ast.Call)
        and _called_name(test) == ("any" if refused_if else "all")
        and [type(one) for one in test.args] == [ast.GeneratorExp]
    ):
        yield from _operands(test.args[0].elt, refused_if=refused_if)
    elif not refused_if and isinstance(test, ast.Compare) and len(test.ops) == 2:
        first, second = (
            ast.Compare(test.left, test.ops[:1], test.comparators[:1]),
            ast.Compare(test.comparators[0], test.ops[1:], test.comparators[1:]),
        )
        yield test, ast.unparse(first), lambda node: ast.Compare(node.comparators[0], node.ops[1:], node.comparators[1:])
        yield test, ast.unparse(second), lambda node: ast.Compare(node.left, node.ops[:1], node.comparators[:1])
    else:
        yield test, ast.unparse(test), lambda _: ast.Constant(not refused_if)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield all expressions of a statement, except those of nested statements."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, (ast.expr, ast.withitem, ast.keyword)):
            yield from (node for node in ast.walk(child) if isinstance(node, ast.expr))


def _arguments(node: ast.expr) -> Iterator[tuple[ast.AST, str, Change]]:
    """Yield the arguments of a call that make a checking function or a library refuse its input."""
    if isinstance(node, ast.BoolOp) and _called_name(node.values[-1]) == "refuse":
        yield node, ast.unparse(node.values[-1]).split("(")[0] + " unless " + ast.unparse(node.values[0]), lambda it: it.values[0]
    if isinstance(node, ast.IfExp) and _called_name(node.orelse) == "refuse":
        yield node, f"refuse unless {ast.unparse(node.test)}", lambda it: it.body
    if not isinstance(node, ast.Call):
        return
    name, text = _called_name(node), ast.unparse(node)
    if name == "require":
        yield from _operands(node.args[0], refused_if=False)
    if name in BOUNDS and len(node.args) >= BOUNDS[name] + 2 and name != "range":
        for place, bound, what in ((BOUNDS[name], -HUGE, "least"), (BOUNDS[name] + 1, HUGE, "greatest")):
            yield node.args[place], f"{what} of {text}", lambda _, value=bound: ast.Constant(value)  # type: ignore[misc]
    if name == "take_parameters":
        yield from (found for one in ast.walk(node) if isinstance(one, ast.Dict) for found in _ranges(one))
    for keyword in node.keywords:
        if keyword.arg and keyword.arg.startswith(("max_", "allow_")):
            yield keyword.value, f"{_called_name(node)}({ast.unparse(keyword)})", _without_limit


def _ranges(ranges: ast.Dict) -> Iterator[tuple[ast.AST, str, Change]]:
    """Yield the bounds, choices and types that ``ranges`` gives for the parameters of a codec."""
    for key, value in zip(ranges.keys, ranges.values, strict=True):
        assert isinstance(key, ast.Constant)
        if _called_name(value) == "range" and isinstance(value, ast.Call):
            if len(value.args) > 1:
                yield value.args[0], f"least {key.value}", lambda it: ast.BinOp(it, ast.Sub(), ast.Constant(2**16))
            yield value.args[min(1, len(value.args) - 1)], f"greatest {key.value}", lambda it: ast.BinOp(it, ast.Add(), ast.Constant(2**16))
        else:
            yield value, f"choices of {key.value}", lambda _: ast.Name("object", ast.Load())


def _without_limit(value: ast.expr) -> ast.expr:
    return ast.Constant(True) if isinstance(value, ast.Constant) and value.value is False else ast.Constant(2**31 - 1)


@contextlib.contextmanager
def remove_guard(guard: Guard) -> Iterator[None]:
    """Remove ``guard`` from the running program while the context is active."""
    function = _function(guard)
    before = function.__code__
    try:
        function.__code__ = guard.code
        forget()
        yield
    finally:
        function.__code__ = before
        forget()


def _function(guard: Guard) -> Any:
    found: Any = importlib.import_module(_module_name(guard.path))
    for name in guard.where.split("."):
        found = vars(found)[name]
    found = getattr(found, "fget", None) or getattr(found, "func", None) or getattr(found, "__func__", None) or found
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts if path.is_relative_to(DECODER) else ("kvpack", path.parent.name, path.stem)
    return ".".join(parts).removesuffix(".__init__")


def forget() -> None:
    """Clear the caches of all functions that may contain a guard, and the cache of codecs.

    The latter may contain a codec that a guard refuses.
    """
    front._codecs.clear()
    for module in [sys.modules[_module_name(path)] for path in (*LIBRARY, *MODULES) if _module_name(path) in sys.modules]:
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
