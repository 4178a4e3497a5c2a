"""Encode minifloat on the GPU (spec/codecs/minifloat.md); ``formats/minifloat.py`` is the oracle, bit for bit."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.base import HALF_LIMIT
from kvpack.formats.columns import next_power_of_two
from kvpack.formats.minifloat import floor_log2, most_of, run_scales
from kvpack.kernels.bitpack.columns import launch, tile_origin
from kvpack.kernels.bitpack.minifloats import e4m3_as_f16

from .columns import SMALLEST_AXIS, WARPS, Plan, Term, add_digits, empty_columns, plan_of, store_columns
from .largest import largest_magnitudes
from .rows import MAX_PRODUCTS, all_moved, flag_unless, input_of, load_rows, moved, nearest_integer, origin_of

if TYPE_CHECKING:
    from kvpack.formats.minifloat import Minifloat

    from .rows import Origins

TILE_VALUES = 1 << 12
"""Values of a program's tile: whole tokens, whose largest value is needed before the first code."""

PER_RUN, PER_TOKEN, POWERS, NESTED = (tl.constexpr(number) for number in range(4))
"""Scales of a run, of a token, of blocks as e8m0, and of blocks as e4m3 over one of a run."""


def encode(
    codec: Minifloat,
    x: torch.Tensor,
    streams: dict[str, torch.Tensor],
    planes: tuple[torch.Tensor, ...],
    flag: torch.Tensor,
    origins: Origins | None = None,
) -> bool:
    """Fill ``streams``, whose code ``planes`` are given; return False, and do nothing, for codecs that the kernel does not support.

    A scale per run is at first that of the run before, 0 if there is none; with ``origins`` each of the batch is a run of its own.
    """
    plan = _plan(codec, x.device) if codec.dim <= MAX_PRODUCTS else None
    if plan is None:
        return False
    batch, heads, tokens, _ = x.shape
    largest = None
    if codec.run_scale is not None and origins is None:
        scale = streams[codec.run_scale]
        found, finite = chosen_scales(codec, x, scale.clone())
        flag |= (~finite).any()
        scale.copy_(found)
    elif codec.run_scale is not None and origins is not None:
        largest = largest_magnitudes(x, origins, codec.granularity == "head")
    symbols = _symbols(codec)
    arguments, constants = input_of(x, origins)
    block_tokens = TILE_VALUES // symbols
    in_blocks = codec.granularity == "block"
    kind = (NESTED if codec.run_scale else POWERS) if in_blocks else PER_TOKEN if codec.granularity == "token" else PER_RUN
    form = codec.format
    launch(
        _encode, batch * heads * -(-tokens // block_tokens), x.device,
        *arguments, plan.places, planes, streams["block_scales" if in_blocks else "scale"],
        streams.get("global_scale"), largest, flag,
        DIM=constants["DIM"], PADDED_DIM=symbols, ALIGNED=constants["ALIGNED"], KIND=kind.value, PER_HEAD=codec.granularity == "head",
        SIZE=codec.block if in_blocks else symbols, BLOCKS=codec.blocks if in_blocks else 1,
        HALF=codec.scale_dtype == "fp16", HALF_LIMIT=HALF_LIMIT, LARGEST=form.largest, MOST=most_of(codec), EMAX=floor_log2(form.largest),
        FRACTION=form.fraction_bits, BIAS=form.bias, FINITE=form.finite, BITS=form.bits,
        STREAMS=plan.streams, BLOCK_TOKENS=block_tokens, warps=WARPS,
    )  # fmt: skip
    return True


def chosen_scales(codec: Minifloat, x: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of the run that ``x`` is in, like those of the run ``before``, and whether each is a number.

    Computed by torch: one pass over the input, and no wait for the device.
    """
    largest = x.abs().amax((2, 3))[..., None].to(torch.float32)
    if codec.granularity != "head":
        largest = largest.amax(1, keepdim=True)
    found = run_scales(codec, largest, before)
    # NaN and what does not fit are infinite or NaN here, and the codec names them.
    return found, torch.isfinite(found)


def _symbols(codec: Minifloat) -> int:
    """Channels of a token, padding included: whole blocks."""
    return max(SMALLEST_AXIS, next_power_of_two(codec.dim), codec.block if codec.granularity == "block" else 1)


@lru_cache(maxsize=64)
def _plan(codec: Minifloat, device: torch.device) -> Plan | None:
    return plan_of(codec, {"codes": [Term(0, codec.format.bits)]}, _symbols(codec), device)


@triton.jit
def _elements(value: tl.tensor, FRACTION: tl.constexpr, BIAS: tl.constexpr, FINITE: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """The codes, int32, of the elements nearest to finite float32 values, ties to even: ``formats.minifloat.encoded``."""
    SPARE: tl.constexpr = 23 - FRACTION
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # A carry out of the fraction goes into the exponent, as it must.
    normal = ((magnitude + ((magnitude >> SPARE) & 1) + ((1 << (SPARE - 1)) - 1)) >> SPARE) - ((127 - BIAS) << FRACTION)
    size = tl.abs(value)
    subnormal = nearest_integer(tl.minimum(size, SMALLEST) * (2.0**FRACTION / SMALLEST), 2.0**FRACTION)
    code = tl.minimum(tl.where(size < SMALLEST, subnormal, normal), FINITE - 1)
    return code | ((bits >> 31) & 1) << (BITS - 1)


@triton.jit
def _quotient(value: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return tl.div_rn(value, tl.where(scale > 0, scale, float("inf")))


@triton.jit
def _scale_for(largest: tl.tensor, flag: tl.tensor, MOST: tl.constexpr, HALF: tl.constexpr, HALF_LIMIT: tl.constexpr) -> tl.tensor:
    """Return ``formats.minifloat._scale_for`` of magnitudes up to 3.4e38; 0, and flagged, if it does not fit."""
    exact = tl.div_rn(largest, tl.full(largest.shape, MOST, tl.float32))
    if HALF:
        fits = exact < HALF_LIMIT
        flag_unless(fits, flag)
        stored = tl.where(fits, exact, 0.0).to(tl.float16)
        short = stored.to(tl.float32) * (MOST * (1 + 1 / 32)) < largest
        stored = (stored.to(tl.int16, bitcast=True) + short.to(tl.int16)).to(tl.float16, bitcast=True)
    else:
        short = exact * (MOST * (1 + 1 / 32)) < largest
        stored = (exact.to(tl.int32, bitcast=True) + short.to(tl.int32)).to(tl.float32, bitcast=True)
    return stored


@triton.jit
def _scale_of_run(
    place: tl.tensor,
    largest: tl.tensor,
    first: tl.tensor,
    flag: tl.tensor,
    MOST: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LIMIT: tl.constexpr,
) -> tl.tensor:
    """Return the scale at ``place``, float32 ``[1, 1]``, chosen here if ``largest`` is given; the ``first`` program of a run stores it."""
    at = tl.zeros((1, 1), tl.int32)
    if largest is None:
        scale = tl.load(place + at)
    else:
        scale = _scale_for(tl.minimum(tl.load(largest + at), 3.4e38), flag, MOST, HALF, HALF_LIMIT)
        tl.store(place + at, scale, (at == 0) & first)
    return scale.to(tl.float32)


@triton.jit
def _encode(
    x: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    origins: tl.tensor,
    places: tl.tensor,
    planes: tl.tuple,
    scales: tl.tensor,
    global_scale: tl.tensor,
    largest_of_runs: tl.tensor,
    flag: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KIND: tl.constexpr,
    PER_HEAD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LIMIT: tl.constexpr,
    LARGEST: tl.constexpr,
    MOST: tl.constexpr,
    EMAX: tl.constexpr,
    FRACTION: tl.constexpr,
    BIAS: tl.constexpr,
    FINITE: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Encode ``BLOCK_TOKENS`` tokens of one head.

    ``x`` is ``[batch, kv_head, token, dim]`` of any strides; ``token`` and ``row`` (the token's number over all heads) are
    ``[token, 1]``, and tiles are ``[token, channel]``. ``scales`` is ``[batch, kv_head or 1]`` of a run (``PER_HEAD``: of a head),
    ``[batch, kv_head, token]``, or uint8 ``[batch, kv_head, token, block]``; ``global_scale`` is ``[batch]``. With ``largest_of_runs``,
    float32 ``[batch, kv_head or 1]`` of magnitudes, scales of runs, whose largest quotients are ``MOST``, are chosen here.
    """
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    if largest_of_runs is not None:
        largest_of_runs += batch * heads + head if PER_HEAD else batch
    if origins is not None:
        origin = origin_of(origins, batch, ALIGNED)
        x += origin.input
        planes = all_moved(planes, origin.streams)
        scales = moved(scales, origin.streams)
        if global_scale is not None:
            global_scale = moved(global_scale, origin.streams)
        flag += origin.flag
        batch = batch * 0
    first_of_run = (first == 0) & (PER_HEAD | (head == 0))
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    valid = token < tokens
    row = (batch * heads + head) * tokens + token
    loaded = load_rows(x, batch_stride, head_stride, token_stride, channel_stride, batch, head, token, valid, DIM, PADDED_DIM)
    value = loaded.to(tl.float32)
    flag_unless(tl.abs(value) < float("inf"), flag)
    if KIND == PER_RUN:
        scales += batch * heads + head if PER_HEAD else batch
        scaled = _quotient(value, _scale_of_run(scales, largest_of_runs, first_of_run, flag, MOST, HALF, HALF_LIMIT))
    elif KIND == PER_TOKEN:
        largest = tl.minimum(tl.max(tl.abs(value), 1), 3.4e38)[:, None]
        stored = _scale_for(largest, flag, LARGEST, HALF, HALF_LIMIT)
        tl.store(scales + row, stored, valid)
        scaled = _quotient(value, stored.to(tl.float32))
    else:
        COUNT: tl.constexpr = PADDED_DIM // SIZE
        block = tl.arange(0, COUNT)[None, :]
        grouped = tl.reshape(value, (BLOCK_TOKENS, COUNT, SIZE))
        largest = tl.max(tl.abs(grouped), 2)
        if KIND == POWERS:
            code = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - EMAX, 0)
            # 2^(127 - code): the reciprocal of a power of two is one.
            inverse = ((254 - code) << 23).to(tl.float32, bitcast=True)
            scaled = tl.reshape(grouped * inverse[:, :, None], (BLOCK_TOKENS, PADDED_DIM))
        else:
            factor = _scale_of_run(global_scale + batch, largest_of_runs, first_of_run, flag, MOST, HALF, HALF_LIMIT)
            code = _elements(_quotient(tl.div_rn(largest, LARGEST), factor), 3, 7, 0x7F, 8)
            scale = e4m3_as_f16(code).to(tl.float32) * factor
            scaled = tl.reshape(_quotient(grouped, scale[:, :, None]), (BLOCK_TOKENS, PADDED_DIM))
        tl.store(scales + row * BLOCKS + block, code.to(tl.uint8), valid & (block < BLOCKS))
    digits = _elements(scaled, FRACTION, BIAS, FINITE, BITS)
    sums = add_digits(empty_columns(STREAMS, BLOCK_TOKENS), (digits,), places, 0, PADDED_DIM, PADDED_DIM, STREAMS)
    store_columns(sums, planes, row, valid, STREAMS)
