"""Decoding of the transform codec's chunks to column factors on a device, and checks of their final states (spec/codecs/transform.md).

Factors and states are exactly those of ``formats/transform_chunks.py`` and ``formats/transform.py``.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy
import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.frames import Frames, Rope, SymbolTables, first_cos_sin
from kvpack.formats.rans import LANES, TOTAL, slot_table
from kvpack.formats.transform import Transform
from kvpack.kernels.bitpack import rans

_SLOTS = tl.constexpr(TOTAL)
_MAX_HALF = tl.constexpr(65504)
"""Largest integer that float16 can represent."""

MAX_CHANNELS = 128
"""Maximum number of channels in a tile of a matrix product."""


class DeviceFrames(NamedTuple):
    """Device copy of the frames of a layer's keys or values, in the layout that kernels read.

    - ``slots``: int32 ``[table, slot]``, the slots of all frequency tables;
    - ``values``: ``[table, symbol]``, symbol values in quantization steps;
    - ``table_indices``: uint8 ``[kv_head, column]``, the table index of each column;
    - ``means``: float32 ``[kv_head, channel]``;
    - ``rows``: ``[frame, column, channel]``;
    - ``frequencies``: float64 ``[pair]``, RoPE frequencies;
    - ``cos`` and ``sin``: float32 ``[token of a group, pair]``, for angles relative to a group's position.

    Channels are ordered so that RoPE pairs are neighbors, and padded with zeros per head. ``values`` and ``rows`` are float16 if that is
    exact, otherwise float32.
    """

    slots: torch.Tensor
    values: torch.Tensor
    table_indices: torch.Tensor
    means: torch.Tensor
    rows: torch.Tensor
    frequencies: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class ChunkTables(NamedTuple):
    """Entropy-coded chunks, ordered by token group, sequence and head.

    ``words`` contains the words of all chunks. ``begins`` is the index of each chunk's first word. ``counts``, ``columns`` and ``tokens``
    are the word, column and token counts of each chunk. ``used`` is the number of frame columns in a product: the chunk's columns or, with
    one frame per layer, the maximum over the heads of the token group. ``states`` are the initial states, int16 ``[chunk, 2 · LANES]``.
    """

    words: torch.Tensor
    begins: torch.Tensor
    counts: torch.Tensor
    columns: torch.Tensor
    used: torch.Tensor
    tokens: torch.Tensor
    states: torch.Tensor


class Factors(NamedTuple):
    """Column factors in quantization steps: ``values`` ``[frame of a group, column, token]`` in the dtype of ``DeviceFrames.values``.

    If an escaped level does not fit this dtype, it is 0 in ``values`` and listed separately: ``levels``, int32, are these levels, and
    ``escape_indices``, int32, their indices in ``values``. ``counts``, int32 ``[chunk]``, is the number of listed levels per chunk. The
    list of a chunk begins at half the index of its first word, rounded up.
    """

    values: torch.Tensor
    escape_indices: torch.Tensor
    levels: torch.Tensor
    counts: torch.Tensor


def allocate_factors(chunks: ChunkTables, frames: DeviceFrames, count: int) -> Factors:
    """Allocate ``Factors`` with ``count`` values, and room for all escapes in ``chunks``, which take two words each."""
    device = frames.values.device
    values = torch.empty(count, dtype=frames.values.dtype, device=device)
    positions, levels = (torch.empty(chunks.words.numel() // 2 + 1, dtype=torch.int32, device=device) for _ in range(2))
    return Factors(values, positions, levels, torch.empty(chunks.counts.shape, dtype=torch.int32, device=device))


def gather_chunks(codec: Transform, parts: Sequence[Mapping[str, torch.Tensor]]) -> ChunkTables:
    """Return the chunks of all ``parts`` in one ``ChunkTables``. Each part is a mapping of streams."""
    counts = [_rows_first(join_halves(streams["word_counts"])) for streams in parts]
    words = [streams["words"].reshape(-1).view(torch.int16) for streams in parts]
    firsts = numpy.cumsum([0, *(part.numel() for part in words)])
    begins = [word_counts.cumsum(0) - word_counts + int(first) for word_counts, first in zip(counts, firsts, strict=False)]
    columns = _concatenate([_rows_first(_as_int64(streams["columns"])) for streams in parts]).clamp_max(codec.dim).to(torch.int32)
    heads = parts[0]["columns"].shape[1]
    used = columns if codec.scope == "head" else columns.view(-1, heads).amax(1, True).repeat(1, heads).flatten()
    tokens = [_rows_first(_as_int64(streams["tokens"]).expand(streams["columns"].shape)) for streams in parts]
    result = ChunkTables(
        words=_concatenate(words),
        begins=_concatenate(begins),
        counts=_concatenate(counts),
        columns=columns,
        used=used,
        tokens=_concatenate(tokens).clamp_max(codec.chunk).to(torch.int32),
        states=_concatenate([_rows_first(streams["states"].view(torch.int16)) for streams in parts]),
    )
    # Some tensors may still be views or expanded views of streams.
    return ChunkTables(*(tensor.contiguous() for tensor in result))


def _concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _rows_first(stream: torch.Tensor) -> torch.Tensor:
    return stream.movedim(2, 0).flatten(0, 2)


def _as_int64(stream: torch.Tensor) -> torch.Tensor:
    return stream.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)


def join_halves(stream: torch.Tensor) -> torch.Tensor:
    """Join low and high 16-bit halves ``[..., 2]`` into unsigned 32-bit numbers, as int64 ``[...]``."""
    halves = _as_int64(stream)
    return halves[..., 0] | halves[..., 1] << 16


_device_slots: WeakKeyDictionary[SymbolTables, dict[str, torch.Tensor | None]] = WeakKeyDictionary()
_device_frames: WeakKeyDictionary[Frames, dict[tuple[int, int, int, str], DeviceFrames | None]] = WeakKeyDictionary()
"""Cached device copies, which are freed together with their frames."""


def frames_on_device(codec: Transform, source: Frames, heads: int, device: torch.device) -> DeviceFrames | None:
    """Return a cached copy of ``source`` on ``device``, or None if the frequencies of a table have a wrong sum."""
    cached = _device_frames.setdefault(source, {})
    key = codec.step, codec.chunk, heads, str(device)
    if key not in cached:
        with torch.inference_mode(False):
            cached[key] = _copy_frames(codec, source, heads, device)
    return cached[key]


def _copy_frames(codec: Transform, source: Frames, heads: int, device: torch.device) -> DeviceFrames | None:
    if (slots := _slot_table(source.tables, device)) is None:
        return None
    rope = codec.side_rope(source)
    rows = _pair_channels(source.rows, heads, codec.dim, rope)
    values = source.tables.symbol_values.view(-1, source.tables.alphabet)
    binary16 = rows[:, 1:].to(torch.float16), values.to(torch.float16)
    exact = torch.equal(binary16[0].to(torch.float32), rows[:, 1:]) and torch.equal(binary16[1].to(torch.float32), values)
    frequencies = torch.tensor([] if rope is None else rope.frequencies, dtype=torch.float64, device="cpu")
    cos, sin = first_cos_sin(() if rope is None else rope.frequencies)
    return DeviceFrames(
        slots,
        (binary16[1] if exact else values).to(device),
        torch.from_numpy(numpy.ascontiguousarray(codec.table_indices(source, heads))).to(device),
        rows[:, 0].reshape(heads, -1).contiguous().to(device),
        (binary16[0] if exact else rows[:, 1:]).contiguous().to(device),
        frequencies.to(device),
        cos[: codec.chunk].to(device),
        sin[: codec.chunk].to(device),
    )


def channels_per_tile(dim: int) -> int:
    """Return the number of channels per tile. Heads are padded to whole tiles."""
    return min(MAX_CHANNELS, max(16, next_power_of_two(dim)))


def _pair_channels(rows: torch.Tensor, heads: int, dim: int, rope: Rope | None) -> torch.Tensor:
    """Return ``rows`` ``[frame, row, channel]`` with the channels in the order of ``DeviceFrames``, so that RoPE pairs are neighbors."""
    order = torch.arange(dim, device=rows.device)
    if rope is not None and rope.pairing == "halves":
        pairs = len(rope.frequencies)
        order[: 2 * pairs] = order[: 2 * pairs].view(2, pairs).T.reshape(-1)
    by_head = rows.to("cpu").reshape(*rows.shape[:2], -1, dim)[..., order]
    return torch.nn.functional.pad(by_head, (0, -dim % channels_per_tile(dim))).flatten(2)


def _slot_table(tables: SymbolTables, device: torch.device) -> torch.Tensor | None:
    cached = _device_slots.setdefault(tables, {})
    if str(device) not in cached:
        sums = (tables.frequencies.sum(1) == TOTAL).all() and (tables.frequencies >= 0).all()
        cached[str(device)] = torch.from_numpy(slot_table(tables.frequencies).view(numpy.int32)).to(device) if sums else None
    return cached[str(device)]


def decode_symbols(
    codec: Transform,
    chunks: ChunkTables,
    frames: DeviceFrames,
    first: int,
    count: int,
    heads: int,
    result: Factors | None,
    ends: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Decode ``count`` chunks of whole token groups, beginning with chunk ``first``, into ``result``.

    If ``result`` is None, only ``ends`` is written: the number of words read, int32 ``[chunk]``, and the final states, int32 ``[chunk,
    LANES]``.
    """
    if not count:
        return
    factors, positions, levels, escape_counts = (None,) * 4 if result is None else result
    words_read, end_states = (None, None) if ends is None else ends
    _decode[(count,)](
        factors, positions, levels, escape_counts, words_read, end_states, chunks.words, chunks.words.numel(), chunks.begins,
        chunks.counts, chunks.columns, chunks.tokens, chunks.used, chunks.states, frames.table_indices, frames.slots, frames.values, first,
        heads, DIM=codec.dim, CHUNK=codec.chunk, PER_LAYER=codec.scope == "layer", ALPHABET=frames.values.shape[1],
        CHUNK_LANES=LANES, num_warps=1, num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["word_count", "first", "heads"])
