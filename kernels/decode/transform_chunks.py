"""Chunks of transform on a device: decode their symbols to column factors, or check how they end (spec/codecs/transform.md).

Everything here is exact: ``formats/transform_chunks.py`` and the values of ``formats/transform.py`` are the oracle.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy
import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.frames import Frames, SymbolTables, first_cos_sin
from kvpack.formats.rans import LANES, TOTAL, slot_table

from . import rans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpack.formats.frames import Rope
    from kvpack.formats.transform import Transform

_SLOTS = tl.constexpr(TOTAL)
_LARGEST = tl.constexpr(65504)
"""The largest level that binary16 holds."""

MAX_CHANNELS = 128
"""Channels of a tile of a product, at most."""


class OnDevice(NamedTuple):
    """The frames of a side in device memory, in the form that the kernels read.

    ``numbers``, uint8 ``[kv_head, column]``, are the table numbers of the columns; ``values`` ``[table, symbol]`` are in steps. ``means``,
    float32 ``[kv_head, channel]``, and ``rows`` ``[frame, column, channel]`` have the two channels of each RoPE pair next to each other,
    and zeros after the channels of every head. ``values`` and ``rows`` are float16 if that represents them exactly, otherwise float32.
    ``cos`` and ``sin``, float32 ``[token of a group, pair]``, are for the angles from a group's position on.
    """

    slots: torch.Tensor
    values: torch.Tensor
    numbers: torch.Tensor
    means: torch.Tensor
    rows: torch.Tensor
    frequencies: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class Chunks(NamedTuple):
    """Chunks in the order of token groups, sequences and heads: where the words of each one begin, their ``counts``, and first ``states``.

    All are ``[chunk]``, except ``states``, int16 ``[chunk, 2 · LANES]``; ``words`` are those of all chunks. ``used`` is the number of frame
    columns in a product: those of the chunk, or with frames of layers the largest number of any head in the token group.
    """

    words: torch.Tensor
    begins: torch.Tensor
    counts: torch.Tensor
    columns: torch.Tensor
    used: torch.Tensor
    tokens: torch.Tensor
    states: torch.Tensor


class Factors(NamedTuple):
    """Column factors in steps: ``values`` ``[frame of a group, column, token]`` in the dtype of ``OnDevice.values``.

    Escaped levels that this dtype cannot represent are 0 in ``values``. ``counts``, int32 ``[chunk]``, is their number in each chunk.
    ``places`` and ``levels``, int32, are their positions in the frame's values and their levels, stored from half the first word of each
    chunk on, rounded up.
    """

    values: torch.Tensor
    places: torch.Tensor
    levels: torch.Tensor
    counts: torch.Tensor


def factors_for(chunks: Chunks, there: OnDevice, count: int) -> Factors:
    """Allocate ``count`` factors, with room for all escapes of ``chunks``: an escape takes two words."""
    device = there.values.device
    values = torch.empty(count, dtype=there.values.dtype, device=device)
    places, levels = (torch.empty(chunks.words.numel() // 2 + 1, dtype=torch.int32, device=device) for _ in range(2))
    return Factors(values, places, levels, torch.empty(chunks.counts.shape, dtype=torch.int32, device=device))


def chunks_of(codec: Transform, parts: Sequence[Mapping[str, torch.Tensor]]) -> Chunks:
    """Return the chunks of ``parts``, each with its own words."""
    counts = [_sort_rows(joined(streams["word_counts"])) for streams in parts]
    words = [streams["words"].reshape(-1).view(torch.int16) for streams in parts]
    firsts = numpy.cumsum([0, *(part.numel() for part in words)])
    begins = [own.cumsum(0) - own + int(first) for own, first in zip(counts, firsts, strict=False)]
    columns = _cat([_sort_rows(_wide(streams["columns"])) for streams in parts]).clamp_max(codec.dim).to(torch.int32)
    heads = parts[0]["columns"].shape[1]
    used = columns if codec.scope == "head" else columns.view(-1, heads).amax(1, True).repeat(1, heads).flatten()
    tokens = [_sort_rows(_wide(streams["tokens"]).expand(streams["columns"].shape)) for streams in parts]
    result = Chunks(
        words=_cat(words),
        begins=_cat(begins),
        counts=_cat(counts),
        columns=columns,
        used=used,
        tokens=_cat(tokens).clamp_max(codec.chunk).to(torch.int32),
        states=_cat([_sort_rows(streams["states"].view(torch.int16)) for streams in parts]),
    )
    # Some of them may still be views of the streams, and one row stands for many in an expanded one.
    return Chunks(*(tensor.contiguous() for tensor in result))


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _sort_rows(stream: torch.Tensor) -> torch.Tensor:
    """Sort rows ``[batch, kv_head, row, ...]`` by row, then sequence, then head."""
    return stream.movedim(2, 0).flatten(0, 2)


def _wide(stream: torch.Tensor) -> torch.Tensor:
    """Convert 16-bit numbers to int64."""
    return stream.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)


def joined(stream: torch.Tensor) -> torch.Tensor:
    """Join the low and high halves ``[..., 2]`` of 32-bit numbers, int64."""
    halves = _wide(stream)
    return halves[..., 0] | halves[..., 1] << 16


_of_tables: WeakKeyDictionary[SymbolTables, dict[str, torch.Tensor | None]] = WeakKeyDictionary()
_of_frames: WeakKeyDictionary[Frames, dict[tuple[int, int, int, str], OnDevice | None]] = WeakKeyDictionary()
"""Device copies, which live as long as their tables and frames."""


def on_device(codec: Transform, source: Frames, heads: int, device: torch.device) -> OnDevice | None:
    """Copy ``source`` to ``device``; None for tables that do not sum to the total, whose slots are incomplete."""
    kept = _of_frames.setdefault(source, {})
    key = codec.step, codec.chunk, heads, str(device)
    if key not in kept:
        with torch.inference_mode(False):
            kept[key] = _copied(codec, source, heads, device)
    return kept[key]


def _copied(codec: Transform, source: Frames, heads: int, device: torch.device) -> OnDevice | None:
    if (slots := _slots(source.tables, device)) is None:
        return None
    rope = codec.side_rope(source)
    rows = _in_pairs(source.rows, heads, codec.dim, rope)
    values = source.tables.symbol_values.view(-1, source.tables.alphabet)
    halved = rows[:, 1:].to(torch.float16), values.to(torch.float16)
    exact = torch.equal(halved[0].to(torch.float32), rows[:, 1:]) and torch.equal(halved[1].to(torch.float32), values)
    frequencies = torch.tensor([] if rope is None else rope.frequencies, dtype=torch.float64, device="cpu")
    cos, sin = first_cos_sin(() if rope is None else rope.frequencies)
    return OnDevice(
        slots,
        (halved[1] if exact else values).to(device),
        torch.from_numpy(numpy.ascontiguousarray(codec.column_tables(source, heads))).to(device),
        rows[:, 0].reshape(heads, -1).contiguous().to(device),
        (halved[0] if exact else rows[:, 1:]).contiguous().to(device),
        frequencies.to(device),
        cos[: codec.chunk].to(device),
        sin[: codec.chunk].to(device),
    )


def tile_of(dim: int) -> int:
    """Return the channels per tile; heads have whole tiles."""
    return min(MAX_CHANNELS, max(16, next_power_of_two(dim)))


def _in_pairs(rows: torch.Tensor, heads: int, dim: int, rope: Rope | None) -> torch.Tensor:
    """Return ``rows`` ``[frame, row, channel]`` with the channels in the order of ``OnDevice``."""
    order = torch.arange(dim, device=rows.device)
    if rope is not None and rope.pairing == "halves":
        pairs = len(rope.frequencies)
        order[: 2 * pairs] = order[: 2 * pairs].view(2, pairs).T.reshape(-1)
    apart = rows.to("cpu").reshape(*rows.shape[:2], -1, dim)[..., order]
    return torch.nn.functional.pad(apart, (0, -dim % tile_of(dim))).flatten(2)


def _slots(tables: SymbolTables, device: torch.device) -> torch.Tensor | None:
    kept = _of_tables.setdefault(tables, {})
    if str(device) not in kept:
        sums = (tables.frequencies.sum(1) == TOTAL).all() and (tables.frequencies >= 0).all()
        kept[str(device)] = torch.from_numpy(slot_table(tables.frequencies).view(numpy.int32)).to(device) if sums else None
    return kept[str(device)]


def decode_symbols(
    codec: Transform,
    chunks: Chunks,
    there: OnDevice,
    first: int,
    count: int,
    heads: int,
    into: Factors | None,
    ends: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Decode ``count`` chunks, of whole token groups, from number ``first`` on to factors, or only to their ends."""
    if not count:
        return
    factors, places, levels, rest = (None,) * 4 if into is None else into
    read, last = (None, None) if ends is None else ends
    _decode[(count,)](
        factors, places, levels, rest, read, last, chunks.words, chunks.words.numel(), chunks.begins, chunks.counts, chunks.columns,
        chunks.tokens, chunks.used, chunks.states, there.numbers, there.slots, there.values, first, heads, DIM=codec.dim, CHUNK=codec.chunk,
        OF_LAYER=codec.scope == "layer", ALPHABET=there.values.shape[1], CHUNK_LANES=LANES, num_warps=1, num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["word_count", "first", "heads"])
