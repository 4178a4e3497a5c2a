"""The interface of tile loaders, which turn packed rows into float16 tiles for matrix products.

A loader is three Triton functions over tiles ``[warp, token]``. ``load`` only reads the rows of a tile, so that the compiler can prefetch
them. ``decode`` turns rows into the tiles of values ``[warp, token, column]`` of one step. ``factor`` returns the token factors, if any.
Columns are channels in the loader's own order. Queries are permuted to that order once, and the output is permuted back once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpack.formats.columns import Columns
from kvpack.kernels.bitpack.streams import WORD_BITS, Stream
from kvpack.kernels.bitpack.tile_packing import MIN_TILE_WIDTH, tile_field_count, tile_width

if TYPE_CHECKING:
    import torch

DUAL_ROW_WORDS = MIN_TILE_WIDTH // 2
"""Maximum number of words per row for which a tile row can contain the rows of two tokens."""

APART, NEIGHBORS = 1, 2
"""Arrangements of the two tokens in tile rows: all second tokens after all first tokens, or each second token after its first token."""


class PageMeanConstants(NamedTuple):
    """Constants for pages of ``tokens`` tokens that share a mean key. A mean has ``dim`` channels of ``bits`` bits each.

    ``streams`` are the streams of codes and of scales. ``whole`` is True if each warp's tile is within one page. A program has at most
    ``pages`` pages.
    """

    tokens: int
    dim: int
    bits: int
    streams: tuple[Any, ...]
    whole: bool = False
    pages: int = 0


class OutlierConstants(NamedTuple):
    """Constants for outliers in ``tiles`` tiles of ``width`` columns each. ``first_stream`` is the index of the outliers' first stream.

    ``components`` lists, for each tile, which of an entry's four values may have their column in the tile. It is None if columns are in
    channel order. A patch of ``patch_bytes`` bytes contains ``patch_tiles`` tiles. Both are 0 if there is no patch
    (``tiles.shapes.plan_patches``).
    """

    first_stream: int
    tiles: int
    width: int
    components: tuple[tuple[int, ...], ...] | None
    patch_tiles: int = 0
    patch_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tile loader of one codec. ``decode`` is called ``steps`` times per tile of tokens.

    ``channels`` contains the channel of every column of every tile. Columns without a channel are -1. Channels past the head dim belong to
    another rotation (``qjl``). ``table``, float16 ``[entries, 2 or 4]``, is the lookup table of ``decode``. With a leading axis, each head,
    or each sequence and head, has its own table.
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
    """Number of table entries that codes use, without padding to a power of two. 0 means all entries."""
    tokens: int = 32
    """Minimum number of tokens in a warp's tile."""
    whole_groups: int = 1
    """Number of tokens per token group. A tile that begins at a multiple of this number, and is not larger, is within one token group."""
    max_tokens_per_tile: int = 32
    """Maximum number of tokens in a warp's tile, limited by registers. It is higher if tokens have few scales or share them."""
    loads_ahead: bool = False
    """True if the next tile's rows are loaded into registers while a tile is decoded, because loads are inline PTX (``thread_rows``)."""
    many_copies: bool = False
    """True if more copies of the table are faster, although fewer programs then fit in shared memory."""
    packings: tuple[Columns, ...] = ()
    """Packings of the code streams that ``decode`` refers to by index."""
    stream_widths: tuple[int, ...] = ()
    """Value of ``widths_of_streams``, if it is not simply the width and ``tile_width`` of each of ``packings``."""
    dual: int = 0
    """Arrangement of the two tokens in rows of dual tiles, or 0 if tiles are not dual. ``channels`` are for one of the tokens."""
    paired: bool = False
    """True if a step decodes two fields of each column, and registers of matrix operands contain both fields of one column and token.

    For two neighboring columns, or tokens of transposed tiles, the step's first tile contains both fields of the first one, and the second
    tile both fields of the second one (``softmax.pair_weights``).
    """
    interleave: int = DUAL_ROW_WORDS
    """Number of neighboring columns of one token in dual tiles, after which columns of the other token follow."""
    values: Tiles | None = None
    """Loader for values, if it differs from this loader, which is then for keys only. Both have the same ``channels``."""
    keys: Tiles | None = None
    """Loader for keys without signs and outliers, if it differs from this loader. It may have other ``channels``."""
    step_factor: Any = None
    """For keys, ``step_factor(loaded, step, constants, fast)`` returns the factor of products with the tiles of a step, float32
    ``[warp, token]``."""
    load_columns: Any = None
    """Function that loads the run-time constants of ``decode``. None means ``bitfields.load_column_fields``.

    ``load_columns(table, rows, constants, tokens)`` receives a head's table and its ``work.PackedRows``.
    """
    run_product: Any = None
    """Function ``run_product(x, pointers, constants)`` that multiplies ``x`` by the factor that all tokens share, or None.

    Without sidecars, it is called once for all tokens of a program, instead of ``factor``.
    """
    offset: bool = False
    """True if all tokens of a head have a common offset that is not in tiles.

    The offset adds a term to scores that depends only on the query, and a term to sums that depends only on the weights. It is stored as an
    additional last column, with an additional last channel.
    """
    dtype: str = "fp16"
    """Dtype of tiles: fp16, or the dtype of raw values. Without inline PTX, bf16 is widened to fp32."""
    signs: tuple[Any, ...] | None = None
    """Constants for the signs of sidecar qjl, or None. The tiles of signs are the last tiles."""
    means: PageMeanConstants | None = None
    """Constants for the page means of sidecar key_mean, or None. Only keys have page means."""
    outliers: OutlierConstants | None = None
    """Constants for the outliers of sidecar outliers, or None."""

    @property
    def widths_of_streams(self) -> tuple[int, ...]:
        """Argument of ``bitfields.load_column_fields``: the width and the tile width of each packing."""
        return self.stream_widths or tuple(columns for packing in self.packings for columns in (packing.width, tile_width(packing)))


