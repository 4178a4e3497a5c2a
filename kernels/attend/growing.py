"""Attention over a growing layer. Its launches never change, so CUDA graphs can capture them; only work tables are updated."""

# Triton is untyped.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy
import torch
import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvpack.kernels.gpu import gpu
from kvpack.kernels.tiles.layers import Layer, keys_and_values
from kvpack.kernels.triton_internals import CachedLaunch, LaunchChain

from . import plan, segments
from .attention import choose_loaders, supports
from .prepared import UNLIMITED, AttendOptions, PreparedCall, QueryShape, supports_scalar_kernel

if TYPE_CHECKING:
    from .plan import Launch

BLOCK = 1024
"""Number of values copied per iteration of a program."""


@triton.jit
def append_tokens(
    k_tail: tl.tensor,
    v_tail: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    lengths: tl.tensor,
    packed: tl.tensor,
    not_finite: tl.tensor,
    tokens: tl.tensor,
    capacity: tl.tensor,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Append ``tokens`` new tokens to the raw tails of a layer. Each program appends the tokens of one sequence.

    ``k`` and ``v`` are ``[batch, HEADS, tokens, dim]``, and the tails are ``[batch, HEADS, capacity, dim]``. ``lengths``, int32
    ``[batch]``, counts the tokens of each sequence, and the kernel adds ``tokens`` to it. ``packed``, int32 ``[1]``, is the number of
    tokens in packed pages. Tokens past the end of a tail are counted but not written. ``not_finite``, int32 ``[1]``, is set to 1 if a value
    is not finite.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + sequence)
    position = length - tl.load(packed)
    _append_side(k_tail, k, sequence, position, not_finite, tokens, capacity, HEADS, K_DIM, BLOCK)
    _append_side(v_tail, v, sequence, position, not_finite, tokens, capacity, HEADS, V_DIM, BLOCK)
    # The length must not change before every warp has read it.
    tl.debug_barrier()
    tl.store(lengths + sequence, length + tokens)


