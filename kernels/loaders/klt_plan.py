"""Planning of klt's tile loader: the columns of each tile, how to decode them, and the necessary tables and constants."""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton import language as tl

from kvpack.formats.basis import RUN_COLUMNS
from kvpack.kernels.bitpack.row_registers import CodeRegisters, Register, RegisterByte, byte_selectors, select_upper_half

COLUMNS = tl.constexpr(16)
"""Number of columns per tile: the inner dimension of one matrix instruction."""

MAX_TOKENS = tl.constexpr(64)
"""Maximum number of tokens in a warp's tile."""


LOOK_UP, SELECT, LOOK_UP_PAIRS, LOOK_UP_TWO = (tl.constexpr(number) for number in range(4))
"""Kinds of decoding: look up one entry per column, select one of two, or, for two columns together, look up a pair or two entries.

Two columns can be decoded together only for keys: a register of keys has neighboring columns, while a register of values has two tokens.
"""

MAX_PAIR_BITS = 3
"""Maximum number of bits per code for a table of pairs of entries."""


class KltTile(NamedTuple):
    """One tile of a step: the decoding method of its codes (``kind``), and the locations of codes, table entries and column constants.

    The codes have ``bits`` bits and are stored in ``registers``. They begin at bit ``position`` of a register or, if ``selectors`` combine
    several registers, of the combined bytes. A column's table begins at entry ``first_entry``. If ``own_entry`` is not -1, it is the index
    of a column constant that contains the first entry instead. If codes select one of two entries, ``entries`` are the indices of two
    constants: entry 0, and the bits in which entry 1 differs. If two columns are decoded together, only every second column has constants.

    For values, a register may be a half-word of each token's word. The whole word is then kept, although its other half belongs to another
    token. ``parity`` is the register's index in ``load_parities``, and ``odd_selectors`` are the selectors for tokens in the upper half.
    For other registers, ``parity`` is -1.
    """

    kind: int
    registers: tuple[int, ...]
    bits: int
    position: int
    selectors: tuple[int, ...] = ()
    odd_selectors: tuple[int, ...] = ()
    parity: int = -1
    first_entry: int = 0
    own_entry: int = -1
    entries: tuple[int, ...] = ()


