"""Encoder of the minifloat codec on the GPU (spec/codecs/minifloat.md), with the same bits as ``formats/minifloat.py``."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.minifloat import Minifloat, exponent_carry, floor_log2, max_quotient, run_scales
from kvpack.formats.streams import HALF_LIMIT
from kvpack.kernels.bitpack.minifloats import e4m3_as_f16

from .columns import MIN_AXIS, Term
from .kernel import Output, Quantizer, encode_rows
from .page_values import largest_magnitudes
from .rows import MAX_PRODUCTS, flag_unless, nearest_integer

TILE_VALUES = 1 << 12
"""Number of values in a program's tile. A tile contains whole tokens, because codes depend on a token's largest value."""

PER_RUN, PER_TOKEN, E8M0_BLOCKS, E4M3_BLOCKS = (tl.constexpr(number) for number in range(4))
"""Kinds of scales: for all tokens, per token, e8m0 per block, and e4m3 per block times one scale for all tokens."""

_HALF_LIMIT = tl.constexpr(HALF_LIMIT)


class ElementFormat(NamedTuple):
    """An element format: ``fraction`` bits, exponent ``bias``, ``finite`` magnitudes, and ``bits`` in total, including the sign."""

    fraction: int
    bias: int
    finite: int
    bits: int


class MinifloatConstants(NamedTuple):
    """Compile-time constants of a minifloat codec.

    ``form`` is the format of elements, and ``scale_form`` is the format of e4m3 scales. ``largest`` is the largest element value, ``emax``
    is its exponent, and ``carry`` is the result of ``exponent_carry``. ``kind`` is the kind of scales. A token has ``blocks`` scales, one
    for every ``size`` channels, in float16 if ``half``. Run scales limit quotients to ``max_quotient``; with ``per_head``, each head has
    its own run scale. If ``chosen``, run scales come from the magnitudes in table 0, float32 ``[batch, kv_head or 1]``. The first stored
    stream contains scales; with ``E4M3_BLOCKS``, the second one contains run scales.
    """

    form: ElementFormat
    scale_form: ElementFormat
    largest: float
    emax: int
    carry: int
    kind: int
    size: int
    blocks: int
    half: bool
    max_quotient: float
    per_head: bool
    chosen: bool


def encode(codec: Minifloat, x: torch.Tensor, output: Output) -> bool:
    """Encode ``x`` into ``output``. Returns False if the codec is not supported.

    Except for engine pages, ``output`` must contain the run scale of the preceding tokens, or 0 if there are none.
    """
    if codec.dim > MAX_PRODUCTS:
        return False
    streams, origins = output.streams, output.origins
    per_head = codec.granularity == "head"
    tables = []
    if codec.run_scale is not None and origins is None:
        scale = streams[codec.run_scale]
        result, finite = choose_run_scales(codec, x, scale.clone())
        flag = output.flag
        flag |= (~finite).any()
        scale.copy_(result)
    elif codec.run_scale is not None and origins is not None:
        tables.append(largest_magnitudes(x, origins, per_head))
    in_blocks = codec.granularity == "block"
    # A tile contains only whole blocks.
    symbols = max(MIN_AXIS, next_power_of_two(codec.dim), codec.block_size if in_blocks else 1)
    kind = (E4M3_BLOCKS if codec.run_scale else E8M0_BLOCKS) if in_blocks else PER_TOKEN if codec.granularity == "token" else PER_RUN
    form = codec.format
    constants = MinifloatConstants(
        ElementFormat(form.fraction_bits, form.bias, form.finite, form.bits), ElementFormat(3, 7, 0x7F, 8), form.largest,
        floor_log2(form.largest), exponent_carry(form), kind.value, codec.block_size if in_blocks else symbols,
        codec.blocks_per_token if in_blocks else 1, codec.scale_dtype == "fp16", max_quotient(codec), per_head, bool(tables),
    )  # fmt: skip
    stored = [streams["block_scales" if in_blocks else "scale"], *([streams["global_scale"]] if kind.value == E4M3_BLOCKS.value else [])]
    return encode_rows(
        codec, x, output, Quantizer(_quantize, constants, _load_run_scale if codec.run_scale else None), _digit_terms, stored, tables,
        symbols=symbols, tokens=TILE_VALUES // symbols, rotated=False, fusion=False,
    )  # fmt: skip


def _digit_terms(codec: Minifloat) -> dict[str, list[Term]]:
    return {"codes": [Term(0, codec.format.bits)]}


def choose_run_scales(codec: Minifloat, x: torch.Tensor, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the run scales for ``x``. Returns them with a mask of the finite ones.

    ``previous`` contains the run scales of the preceding tokens, or 0. PyTorch computes the scales in one pass over ``x``, without waiting
    for the device.
    """
    largest = x.abs().amax((2, 3))[..., None].to(torch.float32)
    if codec.granularity != "head":
        largest = largest.amax(1, keepdim=True)
    result = run_scales(codec, largest, previous)
    # NaN and values that do not fit yield an infinite or NaN scale; the codec reports them.
    return result, torch.isfinite(result)


