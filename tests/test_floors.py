"""Import order of the package: each level imports only those below it, without cycles.

Every import counts, even inside functions and only for types.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"formats": "kvpack.formats", "kernels": "kvpack.kernels", "kvpack": "kvpack"}

FLOORS = (
    ("formats",),
    ("runtime",),
    ("cache_names", "codecs", "errors", "file", "hub"),
    ("kernels",),
    ("coding",),
    ("identity",),
    ("cache",),
    ("attention",),
    ("live", "pages"),
    ("store",),
    ("integrations",),
    ("models", "output"),
    ("evaluation",),
    ("bench", "demo", "tuning"),
    ("commands",),
    ("cli",),
    ("__main__",),
)
"""The modules and packages in ``kvpack``, lowest level first."""

ALONE = {"runtime": {"formats"}, "file": {"formats", "runtime"}, "kernels": {"formats", "runtime"}}
"""Modules that may import only some of the levels below them."""

KERNEL_LEVELS = (
    "triton_internals",
    "gpu",
    "bitpack",
    "tables",
    "loaders",
    "encode",
    "decode",
    "codecs",
    "encode.encode",
    "decode.decode",
    "tiles",
    "decode.tiles",
    "decode.klt",
    "decode.unpack",
    "decode.sides",
    "cuda",
    "attend",
    "pages",
)
"""Import order of the folders in ``kernels/``, lowest first. ``codecs`` is the table of encoders, decoders and loaders: the entry
points of ``encode`` and ``decode`` use it. The listed modules of ``decode`` decode whole sides with ``tiles``."""

FACADE = {"evaluation", "bench", "demo", "tuning", "commands", "cli"}
"""Modules that may use the public names, ``import kvpack``, like a user."""

Graph = dict[str, set[str]]


@cache
def sources() -> dict[str, Path]:
    """Return every module of the package, by its dotted name."""
    found = {}
    for folder, package in PARTS.items():
        for path in (ROOT / folder).rglob("*.py"):
            names = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def imported(module: str, source: str, known: set[str], *, is_package: bool = False) -> set[str]:
    """Return the modules in ``known`` that the source of ``module`` imports anywhere."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {name if (name := f"{base}.{alias.name}") in known else base for alias in node.names}
    return found & known - {module}


@cache
def graph() -> Graph:
    known = set(sources())
    return {
        module: imported(module, path.read_text(encoding="utf-8"), known, is_package=path.name == "__init__.py")
        for module, path in sources().items()
    }


def part(module: str) -> str:
    """Return the name in ``kvpack`` to which a module belongs; "kvpack" for the package itself."""
    return ([*module.split("."), "kvpack"])[1]


def trespasses(module: str, target: str) -> bool:
    """Return True if ``module`` must not import ``target``."""
    own, other = part(module), part(target)
    if own == other:
        return False
    if other == "kvpack":
        return own not in FACADE
    if own in ALONE:
        return other not in ALONE[own]
    rank = {name: number for number, names in enumerate(FLOORS) for name in names}
    return rank[other] >= rank[own]


def circles(modules: Graph) -> list[list[str]]:
    """Return modules that import each other, directly or indirectly: those that remain when modules without imports are removed."""
    rest = {module: set(targets) for module, targets in modules.items()}
    while True:
        ends = {module for module, targets in rest.items() if not targets & set(rest)}
        if not ends:
            break
        rest = {module: targets - ends for module, targets in rest.items() if module not in ends}
    reached: dict[str, set[str]] = {}
    for module in rest:
        ahead, seen = [module], set()
        while ahead:
            new = rest[ahead.pop()] & set(rest) - seen
            seen |= new
            ahead += new
        reached[module] = seen
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in rest if module in reached[module]}
    return sorted(sorted(group) for group in groups)


def test_every_module_has_a_level() -> None:
    assert {part(module) for module in sources()} - {"kvpack"} == {name for names in FLOORS for name in names}


def test_no_module_imports_from_a_higher_level() -> None:
    """The only exception is the package itself, whose table of public names refers to all modules."""
    imports = [(module, target) for module, targets in graph().items() if module != "kvpack" for target in targets]
    assert sorted(f"{module} imports {target}" for module, target in imports if trespasses(module, target)) == []


def kernel_level(module: str) -> int | None:
    """Return the level of a module of ``kernels/`` other than ``cpu``, by its longest prefix in ``KERNEL_LEVELS``."""
    name = module.removeprefix("kvpack.kernels.")
    if name == module or name.split(".")[0] == "cpu":
        return None
    parts = name.split(".")
    return max(KERNEL_LEVELS.index(".".join(parts[:count])) for count in (1, 2) if ".".join(parts[:count]) in KERNEL_LEVELS)


def test_every_folder_of_kernels_has_a_level() -> None:
    folders = {path.relative_to(ROOT / "kernels").parts[0].removesuffix(".py") for path in (ROOT / "kernels").rglob("*.py")}
    assert folders == {name for name in KERNEL_LEVELS if "." not in name} | {"cpu"}
    assert {f"kvpack.kernels.{name}" for name in KERNEL_LEVELS if "." in name} <= set(sources())


def test_kernels_import_only_lower_levels() -> None:
    upward = []
    for module, targets in graph().items():
        for target in targets:
            own, other = kernel_level(module), kernel_level(target)
            if own is not None and other is not None and own < other:
                upward.append(f"{module} imports {target}")
    assert upward == []


def test_c_kernels_and_triton_kernels_are_independent() -> None:
    kernels, in_c = "kvpack.kernels.", "kvpack.kernels.cpu."
    imports = [(module, target) for module, targets in graph().items() for target in targets if module.startswith(kernels)]
    among = [(module, target) for module, target in imports if target.startswith(kernels)]
    assert [f"{module} imports {target}" for module, target in among if module.startswith(in_c) != target.startswith(in_c)] == []


def test_there_are_no_import_cycles() -> None:
    assert circles({module: targets for module, targets in graph().items() if module != "kvpack"}) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from kvpack.cache.side import Side", "kvpack.cache.side"),
        ("def f():\n    from ..cache import side", "kvpack.cache.side"),
        ("if TYPE_CHECKING:\n    import kvpack.cache.side", "kvpack.cache.side"),
    ],
)
def test_imports_are_found_anywhere_in_a_file(source: str, found: str) -> None:
    assert imported("kvpack.coding.encoding", source, set(sources())) == {found}
    assert trespasses("kvpack.coding.encoding", found)
    assert trespasses("kvpack.kernels.attend.plan", found)
    assert not trespasses("kvpack.attention", found)
    assert trespasses("kvpack.attention", "kvpack")


def test_levels_are_distinguished() -> None:
    names = ("bitpack.columns", "decode.rows", "decode.decode", "tiles.work", "decode.tiles", "attend.plan", "cpu.library")
    levels = [kernel_level(f"kvpack.kernels.{name}") for name in names]
    assert levels[-1] is None
    assert levels[:-1] == sorted({level for level in levels if level is not None})


def test_cycles_are_found() -> None:
    modules = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}, "f": {"g"}, "g": {"f"}}
    assert circles(modules) == [["a", "b", "c"], ["f", "g"]]
