"""Layout of a code stream's columns in tiles of its words."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvpack.formats.columns import is_power_of_two, next_power_of_two

if TYPE_CHECKING:
    from kvpack.formats.columns import Columns

SMALLEST_WIDTH = 16
"""Minimum number of columns of a tile: the step of the matrix units."""

WIDEST_DIGIT = 14
"""Maximum number of bits of a digit: one word holds an index into a table of its values."""


def tile_width(packing: Columns) -> int:
    """Return the number of columns of a tile of whole rows of words."""
    return max(SMALLEST_WIDTH, next_power_of_two(packing.width))


def tile_fields(packing: Columns, dual: int = 0) -> int:
    """Return the fields of a token in one tile: more than one if a row has fewer words than a step of the matrix units."""
    return tile_width(packing) // packing.width if is_power_of_two(packing.width) and not dual else 1


def takes_whole_words(packing: Columns) -> bool:
    """Return True if a tile of the words of every row serves all fields: bit fields in at most two words."""
    return packing.binary and all(base.bit_length() - 1 <= WIDEST_DIGIT for base in packing.bases)


class TilePacking(NamedTuple):
    """A code stream's columns for ``bitfields.load_planes``: the stream number of plane 0, and how its tiles are built.

    ``tile_width`` is the number of columns of a tile, ``width`` the number of those with words; ``dual`` is as in ``Tiles``.
    """

    stream: int
    column_bytes: int
    width: int
    tile_width: int
    fields: int
    dual: int


def tile_packing(stream: int, packing: Columns, dual: int = 0) -> TilePacking:
    """Return the packing of a code stream whose plane 0 is stream number ``stream``."""
    return TilePacking(stream, packing.column_bytes, packing.width, tile_width(packing), packing.fields, dual)
