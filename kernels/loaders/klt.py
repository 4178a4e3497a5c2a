"""Tile loader of the klt codec (spec/codecs/klt.md): columns of a calibrated basis, each decoded by the table of its run and head.

Rows are short and have codes of many widths, so each token's row is loaded into 32-bit registers (``row_registers``). The columns of a tile
differ in the bytes and the bits at which their codes begin. These positions are constants per column, loaded once per program. A 1-bit code
selects one of two entries; wider codes are looked up in shared memory.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.basis import RUN_COLUMNS, BasisRows, missing_basis_error
from kvpack.formats.klt import HEAD_RUN_COLUMNS, Klt, columns_by_width
from kvpack.kernels.bitpack.columns import constant_at
from kvpack.kernels.bitpack.row_registers import (
    Register,
    RowLoad,
    RowPlan,
    load_parities,
    load_registers,
    permute_bytes,
    read_register,
)
from kvpack.kernels.bitpack.streams import Stream
from kvpack.kernels.bitpack.tile_layout import broadcast_columns, broadcast_tokens
from kvpack.kernels.bitpack.token_factors import load_factor, read_factor
from kvpack.kernels.tables.table_assembly import SELECT_BY_BIT, column_lookup_ptx, pair_lookup_ptx

from . import klt_heads
from .klt_plan import COLUMNS, LOOK_UP, LOOK_UP_PAIRS, LOOK_UP_TWO, SELECT, KltPlan, KltTile
from .tiles import Tiles

if TYPE_CHECKING:
    from kvpack.kernels.tables.shared_tables import SharedTable

MAX_TRUSTED_VALUE = 2.0**15
"""Largest table entry, and longest row of the scaled matrix, for which float16 tiles are accurate enough."""

MAX_TABLE_POWER = 8
"""Maximum exponent of the power of two by which tables are multiplied and queries divided."""


class KltConstants(NamedTuple):
    """Compile-time constants of a klt codec: the ``loads`` per row, the ``registers`` that they fill, and the tiles.

    A head's table has ``entries`` entries. They are followed by ``columns`` constants per column, and by 0, 16, 0, 16, ... for
    ``row_registers.load_parities``. ``gain_stream`` is the index of the stream of gains, or -1 if there are none.
    """

    loads: tuple[RowLoad, ...]
    registers: tuple[Register, ...]
    tiles: tuple[KltTile, ...]
    entries: int
    columns: int
    gain_stream: int


def table_unit(codec: Klt) -> float:
    """Return the power of two that scales tables. The matrix is divided by it, so that coded queries are at most about 1."""
    matrix = _required_source(codec).matrix[:, :, _coded_columns(codec)]
    exponent = int(torch.frexp(matrix.norm(dim=-1).max()).exponent)
    return float(2.0 ** min(max(exponent, -MAX_TABLE_POWER), MAX_TABLE_POWER))


def tiles(codec: Klt) -> Tiles | None:
    """Return the tile loader of ``codec``, or None if float16 is not accurate enough for its tables or its frame."""
    source, unit = _required_source(codec), table_unit(codec)
    own = codec.fixed_heads is not None
    tables = {} if own else {run: source.table(run, width).flatten(0, 1) * unit for run, width in enumerate(codec.widths) if width}
    every = [source.head_tables(part.heads, part.runs, part.width) * unit for part in codec.runs] if own else [*tables.values()]
    longest = source.matrix[:, :, _coded_columns(codec)].norm(dim=-1).max() / unit
    if not (longest <= MAX_TRUSTED_VALUE and all(table.abs().max() <= MAX_TRUSTED_VALUE for table in every)):
        return None
    return (
        klt_heads.tiles(codec, source, unit)
        if own
        else replace(_build_tiles(codec, tables, True), values=_build_tiles(codec, tables, False))
    )


def _build_tiles(codec: Klt, tables: dict[int, torch.Tensor], keys: bool) -> Tiles:
    """Return the loader of keys or, unless ``keys`` is True, of values. ``tables`` contains the table of each run, ``[head, code]``."""
    row = RowPlan()
    plan = KltPlan(tables, keys, row.registers)
    for (name, packing), columns in zip(codec.packings().items(), columns_by_width(codec.widths, codec.dim).values(), strict=True):
        plan.add(row.add(name, packing), columns)
    plan.place_tables()
    streams, gain = row.streams, codec.gain != "none"
    constants = KltConstants(
        loads=tuple(row.loads),
        registers=tuple(row.registers),
        tiles=tuple(plan.tiles),
        entries=plan.count,
        columns=len(plan.constants),
        gain_stream=len(streams) if gain else -1,
    )
    return Tiles(
        load,
        decode,
        factor if gain else None,
        constants,
        len(plan.tiles),
        tuple(plan.channels),
        (*streams, Stream("gain", 16, 1)) if gain else tuple(streams),
        plan.table(),
        entries=max(plan.count, 1),
        load_columns=load_columns,
        offset=True,
    )


def _required_source(codec: Klt) -> BasisRows:
    if codec.source is None:
        raise missing_basis_error(codec.basis_location)
    return codec.source.on_device(torch.device("cpu"))


def _coded_columns(codec: Klt) -> list[int]:
    if codec.fixed_heads is None:
        return [column for column in range(codec.dim) if codec.widths[column // RUN_COLUMNS]]
    runs = {run for part in codec.runs for run in part.runs}
    return [column for column in range(codec.dim) if column // HEAD_RUN_COLUMNS in runs]


@triton.jit
def load_columns(table: tl.tensor, rows: tl.tuple, CONSTANTS: tl.constexpr, TOKENS: tl.constexpr) -> tl.tuple:
    """Load the constants per column, which follow the entries of a head's table, int32 ``[1, column]`` each.

    Returns the constants of all columns, the constants of every second column, and the results of ``load_parities`` for all tokens and for
    the first token.
    """
    LOADS: tl.constexpr = CONSTANTS.loads
    COUNT: tl.constexpr = CONSTANTS.columns
    begin = table.to(tl.pointer_type(tl.int32)) + CONSTANTS.entries
    columns = ()
    seconds = ()
    for number in tl.static_range(COUNT):
        columns = columns + (tl.load(begin + number * COLUMNS + tl.arange(0, COLUMNS))[None, :],)
        seconds = seconds + (tl.load(begin + number * COLUMNS + tl.arange(0, COLUMNS // 2))[None, :],)
    halves = begin + COUNT * COLUMNS
    token_parities = load_parities(rows.streams, rows.first, halves, LOADS, TOKENS)
    return columns, seconds, token_parities, load_parities(rows.streams, rows.first, halves, LOADS, 0)


@triton.jit
def load(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tuple:
    """Load the rows of all code streams (``row_registers.load_registers``) and the gains (``token_factors``)."""
    LOADS: tl.constexpr = CONSTANTS.loads
    loaded = load_registers(pointers, first, token, valid, LOADS, MASKED, MODE.fast)
    if CONSTANTS.gain_stream >= 0:
        loaded = loaded + load_factor(pointers[CONSTANTS.gain_stream], first, token, valid, 16, MASKED, MODE.fast)
    return loaded


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the table entries of the codes of step ``STEP`` as one float16 tile, ``[warp, token, column]`` or transposed."""
    TILES: tl.constexpr = CONSTANTS.tiles
    TILE: tl.constexpr = constant_at(TILES, STEP)
    REGISTERS: tl.constexpr = CONSTANTS.registers
    if TILE.kind == SELECT:
        value = _select_entries(loaded, column_fields, TILE, REGISTERS, MODE)
    elif TILE.kind == LOOK_UP:
        value = _look_up_entries(loaded, column_fields, table, TILE, REGISTERS, MODE)
    else:
        value = _look_up_pairs(loaded, column_fields, table, TILE, REGISTERS, MODE)
    return (value,)


