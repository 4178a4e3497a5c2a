"""Conversion of packed minifloats and their 8-bit scales to float16 tiles (spec/codecs/minifloat.md).

Two neighboring values share a register (f16x2). ``FAST`` permits inline PTX, which processes both values together; without it, the same
functions use plain Triton.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.target_info import cuda_capability_geq

E2M1_EXPONENT = tl.constexpr(14)
"""Binary exponent of the ratio of an e2m1 value to the float16 value with the same exponent and fraction bits."""


@triton.constexpr_function
def _elements_ptx(element: str, position: int, converts: bool) -> str:
    """Return PTX that converts the elements at bit ``position`` of two words to an f16x2.

    For e2m1, the caller must multiply the results by 2^E2M1_EXPONENT, and zeros may have either sign. ``converts`` is True if the device
    can convert two e4m3 values with one instruction. Fields of a word share some steps, which the assembler merges.
    """
    byte = "and.b32 $0, {0}, 0xFF00FF00;" if position >= 8 else "prmt.b32 $0, {0}, 0, 0x2404;"
    if element == "e5m2":
        return byte.format("$1")
    if element == "e2m1":
        # 9 * code + 120 has 8 bits. Its bit 6 is the sign, as far above the magnitude (3 bits) as in a binary16.
        multiplier, signs, bits = 9 << max(0, 9 - position), 120 << 9, 0x8E00
        nibbles = f"and.b32 a, $1, {(0xF0F0 if position % 8 else 0x0F0F) * 0x10001};"
        if position > 9:
            return f"{{ .reg .b32 a, b; {nibbles} shr.b32 b, a, 3; lop3.b32 $0, a, b, {bits * 0x10001}, 0xA8; }}"
        return f"{{ .reg .b32 a; {nibbles} mad.lo.u32 a, a, {multiplier}, {signs * 0x10001}; and.b32 $0, a, {bits * 0x10001}; }}"
    if converts:
        half = "high" if position >= 8 else "low"
        return f"""{{ .reg .b32 a; .reg .b16 low, high; prmt.b32 a, $1, 0, 0x3120;
            mov.b32 {{low, high}}, a; cvt.rn.f16x2.e4m3x2 $0, {half}; }}"""
    upper = "prmt.b32 a, $1, 0, 0x2404;" if position == 0 else "mov.b32 a, $1;"
    return f"""{{ .reg .b32 a, b, c;
        {upper} and.b32 b, a, 0x80008000; shr.b32 a, a, 1; lop3.b32 a, a, 0x3F803F80, b, 0xEA;
        mov.b32 c, 0x5C005C00; mul.rn.f16x2 $0, a, c; }}"""


@triton.jit
def elements_as_f16(word: tl.tensor, POSITION: tl.constexpr, ELEMENT: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Convert the element at bit ``POSITION`` of each word to float16.

    For e2m1, the caller must multiply the results by 2^E2M1_EXPONENT. With ``FAST``, zeros may have either sign.
    """
    if FAST:
        CONVERTS: tl.constexpr = cuda_capability_geq(8, 9)
        value = tl.inline_asm_elementwise(
            _elements_ptx(ELEMENT, POSITION, CONVERTS), "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        code = word.to(tl.int32) >> POSITION
        if ELEMENT == "e5m2":
            value = ((code & 0xFF) << 8).to(tl.int16).to(tl.float16, bitcast=True)
        elif ELEMENT == "e4m3":
            bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
            value = bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
        else:
            bits = ((code & 8) << 12) | ((code & 7) << 9)
            value = bits.to(tl.int16).to(tl.float16, bitcast=True)
    return value


@triton.jit
def e4m3_as_f16(byte: tl.tensor) -> tl.tensor:
    """Convert unsigned e4m3 values, stored as int32, to float16."""
    half = (byte << 7).to(tl.int16).to(tl.float16, bitcast=True)
    return half * 256.0


FOUR_E4M3_PTX = tl.constexpr(
    """{ .reg .b32 a, b; .reg .b16 low, high;
        prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $4, $5, 0x7362;
        mov.b32 {low, high}, a; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;
        mov.b32 {low, high}, b; cvt.rn.f16x2.e4m3x2 $2, low; cvt.rn.f16x2.e4m3x2 $3, high; }"""
)
"""PTX that converts the four e4m3 bytes of each of two words to four f16x2 registers, with one byte of each word per register."""


@triton.jit
def four_e4m3_as_f16(word: tl.tensor, FAST: tl.constexpr) -> tl.tuple:
    """Convert the four unsigned e4m3 bytes of each int32 word to four float16 tiles."""
    CONVERTS: tl.constexpr = FAST and cuda_capability_geq(8, 9)
    if CONVERTS:
        result = tl.inline_asm_elementwise(
            FOUR_E4M3_PTX,
            "=&r,=&r,=&r,=&r,r,r",
            [word],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        result = (
            e4m3_as_f16(word & 0xFF),
            e4m3_as_f16((word >> 8) & 0xFF),
            e4m3_as_f16((word >> 16) & 0xFF),
            e4m3_as_f16((word >> 24) & 0xFF),
        )
    return result


@triton.constexpr_function
def _four_powers_ptx(exponent_shift: int) -> str:
    """Return PTX that converts the four e8m0 scales of each of two words to powers of two.

    A result is the scale divided by the largest scale of its word, times 2^``exponent_shift``. There are four f16x2 outputs, with one scale
    of each word. Exponents are raised by 256, so that none is below the exponent that becomes 0. One product carries into the upper half;
    another product cancels this carry.
    """
    exponent = 15 + exponent_shift
    both = 0x10001
    bytes_of = "".join(
        f"prmt.b32 a, $4, $5, {select}; lop3.b32 p{register}, a, 0x00FF00FF, {256 * both}, 0xEA; "
        f"shr.b32 a, a, 8; lop3.b32 p{register + 1}, a, 0x00FF00FF, {256 * both}, 0xEA;"
        for register, select in ((0, 0x5410), (2, 0x7632))
    )
    powers = "".join(f"max.u16x2 a, p{register}, n; mad.lo.u32 ${register}, a, 1024, m;" for register in range(4))
    return f"""{{ .reg .b32 a, m, n, p0, p1, p2, p3; {bytes_of}
        max.u16x2 n, p0, p1; max.u16x2 m, p2, p3; max.u16x2 n, n, m;
        sub.u32 n, n, {exponent * both}; mul.lo.u32 m, n, 0xFFFFFC00; {powers} }}"""


@triton.jit
def four_powers_as_f16(word: tl.tensor, EXPONENT_SHIFT: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """Convert the four e8m0 scales of each int32 word to four float16 tiles.

    A result is the scale divided by the largest scale of its word, times 2^``EXPONENT_SHIFT``.
    """
    PACKS: tl.constexpr = FAST and cuda_capability_geq(9, 0)
    if PACKS:
        result = tl.inline_asm_elementwise(
            _four_powers_ptx(EXPONENT_SHIFT),
            "=&r,=&r,=&r,=&r,r,r",
            [word],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low, high = tl.maximum(word & 0xFF, (word >> 8) & 0xFF), tl.maximum((word >> 16) & 0xFF, (word >> 24) & 0xFF)
        above = EXPONENT_SHIFT - tl.maximum(low, high)
        result = (
            power_as_f16((word & 0xFF) + above),
            power_as_f16(((word >> 8) & 0xFF) + above),
            power_as_f16(((word >> 16) & 0xFF) + above),
            power_as_f16(((word >> 24) & 0xFF) + above),
        )
    return result


@triton.jit
def power_as_f16(exponent: tl.tensor) -> tl.tensor:
    """Return 2^``exponent`` as float16, for int32 exponents of at most 15. Exponents below -14 yield 0."""
    return (tl.maximum(exponent + 15, 0) << 10).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def power_as_f32(exponent: tl.tensor) -> tl.tensor:
    """Return 2^(``exponent`` - 127) as float32, for e8m0 exponents in int32."""
    # Exponent 0 yields a subnormal number, 2^-127, whose bits are less than those of all other results.
    return tl.maximum(exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
