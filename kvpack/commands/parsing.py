"""A command-line parser whose errors contain the unknown word and the closest known word."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A command-line parser without abbreviations. Its errors contain the unknown word and the closest known word.

    ``hints`` maps options of other commands or programs to what to write instead.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.hints = {"--import": "write it before the command: kvpack --import MODULE COMMAND ..."}
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(sys.argv[1:] if args is None else args)
        result, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # Fail here rather than in the outer parser, whose usage has none of this command's options.
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return result, unknown

    def error(self, message: str) -> NoReturn:
        super().error(_unknown_option_message(self, self._words) or message + _similar_command(self, self._words))


def _unknown_option_message(parser: Parser, words: Sequence[str]) -> str | None:
    """Return a message about the first of ``words`` that looks like an option but is unknown to this parser, or None."""
    options = {option[2:] for action in parser._actions for option in action.option_strings if option.startswith("--")}
    has_commands = _commands(parser) is not None
    for word in words:
        name = word.partition("=")[0]
        if word == "--" or (has_commands and not word.startswith("-")):
            return None
        # argparse reads words with spaces as values.
        if name.startswith("--") and name[2:] not in options and " " not in name:
            hint = parser.hints.get(name) or "".join(f"did you mean --{close}?" for close in _similar_words(name[2:], options))
            return f"unknown option {name}" + (f"; {hint}" if hint else "")
    return None


def _similar_command(parser: Parser, words: Sequence[str]) -> str:
    """Return a suggestion if the first word that is not an option is no command of this parser, otherwise an empty string."""
    commands = _commands(parser)
    word = next((word for word in words if not word.startswith("-")), None)
    if commands is None or word is None or word in commands.choices:
        return ""
    return "".join(f" (did you mean {close}?)" for close in _similar_words(word, commands.choices))


def _commands(parser: Parser) -> Any:
    """Return the action that selects a command, or None if the parser has no commands."""
    return next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)


def _similar_words(word: str, candidates: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(word, list(candidates), 1)
