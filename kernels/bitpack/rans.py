"""rANS decoding steps (spec/rans.md) for programs of one warp. Threads are the lanes of a chunk.

A step looks up the symbols of all lanes in a table of slots (``formats.rans.slot_table``). Then the lanes whose states are too small read
the next words of the chunk, in lane order.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.formats.rans import MIN_STATE, PRECISION

_PRECISION = tl.constexpr(PRECISION)
_MIN_STATE = tl.constexpr(MIN_STATE)
_LAST_SLOT = tl.constexpr((1 << PRECISION) - 1)


@triton.jit
def lane_mask(flags: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """Return a bit mask of the lanes whose ``flags`` are set."""
    # The bits are distinct, so their sum is their union, which a warp computes in one instruction.
    return tl.sum(tl.where(flags, 1 << lane, 0), 0).to(tl.uint32, bitcast=True)


@triton.jit
def count_lanes(lanes: tl.tensor) -> tl.tensor:
    """Return the number of lanes in ``lanes``, a ``lane_mask``. The compiler turns this into one population-count instruction."""
    pair_counts = lanes - (lanes >> 1 & 0x55555555)
    nibble_counts = (pair_counts & 0x33333333) + (pair_counts >> 2 & 0x33333333)
    byte_counts = nibble_counts + (nibble_counts >> 4) & 0x0F0F0F0F
    return (byte_counts * 0x01010101 >> 24).to(tl.int32)


@triton.jit
def count_lanes_before(lanes: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """Return the number of lanes in the ``lane_mask`` that precede each ``lane``."""
    return count_lanes(lanes & (1 << lane.to(tl.uint32)) - 1)


@triton.jit
def load_states(states: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """Load the initial state of each lane as uint32. ``states`` are interleaved int16 halves: low, high, low, high, ..."""
    low_half = tl.load(states + 2 * lane).to(tl.uint32) & 0xFFFF
    return tl.load(states + 2 * lane + 1).to(tl.uint32) << 16 | low_half


@triton.jit
def load_entries(slots: tl.tensor, state: tl.tensor) -> tl.tensor:
    """Load the entry of each lane's slot from the table ``slots``, as uint32. The lowest byte of an entry is the symbol."""
    return tl.load(slots + (state & _LAST_SLOT).to(tl.int32)).to(tl.uint32, bitcast=True)


@triton.jit
def advance(
    state: tl.tensor, entry: tl.tensor, active: tl.tensor, lane: tl.tensor, words: tl.tensor, next_word: tl.tensor, word_count: tl.tensor
) -> tl.tuple:
    """Advance each lane's state past the symbol of ``entry``. Returns the new states, and the index of the next word to read.

    There are ``word_count`` words; words past the end count as 0.
    """
    next_state = ((entry >> 8 & _LAST_SLOT) + 1) * (state >> _PRECISION) + (state & _LAST_SLOT) - (entry >> 20)
    needs_word = active & (next_state < _MIN_STATE)
    readers = lane_mask(needs_word, lane)
    word_index = next_word + count_lanes_before(readers, lane)
    word = tl.load(words + word_index, needs_word & (word_index < word_count), 0).to(tl.uint32) & 0xFFFF
    next_state = tl.where(needs_word, next_state << 16 | word, next_state)
    return tl.where(active, next_state, state), next_word + count_lanes(readers)
