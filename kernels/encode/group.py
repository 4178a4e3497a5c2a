"""Encoder of the group codec on the GPU (spec/codecs/group.md).

Without a rotation and token scales, the streams are the same bit for bit.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats import scale_range
from kvpack.formats.columns import next_power_of_two
from kvpack.formats.group import MIN_HALF, Group
from kvpack.formats.streams import HALF_LIMIT
from kvpack.kernels.bitpack.columns import launch, tile_origin

from .columns import MIN_AXIS, WARPS, Term
from .kernel import Output, Quantizer, encode_rows
from .rows import (
    flag_unless,
    input_arguments,
    load_origin,
    load_rows,
    move_pointer,
    nearest_integer,
    norm_limit,
    norm_rule_limit,
    unbiased_factor,
)

BLOCK_TOKENS = 32
ROTATED_CHANNELS = 32
CHANNELS_ALONG_TOKENS = 64
BLOCK_CHANNELS = 128
"""Number of channels that a program encodes together. It is smaller after a rotation, because the product fills the registers."""

SCALE_TOKENS = 16
SCALE_HEADS = 4
SCALE_WARPS = 4
"""Launch shape of the kernels that compute token scales: tokens per program, heads loaded together, and warps per program."""

_HALF_LIMIT, _MIN_HALF, _MAX_ENCODED = (tl.constexpr(value) for value in (HALF_LIMIT, MIN_HALF, scale_range.MAX_ENCODED))


class GroupConstants(NamedTuple):
    """Compile-time constants of a group codec: codes of ``bits`` bits in groups of ``size`` tokens (``along_tokens``) or channels.

    ``middle`` is True if groups have centers. Stream 0 contains pairs (scale, center) of shape ``[batch, kv_head, token or token group, dim
    or channel group]``. A pair is int32 or, for 8-bit scales, int16. Table 0 contains the extremes of 8-bit scales. ``ranged`` and
    ``token_scale`` are the indices of the streams of ranges and of token scales. Each head has its own token scales if ``per_head``.
    ``products`` is the index of the table for ``_correct_token_scales``. An index of -1 means that there is no such tensor.
    """

    bits: int
    size: int
    along_tokens: bool
    middle: bool
    per_head: bool
    ranged: int
    token_scale: int
    products: int


def encode(codec: Group, x: torch.Tensor, output: Output) -> bool:
    """Encode ``x`` into ``output``. Returns False if the codec is not supported.

    8-bit scales are supported only for engine pages, because elsewhere they also depend on other tokens.
    """
    small = codec.scale_dtype == "u8"
    if small and output.origins is None:
        return False
    streams = output.streams
    batch, heads, tokens, _ = x.shape
    stored, tables = [streams["scales"].view(torch.int16 if small else torch.int32)], []
    if small:
        stored.append(streams["scale_range"])
        tables.append(torch.full((batch, heads, 3), -(2**31), dtype=torch.int32, device=x.device))
    token_scale, products = streams.get("token_scale"), None
    if token_scale is not None:
        _compute_token_scales(codec, x, output, token_scale)
        stored.append(token_scale)
        if codec.norm_rule != "norm":
            products = torch.empty(batch, heads, tokens, 3, dtype=torch.float32, device=x.device)
            tables.append(products)
    symbols = max(MIN_AXIS, next_power_of_two(codec.dim), codec.size if codec.axis == "channel" else 1)
    along_tokens, rotated = codec.axis == "token", codec.rotation.kind != "none"
    block_tokens = max(BLOCK_TOKENS, codec.size) if along_tokens else BLOCK_TOKENS
    block = ROTATED_CHANNELS if rotated else CHANNELS_ALONG_TOKENS if along_tokens else BLOCK_CHANNELS
    constants = GroupConstants(
        codec.bits, codec.size, along_tokens, codec.centre == "middle", codec.scale_per_head, 1 if small else -1,
        -1 if token_scale is None else len(stored) - 1, -1 if products is None else len(tables) - 1,
    )  # fmt: skip
    quantizer = Quantizer(_quantize, constants, _begin, None if products is None else _store_products)
    for result in (Quantizer(_measure_extremes, constants, _load_reciprocals), quantizer) if small else (quantizer,):
        encode_rows(
            codec, x, output, result, _digit_terms, stored, tables, symbols=symbols, tokens=block_tokens,
            block=min(symbols, block if along_tokens else max(block, codec.size)), rotated=rotated, packs=result is quantizer, fusion=False,
            # With one warp, one thread has most tokens of a group.
            warps=1 if along_tokens and not rotated and token_scale is None and block_tokens == BLOCK_TOKENS else WARPS,
        )  # fmt: skip
    if token_scale is not None and products is not None:
        _correct_token_scales(codec, x, output, token_scale, products)
    return True


def _digit_terms(codec: Group) -> dict[str, list[Term]]:
    return {"codes": [Term(0, codec.bits)]}


def _compute_token_scales(codec: Group, x: torch.Tensor, output: Output, token_scale: torch.Tensor) -> None:
    """Write the root mean square of each token to ``token_scale``."""
    arguments, constants = input_arguments(x, output.origins)
    launch(
        _root_mean_squares, _scaling_programs(codec, x), x.device, *arguments, token_scale, output.flag,
        DIM=x.shape[3], PADDED_DIM=constants["PADDED_DIM"], ALIGNED=constants["ALIGNED"], LIMIT=norm_limit(_scale_dtype(codec)),
        HEADS_AT_ONCE=SCALE_HEADS, PER_HEAD=codec.scale_per_head, BLOCK_TOKENS=SCALE_TOKENS, warps=SCALE_WARPS,
    )  # fmt: skip


def _correct_token_scales(codec: Group, x: torch.Tensor, output: Output, token_scale: torch.Tensor, products: torch.Tensor) -> None:
    """Replace the root mean squares in ``token_scale`` by the token scales for norm_rule=unbiased."""
    dtype = _scale_dtype(codec)
    launch(
        _correct_scales, _scaling_programs(codec, x), x.device, products, token_scale, x.shape[1], x.shape[2],
        None if output.origins is None else output.origins.table, LIMIT=norm_limit(dtype), RULE=norm_rule_limit(codec.norm_rule, dtype),
        PER_HEAD=codec.scale_per_head, BLOCK_TOKENS=SCALE_TOKENS, warps=SCALE_WARPS,
    )  # fmt: skip


def _scaling_programs(codec: Group, x: torch.Tensor) -> int:
    return x.shape[0] * (x.shape[1] if codec.scale_per_head else 1) * -(-x.shape[2] // SCALE_TOKENS)


def _scale_dtype(codec: Group) -> str:
    return codec.scale_layouts(1, 1, 1)["token_scale"].dtype


@triton.jit
def _root_mean_squares(
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
    HEADS_AT_ONCE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Write the root mean square of each token to ``scales``, over all heads or, with ``PER_HEAD``, for each head.

    The shape is ``[batch, 1, token]`` or ``[batch, kv_head, token]``. Rotations preserve root mean squares, so ``x`` is not rotated first.
    """
    if PER_HEAD:
        batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    else:
        batch, head, first = tile_origin(1, tokens, BLOCK_TOKENS)
    if origins is not None:
        origin = load_origin(origins, batch, ALIGNED)
        x += origin.input
        scales = move_pointer(scales, origin.streams)
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
        for first_head in range(0, heads, HEADS_AT_ONCE):
            # Unrolled, so that the loads of several heads are in flight at once.
            for offset in tl.static_range(HEADS_AT_ONCE):
                current_head = first_head + offset
                exists = token < tl.where(current_head < heads, tokens, 0)
                rows = load_rows(
                    x, batch_stride, head_stride, token_stride, channel_stride, batch, current_head, token, exists, DIM, PADDED_DIM
                )
                value = rows.to(tl.float32)
                squares += value * value
        mean = tl.sum(squares, 1)[:, None] / (heads * DIM)
        scales += batch * tokens
    root = tl.sqrt_rn(mean)
    fits = root < LIMIT
    flag_unless(fits, flag)
    tl.store(scales + token, tl.where(fits, root, 0.0).to(scales.dtype.element_ty), valid)


