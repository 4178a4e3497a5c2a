"""Encode group on the GPU (spec/codecs/group.md); ``formats/group.py`` is the oracle, bit for bit without rotation and token scales."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats import scale_range
from kvpack.formats.base import HALF_LIMIT
from kvpack.formats.columns import next_power_of_two
from kvpack.formats.group import SMALLEST_HALF
from kvpack.kernels.bitpack.columns import launch, tile_origin

from .columns import SMALLEST_AXIS, WARPS, Term
from .kernel import Quantizer, encode_rows
from .rows import flag_unless, input_of, limit_of, load_rows, moved, nearest_integer, origin_of, rule_of, unbiased_factor

if TYPE_CHECKING:
    from kvpack.formats.group import Group

    from .kernel import Output

BLOCK_TOKENS = 32
ROTATED_CHANNELS = 32
CHANNELS_ALONG_TOKENS = 64
CHANNELS = 128
"""Channels that a program encodes at once: fewer if they come from a product, whose tiles fill the registers."""

SCALE_TOKENS = 16
SCALE_HEADS = 4
SCALE_WARPS = 4
"""Tokens of a program that computes token scales, heads that it loads at once, and its warps."""

_HALF_LIMIT, _SMALLEST, _LARGEST = (tl.constexpr(value) for value in (HALF_LIMIT, SMALLEST_HALF, scale_range.MAX_ENCODED))


class GroupConstants(NamedTuple):
    """Groups of ``size`` tokens (``along_tokens``) or channels; ``middle``: they have centers.

    ``ranged``, ``token_scale`` and ``products`` are indices of tensors, -1 for none. ``ranged`` is the range of 8-bit scales, whose
    extremes are the first table. ``token_scale`` are the token scales, one per head with ``per_head``. Both are among the streams, the
    first of which is int32 ``[batch, kv_head, token or token group, dim or channel group]``, each a (scale, center), or int16 for 8-bit
    scales. ``products`` is the table for ``_unbiased_token_scales``.
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
    """Fill ``output`` from ``x``. Returns False, and does nothing, for codecs that the kernel does not support.

    8-bit scales depend on the whole run and on the run before it; a page of an engine has one run.
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
        _token_scales(codec, x, output, token_scale)
        stored.append(token_scale)
        if codec.norm_rule != "norm":
            products = torch.empty(batch, heads, tokens, 3, dtype=torch.float32, device=x.device)
            tables.append(products)
    symbols = max(SMALLEST_AXIS, next_power_of_two(codec.dim), codec.size if codec.axis == "channel" else 1)
    along_tokens, rotated = codec.axis == "token", codec.rotation.kind != "none"
    block_tokens = max(BLOCK_TOKENS, codec.size) if along_tokens else BLOCK_TOKENS
    block = ROTATED_CHANNELS if rotated else CHANNELS_ALONG_TOKENS if along_tokens else CHANNELS
    constants = GroupConstants(
        codec.bits, codec.size, along_tokens, codec.centre == "middle", codec.scale_per_head, 1 if small else -1,
        -1 if token_scale is None else len(stored) - 1, -1 if products is None else len(tables) - 1,
    )  # fmt: skip
    quantizer = Quantizer(_quantize, constants, _begin, None if products is None else _end)
    for result in (Quantizer(_measure, constants, _begin_measuring), quantizer) if small else (quantizer,):
        encode_rows(
            codec, x, output, result, _terms, stored, tables, symbols=symbols, tokens=block_tokens,
            block=min(symbols, block if along_tokens else max(block, codec.size)), rotated=rotated, packs=result is quantizer, fusion=False,
            # With one warp, most tokens of a group are in one thread.
            warps=1 if along_tokens and not rotated and token_scale is None and block_tokens == BLOCK_TOKENS else WARPS,
        )  # fmt: skip
    if token_scale is not None and products is not None:
        _unbiased_token_scales(codec, x, output, token_scale, products)
    return True


def _terms(codec: Group) -> dict[str, list[Term]]:
    return {"codes": [Term(0, codec.bits)]}


def _token_scales(codec: Group, x: torch.Tensor, output: Output, token_scale: torch.Tensor) -> None:
    """Fill ``token_scale`` with root mean squares."""
    arguments, constants = input_of(x, output.origins)
    launch(
        _root_mean_squares, _scaling_programs(codec, x), x.device, *arguments, token_scale, output.flag,
        DIM=x.shape[3], PADDED_DIM=constants["PADDED_DIM"], ALIGNED=constants["ALIGNED"], LIMIT=limit_of(_scale_dtype(codec)),
        AT_ONCE=SCALE_HEADS, PER_HEAD=codec.scale_per_head, BLOCK_TOKENS=SCALE_TOKENS, warps=SCALE_WARPS,
    )  # fmt: skip


def _unbiased_token_scales(codec: Group, x: torch.Tensor, output: Output, token_scale: torch.Tensor, products: torch.Tensor) -> None:
    """Replace the scales written by ``_token_scales`` with those of norm_rule=unbiased."""
    dtype = _scale_dtype(codec)
    launch(
        _unbiased_scales, _scaling_programs(codec, x), x.device, products, token_scale, x.shape[1], x.shape[2],
        None if output.origins is None else output.origins.table, LIMIT=limit_of(dtype), RULE=rule_of(codec.norm_rule, dtype),
        PER_HEAD=codec.scale_per_head, BLOCK_TOKENS=SCALE_TOKENS, warps=SCALE_WARPS,
    )  # fmt: skip


def _scaling_programs(codec: Group, x: torch.Tensor) -> int:
    return x.shape[0] * (x.shape[1] if codec.scale_per_head else 1) * -(-x.shape[2] // SCALE_TOKENS)


def _scale_dtype(codec: Group) -> str:
    return codec.scales(1, 1, 1)["token_scale"].dtype


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
    AT_ONCE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Write the root mean square of every token to ``scales``; a rotation does not change it.

    It is computed over all heads, ``[batch, 1, token]``, or per head with ``PER_HEAD``, ``[batch, kv_head, token]``. Tiles are ``[token,
    channel]``.
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
def _unbiased_scales(
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
    """Replace the ``scales`` written by ``_root_mean_squares`` with those of norm_rule=unbiased.

    ``products`` is ``[batch, kv_head, token, 3]``: the values' squared norm, their product with the decoded values, and the squared norm of
    those.
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
def _stored_half(value: tl.tensor, flag: tl.tensor) -> tl.tensor:
    """Round each value to binary16; values that do not fit become zero and are flagged."""
    fits = tl.abs(value) < _HALF_LIMIT
    flag_unless(fits, flag)
    return tl.where(fits, value, 0.0).to(tl.float16)


