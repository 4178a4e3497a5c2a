"""Reader checks of rANS chunks: their initial states, and the states and word counts at their ends (spec/rans.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import rans
from .errors import InvalidPayload
from .lazy import numpy
from .value_blocks import first_index, row_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .value_blocks import Array

    Numbers = numpy.ndarray[Any, Any]


def check_states(states: Array, where: str) -> None:
    """Raise InvalidPayload for an initial state below 2^16. ``states`` are uint16 ``[..., 2 · LANES]``, low halves first."""
    for first, (block,) in row_blocks(states):
        low = block[:, 1::2] == 0
        if low.any():
            at = first_index(low, first * rans.LANES, (*states.shape[:-1], rans.LANES))
            raise InvalidPayload(f"{where}.states: the state at {at} is {block[:, ::2][low][0]}, expected at least {rans.MIN_STATE}")


def check_ends(decoded: rans.DecodedChunks, counts: Numbers, chunk_position: Callable[[int], Sequence[int]], where: str) -> None:
    """Raise InvalidPayload for the first chunk that no encoder produces.

    ``counts`` contains the number of words of each chunk. ``chunk_position`` returns the indices of a chunk for the message.
    """
    faulty = decoded.faulty_chunks(counts)
    if faulty.any():
        first = int(faulty.argmax())
        raise InvalidPayload(
            f"{where}.words: the chunk at {list(chunk_position(first))} uses {decoded.read[first]} of its {counts[first]} words "
            f"and ends in the states {sorted({int(state) for state in decoded.states[first]})[:4]}, expected all words and the final state "
            f"{rans.MIN_STATE}"
        )
