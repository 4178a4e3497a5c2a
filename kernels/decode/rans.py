"""Steps of rANS (spec/rans.md) for programs of one warp, whose threads are the lanes of a chunk; ``formats/rans.py`` is the oracle.

A step looks up the symbols of all lanes in a table of slots (``formats.rans.slot_table``). Lanes whose states run low then read the next
words of the chunk, in lane order.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.formats.rans import LANES, MIN_STATE, PRECISION

_LANES = tl.constexpr(LANES)
_PRECISION = tl.constexpr(PRECISION)
_MIN_STATE = tl.constexpr(MIN_STATE)
_LAST_SLOT = tl.constexpr((1 << PRECISION) - 1)


@triton.jit
def lanes_of(flags: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """Return a bit mask of the lanes whose ``flags`` are set."""
    # A sum over a warp is one instruction, and the bits are distinct.
    return tl.sum(tl.where(flags, 1 << lane, 0), 0).to(tl.uint32, bitcast=True)


@triton.jit
def count_of(lanes: tl.tensor) -> tl.tensor:
    """Count the lanes in a bit mask of ``lanes_of``. The compiler turns these sums into a population count."""
    pairs = lanes - (lanes >> 1 & 0x55555555)
    fours = (pairs & 0x33333333) + (pairs >> 2 & 0x33333333)
    eights = fours + (fours >> 4) & 0x0F0F0F0F
    return (eights * 0x01010101 >> 24).to(tl.int32)


@triton.jit
def before(lanes: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """Return the number of lanes in a bit mask of ``lanes_of`` that come before each ``lane``."""
    return count_of(lanes & (1 << lane.to(tl.uint32)) - 1)


@triton.jit
def first_states(states: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """Load the first state of every lane, uint32, from ``states``, int16: low halves before high ones."""
    low_half = tl.load(states + 2 * lane).to(tl.uint32) & 0xFFFF
    return tl.load(states + 2 * lane + 1).to(tl.uint32) << 16 | low_half


@triton.jit
def entry_of(slots: tl.tensor, state: tl.tensor) -> tl.tensor:
    """Return the table entries for the slots of the states, uint32; ``slots`` are the tables, and the lowest byte is the symbol."""
    return tl.load(slots + (state & _LAST_SLOT).to(tl.int32)).to(tl.uint32, bitcast=True)


@triton.jit
def advance(
    state: tl.tensor, entry: tl.tensor, active: tl.tensor, lane: tl.tensor, words: tl.tensor, at: tl.tensor, end: tl.tensor
) -> tl.tuple:
    """Return the states after the symbols of ``entry``, and the number of the next word. Words from number ``end`` on count as 0."""
    after = ((entry >> 8 & _LAST_SLOT) + 1) * (state >> _PRECISION) + (state & _LAST_SLOT) - (entry >> 20)
    low = active & (after < _MIN_STATE)
    taking = lanes_of(low, lane)
    source = at + before(taking, lane)
    word = tl.load(words + source, low & (source < end), 0).to(tl.uint32) & 0xFFFF
    after = tl.where(low, after << 16 | word, after)
    return tl.where(active, after, state), at + count_of(taking)
