"""kvpack verify: check every byte of files."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvpack.errors import KvpackError, worst_exit_code
from kvpack.output import add_json, print_json, progress

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """Add ``verify`` to the command line."""
    parser = commands.add_parser("verify", help="check every byte of files", description="Check every byte of kvpack files.")
    parser.add_argument("files", nargs="+", metavar="FILE")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify all files, and return the worst exit code of those that are refused (``kvpack.errors``)."""
    from kvpack.file.container import open_file

    codes, results = [], []
    for path in arguments.files:
        try:
            with progress(path, arguments) as callback, open_file(path) as file:
                file.verify(callback)
                results.append({"file": path, "ok": True, "bytes": file.size})
                line = f"{path}: {file.size:,} bytes, {len(file.header.layers)} layers, all checked"
        except KvpackError as error:
            codes.append(error.exit_code)
            results.append({"file": path, "ok": False, "error": type(error).__name__, "message": str(error)})
            print(f"kvpack: {error}", file=sys.stderr)
            continue
        if not arguments.json:
            print(line)
    if arguments.json:
        print_json(results)
    return worst_exit_code(codes)
