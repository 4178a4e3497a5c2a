"""Checks of commands' output files. They must not be inputs, and existing files are replaced only with ``--force``."""

from __future__ import annotations

import argparse
import os

from kvpack.file.atomic import check_output_path
from kvpack.formats.errors import InvalidParameter

_MODEL_SUFFIXES = (".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model", ".py", "merges.txt", "vocab.txt")
"""Suffixes of files that belong to a model or its tokenizer."""


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--force``, which all commands that write files have."""
    parser.add_argument("--force", action="store_true", help="replace the output file if it exists")


def check_output(arguments: argparse.Namespace, output: str, *inputs: str | None) -> None:
    """Check that ``output`` can be a new file, and that writing it destroys no input or existing file. Call this before any work.

    Inputs may be folders, such as a store, and recipes may be files (``@FILE`` or ``FILE``). Raises InvalidParameter if the output is an
    input or is inside one, even through a link, or if it exists and ``--force`` is not set, and WriteFailed if it cannot be written. In a
    model's folder (``arguments.model``), only the model's own files count as inputs.
    """
    check_output_path(output)
    if not os.path.exists(output):
        return
    for path in filter(None, inputs):
        for name in (path, path.partition(";")[0].removeprefix("@")):
            if os.path.isfile(name) and os.path.samefile(name, output):
                raise InvalidParameter(f"{output} is an input of this command: write to another path")
    target = os.path.realpath(output)
    folders = [path for path in inputs if path and os.path.isdir(path)]
    model = getattr(arguments, "model", None)
    if model and os.path.isdir(model) and os.path.basename(target).endswith(_MODEL_SUFFIXES):
        folders.append(model)
    for folder in folders:
        if os.path.commonpath((os.path.realpath(folder), target)) == os.path.realpath(folder):
            raise InvalidParameter(f"{output} is in the folder {folder}, which is an input of this command: write to another path")
    if not arguments.force:
        raise InvalidParameter(f"{output} already exists: write to another path, or replace it with --force")
