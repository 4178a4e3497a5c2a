"""Row numbers of a batch, as given by callers."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsIndex

import torch

from kvpack.formats.arguments import as_integer, describe
from kvpack.formats.errors import InvalidParameter, OutOfBounds

if TYPE_CHECKING:
    from collections.abc import Iterable


def row_numbers(indices: torch.Tensor | Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Return ``indices`` as integers. Raises InvalidParameter unless they are a list or a rank-1 tensor with at least one integer."""
    if isinstance(indices, torch.Tensor):
        if indices.dim() != 1:
            raise InvalidParameter(f"rows is a tensor of shape {list(indices.shape)}, expected a list or a tensor of rank 1")
        if indices.is_meta or indices.layout != torch.strided:
            raise InvalidParameter(f"rows is {describe(indices)} on {indices.device}, expected a list or a dense tensor")
        indices = indices.tolist()
    if isinstance(indices, str | bytes) or not hasattr(indices, "__iter__"):
        raise InvalidParameter(f"rows is {describe(indices)}, expected a list of integers, such as select([0, 2])")
    rows = []
    for index in indices:
        if isinstance(index, bool | type) or not isinstance(index, SupportsIndex):
            raise InvalidParameter(f"rows contains {describe(index)}, expected integers, such as select([0, 2])")
        rows.append(as_integer(index, "a row of the batch"))
    if not rows:
        raise InvalidParameter("no rows were requested: pass at least one")
    return tuple(rows)


def check_rows(rows: Iterable[int], batch: int) -> None:
    """Raise OutOfBounds for a row that a batch of ``batch`` sequences does not have."""
    for row in rows:
        if not 0 <= row < batch:
            raise OutOfBounds(f"row {row} was requested from a batch of {batch}; its rows are 0 to {batch - 1}")
