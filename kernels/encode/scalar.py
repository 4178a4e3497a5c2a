"""Encoder of the scalar codec on the GPU (spec/codecs/scalar.md)."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.scalar import SCALES, ChannelSet, Scalar
from kvpack.formats.tables import cache_per_device

from .columns import MIN_AXIS, Term
from .kernel import Output, Quantizer, encode_rows
from .norms import NormConstants, add_decoded, begin_norms, create_norms, finish_norms
from .rows import block_tokens, find_level, look_up_entry, table_bounds, table_values

BLOCK_TOKENS = 64
BLOCK_SYMBOLS = 32

_SCALES, _COUNT = tl.constexpr(SCALES), tl.constexpr(len(SCALES))


class ScalarConstants(NamedTuple):
    """Compile-time constants of a scalar codec: the number of magnitude levels of each width. ``high_levels`` is 0 without a second width.

    The tables are the bounds and the magnitudes of each width, and a mask of the channels with the second width.
    """

    norms: NormConstants
    levels: int
    high_levels: int


class ScaledState(NamedTuple):
    """A ``NormState`` with the chosen multiple (``scale``) of each token's unit vector, ``[token, 1]``.

    While multiples are tried, ``product`` and ``decoded`` are ``[token, scale]``: the product of the unit vector and a multiple's error,
    and the squared norm of that error. ``scale`` is then the squared norm of the vector.
    """

    norm: Any
    factor: Any
    product: Any
    decoded: Any
    scale: Any


def encode(codec: Scalar, x: torch.Tensor, output: Output) -> bool:
    """Encode ``x`` into ``output``. Returns False if the codec is not supported."""
    symbols = max(MIN_AXIS, next_power_of_two(codec.dim))
    tables = [table_bounds(codec.magnitude_table, x.device), table_values(codec.magnitude_table, x.device)]
    if codec.bits_high:
        high = codec.high_magnitude_table
        tables += [table_bounds(high, x.device), table_values(high, x.device), _high_channels(codec.channel_sets, symbols, x.device)]
    constants = ScalarConstants(create_norms(codec, tables, x.device), 1 << codec.bits - 1, (1 << codec.bits_high) // 2)
    if codec.rounding == "scaled":
        quantizer = Quantizer(_quantize_scaled, constants, _begin_scaled, finish_norms, measure=_measure, decide=_choose_scale)
    else:
        quantizer = Quantizer(_quantize, constants, begin_norms, finish_norms)
    return encode_rows(
        codec, x, output, quantizer, _digit_terms, [output.streams["norm"]], tables,
        symbols=symbols, block=min(symbols, BLOCK_SYMBOLS), tokens=block_tokens(x, BLOCK_TOKENS),
    )  # fmt: skip


def _digit_terms(codec: Scalar) -> dict[str, tuple[Term]]:
    names = [name for name, _ in codec.fields]
    parts = enumerate(zip(names, codec.channel_sets, strict=True))
    return {name: (Term(number, part.bits, symbols=part.channels),) for number, (name, part) in parts}


@cache_per_device
def _high_channels(parts: tuple[ChannelSet, ...], symbols: int) -> torch.Tensor:
    """Return a mask of the channels of the second bit width, int32 ``[symbols]``."""
    high = torch.zeros(symbols, dtype=torch.int32)
    high[list(parts[1].channels)] = 1
    return high


@triton.jit
def _quantize(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, block_index: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the codes of a block of channels, and the next state. If there are two widths, all channels are encoded with both."""
    magnitude = tl.abs(values[0]) * state.factor
    digits, decoded = _encode_magnitudes(values[0], magnitude, block, block_index, CONSTANTS, SHAPE)
    if CONSTANTS.norms.rule > 0 or SHAPE.measured:
        state = add_decoded(state, magnitude, decoded)
    return digits, state


