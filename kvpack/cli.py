"""kvpack, the command line: what each command is called; what it does is in kvpack/commands/."""

from __future__ import annotations

import argparse
import io
import os
import sys
from typing import TYPE_CHECKING

from kvpack import KvpackError, __version__
from kvpack.commands import bench, convert, demo, dense, inspect, verify

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130
BROKEN_PIPE = 141


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    result = argparse.ArgumentParser(prog="kvpack", description="Compressed KV caches as files.", allow_abbrev=False)
    result.add_argument("--version", action="version", version=f"kvpack {__version__}")
    commands = result.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (inspect, verify, convert, dense, demo, bench):
        command.add(commands)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, the error's ``exit_code``, 130 after Ctrl-C, 141 when the reader of a pipe left.

    An error's message goes to standard error as ``kvpack: <message>``, the message that Python gives.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = parser().parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except KvpackError as error:
        print(f"kvpack: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered has no reader: without this, the interpreter reports the pipe again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code
