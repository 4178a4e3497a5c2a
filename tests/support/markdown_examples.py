"""Run the fenced code blocks of a Markdown file from top to bottom, and compare their output with that in the file.

- ``python`` blocks share one namespace. A block whose first line is a comment with only the name of a file, such as
  ``# continue.py``, is written to that file instead of being run.
- ``sh`` blocks run in bash, with the ``python`` and ``kvpack`` of this environment.
- A ``text`` block is the expected output of the block before it. "..." matches anything, and amounts of whitespace do not matter, nor does
  the length of rules under table headings, because columns are as wide as their contents.
- Blocks in other languages are ignored.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from support import warm_python

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE_NAME = re.compile(r"# ([\w-]+\.\w+)\n")
_MODULE = "markdown_examples_of_a_file"
_RULE = re.compile("─+")
_HUB_MODEL = "HuggingFaceTB/"
_NUMBERS = re.compile(r"\b(?:sha256:\w+|(?!0 of )\d[\d,.]*\d|(?!0 of )\d)")
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block. Its ``text`` begins at ``line`` of the file ``path``."""

    path: Path
    line: int
    language: str
    text: str

    def run(self, names: dict[str, Any]) -> str:
        """Run the block in the current folder with the namespace ``names`` and return its output."""
        if self.language == "sh":
            return self._run_in_bash()
        named = _FILE_NAME.match(self.text)
        if named:
            Path(named[1]).write_text(self.text, encoding="utf-8")
            return ""
        # Prepend empty lines, so that tracebacks show line numbers of the Markdown file.
        code = compile("\n" * (self.line - 1) + self.text, str(self.path), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(code, names)
        return output.getvalue()

    def _run_in_bash(self) -> str:
        path = f"{warm_python.commands(*warm_python.TRANSFORMERS)}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", "-euo", "pipefail", "-c", self.text]
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{self.path}:{self.line}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a file, in order."""
    text = path.read_text(encoding="utf-8")
    return [Block(path, text.count("\n", 0, found.start(2)) + 1, found[1], found[2]) for found in _FENCE.finditer(text)]


def run_examples(path: Path, *, has_hub_model: bool = True) -> None:
    """Run the blocks of a file in the current folder, and compare their output with that in the file.

    Unless ``has_hub_model`` is True, another model takes the place of the one on the hub. It gives other numbers, so on pages that use that
    model only a number of 0 tokens is compared.
    """
    # Dataclasses look up their module by name.
    module = sys.modules[_MODULE] = ModuleType(_MODULE)
    try:
        _run_blocks(path, module.__dict__, has_hub_model)
    finally:
        del sys.modules[_MODULE]


def _run_blocks(path: Path, names: dict[str, Any], has_hub_model: bool) -> None:
    found = blocks(path)
    has_other_numbers = not has_hub_model and _HUB_MODEL in path.read_text(encoding="utf-8")
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block.language not in ("python", "sh"):
            continue
        shown = following.text if following is not None and following.language == "text" else ""
        if has_other_numbers:
            shown = _NUMBERS.sub("...", shown)
        printed = block.run(names)
        assert doctest.OutputChecker().check_output(_RULE.sub("─", shown), _RULE.sub("─", printed), _FLAGS), (
            f"{path}:{block.line} prints\n{printed}\nbut the file shows\n{shown}"
        )
