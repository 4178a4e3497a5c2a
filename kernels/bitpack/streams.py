"""Descriptions of stored streams, as loaders read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvpack.formats.columns import Columns

WORD_BITS = 16
"""Number of bits per stored word."""

RUN_TOKENS = 1 << 30
"""Tokens per row for streams with one row for all tokens."""


@dataclass(frozen=True)
class Stream:
    """A stored stream as loaders read it: one row of ``row`` elements for every ``tokens`` tokens. Elements have ``bits`` bits (8 to 128).

    A pair of float16 numbers counts as one 32-bit element.
    """

    name: str
    bits: int
    row: int
    tokens: int = 1


def plane_streams(name: str, packing: Columns) -> tuple[Stream, ...]:
    """Return a ``Stream`` of 16-bit words for each plane of the code stream ``name``."""
    return tuple(Stream(f"{name}.{plane}", 16, words) for plane, words in enumerate(packing.planes))


def has_dense_rows(tensor: torch.Tensor) -> bool:
    """Return True if the rows of each head are contiguous in ``tensor`` ``[batch, kv_head, row, ...]``."""
    step = 1
    for length, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True