@triton.jit
def _key(value: tl.tensor) -> tl.tensor:
    """Map float32 bits to int32 in the order of their values; the function is its own inverse."""
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
    """Return an extreme found by the measuring launch, float32 ``[1, 1]``."""
    return _key(tl.load(extremes + tl.full((1, 1), number, tl.int32))).to(tl.float32, bitcast=True)


@triton.jit
def _chosen_range(extremes: tl.tensor, MIDDLE_STEPS: tl.constexpr, LIMIT: tl.constexpr) -> tl.tuple:
    """Compute ``scale_range.choose_range`` for a first run: step and minimum of scales, then of centers, binary16 ``[1, 1]``."""
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
    """Return the codes, int32, and the binary16 values that they decode to, as ``scale_range.encode_nearest`` does."""
    step = step.to(tl.float32)
    minimum = minimum.to(tl.float32)
    code = nearest_integer(
        tl.div_rn(_root(value) - minimum, tl.zeros(value.shape, tl.float32) + tl.where(step > 0, step, float("inf"))), 255.0
    )
    root = minimum + step * code.to(tl.float32)
    return code, (root * tl.abs(root)).to(tl.float16)


class GroupState(NamedTuple):
    """The reciprocal scale of each token, ``[token, 1]``, and the range of 8-bit scales.

    ``squares``, ``product`` and ``decoded`` are sums per token, ``[token]``: its squares, its products with the decoded values, and the
    squares of those. Fields that the codec does not use are 1, empty or 0.
    """

    inverse: Any
    chosen: Any
    squares: Any
    product: Any
    decoded: Any


