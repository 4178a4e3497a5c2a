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

from . import loaders, plan, shared_table, split

if TYPE_CHECKING:
    from kvpack.cache import Layer
    from kvpack.formats.base import Codec

MOST_ROWS = 16
"""Query rows of one program: the rows of a block are the short side of the matrix products."""

MOST_ROW_BLOCKS = 8
"""Above it a layer is decoded once and attended by torch: each block of rows would decode it again."""

MERGE_COLUMNS = 16
MERGE_PARTS = 256
LOG2_E = math.log2(math.e)
EVERYTHING = 1 << 30
"""A window, or a look ahead, beyond any token."""


def supports(q: torch.Tensor, layer: Layer) -> bool:
    """Whether these kernels take the layer: every run has a tile loader, and a KV head's query rows are few."""
    k, v = layer.k, layer.v
    assert k is not None
    assert v is not None
    if not q.device == k.device == v.device or q.shape[1] // k.heads * q.shape[2] > MOST_ROWS * MOST_ROW_BLOCKS:
        return False
    return all(loaders.tiles_of(run.codec) is not None for side in (k, v) for run in plan.runs(side))


@dataclass(frozen=True, eq=False)
class Call:
    """One call of ``attend``: its launches and buffers, and the query as each codec of the keys takes it."""

    queries: dict[Codec, tuple[torch.Tensor, torch.Tensor]]
    launches: list[plan.Launch]
    shape: tuple[int, int, int]
    rows: int
    block: int
    position: int
    q_len: int
    causal: bool
    softcap: float | None
    sliding_window: int | None


def attend(q: torch.Tensor, layer: Layer, scale: float, causal: bool, softcap: float | None, sliding_window: int | None) -> torch.Tensor:
    """softmax(scale q k^T) v over a layer that ``supports`` takes: ``kvpack.attend`` on checked input, with its arguments.

    Tiles are binary16 (raw ones have their own dtype) and sums binary32: the result is within 2e-3 of the exact one in the
    2-norm, as long as no decoded value is above 65504.
    """
    call = prepare(q, layer, scale, causal, softcap, sliding_window)
    out = None
    for codec, merged in attended(call).items():
        original = codec.rotation.inverse(merged)
        out = original if out is None else out + original
    assert out is not None
    return out.reshape(*q.shape[:3], -1).to(q.dtype)


def prepare(q: torch.Tensor, layer: Layer, scale: float, causal: bool, softcap: float | None, sliding_window: int | None) -> Call:
    """What ``attend`` does before its kernels: which run over what, and the rotated query."""
    k, v = layer.k, layer.v
    assert k is not None
    assert v is not None
    batch, q_heads, q_len, _ = q.shape
    rows = q_heads // k.heads * q_len
    block = min(MOST_ROWS, max(8, next_power_of_two(rows)))
    blocks = -(-rows // block)
    position = k.tokens - q_len
    begin = max(0, position - sliding_window + 1) if sliding_window else 0
    end = position + q_len if causal else k.tokens
    whole = max(0, k.tokens - sliding_window) if sliding_window else 0, position + 1 if causal else k.tokens
    launches = plan.launches(k, v, layer, begin, end, whole, blocks)
    grouped = q.reshape(batch, k.heads, rows, k.dim).to(torch.float32)
    per_score = scale / softcap if softcap else scale * LOG2_E
    queries = {codec: _query(grouped, codec, blocks * block, per_score) for codec in {launch.k for launch in launches}}
    return Call(queries, launches, (batch, k.heads, v.dim), rows, block, position, q_len, causal, softcap, sliding_window)


def attended(call: Call) -> dict[Codec, torch.Tensor]:
    """Run the kernels: the sums of values over all weights, float32 ``[batch, kv_head, row, dim]``, for each codec in its frame."""
    batch, heads, dim = call.shape
    device = call.launches[0].work.device
    sequences, blocks = batch * heads, -(-call.rows // call.block)
    padded = blocks * call.block
    parts = sum(launch.parts for launch in call.launches)
    columns = max(sum(launch.constants["V_WIDTHS"]) for launch in call.launches)
    sums = torch.empty(sequences * padded * parts * columns, dtype=torch.float32, device=device)
    largest, total = torch.empty(2, sequences * padded * parts, dtype=torch.float32, device=device)
    spans: dict[Codec, tuple[int, int]] = {}
    stop = 0
    for launch in call.launches:
        items = launch.work.shape[0]
        start, stop = stop, stop + launch.parts
        arguments = (
            sums, largest, total, *call.queries[launch.k], launch.work, plan.numbers(str(device)), *launch.tables,
            (call.softcap or 1.0) * LOG2_E, items, heads, blocks, start, parts, call.position, call.q_len,
            0 if call.causal else EVERYTHING, call.sliding_window or EVERYTHING,
        )  # fmt: skip
        constants = {**launch.constants, "SOFTCAP": call.softcap is not None, "ROWS": call.block, "COLUMNS": columns}
        options = {"num_warps": launch.shape.warps, "maxnreg": launch.shape.registers or None}
        grid = (items * blocks * sequences,)
        if launch.constants["TABLES"][0] and (variant := (call.softcap is not None, call.block, columns)) not in launch.allowed:
            shared_table.allow(split.attend_split.warmup(*arguments, grid=grid, **constants, **options))
            launch.allowed.add(variant)
        split.attend_split[grid](*arguments, **constants, **options)
        spans[launch.v] = (spans.get(launch.v, (start,))[0], stop)
    merged = {}
    for codec, (start, stop) in spans.items():
        merged[codec] = torch.empty(batch, heads, call.rows, dim, dtype=torch.float32, device=device)
        channels = _channels(codec, str(device))
        split.merge[(sequences * call.rows, channels.numel() // MERGE_COLUMNS)](
            merged[codec], sums, largest, total, channels, parts, start, stop, call.rows, padded,
            COLUMNS=columns, DIM=dim, BLOCK_PARTS=min(MERGE_PARTS, next_power_of_two(parts)), BLOCK_COLUMNS=MERGE_COLUMNS,
        )  # fmt: skip
    return merged


def _query(q: torch.Tensor, codec: Codec, padded: int, per_score: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The query in ``codec``'s frame and column order, ``[batch, head, column, padded]``, at most 1; and the scores' factors."""
    u = codec.rotation.forward(q)
    size = u.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    rows = torch.nn.functional.pad(u / size, (0, 1, 0, padded - q.shape[2]))
    scales = torch.nn.functional.pad(size[..., 0] * per_score, (0, padded - q.shape[2]))
    return rows.index_select(-1, _channel_of_column(codec, str(q.device))).transpose(-1, -2).contiguous(), scales


@lru_cache(maxsize=256)
def _channel_of_column(codec: Codec, device: str) -> torch.Tensor:
    """The channel of each column; columns without one have the channel after the last, which is zero."""
    channels = [channel if channel >= 0 else codec.dim for part in plan.loader(codec).channels for channel in part]
    return torch.tensor(channels, device=device)


@lru_cache(maxsize=256)
def _channels(codec: Codec, device: str) -> torch.Tensor:
    """The channel of each column, int32, up to whole blocks of the merge; columns without one have the channel after the last."""
    channels = _channel_of_column(codec, device).to(torch.int32)
    return torch.nn.functional.pad(channels, (0, -channels.numel() % MERGE_COLUMNS), value=codec.dim)
