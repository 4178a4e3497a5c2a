"""Rows of short code streams in 32-bit registers, one set per token, and the positions of each column's code in their bytes."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
from triton import language as tl

from kvpack.formats.columns import Columns

from .bitfields import load_per_token
from .columns import constant_at
from .streams import Stream


class RowLoad(NamedTuple):
    """One load per token: element ``at`` of the token's row in stream ``stream``.

    A row has ``row`` elements of ``bits`` bits (16, 32 or 64).
    """

    stream: int
    bits: int
    row: int
    at: int


class Register(NamedTuple):
    """A 32-bit register of a row, which is filled by load ``load``. ``half`` selects the low (0) or high (1) half of a 64-bit load.

    A 16-bit load reads the aligned 32-bit word that contains the token's half-word. ``parity`` is then the index in ``load_parities`` of
    the bit at which the half-word begins. For other loads, ``parity`` is -1.
    """

    load: int
    half: int
    parity: int


class RegisterByte(NamedTuple):
    """The position of a byte in the registers of a row: ``byte`` counts from the least significant byte of register ``register``."""

    register: int
    byte: int


class RowPlan:
    """Plan for loading the rows of several code streams: the loads, the registers that they fill, and the planes that they read."""

    def __init__(self) -> None:
        self.loads: list[RowLoad] = []
        self.registers: list[Register] = []
        self.streams: list[Stream] = []
        self.halves = 0

    def add(self, name: str, packing: Columns) -> CodeRegisters:
        """Add loads for all planes of the code stream ``name``, and return the registers that they fill.

        Loads are as wide as the length of a row permits. A 16-bit load fills a whole register.
        """
        first = []
        for plane, words in enumerate(packing.planes):
            bits = 64 if words % 4 == 0 else 32 if words % 2 == 0 else 16
            row = 16 * words // bits
            first.append(len(self.registers))
            for element in range(row):
                parity = self.halves if bits == 16 else -1
                self.halves += bits == 16
                self.registers += [Register(len(self.loads), half, parity) for half in range(2 if bits == 64 else 1)]
                self.loads.append(RowLoad(len(self.streams), bits, row, element))
            self.streams.append(Stream(f"{name}.{plane}", bits, row))
        return CodeRegisters(packing, tuple(first))


class CodeRegisters(NamedTuple):
    """The registers of one code stream: ``first`` contains the index of each plane's first register."""

    packing: Columns
    first: tuple[int, ...]

    def byte_position(self, column: int, byte: int) -> RegisterByte:
        """Return the position in the registers of byte ``byte`` of column ``column``."""
        plane, high = divmod(byte, 2)
        word = column
        if plane == self.packing.column_bytes // 2:
            # A plane of bytes has two columns per word.
            high, word = divmod(column, (self.packing.width + 1) // 2)
        if self.packing.planes[plane] % 2:
            return RegisterByte(self.first[plane] + word, high)
        return RegisterByte(self.first[plane] + word // 2, 2 * (word % 2) + high)


def byte_selectors(positions: Sequence[Sequence[RegisterByte]], registers: Sequence[int]) -> list[list[int]]:
    """Return the selectors that ``permute_bytes`` needs to gather the bytes of each column from ``registers``.

    There is a list for each register after the first, with one selector per column. ``positions`` lists the positions of each column's
    bytes, which become the lowest bytes of the gathered word. Its other bytes are undefined.
    """
    result = []
    for index in range(1, len(registers)):
        step = []
        for column in positions:
            selector = 0
            for byte, source in enumerate(column):
                source_index = registers.index(source.register)
                nibble = 4 + source.byte if source_index == index else source.byte if index == 1 and source_index == 0 else byte
                selector |= nibble << 4 * byte
            step.append(selector)
        result.append(step)
    return result


def select_upper_half(selectors: Sequence[int], index: int, half: int) -> list[int]:
    """Return ``selectors`` changed to read the upper 16 bits of register ``half`` instead of the lower 16 bits.

    ``selectors`` is list ``index`` of the result of ``byte_selectors``.
    """
    if half != index and not (half == 0 and index == 1):
        return list(selectors)
    # As in ``permute_bytes``, bytes 4 to 7 are those of the register that is added.
    register_bit = 4 if half == index else 0
    return [
        sum((nibble + 2 if nibble & 4 == register_bit else nibble) << 4 * position for position, nibble in enumerate(_nibbles(selector)))
        for selector in selectors
    ]


def _nibbles(selector: int) -> list[int]:
    return [selector >> 4 * position & 15 for position in range(4)]


@triton.jit
def load_registers(
    pointers: tl.tuple, first: tl.tensor, token: tl.tensor, valid: tl.tensor, LOADS: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """Load the rows of ``token`` ``[warp, token]`` for ``read_register``, one tensor per load. Rows are counted from row ``first``."""
    loaded = ()
    for index in tl.static_range(len(LOADS)):
        loaded = loaded + _load_register(pointers, first, token, valid, constant_at(LOADS, index), MASKED, FAST)
    return loaded


@triton.jit
def _load_register(
    pointers: tl.tuple, first: tl.tensor, token: tl.tensor, valid: tl.tensor, LOAD: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """Load one element of a row per token.

    Triton prefetches only 32-bit loads. A 16-bit element is therefore loaded as the aligned word that contains it, or copied to both halves
    of a word.
    """
    pointer = pointers[LOAD.stream]
    if LOAD.bits == 64:
        loaded = load_per_token(pointer.to(tl.pointer_type(tl.int64)), first, token, valid, LOAD.row, LOAD.at, MASKED)
    elif LOAD.bits == 32:
        loaded = load_per_token(pointer, first, token, valid, LOAD.row, LOAD.at, MASKED)
    elif MASKED or not FAST:
        # The word that contains the last half may end past the stream.
        half = load_per_token(pointer, first, token, valid, LOAD.row, LOAD.at, MASKED).to(tl.int32)
        loaded = (half & 0xFFFF) | (half << 16)
    else:
        address = pointer.to(tl.int64)
        half = (first * (2 * LOAD.row) + (address & 2)).to(tl.int64) // 2 + (token * LOAD.row + LOAD.at)
        loaded = tl.load((address - (address & 2)).to(tl.pointer_type(tl.int32)) + half // 2)
    return (loaded,)


@triton.jit
def load_parities(pointers: tl.tuple, first: tl.tensor, halves: tl.tensor, LOADS: tl.constexpr, TOKENS: tl.constexpr) -> tl.tuple:
    """Return the bit where each token's half-word begins in its word (0 or 16), int32 ``[1, token]`` for each 16-bit load.

    These bits are the same for all tiles, because tiles begin an even number of rows after row ``first``, and rows have an odd number of
    half-words. If ``TOKENS`` is 0, only the first token's bit is returned. ``halves`` points to 0, 16, 0, 16, ...
    """
    result = ()
    for index in tl.static_range(len(LOADS)):
        result = result + _load_parity(pointers, first, halves, constant_at(LOADS, index), TOKENS)
    return result


@triton.jit
def _load_parity(pointers: tl.tuple, first: tl.tensor, halves: tl.tensor, LOAD: tl.constexpr, TOKENS: tl.constexpr) -> tl.tuple:
    result = ()
    if LOAD.bits == 16:
        odd = (pointers[LOAD.stream].to(tl.int64) // 2 + first + LOAD.at) & 1
        result = (tl.load(halves + odd + tl.arange(0, TOKENS))[None, :] if TOKENS else tl.load(halves + odd),)
    return result


@triton.jit
def read_register(loaded: tl.tuple, parities: tl.tuple, REGISTER: tl.constexpr) -> tl.tensor:
    """Return register ``REGISTER`` of the rows that ``load_registers`` loaded: uint32 ``[warp, token]``.

    If a 16-bit load filled the register, its upper half is undefined.
    """
    value = loaded[REGISTER.load]
    if REGISTER.half == 1:
        value = value >> 32
    value = value.to(tl.uint32)
    if REGISTER.parity >= 0:
        value = value >> parities[REGISTER.parity].to(tl.uint32, bitcast=True)
    return value


@triton.jit
def permute_bytes(low: tl.tensor, high: tl.tensor, selector: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Return uint32 words made of selected bytes of ``low`` (bytes 0 to 3) and ``high`` (bytes 4 to 7).

    Each four bits of ``selector`` select one byte, lowest byte first. All operands are 32-bit integers that broadcast to a tile.
    """
    if FAST:
        value = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        value = tl.zeros((1, 1, 1), tl.uint32)
        for byte in tl.static_range(4):
            source = ((selector >> (4 * byte)) & 7).to(tl.uint32)
            shifted = tl.where(source < 4, low >> (8 * (source & 3)), high >> (8 * (source & 3)))
            value = value | ((shifted & 0xFF) << (8 * byte))
    return value
