"""Attention over a growing layer: the launches stay the same, so that a CUDA graph may contain them, while their work is rewritten.

A layer's raw tail is a buffer with spare room; its length is read on the device. Its pages change only between steps, and their addresses
are in tables on the device, which such a change rewrites.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy
import torch

from kvpack.kernels.triton_internals import CachedLaunch, LaunchChain

from . import append, plan, segments
from .attention import MAX_DUAL_ROWS, supports
from .prepared import EVERYTHING, Options, Prepared, QueryShape

if TYPE_CHECKING:
    from kvpack.kernels.tiles.layers import Layer

    from .means import Means
    from .plan import Launch


ROOM_FOR_PAGES = 8
"""Rows of work that are added together if pages need more of them than the device runs programs."""


class GrowingCall:
    """An attention call for queries shaped like ``q`` over ``layer``, whose tails are whole buffers.

    ``layer`` must pass ``supports``. Each call passes the sequences' ``lengths``, int32 ``[batch]``, and, if the options say so,
    ``starts``, the first token that their queries see. The device computes the window of the options, if any, because it starts elsewhere
    in each call.
    """

    def __init__(self, q: torch.Tensor, layer: Layer, options: Options) -> None:
        assert layer.k is not None
        assert layer.v is not None
        batch, q_heads, q_len, dim = q.shape
        self._shape, self._options = QueryShape(batch, q_heads, q_len, dim, layer.k.heads), options._replace(lengths=True)
        self._dual = self._shape.rows <= MAX_DUAL_ROWS and not any(segments.of_side(side).outliers for side in (layer.k, layer.v))
        self._dtype, self._dim_v = q.dtype, layer.v.dim
        self._plan(self._planned(layer))

    @staticmethod
    def supports(q: torch.Tensor, layer: Layer) -> bool:
        """Return True if these kernels support the layer for queries like ``q``."""
        return GrowingCall.takes_layer(layer) and supports(q, layer)

    @staticmethod
    def takes_layer(layer: Layer) -> bool:
        """Return True if every segment has a loader, and no page maps its values by torch operations."""
        result = [segments.of_side(side) for side in (layer.k, layer.v) if side is not None]
        return all(own.supported and all(segment.frame.query_codec is not None for segment in own.segments) for own in result)

    def refresh(self, layer: Layer) -> bool:
        """Use the current pages of ``layer``; return True if launches changed, so that graphs must be captured again."""
        launches = self._planned(layer)
        same = len(launches) == len(self._launches) and all(
            new.constants == old.constants and new.k.matches(old.k) and new.v.matches(old.v) and _has_room(old, new)
            for new, old in zip(launches, self._launches, strict=True)
        )
        if not same:
            self._plan(launches)
            return True
        for new, old in zip(launches, self._launches, strict=True):
            old.work.copy_(_padded(new.work, old.work.shape[0]))
            if old.means is not None and new.means is not None:
                old.means.table.copy_(new.means.padded(old.means.table.shape[0]).table)
        self._held = [launch.held for launch in launches]
        return False

    def __call__(
        self, q: torch.Tensor, lengths: torch.Tensor, sink_logits: torch.Tensor | None = None, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend with ``q`` ``[batch, q_head, q_len, dim]``, the last tokens of each sequence."""
        return self._prepared(q, sink_logits, lengths, starts)

    def _planned(self, layer: Layer) -> list[Launch]:
        k, v = layer.k, layer.v
        assert k is not None
        assert v is not None
        whole = 0, k.tokens
        return plan.planned(k, v, 0, k.tokens, whole, self._shape.padded // self._shape.block, self._dual, growing=True)

    def _plan(self, launches: list[Launch]) -> None:
        device = launches[0].tables[0].device
        self._launches = [
            replace(launch, work=_padded(launch.work, _items(launch)).to(device), means=_with_room(launch.means, device))
            for launch in launches
        ]
        self._held = [launch.held for launch in launches]
        slides = self._options.sliding_window is not None
        masked = [launch.has_tail or slides for launch in launches]
        position = EVERYTHING - self._shape.q_len
        self._prepared = Prepared(
            self._launches, self._shape, self._dtype, self._options, position, self._dual, self._dim_v, masked, cut=slides
        )


def _items(launch: Launch) -> int:
    """Return the number of rows of the work table: constant for a tail alone, else as many pages as the device runs at once.

    If there are more pages, there is room for some that later tokens bring.
    """
    rows: int = launch.work.shape[0]
    if launch.tail_alone or rows <= launch.programs:
        return rows if launch.tail_alone else launch.programs
    return -(-rows // ROOM_FOR_PAGES) * ROOM_FOR_PAGES


def _with_room(means: Means | None, device: torch.device) -> Means | None:
    """Move ``means`` to the device with room for the means of later tokens."""
    if means is None:
        return None
    padded = means.padded(-(-means.table.shape[0] // ROOM_FOR_PAGES) * ROOM_FOR_PAGES)
    return padded._replace(table=padded.table.to(device))


def _has_room(old: Launch, new: Launch) -> bool:
    """Return True if the tables of a launch have room for those of its successor."""
    if old.means is None or new.means is None:
        return old.means is new.means and new.work.shape[0] <= old.work.shape[0]
    return new.work.shape[0] <= old.work.shape[0] and new.means.table.shape[0] <= old.means.table.shape[0]


def _padded(work: torch.Tensor, items: int) -> torch.Tensor:
    """Pad ``work`` to ``items`` rows; the added rows have no tokens."""
    given = work.numpy()
    rows = numpy.repeat(given[:1], items, 0)
    rows[:, 1:3] = 0
    rows[: len(given)] = given
    return torch.from_numpy(rows)


class Append:
    """The launch that appends ``tokens`` tokens to the raw tails of a layer."""

    def __init__(self, k_tail: torch.Tensor, v_tail: torch.Tensor, tokens: int) -> None:
        self._tails = k_tail, v_tail
        shapes = [torch.Size((*tail.shape[:2], tokens, tail.shape[3])) for tail in self._tails]
        self._given = [(shape, tail.dtype, tail.device) for shape, tail in zip(shapes, self._tails, strict=True)]
        dependent = plan.overlaps(k_tail.device)
        launch = CachedLaunch(
            append.append_tokens,
            (k_tail.shape[0], 1, 1),
            (tokens, k_tail.shape[2]),
            {"HEADS": k_tail.shape[1], "K_DIM": k_tail.shape[3], "V_DIM": v_tail.shape[3], "BLOCK": append.BLOCK, "DEPENDENT": dependent},
            {"num_warps": 4, **({"launch_pdl": True} if dependent else {})},
        )
        self._chain = LaunchChain([(launch, [(k_tail, 0), (v_tail, 0), *((number, 0) for number in range(5))])])

    def is_of(self, k_tail: torch.Tensor, v_tail: torch.Tensor) -> bool:
        """Return True if this call appends to these tails."""
        return self._tails[0] is k_tail and self._tails[1] is v_tail

    def supports(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Return True if the call supports these tokens, which have the dtype of the tails."""
        return [(k.shape, k.dtype, k.device), (v.shape, v.dtype, v.device)] == self._given

    def __call__(self, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, packed: torch.Tensor, not_finite: torch.Tensor) -> None:
        """Append ``k`` and ``v`` ``[batch, kv_head, token, dim]``; see ``append.append_tokens``."""
        self._chain((k.contiguous(), v.contiguous(), lengths, packed, not_finite))
