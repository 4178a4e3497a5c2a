"""Encoder options in a recipe's text that no header stores, such as norm_rule; a loaded cache needs them to encode more tokens.

The text comes from a file. It is searched rather than parsed, because parsing would build every codec that it names.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from kvpack.formats import CODECS
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.options import Options
from kvpack.formats.raw_positions import RawPositions
from kvpack.formats.side_cars import WithSideCars

from . import raw_clause
from .presets import ADDITIONS, PUBLISHED
from .recorded_presets import RECORDED

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

_CLAUSE = re.compile(r"(?:layers=([-0-9,]{1,4096}):)?(k|v|kv)=([a-z_]{1,32})(?::(.*))?", re.DOTALL)
_ITEM = re.compile(r"(-?[0-9]{1,9})(?:-(-?[0-9]{1,9}))?")

STEERING = {
    codec_id: frozenset(
        field.name
        for field in fields(codec)  # type: ignore[arg-type]
        if not field.metadata.get("stored", True) and field.metadata.get("steers", True)
    )
    for codec_id, codec in CODECS.items()
}
"""Options of each codec that affect only its encoder, by the name of their field."""

_NAMED = {name: preset.recipe for name, preset in (PUBLISHED | ADDITIONS).items()} | RECORDED

_WORDS = (raw_clause.PREFIX, *(f"{name}=" for name in sorted(frozenset(RawPositions.words).union(*STEERING.values()))))


def steered(codec: Codec, recipe: str, layer: int, layers: int, side: str) -> Codec:
    """Return ``codec`` of a header with the encoder options that the header's ``recipe`` sets for ``side`` of ``layer`` of ``layers``.

    A text that is not a recipe, or whose recipe selects another codec, changes nothing; both are valid in a file.
    """
    key = recipe, layer, layers, side
    if key not in codec.made:
        codec.made[key] = _steered(codec, recipe, layer, layers, side)
    created: Codec = codec.made[key]
    return created


def _steered(codec: Codec, recipe: str, layer: int, layers: int, side: str) -> Codec:
    given = _words(recipe, layer, layers, side, codec.id)
    words = {name: value for name, value in given.items() if name in STEERING.get(codec.id, ())}
    if words:
        with contextlib.suppress(InvalidParameter):
            codec = codec.with_family(replace(codec.family, **words))  # type: ignore[type-var]
    if isinstance(codec, WithSideCars) and not given.keys().isdisjoint(RawPositions.words):
        with contextlib.suppress(InvalidParameter):
            raw = RawPositions.of_words(codec.dim, side, Options(codec.id, given))
            # Side-cars are equal that choose other tokens.
            if raw is not None and raw in codec.side_cars:
                codec = codec.with_side_car(raw)
    return codec


@lru_cache(maxsize=1024)
def _words(recipe: str, layer: int, layers: int, side: str, codec_id: str) -> dict[str, str]:
    """Return the options of the last clause about ``side`` of ``layer``; empty if it names another codec."""
    result: dict[str, str] = {}
    for sides, items, named, options in _clauses(recipe):
        if side in sides and _covers(items, layer, layers):
            result = dict(option.partition("=")[::2] for option in options.split(",")) if named == codec_id else {}
    return result


@lru_cache(maxsize=16)
def _clauses(recipe: str) -> tuple[tuple[str, str, str, str], ...]:
    """Return (sides, layers, codec id, options) of every clause, with presets expanded; empty if nothing steers an encoder."""
    clauses: list[str] = []
    for text in recipe.split(";"):
        clauses += _NAMED.get(text.strip(), text.strip()).split(";")
    if not any(word in clause for clause in clauses for word in _WORDS):
        return ()
    raw = next((_raw_options(clause) for clause in reversed(clauses) if clause.startswith(raw_clause.PREFIX)), "")
    matches = [_CLAUSE.fullmatch(clause) for clause in clauses]
    return tuple((match[2], match[1] or "", match[3], _with_raw(match[4] or "", raw)) for match in matches if match)


def _raw_options(clause: str) -> str:
    """Return the options that a clause about raw tokens stands for; empty if it is not valid."""
    try:
        return ",".join(f"{name}={value}" for name, value in raw_clause.words_of(clause).items())
    except InvalidParameter:
        return ""


def _with_raw(options: str, raw: str) -> str:
    """Return a codec's ``options`` with those of the clause about raw tokens, unless the codec has its own."""
    has_own = any(option.partition("=")[0] in RawPositions.words for option in options.split(","))
    return ",".join(part for part in (options, "" if has_own else raw) if part)


def _covers(items: str, layer: int, layers: int) -> bool:
    if not items:
        return True
    for item in items.split(","):
        match = _ITEM.fullmatch(item)
        if match:
            first, last = (int(number) + (layers if number.startswith("-") else 0) for number in (match[1], match[2] or match[1]))
            if first <= layer <= last:
                return True
    return False
