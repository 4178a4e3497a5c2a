"""Contents of an installation."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import kvpack
from kvpack.coding import triton_version
from support import shared_folders

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


COMPILER = shutil.which("cc") or shutil.which("gcc")
LIBRARY = "kvpack/kernels/cpu/_cpu.abi3.so"


LINKS = {
    "kvpack/formats": "../formats",
    "kvpack/javascript": "../spec/readers/javascript",
    "kvpack/kernels": "../kernels",
    "kvpack/viewer": "../spec/viewer",
}


def _sources(folder: Path) -> Path:
    """Copy the files that a build reads, because it writes files next to its sources."""
    for name in ("kvpack", "formats", "kernels", "spec/readers", "spec/viewer", ".ci/backend"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    return folder


def _build(source: Path, kind: str, out: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build a "wheel" or an "sdist" of ``source`` in the folder ``out``, with the backend in pyproject.toml."""
    build = "import os, sys; os.chdir(sys.argv[1]); sys.path.insert(0, '.ci/backend'); import kvpack_build as b; "
    command = [sys.executable, "-c", f"{build}b.build_{kind}(sys.argv[2])", source, out]
    return subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **variables})


def _built(tmp_path_factory: pytest.TempPathFactory, out: Path, **variables: str) -> zipfile.ZipFile:
    """Build a wheel in the folder ``out`` from a copy of the sources."""
    done = _build(_sources(tmp_path_factory.mktemp("source")), "wheel", out, **variables)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # -O3 would take half a minute more.
    compiler = {"CC": str(ROOT / ".ci" / "gcc-o1")} if shutil.which("gcc") else {}
    out = shared_folders.shared_folder(tmp_path_factory, "wheel", lambda folder: _built(tmp_path_factory, folder, **compiler))
    return zipfile.ZipFile(next(out.glob("*.whl")))


def _below(folder: str) -> list[str]:
    paths = (ROOT / folder).rglob("*")
    return [
        path.relative_to(ROOT).as_posix() for path in paths if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    ]


def test_the_package_includes_its_parts_through_relative_links() -> None:
    """Editors and type checkers follow these links; a path set at run time would be invisible to them."""
    assert {name: os.readlink(ROOT / name) for name in LINKS} == LINKS
    assert PROJECT["build-system"]["backend-path"] == [".ci/backend"]


def _names_without_library(source: Path, out: Path) -> set[str]:
    """Return the names in a wheel built without a compiler, which takes a second instead of a minute."""
    done = _build(source, "wheel", out, CC="no-such-compiler")
    assert done.returncode == 0, done.stderr
    return {*zipfile.ZipFile(next(out.glob("*.whl"))).namelist()}


@pytest.mark.scenario
def test_the_sdist_contains_each_part_once_and_builds_the_same_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    done = _build(_sources(tmp_path / "source"), "sdist", tmp_path)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        members = archive.getmembers()
        archive.extractall(tmp_path / "sdist", filter="data")
    assert all(member.isfile() or member.isdir() for member in members)
    assert sum(member.name.endswith("/formats/octahedral.py") for member in members) == 1
    assert _names_without_library(next((tmp_path / "sdist").iterdir()), tmp_path) == {*wheel.namelist()} - {LIBRARY}


@pytest.mark.scenario
def test_sources_whose_links_became_text_files_build_the_same_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = _sources(tmp_path / "source")
    for name, target in LINKS.items():
        (source / name).unlink()
        (source / name).write_text(target)
    assert _names_without_library(source, tmp_path) == {*wheel.namelist()} - {LIBRARY}


def test_sources_with_a_missing_part_are_refused_with_instructions(tmp_path: Path) -> None:
    source = _sources(tmp_path)
    (source / "kvpack/formats").unlink()
    done = _build(source, "wheel", tmp_path)
    assert done.returncode != 0
    assert "kvpack/formats is not a folder: expected a symbolic link to ../formats; clone the repository again" in done.stderr


MISSPELLED = """
import kvpack

cache = kvpack.load("prompt.kvpack")
cache[0].unpakc()
cache[:, 0:256].unpakc()
kvpack.lod("prompt.kvpack")
"""


