"""Output files of commands: never one of the inputs, and an existing file only with ``--force``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    import argparse


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add the option of every command that writes a file."""
    parser.add_argument("--force", action="store_true", help="replace the output file if it exists")


def check_output(arguments: argparse.Namespace, output: str, *inputs: str | None) -> None:
    """Check, before any work, that writing ``output`` loses nothing.

    A recipe in ``inputs`` may name a file, as ``@FILE`` or ``FILE``. Raises InvalidParameter if the output is one of the inputs, also
    through a link, or if it is an existing file and ``--force`` was not given.
    """
    # Folders, devices and pipes are refused when the file is written.
    if not os.path.isfile(output):
        return
    for path in filter(None, inputs):
        for name in (path, path.partition(";")[0].removeprefix("@")):
            if os.path.isfile(name) and os.path.samefile(name, output):
                raise InvalidParameter(f"{output}: is an input of this command; write to another path")
    if not arguments.force:
        raise InvalidParameter(f"{output}: exists already; write to another path, or replace it with --force")
