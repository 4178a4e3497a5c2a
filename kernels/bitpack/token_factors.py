"""Token factors: one norm or scale per token, stored as float16, as float32, or as a byte with the logarithm of a norm.

Factors are loaded with the rows of a tile, and then converted to float32 ``[warp, token]``.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import struct

import triton
from triton import language as tl

from kvpack.formats.streams import DTYPE_BYTES
from kvpack.formats.token_norms import MIN_LOG2, STEPS_PER_OCTAVE, TOKEN_NORMS

from .bitfields import load_per_token
from .tile_layout import second_token_offset

FACTOR_BITS = {norm: 8 * DTYPE_BYTES[dtype] for norm, dtype in TOKEN_NORMS.items()}
"""Number of bits of a stored norm, by the codec's norm format."""

LOG8_STEPS, LOG8_OCTAVE = tl.constexpr(STEPS_PER_OCTAVE), tl.constexpr(MIN_LOG2)


def _ptx_float(value: float) -> str:
    return f"0f{struct.pack('>f', value).hex()}"


_LOG8_PTX = tl.constexpr(
    f"""{{ .reg .b32 code; .reg .f32 log; .reg .pred zero;
        shr.u32 code, $1, $2; lop3.b32 code, code, 0xFF, 0x4B000000, 0xEA; setp.eq.u32 zero, code, 0x4B000000; mov.b32 log, code;
        fma.rn.f32 log, log, {_ptx_float(1 / STEPS_PER_OCTAVE)}, {_ptx_float(MIN_LOG2 - (2**23 + 1) / STEPS_PER_OCTAVE)};
        ex2.approx.ftz.f32 log, log; selp.f32 $0, {_ptx_float(0.0)}, log, zero; }}"""
)
"""PTX that decodes a byte of a word as the logarithm of a norm.

Setting the bits of 2^23 turns a code into the float 2^23 + code. For the same steps in Triton, the compiler would decode norms in a
different layout than the scores and convert them through shared memory.
"""

MAX_FACTOR = tl.constexpr(2.0**127)
"""Maximum magnitude of a factor."""


@triton.jit
def finite_factor(factor: tl.tensor) -> tl.tensor:
    """Clamp the magnitude of float32 ``factor`` to ``MAX_FACTOR``, because an infinite factor would turn zeros into NaN."""
    return tl.minimum(tl.maximum(factor, -MAX_FACTOR), MAX_FACTOR)


@triton.jit
def load_factor(
    pointer: tl.tensor, first: tl.tensor, token: tl.tensor, valid: tl.tensor, BITS: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """Load one ``BITS``-bit factor per token, ``[warp, token]``, for ``read_factor``.

    Triton prefetches only 32-bit loads. With ``FAST``, a factor of 8 or 16 bits is therefore loaded as the aligned 32-bit word that
    contains it, and the bit at which it begins. If a stream ends inside such a word, unmasked tiles never reach its end (see
    ``attend.plan``).
    """
    if BITS < 32 and FAST:
        if MASKED:
            # The word that contains the last factor may end past the stream.
            loaded = (load_per_token(pointer, first, token, valid, 1, 0, MASKED).to(tl.int32), tl.zeros(token.shape, tl.int32))
        else:
            BYTES: tl.constexpr = BITS // 8
            address = pointer.to(tl.int64)
            before = address & 3
            byte = before + first.to(tl.int64) * BYTES + token * BYTES
            word = tl.load((address - before).to(tl.pointer_type(tl.int32)) + (byte >> 2))
            loaded = (word, ((byte & 3) * 8).to(tl.int32))
    else:
        loaded = (load_per_token(pointer, first, token, valid, 1, 0, MASKED),)
    return loaded


@triton.jit
def read_factor(loaded: tl.tuple, AT: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Convert the factors in ``loaded[AT]``, which ``load_factor`` loaded, to float32 ``[warp, token]``."""
    bits = loaded[AT]
    if BITS == 16 and FAST:
        bits = bits >> loaded[AT + 1]
    if BITS == 8 and FAST:
        value = tl.inline_asm_elementwise(_LOG8_PTX, "=f,r,r", [bits, loaded[AT + 1]], dtype=tl.float32, is_pure=True, pack=1)
    elif BITS == 16:
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif BITS == 8:
        code = bits.to(tl.int32) & 0xFF
        value = tl.where(code == 0, 0.0, tl.exp2((code - 1).to(tl.float32) / LOG8_STEPS + LOG8_OCTAVE))
    else:
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def load_factors(
    pointer: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    BITS: tl.constexpr,
    DUAL: tl.constexpr,
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Load factors as ``load_factor`` does. For dual tiles, also load the factors of the second tokens.

    ``valid`` is a mask or, for dual tiles, a pair of masks.
    """
    if DUAL:
        loaded = load_factor(pointer, first, token, valid[0], BITS, MASKED, FAST)
        loaded = loaded + load_factor(pointer, first, token + second_token_offset(DUAL, token.shape[1]), valid[1], BITS, MASKED, FAST)
    else:
        loaded = load_factor(pointer, first, token, valid, BITS, MASKED, FAST)
    return loaded


@triton.jit
def read_factors(loaded: tl.tuple, AT: tl.constexpr, BITS: tl.constexpr, DUAL: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Convert the factors that ``load_factors`` loaded to float32 ``[warp, token]``. For dual tiles, returns a pair of such tensors."""
    if DUAL:
        value = read_factor(loaded, AT, BITS, FAST), read_factor(loaded, AT + (2 if BITS < 32 and FAST else 1), BITS, FAST)
    else:
        value = read_factor(loaded, AT, BITS, FAST)
    return value
