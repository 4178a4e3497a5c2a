"""What an installation holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import kvpack

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the sources: a build leaves files beside them."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("kvpack", "formats", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    build = "import os, sys; from setuptools import build_meta; os.chdir(sys.argv[1]); build_meta.build_wheel(sys.argv[2])"
    subprocess.run([sys.executable, "-c", build, source, out], check=True, capture_output=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def _below(folder: str) -> list[str]:
    paths = (ROOT / folder).rglob("*")
    return [path.relative_to(ROOT).as_posix() for path in paths if path.is_file() and "__pycache__" not in path.parts]


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    expected = set(_below("kvpack")) | {f"kvpack/{name}" for folder in ("formats", "kernels") for name in _below(folder)}
    metadata = f"kvpack-{kvpack.__version__}.dist-info/"
    assert {name for name in wheel.namelist() if not name.startswith(metadata)} == expected
    assert {"kvpack/py.typed", "kvpack/demo/tinylm/model.safetensors", "kvpack/demo/demo.txt", "kvpack/formats/group.py"} <= expected
    assert f"{metadata}licenses/LICENSE" in wheel.namelist()


def test_the_wheel_runs_from_a_neutral_folder(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    script = "import kvpack, kvpack.formats.group, sys; print(kvpack.__file__, kvpack.formats.__file__); assert 'torch' not in sys.modules"
    # -P keeps the folder of the test run, and an installed kvpack, from answering instead.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    found = subprocess.run([sys.executable, "-P", "-c", script], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert found.stdout.split() == [str(tmp_path / "site/kvpack/__init__.py"), str(tmp_path / "site/kvpack/formats/__init__.py")]


def test_the_folder_kernels_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_one_version_everywhere() -> None:
    assert PROJECT["project"]["version"] == kvpack.__version__


def test_everything_installed_is_pinned() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pinned = {match[1].lower() for line in lines if (match := re.fullmatch(r"([\w.-]+)==[\w.]+", line))}
    assert len(pinned) == len(lines) - 1
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    asked = {re.match(r"[\w-]+", requirement)[0] for group in groups for requirement in group}  # type: ignore[index]
    assert asked <= pinned


def test_no_file_names_a_folder_of_a_machine() -> None:
    for name in ("pyproject.toml", "Makefile", "MANIFEST.in", "README.md", ".ci/run", ".ci/constraints.txt"):
        assert not re.search(r"(?<![\w.:/])/(home|root|tmp|work|opt|usr)\b", (ROOT / name).read_text()), name
