"""Arithmetic on f16x2, 32-bit registers with two binary16, as uint32 tensors, for rows that are in one thread.

Without inline PTX (``FAST`` false) the same functions are plain Triton.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from .columns import constant_at
from .thread_digits import pieces_of_bits


@triton.jit
def joined(low: tl.tensor, high: tl.tensor, LOW: tl.constexpr, HIGH: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Join one half of ``low`` and one half of ``high`` to an f16x2; ``LOW`` and ``HIGH`` select the lower (0) or upper (1) half."""
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
def negated_f16x2(
    values: tl.tensor, words: tl.tuple, PACKING: tl.constexpr, COLUMN: tl.constexpr, POSITION: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    """Flip the sign of the low half of ``values`` if bit ``POSITION`` of a column is set, and of the high half if the next bit is."""
    LOW: tl.constexpr = pieces_of_bits(PACKING, COLUMN, POSITION, 1)
    HIGH: tl.constexpr = pieces_of_bits(PACKING, COLUMN, POSITION + 1, 1)
    LOW_BIT: tl.constexpr = constant_at(LOW, 0)
    HIGH_BIT: tl.constexpr = constant_at(HIGH, 0)
    low, high = words[LOW_BIT.word], words[HIGH_BIT.word]
    if FAST:
        # The permutation copies the top bit of a byte; there are few different shifts, the same for all symbols of a word.
        low, high = low << (7 - LOW_BIT.shift % 8), high << (7 - HIGH_BIT.shift % 8)
        value = tl.inline_asm_elementwise(
            _negate(LOW_BIT.shift, HIGH_BIT.shift), "=r,r,r,r", [values, low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        value = values ^ (((low >> LOW_BIT.shift) & 1) << 15) ^ (((high >> HIGH_BIT.shift) & 1) << 31)
    return value


@triton.jit
def product_f16x2(first: tl.tensor, second: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Multiply two f16x2, half by half."""
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
def scaled_f16x2(values: tl.tensor, scales: tl.tensor, WHICH: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Multiply both halves of ``values`` by the lower (0) or upper (1) half of ``scales``, without building that operand first."""
    if FAST:
        value = tl.inline_asm_elementwise(_scaled_by_half(WHICH), "=r,r,r", [values, scales], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        value = product_f16x2(values, joined(scales, scales, WHICH, WHICH, FAST), FAST)
    return value


@triton.jit
def both_halves(value: tl.tensor) -> tl.tensor:
    """Round a float32 to binary16, and return it in both halves."""
    return value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001


@triton.constexpr_function
def _affine(bits: int) -> str:
    """Return PTX for ``affine_f16x2``: the code becomes the low end of a binary16's fraction."""
    import struct

    bias = int.from_bytes(struct.pack("<e", 1024.0 + (1 << bits >> 1)), "little") * 0x10001
    return f"""{{ .reg .b32 a, b;
        or.b32 a, $1, 0x64006400; mov.b32 b, {bias};
        sub.f16x2 a, a, b; fma.rn.f16x2 $0, a, $2, $3; }}"""


@triton.jit
def affine_f16x2(codes: tl.tensor, scale: tl.tensor, centre: tl.tensor, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return (code - 2^BITS / 2) * scale + center of two codes of at most 8 ``BITS``, 16 bits apart; all operands are f16x2."""
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
def power_of_two_f16x2(exponents: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Return 2 to the power of each half."""
    if FAST:
        value = tl.inline_asm_elementwise("ex2.approx.f16x2 $0, $1;", "=r,r", [exponents], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        low = tl.exp2(_half(exponents, 0).to(tl.float32)).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = tl.exp2(_half(exponents, 1).to(tl.float32)).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        value = low | (high << 16)
    return value


@triton.jit
def _half(values: tl.tensor, WHICH: tl.constexpr) -> tl.tensor:
    return (values >> (16 * WHICH)).to(tl.uint16).to(tl.float16, bitcast=True)
