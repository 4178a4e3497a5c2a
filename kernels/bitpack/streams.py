"""Stored streams in the form that loaders read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvpack.formats.columns import Columns

WORD_BITS = 16
"""Bits of the words that rows are stored in."""

RUN_TOKENS = 1 << 30
"""Tokens per row of a stream with one row per run: it takes no bytes per token."""


@dataclass(frozen=True)
class Stream:
    """A stored stream as a loader reads it: elements of ``bits``, 8 to 128, with ``row`` elements per row of ``tokens`` tokens.

    A pair of binary16 is one 32-bit element.
    """

    name: str
    bits: int
    row: int
    tokens: int = 1


def plane_streams(name: str, packing: Columns) -> tuple[Stream, ...]:
    """Return the planes of one code stream."""
    return tuple(Stream(f"{name}.{plane}", 16, words) for plane, words in enumerate(packing.planes))


def dense_rows(tensor: torch.Tensor) -> bool:
    """Return True if all rows of a head, in ``[batch, kv_head, row, ...]``, are contiguous."""
    step = 1
    for length, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True
