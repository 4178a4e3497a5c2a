"""Parsing and writing of the clause ``raw=<first>,<low norm>,<high norm>,<dtype>``, which keeps tokens raw in all lossy codecs.

The values set the options of ``RawPositions`` in this order. A value that is 0 or missing leaves its option unset.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpack.formats.errors import InvalidParameter
from kvpack.formats.options import InvalidOption, Options
from kvpack.formats.raw_positions import RawPositions

PREFIX = "raw="


def parse_raw_clause(clause: str) -> dict[str, str]:
    """Return the codec options that ``clause`` sets. ``raw=0`` sets none."""
    values = clause.removeprefix(PREFIX).split(",")
    if len(values) > len(RawPositions.words):
        raise InvalidParameter(f"{clause!r} has {len(values)} values, expected up to {len(RawPositions.words)}: {_SYNTAX}")
    words = {name: value for name, value in zip(RawPositions.words, values, strict=False) if value != "0"}
    try:
        raw_positions_from(words)
    except InvalidOption as error:
        raise InvalidParameter(f"{error} in {clause!r}; write {_SYNTAX}") from None
    return words


def raw_positions_from(options: Mapping[str, str]) -> RawPositions | None:
    """Return the selection of raw tokens that these codec options define, or None if no tokens are kept raw."""
    return RawPositions.from_options(1, "k", Options("raw", options))


def raw_clause_value(options: Mapping[str, str]) -> str:
    """Return the canonical value of a ``raw=`` clause for these codec options. Empty if no tokens are kept raw."""
    chosen = raw_positions_from(options)
    if chosen is None:
        return ""
    values = [str(chosen.first), f"{chosen.low_norm:.4g}", f"{chosen.high_norm:.8g}", "0" if chosen.dtype == "bf16" else chosen.dtype]
    while values[-1] == "0":
        values.pop()
    return ",".join(values)


_SYNTAX = "raw=<first tokens>,<share for low norms>,<ratio for high norms>,<dtype>, such as raw=4,0.5,4"