@triton.jit
def _encode_magnitudes(
    value: tl.tensor, magnitude: tl.tensor, block: tl.tuple, block_index: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the codes of a block of a unit vector, and the magnitudes that they decode to. ``magnitude`` contains the block's magnitudes.

    See ``_quantize`` for the other arguments.
    """
    LEVELS: tl.constexpr = CONSTANTS.levels
    HIGH_LEVELS: tl.constexpr = CONSTANTS.high_levels
    BLOCK: tl.constexpr = SHAPE.block
    tables = block.tables
    level = find_level(magnitude, tables[0], LEVELS)
    digits = (level + tl.where(value < 0, LEVELS, 0),)
    decoded = look_up_entry(level, tables[1], LEVELS)
    channel = block_index * BLOCK + tl.arange(0, BLOCK)[None, :]
    if HIGH_LEVELS > 0:
        level = find_level(magnitude, tables[2], HIGH_LEVELS)
        digits = (digits[0], level + tl.where(value < 0, HIGH_LEVELS, 0))
        decoded = tl.where(tl.load(tables[4] + channel) != 0, look_up_entry(level, tables[3], HIGH_LEVELS), decoded)
    return digits, tl.where(channel < SHAPE.dim, decoded, 0.0)


@triton.jit
def _begin_scaled(block: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
    TOKENS: tl.constexpr = SHAPE.tokens
    state = begin_norms(block, CONSTANTS, SHAPE)
    zeros = tl.zeros([TOKENS, _COUNT], tl.float32)
    return ScaledState(state.norm, state.factor, zeros, zeros, state.product)


@triton.jit
def _measure(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, block_index: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Encode a block of the unit vector, multiplied by each of ``_SCALES``, and add the sums of the errors to ``state``."""
    magnitude = tl.abs(values[0]) * state.factor
    product, squares = state.product, state.decoded
    for place in tl.static_range(_COUNT):
        scaled = tl.abs(values[0]) * (state.factor * _SCALES[place])
        _, decoded = _encode_magnitudes(values[0], scaled, block, block_index, CONSTANTS, SHAPE)
        error = scaled - decoded
        own = tl.arange(0, _COUNT)[None, :] == place
        product += tl.where(own, tl.sum(magnitude * error, 1)[:, None], 0.0)
        squares += tl.where(own, tl.sum(error * error, 1)[:, None], 0.0)
    return ScaledState(state.norm, state.factor, product, squares, state.scale + tl.sum(magnitude * magnitude, 1)[:, None])


@triton.jit
def _choose_scale(state: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
    """Return the state with the scale that gives the smallest angle, and the sums for this scale. The first scale wins ties."""
    numbers = tl.arange(0, _COUNT)[None, :]
    scales = tl.zeros_like(state.product) + _SCALES[0]
    for number in tl.static_range(1, _COUNT):
        scales = tl.where(numbers == number, _SCALES[number], scales)
    # Compare errors, as in formats/: with 8 bits, cosines differ by less than the rounding of the sums.
    sine = state.scale * state.decoded - state.product * state.product
    product = scales * state.scale - state.product
    decoded = scales * (product - state.product) + state.decoded
    place = tl.argmin(sine / tl.maximum(decoded, 1e-37), 1, tie_break_left=True)[:, None]
    chosen = numbers == place
    product, decoded = tl.where(chosen, product, 0.0), tl.where(chosen, decoded, 0.0)
    scale = tl.zeros_like(state.norm) + _SCALES[0]
    for number in tl.static_range(1, _COUNT):
        scale = tl.where(place == number, _SCALES[number], scale)
    return ScaledState(state.norm, state.factor, tl.sum(product, 1)[:, None], tl.sum(decoded, 1)[:, None], scale)


@triton.jit
def _quantize_scaled(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, block_index: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the codes of a block of the chosen multiple of the unit vector. The state already contains the sums for this multiple."""
    # The factors of a token are multiplied first, as in _measure: Triton 3.6 fails to compile (|x| * factor) * scale in a second loop.
    digits, _ = _encode_magnitudes(values[0], tl.abs(values[0]) * (state.factor * state.scale), block, block_index, CONSTANTS, SHAPE)
    return digits, state
