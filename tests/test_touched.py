"""``make check`` runs the tests that cover a change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support import touched
from support.touched import ROOT, changed_files, covering_tests


def sources() -> list[str]:
    """Return every Python file of the checkout that git does not ignore."""
    if not (ROOT / ".git").exists():
        pytest.skip("this folder is not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [file for file in listed if (ROOT / file).exists()]


def test_every_source_has_existing_tests_or_is_run_by_make() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for file in sources():
        assert covering_tests(file) or file in makefile, f"{file}: nothing runs it"
        assert all((ROOT / path).exists() for path in covering_tests(file)), file


def test_every_folder_of_sources_has_a_folder_of_tests() -> None:
    for file in sources():
        parts = Path(file).parts
        if parts[0] == "kvpack" and len(parts) > 2:
            assert f"tests/{parts[1]}" in covering_tests(file), file
        elif parts[0] == "kernels":
            assert {Path(needed).parent.as_posix() for needed in covering_tests(file)} == {"tests/kernels"}, file
        elif parts[0] in {"formats", "spec", "fuzz"}:
            assert covering_tests(file) == {f"tests/{parts[0]}"}, file


def test_every_test_runs_for_some_source() -> None:
    needed = set().union(*(covering_tests(file) for file in sources())) - {"tests"}
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert {path.relative_to(ROOT).as_posix(), path.parent.relative_to(ROOT).as_posix()} & needed, path


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("formats/group.py", {"tests/formats"}),
        ("kvpack/file/header.py", {"tests/file", "tests/test_imports.py"}),
        ("kvpack/attention.py", {"tests/test_attention.py", "tests/test_imports.py"}),
        ("tests/conftest.py", {"tests"}),
        ("tests/file/test_damage.py", {"tests/file/test_damage.py"}),
        ("tests/file/test_of_a_deleted_name.py", set()),
        ("spec/codecs/group.md", {"tests/spec"}),
        ("README.md", {"tests/test_readme.py"}),
    ],
)
def test_the_tests_of_a_path_are_those_expected(file: str, expected: set[str]) -> None:
    assert covering_tests(file) == expected


def test_kernels_require_the_tests_of_their_language() -> None:
    of_c, of_triton = covering_tests("kernels/cpu/group.h"), covering_tests("kernels/loaders/group.py")
    assert "tests/kernels/test_cpu_attend.py" in of_c
    assert "tests/kernels/test_attention.py" in of_triton
    assert not of_c & of_triton


def test_a_support_module_requires_all_tests_that_import_it() -> None:
    found = covering_tests("tests/support/second_decoder.py")
    assert "tests/spec/test_decoder.py" in found
    assert "tests/spec/test_vectors.py" in found, "it imports the module through vector_checks"


def test_changes_include_those_since_main_and_uncommitted_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *words], cwd=tmp_path, check=True, capture_output=True)

    def write(*names: str) -> None:
        for name in names:
            (tmp_path / name).write_text(name, encoding="utf-8")

    git("init", "-b", "main")
    write("same", "deleted", "edited", ".gitignore")
    git("add", ".")
    git("commit", "-m", "a")
    git("checkout", "-b", "branch")
    write("committed")
    git("add", ".")
    git("rm", "deleted")
    git("commit", "-m", "b")
    (tmp_path / "edited").write_text("other", encoding="utf-8")
    write("untracked")
    monkeypatch.setattr(touched, "ROOT", tmp_path)
    assert changed_files() == ["committed", "deleted", "edited", "untracked"]
    assert changed_files("HEAD") == ["edited", "untracked"]