@triton.jit
def _correct_scales(
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
    """Replace the root mean squares in ``scales`` by the scales for norm_rule=unbiased.

    ``products`` is ``[batch, kv_head, token, 3]``: the squared norm of a token's values, their product with the decoded values, and the
    squared norm of the decoded values.
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
    for offset in range(1 if PER_HEAD else heads):
        address = products + ((batch * heads + head + offset) * tokens + token) * 3
        squares += tl.load(address, valid, 0.0)
        product += tl.load(address + 1, valid, 0.0)
        decoded += tl.load(address + 2, valid, 0.0)
    if origins is not None:
        scales = move_pointer(scales, load_origin(origins, batch, 1).streams)
        batch = batch * 0
    address = scales + batch * tokens + token
    if PER_HEAD:
        address = scales + (batch * heads + head) * tokens + token
    factor = unbiased_factor(tl.load(address, valid, 0.0).to(tl.float32), squares, product, decoded, LIMIT, RULE)
    tl.store(address, factor.to(scales.dtype.element_ty), valid)


@triton.jit
def _round_to_half(value: tl.tensor, flag: tl.tensor) -> tl.tensor:
    """Round ``value`` to float16. Values that do not fit become zero and set the flag."""
    fits = tl.abs(value) < _HALF_LIMIT
    flag_unless(fits, flag)
    return tl.where(fits, value, 0.0).to(tl.float16)


@triton.jit
def _ordered_bits(value: tl.tensor) -> tl.tensor:
    """Map the bits of float32 numbers to int32 numbers that have the same order. The function is its own inverse."""
    return value ^ ((value >> 31) & 0x7FFFFFFF)


@triton.jit
def _largest_key(value: tl.tensor) -> tl.tensor:
    return tl.max(tl.max(_ordered_bits(value.to(tl.int32, bitcast=True)), 1), 0)


@triton.jit
def _signed_root(value: tl.tensor) -> tl.tensor:
    root = tl.sqrt_rn(tl.abs(value))
    return tl.where(value < 0, -root, root)


@triton.jit
def _load_extreme(extremes: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """Load one of the extremes that ``_measure_extremes`` stored, as float32 ``[1, 1]``."""
    return _ordered_bits(tl.load(extremes + tl.full((1, 1), index, tl.int32))).to(tl.float32, bitcast=True)


@triton.jit
def _choose_range(extremes: tl.tensor, MIDDLE_STEPS: tl.constexpr, LIMIT: tl.constexpr) -> tl.tuple:
    """Choose the range of 8-bit scales as ``formats/scale_range.py`` does for the first tokens of a layer.

    Returns the step and minimum of the scales, and then the step and minimum of the centers, float16 ``[1, 1]`` each.
    """
    high = _signed_root(_load_extreme(extremes, 0))
    high = tl.minimum(high + 0.125 * high, LIMIT)
    max_root = _signed_root(_load_extreme(extremes, 1))
    min_root = _signed_root(-_load_extreme(extremes, 2))
    span = max_root - min_root
    min_root = tl.maximum(min_root - 0.125 * span, -LIMIT)
    max_root = tl.minimum(max_root + 0.125 * span, LIMIT)
    root = tl.maximum(tl.abs(min_root), tl.abs(max_root))
    half_step = tl.div_rn(max_root - min_root, tl.full(root.shape, 510.0, tl.float32)) + root * (2.0**-10)
    center_error = tl.div_rn((2.0 * root + half_step) * half_step, tl.full(root.shape, MIDDLE_STEPS, tl.float32))
    high = tl.minimum(tl.sqrt_rn(high * high + center_error), LIMIT)
    steps = tl.full(root.shape, 255.0, tl.float32)
    zero = tl.zeros(root.shape, tl.float16)
    return tl.div_rn(high, steps).to(tl.float16), zero, tl.div_rn(max_root - min_root, steps).to(tl.float16), min_root.to(tl.float16)


@triton.jit
def _nearest_scale_code(value: tl.tensor, step: tl.tensor, minimum: tl.tensor) -> tl.tuple:
    """Return the nearest 8-bit codes, int32, and the float16 values that they decode to, as ``formats/scale_range.py`` does."""
    step = step.to(tl.float32)
    minimum = minimum.to(tl.float32)
    code = nearest_integer(
        tl.div_rn(_signed_root(value) - minimum, tl.zeros(value.shape, tl.float32) + tl.where(step > 0, step, float("inf"))), 255.0
    )
    root = minimum + step * code.to(tl.float32)
    return code, (root * tl.abs(root)).to(tl.float16)


class GroupState(NamedTuple):
    """State of a program: ``inverse``, the reciprocal token scales, ``[token, 1]``, and ``chosen``, the range of 8-bit scales.

    ``squares``, ``product`` and ``decoded`` are sums per token, ``[token]``: of squared values, of values times decoded values, and of
    squared decoded values. Fields that the codec does not use are 1, empty or 0.
    """

    inverse: Any
    chosen: Any
    squares: Any
    product: Any
    decoded: Any


@triton.jit
def _load_reciprocals(block: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
    TOKENS: tl.constexpr = SHAPE.tokens
    zeros = tl.zeros((TOKENS,), tl.float32)
    inverse = zeros[:, None] + 1.0
    if CONSTANTS.token_scale >= 0:
        row = block.batch * block.tokens + block.token
        if CONSTANTS.per_head:
            row = block.row
        factor = tl.load(block.stored[CONSTANTS.token_scale] + row, block.valid, 1.0).to(tl.float32)
        inverse = 1.0 / tl.where(factor > 0, factor, 1.0)
    return GroupState(inverse, (), zeros, zeros, zeros)


@triton.jit
def _begin(block: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
    """Return the initial ``GroupState``. If scales have 8 bits, also choose and store their range."""
    state = _load_reciprocals(block, CONSTANTS, SHAPE)
    chosen = ()
    if CONSTANTS.ranged >= 0:
        MIDDLE_STEPS: tl.constexpr = ((1 << CONSTANTS.bits) - 1) / 2
        chosen = _choose_range(block.tables[0] + (block.sequence * block.heads + block.head) * 3, MIDDLE_STEPS, _MAX_ENCODED**0.5)
        # All programs of a page store the same values.
        address = block.stored[CONSTANTS.ranged] + (block.batch * block.heads + block.head) * 4 + tl.zeros((1, 1), tl.int32)
        for index in tl.static_range(4):
            tl.store(address + index, chosen[index])
    return GroupState(state.inverse, chosen, state.squares, state.product, state.decoded)


@triton.jit
def _group_values(value: tl.tensor, CONSTANTS: tl.constexpr) -> tl.tensor:
    """Reshape ``[token, channel]`` to ``[token group, token, channel]`` or ``[token, channel group, channel]``."""
    SIZE: tl.constexpr = CONSTANTS.size
    TOKENS: tl.constexpr = value.shape[0]
    CHANNELS: tl.constexpr = value.shape[1]
    if CONSTANTS.along_tokens:
        grouped = tl.reshape(value, (TOKENS // SIZE, SIZE, CHANNELS))
    else:
        grouped = tl.reshape(value, (TOKENS, CHANNELS // SIZE, SIZE))
    return grouped


class GroupExtents(NamedTuple):
    """Values of a block, divided by token scales, and the minimum, maximum and center of each group.

    ``known`` is True for groups that contain values. The fields per group are ``[token group, channel]`` or ``[token, channel group]``.
    """

    value: Any
    low: Any
    high: Any
    center: Any
    known: Any


@triton.jit
def _group_extents(
    value: tl.tensor, in_tensor: tl.tensor, block: tl.tuple, state: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the ``GroupExtents`` of ``value`` ``[token, channel]``. The mask ``in_tensor`` is False for padding."""
    AXIS: tl.constexpr = 1 if CONSTANTS.along_tokens else 2
    if SHAPE.scale != 1.0:
        value = value * SHAPE.scale
    if CONSTANTS.token_scale >= 0:
        value = value * state.inverse
    # Comparisons with NaN are false; the minima and maxima below would ignore it.
    flag_unless(tl.abs(value) < float("inf"), block.flag)
    low = tl.min(_group_values(tl.where(in_tensor, value, float("inf")), CONSTANTS), AXIS)
    high = tl.max(_group_values(tl.where(in_tensor, value, float("-inf")), CONSTANTS), AXIS)
    has_values = low <= high
    low = tl.where(has_values, low, 0.0)
    high = tl.where(has_values, high, 0.0)
    center = tl.zeros(low.shape, tl.float32)
    if CONSTANTS.middle:
        # Halve the terms before adding them, because the sum could overflow.
        center = low * 0.5 + high * 0.5
    return GroupExtents(value, low, high, center, has_values)


@triton.jit
def _measure_extremes(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, block_index: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Update the extremes of 8-bit scales, int32 ``[batch, kv_head, 3]``. Returns no digits.

    The extremes are the largest scale, the largest center and the largest negated center, each as ``_ordered_bits``.
    """
    BLOCK: tl.constexpr = SHAPE.block
    MIDDLE_STEPS: tl.constexpr = ((1 << CONSTANTS.bits) - 1) / 2
    in_tensor = block.valid & (block_index * BLOCK + tl.arange(0, BLOCK)[None, :] < SHAPE.dim)
    extents = _group_extents(values[0], in_tensor, block, state, CONSTANTS, SHAPE)
    scale = tl.maximum(extents.high - extents.center, extents.center - extents.low) * (1.0 / MIDDLE_STEPS)
    flag_unless((scale <= _MAX_ENCODED) & (tl.abs(extents.center) <= _MAX_ENCODED), block.flag)
    extremes = block.tables[0] + (block.sequence * block.heads + block.head) * 3
    tl.atomic_max(extremes, _largest_key(scale))
    tl.atomic_max(extremes + 1, _largest_key(tl.where(extents.known, extents.center, float("-inf"))))
    tl.atomic_max(extremes + 2, _largest_key(tl.where(extents.known, -extents.center, float("-inf"))))
    return (), state


@triton.jit
def _quantize(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, block_index: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the codes of a block of channels. Also stores the scales and centers of the groups."""
    BLOCK: tl.constexpr = SHAPE.block
    TOKENS: tl.constexpr = SHAPE.tokens
    DIM: tl.constexpr = SHAPE.dim
    SIZE: tl.constexpr = CONSTANTS.size
    AXIS: tl.constexpr = 1 if CONSTANTS.along_tokens else 2
    MIDDLE_STEPS: tl.constexpr = ((1 << CONSTANTS.bits) - 1) / 2
    channel = block_index * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_tensor = block.valid & (channel < DIM)
    extents = _group_extents(values[0], in_tensor, block, state, CONSTANTS, SHAPE)
    value = extents.value
    if CONSTANTS.ranged < 0:
        center = _round_to_half(extents.center, block.flag)
    else:
        center_code, center = _nearest_scale_code(extents.center, state.chosen[2], state.chosen[3])
    reach = tl.maximum(extents.high - center.to(tl.float32), center.to(tl.float32) - extents.low)
    if CONSTANTS.ranged < 0:
        scale = _round_to_half(tl.minimum(reach, 1e30) * (1.0 / MIDDLE_STEPS), block.flag)
        pair = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF | center.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        scale_code, scale = _nearest_scale_code(reach * (1.0 / MIDDLE_STEPS), state.chosen[0], state.chosen[1])
        pair = (scale_code | center_code << 8).to(tl.int16)
    if CONSTANTS.along_tokens:
        groups = tl.cdiv(block.tokens, SIZE)
        group = block.first // SIZE + tl.arange(0, TOKENS // SIZE)[:, None]
        address = block.stored[0] + ((block.batch * block.heads + block.head) * groups + group) * DIM + channel
        tl.store(address, pair, (group < groups) & (channel < DIM))
    else:
        GROUPS: tl.constexpr = (DIM + SIZE - 1) // SIZE
        group = block_index * (BLOCK // SIZE) + tl.arange(0, BLOCK // SIZE)[None, :]
        tl.store(block.stored[0] + block.row * GROUPS + group, pair, block.valid & (group < GROUPS))

    inverse_scale = tl.div_rn(1.0, tl.maximum(scale.to(tl.float32), _MIN_HALF))
    offset = MIDDLE_STEPS - center.to(tl.float32) * inverse_scale
    steps = _group_values(value, CONSTANTS) * tl.expand_dims(inverse_scale, AXIS) + tl.expand_dims(offset, AXIS)
    code = tl.reshape(nearest_integer(steps, 2 * MIDDLE_STEPS), (TOKENS, BLOCK))
    if CONSTANTS.products >= 0:
        steps = _group_values(code, CONSTANTS).to(tl.float32) - MIDDLE_STEPS
        decoded = steps * tl.expand_dims(scale.to(tl.float32), AXIS) + tl.expand_dims(center.to(tl.float32), AXIS)
        decoded = tl.where(in_tensor, tl.reshape(decoded, (TOKENS, BLOCK)), 0.0)
        squares = state.squares + tl.sum(value * value, 1)
        product = state.product + tl.sum(value * decoded, 1)
        state = GroupState(state.inverse, state.chosen, squares, product, state.decoded + tl.sum(decoded * decoded, 1))
    return (code,), state


@triton.jit
def _store_products(block: tl.tuple, state: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> None:
    """Store the three sums per token that ``_correct_token_scales`` needs."""
    row = (block.sequence * block.heads + block.head) * block.tokens + block.token
    products = block.tables[CONSTANTS.products] + row * 3
    tl.store(products, state.squares[:, None], block.valid)
    tl.store(products + 1, state.product[:, None], block.valid)
    tl.store(products + 2, state.decoded[:, None], block.valid)
