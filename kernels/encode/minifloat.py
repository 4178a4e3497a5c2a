"""Encode minifloat on the GPU (spec/codecs/minifloat.md); ``formats/minifloat.py`` is the oracle, bit for bit."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.base import HALF_LIMIT
from kvpack.formats.columns import next_power_of_two
from kvpack.formats.minifloat import floor_log2, max_quotient, run_scales
from kvpack.kernels.bitpack.minifloats import e4m3_as_f16

from .columns import SMALLEST_AXIS, Term
from .kernel import Quantizer, encode_rows
from .largest import largest_magnitudes
from .rows import MAX_PRODUCTS, flag_unless, nearest_integer

if TYPE_CHECKING:
    from kvpack.formats.minifloat import Minifloat

    from .kernel import Output

TILE_VALUES = 1 << 12
"""Values of a program's tile: whole tokens, whose largest value is needed before the first code."""

PER_RUN, PER_TOKEN, POWERS, NESTED = (tl.constexpr(number) for number in range(4))
"""Scales of a run, of a token, of blocks as e8m0, and of blocks as e4m3 over one of a run."""

_HALF_LIMIT = tl.constexpr(HALF_LIMIT)


class ElementForm(NamedTuple):
    """Parameters of an element: ``fraction`` bits, exponent ``bias``, the number of ``finite`` codes without a sign, and total ``bits``."""

    fraction: int
    bias: int
    finite: int
    bits: int


class MinifloatConstants(NamedTuple):
    """The element format, its ``largest`` value and that value's exponent ``emax``, the e4m3 format, and the ``kind`` of scales.

    Scales cover ``blocks`` of ``size`` channels, and are binary16 if ``half``; run scales make quotients at most ``most``, per head with
    ``per_head``. The streams are scales, and for ``NESTED`` also run scales. ``chosen``: the table, float32 ``[batch, kv_head or 1]``,
    holds the magnitudes from which run scales are chosen here.
    """

    form: ElementForm
    scale_form: ElementForm
    largest: float
    emax: int
    kind: int
    size: int
    blocks: int
    half: bool
    most: float
    per_head: bool
    chosen: bool


def encode(codec: Minifloat, x: torch.Tensor, output: Output) -> bool:
    """Fill ``output`` from ``x``. Returns False, and does nothing, for codecs that the kernel does not support.

    A run scale starts as that of the run before, or 0 without one; in the pages of an engine each batch entry is its own run.
    """
    if codec.dim > MAX_PRODUCTS:
        return False
    streams, origins = output.streams, output.origins
    per_head = codec.granularity == "head"
    tables = []
    if codec.run_scale is not None and origins is None:
        scale = streams[codec.run_scale]
        result, finite = chosen_scales(codec, x, scale.clone())
        flag = output.flag
        flag |= (~finite).any()
        scale.copy_(result)
    elif codec.run_scale is not None and origins is not None:
        tables.append(largest_magnitudes(x, origins, per_head))
    in_blocks = codec.granularity == "block"
    # Whole blocks.
    symbols = max(SMALLEST_AXIS, next_power_of_two(codec.dim), codec.block if in_blocks else 1)
    kind = (NESTED if codec.run_scale else POWERS) if in_blocks else PER_TOKEN if codec.granularity == "token" else PER_RUN
    form = codec.format
    constants = MinifloatConstants(
        ElementForm(form.fraction_bits, form.bias, form.finite, form.bits), ElementForm(3, 7, 0x7F, 8), form.largest,
        floor_log2(form.largest), kind.value, codec.block if in_blocks else symbols, codec.blocks if in_blocks else 1,
        codec.scale_dtype == "fp16", max_quotient(codec), per_head, bool(tables),
    )  # fmt: skip
    stored = [streams["block_scales" if in_blocks else "scale"], *([streams["global_scale"]] if kind.value == NESTED.value else [])]
    return encode_rows(
        codec, x, output, Quantizer(_quantize, constants, _scale_of_run if codec.run_scale else None), _terms, stored, tables,
        symbols=symbols, tokens=TILE_VALUES // symbols, rotated=False, fusion=False,
    )  # fmt: skip


def _terms(codec: Minifloat) -> dict[str, list[Term]]:
    return {"codes": [Term(0, codec.format.bits)]}


