"""Encode group on the GPU (spec/codecs/group.md); ``formats/group.py`` is the oracle, bit for bit without rotation and token scales."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats import scale_range
from kvpack.formats.base import HALF_LIMIT
from kvpack.formats.columns import next_power_of_two
from kvpack.formats.group import SMALLEST_HALF
from kvpack.kernels.bitpack.columns import launch, tile_origin

from .columns import SMALLEST_AXIS, WARPS, Plan, Term, add_digits, empty_columns, plan_of, store_columns
from .rows import (
    all_moved,
    component,
    components,
    flag_unless,
    input_of,
    limit_of,
    load_rows,
    moved,
    nearest_integer,
    origin_of,
    rule_of,
    scale_of,
    unbiased_factor,
)

if TYPE_CHECKING:
    from kvpack.formats.group import Group

    from .rows import Origins

BLOCK_TOKENS = 32
ROTATED_CHANNELS = 32
CHANNELS_ALONG_TOKENS = 64
CHANNELS = 128
"""Channels that a program encodes at once: fewer if they come from a product, whose tiles fill the registers."""

SCALE_TOKENS = 16
SCALE_HEADS = 4
SCALE_WARPS = 4
"""Tokens of a program that computes token scales, heads that it loads at once, and its warps."""


def encode(
    codec: Group,
    x: torch.Tensor,
    streams: dict[str, torch.Tensor],
    planes: tuple[torch.Tensor, ...],
    flag: torch.Tensor,
    origins: Origins | None = None,
) -> bool:
    """Fill ``streams``, whose code ``planes`` are given; return False, and do nothing, for codecs that the kernel does not support."""
    plan = _plan(codec, x.device)
    small = codec.scale_dtype == "u8"
    # Scales of 8 bits depend on the whole run, and on the run before it: a page of an engine has one run.
    if plan is None or (small and origins is None):
        return False
    batch, heads, tokens, dim = x.shape
    arguments, constants = input_of(x, origins)
    token_scale = streams.get("token_scale")
    scaled = batch * (heads if codec.scale_per_head else 1) * -(-tokens // SCALE_TOKENS)
    products = None
    if token_scale is not None:
        dtype = codec.scales(1, 1, 1)["token_scale"].dtype
        limit, rule = limit_of(dtype), rule_of(codec.norm_rule, dtype)
        if rule:
            products = torch.empty(batch, heads, tokens, 3, dtype=torch.float32, device=x.device)
        launch(
            _token_scales, scaled, x.device, *arguments, token_scale, flag,
            DIM=dim, PADDED_DIM=constants["PADDED_DIM"], ALIGNED=constants["ALIGNED"], LIMIT=limit, AT_ONCE=SCALE_HEADS,
            PER_HEAD=codec.scale_per_head, BLOCK_TOKENS=SCALE_TOKENS, warps=SCALE_WARPS,
        )  # fmt: skip
    symbols = _symbols(codec)
    along_tokens = codec.axis == "token"
    block_tokens = max(BLOCK_TOKENS, codec.size) if along_tokens else BLOCK_TOKENS
    rotated = codec.rotation.kind != "none"
    block = ROTATED_CHANNELS if rotated else CHANNELS_ALONG_TOKENS if along_tokens else CHANNELS
    block = min(symbols, block if along_tokens else max(block, codec.size))
    scales = streams["scales"].view(torch.int16 if small else torch.int32)
    extremes = torch.full((batch, heads, 3), -(2**31), dtype=torch.int32, device=x.device) if small else None
    for measured in (True, False) if small else (False,):
        launch(
            _encode, batch * heads * -(-tokens // block_tokens), x.device,
            *arguments, components(codec.rotation, 1, symbols, block, x) if rotated else None, plan.places, planes,
            scales, streams.get("scale_range"), extremes, token_scale, products, flag,
            **constants, SYMBOLS=symbols, BLOCK=block, BITS=codec.bits, SIZE=codec.size, ALONG_TOKENS=along_tokens,
            SCALE_PER_HEAD=codec.scale_per_head, MIDDLE=codec.centre == "middle", MEASURED=measured,
            SCALE=scale_of(codec.rotation), LIMIT=HALF_LIMIT,
            LARGEST=scale_range.LARGEST, SMALLEST=SMALLEST_HALF, STREAMS=plan.streams, BLOCK_TOKENS=block_tokens,
            # With one warp, most tokens of a group are in one thread.
            warps=1 if along_tokens and not rotated and token_scale is None and block_tokens == BLOCK_TOKENS else WARPS,
        )  # fmt: skip
    if products is not None:
        launch(
            _unbiased_token_scales, scaled, x.device, products, token_scale, heads, tokens, arguments[-1],
            LIMIT=limit, RULE=rule, PER_HEAD=codec.scale_per_head, BLOCK_TOKENS=SCALE_TOKENS, warps=SCALE_WARPS,
        )  # fmt: skip
    return True


def _symbols(codec: Group) -> int:
    """Channels of a token, padding included: whole groups."""
    return max(SMALLEST_AXIS, next_power_of_two(codec.dim), codec.size if codec.axis == "channel" else 1)


@lru_cache(maxsize=64)
def _plan(codec: Group, device: torch.device) -> Plan | None:
    return plan_of(codec, {"codes": [Term(0, codec.bits)]}, _symbols(codec), device)


@triton.jit
def _token_scales(
    x: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    origins: tl.tensor,
    scales: tl.tensor,
    flag: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ALIGNED: tl.constexpr,
    LIMIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Write the root mean square of every token to ``scales``; a rotation does not change it.

    It is that over all heads, ``[batch, 1, token]``, or if ``PER_HEAD`` that of each, ``[batch, kv_head, token]``. Tiles are
    ``[token, channel]``.
    """
    if PER_HEAD:
        batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    else:
        batch, head, first = tile_origin(1, tokens, BLOCK_TOKENS)
    if origins is not None:
        origin = origin_of(origins, batch, ALIGNED)
        x += origin.input
        scales = moved(scales, origin.streams)
        flag += origin.flag
        batch = batch * 0
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    valid = token < tokens
    if PER_HEAD:
        rows = load_rows(x, batch_stride, head_stride, token_stride, channel_stride, batch, head, token, valid, DIM, PADDED_DIM)
        value = rows.to(tl.float32)
        mean = tl.sum(value * value, 1)[:, None] / DIM
        scales += (batch * heads + head) * tokens
    else:
        squares = tl.zeros((BLOCK_TOKENS, PADDED_DIM), tl.float32)
        for some in range(0, heads, AT_ONCE):
            # Unrolled, so that the loads of several heads are under way together.
            for number in tl.static_range(AT_ONCE):
                one = some + number
                known = token < tl.where(one < heads, tokens, 0)
                rows = load_rows(x, batch_stride, head_stride, token_stride, channel_stride, batch, one, token, known, DIM, PADDED_DIM)
                value = rows.to(tl.float32)
                squares += value * value
        mean = tl.sum(squares, 1)[:, None] / (heads * DIM)
        scales += batch * tokens
    root = tl.sqrt_rn(mean)
    fits = root < LIMIT
    flag_unless(fits, flag)
    tl.store(scales + token, tl.where(fits, root, 0.0).to(scales.dtype.element_ty), valid)


