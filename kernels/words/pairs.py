"""Pairs of binary16 in 32 bits: looked up in a table, scaled, negated and put together, for rows of which a thread holds one.

The table lies in shared memory as ``shared_table`` stores it. Without inline PTX (``FAST`` false) the same functions are plain Triton.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.kernels.loaders.tiles import SharedTable
from kvpack.kernels.tables.shared_table import in_halves
from kvpack.kernels.tables.table_assembly import lookup_of_entry

from .row_digits import pieces_of_bits


@triton.constexpr_function
def unit(values: int, shared: SharedTable, fast: bool) -> int:
    """What ``look_up_words`` counts entries of ``values`` binary16 in: bytes where the table is shared, so that fields are shifted once."""
    return 2 * values * shared.copies if fast and shared.copies else 1


@triton.jit
def look_up_words(
    place: tl.tensor,
    table: tl.tensor,
    WORDS: tl.constexpr,
    VALUES: tl.constexpr,
    FIRST: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The first ``WORDS`` (1 or 2) pairs of an entry of a table of ``VALUES`` (2 or 4) binary16 an entry, ``place`` units after ``FIRST``.

    ``SHARED`` is the table's ``SharedTable``; ``place`` never leads beyond the entries.
    """
    if FAST and SHARED.copies > 0:
        ASSEMBLY: tl.constexpr = lookup_of_entry(WORDS, SHARED.offset + FIRST * unit(VALUES, SHARED, FAST), SHARED.copies, 2 * VALUES)
        if WORDS == 1:
            found = (tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [place], dtype=tl.uint32, is_pure=True, pack=1),)
        else:
            found = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [place], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)
    else:
        pointer = table.to(tl.pointer_type(tl.int32)) + (place + FIRST) * (VALUES // 2)
        found = ()
        for word in tl.static_range(WORDS):
            found = found + (tl.load(pointer + word).to(tl.uint32, bitcast=True),)
    return found


@triton.jit
def look_up_repeated(place: tl.tensor, table: tl.tensor, FIRST: tl.constexpr, SHARED: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The first pair of an entry of 4 equal values: half of it is loaded, of which there are twice as many copies."""
    if FAST and SHARED.copies > 0:
        HALVES: tl.constexpr = in_halves(SHARED, 0, 0)
        found = look_up_words(place, table, 1, 2, FIRST, HALVES, FAST)
    else:
        found = look_up_words(place, table, 1, 4, FIRST, SHARED, FAST)
    return found[0]


@triton.jit
def joined(low: tl.tensor, high: tl.tensor, LOW: tl.constexpr, HIGH: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """A pair of one half of ``low`` and one of ``high``: the lower (0) or the upper (1), as ``LOW`` and ``HIGH`` say."""
    if FAST:
        SELECT: tl.constexpr = (0x7600 if HIGH else 0x5400) + (0x32 if LOW else 0x10)
        value = tl.inline_asm_elementwise(f"prmt.b32 $0, $1, $2, {SELECT};", "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        value = ((low >> (16 * LOW)) & 0xFFFF) | ((high >> (16 * HIGH)) << 16)
    return value


@triton.constexpr_function
def _negate(low: int, high: int) -> str:
    select = (8 | low // 8) << 4 | (12 | high // 8) << 12
    return f"{{ .reg .b32 signs; prmt.b32 signs, $2, $3, {select}; lop3.b32 $0, signs, 0x80008000, $1, 0x6A; }}"


@triton.jit
def pair_negated(
    pair: tl.tensor, words: tl.tuple, PACKING: tl.constexpr, COLUMN: tl.constexpr, POSITION: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    """The low half of a pair with its sign turned where bit ``POSITION`` of a column is set, and the high one where the next bit is."""
    LOW: tl.constexpr = pieces_of_bits(PACKING, COLUMN, POSITION, 1)
    HIGH: tl.constexpr = pieces_of_bits(PACKING, COLUMN, POSITION + 1, 1)
    low, high = words[LOW[0][0]], words[HIGH[0][0]]
    if FAST:
        # A bit on top of its byte is what the permutation copies; the shifts are few, and those of all symbols of a word alike.
        low, high = low << (7 - LOW[0][1] % 8), high << (7 - HIGH[0][1] % 8)
        value = tl.inline_asm_elementwise(
            _negate(LOW[0][1], HIGH[0][1]), "=r,r,r,r", [pair, low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        value = pair ^ (((low >> LOW[0][1]) & 1) << 15) ^ (((high >> HIGH[0][1]) & 1) << 31)
    return value


@triton.jit
def pair_product(first: tl.tensor, second: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """The products of two pairs of binary16."""
    if FAST:
        value = tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [first, second], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        low = _half(first, 0) * _half(second, 0)
        high = _half(first, 1) * _half(second, 1)
        value = low.to(tl.uint16, bitcast=True).to(tl.uint32) | (high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    return value


@triton.constexpr_function
def _scaled_by_half(which: int) -> str:
    half = ("low", "high")[which]
    return f"""{{ .reg .b16 low, high; .reg .b32 both;
        mov.b32 {{low, high}}, $2; mov.b32 both, {{{half}, {half}}}; mul.rn.f16x2 $0, $1, both; }}"""


@triton.jit
def pair_scaled(pair: tl.tensor, scales: tl.tensor, WHICH: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """A pair times the lower (0) or the upper (1) half of ``scales``: an operand of the product, which no operation puts together."""
    if FAST:
        value = tl.inline_asm_elementwise(_scaled_by_half(WHICH), "=r,r,r", [pair, scales], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        value = pair_product(pair, joined(scales, scales, WHICH, WHICH, FAST), FAST)
    return value


@triton.jit
def pair_of_one(value: tl.tensor) -> tl.tensor:
    """A float32 as both halves of a pair."""
    return value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001


@triton.constexpr_function
def _affine(bits: int) -> str:
    """A code becomes the low end of a binary16's fraction."""
    import struct

    bias = int.from_bytes(struct.pack("<e", 1024.0 + (1 << bits >> 1)), "little") * 0x10001
    return f"""{{ .reg .b32 a, b;
        or.b32 a, $1, 0x64006400; mov.b32 b, {bias};
        sub.f16x2 a, a, b; fma.rn.f16x2 $0, a, $2, $3; }}"""


@triton.jit
def pair_affine(codes: tl.tensor, scale: tl.tensor, centre: tl.tensor, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """(code - 2^BITS / 2) * scale + centre of two codes of ``BITS`` (at most 8) bits, 16 bits apart."""
    if FAST:
        value = tl.inline_asm_elementwise(_affine(BITS), "=r,r,r,r", [codes, scale, centre], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        value = _affine_half(codes, scale, centre, BITS, 0) | (_affine_half(codes, scale, centre, BITS, 1) << 16)
    return value


@triton.jit
def _affine_half(codes: tl.tensor, scale: tl.tensor, centre: tl.tensor, BITS: tl.constexpr, WHICH: tl.constexpr) -> tl.tensor:
    code = ((codes >> (16 * WHICH)) & 0xFFFF).to(tl.float16) - float(1 << BITS >> 1)
    return (code * _half(scale, WHICH) + _half(centre, WHICH)).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def pair_power_of_two(exponents: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """2 to the power of each half of a pair."""
    if FAST:
        value = tl.inline_asm_elementwise("ex2.approx.f16x2 $0, $1;", "=r,r", [exponents], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        low = tl.exp2(_half(exponents, 0).to(tl.float32)).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = tl.exp2(_half(exponents, 1).to(tl.float32)).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        value = low | (high << 16)
    return value


@triton.jit
def _half(pair: tl.tensor, WHICH: tl.constexpr) -> tl.tensor:
    return (pair >> (16 * WHICH)).to(tl.uint16).to(tl.float16, bitcast=True)