@pytest.mark.scenario
def test_a_type_checker_finds_misspelled_names_in_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "misspelled.py").write_text(MISSPELLED)
    # Without the installed packages: their types are not what is checked, and take most of the time.
    command = [sys.executable, "-m", "mypy", "--strict", "--no-site-packages", "--cache-dir", tmp_path / "cache", "misspelled.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    found = subprocess.run(command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    errors = [line.split(": ")[0] for line in found.splitlines() if line.startswith("misspelled.py:")]
    assert errors == [f"misspelled.py:{line}" for line in (5, 6, 7)]


WHEEL_SIZE = runpy.run_path(str(ROOT / ".ci" / "wheel_size.py"))
READ_AT_RUN_TIME = (
    "kvpack/py.typed",
    "kvpack/bench/measured/quality.json",
    "kvpack/bench/texts/books.txt.bz2",
    "kvpack/bench/texts/code.txt.bz2",
    "kvpack/demo/",
    "kvpack/formats/trellis_tables.bin",
    "kvpack/javascript/",
    "kvpack/kernels/cuda/attend_scalar.cu",
    "kvpack/viewer/",
)
COMPRESS_WHEEL = runpy.run_path(str(ROOT / ".ci" / "backend" / "compress_wheel.py"))["compress_wheel"]
READ_BY_OTHER_PROGRAMS = {"kvpack/javascript/row.js", "kvpack/javascript/store.js"}


def test_a_compressed_wheel_has_all_files_and_no_folders(tmp_path: Path) -> None:
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("a/", b"")
        wheel.writestr(zipfile.ZipInfo("a/run"), b"run " * 1000, zipfile.ZIP_DEFLATED, 1)
    before = path.stat().st_size
    COMPRESS_WHEEL(path)
    with zipfile.ZipFile(path) as wheel:
        assert wheel.namelist() == ["a/run"]
        assert wheel.read("a/run") == b"run " * 1000
    assert path.stat().st_size < before


@pytest.mark.scenario
def test_the_wheel_contains_all_modules_and_runtime_files(wheel: zipfile.ZipFile) -> None:
    sources = set(_below("kvpack"))
    for link, target in LINKS.items():
        folder = target.removeprefix("../")
        sources |= {link + name.removeprefix(folder) for name in _below(folder)}
    expected = {name for name in sources if name.endswith(".py") or name.startswith(READ_AT_RUN_TIME)} - READ_BY_OTHER_PROGRAMS
    metadata = f"kvpack-{kvpack.__version__}.dist-info/"
    if COMPILER:
        expected.add(LIBRARY)
    assert {name for name in wheel.namelist() if not name.startswith(metadata)} == expected
    assert ("-cp311-abi3-" if COMPILER else "-py3-none-any") in str(wheel.filename)
    assert {"kvpack/py.typed", WHEEL_SIZE["MODEL"], "kvpack/demo/demo.txt", "kvpack/formats/group.py"} <= expected
    assert {"kvpack/javascript/kvpack.js", "kvpack/viewer/index.html"} <= expected
    assert f"{metadata}licenses/LICENSE" in wheel.namelist()


@pytest.mark.scenario
def test_the_wheel_has_at_most_two_megabytes_besides_the_demos_model(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The test uses the checkout's library, which -O3 makes larger than the wheel's."""
    whole = WHEEL_SIZE["size"](str(wheel.filename))
    if LIBRARY in wheel.namelist():
        shutil.copy(ROOT / LIBRARY, tmp_path / "library")
        subprocess.run(["strip", "--strip-all", "library"], cwd=tmp_path, check=True)
        whole += len(zlib.compress((tmp_path / "library").read_bytes(), 9)) - wheel.getinfo(LIBRARY).compress_size
    assert whole <= WHEEL_SIZE["LIMIT"] == 2_000_000


@pytest.mark.scenario
def test_the_wheel_runs_from_an_unrelated_folder(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    script = "import kvpack, kvpack.formats.group, sys; print(kvpack.__file__, kvpack.formats.__file__); assert 'torch' not in sys.modules"
    # -P keeps the folder of the test run, and an installed kvpack, from answering instead.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    found = subprocess.run([sys.executable, "-P", "-c", script], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert found.stdout.split() == [str(tmp_path / "site/kvpack/__init__.py"), str(tmp_path / "site/kvpack/formats/__init__.py")]


WARNED = """
import sys, warnings, torch, kvpack
from kvpack.errors import KvpackWarning
x = torch.ones(1, 2, 40, 64)
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    for _ in range(2):
        kvpack.attend(torch.ones(1, 4, 1, 64), kvpack.pack([(x, x)], "kivi-2")[0])
print([issubclass(one.category, KvpackWarning) for one in found], kvpack.backends()["cpu"])
"""


@pytest.mark.scenario
def test_a_wheel_built_without_a_compiler_uses_torch_and_says_so_once(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    without = _built(tmp_path_factory, tmp_path, CC="no-such-compiler")
    assert LIBRARY not in without.namelist()
    assert str(without.filename).endswith("-py3-none-any.whl")
    without.extractall(tmp_path / "site")
    environment = {name: value for name, value in os.environ.items() if name != "KVPACK_KERNELS"} | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-P", "-c", WARNED]
    found = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert found.stdout == "[True] PyTorch operations (the C kernels were not built)\n"


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of commands of a new environment with kvpack from the wheel only, and dependencies from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    code = "import site; print(site.getsitepackages()[0])"
    site = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    # The folders of this environment, without what they would add: an editable kvpack among them.
    below = [path for path in sys.path if Path(path).name == "site-packages"]
    Path(site, "dependencies.pth").write_text("".join(f"{path}\n" for path in below))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel.filename)], check=True, capture_output=True)
    return python.parent


ATTENDED = """
import sys, torch, kvpack
assert kvpack.__file__ == sys.argv[1], kvpack.__file__
out = kvpack.attend(torch.ones(1, 4, 1, 64), kvpack.load("packed.kvpack")[0])
print(tuple(out.shape), bool(out.isfinite().all()))
"""


@pytest.mark.scenario
def test_the_wheel_inspects_verifies_packs_attends_and_demonstrates(installed: Path, tmp_path: Path) -> None:
    def run(command: str, *arguments: str | Path) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([installed / command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    golden = ROOT / "tests" / "golden" / "angle-128-linear.kvpack"
    assert "angle" in run("kvpack", "inspect", golden)
    run("kvpack", "verify", golden)
    x = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(0))
    save_file({"0.k": x, "0.v": x + 1}, tmp_path / "dense.safetensors")
    run("kvpack", "pack", "dense.safetensors", "packed.kvpack", "--recipe", "octopus-3")
    package = next(Path(installed.parent, "lib").glob("python3*/site-packages/kvpack/__init__.py"))
    assert run("python", "-P", "-c", ATTENDED, package) == "(1, 4, 1, 64) True\n"
    report = json.loads(run("kvpack", "demo", "--recipe", "kv=group:b=8,g=32", "--json"))
    assert report["files"][0]["right"] == 5


def test_the_folder_kernels_is_not_importable() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("name", ["CHANGELOG.md", "SECURITY.md"])
def test_links_lead_to_files(name: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text()) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_version_is_the_same_everywhere() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert PROJECT["project"]["version"] == kvpack.__version__ == cited[1]


def test_everything_installed_is_pinned() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pinned = {match[1].lower() for line in lines if (match := re.fullmatch(r"([\w.-]+)==[\w.]+", line))}
    assert len(pinned) == len(lines) - 1
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values(), *PROJECT["dependency-groups"].values()]
    asked = {"pip"} | {re.match(r"[\w-]+", requirement)[0] for group in groups for requirement in group}  # type: ignore[index]
    assert asked <= pinned


def test_tested_versions_are_those_allowed() -> None:
    versions = runpy.run_path(str(ROOT / ".ci" / "versions.py"))
    assert versions["ranges"]()["torch"]
    assert versions["OLDEST_TRITON"] == versions["TRITONS"][0] == ".".join(map(str, triton_version.MIN_VERSION))
    assert f"triton>={versions['OLDEST_TRITON']};" in "\n".join(PROJECT["dependency-groups"]["test"])
    assert {path.name for path in (ROOT / "tests").rglob("test_*.py")} >= set(versions["TESTS"])


def test_no_file_mentions_a_local_folder() -> None:
    names = ("pyproject.toml", "Makefile", "MANIFEST.in", "README.md", "CHANGELOG.md", "SECURITY.md")
    for name in (*names, ".ci/run", ".ci/constraints.txt", ".ci/versions.py"):
        assert not re.search(r"(?<![\w.:/])/(home|root|tmp|work|opt|usr)\b", (ROOT / name).read_text()), name
