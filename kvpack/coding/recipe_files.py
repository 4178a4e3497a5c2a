"""Reading of recipe files, which contain recipes as text, with one or more clauses per line. ``#`` begins a comment.

    # keys of the first layers are the sensitive ones
    k=octahedral:b=3
    v=group:b=3,g=32
    layers=0-3:k=octahedral:b=4

A recipe refers to a file as ``@path``, optionally followed by more clauses: ``@tuned.txt;window=32``. The ``@`` is optional if the text
contains a ``/``, ends in ``.txt`` or is the path of an existing file. A preset's name always means the preset.
"""

from __future__ import annotations

import os
from collections.abc import Container

from kvpack.file.user_files import read_text
from kvpack.formats.errors import InvalidParameter, LimitExceeded

SUFFIX = ".txt"
MAX_FILE_BYTES = 1 << 16
"""Maximum size of a recipe file in bytes. The recipe itself, without comments, has a smaller limit (kvpack/file/limits.py)."""


def split_path(recipe: str | os.PathLike[str], presets: Container[str]) -> tuple[str, str] | None:
    """Split ``recipe`` into the path of a recipe file and the clauses after it. Returns None if ``recipe`` does not name a recipe file."""
    if not isinstance(recipe, str):
        return os.fsdecode(recipe), ""
    if recipe.startswith("@"):
        path, _, clauses = recipe[1:].partition(";")
        return path, clauses
    text = recipe.strip()
    if not text or text in presets or "\0" in text or any(sign in text for sign in "=;\n"):
        return None
    return (text, "") if "/" in text or text.endswith(SUFFIX) or os.path.isfile(text) else None


def read_clauses(path: str, presets: Container[str]) -> list[tuple[int, str]]:
    """Return the clauses of a recipe file as (line number from 1, clause) pairs.

    Raises MissingFile if the file does not exist, and InvalidParameter if it is too large, is not UTF-8, contains no clause, or names
    another recipe file.
    """
    try:
        lines = read_text(path, MAX_FILE_BYTES, "a recipe file").splitlines()
    except (LimitExceeded, InvalidParameter) as error:
        raise InvalidParameter(str(error)) from None
    clauses = [(number, clause.strip()) for number, line in enumerate(lines, 1) for clause in line.partition("#")[0].split(";")]
    result = [(number, clause) for number, clause in clauses if clause]
    if not result:
        raise InvalidParameter(f"{path} is a recipe file without clauses: add at least one, such as kv=octahedral:b=3")
    for number, clause in result:
        if split_path(clause, presets) is not None:
            raise InvalidParameter(f"{path}, line {number}: {clause!r}: a recipe file cannot include another: copy its clauses instead")
    return result
