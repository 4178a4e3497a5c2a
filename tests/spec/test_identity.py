"""Statements in spec/identity.md about every file, and the entry for file(1), hold for real files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SPEC = Path(__file__).parents[2] / "spec"
PAGE = (SPEC / "identity.md").read_text(encoding="utf-8")
FILES = sorted((SPEC / "vectors" / "valid").glob("*.kvpack"))


def test_every_valid_vector_has_the_magic_of_the_page() -> None:
    hexadecimal, text = PAGE.partition("```text\n")[2].partition("\n```")[0].splitlines()
    assert bytes.fromhex(hexadecimal) == text.encode()
    assert f"these {len(text)} bytes" in PAGE
    assert FILES
    assert all(path.read_bytes()[8:].startswith(text.encode()) for path in FILES)


@pytest.mark.skipif(shutil.which("file") is None, reason="file(1) is not installed")
def test_file_recognizes_kvpack_and_nothing_else(tmp_path: Path) -> None:
    def said(path: Path, *options: str) -> str:
        command = ["file", "--brief", "--magic-file", str(SPEC / "kvpack.magic"), *options, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert said(FILES[0]) == "kvpack KV cache, version 1"
    assert said(FILES[0], "--mime-type") == "application/vnd.kvpack"
    later = tmp_path / "later"
    later.write_bytes(FILES[0].read_bytes().replace(b'"kvpack":"1 ', b'"kvpack":"27 ', 1))
    assert said(later) == "kvpack KV cache, version 27"
    other = tmp_path / "other.safetensors"
    other.write_bytes(FILES[0].read_bytes().replace(b'"format":"kvpack"', b'"format":"pt"', 1))
    assert "kvpack" not in said(other)
