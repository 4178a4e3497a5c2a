"""Counting of lines of code and of calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import code_size


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\n\n# a comment\nx = 1  # another\n", 2),
        ('"""Module."""\n\n\ndef f():\n    """One line.\n\n    More.\n    """\n    return 1\n', 2),
        ('N = 3\n"""Of the constant."""\n', 1),
        ('TEXT = """a\n\nb"""\n', 3),
        ("f(\n    1,\n\n    2,\n)\n", 4),
    ],
)
def test_blank_lines_comments_and_docstrings_do_not_count_as_python_code(source: str, lines: int) -> None:
    assert code_size.python_lines(source) == lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("/* A comment\n   of two lines. */\nint x; // x\n\n", 1),
        ('char *s = "/* text */";\nint y; /* a\nb */ int z;\n', 3),
    ],
)
def test_blank_lines_and_comments_do_not_count_as_c_code(source: str, lines: int) -> None:
    assert code_size.c_lines(source) == lines


def test_calls_of_functions_in_the_package_are_counted(tmp_path: Path) -> None:
    (tmp_path / "formats").mkdir()
    path = tmp_path / "formats" / "module.py"
    path.write_text("def outer():\n    inner()\n    inner()\n\ndef inner():\n    len('')\n", encoding="utf-8")
    module: dict[str, object] = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module)
    outer = module["outer"]
    assert callable(outer)
    assert code_size.trace(lambda: (outer(), Path("a").name), tmp_path) == (2, 1, 3, 2)
