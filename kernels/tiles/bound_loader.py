"""Tile loaders bound to the streams of one launch, with all compile-time constants of one side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvpack.kernels.triton_internals import code_key

if TYPE_CHECKING:
    from kvpack.kernels.loaders.tiles import OutlierConstants, PageMeanConstants, Tiles
    from kvpack.kernels.tables.shared_tables import SharedTable


class RowStream(NamedTuple):
    """Layout of a stream: elements of ``bits`` bits, and a row of ``row_bytes`` bytes for every ``tokens`` tokens.

    ``aligned`` is the largest power of two, at most 16, that divides all addresses and strides in bytes.
    """

    bits: int
    aligned: int
    row_bytes: int
    tokens: int


class LoadMode(NamedTuple):
    """Options of a loader for reading and decoding rows.

    ``shared`` describes its lookup table. Tiles are ``[warp, token, column]``, or ``[warp, column, token]`` if ``transposed``. ``fast``
    permits inline PTX.
    """

    shared: SharedTable
    transposed: bool
    fast: bool


class BoundLoader(NamedTuple):
    """A codec's loader (``loaders.tiles.Tiles``) bound to the streams of one launch.

    ``widths`` contains the number of columns of each tile, and ``stream_widths`` is the argument of ``bitfields.load_column_fields``.
    Sequences and heads use ``tables`` tables in turn, with ``table_values`` values each. ``columns`` counts the columns of all tiles, plus
    one if there is an ``offset``.
    """

    load: Any
    decode: Any
    factor: Any
    step_factor: Any
    run_product: Any
    constants: Any
    steps: int
    signs: Any
    means: PageMeanConstants | None
    outliers: OutlierConstants | None
    mode: LoadMode
    streams: tuple[RowStream, ...]
    stream_widths: tuple[int, ...]
    widths: tuple[int, ...]
    dtype: str
    dual: int
    paired: bool
    interleave: int
    load_columns: Any
    offset: bool
    tables: int
    table_values: int
    columns: int

    @property
    def cache_key(self) -> str:
        """Key of this constant in Triton's cache of compiled code."""
        return code_key(self)


def bind(
    tiles: Tiles,
    mode: LoadMode,
    outliers: OutlierConstants | None,
    streams: tuple[RowStream, ...],
    whole: bool,
    means: PageMeanConstants | None = None,
) -> BoundLoader:
    """Bind the loader ``tiles`` to ``streams``.

    Without ``mode.fast``, bf16 tiles are widened to float32. ``whole`` is True if each warp's tile is always within one
    token group. ``means`` are the page means of ``tiles``, already bound to their streams.
    """
    tables = tiles.table if tiles.table is not None and tiles.table.dim() == 3 else None
    alone = tiles.signs is None and tiles.means is None and tiles.outliers is None
    run_product = tiles.run_product if alone else None
    constants: Any = tiles.constants
    return BoundLoader(
        load=tiles.load,
        decode=tiles.decode,
        factor=tiles.factor if run_product is None else None,
        step_factor=tiles.step_factor,
        run_product=run_product,
        constants=constants if tiles.whole_groups == 1 else constants._replace(in_one_group=whole),
        steps=tiles.steps,
        signs=tiles.signs,
        means=means,
        outliers=outliers,
        mode=mode,
        streams=streams,
        stream_widths=tiles.widths_of_streams,
        widths=tuple(map(len, tiles.channels)),
        dtype=tiles.dtype if mode.fast or tiles.dtype != "bf16" else "fp32",
        dual=tiles.dual,
        paired=tiles.paired,
        interleave=tiles.interleave,
        load_columns=tiles.load_columns,
        offset=tiles.offset,
        tables=1 if tables is None else tables.shape[0],
        table_values=0 if tables is None else tables[0].numel(),
        columns=sum(map(len, tiles.channels)) + tiles.offset,
    )
