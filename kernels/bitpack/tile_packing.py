"""Layout of a code stream's columns in tiles of its words."""

from __future__ import annotations

from typing import NamedTuple

from kvpack.formats.columns import Columns, is_power_of_two, next_power_of_two

MIN_TILE_WIDTH = 16
"""Minimum number of tile columns: the inner dimension of one matrix instruction."""

MAX_DIGIT_BITS = 14
"""Maximum number of bits per digit, so that a word can store the index of a table with all digits."""


def tile_width(packing: Columns) -> int:
    """Return the number of columns in a tile of whole rows: the columns of a row, padded to a power of two of at least 16."""
    return max(MIN_TILE_WIDTH, next_power_of_two(packing.width))


def tile_field_count(packing: Columns, dual: int = 0) -> int:
    """Return the number of fields that one tile contains of each column of a row: several if a row is narrower than the minimum tile width.
    """
    return tile_width(packing) // packing.width if is_power_of_two(packing.width) and not dual else 1


def has_whole_word_tiles(packing: Columns) -> bool:
    """Return True if ``packing`` supports tiles of whole words: its digits must be bit fields of at most ``MAX_DIGIT_BITS`` bits."""
    return packing.binary and all(base.bit_length() - 1 <= MAX_DIGIT_BITS for base in packing.bases)


class TilePacking(NamedTuple):
    """Layout of a code stream's columns in tiles, for ``bitfields.load_planes``.

    ``stream`` is the index of the stream that contains plane 0. A tile has ``tile_width`` columns, of which ``width`` have words. ``dual``
    is as in ``Tiles``.
    """

    stream: int
    column_bytes: int
    width: int
    tile_width: int
    fields: int
    dual: int


def tile_packing(stream: int, packing: Columns, dual: int = 0) -> TilePacking:
    return TilePacking(stream, packing.column_bytes, packing.width, tile_width(packing), packing.fields, dual)
