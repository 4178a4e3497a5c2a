"""Find encoder options, such as norm_rule, in the recipe text of a loaded cache, which needs them to encode more tokens.

The header's codecs do not store these options. The text is searched and not parsed, because parsing an untrusted text would create
every codec in it.
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
from kvpack.formats.sidecars import WithSidecars

from . import raw_clause
from .presets import ADDITIONS, PUBLISHED
from .recorded_presets import RECORDED

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

_CLAUSE = re.compile(r"(?:layers=([-0-9,]{1,4096}):)?(k|v|kv)=([a-z_]{1,32})(?::(.*))?", re.DOTALL)
_ITEM = re.compile(r"(-?[0-9]{1,9})(?:-(-?[0-9]{1,9}))?")

ENCODER_OPTIONS = {
    codec_id: frozenset(
        field.name
        for field in fields(codec)  # type: ignore[arg-type]
        if not field.metadata.get("stored", True) and field.metadata.get("steers", True)
    )
    for codec_id, codec in CODECS.items()
}
"""Names of the options that affect only the encoder, by codec id."""

_NAMED = {name: preset.recipe for name, preset in (PUBLISHED | ADDITIONS).items()} | RECORDED

_WORDS = (raw_clause.PREFIX, *(f"{name}=" for name in sorted(frozenset(RawPositions.words).union(*ENCODER_OPTIONS.values()))))


def with_encoder_options(codec: Codec, recipe: str, layer: int, layers: int, side: str) -> Codec:
    """Return a header's ``codec`` with the encoder options from the header's ``recipe`` for one layer's keys or values.

    ``side`` is "k" or "v". The codec is returned unchanged if the text is not a valid recipe or selects another codec; files may contain
    both.
    """
    key = recipe, layer, layers, side
    if key not in codec.derived_values:
        codec.derived_values[key] = _apply_options(codec, recipe, layer, layers, side)
    created: Codec = codec.derived_values[key]
    return created


def _apply_options(codec: Codec, recipe: str, layer: int, layers: int, side: str) -> Codec:
    options = _options(recipe, layer, layers, side, codec.id)
    words = {name: value for name, value in options.items() if name in ENCODER_OPTIONS.get(codec.id, ())}
    if words:
        with contextlib.suppress(InvalidParameter):
            codec = codec.with_family(replace(codec.family, **words))  # type: ignore[type-var]
    if isinstance(codec, WithSidecars) and not options.keys().isdisjoint(RawPositions.words):
        with contextlib.suppress(InvalidParameter):
            raw = RawPositions.from_options(codec.dim, side, Options(codec.id, options))
            # Equality ignores the options that select tokens, so this replaces the stored sidecar.
            if raw is not None and raw in codec.sidecars:
                codec = codec.with_sidecar(raw)
    return codec


@lru_cache(maxsize=1024)
def _options(recipe: str, layer: int, layers: int, side: str, codec_id: str) -> dict[str, str]:
    """Return the options in the last clause that covers the layer and side; empty if it selects another codec."""
    result: dict[str, str] = {}
    for sides, items, clause_codec, options in _clauses(recipe):
        if side in sides and _covers(items, layer, layers):
            result = dict(option.partition("=")[::2] for option in options.split(",")) if clause_codec == codec_id else {}
    return result


@lru_cache(maxsize=16)
def _clauses(recipe: str) -> tuple[tuple[str, str, str, str], ...]:
    """Return (sides, layers, codec id, options) of every clause, with presets expanded; empty if no clause has encoder options."""
    clauses: list[str] = []
    for text in recipe.split(";"):
        clauses += _NAMED.get(text.strip(), text.strip()).split(";")
    if not any(word in clause for clause in clauses for word in _WORDS):
        return ()
    raw = next((_raw_options(clause) for clause in reversed(clauses) if clause.startswith(raw_clause.PREFIX)), "")
    matches = [_CLAUSE.fullmatch(clause) for clause in clauses]
    return tuple((match[2], match[1] or "", match[3], _with_raw(match[4] or "", raw)) for match in matches if match)


def _raw_options(clause: str) -> str:
    """Return the codec options that a ``raw=`` clause sets; empty if the clause is invalid."""
    try:
        return ",".join(f"{name}={value}" for name, value in raw_clause.parse_raw_clause(clause).items())
    except InvalidParameter:
        return ""


def _with_raw(options: str, raw: str) -> str:
    """Add the options ``raw`` for raw tokens to a codec's ``options``, unless these already have some."""
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
