"""Encoder of codec lossless on the GPU (spec/codecs/lossless.md, spec/rans.md), with the same bytes as ``formats/lossless.py``.

One launch packs signs and fractions and counts exponents. The host computes the tables from the counts. Then each warp encodes one chunk to
scratch memory, from its last symbol to its first, and the last launch joins the words of all chunks.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.lossless import FLOAT_FORMATS
from kvpack.formats.rans import LANES, MIN_STATE, PRECISION, TOTAL
from kvpack.kernels.bitpack.columns import launch
from kvpack.kernels.bitpack.rans import count_lanes, count_lanes_before, lane_mask

from .columns import MIN_AXIS, Term
from .kernel import Quantizer, encode_rows
from .rows import MAX_PRODUCTS, flag_unless

if TYPE_CHECKING:
    from kvpack.formats.lossless import Lossless

    from .kernel import Output

TILE_VALUES = 1 << 11
"""Number of values in a tile of the first launch, unless its ``MIN_AXIS`` tokens have more."""

STEPS = 16
"""Number of symbols per lane that are loaded together."""

JOINED_WORDS = 1 << 10
"""Number of words that a program copies together."""

_FREQUENCY_BITS = tl.constexpr(PRECISION + 1)
_FREQUENCY_MASK, _SLOT_MASK = tl.constexpr(2 * TOTAL - 1), tl.constexpr(TOTAL - 1)
_PRECISION, _MIN_STATE = tl.constexpr(PRECISION), tl.constexpr(MIN_STATE)
_FULL_SHIFT = tl.constexpr(32 - PRECISION)
_MAX_UINT32 = (1 << 32) - 1
_NO_SYMBOL = tl.constexpr(TOTAL | _MAX_UINT32 // TOTAL << 32)
"""Entry of a symbol with frequency ``TOTAL``, which does not change a state."""


def encode(codec: Lossless, x: torch.Tensor, output: Output) -> bool:
    """Encode ``x`` into ``output``. Returns False for values of a different dtype, for rows that are too long, and for engine pages.

    ``output`` must contain the frequencies of the preceding tokens, or 0 if there are none. Waits for the device.
    """
    own_dtype = codec.dtype == {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(x.dtype)
    if output.origins is not None or not own_dtype or codec.dim > MAX_PRODUCTS:
        return False
    streams, (batch, heads, tokens, dim), form = output.streams, x.shape, FLOAT_FORMATS[codec.dtype]
    x = x.view(torch.int16)
    counts = torch.zeros(batch * heads, form.exponents, dtype=torch.int64, device=x.device)
    symbols = max(MIN_AXIS, next_power_of_two(dim))
    if not encode_rows(
        codec, x, output, Quantizer(_split, form), _digit_terms, (), (counts,), symbols=symbols,
        tokens=max(MIN_AXIS, TILE_VALUES // symbols), rotated=False,
    ):  # fmt: skip
        return False
    before = streams["frequencies"].cpu()
    tables = codec.choose_frequencies(counts.cpu().numpy(), {"frequencies": before} if before.numpy().any() else None)
    streams["frequencies"].copy_(torch.from_numpy(tables.astype(numpy.uint16)).view(before.shape))
    word_counts = streams["word_counts"].view(torch.int16)
    row_words = min(codec.chunk, tokens) * dim
    scratch = torch.empty(word_counts.numel(), row_words, dtype=torch.int16, device=x.device)
    # Zeros, because ``kvpack warm`` launches nothing, but allocates the words.
    counts = torch.zeros(len(scratch), dtype=torch.int64, device=x.device)
    launch(
        _encode_chunk, len(scratch), x.device, x, *x.stride(), heads, tokens, torch.from_numpy(_symbol_entries(tables)).to(x.device),
        streams["states"].view(torch.int16), word_counts, counts, scratch, output.flag,
        DIM=dim, CHUNK=codec.chunk, FORMAT=form, CHUNK_LANES=LANES, STEPS=STEPS, warps=1,
    )  # fmt: skip
    ends = counts.cumsum(0)
    words = torch.empty(1, 1, int(ends[-1]), dtype=torch.uint16, device=x.device)
    launch(_copy_chunk_words, len(scratch), x.device, words.view(torch.int16), scratch, ends, row_words, BLOCK=JOINED_WORDS, warps=2)
    streams["words"] = words
    return True


def _digit_terms(codec: Lossless) -> dict[str, list[Term]]:
    return {"signed_fractions": [Term(0, 1 + FLOAT_FORMATS[codec.dtype].fraction_bits)]}


def _symbol_entries(tables: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """Return the data of each symbol for ``_encode_chunk``, int64 ``[table, symbol]``: its frequency, first slot and reciprocal."""
    first_slots, reciprocals = numpy.cumsum(tables, 1) - tables, _MAX_UINT32 // numpy.maximum(tables, 1)
    result: numpy.ndarray[Any, Any] = tables | first_slots << _FREQUENCY_BITS.value | reciprocals << 32
    return result


@triton.jit
def _split(values: tl.tuple, block: tl.tuple, state: tl.tuple, number: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
    """Return the signs and fractions of ``values``, which are passed as bit patterns, and add their exponents to the counts."""
    FRACTION: tl.constexpr = CONSTANTS.fraction_bits
    EXPONENT: tl.constexpr = CONSTANTS.exponent_bits
    TILE: tl.constexpr = SHAPE.tokens * SHAPE.block
    bits = values[0].to(tl.int32)
    exponent = tl.arange(0, 1 << EXPONENT)
    counts = tl.histogram(tl.ravel(bits >> FRACTION & (1 << EXPONENT) - 1), 1 << EXPONENT).to(tl.int64)
    # Padding is 0. It cannot be masked, because ravel may reorder the values and the mask differently.
    padding = TILE - tl.minimum(block.tokens - block.first, SHAPE.tokens) * SHAPE.dim
    counts -= tl.where(exponent == 0, padding, 0)
    sequence = block.sequence * block.heads + block.head
    tl.atomic_add(block.tables[0] + (sequence << EXPONENT) + exponent, counts, counts > 0, sem="relaxed")
    return (bits >> EXPONENT & 1 << FRACTION | bits & (1 << FRACTION) - 1,), state


@triton.jit
def _encode_chunk(
    x: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    entries: tl.tensor,
    states: tl.tensor,
    word_counts: tl.tensor,
    counts: tl.tensor,
    scratch: tl.tensor,
    flag: tl.tensor,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    FORMAT: tl.constexpr,
    CHUNK_LANES: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """Encode one chunk of ``x``, int16 ``[batch, kv_head, token, dim]``, to the end of its row of ``scratch``, ``[chunk, word]``.

    The number of words is written to ``counts``, int64 ``[chunk]``. Chunks are ordered by position, sequence and head. The flag is set if a
    symbol has frequency 0 and would therefore be lost.
    """
    FRACTION: tl.constexpr = FORMAT.fraction_bits
    EXPONENT: tl.constexpr = FORMAT.exponent_bits
    rows = tl.cdiv(tokens, CHUNK)
    sequences = tl.num_programs(0) // rows
    chunk = tl.program_id(0).to(tl.int64)
    sequence = chunk % sequences
    row = chunk // sequences
    entries += sequence << EXPONENT
    x += sequence // heads * batch_stride + sequence % heads * head_stride + row * CHUNK * token_stride
    count = tl.minimum(tokens - row * CHUNK, CHUNK).to(tl.int32) * DIM
    end = scratch + (chunk + 1) * (tl.minimum(tokens, CHUNK) * DIM)
    lane = tl.arange(0, CHUNK_LANES)  # [lane], like all tensors below
    state = tl.full((CHUNK_LANES,), _MIN_STATE, tl.uint32)
    written = 0
    coded = lane >= 0
    for group in range(tl.cdiv(count, STEPS * CHUNK_LANES) - 1, -1, -1):
        loaded = ()
        for step in tl.static_range(STEPS):
            symbol = (group * STEPS + STEPS - 1 - step) * CHUNK_LANES + lane
            active = symbol < count
            address = x + ((symbol // DIM).to(tl.int64) * token_stride + (symbol % DIM).to(tl.int64) * channel_stride)
            exponent = tl.load(address, active, 0).to(tl.int32) >> FRACTION & (1 << EXPONENT) - 1
            entry = tl.load(entries + exponent, active, _NO_SYMBOL)
            coded = coded & (entry & _FREQUENCY_MASK > 0)
            loaded = loaded + (entry,)  # noqa: RUF005
        for step in tl.static_range(STEPS):
            state, written = _add_symbol(state, loaded[step], lane, end, written)
    flag_unless(coded, flag)
    chunk = sequence * rows + row
    states += chunk * (2 * CHUNK_LANES) + 2 * lane
    tl.store(states, state.to(tl.int16))
    tl.store(states + 1, (state >> 16).to(tl.int16))
    tl.store(word_counts + chunk, written)
    tl.store(counts + tl.program_id(0), written)


@triton.jit
def _add_symbol(state: tl.tensor, entry: tl.tensor, lane: tl.tensor, end: tl.tensor, written: tl.tensor) -> tl.tuple:
    """Encode the symbol of ``entry`` in each lane. Returns the new states and the new number of words before ``end`` (``written``)."""
    frequency = entry.to(tl.uint32) & _FREQUENCY_MASK
    first_slot = entry.to(tl.uint32) >> _FREQUENCY_BITS & _SLOT_MASK
    full = state >> _FULL_SHIFT >= frequency
    writers = lane_mask(full, lane)
    written += count_lanes(writers)
    tl.store(end + (count_lanes_before(writers, lane) - written), state.to(tl.int16), full)
    state = tl.where(full, state >> 16, state)
    # With the reciprocal rounded down, the quotient is exact or one too small.
    quotient = tl.umulhi(state, (entry >> 32).to(tl.uint32))
    remainder = state - quotient * frequency
    is_small = remainder >= frequency
    quotient = tl.where(is_small, quotient + 1, quotient)
    remainder = tl.where(is_small, remainder - frequency, remainder)
    return (quotient << _PRECISION) + remainder + first_slot, written


@triton.jit
def _copy_chunk_words(words: tl.tensor, scratch: tl.tensor, ends: tl.tensor, row_words: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Copy one chunk's words from the end of its row in ``scratch`` to their position in ``words``.

    ``scratch`` is ``[chunk, row_words]``, because no chunk has more than ``row_words`` words. ``ends`` contains each chunk's end in
    ``words``.
    """
    chunk = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + chunk)
    count = (end - tl.load(ends + (chunk - 1), chunk > 0, 0)).to(tl.int32)
    for first in range(0, count, BLOCK):
        back = first + tl.arange(0, BLOCK) + 1
        tl.store(words + (end - back), tl.load(scratch + ((chunk + 1) * row_words - back), back <= count), back <= count)