def chosen_scales(codec: Minifloat, x: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of the run that contains ``x``, chosen as for the run ``before``, and a mask of those that are numbers.

    Computed by torch: one pass over the input, without waiting for the device.
    """
    largest = x.abs().amax((2, 3))[..., None].to(torch.float32)
    if codec.granularity != "head":
        largest = largest.amax(1, keepdim=True)
    result = run_scales(codec, largest, before)
    # NaN and what does not fit are infinite or NaN here, and the codec names them.
    return result, torch.isfinite(result)


@triton.jit
def _elements(value: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """Encode finite float32 values to the codes, int32, of the nearest elements, ties to even: ``formats.minifloat.encode_elements``."""
    FRACTION: tl.constexpr = FORM.fraction
    BIAS: tl.constexpr = FORM.bias
    SPARE: tl.constexpr = 23 - FRACTION
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # A carry out of the fraction goes into the exponent, as it must.
    normal = ((magnitude + ((magnitude >> SPARE) & 1) + ((1 << (SPARE - 1)) - 1)) >> SPARE) - ((127 - BIAS) << FRACTION)
    size = tl.abs(value)
    subnormal = nearest_integer(tl.minimum(size, SMALLEST) * (2.0**FRACTION / SMALLEST), 2.0**FRACTION)
    code = tl.minimum(tl.where(size < SMALLEST, subnormal, normal), FORM.finite - 1)
    return code | ((bits >> 31) & 1) << (FORM.bits - 1)


@triton.jit
def _quotient(value: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return tl.div_rn(value, tl.where(scale > 0, scale, float("inf")))


@triton.jit
def _scale_for(largest: tl.tensor, flag: tl.tensor, MOST: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    """Compute ``formats.minifloat._scale_for`` of magnitudes up to 3.4e38; 0, and flagged, if it does not fit."""
    exact = tl.div_rn(largest, tl.full(largest.shape, MOST, tl.float32))
    if HALF:
        fits = exact < _HALF_LIMIT
        flag_unless(fits, flag)
        stored = tl.where(fits, exact, 0.0).to(tl.float16)
        short = stored.to(tl.float32) * (MOST * (1 + 1 / 32)) < largest
        stored = (stored.to(tl.int16, bitcast=True) + short.to(tl.int16)).to(tl.float16, bitcast=True)
    else:
        short = exact * (MOST * (1 + 1 / 32)) < largest
        stored = (exact.to(tl.int32, bitcast=True) + short.to(tl.int32)).to(tl.float32, bitcast=True)
    return stored


@triton.jit
def _scale_of_run(block: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
    """Return the scale of a run, float32 ``[1, 1]``; if scales are chosen here, the run's first program stores it."""
    scales = block.stored[1 if CONSTANTS.kind == NESTED else 0]
    at = tl.zeros((1, 1), tl.int32)
    place = scales + block.batch
    first = block.first == 0
    if CONSTANTS.per_head:
        place = scales + block.batch * block.heads + block.head
    else:
        first = first & (block.head == 0)
    if CONSTANTS.chosen:
        of_run = block.sequence
        if CONSTANTS.per_head:
            of_run = block.sequence * block.heads + block.head
        largest = tl.load(block.tables[0] + of_run + at)
        scale = _scale_for(tl.minimum(largest, 3.4e38), block.flag, CONSTANTS.most, CONSTANTS.half)
        tl.store(place + at, scale, (at == 0) & first)
    else:
        scale = tl.load(place + at)
    return (scale.to(tl.float32),)


@triton.jit
def _quantize(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, number: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the codes of a token's channels, and store scales that are not given."""
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
        scaled = _quotient(value, state[0])
    elif KIND == PER_TOKEN:
        largest = tl.minimum(tl.max(tl.abs(value), 1), 3.4e38)[:, None]
        stored = _scale_for(largest, block.flag, LARGEST, CONSTANTS.half)
        tl.store(block.stored[0] + block.row, stored, block.valid)
        scaled = _quotient(value, stored.to(tl.float32))
    else:
        COUNT: tl.constexpr = SYMBOLS // SIZE
        TOKENS: tl.constexpr = SHAPE.tokens
        part = tl.arange(0, COUNT)[None, :]
        grouped = tl.reshape(value, (TOKENS, COUNT, SIZE))
        largest = tl.max(tl.abs(grouped), 2)
        if KIND == POWERS:
            code = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - CONSTANTS.emax, 0)
            # 2^(127 - code): the reciprocal of a power of two is one.
            inverse = ((254 - code) << 23).to(tl.float32, bitcast=True)
            scaled = tl.reshape(grouped * inverse[:, :, None], (TOKENS, SYMBOLS))
        else:
            factor = state[0]
            code = _elements(_quotient(tl.div_rn(largest, LARGEST), factor), E4M3)
            scale = e4m3_as_f16(code).to(tl.float32) * factor
            scaled = tl.reshape(_quotient(grouped, scale[:, :, None]), (TOKENS, SYMBOLS))
        tl.store(block.stored[0] + block.row * BLOCKS + part, code.to(tl.uint8), block.valid & (part < BLOCKS))
    return (_elements(scaled, FORM),), state