@triton.jit
def _load_tile_register(
    loaded: tl.tuple, constants: tl.tuple, REGISTERS: tl.constexpr, TILE: tl.constexpr, AT: tl.constexpr, TRANSPOSED: tl.constexpr
) -> tl.tensor:
    """Return register ``AT`` of tile ``TILE`` as a uint32 tensor that broadcasts to the tile."""
    REGISTER: tl.constexpr = _as_stored_register(constant_at(REGISTERS, constant_at(TILE.registers, AT)), TILE)
    return broadcast_tokens(read_register(loaded, constants[2], REGISTER), TRANSPOSED)


@triton.constexpr_function
def _as_stored_register(register: Register, tile: KltTile) -> Register:
    """Return ``register`` or, if the tile's tokens may use either half of a word, the register of whole words."""
    # Triton 3.9 passes a tuple of its own, with the fields of the Python one but without its methods.
    return Register(register.load, register.half, -1) if tile.parity >= 0 else register


@triton.jit
def _select_half(lower: tl.tensor, upper: tl.tensor, loaded: tl.tuple, constants: tl.tuple, TILE: tl.constexpr) -> tl.tensor:
    """Return ``lower`` for tokens whose half-word is the lower half of its word, and ``upper`` for all other tokens.

    Arguments are ``[1, column, 1]``; the result is ``[1, column, token]``. A register contains two neighboring tokens, so a column needs at
    most two selections.
    """
    COUNT: tl.constexpr = lower.shape[1]
    PAIRS_OF_TOKENS: tl.constexpr = loaded[0].shape[1] // 2
    odd_first = constants[3][TILE.parity] != 0
    both = tl.join(tl.where(odd_first, upper, lower), tl.where(odd_first, lower, upper))
    return tl.reshape(tl.broadcast_to(both, (1, COUNT, PAIRS_OF_TOKENS, 2)), (1, COUNT, 2 * PAIRS_OF_TOKENS))


