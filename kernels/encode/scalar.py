"""Encode scalar on the GPU (spec/codecs/scalar.md); ``formats/scalar.py`` is the oracle."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.tables import cache_per_device

from .columns import SMALLEST_AXIS, Term
from .kernel import Quantizer, encode_rows
from .norms import Norms, begin_norms, end_norms, norms_for, with_decoded
from .rows import block_tokens, bounds_of, entry_of, level_of, values_of

if TYPE_CHECKING:
    from kvpack.formats.scalar import ChannelSet, Scalar

    from .kernel import Output

BLOCK_TOKENS = 64
BLOCK_SYMBOLS = 32


class ScalarConstants(NamedTuple):
    """Magnitude levels of each width, 0 without a second width.

    The tables are the ascending bounds of ``level_of`` and the magnitudes of each width, and a mask of the channels of the second.
    """

    norms: Norms
    levels: int
    high_levels: int


def encode(codec: Scalar, x: torch.Tensor, output: Output) -> bool:
    """Fill ``output`` from ``x``. Returns False, and does nothing, for codecs that the kernel does not support."""
    symbols = max(SMALLEST_AXIS, next_power_of_two(codec.dim))
    tables = [bounds_of(codec.magnitude_table, x.device), values_of(codec.magnitude_table, x.device)]
    if codec.bits_high:
        high = codec.high_magnitude_table
        tables += [bounds_of(high, x.device), values_of(high, x.device), _high(codec.channel_sets, symbols, x.device)]
    constants = ScalarConstants(norms_for(codec, tables, x.device), 1 << codec.bits - 1, (1 << codec.bits_high) // 2)
    return encode_rows(
        codec, x, output, Quantizer(_quantize, constants, begin_norms, end_norms), _terms, [output.streams["norm"]], tables,
        symbols=symbols, block=min(symbols, BLOCK_SYMBOLS), tokens=block_tokens(x, BLOCK_TOKENS),
    )  # fmt: skip


def _terms(codec: Scalar) -> dict[str, tuple[Term]]:
    names = [name for name, _ in codec.fields]
    parts = enumerate(zip(names, codec.channel_sets, strict=True))
    return {name: (Term(number, part.bits, symbols=part.channels),) for number, (name, part) in parts}


@cache_per_device
def _high(parts: tuple[ChannelSet, ...], symbols: int) -> torch.Tensor:
    """Return 1 for those of ``symbols`` channels that have the second width, else 0, int32."""
    high = torch.zeros(symbols, dtype=torch.int32)
    high[list(parts[1].channels)] = 1
    return high


@triton.jit
def _quantize(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, number: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the codes of a block of channels; with two widths, the codes as if all had the first, then as if all had the second."""
    LEVELS: tl.constexpr = CONSTANTS.levels
    HIGH_LEVELS: tl.constexpr = CONSTANTS.high_levels
    BLOCK: tl.constexpr = SHAPE.block
    tables = block.tables
    value = values[0]
    magnitude = tl.abs(value) * state.factor
    level = level_of(magnitude, tables[0], LEVELS)
    digits = (level + tl.where(value < 0, LEVELS, 0),)
    if CONSTANTS.norms.rule > 0:
        found = entry_of(level, tables[1], LEVELS)
    if HIGH_LEVELS > 0:
        level = level_of(magnitude, tables[2], HIGH_LEVELS)
        digits = (digits[0], level + tl.where(value < 0, HIGH_LEVELS, 0))
    if CONSTANTS.norms.rule > 0:
        channel = number * BLOCK + tl.arange(0, BLOCK)[None, :]
        if HIGH_LEVELS > 0:
            found = tl.where(tl.load(tables[4] + channel) != 0, entry_of(level, tables[3], HIGH_LEVELS), found)
        state = with_decoded(state, magnitude, tl.where(channel < SHAPE.dim, found, 0.0))
    return digits, state
