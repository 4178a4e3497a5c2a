"""Output files of commands: never one of the inputs, and existing files only with ``--force``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    import argparse


_MODEL_SUFFIXES = (".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model", ".py", "merges.txt", "vocab.txt")
"""Endings of the names of a model's files and its tokenizer's."""


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--force`` of every command that writes a file."""
    parser.add_argument("--force", action="store_true", help="replace the output file if it exists")


def check_output(arguments: argparse.Namespace, output: str, *inputs: str | None) -> None:
    """Check, before any work, that writing ``output`` loses nothing.

    An input may be a folder, such as a store, and a recipe may name a file, as ``@FILE`` or ``FILE``. Raises InvalidParameter if the
    output is one of the inputs or a file in one, also through a link, or if it is an existing file and ``--force`` was not given. Of a
    model's folder (``arguments.model``), only the model's own files count.
    """
    # Folders, devices and pipes are refused when the file is written.
    if not os.path.isfile(output):
        return
    for path in filter(None, inputs):
        for name in (path, path.partition(";")[0].removeprefix("@")):
            if os.path.isfile(name) and os.path.samefile(name, output):
                raise InvalidParameter(f"{output}: is an input of this command; write to another path")
    target = os.path.realpath(output)
    folders = [path for path in inputs if path and os.path.isdir(path)]
    model = getattr(arguments, "model", None)
    if model and os.path.isdir(model) and os.path.basename(target).endswith(_MODEL_SUFFIXES):
        folders.append(model)
    for folder in folders:
        if os.path.commonpath((os.path.realpath(folder), target)) == os.path.realpath(folder):
            raise InvalidParameter(f"{output}: is in the folder {folder}, an input of this command; write to another path")
    if not arguments.force:
        raise InvalidParameter(f"{output}: exists already; write to another path, or replace it with --force")
