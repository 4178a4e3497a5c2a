"""Print the paths of the tests that cover a change: ``python -m support.touched``, which ``make check`` runs.

A change is everything since the branch left main, including uncommitted files. A source file is covered by the tests of its folder, a C
kernel by those of C kernels, a test file by itself, and a module of ``tests/support`` by the test files that import it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
TREES = {
    "formats": "formats",
    "kvpack/guides": "test_guides.py",
    "spec/viewer": "commands/test_view.py",
    "spec": "spec",
    "fuzz": "fuzz",
    ".ci/backend": "test_packaging.py",
    "tests/golden": "file",
    "tests/written": "file",
}
"""Test folder or file in ``tests`` for each source folder that has another name."""
FILES = {
    "README.md": ("tests/test_readme.py",),
    "pyproject.toml": ("tests/test_packaging.py",),
    "Makefile": ("tests/test_packaging.py",),
    ".ci/check_wheel.py": ("tests/test_packaging.py",),
    ".ci/wheel_size.py": ("tests/test_packaging.py",),
    "kvpack/__init__.py": ("tests/test_imports.py", "tests/test_packaging.py"),
    "kvpack/cli.py": ("tests/commands",),
}
"""Tests of files that have no test folder or file with a matching name."""


def changed_files(base: str = "main") -> list[str]:
    """Return the files that differ from the last commit shared with ``base``, and those that git neither tracks nor ignores."""
    shared = _git("merge-base", "HEAD", base)[0]
    return sorted({*_git("diff", "--name-only", "--no-renames", shared), *_git("ls-files", "--others", "--exclude-standard")})


def covering_tests(file: str) -> set[str]:
    """Return the paths of the tests that cover ``file``."""
    path = PurePosixPath(file)
    if file in FILES:
        return set(FILES[file])
    if path.parts[0] == "tests" and path.name.startswith("test_"):
        return _existing_paths(file)
    if path.name == "conftest.py":
        return {path.parent.as_posix()}
    if file == "tests/support/__init__.py":
        return {"tests"}
    if path.parts[:2] == ("tests", "support"):
        return _importers(path.parts[2].removesuffix(".py"))
    if path.parts[:2] == ("tests", "benchmarks"):
        return {"tests/benchmarks"}
    if path.parts[0] == "kernels":
        return _kernel_tests(path.parts[1] == "cpu")
    for tree, folder in TREES.items():
        if path.is_relative_to(tree):
            return {f"tests/{folder}"}
    if path.parts[0] == "kvpack" and path.suffix == ".py":
        folder = path.parts[1].removesuffix(".py")
        return _existing_paths(f"tests/{folder}") | _existing_paths(f"tests/test_{folder}.py") | {"tests/test_imports.py"}
    return {"tests/test_packaging.py"} if path.parts[0] == "kvpack" else set()


def _kernel_tests(in_c: bool) -> set[str]:
    """Return the tests of the C kernels if ``in_c``, else those of the Triton kernels. They are independent of each other."""
    found = (ROOT / "tests/kernels").glob("test_*.py")
    return {path.relative_to(ROOT).as_posix() for path in found if path.name.startswith("test_cpu_") == in_c}


def _importers(module: str) -> set[str]:
    """Return the test files that import a module of ``tests/support``, directly or indirectly."""
    names, known = {module}, set()
    while names != known:
        known = set(names)
        found = [path for path, imported in _imports().items() if imported & known]
        names |= {path.relative_to(ROOT / "tests/support").parts[0].removesuffix(".py") for path in found if "support" in path.parts}
    if any(path.name == "conftest.py" for path in found):
        return {"tests"}
    return {path.relative_to(ROOT).as_posix() for path in found if path.name.startswith("test_")}


@cache
def _imports() -> dict[Path, set[str]]:
    """Return, for each file in ``tests``, the modules of ``tests/support`` that it imports, even in programs that it starts."""
    modules = re.compile(r"\bsupport(?:\.(\w+)| import ([\w, ]+))")
    found = {}
    for path in (ROOT / "tests").rglob("*.py"):
        names = modules.findall(path.read_text(encoding="utf-8"))
        found[path] = {name.strip() for one, several in names for name in (one, *several.split(",")) if name}
    return found


def _existing_paths(path: str) -> set[str]:
    return {path} if (ROOT / path).exists() else set()


def _git(*words: str) -> list[str]:
    """Run git in ``ROOT`` and return the lines that it prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def main() -> None:
    found = set().union(*(covering_tests(file) for file in changed_files(*sys.argv[1:])))
    # Drop files in listed folders, because pytest would run them twice.
    print(*sorted(path for path in found if not any(str(parent) in found for parent in PurePosixPath(path).parents)))


if __name__ == "__main__":
    main()