def _decode(
    factors: tl.tensor,
    escape_indices: tl.tensor,
    levels: tl.tensor,
    escape_counts: tl.tensor,
    read: tl.tensor,
    last: tl.tensor,
    words: tl.tensor,
    word_count: tl.tensor,
    begins: tl.tensor,
    counts: tl.tensor,
    columns: tl.tensor,
    tokens: tl.tensor,
    used: tl.tensor,
    states: tl.tensor,
    table_indices: tl.tensor,
    slots: tl.tensor,
    values: tl.tensor,
    first: tl.tensor,
    heads: tl.tensor,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    PER_LAYER: tl.constexpr,
    ALPHABET: tl.constexpr,
    CHUNK_LANES: tl.constexpr,
) -> None:
    """Decode one chunk into the fields of ``Factors``. In each step, every lane decodes one symbol.

    The index of the chunk is ``first`` plus the program's index. If ``factors`` is None, only ``read``, the number of words read, and
    ``last``, the final states, are stored.
    """
    chunk = first + tl.program_id(0).to(tl.int64)
    begin = tl.load(begins + chunk)
    own = tl.load(counts + chunk)
    # Words past the end are read as 0. A chunk that reads them is invalid, because it has read too many words.
    end = tl.minimum(tl.maximum(word_count - begin, 0), 1 << 30).to(tl.int32)
    words += begin
    token_count = tl.load(tokens + chunk)
    own_columns = tl.load(columns + chunk)
    count = own_columns * token_count
    head = chunk % heads
    table_indices += head * DIM
    lane = tl.arange(0, CHUNK_LANES)  # [lane], like all tensors below
    state = rans.load_states(states + chunk * (2 * CHUNK_LANES), lane)
    # Each iteration advances a lane by CHUNK_LANES symbols: whole columns, and some tokens.
    each = tl.maximum(token_count, 1)
    column = lane // each
    token = lane % each
    at = tl.zeros([], tl.int32)
    escaped = tl.zeros([], tl.int32)
    if factors is not None:
        target = factors + tl.program_id(0).to(tl.int64) * (DIM * CHUNK)
        column_stride = CHUNK
        own_place = 0
        if PER_LAYER:
            # Column c of the chunk is column c · heads + head of the layer's frame.
            target -= head * (DIM * CHUNK)
            own_place = head.to(tl.int32) * CHUNK
            column_stride = heads * CHUNK
        escape_indices += (begin + 1) // 2
        levels += (begin + 1) // 2
        room = tl.minimum(tl.minimum(own, end) // 2, 1 << 30).to(tl.int32)
    for start in range(0, count, CHUNK_LANES):
        active = start + lane < count
        number = tl.load(table_indices + column, active, 0).to(tl.int32)
        entry = rans.load_entries(slots + number * _SLOTS, state)
        state, at = rans.advance(state, entry, active, lane, words, at, end)
        symbol = (entry & 0xFF).to(tl.int32)
        escaping = rans.lane_mask(active & (symbol == 0), lane)
        if factors is not None:
            place = own_place + column * column_stride + token
            tl.store(target + place, tl.load(values + (number * ALPHABET + symbol)), active)
            if escaping != 0:
                ordinal = escaped + rans.count_lanes_before(escaping, lane)
                tl.store(escape_indices + ordinal, place, active & (symbol == 0) & (ordinal < room))
        escaped += rans.count_lanes(escaping)
        token += CHUNK_LANES % each
        column += CHUNK_LANES // each + (token >= each).to(tl.int32)
        token = tl.where(token >= each, token - each, token)
    if factors is None:
        tl.store(read + chunk, at + 2 * escaped)
        tl.store(last + chunk * CHUNK_LANES + lane, state.to(tl.int32, bitcast=True))
    else:
        # Write zeros for columns that only other chunks of the group have, and for tokens that this chunk lacks.
        last_place = tl.load(used + chunk) * CHUNK
        for start in range(tl.where(token_count < CHUNK, 0, own_columns * CHUNK), last_place, CHUNK_LANES):
            other = start + lane
            missing = (other // CHUNK >= own_columns) | (other % CHUNK >= token_count)
            tl.store(target + (own_place + other // CHUNK * column_stride + other % CHUNK), 0.0, missing & (other < last_place))
        left = tl.zeros([], tl.int32)
        if escaped != 0:
            for start in range(0, tl.minimum(escaped, room), CHUNK_LANES):
                there = start + lane < tl.minimum(escaped, room)
                # Barriers are needed because lanes read positions that other lanes wrote, and overwrite ones that others have read.
                tl.debug_barrier()
                place = tl.load(escape_indices + start + lane, there, 0)
                tl.debug_barrier()
                source = at + 2 * (start + lane)
                low_half = tl.load(words + source, there & (source < end), 0).to(tl.int32) & 0xFFFF
                high_half = tl.load(words + source + 1, there & (source + 1 < end), 0).to(tl.int32)
                level = high_half << 16 | low_half
                factor = tl.minimum(tl.maximum(level, -_MAX_HALF), _MAX_HALF).to(tl.float32).to(factors.dtype.element_ty)
                inexact = there & (factor.to(tl.float32).to(tl.int32) != level)
                tl.store(target + place, tl.where(inexact, 0.0, factor.to(tl.float32)).to(factors.dtype.element_ty), there)
                leaving = rans.lane_mask(inexact, lane)
                ordinal = left + rans.count_lanes_before(leaving, lane)
                tl.store(escape_indices + ordinal, place, inexact)
                tl.store(levels + ordinal, level, inexact)
                left += rans.count_lanes(leaving)
        tl.store(escape_counts + chunk, left)
