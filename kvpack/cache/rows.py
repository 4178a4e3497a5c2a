"""Checks of the sequence indices that callers select from a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

import torch

from kvpack.formats.arguments import as_integer, describe
from kvpack.formats.errors import InvalidParameter, OutOfBounds


def row_indices(indices: torch.Tensor | Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Return ``indices`` as integers. Raises InvalidParameter unless they are a list or a rank-1 tensor of at least one integer."""
    if isinstance(indices, torch.Tensor):
        if indices.dim() != 1:
            raise InvalidParameter(f"indices is a tensor of shape {list(indices.shape)}, expected a list or a tensor of rank 1")
        if indices.is_meta or indices.layout != torch.strided:
            raise InvalidParameter(f"indices is {describe(indices)} on {indices.device}, expected a list or a dense tensor")
        indices = indices.tolist()
    if isinstance(indices, str | bytes) or not hasattr(indices, "__iter__"):
        raise InvalidParameter(f"indices is {describe(indices)}, expected a list of integers, such as select([0, 2])")
    rows = []
    for index in indices:
        if isinstance(index, bool | type) or not isinstance(index, SupportsIndex):
            raise InvalidParameter(f"indices contains {describe(index)}, expected integers, such as select([0, 2])")
        rows.append(as_integer(index, "a sequence index"))
    if not rows:
        raise InvalidParameter("indices is empty: pass at least one sequence index")
    return tuple(rows)


def check_rows(rows: Iterable[int], batch: int) -> None:
    """Raise OutOfBounds unless all ``rows`` are valid indices in a batch of ``batch`` sequences."""
    for row in rows:
        if not 0 <= row < batch:
            raise OutOfBounds(f"sequence {row} was requested from a batch of {batch} sequences, expected an index from 0 to {batch - 1}")
