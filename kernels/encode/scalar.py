"""Encoder of codec scalar on the GPU (spec/codecs/scalar.md), tested against ``formats/scalar.py``."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.tables import cache_per_device

from .columns import MIN_AXIS, Term
from .kernel import Quantizer, encode_rows
from .norms import Norms, add_decoded, begin_norms, create_norms, end_norms
from .rows import block_tokens, find_level, look_up_entry, table_bounds, table_values

if TYPE_CHECKING:
    from kvpack.formats.scalar import ChannelSet, Scalar

    from .kernel import Output

BLOCK_TOKENS = 64
BLOCK_SYMBOLS = 32


class ScalarConstants(NamedTuple):
    """Compile-time constants of a codec: the number of magnitude levels of each width; ``high_levels`` is 0 without a second width.

    Tables are the bounds and the magnitudes of each width, and a mask of the channels with the second width.
    """

    norms: Norms
    levels: int
    high_levels: int


def encode(codec: Scalar, x: torch.Tensor, output: Output) -> bool:
    """Encode ``x`` to ``output``; return False, and do nothing, if the kernel does not support ``codec``."""
    symbols = max(MIN_AXIS, next_power_of_two(codec.dim))
    tables = [table_bounds(codec.magnitude_table, x.device), table_values(codec.magnitude_table, x.device)]
    if codec.bits_high:
        high = codec.high_magnitude_table
        tables += [table_bounds(high, x.device), table_values(high, x.device), _high_channels(codec.channel_sets, symbols, x.device)]
    constants = ScalarConstants(create_norms(codec, tables, x.device), 1 << codec.bits - 1, (1 << codec.bits_high) // 2)
    return encode_rows(
        codec, x, output, Quantizer(_quantize, constants, begin_norms, end_norms), _digit_terms, [output.streams["norm"]], tables,
        symbols=symbols, block=min(symbols, BLOCK_SYMBOLS), tokens=block_tokens(x, BLOCK_TOKENS),
    )  # fmt: skip


def _digit_terms(codec: Scalar) -> dict[str, tuple[Term]]:
    names = [name for name, _ in codec.fields]
    parts = enumerate(zip(names, codec.channel_sets, strict=True))
    return {name: (Term(number, part.bits, symbols=part.channels),) for number, (name, part) in parts}


@cache_per_device
def _high_channels(parts: tuple[ChannelSet, ...], symbols: int) -> torch.Tensor:
    """Return an int32 mask of the channels, padded to ``symbols``, that have the second width."""
    high = torch.zeros(symbols, dtype=torch.int32)
    high[list(parts[1].channels)] = 1
    return high


@triton.jit
def _quantize(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, number: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the codes of a block of channels; with two widths, codes for both widths for all channels."""
    LEVELS: tl.constexpr = CONSTANTS.levels
    HIGH_LEVELS: tl.constexpr = CONSTANTS.high_levels
    BLOCK: tl.constexpr = SHAPE.block
    tables = block.tables
    value = values[0]
    magnitude = tl.abs(value) * state.factor
    level = find_level(magnitude, tables[0], LEVELS)
    digits = (level + tl.where(value < 0, LEVELS, 0),)
    if CONSTANTS.norms.rule > 0:
        decoded = look_up_entry(level, tables[1], LEVELS)
    if HIGH_LEVELS > 0:
        level = find_level(magnitude, tables[2], HIGH_LEVELS)
        digits = (digits[0], level + tl.where(value < 0, HIGH_LEVELS, 0))
    if CONSTANTS.norms.rule > 0:
        channel = number * BLOCK + tl.arange(0, BLOCK)[None, :]
        if HIGH_LEVELS > 0:
            decoded = tl.where(tl.load(tables[4] + channel) != 0, look_up_entry(level, tables[3], HIGH_LEVELS), decoded)
        state = add_decoded(state, magnitude, tl.where(channel < SHAPE.dim, decoded, 0.0))
    return digits, state
