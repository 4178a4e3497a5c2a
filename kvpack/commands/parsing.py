"""A command-line parser that suggests the closest known word."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Parser(argparse.ArgumentParser):
    """A command-line parser without abbreviations, whose errors suggest similar words."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(message + "".join(f" (did you mean {close}?)" for close in _suggestions(self, self._words)))


def _suggestions(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    """Yield the closest command or option for each of ``words`` that is unknown to the parser and to the command's parser."""
    options = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
    commands = next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)
    for number, word in enumerate(words):
        name = word.partition("=")[0]
        if word == "--":
            return
        if name.startswith("--"):
            if name not in options:
                yield from difflib.get_close_matches(name, options, 1)
        elif commands is not None:
            if word in commands.choices:
                yield from _suggestions(commands.choices[word], words[number + 1 :])
            else:
                yield from difflib.get_close_matches(word, list(commands.choices), 1)
            return
