"""The kvpack command line: the parser, the list of commands, which kvpack/commands/ implements, and error handling."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, TextIO

from . import KvpackError, __version__, backends
from .commands import (
    bench,
    cache,
    calibrate,
    convert,
    demo,
    dense,
    doctor,
    exchange,
    generate,
    inspect,
    recipes,
    store,
    tune,
    verify,
    view,
    warm,
)
from .errors import InvalidParameter, KvpackWarning, RoundedWarning
from .output import printable_lines


class Parser(argparse.ArgumentParser):
    """A command-line parser without abbreviations. Its errors contain the unknown word and the most similar known word.

    ``hints`` maps options of other commands or programs to advice on what to write instead. The help text ends with the command's example.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.hints = {"--import": "write it before the command: kvpack --import MODULE COMMAND ..."}
        self._words: list[str] = []

    def format_help(self) -> str:
        example = EXAMPLES.get(self.prog.removeprefix("kvpack "))
        return super().format_help() + (f"\nexample:\n  {self.prog} {example}\n" if example else "")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(sys.argv[1:] if args is None else args)
        result, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # Fail here rather than in the outer parser, whose usage has none of this command's options.
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return result, unknown

    def error(self, message: str) -> NoReturn:
        super().error(printable_lines(_unknown_option_message(self, self._words) or message + _similar_command(self, self._words)))


def _unknown_option_message(parser: Parser, argv: Sequence[str]) -> str | None:
    """Return a message about the first option in ``argv`` that is unknown to this parser, or None if there is none."""
    options = {option[2:] for action in parser._actions for option in action.option_strings if option.startswith("--")}
    has_commands = _command_action(parser) is not None
    for word in argv:
        name = word.partition("=")[0]
        if word == "--" or (has_commands and not word.startswith("-")):
            return None
        # argparse reads words with spaces as values.
        if name.startswith("--") and name[2:] not in options and " " not in name:
            hint = parser.hints.get(name) or "".join(f"did you mean --{close}?" for close in _similar_words(name[2:], options))
            return f"unknown option {name}" + (f"; {hint}" if hint else "")
    return None


def _similar_command(parser: Parser, argv: Sequence[str]) -> str:
    """Return a suggestion if the first word in ``argv`` that is not an option is an unknown command, or an empty string otherwise."""
    commands = _command_action(parser)
    word = next((word for word in argv if not word.startswith("-")), None)
    if commands is None or word is None or word in commands.choices:
        return ""
    return "".join(f" (did you mean {close}?)" for close in _similar_words(word, commands.choices))


def _command_action(parser: Parser) -> Any:
    """Return the parser's action that selects a command, or None if it has no commands."""
    return next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)


def _similar_words(word: str, candidates: Iterable[str]) -> list[str]:
    """Return a list with only the candidate most similar to ``word``, or an empty list if none is similar.

    Prefers candidates whose hyphen-separated parts include all parts of ``word``, or vice versa.
    """
    parts = set(word.split("-"))
    nested = [other for other in candidates if parts <= (others := set(other.split("-"))) or others <= parts]
    return difflib.get_close_matches(word, nested or list(candidates), 1, 0.0 if nested else 0.6)


COMMANDS = (cache, generate, inspect, view, verify, convert, dense, exchange, recipes, doctor, warm, demo, bench, calibrate, tune, store)
"""Command modules in the order of the help text. Each has a function ``add``."""
EXAMPLES = {
    "bench attend": "--tokens 16384 --recipe kvpack-4",
    "bench io": "--recipe kvpack-4 --recipe fp8",
    "bench kernels": "--shape B --recipe kvpack-4",
    "bench quality": "--model Qwen/Qwen3-0.6B --text notes.txt --recipe kvpack-3 --max-kl 0.01",
    "bench serve": "--shape llama-3-8b --recipe kvpack-4 --decode 8x16384",
    "bench store": "--recipe kvpack-4 --chunks 16",
    "cache": "--model Qwen/Qwen3-0.6B --prompt-file notes.txt --out notes.kvpack",
    "calibrate": "--model Qwen/Qwen3-0.6B --text notes.txt --out notes.kvbasis",
    "convert": "notes.kvpack smaller.kvpack kvpack-2",
    "demo": "--recipe kvpack-4",
    "export": "notes.kvpack prompt.safetensors --to mlx-lm",
    "generate": "notes.kvpack --prompt 'What is it about?' --max-tokens 60",
    "import": "prompt.safetensors notes.kvpack --recipe kvpack-4",
    "inspect": "*.kvpack",
    "pack": "notes.safetensors notes.kvpack --recipe kvpack-4",
    "recipes": "kvpack-4 kvpack-3 --model Qwen/Qwen3-0.6B --tokens 32768",
    "store export": "prefixes 3f2a prefix.kvpack",
    "store gc": "prefixes --max-bytes 50GB",
    "store import": "prefixes prefix.kvpack --trust-names",
    "store rm": "prefixes --older-than 7d --dry-run",
    "tune": "--model Qwen/Qwen3-0.6B --text notes.txt --bits 3 --widths",
    "unpack": "notes.kvpack notes.safetensors",
    "verify": "*.kvpack",
    "view": "notes.kvpack --open",
    "warm": "kvpack-4 --dim 128 --capability 90",
}
"""An example of each command that needs one."""
EXIT_CODES = {
    0: "done",
    1: "a file was rejected, or a check failed",
    2: "the request is invalid",
    3: "a system error: no such file, no space, no memory",
    130: "interrupted",
    141: "the reading end of a pipe was closed",
}
"""Meaning of each exit code. A command for several files exits with the worst one (``kvpack.errors.WORST_FIRST``)."""
SYSTEM_REFUSED = 3
INTERRUPTED = 130
BROKEN_PIPE = 141


