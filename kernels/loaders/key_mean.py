"""key_mean as tiles (spec/side-cars.md): the codes of each token's page, beside a codec's tiles of keys and in their columns.

Codes are integers of at most 8 bits, so that binary16 tiles hold them; their products with the query are scores over the page's scale.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.key_mean import CODES, SCALE
from kvpack.kernels.bitpack.streams import Stream

if TYPE_CHECKING:
    from kvpack.formats.key_mean import KeyMean

    from .tiles import Tiles

COLUMNS = "key_mean_columns"
"""A stream that no file has: where in its page the first token is, and then the channel of each column (``columns_of``)."""


class KeyMeanConstants(NamedTuple):
    """What the functions below know of the means beside a codec's tiles of ``widths`` columns; ``first_stream`` is that of their codes.

    A page is ``tokens`` tokens and takes ``row`` bytes, of ``bits`` per channel.
    """

    first_stream: int
    widths: tuple[int, ...]
    tokens: int
    row: int
    bits: int


def with_means(tiles: Tiles, key_mean: KeyMean) -> Tiles | None:
    """The loader ``tiles`` of a codec of keys with their means; None where its tiles do not hold binary16."""
    if tiles.dtype != "fp16":
        return None
    row = key_mean.dim * key_mean.bits // 8
    constants = KeyMeanConstants(len(tiles.streams), tuple(map(len, tiles.channels)), key_mean.tokens, row, key_mean.bits)
    means = Stream(CODES, 8, row, key_mean.tokens), Stream(SCALE, 16, 1, key_mean.tokens), Stream(COLUMNS, 16, 0)
    return replace(tiles, streams=(*tiles.streams, *means), means=constants, loads_ahead=False, keys=None)


@lru_cache(maxsize=256)
def columns_of(tiles: Tiles, first: int, device: str) -> torch.Tensor:
    """The stream ``COLUMNS``, int16 ``[1, 1, 1 + column]``, of a codec's ``tiles``, the ``first`` of whose tokens is so far into its page.

    Columns without a channel, where queries are zero, have that of channel 0.
    """
    channels = [max(0, channel) for part in tiles.channels for channel in part]
    return torch.tensor([first, *channels], dtype=torch.int16, device=device)[None, None]


@triton.jit
def load_means(
    pointers: tl.tuple, first: tl.tensor, token: tl.tensor, valid: tl.tensor, CONSTANTS: tl.constexpr, MASKED: tl.constexpr
) -> tl.tuple:
    """The codes of each token's page, int8 ``[warp, token, column]`` for each tile, and its scales, int16 ``[warp, token]``."""
    WIDTHS: tl.constexpr = CONSTANTS.widths
    HALF: tl.constexpr = CONSTANTS.row
    columns = pointers[CONSTANTS.first_stream + 2]
    page = (first + token + tl.load(columns)) // CONSTANTS.tokens
    row = pointers[CONSTANTS.first_stream] + page[:, :, None] * CONSTANTS.row
    loaded = ()
    done = 1
    for number in tl.static_range(len(WIDTHS)):
        channel = tl.load(columns + done + tl.arange(0, WIDTHS[number]))[None, None, :].to(tl.int32)
        at = channel
        if CONSTANTS.bits == 4:
            at = channel % HALF
        if MASKED:
            code = tl.load(row + at, valid[:, :, None], 0)
        else:
            code = tl.load(row + at)
        code = code.to(tl.int32) & 0xFF
        if CONSTANTS.bits == 4:
            code = (code >> (channel // HALF * 4)) & 15
        loaded = loaded + ((code - (1 << CONSTANTS.bits - 1)).to(tl.float16),)
        done += WIDTHS[number]
    if MASKED:
        scale = tl.load(pointers[CONSTANTS.first_stream + 1] + page, valid, 0)
    else:
        scale = tl.load(pointers[CONSTANTS.first_stream + 1] + page)
    return loaded + (scale,)


@triton.jit
def factor_of_means(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The scale of each token's page, float32 ``[warp, token]``."""
    WIDTHS: tl.constexpr = CONSTANTS.widths
    return loaded[len(WIDTHS)].to(tl.float16, bitcast=True).to(tl.float32)
