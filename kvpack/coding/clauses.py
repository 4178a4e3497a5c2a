"""Parsing of the clauses of a recipe that select codecs, and errors for invalid clauses."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from kvpack.formats import CODECS
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.options import InvalidOption

from .presets import ADDITIONS, PUBLISHED
from .rules import CALIBRATED, CHECKED_DIM, Rule, check_basis_option

_CLAUSES = ("k", "v", "kv", "layers", "raw", "window", "tail")
"""Keywords that begin a clause, before its first "="."""


class InvalidClause(InvalidParameter):
    """An invalid clause of a recipe. ``reason`` is the message without the recipe, and ``word`` is the invalid part."""

    def __init__(self, text: str, clause: str, word: str, reason: str) -> None:
        super().__init__(f"recipe {text!r}: {reason}{underline(text, word, max(0, text.find(clause)))}")
        self.clause, self.word, self.reason = clause, word, reason


def underline(text: str, word: str, start: int = 0) -> str:
    """Return two lines to append to a message: ``text``, with ``word`` underlined. If ``text`` does not contain ``word``, return an empty
    string.
    """
    column = text.find(word, start)
    return f"\n  {text}\n  {' ' * column}{'^' * len(word)}" if word and column >= 0 else ""


def parse_rule(clause: str, written: str, text: str, presets: Mapping[str, str]) -> Rule:
    """Parse ``clause`` into a rule.

    ``written`` is the clause as it appears in the recipe ``text``. ``presets`` maps names of presets and additions to recipe texts.
    """
    items, body = None, clause
    if clause.startswith("layers="):
        listed, colon, body = clause.removeprefix("layers=").partition(":")
        if not colon:
            reject_word(text, clause, clause, "a layers clause has no codec: write layers=<list>:<k, v or kv>=<codec>")
        items = tuple(_parse_layer_range(item, clause, text) for item in listed.split(","))
    sides, equals, codec = body.partition("=")
    if not equals or sides not in ("k", "v", "kv"):
        word = sides if equals else body
        expected = "a preset, such as kvpack-4 (kvpack recipes lists them), or a clause of k=, v=, kv=, layers=, raw= or window="
        if word.startswith("@"):
            expected = "text: kvpack.pack, kvpack.load and Cache.convert read a recipe file, as '@FILE' or as a Path"
        elif "," in word and word.partition(",")[0] in presets:
            reject_word(text, word, clause, f"unknown word {word!r}; semicolons separate clauses: write {clause.replace(',', ';')!r}")
        elif body.partition(":")[0] in CODECS:
            reject_word(text, body, clause, f"{body!r} is a codec, which needs the side that it encodes: write 'kv={body}', or k= or v=")
        reject_word(text, word, clause, f"unknown word {word!r}; expected {expected}", [*PUBLISHED, *ADDITIONS, "raw", "tail", "layers"])
    codec_id, _, options = codec.partition(":")
    if codec_id not in CODECS:
        known = sorted(CODECS)
        if codec_id in presets:
            reject_word(text, codec_id, clause, f"unknown codec {codec_id!r}: {_replacement_clause(codec_id, body, clause, presets)}")
        expected = f"expected one of {', '.join(known)}, or one of your own after its import (kvpack --import MODULE ...)"
        reject_word(text, codec_id or body, clause, f"unknown codec {codec_id!r}; {expected}", known)
    words: dict[str, str] = {}
    for option in options.split(",") if options else []:
        name, equals, value = option.partition("=")
        if not equals:
            reject_word(text, option or codec, clause, f"option {option!r} of codec {codec_id} must be written <name>=<value>")
        if name in words:
            reject_word(text, option, clause, f"option {name!r} of codec {codec_id} is given twice, as {words[name]!r} and {value!r}")
        words[name] = value
    rule = Rule(sides, codec_id, tuple(words.items()), items, written)
    try:
        if codec_id in CALIBRATED:
            _ = rule.bits
        if rule.needs_basis:
            check_basis_option(codec_id, words)
        for side in sides:
            rule.codec(CHECKED_DIM, side)
    except InvalidOption as error:
        name = error.word.partition("=")[0]
        if name in _CLAUSES and name in words and f",{error.word}" in clause:
            example = clause.replace(f",{error.word}", f";{error.word}", 1)
            reject_word(text, error.word, clause, f"{name}= begins a clause, and semicolons separate clauses: write {example!r}")
        reject_word(text, error.word, clause, str(error))
    except InvalidParameter as error:
        reject_word(text, codec, clause, str(error))
    return rule


def _replacement_clause(preset: str, body: str, clause: str, presets: Mapping[str, str]) -> str:
    """Return advice on how to write a clause that names a preset instead of a codec. ``body`` is the clause without its layers."""
    sides, reason = body.partition("=")[0], "it is a preset, which selects the codecs of keys and values"
    parts = [part.partition("=") for part in presets[preset].split(";")]
    layers = clause.removesuffix(body)
    codecs = [
        f"{layers}{sides if name == 'kv' else name}={codec}" for name, _, codec in parts if name == "kv" or (name and name in sides)
    ]
    if not codecs or (sides == "kv" and not layers):
        return f"{reason}: write {preset!r} as a clause"
    raw = next((f", and add the clause 'raw={value}'" for name, _, value in parts if name == "raw"), "")
    return f"{reason}: write {';'.join(codecs)}{raw}"


def _parse_layer_range(item: str, clause: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(-?[0-9]{1,9})(?:-(-?[0-9]{1,9}))?", item)
    if match is None:
        reject_word(text, item or "layers=", clause, f"layer {item!r} must be an integer or a range first-last")
    first, last = int(match[1]), int(match[2] if match[2] is not None else match[1])
    if last < first and (first < 0) == (last < 0):
        reject_word(text, item, clause, f"the range {item} ends before it begins: write {last}-{first}")
    return first, last


def reject_word(text: str, word: str, clause: str, message: str, candidates: Sequence[str] = ()) -> NoReturn:
    """Raise InvalidClause about ``word`` in ``clause``, and suggest the most similar of ``candidates``."""
    close = difflib.get_close_matches(word.lower(), candidates, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise InvalidClause(text, clause, word, f"{message}{hint}")