class _Version(argparse.Action):
    """The option ``--version``: print the version and each device's backend."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print("\n".join([f"kvpack {__version__}", *(f"{device}: {words}" for device, words in backends().items())]))
        parser.exit()


class _Import(argparse.Action):
    """The option ``--import MODULE``: register the codecs of a user's module."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, option_string: str | None = None) -> None:
        if value.endswith(".py") or not all(map(str.isidentifier, value.split("."))):
            raise InvalidParameter(
                f"--import is {value!r}, expected the name of a module, such as acme for acme.py: run kvpack in the module's folder, or "
                "add that folder to PYTHONPATH"
            )
        # Unlike python -m kvpack, the installed command does not look in the current folder.
        sys.path.append("")
        try:
            importlib.import_module(value)
        except ModuleNotFoundError as error:
            if error.name != value:
                raise
            raise InvalidParameter(
                f"--import is {value!r}, which is neither in the current folder nor installed: run kvpack in the module's folder, or "
                "add that folder to PYTHONPATH"
            ) from None


def parser() -> argparse.ArgumentParser:
    result = Parser(
        prog="kvpack",
        description="Compressed KV caches as files.",
        epilog="exit codes:\n" + "\n".join(f"  {code:<3}  {meaning}" for code, meaning in EXIT_CODES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--version", action=_Version, help="show the version and the kernels of each device, and exit")
    result.add_argument(
        "--import", action=_Import, metavar="MODULE", help="first import this Python module, which registers your own codecs"
    )
    commands = result.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_command(commands)
    return result


def main(argv: Sequence[str] | None = None, parser: Callable[[], argparse.ArgumentParser] = parser) -> int:
    """Parse and run one command, and return its exit code.

    The exit code is 0, the error's ``exit_code``, 130 after Ctrl-C, or 141 after a closed pipe. An error's message is printed to standard
    error as ``kvpack: <message>``, with control characters escaped.
    """
    # sys.stdout and sys.stderr are None if the caller closed the descriptors.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(parser, argv)
        finally:
            # Flush here, also after --help, so that a failed write is reported once and not again when the interpreter exits.
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output(sys.stdout, sys.stderr)
        return BROKEN_PIPE
    except OSError as error:
        _discard_output(sys.stdout)
        with contextlib.suppress(OSError):
            _print_error(str(error))
        return SYSTEM_REFUSED


def _run(parser: Callable[[], argparse.ArgumentParser], argv: Sequence[str] | None) -> int:
    try:
        arguments = parser().parse_args(argv)
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            code: int = arguments.run(arguments)
    except KvpackError as error:
        _print_error(str(error))
        return error.exit_code
    except MemoryError:
        _print_error("out of memory")
        return SYSTEM_REFUSED
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _print_error("this command needs PyTorch, which is not installed: pip install torch")
        return SYSTEM_REFUSED
    return code


def _print_error(message: str) -> None:
    # Parts of a message may come from a file.
    print(f"kvpack: {printable_lines(message)}", file=sys.stderr)


def _show_warning(show: Callable[..., None], message: Warning | str, category: type[Warning], *place: Any) -> None:
    """Print kvpack's own warnings as one line, and pass all other warnings to ``show``."""
    if issubclass(category, RoundedWarning | KvpackWarning):
        _print_error(f"warning: {message}")
    else:
        show(message, category, *place)


def _discard_output(*streams: TextIO) -> None:
    """Discard buffered output that could not be written. Otherwise, the interpreter would try to write it again at exit."""
    for stream in streams:
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
