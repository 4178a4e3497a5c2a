"""kvpack verify: check every byte of files."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from kvpack.errors import KvpackError, worst_exit_code
from kvpack.output import add_json, format_count, print_json, printable_lines, progress

from .convert import add_basis_option


def add_command(commands: Any) -> None:
    parser = commands.add_parser("verify", help="check every byte of files", description="Check every byte of kvpack files.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="a kvpack file or basis")
    parser.add_argument(
        "--clean",
        action="store_true",
        help="also remove unfinished files of killed writers from the folders of the files; FILE may then be a folder, which is only "
        "cleaned",
    )
    add_basis_option(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify all files. Returns the worst exit code of the rejected files (``kvpack.errors``)."""
    from kvpack.coding.inspection import verify

    codes: list[int] = []
    results: list[dict[str, Any]] = []
    folders: dict[str, None] = {}
    for path in arguments.files:
        if arguments.clean:
            is_folder = os.path.isdir(path)
            folders[path if is_folder else os.path.dirname(os.path.realpath(path))] = None
            if is_folder:
                continue
        try:
            with progress(path) as callback:
                report = verify(path, basis=arguments.basis, progress=callback)
            results.append({"file": path, "ok": True, "bytes": report["bytes"], "needs_basis": report["needs_basis"]})
            checked = "all checked except what needs the basis" if report["needs_basis"] else "all checked"
            line = f"{path}: {report['bytes']:,} bytes, {format_count(report['layers'], 'layer')}, {checked}"
        except KvpackError as error:
            codes.append(error.exit_code)
            results.append({"file": path, "ok": False, "error": type(error).__name__, "message": str(error)})
            print(f"kvpack: {printable_lines(str(error))}", file=sys.stderr)
            continue
        if not arguments.json:
            print(printable_lines(line))
    for folder in folders:
        results.append(_remove_unfinished(folder, arguments))
    if arguments.json:
        print_json(results)
    return worst_exit_code(codes)


def _remove_unfinished(folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Remove the unfinished files of dead writers from ``folder``. Returns the removed and the remaining files for the report."""
    from kvpack.file.atomic import remove_dead

    removed, remaining = remove_dead(folder)
    if not arguments.json:
        for path in removed:
            print(printable_lines(f"{path}: removed, because its writer was killed"))
        for path in remaining:
            print(printable_lines(f"{path}: kept, because a process may be writing it; if none is, delete it yourself"))
        print(f"{printable_lines(folder)}: {format_count(len(removed), 'unfinished file')} removed")
    return {"folder": folder, "removed": removed, "kept": remaining}