@triton.jit
def _select_entries(loaded: tl.tuple, constants: tl.tuple, TILE: tl.constexpr, REGISTERS: tl.constexpr, MODE: tl.constexpr) -> tl.tensor:
    """Return entry 0 or entry 1 of each column, selected by one bit of the register."""
    word = _load_tile_register(loaded, constants, REGISTERS, TILE, 0, MODE.transposed)
    ENTRIES: tl.constexpr = TILE.entries
    position = _column_constant(constants, TILE.position, COLUMNS, MODE.transposed)
    if TILE.parity >= 0:
        position = _select_half(position, position + 16, loaded, constants, TILE)
    zero = _column_constant(constants, ENTRIES[0], COLUMNS, MODE.transposed).to(tl.int16)
    change = _column_constant(constants, ENTRIES[1], COLUMNS, MODE.transposed).to(tl.int16)
    if MODE.fast:
        value = tl.inline_asm_elementwise(
            SELECT_BY_BIT, "=r,r,r,r,r,r,r", [word, position + 1, zero, change], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        bit = (word >> position.to(tl.uint32)) & 1
        value = (zero ^ tl.where(bit == 1, change, 0)).to(tl.float16, bitcast=True)
    return value


@triton.jit
def _look_up_entries(
    loaded: tl.tuple, constants: tl.tuple, table: tl.tensor, TILE: tl.constexpr, REGISTERS: tl.constexpr, MODE: tl.constexpr
) -> tl.tensor:
    """Look up the code of each column, which may be anywhere in the registers. Returns the table entries."""
    SHARED: tl.constexpr = MODE.shared
    STRIDE: tl.constexpr = entry_stride(SHARED, MODE.fast)
    word, position, first = _load_codes(loaded, constants, TILE, REGISTERS, STRIDE, COLUMNS, MODE.transposed, MODE.fast)
    if STRIDE:
        value = tl.inline_asm_elementwise(
            column_lookup_ptx(TILE.bits, MODE.shared.offset, MODE.shared.copies, _uses_multiplication(TILE, STRIDE)),
            "=r,r,r,r,r,r,r",
            [word, position, first << STRIDE],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        code = (word >> position.to(tl.uint32)) & ((1 << TILE.bits) - 1)
        value = tl.load(table + 2 * (first + code.to(tl.int32)))
    return value


@triton.jit
def _look_up_pairs(
    loaded: tl.tuple, constants: tl.tuple, table: tl.tensor, TILE: tl.constexpr, REGISTERS: tl.constexpr, MODE: tl.constexpr
) -> tl.tensor:
    """Look up the codes of two columns together, in neighboring fields of a word. Returns the entries ``[warp, token, column]``."""
    SHARED: tl.constexpr = MODE.shared
    STRIDE: tl.constexpr = entry_stride(SHARED, MODE.fast)
    word, position, first = _load_codes(loaded, constants, TILE, REGISTERS, STRIDE, COLUMNS // 2, False, MODE.fast)
    if STRIDE:
        pair = tl.inline_asm_elementwise(
            pair_lookup_ptx(TILE.bits, TILE.kind == LOOK_UP_PAIRS, SHARED.offset, SHARED.copies, _uses_multiplication(TILE, STRIDE)),
            "=r,r,r,r",
            [word, position, first << STRIDE],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        entries = table.to(tl.pointer_type(tl.uint32))
        low = (word >> position.to(tl.uint32)).to(tl.int32)
        if TILE.kind == LOOK_UP_PAIRS:
            pair = tl.load(entries + (first + (low & ((1 << 2 * TILE.bits) - 1))))
        else:
            MASK: tl.constexpr = (1 << TILE.bits) - 1
            pair = tl.load(entries + (first + (low & MASK))) & 0xFFFF
            pair = pair | (tl.load(entries + (first + ((low >> TILE.bits) & MASK))) << 16)
    even = pair.to(tl.uint16).to(tl.float16, bitcast=True)
    odd = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(even, odd), (pair.shape[0], pair.shape[1], COLUMNS))


@triton.constexpr_function
def entry_stride(shared: SharedTable, fast: bool) -> int:
    """Return log2 of the distance in bytes between table entries, counting copies, or 0 if the table is not in shared memory."""
    return (4 * shared.copies).bit_length() - 1 if fast and shared.copies else 0


@triton.constexpr_function
def _uses_multiplication(tile: KltTile, stride: int) -> bool:
    """Return True if a multiplication can move codes to their target bit, which relieves the shift units.

    This requires that no code begins above the target bit.
    """
    return stride >= 7 and len(tile.selectors) > 0 and tile.kind != LOOK_UP_TWO.value


@triton.jit
def _load_codes(
    loaded: tl.tuple,
    constants: tl.tuple,
    TILE: tl.constexpr,
    REGISTERS: tl.constexpr,
    STRIDE: tl.constexpr,
    COUNT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Return three tensors for ``COUNT`` columns: the word that contains a code, the bit where it begins, and its table's first entry.

    With a nonzero ``STRIDE``, the second tensor instead contains a right rotation or a factor (``_uses_multiplication``), which turns the
    word's code into a byte offset.
    """
    SELECTORS: tl.constexpr = TILE.selectors
    ODD_SELECTORS: tl.constexpr = TILE.odd_selectors
    position = _column_constant(constants, TILE.position, COUNT, TRANSPOSED) - STRIDE
    if TILE.parity >= 0 and len(SELECTORS) == 0:
        position = _select_half(position, position + 16, loaded, constants, TILE)
    word = _load_tile_register(loaded, constants, REGISTERS, TILE, 0, TRANSPOSED)
    for number in tl.static_range(len(SELECTORS)):
        selector = _column_constant(constants, SELECTORS[number], COUNT, TRANSPOSED)
        if ODD_SELECTORS[number] != SELECTORS[number]:
            odd_selector = _column_constant(constants, ODD_SELECTORS[number], COUNT, TRANSPOSED)
            selector = _select_half(selector, odd_selector, loaded, constants, TILE)
        word = permute_bytes(word, _load_tile_register(loaded, constants, REGISTERS, TILE, number + 1, TRANSPOSED), selector, FAST)
    first = tl.full((1, 1, 1), TILE.first_entry, tl.int32)
    if TILE.own_entry >= 0:
        first = _column_constant(constants, TILE.own_entry, COUNT, TRANSPOSED)
    if STRIDE == 0:
        position = position & 31
    elif _uses_multiplication(TILE, STRIDE):
        position = 1 << -position
    return word, position, first


@triton.jit
def _column_constant(constants: tl.tuple, NUMBER: tl.constexpr, COUNT: tl.constexpr, TRANSPOSED: tl.constexpr) -> tl.tensor:
    return broadcast_columns(constants[0 if COUNT == COLUMNS else 1][NUMBER], TRANSPOSED)


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the gains, float32 ``[warp, token]``."""
    return read_factor(loaded, len(CONSTANTS.loads), 16, FAST)