@triton.jit
def _begin_measuring(block: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
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
    """Return the first state, after choosing and storing the range of 8-bit scales."""
    state = _begin_measuring(block, CONSTANTS, SHAPE)
    chosen = ()
    if CONSTANTS.ranged >= 0:
        MIDDLE_STEPS: tl.constexpr = ((1 << CONSTANTS.bits) - 1) / 2
        chosen = _chosen_range(block.tables[0] + (block.sequence * block.heads + block.head) * 3, MIDDLE_STEPS, _LARGEST**0.5)
        # All programs of a run store the same.
        at = block.stored[CONSTANTS.ranged] + (block.batch * block.heads + block.head) * 4 + tl.zeros((1, 1), tl.int32)
        for number in tl.static_range(4):
            tl.store(at + number, chosen[number])
    return GroupState(state.inverse, chosen, state.squares, state.product, state.decoded)


@triton.jit
def _in_groups(value: tl.tensor, CONSTANTS: tl.constexpr) -> tl.tensor:
    """Reshape ``[token, channel]`` to ``[token group, token, channel]`` or ``[token, channel group, channel]``."""
    SIZE: tl.constexpr = CONSTANTS.size
    TOKENS: tl.constexpr = value.shape[0]
    CHANNELS: tl.constexpr = value.shape[1]
    if CONSTANTS.along_tokens:
        grouped = tl.reshape(value, (TOKENS // SIZE, SIZE, CHANNELS))
    else:
        grouped = tl.reshape(value, (TOKENS, CHANNELS // SIZE, SIZE))
    return grouped


class Extent(NamedTuple):
    """The values of a block divided by token scales, and each group's minimum, maximum, center, and whether it has values.

    Group fields are ``[token group, channel]`` or ``[token, channel group]``.
    """

    value: Any
    low: Any
    high: Any
    centre: Any
    known: Any


@triton.jit
def _extent(
    value: tl.tensor, inside: tl.tensor, block: tl.tuple, state: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the ``Extent`` of values, ``[token, channel]``, of which those ``inside`` belong to the tensor."""
    AXIS: tl.constexpr = 1 if CONSTANTS.along_tokens else 2
    if SHAPE.scale != 1.0:
        value = value * SHAPE.scale
    if CONSTANTS.token_scale >= 0:
        value = value * state.inverse
    # No comparison holds for a NaN, and the extremes below would ignore it.
    flag_unless(tl.abs(value) < float("inf"), block.flag)
    low = tl.min(_in_groups(tl.where(inside, value, float("inf")), CONSTANTS), AXIS)
    high = tl.max(_in_groups(tl.where(inside, value, float("-inf")), CONSTANTS), AXIS)
    known = low <= high
    low = tl.where(known, low, 0.0)
    high = tl.where(known, high, 0.0)
    centre = tl.zeros(low.shape, tl.float32)
    if CONSTANTS.middle:
        # Half of each term, because the sum may be infinite; the scale is computed in the same way.
        centre = low * 0.5 + high * 0.5
    return Extent(value, low, high, centre, known)


@triton.jit
def _measure(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, number: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Measure the extremes of 8-bit scales, int32 ``[batch, kv_head, 3]``, without producing digits.

    They are the keys of the largest scale, of the largest center, and of the largest negated center.
    """
    BLOCK: tl.constexpr = SHAPE.block
    MIDDLE_STEPS: tl.constexpr = ((1 << CONSTANTS.bits) - 1) / 2
    inside = block.valid & (number * BLOCK + tl.arange(0, BLOCK)[None, :] < SHAPE.dim)
    found = _extent(values[0], inside, block, state, CONSTANTS, SHAPE)
    scale = tl.maximum(found.high - found.centre, found.centre - found.low) * (1.0 / MIDDLE_STEPS)
    flag_unless((scale <= _LARGEST) & (tl.abs(found.centre) <= _LARGEST), block.flag)
    extremes = block.tables[0] + (block.sequence * block.heads + block.head) * 3
    tl.atomic_max(extremes, _largest(scale))
    tl.atomic_max(extremes + 1, _largest(tl.where(found.known, found.centre, float("-inf"))))
    tl.atomic_max(extremes + 2, _largest(tl.where(found.known, -found.centre, float("-inf"))))
    return (), state


@triton.jit
def _quantize(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, number: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the codes of a block of channels, and store their scales."""
    BLOCK: tl.constexpr = SHAPE.block
    TOKENS: tl.constexpr = SHAPE.tokens
    DIM: tl.constexpr = SHAPE.dim
    SIZE: tl.constexpr = CONSTANTS.size
    AXIS: tl.constexpr = 1 if CONSTANTS.along_tokens else 2
    MIDDLE_STEPS: tl.constexpr = ((1 << CONSTANTS.bits) - 1) / 2
    channel = number * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = block.valid & (channel < DIM)
    found = _extent(values[0], inside, block, state, CONSTANTS, SHAPE)
    value = found.value
    if CONSTANTS.ranged < 0:
        centre = _stored_half(found.centre, block.flag)
    else:
        centre_code, centre = _nearest_code(found.centre, state.chosen[2], state.chosen[3])
    reach = tl.maximum(found.high - centre.to(tl.float32), centre.to(tl.float32) - found.low)
    if CONSTANTS.ranged < 0:
        scale = _stored_half(tl.minimum(reach, 1e30) * (1.0 / MIDDLE_STEPS), block.flag)
        pair = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF | centre.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        scale_code, scale = _nearest_code(reach * (1.0 / MIDDLE_STEPS), state.chosen[0], state.chosen[1])
        pair = (scale_code | centre_code << 8).to(tl.int16)
    if CONSTANTS.along_tokens:
        groups = tl.cdiv(block.tokens, SIZE)
        group = block.first // SIZE + tl.arange(0, TOKENS // SIZE)[:, None]
        place = block.stored[0] + ((block.batch * block.heads + block.head) * groups + group) * DIM + channel
        tl.store(place, pair, (group < groups) & (channel < DIM))
    else:
        GROUPS: tl.constexpr = (DIM + SIZE - 1) // SIZE
        group = number * (BLOCK // SIZE) + tl.arange(0, BLOCK // SIZE)[None, :]
        tl.store(block.stored[0] + block.row * GROUPS + group, pair, block.valid & (group < GROUPS))

    per_step = tl.div_rn(1.0, tl.maximum(scale.to(tl.float32), _SMALLEST))
    offset = MIDDLE_STEPS - centre.to(tl.float32) * per_step
    steps = _in_groups(value, CONSTANTS) * tl.expand_dims(per_step, AXIS) + tl.expand_dims(offset, AXIS)
    code = tl.reshape(nearest_integer(steps, 2 * MIDDLE_STEPS), (TOKENS, BLOCK))
    if CONSTANTS.products >= 0:
        steps = _in_groups(code, CONSTANTS).to(tl.float32) - MIDDLE_STEPS
        decoded = steps * tl.expand_dims(scale.to(tl.float32), AXIS) + tl.expand_dims(centre.to(tl.float32), AXIS)
        decoded = tl.where(inside, tl.reshape(decoded, (TOKENS, BLOCK)), 0.0)
        squares = state.squares + tl.sum(value * value, 1)
        product = state.product + tl.sum(value * decoded, 1)
        state = GroupState(state.inverse, state.chosen, squares, product, state.decoded + tl.sum(decoded * decoded, 1))
    return (code,), state


@triton.jit
def _end(block: tl.tuple, state: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> None:
    """Store the sums of tokens."""
    row = (block.sequence * block.heads + block.head) * block.tokens + block.token
    products = block.tables[CONSTANTS.products] + row * 3
    tl.store(products, state.squares[:, None], block.valid)
    tl.store(products + 1, state.product[:, None], block.valid)
    tl.store(products + 2, state.decoded[:, None], block.valid)
