"""Rows of short code streams as 32-bit registers per token, and the register bytes that contain each column's code.

A tile of words of such rows would hold each word many times. Here a row is loaded once per token, whatever its streams, and byte
permutations move the code of every column to the same position in a register.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from .bitfields import load_per_token
from .columns import constant_at
from .streams import Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.columns import Columns


class RowLoad(NamedTuple):
    """One load per token: element ``at`` of the ``row`` elements of ``bits`` (16, 32 or 64) that stream number ``stream`` has per token."""

    stream: int
    bits: int
    row: int
    at: int


class Register(NamedTuple):
    """32 bits of a row: the result of load number ``load``, or its half ``half`` (0 low, 1 high) for 64-bit loads.

    For a 16-bit load, entry ``parity`` of ``load_parities`` says which half of the word belongs to each token; otherwise it is -1.
    """

    load: int
    half: int
    parity: int


class Place(NamedTuple):
    """Byte ``byte`` (0 is lowest) of register number ``register``."""

    register: int
    byte: int


class Row:
    """The loads of a row, their registers, and the streams that they read, one code stream after another."""

    def __init__(self) -> None:
        self.loads: list[RowLoad] = []
        self.registers: list[Register] = []
        self.streams: list[Stream] = []
        self.halves = 0

    def add(self, name: str, packing: Columns) -> Words:
        """Load the planes of a code stream in elements as wide as its rows allow; a 16-bit element uses a whole register."""
        first = []
        for plane, words in enumerate(packing.planes):
            bits = 64 if words % 4 == 0 else 32 if words % 2 == 0 else 16
            row = 16 * words // bits
            first.append(len(self.registers))
            for at in range(row):
                parity = self.halves if bits == 16 else -1
                self.halves += bits == 16
                self.registers += [Register(len(self.loads), half, parity) for half in range(2 if bits == 64 else 1)]
                self.loads.append(RowLoad(len(self.streams), bits, row, at))
            self.streams.append(Stream(f"{name}.{plane}", bits, row))
        return Words(packing, tuple(first))


class Words(NamedTuple):
    """The registers of a code stream's columns: the index of the ``first`` register of each plane."""

    packing: Columns
    first: tuple[int, ...]

    def place(self, column: int, byte: int) -> Place:
        """Return the place of a byte of a column."""
        plane, high = divmod(byte, 2)
        word = column
        if plane == self.packing.column_bytes // 2:
            # The last bytes of an odd number: two columns per word.
            high, word = divmod(column, (self.packing.width + 1) // 2)
        if self.packing.planes[plane] % 2:
            return Place(self.first[plane] + word, high)
        return Place(self.first[plane] + word // 2, 2 * (word % 2) + high)


def selectors(places: Sequence[Sequence[Place]], registers: Sequence[int]) -> list[list[int]]:
    """Return the selectors with which ``permuted`` joins ``registers``: for each register after the first, one per column.

    ``places`` are the bytes of each column, which become the lowest bytes of the result; the others are arbitrary.
    """
    result = []
    for number in range(1, len(registers)):
        step = []
        for own in places:
            selector = 0
            for kept, place in enumerate(own):
                at = registers.index(place.register)
                nibble = 4 + place.byte if at == number else place.byte if number == 1 and at == 0 else kept
                selector |= nibble << 4 * kept
            step.append(selector)
        result.append(step)
    return result


def of_upper_half(step: Sequence[int], number: int, half: int) -> list[int]:
    """Return the selectors of step ``number`` of ``selectors`` if the upper half of register ``half`` has the bytes of the lower."""
    if half != number and not (half == 0 and number == 1):
        return list(step)
    # Numbers of bytes are those of ``permuted``: from 4 on of the register that is joined.
    own = 4 if half == number else 0
    return [sum((nibble + 2 if nibble & 4 == own else nibble) << 4 * at for at, nibble in enumerate(_nibbles(one))) for one in step]


def _nibbles(selector: int) -> list[int]:
    return [selector >> 4 * at & 15 for at in range(4)]


@triton.jit
def load_registers(
    pointers: tl.tuple, first: tl.tensor, token: tl.tensor, valid: tl.tensor, LOADS: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """Load the registers for ``read_register`` from the rows of ``token`` ``[warp, token]``, from row ``first`` on: one tensor per load."""
    loaded = ()
    for number in tl.static_range(len(LOADS)):
        loaded = loaded + _load(pointers, first, token, valid, constant_at(LOADS, number), MASKED, FAST)
    return loaded


@triton.jit
def _load(
    pointers: tl.tuple, first: tl.tensor, token: tl.tensor, valid: tl.tensor, LOAD: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """Load a half as the aligned word that contains it, or in both halves, because only 32-bit loads are fetched ahead of time."""
    pointer = pointers[LOAD.stream]
    if LOAD.bits == 64:
        loaded = load_per_token(pointer.to(tl.pointer_type(tl.int64)), first, token, valid, LOAD.row, LOAD.at, MASKED)
    elif LOAD.bits == 32:
        loaded = load_per_token(pointer, first, token, valid, LOAD.row, LOAD.at, MASKED)
    elif MASKED or not FAST:
        # The word of the last half may end beyond the stream.
        half = load_per_token(pointer, first, token, valid, LOAD.row, LOAD.at, MASKED).to(tl.int32)
        loaded = (half & 0xFFFF) | (half << 16)
    else:
        address = pointer.to(tl.int64)
        half = (first * (2 * LOAD.row) + (address & 2)).to(tl.int64) // 2 + (token * LOAD.row + LOAD.at)
        loaded = tl.load((address - (address & 2)).to(tl.pointer_type(tl.int32)) + half // 2)
    return (loaded,)


@triton.jit
def load_parities(pointers: tl.tuple, first: tl.tensor, halves: tl.tensor, LOADS: tl.constexpr, TOKENS: tl.constexpr) -> tl.tuple:
    """Return, for each 16-bit load, the bit at which a token's half begins in its word: int32 ``[1, token]``, the same for every tile.

    Without ``TOKENS`` it covers only the first token. ``halves`` points to 0, 16, 0, 16, ... Tiles begin an even number of rows after row
    ``first``, and rows have an odd number of halves.
    """
    result = ()
    for number in tl.static_range(len(LOADS)):
        result = result + _load_parity(pointers, first, halves, constant_at(LOADS, number), TOKENS)
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
    """Return a register of ``load_registers``, uint32 ``[warp, token]``; the upper half of a 16-bit one is unspecified."""
    value = loaded[REGISTER.load]
    if REGISTER.half == 1:
        value = value >> 32
    value = value.to(tl.uint32)
    if REGISTER.parity >= 0:
        value = value >> parities[REGISTER.parity].to(tl.uint32, bitcast=True)
    return value


@triton.jit
def permuted(low: tl.tensor, high: tl.tensor, selector: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Select each byte of the result from ``low`` (0 to 3) or ``high`` (4 to 7) by 4 bits of ``selector``, from the lowest up.

    All are 32-bit integers that broadcast to a tile; the result is uint32.
    """
    if FAST:
        value = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        value = tl.zeros((1, 1, 1), tl.uint32)
        for byte in tl.static_range(4):
            number = ((selector >> (4 * byte)) & 7).to(tl.uint32)
            found = tl.where(number < 4, low >> (8 * (number & 3)), high >> (8 * (number & 3)))
            value = value | ((found & 0xFF) << (8 * byte))
    return value
