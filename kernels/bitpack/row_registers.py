"""Rows of short code streams in 32-bit registers, one set per token, and the positions of each column's code in their bytes."""

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
    """One load per token: element ``at`` of a row of stream number ``stream``, which has ``row`` elements of ``bits`` (16, 32 or 64) bits.
    """

    stream: int
    bits: int
    row: int
    at: int


class Register(NamedTuple):
    """A 32-bit register of a row: the one that load number ``load`` fills, or half ``half`` (0 low, 1 high) of a 64-bit load.

    For a 16-bit load, ``parity`` is the index in ``load_parities`` of the position of each token's half in its word; otherwise -1.
    """

    load: int
    half: int
    parity: int


class RegisterByte(NamedTuple):
    """Position of a byte: byte ``byte`` (0 is the lowest) of register number ``register``."""

    register: int
    byte: int


class RowPlan:
    """A plan for loading rows: the loads, the registers that they fill, and the streams that they read, ordered by code stream."""

    def __init__(self) -> None:
        self.loads: list[RowLoad] = []
        self.registers: list[Register] = []
        self.streams: list[Stream] = []
        self.halves = 0

    def add(self, name: str, packing: Columns) -> CodeRegisters:
        """Add loads for all planes of a code stream, in elements as wide as its rows allow. A 16-bit element fills a whole register."""
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

    def place(self, column: int, byte: int) -> RegisterByte:
        """Return where byte ``byte`` of column ``column`` is in the registers."""
        plane, high = divmod(byte, 2)
        word = column
        if plane == self.packing.column_bytes // 2:
            # A plane of bytes has two columns per word.
            high, word = divmod(column, (self.packing.width + 1) // 2)
        if self.packing.planes[plane] % 2:
            return RegisterByte(self.first[plane] + word, high)
        return RegisterByte(self.first[plane] + word // 2, 2 * (word % 2) + high)


def byte_selectors(places: Sequence[Sequence[RegisterByte]], registers: Sequence[int]) -> list[list[int]]:
    """Return the selectors with which ``permute_bytes`` gathers each column's bytes from ``registers``.

    Each register after the first has a list with one selector per column. ``places`` contains the positions of each column's bytes, which
    become the lowest bytes of the gathered word. The word's other bytes are arbitrary.
    """
    result = []
    for index in range(1, len(registers)):
        step = []
        for column in places:
            selector = 0
            for byte, place in enumerate(column):
                position = registers.index(place.register)
                nibble = 4 + place.byte if position == index else place.byte if index == 1 and position == 0 else byte
                selector |= nibble << 4 * byte
            step.append(selector)
        result.append(step)
    return result


def select_upper_half(step: Sequence[int], index: int, half: int) -> list[int]:
    """Return the selectors ``step``, changed so that they read the upper 16 bits of register ``half`` instead of the lower 16 bits.

    ``step`` is number ``index`` of the lists that ``byte_selectors`` returns.
    """
    if half != index and not (half == 0 and index == 1):
        return list(step)
    # As in ``permute_bytes``, bytes 4 to 7 are those of the register that is added.
    register_bit = 4 if half == index else 0
    return [
        sum((nibble + 2 if nibble & 4 == register_bit else nibble) << 4 * position for position, nibble in enumerate(_nibbles(selector)))
        for selector in step
    ]


def _nibbles(selector: int) -> list[int]:
    return [selector >> 4 * position & 15 for position in range(4)]


@triton.jit
def load_registers(
    pointers: tl.tuple, first: tl.tensor, token: tl.tensor, valid: tl.tensor, LOADS: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """Load the rows of ``token`` ``[warp, token]``, counted from row ``first``, for ``read_register``. Returns one tensor per load."""
    loaded = ()
    for index in tl.static_range(len(LOADS)):
        loaded = loaded + _load_register(pointers, first, token, valid, constant_at(LOADS, index), MASKED, FAST)
    return loaded


@triton.jit
def _load_register(
    pointers: tl.tuple, first: tl.tensor, token: tl.tensor, valid: tl.tensor, LOAD: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """Load one element per token.

    A 16-bit element is loaded as the aligned word that contains it, because Triton only prefetches 32-bit loads; otherwise, it is copied to
    both halves of a word.
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
    """Return, for each 16-bit load, the bit at which each token's half begins in its word, int32 ``[1, token]``.

    The bits are the same for all tiles, because tiles begin an even number of rows after row ``first``. Rows have an odd number of halves.
    If ``TOKENS`` is 0, only the first token's bit is returned. ``halves`` points to 0, 16, 0, 16, ...
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
    """Return register ``REGISTER`` from the registers that ``load_registers`` returned: uint32 ``[warp, token]``. A 16-bit load has no
    upper half.
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
    """Return words whose bytes are selected from the bytes of ``low`` (0 to 3) and ``high`` (4 to 7).

    Four bits of ``selector`` select each byte, lowest first. All operands are 32-bit integers that broadcast to a tile. Returns uint32.
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