class KltPlan:
    """A plan under construction: the tiles of a codec, the tables of all heads, and the constants per column, which follow the tables.

    Tables and constants are in order of first use.
    """

    def __init__(self, tables: dict[int, torch.Tensor], keys: bool, registers: list[Register]) -> None:
        """Create an empty plan for keys if ``keys`` is True, otherwise for values.

        ``tables`` contains the table of each run, ``[head, code]``. The caller may append to ``registers`` later.
        """
        self.tiles: list[KltTile] = []
        self.channels: list[tuple[int, ...]] = []
        self.constants: list[torch.Tensor] = []
        self.count = 0
        self._keys = keys
        self._registers = registers
        self._bits = {run: _half_bits(table) for run, table in tables.items()}
        self._used: dict[tuple[int, bool], int] = {}
        """First entry of each table in use. The key is its run, and whether it is a table of pairs."""
        self._runs: list[tuple[int, ...]] = []
        self._tables = torch.empty(0, dtype=torch.float32, device="cpu")

    def add(self, words: CodeRegisters, columns: list[int]) -> None:
        """Add the tiles of a code stream, whose symbols are the codes of ``columns`` of the coded frame."""
        packing, bits = words.packing, words.packing.bases[0].bit_length() - 1
        symbols = sorted((symbol % packing.width, symbol // packing.width) for symbol in range(packing.symbols))
        for first in range(0, len(symbols), COLUMNS.value):
            own = symbols[first : first + COLUMNS.value]
            channels = [columns[field * packing.width + word] for word, field in own]
            spare = COLUMNS.value - len(own)
            self.channels.append((*channels, *[-1] * spare))
            # Columns without a channel decode the first channel, and are ignored.
            own += own[:1] * spare
            self._add_tile(words, bits, own, [channel // RUN_COLUMNS for channel in channels + channels[:1] * spare])

    def _add_tile(self, words: CodeRegisters, bits: int, symbols: list[tuple[int, int]], runs: list[int]) -> None:
        """Add the tile of ``symbols``, given as (word, field) pairs. ``runs`` is the basis run of each symbol's column."""
        firsts, seconds = symbols[::2], symbols[1::2]
        neighbors = all(second == (word, field + 1) for (word, field), second in zip(firsts, seconds, strict=True))
        kind, length = LOOK_UP.value, bits
        if self._keys and neighbors and runs[::2] == runs[1::2]:
            kind, length = (LOOK_UP_PAIRS if bits <= MAX_PAIR_BITS else LOOK_UP_TWO).value, 2 * bits
            symbols, runs = firsts, runs[::2]
        places = [_code_bytes(words, word, field * bits, length) for word, field in symbols]
        registers = tuple(sorted({place.register for own in places for place in own}))
        steps = byte_selectors(places, registers)
        at = [field * bits % 8 + (0 if steps else 8 * own[0].byte) for own, (_, field) in zip(places, symbols, strict=True)]
        numbers = tuple(self._constant_index(_as_row(step)) for step in steps)
        position = self._constant_index(_as_row(at))
        odd, parity = numbers, -1
        halves = [number for number, register in enumerate(registers) if self._registers[register].parity >= 0]
        if not self._keys and len(halves) == 1:
            parity = self._registers[registers[halves[0]]].parity
            odd = tuple(self._constant_index(_as_row(select_upper_half(step, number, halves[0]))) for number, step in enumerate(steps, 1))
        entries: tuple[int, ...] = ()
        if not self._keys and bits == 1 and not steps:
            kind = SELECT.value
            zero, ones = (torch.cat([self._bits[run][:, code : code + 1] for run in runs], 1) for code in (0, 1))
            entries = self._constant_index(zero), self._constant_index(zero ^ ones)
        self.tiles.append(KltTile(kind, registers, bits, position, numbers, odd, parity, entries=entries))
        self._runs.append(() if entries else tuple(runs))
        for run in {*self._runs[-1]}:
            self._used[run, kind == LOOK_UP_PAIRS.value] = 0

    def place_tables(self) -> None:
        """Assign an offset to each table, and set the first entries of columns in all tiles."""
        tables = {}
        for run, pairs in self._used:
            own = self._bits[run]
            # The first column's code is in the low bits.
            tables[run, pairs] = (own[:, None, :] | own[:, :, None] << 16).flatten(1) if pairs else own | own << 16
        # Place large tables first, so that each begins at a multiple of its size.
        for key, table in sorted(tables.items(), key=lambda item: -item[1].shape[1]):
            self._used[key], self.count = self.count, self.count + table.shape[1]
        self._tables = torch.cat([tables[key] for key in sorted(self._used, key=self._used.__getitem__)], 1) if tables else self._tables
        for number, (tile, runs) in enumerate(zip(self.tiles, self._runs, strict=True)):
            if runs:
                first = [self._used[run, tile.kind == LOOK_UP_PAIRS.value] for run in runs]
                same = len({*first}) == 1
                self.tiles[number] = tile._replace(first_entry=first[0], own_entry=-1 if same else self._constant_index(_as_row(first)))

    def _constant_index(self, values: torch.Tensor) -> int:
        """Return the index of the constant ``values``, int32 ``[head or 1, column]``. It is added if the plan does not contain it yet."""
        values = values.repeat(1, COLUMNS.value // values.shape[1])
        for number, known in enumerate(self.constants):
            if torch.equal(known, values):
                return number
        self.constants.append(values)
        return len(self.constants) - 1

    def table(self) -> torch.Tensor:
        """Return each head's table entries and constants, float16 ``[head, entry, 2]``. A constant is a 32-bit integer."""
        heads = next(iter(self._bits.values())).shape[0]
        entries = [self._tables] if self.count else []
        constants = [values.expand(heads, COLUMNS.value) for values in self.constants]
        halves = torch.tensor([0, 16] * (MAX_TOKENS.value // 2 + 1), dtype=torch.int32, device="cpu").expand(heads, -1)
        return torch.cat([*entries, *constants, halves], 1).contiguous().view(torch.float16).view(heads, -1, 2)


def _code_bytes(words: CodeRegisters, word: int, first: int, bits: int) -> list[RegisterByte]:
    return [words.byte_position(word, byte) for byte in range(first // 8, (first + bits - 1) // 8 + 1)]


def _half_bits(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF


def _as_row(values: list[int]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.int32, device="cpu")
