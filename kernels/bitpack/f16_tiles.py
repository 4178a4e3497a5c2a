"""Arithmetic on tiles of float16 values, and conversion of codes to such tiles.

Two neighboring values share a register (f16x2). ``FAST`` permits inline PTX, which processes both values together; without it, the same
functions use plain Triton.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from .bitfields import extract_straddling


@triton.jit
def code_as_f16(word: tl.tensor, POSITION: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Convert ``BITS`` bits of each word, beginning at bit ``POSITION``, to float16. ``BITS`` is at most 10."""
    if FAST:
        value = tl.inline_asm_elementwise(_code_ptx(POSITION, BITS), "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = ((word >> POSITION) & ((1 << BITS) - 1)).to(tl.float16)
    return value


@triton.constexpr_function
def _code_ptx(position: int, bits: int) -> str:
    mask = ((1 << bits) - 1) * 0x10001
    return f"""{{ .reg .b32 a, b;
        shr.b32 a, $1, {position}; lop3.b32 a, a, {mask}, 0x64006400, 0xEA;
        mov.b32 b, 0x64006400; sub.f16x2 $0, a, b; }}"""


@triton.jit
def multiply(first: tl.tensor, second: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    if FAST:
        value = tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [first, second], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = first * second
    return value


@triton.jit
def exp2(exponent: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    if FAST:
        value = tl.inline_asm_elementwise("ex2.approx.f16x2 $0, $1;", "=r,r", [exponent], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = tl.exp2(exponent.to(tl.float32)).to(tl.float16)
    return value


@triton.constexpr_function
def _negate_ptx(position: int) -> str:
    return f"{{ .reg .b32 a; shl.b32 a, $2, {15 - position}; lop3.b32 $0, a, 0x80008000, $1, 0x6A; }}"


@triton.jit
def negate_by_bit(value: tl.tensor, word: tl.tensor, POSITION: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Negate each float16 in ``value`` if bit ``POSITION`` of its element of ``word`` is set."""
    if FAST:
        result = tl.inline_asm_elementwise(_negate_ptx(POSITION), "=r,r,r", [value, word], dtype=tl.float16, is_pure=True, pack=2)
    else:
        result = tl.where((word >> POSITION) & 1 == 1, -value, value)
    return result


@triton.jit
def split_scales(scales: tl.tensor, FAST: tl.constexpr) -> tl.tuple:
    """Split each int32 of ``scales`` into a float16 scale (low half) and center (high half), for ``affine``."""
    if FAST:
        scale, center = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
            "=&r,=&r,r,r",
            [scales],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        scale = (scales & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        center = (scales >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale, center


FRACTION_BITS = 10
"""Number of fraction bits of float16."""


@triton.constexpr_function
def middle_code(bits: int) -> float:
    return ((1 << bits) - 1) / 2


@triton.constexpr_function
def binary16_bits(value: float) -> int:
    """Return the bit pattern of ``value`` as a float16 number."""
    import struct

    return int.from_bytes(struct.pack("<e", value), "little")


@triton.constexpr_function
def _affine_ptx(position: int, bits: int, middle: float) -> str:
    """Return PTX that computes (code - ``middle``) * scale + center for two words. Each code is inserted into the fraction of a float16."""
    half_bit = int(middle % 1 > 0)
    shared_bits = (FRACTION_BITS - half_bit) // bits * bits
    # Use the same shift for as many fields as possible, so that the assembler merges the shifts.
    shift = position // shared_bits * shared_bits - half_bit
    if position - shift + bits > FRACTION_BITS:
        shift = position - half_bit
    position -= shift
    exponent, unit = 25 - position, 1 << (FRACTION_BITS - position)
    bias = binary16_bits(unit + middle)
    mask = ((1 << bits) - 1 << position) * 0x10001
    word = f"shl.b32 a, $1, {-shift};" if shift < 0 else f"shr.b32 a, $1, {shift};" if shift else "mov.b32 a, $1;"
    masked = f"{word} lop3.b32 a, a, {mask}, {(exponent << 10) * 0x10001}, 0xEA;"
    if (shift, position, bits) == (8, 0, 8):
        # Permute the upper bytes below the upper byte of a binary16 between 1024 and 2048.
        masked = f"mov.b32 b, {(exponent << 10) * 0x10001}; prmt.b32 a, $1, b, 0x5351;"
    return f"""{{ .reg .b32 a, b;
        {masked}
        mov.b32 b, {bias * 0x10001}; sub.f16x2 a, a, b;
        fma.rn.f16x2 $0, a, $2, $3; }}"""


@triton.jit
def affine(
    word: tl.tensor,
    scale: tl.tensor,
    center: tl.tensor,
    POSITION: tl.constexpr,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Return (code - ``MIDDLE``) * scale + center in float16. A code is the ``BITS`` bits at bit ``POSITION`` of ``word``.

    ``scale`` and ``center`` are float16 and broadcast to ``word``. ``MIDDLE`` is ``middle_code``, or that number rounded up: an integer
    saves a shift for codes that begin at bit 0.
    """
    if FAST:
        value = tl.inline_asm_elementwise(
            _affine_ptx(POSITION, BITS, MIDDLE), "=r,r,r,r", [word, scale, center], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        code = (word >> POSITION) & ((1 << BITS) - 1)
        value = (code.to(tl.float16) - MIDDLE) * scale + center
    return value


@triton.jit
def affine_column(
    planes: tl.tuple,
    scale: tl.tensor,
    center: tl.tensor,
    BIT: tl.constexpr,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Apply ``affine`` to ``BITS`` bits of each column, beginning at bit ``BIT``. The bits may span two planes."""
    if BIT % 16 + BITS > 16:
        value = affine(extract_straddling(planes, BIT, BITS, FAST), scale, center, 0, BITS, MIDDLE, FAST)
    else:
        value = affine(planes[BIT // 16], scale, center, BIT % 16, BITS, MIDDLE, FAST)
    return value


@triton.jit
def column_code_as_f16(planes: tl.tuple, BIT: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Convert ``BITS`` bits of each column, beginning at bit ``BIT``, to float16. The bits may span two planes."""
    if BIT % 16 + BITS > 16:
        value = code_as_f16(extract_straddling(planes, BIT, BITS, FAST), 0, BITS, FAST)
    else:
        value = code_as_f16(planes[BIT // 16], BIT % 16, BITS, FAST)
    return value
