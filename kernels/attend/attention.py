"""attend on the GPU: split-K flash decoding over packed rows, then the merge of its partial results.

Sources: FlashAttention's running softmax; flash decoding's split of the tokens with a log-sum-exp merge; OCTOPUS Eq. 13 for
queries and values in the coded frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.qjl import Qjl
from kvpack.formats.side_cars import WithSideCars
from kvpack.kernels.tables import device_tables, shared_table

from . import merge, plan, rotation, segments, split

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

    from .layers import Layer
    from .segments import Frame

FEWEST_ROWS, MOST_ROWS = 8, 16
"""Query rows of one program: the rows of a block are the short side of the matrix products."""

MOST_DUAL_ROWS = 8
"""Up to which two tokens may share a row of a tile: each has query rows of its own."""

MOST_ROW_BLOCKS = 8
"""Above it a layer is decoded once and attended by torch: each block of rows would decode it again."""

MERGE_PARTS, MERGE_COLUMNS = 512, 32
"""Parts of one program of the merge at most, and its columns."""

FEW_PARTS = 32
"""Up to which one warp merges them: its lanes then have columns of their own, 4 each."""

LOG2_E = math.log2(math.e)
EVERYTHING = 1 << 30
"""A window, or a look ahead, beyond any token."""


def supports(q: torch.Tensor, layer: Layer) -> bool:
    """Whether these kernels take the layer: every segment has a tile loader, and a KV head's query rows are few."""
    k, v = layer.k, layer.v
    assert k is not None
    assert v is not None
    if not q.device == k.device == v.device or q.shape[1] // k.heads * q.shape[2] > MOST_ROWS * MOST_ROW_BLOCKS:
        return False
    return segments.of_side(k).supported and segments.of_side(v).supported


@dataclass(frozen=True, eq=False)
class Call:
    """One call of ``attend``: its launches and buffers, and the query in each frame of the keys.

    ``sink_logits`` are base-2 logarithms, float32 ``[q_head]``; ``lengths`` int32 ``[batch]``; ``dependent``: its kernels overlap.
    """

    queries: dict[Frame, tuple[torch.Tensor, torch.Tensor]]
    launches: list[plan.Launch]
    shape: tuple[int, int]
    rows: int
    block: int
    position: int
    q_len: int
    causal: bool
    softcap: float | None
    sliding_window: int | None
    sink_logits: torch.Tensor | None
    lengths: torch.Tensor | None
    dependent: bool
    dual: bool
    """Whether tiles may hold two tokens per row: query rows are few, and no side has outliers."""


def attend(
    q: torch.Tensor,
    layer: Layer,
    scale: float,
    causal: bool,
    softcap: float | None,
    sliding_window: int | None,
    sink_logits: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T) v over a layer that ``supports`` takes: ``kvpack.attend`` on checked input, with its arguments.

    Tiles are binary16 (raw ones have their own dtype) and sums binary32: the result is within 2e-3 of the exact one in the
    2-norm, as long as no decoded value is above 65504. A call over a layer whose launches are planned does not wait for the device
    and reads nothing from it, so that a CUDA graph holds it.
    """
    call = prepare(q, layer, scale, causal, softcap, sliding_window, sink_logits, lengths)
    return finish(call, attended(call), q.dtype).reshape(*q.shape[:3], -1)


def prepare(
    q: torch.Tensor,
    layer: Layer,
    scale: float,
    causal: bool,
    softcap: float | None,
    sliding_window: int | None,
    sink_logits: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> Call:
    """What ``attend`` does before its kernels: which run over what, and the rotated query."""
    k, v = layer.k, layer.v
    assert k is not None
    assert v is not None
    batch, q_heads, q_len, _ = q.shape
    rows = q_heads // k.heads * q_len
    block = min(MOST_ROWS, max(FEWEST_ROWS, next_power_of_two(rows)))
    blocks = -(-rows // block)
    position = k.tokens - q_len
    begin, end = 0, position + q_len if causal else k.tokens
    whole = 0, position + 1 if causal else k.tokens
    if sliding_window and lengths is None:
        begin, whole = max(0, position - sliding_window + 1), (max(0, k.tokens - sliding_window), whole[1])
    elif sliding_window:
        # Each sequence has a window of its own: its tokens are masked.
        whole = end, end
    dual = rows <= MOST_DUAL_ROWS and not (segments.of_side(k).outliers or segments.of_side(v).outliers)
    launches = plan.launches(k, v, layer, begin, end, whole, blocks, dual)
    # Before the query's kernels: what begins as those end may read it.
    if sink_logits is not None:
        sink_logits = sink_logits.to(q.device, torch.float32) * LOG2_E
    if lengths is not None:
        lengths = lengths.to(q.device, torch.int32)
    grouped = q.reshape(batch, k.heads, rows, k.dim)
    per_score = scale / softcap if softcap else scale * LOG2_E
    dependent = plan.overlaps(q.device)
    queries = {
        frame: rotation.queries(_inner(grouped, frame), frame.codec, plan.columns(frame.codec, dual), block, per_score, dependent)
        for frame in {launch.k: None for launch in launches}
    }
    shape = batch, k.heads
    return Call(
        queries, launches, shape, rows, block, position, q_len, causal, softcap, sliding_window, sink_logits, lengths, dependent, dual
    )


def _inner(q: torch.Tensor, frame: Frame) -> torch.Tensor:
    """The query as the codec alone takes it: with the channel scales of the frame's page, in its order."""
    if frame.page is None:
        return q
    assert isinstance(frame.page.codec, WithSideCars)
    return frame.page.codec.inner_query(q.to(torch.float32), frame.page.streams)


