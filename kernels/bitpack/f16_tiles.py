"""Arithmetic on tiles of binary16 values, and the values of digits as such tiles.

Two neighboring values share a register (f16x2), and the inline PTX (``FAST``) works on both at once; without it the same functions are
plain Triton.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from .bitfields import straddling


@triton.jit
def code_as_f16(word: tl.tensor, POSITION: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return ``BITS`` bits (at most 10) of each word from ``POSITION`` up, as binary16."""
    if FAST:
        value = tl.inline_asm_elementwise(_code(POSITION, BITS), "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = ((word >> POSITION) & ((1 << BITS) - 1)).to(tl.float16)
    return value


@triton.constexpr_function
def _code(position: int, bits: int) -> str:
    mask = ((1 << bits) - 1) * 0x10001
    return f"""{{ .reg .b32 a, b;
        shr.b32 a, $1, {position}; lop3.b32 a, a, {mask}, 0x64006400, 0xEA;
        mov.b32 b, 0x64006400; sub.f16x2 $0, a, b; }}"""


@triton.jit
def product(first: tl.tensor, second: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Multiply two binary16 tiles."""
    if FAST:
        value = tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [first, second], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = first * second
    return value


@triton.jit
def power_of_two(exponent: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Return 2 to the power of a binary16 tile."""
    if FAST:
        value = tl.inline_asm_elementwise("ex2.approx.f16x2 $0, $1;", "=r,r", [exponent], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = tl.exp2(exponent.to(tl.float32)).to(tl.float16)
    return value


@triton.constexpr_function
def _negate(position: int) -> str:
    return f"{{ .reg .b32 a; shl.b32 a, $2, {15 - position}; lop3.b32 $0, a, 0x80008000, $1, 0x6A; }}"


@triton.jit
def negated(value: tl.tensor, word: tl.tensor, POSITION: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Flip the sign of the binary16 ``value`` where bit ``POSITION`` of ``word`` is set."""
    if FAST:
        result = tl.inline_asm_elementwise(_negate(POSITION), "=r,r,r", [value, word], dtype=tl.float16, is_pure=True, pack=2)
    else:
        result = tl.where((word >> POSITION) & 1 == 1, -value, value)
    return result


@triton.jit
def scale_and_centre(scales: tl.tensor, FAST: tl.constexpr) -> tl.tuple:
    """Split int32 ``scales`` of any shape into the binary16 scale (low half) and center (high half) for ``affine``."""
    if FAST:
        scale, centre = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
            "=&r,=&r,r,r",
            [scales],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        scale = (scales & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        centre = (scales >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale, centre


FRACTION_BITS = 10
"""Bits of the fraction of a binary16."""


@triton.constexpr_function
def middle_code(bits: int) -> float:
    """Return the midpoint of all codes of ``bits`` bits."""
    return ((1 << bits) - 1) / 2


@triton.constexpr_function
def binary16_bits(value: float) -> int:
    """Return the bit pattern of a binary16."""
    import struct

    return int.from_bytes(struct.pack("<e", value), "little")


@triton.constexpr_function
def _affine(position: int, bits: int, middle: float) -> str:
    """Return PTX that computes (code - ``middle``) * scale + center on two words.

    The code is inserted into the fraction bits of a binary16 one-half.
    """
    spare = int(middle % 1 > 0)
    shared = (FRACTION_BITS - spare) // bits * bits
    # The same shift for as many fields as can share it: the assembler then does it once.
    shift = position // shared * shared - spare
    if position - shift + bits > FRACTION_BITS:
        shift = position - spare
    position -= shift
    exponent, one = 25 - position, 1 << (FRACTION_BITS - position)
    bias = binary16_bits(one + middle)
    mask = ((1 << bits) - 1 << position) * 0x10001
    word = f"shl.b32 a, $1, {-shift};" if shift < 0 else f"shr.b32 a, $1, {shift};" if shift else "mov.b32 a, $1;"
    masked = f"{word} lop3.b32 a, a, {mask}, {(exponent << 10) * 0x10001}, 0xEA;"
    if (shift, position, bits) == (8, 0, 8):
        # The upper bytes, each below the upper byte of a binary16 of 1024 to 2048.
        masked = f"mov.b32 b, {(exponent << 10) * 0x10001}; prmt.b32 a, $1, b, 0x5351;"
    return f"""{{ .reg .b32 a, b;
        {masked}
        mov.b32 b, {bias * 0x10001}; sub.f16x2 a, a, b;
        fma.rn.f16x2 $0, a, $2, $3; }}"""


@triton.jit
def affine(
    word: tl.tensor,
    scale: tl.tensor,
    centre: tl.tensor,
    POSITION: tl.constexpr,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Return (code - ``MIDDLE``) * scale + center in binary16; ``scale`` and ``centre`` are binary16 and broadcast to ``word``.

    ``MIDDLE`` is the middle code, or the integer above it, which saves a shift for codes that begin at bit 0.
    """
    if FAST:
        value = tl.inline_asm_elementwise(
            _affine(POSITION, BITS, MIDDLE), "=r,r,r,r", [word, scale, centre], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        code = (word >> POSITION) & ((1 << BITS) - 1)
        value = (code.to(tl.float16) - MIDDLE) * scale + centre
    return value


@triton.jit
def affine_bits(
    planes: tl.tuple,
    scale: tl.tensor,
    centre: tl.tensor,
    BIT: tl.constexpr,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Apply ``affine`` to ``BITS`` bits of each column from ``BIT`` up."""
    if BIT % 16 + BITS > 16:
        value = affine(straddling(planes, BIT, BITS, FAST), scale, centre, 0, BITS, MIDDLE, FAST)
    else:
        value = affine(planes[BIT // 16], scale, centre, BIT % 16, BITS, MIDDLE, FAST)
    return value


@triton.jit
def code_bits(planes: tl.tuple, BIT: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return ``BITS`` bits of each column from ``BIT`` up, as binary16."""
    if BIT % 16 + BITS > 16:
        value = code_as_f16(straddling(planes, BIT, BITS, FAST), 0, BITS, FAST)
    else:
        value = code_as_f16(planes[BIT // 16], BIT % 16, BITS, FAST)
    return value