def tile_field_stride(packing: Columns, bits: int, fields: int, dual: int = 0) -> int:
    """Return the distance in a word, in fields, between fields that are neighbors in a tile.

    It is the number of steps if all ``fields`` of ``bits`` bits are in one word, which is then shifted only once. Otherwise, it is 1.
    """
    side_by_side = tile_field_count(packing, dual)
    whole = side_by_side > 1 and fields % side_by_side == 0
    return fields // side_by_side if whole and fields * bits <= WORD_BITS else 1


def step_symbols(packing: Columns, field_stride: int = 1, tiles_per_step: int = 1, dual: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return the symbol of each column of every tile. Columns without a symbol are -1.

    A tile's fields are ``field_stride`` fields apart. A step produces ``tiles_per_step`` tiles of neighboring fields; ``field_stride`` then
    counts groups of that many fields. With ``dual``, the symbols are for one of the two tokens.
    """
    width, side_by_side = packing.width, tile_field_count(packing, dual)
    groups = -(-packing.fields // tiles_per_step)
    tiles = []
    for step in range(-(-groups // side_by_side)):
        first = step if field_stride > 1 else step * side_by_side
        for tile in range(tiles_per_step):
            symbols = []
            for column in range(width if dual else tile_width(packing)):
                field = (first + column // width * field_stride) * tiles_per_step + tile
                symbol = field * width + column % width
                real = column < side_by_side * width and field < packing.fields and symbol < packing.symbols
                symbols.append(symbol if real else -1)
            tiles.append(tuple(symbols))
    return tuple(tiles)


def symbol_channels(symbols: tuple[int, ...], values: int, value: int, dim: int) -> tuple[int, ...]:
    """Return the channel of value ``value`` of each symbol, or -1 if there is none. A symbol has ``values`` channels."""
    return tuple(s * values + value if s >= 0 and s * values + value < dim else -1 for s in symbols)