@triton.jit
def _append_side(
    tail: tl.tensor,
    x: tl.tensor,
    sequence: tl.tensor,
    position: tl.tensor,
    not_finite: tl.tensor,
    tokens: tl.tensor,
    capacity: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    for begin in range(0, HEADS * tokens * DIM, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        valid = index < HEADS * tokens * DIM
        value = tl.load(x + sequence * HEADS * tokens * DIM + index, valid, 0.0)
        row = index // DIM
        token = position + row % tokens
        valid = valid & (token >= 0) & (token < capacity)
        tl.store(tail + ((sequence * HEADS + row // tokens) * capacity + token) * DIM + index % DIM, value, valid)
        has_nonfinite = tl.sum((tl.abs(value.to(tl.float32)) < float("inf")).to(tl.int32), 0) < BLOCK
        tl.store(not_finite, 1, has_nonfinite)


CAPACITY_STEP = 8
"""Number of rows by which the capacity of work tables grows, so that most new pages do not change the launches."""


class GrowingCall:
    """A prepared attention call over a growing ``layer`` for queries shaped like ``q``. The layer's raw tails include spare capacity.

    ``supports`` must return True for ``layer``. Every call needs the sequence lengths, int32 ``[batch]``. With ``options.starts``, a call
    also needs the first visible token of each sequence. Sliding windows are computed on the device, because they move with every call.
    """

    def __init__(self, q: torch.Tensor, layer: Layer, options: AttendOptions) -> None:
        k, v = keys_and_values(layer)
        batch, q_heads, q_len, dim = q.shape
        self._shape, self._options = QueryShape(batch, q_heads, q_len, dim, k.heads), options._replace(lengths=True)
        self._dual = choose_loaders(self._shape.rows, k, v)
        self._dtype, self._dim_v = q.dtype, v.dim
        self._prepare(self._plan_launches(layer))

    @staticmethod
    def supports(q: torch.Tensor, layer: Layer) -> bool:
        return GrowingCall.supports_layer(layer) and supports(q, layer)

    @staticmethod
    def supports_layer(layer: Layer) -> bool:
        """Return True if every segment has a tile loader and kernels apply all value maps."""
        sides = [segments.side_segments(side) for side in (layer.k, layer.v) if side is not None]
        return all(side.supported and all(segment.frame.query_codec is not None for segment in side.segments) for side in sides)

    def refresh(self, layer: Layer) -> bool:
        """Switch to the current pages of ``layer``. Returns True if the launches changed; CUDA graphs must then be captured again."""
        launches = self._plan_launches(layer)
        same = len(launches) == len(self._launches) and all(
            new.constants == old.constants
            and new.kernel is old.kernel
            and new.k.matches(old.k)
            and new.v.matches(old.v)
            and _has_room(old, new)
            for new, old in zip(launches, self._launches, strict=True)
        )
        if not same:
            self._prepare(launches)
            return True
        for new, old in zip(launches, self._launches, strict=True):
            old.work.copy_(_pad_work(new.work, old.work.shape[0]))
        self._keep_alive = [launch.keep_alive for launch in launches]
        return False

    def __call__(
        self, q: torch.Tensor, lengths: torch.Tensor, sink_logits: torch.Tensor | None = None, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention output for ``q`` ``[batch, q_head, q_len, dim]``. The queries belong to the last tokens of each sequence."""
        return self._prepared(q, sink_logits, lengths, starts)

    def _plan_launches(self, layer: Layer) -> list[Launch]:
        k, v = keys_and_values(layer)
        whole = 0, k.tokens
        same_tokens = supports_scalar_kernel(self._shape, self._options)
        row_blocks = self._shape.padded // self._shape.block
        return plan.plan_launches(k, v, 0, k.tokens, whole, row_blocks, self._dual, same_tokens, growing=True)

    def _prepare(self, launches: list[Launch]) -> None:
        device = launches[0].tables[0].device
        self._launches = [replace(launch, work=_pad_work(launch.work, _work_capacity(launch)).to(device)) for launch in launches]
        self._keep_alive = [launch.keep_alive for launch in launches]
        has_window = self._options.sliding_window is not None
        masked = [launch.has_tail or has_window for launch in launches]
        position = UNLIMITED - self._shape.q_len
        self._prepared = PreparedCall(
            self._launches, self._shape, self._dtype, self._options, position, self._dual, self._dim_v, masked, cut=has_window
        )


def _work_capacity(launch: Launch) -> int:
    """Return the number of rows to allocate for the work table of ``launch``.

    A launch over only the raw tail needs no spare rows. Any other launch gets at least one row per concurrent program. A longer table is
    rounded up to a multiple of ``CAPACITY_STEP`` rows.
    """
    rows: int = launch.work.shape[0]
    if launch.tail_only or rows <= launch.programs:
        return rows if launch.tail_only else launch.programs
    return -(-rows // CAPACITY_STEP) * CAPACITY_STEP


def _has_room(old: Launch, new: Launch) -> bool:
    return new.work.shape[0] <= old.work.shape[0]


def _pad_work(work: torch.Tensor, items: int) -> torch.Tensor:
    """Pad ``work`` to ``items`` rows; the added rows have no tokens."""
    old_rows = work.numpy()
    rows = numpy.repeat(old_rows[:1], items, 0)
    rows[:, 1:3] = 0
    rows[: len(old_rows)] = old_rows
    return torch.from_numpy(rows)


class AppendCall:
    """A prepared launch that appends ``tokens`` tokens to a layer's raw tails."""

    def __init__(self, k_tail: torch.Tensor, v_tail: torch.Tensor, tokens: int) -> None:
        self._tails = k_tail, v_tail
        shapes = [torch.Size((*tail.shape[:2], tokens, tail.shape[3])) for tail in self._tails]
        self._expected = [(shape, tail.dtype, tail.device) for shape, tail in zip(shapes, self._tails, strict=True)]
        dependent = gpu(k_tail.device).overlaps_launches
        launch = CachedLaunch(
            append_tokens,
            (k_tail.shape[0], 1, 1),
            (tokens, k_tail.shape[2]),
            {"HEADS": k_tail.shape[1], "K_DIM": k_tail.shape[3], "V_DIM": v_tail.shape[3], "BLOCK": BLOCK, "DEPENDENT": dependent},
            {"num_warps": 4, **({"launch_pdl": True} if dependent else {})},
        )
        self._chain = LaunchChain([(launch, [(k_tail, 0), (v_tail, 0), *((index, 0) for index in range(5))])])

    def appends_to(self, k_tail: torch.Tensor, v_tail: torch.Tensor) -> bool:
        return self._tails[0] is k_tail and self._tails[1] is v_tail

    def supports(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        return [(k.shape, k.dtype, k.device), (v.shape, v.dtype, v.device)] == self._expected

    def __call__(self, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, packed: torch.Tensor, not_finite: torch.Tensor) -> None:
        """Append ``k`` and ``v`` ``[batch, kv_head, token, dim]`` to the tails (see ``append_tokens``)."""
        self._chain((k.contiguous(), v.contiguous(), lengths, packed, not_finite))