@triton.jit
def _encode_elements(value: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """Encode finite float32 values to the codes of the nearest elements, int32, as ``formats/minifloat.py`` does. Ties go to even codes."""
    FRACTION: tl.constexpr = FORM.fraction
    BIAS: tl.constexpr = FORM.bias
    SPARE: tl.constexpr = 23 - FRACTION
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # A carry out of the fraction correctly increments the exponent.
    normal = ((magnitude + ((magnitude >> SPARE) & 1) + ((1 << (SPARE - 1)) - 1)) >> SPARE) - ((127 - BIAS) << FRACTION)
    size = tl.abs(value)
    subnormal = nearest_integer(tl.minimum(size, SMALLEST) * (2.0**FRACTION / SMALLEST), 2.0**FRACTION)
    code = tl.minimum(tl.where(size < SMALLEST, subnormal, normal), FORM.finite - 1)
    return code | ((bits >> 31) & 1) << (FORM.bits - 1)


@triton.jit
def _divide_by_scale(value: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return tl.div_rn(value, tl.where(scale > 0, scale, float("inf")))


@triton.jit
def _choose_scale(largest: tl.tensor, flag: tl.tensor, MAX_QUOTIENT: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    """Return the scale for values up to ``largest`` (at most 3.4e38), as ``formats/minifloat.py`` does.

    A scale that does not fit becomes 0 and sets the flag.
    """
    exact = tl.div_rn(largest, tl.full(largest.shape, MAX_QUOTIENT, tl.float32))
    if HALF:
        fits = exact < _HALF_LIMIT
        flag_unless(fits, flag)
        stored = tl.where(fits, exact, 0.0).to(tl.float16)
        short = stored.to(tl.float32) * (MAX_QUOTIENT * (1 + 1 / 32)) < largest
        stored = (stored.to(tl.int16, bitcast=True) + short.to(tl.int16)).to(tl.float16, bitcast=True)
    else:
        short = exact * (MAX_QUOTIENT * (1 + 1 / 32)) < largest
        stored = (exact.to(tl.int32, bitcast=True) + short.to(tl.int32)).to(tl.float32, bitcast=True)
    return stored


@triton.jit
def _load_run_scale(block: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
    """Return the run scale, float32 ``[1, 1]``. With ``chosen``, it is computed first, and the page's first program stores it."""
    scales = block.stored[1 if CONSTANTS.kind == E4M3_BLOCKS else 0]
    zero = tl.zeros((1, 1), tl.int32)
    address = scales + block.batch
    first = block.first == 0
    if CONSTANTS.per_head:
        address = scales + block.batch * block.heads + block.head
    else:
        first = first & (block.head == 0)
    if CONSTANTS.chosen:
        run_index = block.sequence
        if CONSTANTS.per_head:
            run_index = block.sequence * block.heads + block.head
        largest = tl.load(block.tables[0] + run_index + zero)
        scale = _choose_scale(tl.minimum(largest, 3.4e38), block.flag, CONSTANTS.max_quotient, CONSTANTS.half)
        tl.store(address + zero, scale, (zero == 0) & first)
    else:
        scale = tl.load(address + zero)
    return (scale.to(tl.float32),)


@triton.jit
def _quantize(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, block_index: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the codes of all channels of the tokens. Also stores token or block scales."""
    KIND: tl.constexpr = CONSTANTS.kind
    FORM: tl.constexpr = CONSTANTS.form
    E4M3: tl.constexpr = CONSTANTS.scale_form
    LARGEST: tl.constexpr = CONSTANTS.largest
    SIZE: tl.constexpr = CONSTANTS.size
    BLOCKS: tl.constexpr = CONSTANTS.blocks
    SYMBOLS: tl.constexpr = SHAPE.symbols
    value = values[0]
    flag_unless(tl.abs(value) < float("inf"), block.flag)
    if KIND == PER_RUN:
        scaled = _divide_by_scale(value, state[0])
    elif KIND == PER_TOKEN:
        largest = tl.minimum(tl.max(tl.abs(value), 1), 3.4e38)[:, None]
        stored = _choose_scale(largest, block.flag, LARGEST, CONSTANTS.half)
        tl.store(block.stored[0] + block.row, stored, block.valid)
        scaled = _divide_by_scale(value, stored.to(tl.float32))
    else:
        COUNT: tl.constexpr = SYMBOLS // SIZE
        TOKENS: tl.constexpr = SHAPE.tokens
        block_index = tl.arange(0, COUNT)[None, :]
        grouped = tl.reshape(value, (TOKENS, COUNT, SIZE))
        largest = tl.max(tl.abs(grouped), 2)
        if KIND == E8M0_BLOCKS:
            code = tl.maximum((largest.to(tl.int32, bitcast=True) + CONSTANTS.carry >> 23) - CONSTANTS.emax, 0)
            # 2^(127 - code): the reciprocal of a power of two is also a power of two.
            inverse = ((254 - code) << 23).to(tl.float32, bitcast=True)
            scaled = tl.reshape(grouped * inverse[:, :, None], (TOKENS, SYMBOLS))
        else:
            factor = state[0]
            code = _encode_elements(_divide_by_scale(tl.div_rn(largest, LARGEST), factor), E4M3)
            scale = e4m3_as_f16(code).to(tl.float32) * factor
            scaled = tl.reshape(_divide_by_scale(grouped, scale[:, :, None]), (TOKENS, SYMBOLS))
        tl.store(block.stored[0] + block.row * BLOCKS + block_index, code.to(tl.uint8), block.valid & (block_index < BLOCKS))
    return (_encode_elements(scaled, FORM),), state
