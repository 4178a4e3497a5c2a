"""The common part of tile loaders, which turn packed rows into binary16 tiles for the matrix units.

A loader is three Triton functions over tiles ``[warp, token]``. ``load`` reads the rows of a tile and nothing else, so that the compiler
fetches it ahead of time; ``decode`` computes from it the value tiles ``[warp, token, column]`` of one step; ``factor`` returns the factor
of a token's values, if any. Columns are channels in the loader's own order: a query is put in that order once, and the output is put back
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpack.formats.columns import Columns
from kvpack.kernels.bitpack.streams import WORD_BITS, Stream
from kvpack.kernels.bitpack.tile_packing import MIN_TILE_WIDTH, tile_field_count, tile_width

if TYPE_CHECKING:
    import torch

DUAL_WIDTH = MIN_TILE_WIDTH // 2
"""Words per row, if a tile contains two rows side by side."""

APART, NEIGHBOURS = 1, 2
"""Arrangements of two tokens per row: all second tokens of the tile after all first ones, or each after its first."""


class Means(NamedTuple):
    """Pages of ``tokens`` tokens whose keys have a mean each; ``whole``: the tokens of a warp's tile are in one page."""

    tokens: int
    whole: bool = False


class Outliers(NamedTuple):
    """Outliers next to ``tiles`` of ``width`` columns each; ``first_stream`` is the number of their first stream.

    ``components`` lists which of an entry's four values have columns in each tile; None if columns are in the order of channels. A patch of
    ``patch_bytes`` holds ``together`` tiles; 0 if there is none (``attend.shapes.in_patches``).
    """

    first_stream: int
    tiles: int
    width: int
    components: tuple[tuple[int, ...], ...] | None
    together: int = 0
    patch_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Tiles:
    """One codec's loader. ``channels`` is the channel of every column of every tile, -1 for none; ``steps`` calls of ``decode`` produce
    them.

    Channels from the head dim on are those of another rotation (``qjl``).

    ``table``, binary16 ``[entries, 2 or 4]``, is where ``decode`` looks up values; with a leading axis of tables, each head, or each
    sequence and head, has its own.
    """

    load: Any
    decode: Any
    factor: Any
    constants: tuple[Any, ...]
    steps: int
    channels: tuple[tuple[int, ...], ...]
    streams: tuple[Stream, ...]
    table: torch.Tensor | None = None
    entries: int = 0
    """Entries of the table that codes refer to; the others fill it up to a power of two. 0: all."""
    tokens: int = 32
    """Tokens that a warp decodes at once (without inline PTX, ``split`` decodes them one by one)."""
    whole_groups: int = 1
    """Tokens per group: a tile of at most as many, which begins at a multiple of them, is in one token group."""
    most_tokens: int = 32
    """Maximum number of tokens of a warp's tile: more if tokens share scales or have few, so that registers suffice."""
    loads_ahead: bool = False
    """True if registers hold the rows of the next tile while one is decoded, for loads that the compiler does not see (``thread_rows``)."""
    many_copies: bool = False
    """True if more copies of the table pay, although fewer programs then fit in shared memory."""
    packings: tuple[Columns, ...] = ()
    """Packings of the code streams that ``decode`` refers to by number."""
    stream_widths: tuple[int, ...] = ()
    """``widths_of_streams``, if it differs from the width and ``tile_width`` of each of ``packings``."""
    dual: int = 0
    """Arrangement of the two tokens in tiles whose rows are the words of two tokens; ``channels`` are then those of one token. 0: one
    token.
    """
    interleave: int = DUAL_WIDTH
    """Neighboring columns of one token in such tiles, before as many columns of the other token."""
    values: Tiles | None = None
    """The loader of values, where it differs from this one of keys in what ``decode`` takes; ``channels`` are the same."""
    keys: Tiles | None = None
    """Loader of keys, if it differs from this one in what ``decode`` leaves to ``step_factor``; without side-cars."""
    step_factor: Any = None
    """For keys, ``step_factor(loaded, step, constants, fast)``: what products with the tiles of a step are multiplied by, float32
    ``[warp, token]``."""
    load_columns: Any = None
    """Function that loads the constants that ``decode`` needs besides rows, ``load_columns(table, rows, constants, tokens)`` with a head's
    table and its ``work.Rows``; None for ``bitfields.load_column_fields``.
    """
    run_product: Any = None
    """For values that share a factor in a run, ``run_product(x, pointers, constants)``: ``x`` times it. Without side-cars it is
    called once for all tokens of a program, in place of ``factor``."""
    offset: bool = False
    """True if all tokens of a head share an offset that no tile contains: scores have a term that depends only on the query, and sums one
    that depends only on the weights. It is one more column, after those of the tiles, whose channel is the one after the last.
    """
    dtype: str = "fp16"
    """Dtype of the tiles: fp16, or that of raw values; without inline PTX, bf16 values are widened to fp32."""
    signs: tuple[Any, ...] | None = None
    """Constants of the loader of ``qjl``, whose tiles are the last ones; None without its side-car."""
    means: Means | None = None
    """Constants of the loader of ``key_mean``, for keys; None without its side-car."""
    outliers: Outliers | None = None
    """Constants of the loader of ``outliers``; None without its side-car."""

    @property
    def widths_of_streams(self) -> tuple[int, ...]:
        """Arguments of ``bitfields.load_column_fields``."""
        return self.stream_widths or tuple(columns for packing in self.packings for columns in (packing.width, tile_width(packing)))


def tile_field_stride(packing: Columns, bits: int, fields: int, dual: int = 0) -> int:
    """Return the distance, in fields, between fields side by side in a tile.

    It is the number of steps if all ``fields`` of ``bits`` are in one word, so that each word is shifted once for all steps; otherwise 1.
    """
    side_by_side = tile_field_count(packing, dual)
    whole = side_by_side > 1 and fields % side_by_side == 0
    return fields // side_by_side if whole and fields * bits <= WORD_BITS else 1


def step_symbols(packing: Columns, field_stride: int = 1, together: int = 1, dual: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return the symbol of every column of every tile, -1 for none: ``fields_per_tile`` fields per tile, ``field_stride`` fields apart.

    A step makes ``together`` tiles, of neighboring fields; ``field_stride`` counts groups of that many fields. ``dual``: for one of two
    tokens.
    """
    width, side_by_side = packing.width, tile_field_count(packing, dual)
    groups = -(-packing.fields // together)
    tiles = []
    for step in range(-(-groups // side_by_side)):
        first = step if field_stride > 1 else step * side_by_side
        for tile in range(together):
            symbols = []
            for column in range(width if dual else tile_width(packing)):
                field = (first + column // width * field_stride) * together + tile
                symbol = field * width + column % width
                real = column < side_by_side * width and field < packing.fields and symbol < packing.symbols
                symbols.append(symbol if real else -1)
            tiles.append(tuple(symbols))
    return tuple(tiles)


def channels_of(symbols: tuple[int, ...], values: int, value: int, dim: int) -> tuple[int, ...]:
    """Return channel ``value`` of each symbol, which has ``values`` channels."""
    return tuple(s * values + value if s >= 0 and s * values + value < dim else -1 for s in symbols)
