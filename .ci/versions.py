"""Run tests with the oldest and the newest dependencies that pyproject.toml allows, and print a table of what ran.

The fast part, which `.ci/run` runs, keeps the PyTorch of .venv and runs a part of the tests. `make versions` runs the whole
(`--whole`): the oldest and the newest PyTorch, all tests, and the interpreter's tests with every minor Triton.

An environment lies in build/versions over the packages of .venv, and hides those of which it has another version.
The exit code is 1 when an environment cannot be installed or a test fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
ENVIRONMENTS = ROOT / "build" / "versions"

EXTRAS = ("bench", "encryption", "object-store", "redis", "transformers")
OLDEST_TRITON = "3.6"
TRITONS = ("3.6", "3.7", "3.8", "3.9")

TESTS = (
    "test_golden.py",
    "test_attention.py",
    "test_cache_names.py",
    "test_transformers.py",
    "test_transformers_batches.py",
    "test_transformers_recording.py",
    "test_recipes.py",
    "test_encryption.py",
)
"""The fast part: every codec's bytes and values, caches of models, and the packages of extras."""
COMPILED = "tests/kernels/test_compiling.py"
DEFAULT_COMPILED = f"{COMPILED}::test_the_default_recipe_compiles"
"""The recipes that Triton's compiler is tried on with every Triton, and in the fast part."""
KERNELS = "decode_the_pages_of_a_cache or batches_and_heads or many_short_pages or pack_and_append"
"""The fast part in Triton's interpreter: attention, decoding and encoding."""


@dataclass(frozen=True)
class Environment:
    """Packages over those of .venv, and what runs with them."""

    name: str
    requirements: tuple[str, ...]
    tests: str = "part"
    kernels: str = "part"

    @property
    def python(self) -> Path:
        return ENVIRONMENTS / self.name / "bin" / "python"

    def install(self) -> None:
        """Raises CalledProcessError where the requirements cannot be installed together."""
        folder = ENVIRONMENTS / self.name
        subprocess.run([BIN / "python", "-m", "venv", "--without-pip", folder], check=True)
        below = next((ROOT / ".venv" / "lib").glob("python3*/site-packages"))
        site = folder / below.relative_to(ROOT / ".venv")
        site.joinpath("below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
        pip = [BIN / "python", "-m", "pip", "--disable-pip-version-check", "--python", self.python]
        subprocess.run([*pip, "install", "--quiet", "--no-compile", "--upgrade", *self.requirements], check=True)

    def versions(self, names: list[str]) -> list[str]:
        """The version of each package that a process of this environment finds."""
        code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
        return subprocess.run([self.python, "-c", code, *names], check=True, capture_output=True, text=True).stdout.split()

    def run(self) -> tuple[str, str]:
        """What pytest says last of the tests on PyTorch operations, and of those of the kernels in Triton's interpreter."""
        files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if self.tests == "whole" or path.name in TESTS]
        if self.tests == "part":
            files.append(DEFAULT_COMPILED)
        elif self.tests == "compiled":
            files = [COMPILED]
        interpreted = [str(path) for path in sorted((ROOT / "tests" / "kernels").glob("test_*.py"))]
        if self.kernels == "part":
            interpreted += ["-k", KERNELS]
        return (
            self._pytest(files),
            "-" if self.kernels == "none" else self._pytest(interpreted, TRITON_INTERPRET="1"),
        )

    def _pytest(self, arguments: list[str], **variables: str) -> str:
        # A release of another age warns of what it will change; that is no failure here.
        options = ["--quiet", "-p", "no:cacheprovider", "-W", "default"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        command = [self.python, "-m", "pytest", *options, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = done.stdout.splitlines()
        if done.returncode:
            print("\n".join(lines[-60:]), file=sys.stderr)
        # A library may print more when the process ends.
        last = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), "no summary")
        summary = re.sub(r", \d+ (deselected|warnings?)|=+ ?", "", last)
        return f"{'FAILED: ' if done.returncode else ''}{summary}"


def ranges() -> dict[str, str]:
    """The oldest version allowed of every dependency of kvpack and of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    found = {}
    for requirement in requirements:
        name, version = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups()
        found[name] = version
    return found


def environments(whole: bool) -> list[Environment]:
    """The environments of the fast part, or of the whole."""
    floors = ranges()
    torch = floors.pop("torch")
    oldest, newest = tuple(f"{name}=={version}" for name, version in floors.items()), tuple(floors)
    if not whole:
        return [
            Environment("oldest", (*oldest, f"triton=={OLDEST_TRITON}.*")),
            Environment("newest", (*newest, "triton")),
        ]
    return [
        # This PyTorch brings a Triton that is too old for the kernels.
        Environment("oldest", (*oldest, f"torch=={torch}"), tests="whole", kernels="none"),
        Environment("newest", (*newest, "torch"), tests="whole"),
        *(Environment(f"triton-{version}", (f"triton=={version}.*",), tests="compiled", kernels="whole") for version in TRITONS),
    ]


def table(columns: list[list[str]]) -> str:
    """Lines with one cell per column, padded to the widest."""
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="all environments and all tests: gigabytes of PyTorch, about an hour")
    parser.add_argument("--only", metavar="NAME", help="this environment alone")
    arguments = parser.parse_args()
    shutil.rmtree(ENVIRONMENTS, ignore_errors=True)
    names = ["torch", "triton", *sorted(set(ranges()) - {"torch"})]
    python = ".".join(map(str, sys.version_info[:3]))
    columns, failed = [["", "python", *names, "tests", "kernels"]], False

    def column(environment: Environment) -> list[str]:
        environment.install()
        return [environment.name, python, *environment.versions(names), *environment.run()]

    # Two at a time, each in one process: one is tested while the other's packages are fetched.
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(column, (one for one in environments(arguments.whole) if arguments.only in (None, one.name))):
            failed |= any(cell.startswith("FAILED") for cell in found)
            columns.append(found)
            print(table(columns), flush=True)
    shutil.rmtree(ENVIRONMENTS, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
