"""kvpack, the command line: what each command is called; what it does is in kvpack/commands/."""

from __future__ import annotations

import argparse
import io
import os
import sys
from typing import TYPE_CHECKING

from kvpack import KvpackError, __version__
from kvpack.commands import bench, convert, demo, dense, inspect, recipes, store, tune, verify
from kvpack.commands.output import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

SYSTEM_REFUSED = 3
INTERRUPTED = 130
BROKEN_PIPE = 141


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    result = argparse.ArgumentParser(prog="kvpack", description="Compressed KV caches as files.", allow_abbrev=False)
    result.add_argument("--version", action="version", version=f"kvpack {__version__}")
    commands = result.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (inspect, verify, convert, dense, recipes, demo, bench, tune, store):
        command.add(commands)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, the error's ``exit_code``, 130 after Ctrl-C, 141 when the reader of a pipe left.

    An error's message goes to standard error as ``kvpack: <message>``, the message that Python gives, control characters escaped.
    """
    # Python has no stream where the caller closed the descriptor.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = parser().parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except KvpackError as error:
        _complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        _drop_output()
        _complain(error)
        return SYSTEM_REFUSED
    return code


def _complain(error: Exception) -> None:
    # Names in a message may be a file's.
    print("kvpack: " + "\n".join(map(printable, str(error).split("\n"))), file=sys.stderr)


def _drop_output() -> None:
    """What is still buffered cannot be written: without this, the interpreter tries and reports it again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