def finish(call: Call, sums: dict[Frame, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sums of ``attended`` together, ``[batch, kv_head, row, dim]`` in the original frame."""
    out = None
    for number, (frame, merged) in enumerate(sums.items(), 1):
        last = number == len(sums)
        if frame.page is not None:
            original = frame.page.original(_with_signs(merged, frame.codec))
            out = original if out is None else out + original
        elif frame.codec.rotation.kind == "none" and len(sums) == 1 and merged.shape[3] == frame.codec.dim:
            out = merged
        else:
            out = rotation.originals(merged, frame.codec, out, dtype if last else torch.float32, call.dependent)
    assert out is not None
    return out.to(dtype)


def _with_signs(sums: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Sums in ``codec``'s frame together with those of its signs, if it has any."""
    qjl = codec.side_car(Qjl)
    return sums if qjl is None else sums[..., : codec.dim] + qjl.rotation.inverse(sums[..., codec.dim :])


def attended(call: Call) -> dict[Frame, torch.Tensor]:
    """Run the kernels: the sums of values over all weights, float32 ``[batch, kv_head, row, frame dim]`` in each frame of values."""
    batch, heads = call.shape
    device = call.launches[0].work.device
    sequences, blocks = batch * heads, -(-call.rows // call.block)
    padded = blocks * call.block
    parts = sum(launch.parts for launch in call.launches)
    columns = max(sum(launch.constants["V"].widths) for launch in call.launches)
    sums = torch.empty(sequences * padded * parts * columns, dtype=torch.float32, device=device)
    largest, total = torch.empty(2, sequences * padded * parts, dtype=torch.float32, device=device)
    overlap = {"launch_pdl": True} if call.dependent else {}
    spans: dict[Frame, tuple[int, int]] = {}
    stop = 0
    for launch in call.launches:
        items = launch.work.shape[0]
        start, stop = stop, stop + launch.parts
        arguments = (
            sums, largest, total, *call.queries[launch.k], launch.work, device_tables.numbers(str(device)), *launch.tables,
            launch.work if call.lengths is None else call.lengths, (call.softcap or 1.0) * LOG2_E, items, heads, blocks, call.rows,
            start, parts, call.position, call.q_len, 0 if call.causal else EVERYTHING, call.sliding_window or EVERYTHING,
        )  # fmt: skip
        rows = 2 * max(FEWEST_ROWS // 2, next_power_of_two(call.rows)) if launch.dual else call.block
        constants = {
            **launch.constants, "SOFTCAP": call.softcap is not None, "ROWS": rows, "BLOCK": call.block, "COLUMNS": columns,
            "LENGTHS": call.lengths is not None, "DEPENDENT": call.dependent, "FIRST": start == 0,
        }  # fmt: skip
        options = {"num_warps": launch.shape.warps, **overlap}
        grid = (items * blocks * sequences,)
        variant = (call.softcap is not None, rows, columns, call.lengths is not None, call.dependent, start == 0)
        if (launch.constants["TABLES"].nbytes or launch.constants["PATCHES"]) and variant not in launch.allowed:
            shared_table.allow(split.attend_split.warmup(*arguments, grid=grid, **constants, **options), launch.constants["TABLES"].nbytes)
            launch.allowed.add(variant)
        split.attend_split[grid](*arguments, **constants, **options)
        spans[launch.v] = (spans.get(launch.v, (start,))[0], stop)
    merged = {}
    block_parts = min(MERGE_PARTS, next_power_of_two(parts))
    warps = 1 if block_parts <= FEW_PARTS else 4
    block_columns = 128 if block_parts <= FEW_PARTS else MERGE_COLUMNS
    for frame, (start, stop) in spans.items():
        frame_dim = plan.frame_dim(frame.codec)
        merged[frame] = torch.empty(batch, heads, call.rows, frame_dim, dtype=torch.float32, device=device)
        channels = _channels(frame.codec, call.dual, block_columns, str(device))
        merge.merge[(sequences * call.rows, channels.numel() // block_columns)](
            merged[frame], sums, largest, total, channels, total if call.sink_logits is None else call.sink_logits, parts, start, stop,
            call.rows, padded, heads, call.q_len, SINK_LOGITS=call.sink_logits is not None, COLUMNS=columns, DIM=frame_dim,
            BLOCK_PARTS=block_parts, BLOCK_COLUMNS=block_columns, DEPENDENT=call.dependent, num_warps=warps, **overlap,
        )  # fmt: skip
    return merged


@lru_cache(maxsize=256)
def _channels(codec: Codec, dual: bool, block: int, device: str) -> torch.Tensor:
    """The channel of each column, int32, up to whole ``block``s; columns without one have the channel after the last."""
    none = plan.frame_dim(codec)
    channels = torch.tensor([channel if channel >= 0 else none for channel in plan.columns(codec, dual)], dtype=torch.int32)
    return torch.nn.functional.pad(channels, (0, -channels.numel() % block), value=none).to(device)
