"""Arithmetic on f16x2 values: uint32 tensors whose elements contain two float16 numbers.

``FAST`` permits inline PTX; without it, functions use plain Triton.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from .columns import constant_at
from .thread_digits import column_pieces


@triton.jit
def join_halves(low: tl.tensor, high: tl.tensor, LOW: tl.constexpr, HIGH: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Join one half of ``low`` and one half of ``high``. ``LOW`` and ``HIGH`` select the lower (0) or upper (1) half of these operands."""
    if FAST:
        SELECT: tl.constexpr = (0x7600 if HIGH else 0x5400) + (0x32 if LOW else 0x10)
        value = tl.inline_asm_elementwise(f"prmt.b32 $0, $1, $2, {SELECT};", "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        value = ((low >> (16 * LOW)) & 0xFFFF) | ((high >> (16 * HIGH)) << 16)
    return value


@triton.constexpr_function
def _negate_ptx(low: int, high: int) -> str:
    select = (8 | low // 8) << 4 | (12 | high // 8) << 12
    return f"{{ .reg .b32 signs; prmt.b32 signs, $2, $3, {select}; lop3.b32 $0, signs, 0x80008000, $1, 0x6A; }}"


@triton.jit
def negate_f16x2(
    values: tl.tensor, words: tl.tuple, PACKING: tl.constexpr, COLUMN: tl.constexpr, POSITION: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    """Negate each half of f16x2 ``values`` whose sign bit is set.

    The sign of the low half is bit ``POSITION`` of column ``COLUMN``, and the sign of the high half is the next bit.
    """
    LOW: tl.constexpr = column_pieces(PACKING, COLUMN, POSITION, 1)
    HIGH: tl.constexpr = column_pieces(PACKING, COLUMN, POSITION + 1, 1)
    LOW_BIT: tl.constexpr = constant_at(LOW, 0)
    HIGH_BIT: tl.constexpr = constant_at(HIGH, 0)
    low, high = words[LOW_BIT.word], words[HIGH_BIT.word]
    if FAST:
        # The permutation replicates the top bit of a byte. There are few distinct shifts, shared by all symbols of a word.
        low, high = low << (7 - LOW_BIT.shift % 8), high << (7 - HIGH_BIT.shift % 8)
        value = tl.inline_asm_elementwise(
            _negate_ptx(LOW_BIT.shift, HIGH_BIT.shift), "=r,r,r,r", [values, low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        value = values ^ (((low >> LOW_BIT.shift) & 1) << 15) ^ (((high >> HIGH_BIT.shift) & 1) << 31)
    return value


@triton.jit
def multiply_f16x2(first: tl.tensor, second: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    if FAST:
        value = tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [first, second], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        low = _half_as_f16(first, 0) * _half_as_f16(second, 0)
        high = _half_as_f16(first, 1) * _half_as_f16(second, 1)
        value = low.to(tl.uint16, bitcast=True).to(tl.uint32) | (high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    return value


@triton.constexpr_function
def _scale_ptx(index: int) -> str:
    half = ("low", "high")[index]
    return f"""{{ .reg .b16 low, high; .reg .b32 both;
        mov.b32 {{low, high}}, $2; mov.b32 both, {{{half}, {half}}}; mul.rn.f16x2 $0, $1, both; }}"""


@triton.jit
def scale_f16x2(values: tl.tensor, scales: tl.tensor, HALF: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Multiply both halves of ``values`` by one half of ``scales``: the lower half if ``HALF`` is 0, the upper half if it is 1."""
    if FAST:
        value = tl.inline_asm_elementwise(_scale_ptx(HALF), "=r,r,r", [values, scales], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        value = multiply_f16x2(values, join_halves(scales, scales, HALF, HALF, FAST), FAST)
    return value


@triton.jit
def broadcast_f16x2(value: tl.tensor) -> tl.tensor:
    """Round float32 ``value`` to float16, and store it in both halves of an f16x2."""
    return value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001


@triton.constexpr_function
def _affine_ptx(bits: int) -> str:
    """Return PTX for ``affine_f16x2``, which inserts each code into the low bits of a float16 fraction."""
    import struct

    bias = int.from_bytes(struct.pack("<e", 1024.0 + (1 << bits >> 1)), "little") * 0x10001
    return f"""{{ .reg .b32 a, b;
        or.b32 a, $1, 0x64006400; mov.b32 b, {bias};
        sub.f16x2 a, a, b; fma.rn.f16x2 $0, a, $2, $3; }}"""


@triton.jit
def affine_f16x2(codes: tl.tensor, scale: tl.tensor, center: tl.tensor, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return (code - 2^BITS / 2) * scale + center for two codes per register, as f16x2.

    The codes have ``BITS`` bits (at most 8) and are 16 bits apart. ``scale`` and ``center`` are f16x2.
    """
    if FAST:
        value = tl.inline_asm_elementwise(_affine_ptx(BITS), "=r,r,r,r", [codes, scale, center], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        value = _affine_half(codes, scale, center, BITS, 0) | (_affine_half(codes, scale, center, BITS, 1) << 16)
    return value


@triton.jit
def _affine_half(codes: tl.tensor, scale: tl.tensor, center: tl.tensor, BITS: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    code = ((codes >> (16 * HALF)) & 0xFFFF).to(tl.float16) - float(1 << BITS >> 1)
    return (code * _half_as_f16(scale, HALF) + _half_as_f16(center, HALF)).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def exp2_f16x2(exponents: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    if FAST:
        value = tl.inline_asm_elementwise("ex2.approx.f16x2 $0, $1;", "=r,r", [exponents], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        low = tl.exp2(_half_as_f16(exponents, 0).to(tl.float32)).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = tl.exp2(_half_as_f16(exponents, 1).to(tl.float32)).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        value = low | (high << 16)
    return value


@triton.jit
def _half_as_f16(values: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    return (values >> (16 * HALF)).to(tl.uint16).to(tl.float16, bitcast=True)
