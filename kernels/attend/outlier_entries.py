"""Conversion of a page's outliers for tile loaders: sorted by sequence and head, minus the decoded values that they replace."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from kvpack.formats.outliers import CHUNK, Outliers
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.formats.streams import HALF_LIMIT
from kvpack.kernels.decode import decode
from kvpack.kernels.loaders.outlier_patches import GRANULE
from kvpack.kernels.loaders.outliers import BOUNDS, PLACES, POWER, VALUES, pack_entries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.kernels.tiles.layers import PackedRun

DECODED_VALUES = 1 << 22
"""Number of values decoded at a time."""

MAX_REPLACED_NORM = 2.0
"""Maximum norm of the decoded values that outliers replace, relative to the token's norm; subtracting more would lose precision."""

MIN_NORM = 2.0**-20
"""Minimum nonzero norm of a token, because the weights of outliers and of all other values share a power of two (see ``softmax``)."""

_entries: WeakKeyDictionary[PackedRun, dict[tuple[int, int], Mapping[str, torch.Tensor] | None]] = WeakKeyDictionary()


def page_entries(page: PackedRun, start: int, stop: int) -> Mapping[str, torch.Tensor] | None:
    """Return the outlier streams of tokens ``[start, stop)`` of a page, in the form that ``loaders.outliers`` reads.

    The stream of columns is not included. The streams are cached with the page; the mapping is empty if there are no outliers. Returns None
    if the entries would be inexact, which cannot happen for pages that kvpack encoded.
    """
    cached = _entries.setdefault(page, {})
    if (start, stop) not in cached:
        cached[start, stop] = _compute_entries(page, start, stop)
    return cached[start, stop]


def _compute_entries(page: PackedRun, start: int, stop: int) -> Mapping[str, torch.Tensor] | None:
    codec = page.codec
    assert isinstance(codec, CodecWithSidecars)
    sidecar = codec.sidecar(Outliers)
    assert sidecar is not None
    batch, heads = page.rows(start, start)[next(iter(codec.packings())) + ".0"].shape[:2]
    step = max(1, DECODED_VALUES // (batch * heads * codec.dim) // codec.group_tokens) * codec.group_tokens
    granules = -(-(stop - start) // GRANULE.value)
    result: list[tuple[torch.Tensor, ...]] = []
    for first in range(start, stop, step):
        rows = page.rows(first, min(first + step, stop))
        flags = sidecar.flags(rows)
        if not flags.any():
            continue
        decoded = decode.decode_frame(codec.codec, rows)
        complete = sidecar.put(decoded, rows)
        norms = torch.linalg.vector_norm(complete, dim=-1)
        chunks = decoded.reshape(*flags.shape, CHUNK)
        inexact = (chunks.norm(dim=-1) > MAX_REPLACED_NORM * norms[..., None]) & flags
        values = (complete.reshape(chunks.shape) - chunks)[flags]
        if inexact.any() or ((norms > 0) & (norms < MIN_NORM)).any() or not (values.abs() < HALF_LIMIT).all():
            return None
        sequence, token, chunk = flags.flatten(0, 1).nonzero().T
        token += first - start
        result.append((sequence * granules + token // GRANULE.value, token, chunk, values))
    if not result:
        return {}
    granule, token, chunk, values = (torch.cat(parts) for parts in zip(*result, strict=True))
    granule, order = granule.sort(stable=True)
    places, halves, power = pack_entries(token[order], chunk[order], values[order])
    edges = torch.arange(batch * heads, device=granule.device)[:, None] * granules + torch.arange(granules + 1, device=granule.device)
    return {
        BOUNDS: torch.searchsorted(granule, edges).to(torch.int32).reshape(batch, heads, -1),
        PLACES: places[None, None],
        VALUES: halves[None, None],
        POWER: power.reshape(1, 1, 1),
    }
