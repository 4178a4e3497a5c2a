"""Run tests with the oldest and the newest dependencies that pyproject.toml allows, and print a table of versions and results.

`.ci/run` runs the fast part, which keeps the PyTorch of .venv and runs some of the tests of packages whose version differs from that of
.venv. `make versions` runs everything (`--whole`): the oldest and the newest PyTorch, all tests, and the interpreter's tests with every
minor Triton.

Each environment is a folder in build/versions. It uses the packages of .venv except those that it installs in another version. The exit
code is 1 when an environment cannot be installed or a test fails.
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
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
ENVIRONMENTS = ROOT / "build" / "versions"

EXTRAS = ("bench", "encryption", "object-store", "redis", "transformers")
OLDEST_TRITON = "3.6"
TRITONS = ("3.6", "3.7", "3.8", "3.9")

TESTS = {
    "test_golden.py": {"msgpack", "numpy", "safetensors", "xxhash", "zstandard"},
    "test_recipes.py": {"msgpack", "numpy", "safetensors", "xxhash", "zstandard"},
    "test_encryption.py": {"cryptography", "obstore", "redis"},
    "test_cache_names.py": {"transformers"},
    "test_transformers.py": {"numpy", "transformers"},
    "test_transformers_batches.py": {"transformers"},
    "test_transformers_recording.py": {"transformers"},
}
"""Test files of the fast part, and the packages that they are run for: every codec's bytes and values, models' caches, and extras."""
COMPILED = "tests/kernels/test_compiling.py"
DEFAULT_COMPILED = f"{COMPILED}::test_the_default_recipe_compiles"
"""The compilation test that the fast part runs for another Triton.

With ``--whole``, all tests in ``COMPILED`` run with every Triton version.
"""
KERNELS = "decode_the_pages_of_a_cache or sequences_and_heads or many_short_pages or pack_and_append"
"""pytest's ``-k`` expression for the kernel tests of the fast part: attention, decoding and encoding in Triton's interpreter.

They are run for another NumPy or Triton.
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment on top of .venv, and the tests to run in it."""

    name: str
    requirements: tuple[str, ...]
    tests: str = "part"
    kernels: str = "part"

    @property
    def python(self) -> Path:
        return ENVIRONMENTS / self.name / "bin" / "python"

    def install(self) -> None:
        """Create the environment. Raises CalledProcessError if its requirements cannot be installed together."""
        folder = ENVIRONMENTS / self.name
        subprocess.run([BIN / "python", "-m", "venv", "--without-pip", folder], check=True)
        below = next((ROOT / ".venv" / "lib").glob("python3*/site-packages"))
        site = folder / below.relative_to(ROOT / ".venv")
        site.joinpath("below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
        pip = [BIN / "python", "-m", "pip", "--disable-pip-version-check", "--python", self.python]
        subprocess.run([*pip, "install", "--quiet", "--no-compile", "--upgrade", *self.requirements], check=True)

    def versions(self, names: list[str]) -> list[str]:
        """Return the version of each package in ``names`` that this environment imports."""
        code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
        return subprocess.run([self.python, "-c", code, *names], check=True, capture_output=True, text=True).stdout.split()

    def run(self, changed: set[str]) -> tuple[str, str]:
        """Run the tests of packages in ``changed``.

        Returns pytest's summaries of the tests of PyTorch operations and of the kernel tests in Triton's interpreter.
        """
        paths = sorted((ROOT / "tests").rglob("test_*.py"))
        if self.tests == "part":
            files = [str(path) for path in paths if changed & TESTS.get(path.name, set())]
            files += [DEFAULT_COMPILED] if "triton" in changed else []
        else:
            files = [COMPILED] if self.tests == "compiled" else [str(path) for path in paths]
        interpreted = [str(path) for path in paths if path.parent.name == "kernels"]
        if self.kernels == "part":
            interpreted = [*interpreted, "-k", KERNELS] if changed & {"numpy", "triton"} else []
        elif self.kernels == "none":
            interpreted = []
        return self._pytest(files), self._pytest(interpreted, TRITON_INTERPRET="1")

    def _pytest(self, arguments: list[str], **variables: str) -> str:
        if not arguments:
            return "-"
        # Older and newer releases warn of deprecations; these are not failures here.
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
    """Return the oldest allowed version of every dependency, including those of extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    found = {}
    for requirement in requirements:
        name, version = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups()
        found[name] = version
    return found


def environments(whole: bool) -> list[Environment]:
    """Return the environments of the fast part, or those of ``--whole`` if ``whole`` is True."""
    floors = ranges()
    torch = floors.pop("torch")
    oldest, newest = tuple(f"{name}=={version}" for name, version in floors.items()), tuple(floors)
    if not whole:
        return [
            Environment("oldest", (*oldest, f"triton=={OLDEST_TRITON}.*")),
            Environment("newest", (*newest, "triton")),
        ]
    return [
        # This PyTorch requires a Triton that is too old for the kernels.
        Environment("oldest", (*oldest, f"torch=={torch}"), tests="whole", kernels="none"),
        Environment("newest", (*newest, "torch"), tests="whole"),
        *(Environment(f"triton-{version}", (f"triton=={version}.*",), tests="compiled", kernels="whole") for version in TRITONS),
    ]


def table(columns: list[list[str]]) -> str:
    """Format columns of equal length as a text table with aligned cells."""
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="run all tests in all environments (about an hour and gigabytes)")
    parser.add_argument("--only", metavar="NAME", help="run only this environment")
    arguments = parser.parse_args()
    shutil.rmtree(ENVIRONMENTS, ignore_errors=True)
    names = ["torch", "triton", *sorted(set(ranges()) - {"torch"})]
    python = ".".join(map(str, sys.version_info[:3]))
    columns, failed = [["", "python", *names, "tests", "kernels"]], False

    def column(environment: Environment) -> list[str]:
        environment.install()
        versions = environment.versions(names)
        changed = {name for name, version in zip(names, versions, strict=True) if version != metadata.version(name)}
        return [environment.name, python, *versions, *environment.run(changed)]

    # Two environments at a time, so that one is tested while packages of the other are downloaded.
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(column, (one for one in environments(arguments.whole) if arguments.only in (None, one.name))):
            failed |= any(cell.startswith("FAILED") for cell in found)
            columns.append(found)
            print(table(columns), flush=True)
    shutil.rmtree(ENVIRONMENTS, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
