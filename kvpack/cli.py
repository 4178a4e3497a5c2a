"""The kvpack command line: names of the commands; kvpack/commands/ implements them."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from kvpack import KvpackError, __version__, backends
from kvpack.errors import RoundedWarning

from .commands import bench, cache, calibrate, convert, demo, dense, doctor, exchange, generate, inspect, recipes, store, tune, verify, view
from .commands.parsing import Parser
from .output import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMMANDS = (cache, generate, inspect, view, verify, convert, dense, exchange, recipes, doctor, demo, bench, calibrate, tune, store)
"""The commands in the order of the help text; each module has ``add``."""
EXIT_CODES = {
    0: "done",
    1: "a file was rejected, or a check failed",
    2: "the request is invalid",
    3: "a system error: no such file, no space, no memory",
    130: "interrupted",
    141: "the reading end of a pipe was closed",
}
"""Meaning of each exit code. A command with several files exits with the worst one (``kvpack.errors.WORST_FIRST``)."""
SYSTEM_REFUSED = 3
INTERRUPTED = 130
BROKEN_PIPE = 141


class _Version(argparse.Action):
    """Print the version and the backend of each kind of device, which is determined only on request."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print("\n".join([f"kvpack {__version__}", *(f"{device}: {words}" for device, words in backends().items())]))
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    result = Parser(
        prog="kvpack",
        description="Compressed KV caches as files.",
        epilog="exit codes:\n" + "\n".join(f"  {code:<3}  {meaning}" for code, meaning in EXIT_CODES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--version", action=_Version, help="show the version and the kernels of each device, and exit")
    commands = result.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return result


def main(argv: Sequence[str] | None = None, parser: Callable[[], argparse.ArgumentParser] = parser) -> int:
    """Run one command of ``parser`` and return its exit code: 0, the error's ``exit_code``, 130 after Ctrl-C, 141 after a closed pipe.

    An error's message goes to standard error as ``kvpack: <message>``: the Python message with control characters escaped.
    """
    # Python has no stream if the caller closed the descriptor.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(parser, argv)
        finally:
            # Flush here, also after --help: a failed write is then reported once, and not again when the interpreter exits.
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


def _run(parser: Callable[[], argparse.ArgumentParser], argv: Sequence[str] | None) -> int:
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
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _complain("this needs PyTorch, which is not installed: pip install torch")
        return SYSTEM_REFUSED
    return code


def _complain(message: str) -> None:
    # Names in a message may come from a file.
    print("kvpack: " + "\n".join(map(printable, message.split("\n"))), file=sys.stderr)


def _warn(show: Callable[..., None], message: Warning | str, category: type[Warning], *place: Any) -> None:
    """Show one of kvpack's own warnings as one line, and any other warning with ``show``."""
    if issubclass(category, RoundedWarning):
        _complain(f"warning: {message}")
    else:
        show(message, category, *place)


def _drop(*streams: TextIO) -> None:
    """Discard buffered output that cannot be written: otherwise the interpreter tries again when it exits and reports it."""
    for stream in streams:
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
