"""Decoding of the transform codec (spec/codecs/transform.md). Symbols become column factors, which are multiplied by the frames.

Symbols and factors equal those of ``formats/transform.py`` bit for bit. If float16 can represent the frames and table values, as it can for
calibrated frames, float16 products are exact. Otherwise, products use three TF32 parts of 11 bits. Neither kind of product depends on
PyTorch's precision settings.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy
import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.rans import LANES, MIN_STATE, DecodedChunks
from kvpack.kernels.bitpack.columns import check_shape

from .transform_chunks import allocate_factors, channels_per_tile, decode_symbols, frames_on_device, gather_chunks, join_halves

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpack.formats.transform import Transform

    from .rows import EnginePages, PackedPart

MAX_FACTOR_BYTES = 1 << 27
"""Maximum number of bytes of factors in memory, unless a single token group of all heads needs more."""

MAX_TOKENS, COLUMNS = 64, 64
"""Maximum number of tokens of a program of ``_multiply_factors``, and number of columns per matrix product."""

WARPS, STAGES = 4, 3


def decode_into(codec: Transform, packed: Sequence[PackedPart], out: torch.Tensor, rotated: bool, pages: EnginePages | None = None) -> bool:
    """Decode ``packed`` into ``out`` ``[batch, kv_head, token, dim]`` with contiguous channels. Streams may have arbitrary strides.

    ``rotated`` is ignored, because the codec has no rotation. Invalid words decode to arbitrary values. Returns False if ``pages`` is
    given, or if the frequencies of a table have a wrong sum. Raises MissingBasis if there is no basis, and InvalidParameter if a stream
    does not match ``codec.layout`` or the basis has a different number of heads.
    """
    if pages is not None:
        return False
    batch, heads = out.shape[:2]
    source = codec.source_for(heads)
    if (tables := frames_on_device(codec, source, heads, out.device)) is None:
        return False
    packed = [part for part in packed if part.tokens]
    if not packed or not out.numel():
        return True
    for part in packed:
        for name, layout in codec.layout(batch, heads, part.tokens).items():
            if name != "words":
                check_shape(name, part.streams[name], layout.shape)
    groups = torch.from_numpy(_token_groups(codec.chunk, packed)).to(out.device, non_blocking=True)
    chunks = gather_chunks(codec, [part.streams for part in packed])
    shift_cos, shift_sin = tables.cos, tables.sin
    pairs = tables.frequencies.numel()
    if pairs:
        positions = torch.cat([join_halves(part.streams["positions"])[:, 0].T.reshape(-1) for part in packed])
        # Angles at large positions need binary64.
        angles = positions.to(torch.float64)[:, None] * tables.frequencies
        shift_cos, shift_sin = angles.cos().to(torch.float32), angles.sin().to(torch.float32)
    tokens, channels = min(MAX_TOKENS, codec.chunk), channels_per_tile(codec.dim)
    group_values = codec.dim * codec.chunk * batch * heads
    groups_per_part = max(1, MAX_FACTOR_BYTES // (tables.values.element_size() * group_values))
    factors = allocate_factors(chunks, tables, min(groups_per_part, len(groups)) * group_values)
    with torch.cuda.device(out.device) if out.device.type == "cuda" else nullcontext():
        for first in range(0, len(groups), groups_per_part):
            count = min(groups_per_part, len(groups) - first)
            decode_symbols(codec, chunks, tables, first * batch * heads, count * batch * heads, heads, factors, None)
            tiles = triton.cdiv(codec.dim, channels)
            _multiply_factors[count * batch * (codec.chunk // tokens) * heads, tiles](
                out, *out.stride()[:3], *factors, chunks.begins, groups, chunks.used, tables.means, tables.rows, shift_cos,
                shift_sin, tables.cos, tables.sin, codec.step_size, first, batch, HEADS=heads, DIM=codec.dim, CHUNK=codec.chunk,
                TOKENS=tokens, CHANNELS=channels, TILES=tiles, COLUMNS=COLUMNS, ROTATED_PAIRS=pairs,
                HALVES=pairs > 0 and source.rope is not None and source.rope.pairing == "halves", PER_LAYER=codec.scope == "layer",
                PADDED_HEADS=next_power_of_two(heads), PRECISION=None if tables.rows.dtype == torch.float16 else "tf32x3", num_warps=WARPS,
                num_stages=STAGES,
            )  # fmt: skip
    return True


def check_chunks(codec: Transform, streams: Mapping[str, torch.Tensor], where: str) -> None:
    """Check all chunks on the device of ``streams``, as ``Transform.check_chunks`` does.

    Raises InvalidPayload for the first invalid one.
    """
    batch, heads, rows = streams["columns"].shape
    device = streams["columns"].device
    if codec.source is None or not rows:
        return
    if (tables := frames_on_device(codec, codec.source_for(heads), heads, device)) is None:
        codec.check_chunks({name: stream.cpu().numpy() for name, stream in streams.items()}, where)
        return
    chunks = gather_chunks(codec, [streams])
    read = torch.empty(rows * batch * heads, dtype=torch.int32, device=device)
    states = torch.empty(rows * batch * heads, LANES, dtype=torch.int32, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        decode_symbols(codec, chunks, tables, 0, rows * batch * heads, heads, None, (read, states))
    if ((read != chunks.counts) | (states != MIN_STATE).any(1)).any():
        decoded = DecodedChunks(numpy.empty((len(read), 0), numpy.uint8), read.cpu().numpy(), states.cpu().numpy().view(numpy.uint32))
        codec.check_ends(decoded, chunks.counts.cpu().numpy(), (batch, heads), where)


def _token_groups(chunk: int, packed: Sequence[PackedPart]) -> numpy.ndarray:
    """Return the first output token and the number of tokens of each token group, int64 ``[token group, 2]``."""
    result = []
    for part in packed:
        starts = numpy.arange(0, part.tokens, chunk, dtype=numpy.int64)
        result.append(numpy.stack([part.first + starts, numpy.minimum(part.tokens - starts, chunk)], 1))
    return numpy.concatenate(result)


@triton.jit(do_not_specialize=["first", "batch", "size"])
def _multiply_factors(
    out: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    factors: tl.tensor,
    escape_indices: tl.tensor,
    levels: tl.tensor,
    escape_counts: tl.tensor,
    begins: tl.tensor,
    groups: tl.tensor,
    used: tl.tensor,
    means: tl.tensor,
    rows: tl.tensor,
    shift_cos: tl.tensor,
    shift_sin: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    size: tl.tensor,
    first: tl.tensor,
    batch: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTATED_PAIRS: tl.constexpr,
    HALVES: tl.constexpr,
    PER_LAYER: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Decode ``TOKENS`` tokens of one head of a token group: multiply factors by frame rows, add the means, and apply RoPE.

    ``factors``, ``escape_indices``, ``levels`` and ``escape_counts`` are the fields of ``Factors``, in steps of ``size``, beginning with
    token group ``first``. ``used``, int32 ``[chunk]``, is the number of columns in a product. ``means`` and ``rows`` are fields of
    ``DeviceFrames``, with ``TILES`` tiles of ``CHANNELS`` channels per head. RoPE rotates the first ``ROTATED_PAIRS`` channel pairs.
    """
    tiles = CHUNK // TOKENS
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS % tiles
    part_index = tl.program_id(0) // HEADS // tiles
    sequence = part_index % batch
    group = first + part_index // batch
    group_index = group * batch + sequence
    group_first = tl.load(groups + 2 * group)
    wanted = tl.load(groups + 2 * group + 1).to(tl.int32)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    chunk = group_index * HEADS + head
    local = part_index.to(tl.int64) * HEADS
    count = tl.where(tile * TOKENS < wanted, tl.load(used + chunk), 0)
    PADDED: tl.constexpr = TILES * CHANNELS
    WIDTH: tl.constexpr = PADDED * (HEADS if PER_LAYER else 1)
    if PER_LAYER:
        means += head * PADDED
        rows += head * PADDED
        factors += local * (DIM * CHUNK)
        count *= HEADS
    else:
        means += head * PADDED
        rows += head.to(tl.int64) * (DIM * PADDED)
        factors += (local + head) * (DIM * CHUNK)
    values = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for start in range(0, count, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = (column < count)[:, None]
        factor = tl.load(factors + (column[:, None] * CHUNK + token[None, :]), there, 0.0)
        row = tl.load(rows + (column.to(tl.int64)[:, None] * WIDTH + channel[None, :]), there, 0.0)
        # Matrix instructions truncate their sums, and over all columns that error would exceed the spec's limit; sums here are rounded.
        values += tl.dot(tl.trans(factor), row, input_precision=PRECISION) * size
    every_head = tl.arange(0, PADDED_HEADS)
    if tl.sum(tl.load(escape_counts + group_index * HEADS + every_head, every_head < HEADS, 0), 0) > 0:
        for other_head in range(0 if PER_LAYER else head, HEADS if PER_LAYER else head + 1):
            listed = (tl.load(begins + group_index * HEADS + other_head) + 1) // 2
            for number in range(tl.load(escape_counts + group_index * HEADS + other_head)):
                place = tl.load(escape_indices + listed + number)
                level = tl.load(levels + listed + number).to(tl.float32) * size
                row = tl.load(rows + ((place // CHUNK).to(tl.int64) * WIDTH + channel)).to(tl.float32)
                values += tl.where(token == place % CHUNK, level, 0.0)[:, None] * row[None, :]
    values += tl.load(means + channel)[None, :]
    ones, others = tl.split(tl.reshape(values, [TOKENS, CHANNELS // 2, 2]))
    pair = tl.program_id(1) * (CHANNELS // 2) + tl.arange(0, CHANNELS // 2)
    if ROTATED_PAIRS:
        turned = pair < ROTATED_PAIRS
        group_cos = tl.load(shift_cos + group_index * ROTATED_PAIRS + pair, turned, 1.0)[None, :]
        group_sin = tl.load(shift_sin + group_index * ROTATED_PAIRS + pair, turned, 0.0)[None, :]
        place = token[:, None] * ROTATED_PAIRS + pair[None, :]
        token_cos = tl.load(cos + place, turned[None, :], 1.0)
        token_sin = tl.load(sin + place, turned[None, :], 0.0)
        cosine = token_cos * group_cos - token_sin * group_sin
        sine = token_sin * group_cos + token_cos * group_sin
        turned_ones = ones * cosine - others * sine
        others = others * cosine + ones * sine
        ones = turned_ones
    target = out + sequence.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride + group_first * token_stride
    place = target + token[:, None] * token_stride
    stored = (token < wanted)[:, None]
    if HALVES:
        one = pair
        other = pair + ROTATED_PAIRS
        if 2 * ROTATED_PAIRS < DIM:
            # Channels that are not rotated are paired with their neighbors.
            one = tl.where(pair < ROTATED_PAIRS, pair, 2 * pair)
            other = tl.where(pair < ROTATED_PAIRS, other, 2 * pair + 1)
        tl.store(place + one[None, :], ones.to(out.dtype.element_ty), stored & (2 * pair < DIM)[None, :])
        tl.store(place + other[None, :], others.to(out.dtype.element_ty), stored & (2 * pair + 1 < DIM)[None, :])
    else:
        values = tl.reshape(tl.join(ones, others), [TOKENS, CHANNELS])
        tl.store(place + channel[None, :], values.to(out.dtype.element_ty), stored & (channel < DIM)[None, :])
