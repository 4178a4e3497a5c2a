"""Unpack klt: tiles by the loader of attention, then the matrix of each head, a part of the tokens at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch

from kvpack.formats.klt import Klt
from kvpack.formats.products import product
from kvpack.kernels.attend import plan, rotation

from . import tiles
from .decode import FUSED_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.base import Codec

    from .rows import Packed

PART_BYTES = 64 << 20
"""Bytes of binary32 values at once."""


def takes(codec: Codec, out: torch.Tensor) -> TypeGuard[Klt]:
    """Whether ``unpack`` takes a codec and an output; rows that the cache holds are left to torch."""
    return isinstance(codec, Klt) and codec.rows == "basis" and out.dtype in FUSED_DTYPES and tiles.loader_of(codec) is not None


def unpack(codec: Klt, packed: Sequence[Packed], out: torch.Tensor) -> None:
    """Decode ``packed``, whose pages follow one another, into ``out`` ``[batch, kv_head, token, dim]``, in the original frame.

    Entries of tables are rounded to binary16, and sums to the output's dtype.
    """
    batch, heads, _, dim = out.shape
    work = tiles.work_of(codec, packed, batch, heads, out.device)
    if not work.blocks * batch * heads:
        return
    matrix = rotation.value_matrix(((codec, plan.columns(codec, False)),), 1, str(out.device))
    # The last row is the mean token.
    columns, mean = matrix[:, :-1], matrix[:, -1:]
    at_once = PART_BYTES // (4 * (columns.shape[1] + dim) * batch * heads)
    with torch.autocast(out.device.type, enabled=False):
        for blocks, start, stop in work.parts(at_once):
            values = torch.empty(batch, heads, stop - start, columns.shape[1], dtype=torch.float16, device=out.device)
            factors = torch.ones(batch, heads, stop - start, dtype=torch.float32, device=out.device)
            tiles.decode(codec, work, values, blocks, None if codec.gain == "none" else factors)
            out[:, :, start:stop] = product(values.to(torch.float32) * factors[..., None], columns) + mean