def _decode(
    factors: tl.tensor,
    places: tl.tensor,
    levels: tl.tensor,
    rest: tl.tensor,
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
    numbers: tl.tensor,
    slots: tl.tensor,
    values: tl.tensor,
    first: tl.tensor,
    heads: tl.tensor,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    OF_LAYER: tl.constexpr,
    ALPHABET: tl.constexpr,
    CHUNK_LANES: tl.constexpr,
) -> None:
    """Decode chunk ``first`` + the program's number, one ``[lane]`` of symbols at a time, to ``factors`` and the rest of ``Factors``.

    Without ``factors``, only ``read``, the number of words, and the ``last`` states are stored.
    """
    chunk = first + tl.program_id(0).to(tl.int64)
    begin = tl.load(begins + chunk)
    own = tl.load(counts + chunk)
    # Words beyond the last read as 0, and a chunk that reads them has read too many.
    end = tl.minimum(tl.maximum(word_count - begin, 0), 1 << 30).to(tl.int32)
    words += begin
    token_count = tl.load(tokens + chunk)
    own_columns = tl.load(columns + chunk)
    count = own_columns * token_count
    head = chunk % heads
    numbers += head * DIM
    lane = tl.arange(0, CHUNK_LANES)  # [lane], as all tensors below
    state = rans.first_states(states + chunk * (2 * CHUNK_LANES), lane)
    # A step further a lane is so many columns and tokens further.
    each = tl.maximum(token_count, 1)
    column = lane // each
    token = lane % each
    at = tl.zeros([], tl.int32)
    escaped = tl.zeros([], tl.int32)
    if factors is not None:
        target = factors + tl.program_id(0).to(tl.int64) * (DIM * CHUNK)
        column_stride = CHUNK
        own_place = 0
        if OF_LAYER:
            # Column c of a block is column c · heads + head of the layer's frame.
            target -= head * (DIM * CHUNK)
            own_place = head.to(tl.int32) * CHUNK
            column_stride = heads * CHUNK
        places += (begin + 1) // 2
        levels += (begin + 1) // 2
        room = tl.minimum(tl.minimum(own, end) // 2, 1 << 30).to(tl.int32)
    for start in range(0, count, CHUNK_LANES):
        active = start + lane < count
        number = tl.load(numbers + column, active, 0).to(tl.int32)
        entry = rans.entry_of(slots + number * _SLOTS, state)
        state, at = rans.advance(state, entry, active, lane, words, at, end)
        symbol = (entry & 0xFF).to(tl.int32)
        escaping = rans.lanes_of(active & (symbol == 0), lane)
        if factors is not None:
            place = own_place + column * column_stride + token
            tl.store(target + place, tl.load(values + (number * ALPHABET + symbol)), active)
            if escaping != 0:
                ordinal = escaped + rans.before(escaping, lane)
                tl.store(places + ordinal, place, active & (symbol == 0) & (ordinal < room))
        escaped += rans.count_of(escaping)
        token += CHUNK_LANES % each
        column += CHUNK_LANES // each + (token >= each).to(tl.int32)
        token = tl.where(token >= each, token - each, token)
    if factors is None:
        tl.store(read + chunk, at + 2 * escaped)
        tl.store(last + chunk * CHUNK_LANES + lane, state.to(tl.int32, bitcast=True))
    else:
        # Columns that others of the group have, and tokens that this one has not.
        last_place = tl.load(used + chunk) * CHUNK
        for start in range(tl.where(token_count < CHUNK, 0, own_columns * CHUNK), last_place, CHUNK_LANES):
            other = start + lane
            missing = (other // CHUNK >= own_columns) | (other % CHUNK >= token_count)
            tl.store(target + (own_place + other // CHUNK * column_stride + other % CHUNK), 0.0, missing & (other < last_place))
        left = tl.zeros([], tl.int32)
        if escaped != 0:
            for start in range(0, tl.minimum(escaped, room), CHUNK_LANES):
                there = start + lane < tl.minimum(escaped, room)
                # Lanes read what others have written, and write what others have read.
                tl.debug_barrier()
                place = tl.load(places + start + lane, there, 0)
                tl.debug_barrier()
                source = at + 2 * (start + lane)
                low_half = tl.load(words + source, there & (source < end), 0).to(tl.int32) & 0xFFFF
                high_half = tl.load(words + source + 1, there & (source + 1 < end), 0).to(tl.int32)
                level = high_half << 16 | low_half
                factor = tl.minimum(tl.maximum(level, -_LARGEST), _LARGEST).to(tl.float32).to(factors.dtype.element_ty)
                inexact = there & (factor.to(tl.float32).to(tl.int32) != level)
                tl.store(target + place, tl.where(inexact, 0.0, factor.to(tl.float32)).to(factors.dtype.element_ty), there)
                leaving = rans.lanes_of(inexact, lane)
                ordinal = left + rans.before(leaving, lane)
                tl.store(places + ordinal, place, inexact)
                tl.store(levels + ordinal, level, inexact)
                left += rans.count_of(leaving)
        tl.store(rest + chunk, left)
