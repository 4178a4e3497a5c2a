"""kvpack, the command line: what each command is called; what it does is in kvpack/commands/."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from kvpack import KvpackError, RoundedWarning, __version__

from .commands import bench, convert, demo, dense, inspect, recipes, store, tune, verify
from .output import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMMANDS = (inspect, verify, convert, dense, recipes, demo, bench, tune, store)
"""The commands in the order of the help text; each module has ``add``."""
SYSTEM_REFUSED = 3
INTERRUPTED = 130
BROKEN_PIPE = 141


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    result = argparse.ArgumentParser(prog="kvpack", description="Compressed KV caches as files.", allow_abbrev=False)
    result.add_argument("--version", action="version", version=f"kvpack {__version__}")
    commands = result.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
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
        try:
            return _run(argv)
        finally:
            # Here, and after --help too: what cannot be written is then reported once, not by the interpreter when it exits.
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop(sys.stdout, sys.stderr)
        return BROKEN_PIPE
    except OSError as error:
        _drop(sys.stdout)
        with contextlib.suppress(OSError):
            _complain(str(error))
        return SYSTEM_REFUSED


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = parser().parse_args(argv)
        with warnings.catch_warnings():
            warnings.showwarning = partial(_warn, warnings.showwarning)
            code: int = arguments.run(arguments)
    except KvpackError as error:
        _complain(str(error))
        return error.exit_code
    except MemoryError:
        _complain("there is not enough memory")
        return SYSTEM_REFUSED
    return code


def _complain(message: str) -> None:
    # Names in a message may be a file's.
    print("kvpack: " + "\n".join(map(printable, message.split("\n"))), file=sys.stderr)


def _warn(show: Callable[..., None], message: Warning | str, category: type[Warning], *place: Any) -> None:
    """Show a warning of kvpack's own as one line, any other as ``show`` does."""
    if issubclass(category, RoundedWarning):
        _complain(f"warning: {message}")
    else:
        show(message, category, *place)


def _drop(*streams: TextIO) -> None:
    """What is still buffered cannot be written: without this, the interpreter tries and reports it again when it exits."""
    for stream in streams:
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