@triton.jit
def _unbiased_token_scales(
    products: tl.tensor,
    scales: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    origins: tl.tensor,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Replace ``scales``, as ``_token_scales`` writes them, by those of norm_rule=unbiased.

    ``products`` is ``[batch, kv_head, token, 3]``: of the values with themselves, with what they decode to, and of that with itself.
    """
    if PER_HEAD:
        batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    else:
        batch, head, first = tile_origin(1, tokens, BLOCK_TOKENS)
    token = first + tl.arange(0, BLOCK_TOKENS)
    valid = token < tokens
    squares = tl.zeros((BLOCK_TOKENS,), tl.float32)
    product = tl.zeros((BLOCK_TOKENS,), tl.float32)
    decoded = tl.zeros((BLOCK_TOKENS,), tl.float32)
    for number in range(1 if PER_HEAD else heads):
        place = products + ((batch * heads + head + number) * tokens + token) * 3
        squares += tl.load(place, valid, 0.0)
        product += tl.load(place + 1, valid, 0.0)
        decoded += tl.load(place + 2, valid, 0.0)
    if origins is not None:
        scales = moved(scales, origin_of(origins, batch, 1).streams)
        batch = batch * 0
    place = scales + batch * tokens + token
    if PER_HEAD:
        place = scales + (batch * heads + head) * tokens + token
    factor = unbiased_factor(tl.load(place, valid, 0.0).to(tl.float32), squares, product, decoded, LIMIT, RULE)
    tl.store(place, factor.to(scales.dtype.element_ty), valid)


@triton.jit
def _stored_half(value: tl.tensor, flag: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """The binary16 nearest to each value; flagged, and zero, if there is none."""
    fits = tl.abs(value) < LIMIT
    flag_unless(fits, flag)
    return tl.where(fits, value, 0.0).to(tl.float16)


@triton.jit
def _key(value: tl.tensor) -> tl.tensor:
    """Bits of float32 in the order of their values, int32; the same function turns them back into bits."""
    return value ^ ((value >> 31) & 0x7FFFFFFF)


@triton.jit
def _largest(value: tl.tensor) -> tl.tensor:
    return tl.max(tl.max(_key(value.to(tl.int32, bitcast=True)), 1), 0)


@triton.jit
def _root(value: tl.tensor) -> tl.tensor:
    root = tl.sqrt_rn(tl.abs(value))
    return tl.where(value < 0, -root, root)


@triton.jit
def _extreme(extremes: tl.tensor, number: tl.constexpr) -> tl.tensor:
    """An extreme that the measuring launch found, float32 ``[1, 1]``."""
    return _key(tl.load(extremes + tl.full((1, 1), number, tl.int32))).to(tl.float32, bitcast=True)


@triton.jit
def _chosen_range(extremes: tl.tensor, MIDDLE_STEPS: tl.constexpr, LIMIT: tl.constexpr) -> tl.tuple:
    """``scale_range.chosen`` of a first run: step and minimum of scales, then of centers, binary16 ``[1, 1]``."""
    high = _root(_extreme(extremes, 0))
    high = tl.minimum(high + 0.125 * high, LIMIT)
    last = _root(_extreme(extremes, 1))
    first = _root(-_extreme(extremes, 2))
    span = last - first
    first = tl.maximum(first - 0.125 * span, -LIMIT)
    last = tl.minimum(last + 0.125 * span, LIMIT)
    root = tl.maximum(tl.abs(first), tl.abs(last))
    off = tl.div_rn(last - first, tl.full(root.shape, 510.0, tl.float32)) + root * (2.0**-10)
    further = tl.div_rn((2.0 * root + off) * off, tl.full(root.shape, MIDDLE_STEPS, tl.float32))
    high = tl.minimum(tl.sqrt_rn(high * high + further), LIMIT)
    steps = tl.full(root.shape, 255.0, tl.float32)
    zero = tl.zeros(root.shape, tl.float16)
    return tl.div_rn(high, steps).to(tl.float16), zero, tl.div_rn(last - first, steps).to(tl.float16), first.to(tl.float16)


@triton.jit
def _nearest_code(value: tl.tensor, step: tl.tensor, minimum: tl.tensor) -> tl.tuple:
    """Return the codes, int32, and the binary16 values that they decode to, as ``scale_range.nearest`` does."""
    step = step.to(tl.float32)
    minimum = minimum.to(tl.float32)
    code = nearest_integer(
        tl.div_rn(_root(value) - minimum, tl.zeros(value.shape, tl.float32) + tl.where(step > 0, step, float("inf"))), 255.0
    )
    root = minimum + step * code.to(tl.float32)
    return code, (root * tl.abs(root)).to(tl.float16)


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
    matrix: tl.tensor,
    places: tl.tensor,
    planes: tl.tuple,
    scales: tl.tensor,
    ranges: tl.tensor,
    extremes: tl.tensor,
    token_scales: tl.tensor,
    products: tl.tensor,
    flag: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    OPERAND: tl.constexpr,
    SYMBOLS: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
    MIDDLE: tl.constexpr,
    SCALE_PER_HEAD: tl.constexpr,
    MEASURED: tl.constexpr,
    SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    ALIGNED: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Encode ``BLOCK_TOKENS`` tokens of one head, ``BLOCK`` channels at a time.

    ``x`` is ``[batch, kv_head, token, dim]`` of any strides; ``token`` and ``row`` (the token's number over all heads) are
    ``[token, 1]``, and tiles are ``[token, channel]``.
    ``scales`` is int32 ``[batch, kv_head, token or token group, dim or channel group]``, each a (scale, center); ``token_scales`` are
    those of ``_token_scales``, and ``products`` what ``_unbiased_token_scales`` takes. Extremes and scales are
    ``[token group, channel]`` or ``[token, channel group]``.
    With scales of 8 bits ``scales`` is int16, ``ranges`` is ``[batch, kv_head, 4]``, and one launch only fills ``extremes``, int32
    ``[batch, kv_head, 3]`` (``MEASURED``): the keys of the largest scale, of the largest center, and of the largest of their opposites.
    """
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    if origins is not None:
        origin = origin_of(origins, batch, ALIGNED)
        x += origin.input
        planes = all_moved(planes, origin.streams)
        scales = moved(scales, origin.streams)
        if token_scales is not None:
            token_scales = moved(token_scales, origin.streams)
        if products is not None:
            products += batch * heads * tokens * 3
        if extremes is not None:
            ranges = moved(ranges, origin.streams)
            extremes += (batch * heads + head) * 3
        flag += origin.flag
        batch = batch * 0
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    valid = token < tokens
    row = (batch * heads + head) * tokens + token
    middle: tl.constexpr = ((1 << BITS) - 1) / 2
    GROUPS: tl.constexpr = (DIM + SIZE - 1) // SIZE
    AXIS: tl.constexpr = 1 if ALONG_TOKENS else 2
    GROUPED: tl.constexpr = (BLOCK_TOKENS // SIZE, SIZE, BLOCK) if ALONG_TOKENS else (BLOCK_TOKENS, BLOCK // SIZE, SIZE)
    if matrix is not None:
        rows = load_rows(x, batch_stride, head_stride, token_stride, channel_stride, batch, head, token, valid, DIM, PADDED_DIM)
    if token_scales is not None:
        if SCALE_PER_HEAD:
            factor = tl.load(token_scales + row, valid, 1.0).to(tl.float32)
        else:
            factor = tl.load(token_scales + batch * tokens + token, valid, 1.0).to(tl.float32)
        inverse = 1.0 / tl.where(factor > 0, factor, 1.0)
    if products is not None:
        squares = tl.zeros((BLOCK_TOKENS,), tl.float32)
        product = tl.zeros((BLOCK_TOKENS,), tl.float32)
        length = tl.zeros((BLOCK_TOKENS,), tl.float32)
    sums = empty_columns(STREAMS, BLOCK_TOKENS)
    if extremes is not None and not MEASURED:
        chosen = _chosen_range(extremes, middle, LARGEST**0.5)
        # All programs of a run store the same.
        at = ranges + (batch * heads + head) * 4 + tl.zeros((1, 1), tl.int32)
        for number in tl.static_range(4):
            tl.store(at + number, chosen[number])
    for block in range(SYMBOLS // BLOCK):
        channel = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = valid & (channel < DIM)
        if matrix is not None:
            value = component(rows, matrix, block, BLOCK, PADDED_DIM, PARTS, OPERAND) * SCALE
        else:
            place = x + batch * batch_stride + head * head_stride + token * token_stride + channel.to(tl.int64) * channel_stride
            value = tl.load(place, inside, 0.0).to(tl.float32)
        if token_scales is not None:
            value = value * inverse
        # No comparison holds for a NaN, and the extremes below would ignore it.
        flag_unless(tl.abs(value) < float("inf"), flag)

        low = tl.min(tl.reshape(tl.where(inside, value, float("inf")), GROUPED), AXIS)
        high = tl.max(tl.reshape(tl.where(inside, value, float("-inf")), GROUPED), AXIS)
        known = low <= high
        low = tl.where(known, low, 0.0)
        high = tl.where(known, high, 0.0)
        # Half of each term, because the sum may be infinite; the scale is computed in the same way.
        centre = low * 0.5 + high * 0.5
        if not MIDDLE:
            centre = tl.zeros(low.shape, tl.float32)
        if MEASURED:
            scale = tl.maximum(high - centre, centre - low) * (1.0 / middle)
            flag_unless((scale <= LARGEST) & (tl.abs(centre) <= LARGEST), flag)
            tl.atomic_max(extremes, _largest(scale))
            tl.atomic_max(extremes + 1, _largest(tl.where(known, centre, float("-inf"))))
            tl.atomic_max(extremes + 2, _largest(tl.where(known, -centre, float("-inf"))))
        else:
            if extremes is None:
                centre = _stored_half(centre, flag, LIMIT)
            else:
                centre_code, centre = _nearest_code(centre, chosen[2], chosen[3])
            reach = tl.maximum(high - centre.to(tl.float32), centre.to(tl.float32) - low)
            if extremes is None:
                scale = _stored_half(tl.minimum(reach, 1e30) * (1.0 / middle), flag, LIMIT)
                pair = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF | centre.to(tl.int16, bitcast=True).to(tl.int32) << 16
            else:
                scale_code, scale = _nearest_code(reach * (1.0 / middle), chosen[0], chosen[1])
                pair = (scale_code | centre_code << 8).to(tl.int16)
            if ALONG_TOKENS:
                group = first // SIZE + tl.arange(0, BLOCK_TOKENS // SIZE)[:, None]
                place = scales + ((batch * heads + head) * tl.cdiv(tokens, SIZE) + group) * DIM + channel
                tl.store(place, pair, (group < tl.cdiv(tokens, SIZE)) & (channel < DIM))
            else:
                group = block * (BLOCK // SIZE) + tl.arange(0, BLOCK // SIZE)[None, :]
                tl.store(scales + row * GROUPS + group, pair, valid & (group < GROUPS))

            per_step = tl.div_rn(1.0, tl.maximum(scale.to(tl.float32), SMALLEST))
            offset = middle - centre.to(tl.float32) * per_step
            steps = tl.reshape(value, GROUPED) * tl.expand_dims(per_step, AXIS) + tl.expand_dims(offset, AXIS)
            code = tl.reshape(nearest_integer(steps, 2 * middle), (BLOCK_TOKENS, BLOCK))
            if products is not None:
                steps = tl.reshape(code, GROUPED).to(tl.float32) - middle
                decoded = steps * tl.expand_dims(scale.to(tl.float32), AXIS) + tl.expand_dims(centre.to(tl.float32), AXIS)
                decoded = tl.where(inside, tl.reshape(decoded, (BLOCK_TOKENS, BLOCK)), 0.0)
                squares += tl.sum(value * value, 1)
                product += tl.sum(value * decoded, 1)
                length += tl.sum(decoded * decoded, 1)
            sums = add_digits(sums, (code,), places, block * BLOCK, BLOCK, SYMBOLS, STREAMS)
    if products is not None and not MEASURED:
        tl.store(products + row * 3, squares[:, None], valid)
        tl.store(products + row * 3 + 1, product[:, None], valid)
        tl.store(products + row * 3 + 2, length[:, None], valid)
    if not MEASURED:
        store_columns(sums, planes, row, valid, STREAMS)
