"""Decode packed rows of transform (spec/codecs/transform.md): symbols to factors of columns, then their products with the frames.

Symbols and factors are those of ``formats/transform.py`` bit for bit. A product is three of tf32, by parts that are rounded to 11 bits:
its error is below a third of the page's tolerance, whatever the process has set for torch's products.
"""

# Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy
import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.frames import Frames, Tables, first_cos_sin
from kvpack.formats.rans import LANES, LEAST_STATE, TOTAL, Decoded, slots_of
from kvpack.kernels.words.columns import check_shape

from . import rans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpack.formats.transform import Transform

    from .rows import Packed, Pages

PART_BYTES = 1 << 28
"""Bytes of factors at once, if a token group of all heads has no more; those of columns without symbols are never touched."""

MOST_TOKENS, MOST_PAIRS, COLUMNS = 64, 64, 32
"""Tokens and pairs of channels of a program that multiplies, at most, and the columns that it takes at once."""

WARPS = 4

_SLOTS = tl.constexpr(TOTAL)


class OnDevice(NamedTuple):
    """What the kernels read of the frames of a side.

    ``numbers``, uint8 ``[kv_head, column]``, are those of the columns' tables; ``values`` float32 ``[table, symbol]``; ``unit``, float64
    ``[1]``, is the size of a step. ``cos`` and ``sin``, float32 ``[token of a group, pair]``, are of the angles from a group's position on.
    """

    slots: torch.Tensor
    values: torch.Tensor
    unit: torch.Tensor
    numbers: torch.Tensor
    rows: torch.Tensor
    frequencies: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class Chunks(NamedTuple):
    """Chunks in the order of token groups, sequences and heads: where the words of each ``begins``, their ``counts``, its first ``states``.

    The others are ``[chunk]``, ``states`` int16 ``[chunk, 2 · LANES]``; ``words`` are those of all chunks. ``used`` are the columns of the
    frame that a product takes: those of the chunk, or with frames of layers, as many as the head with most of the token group has.
    """

    words: torch.Tensor
    begins: torch.Tensor
    counts: torch.Tensor
    columns: torch.Tensor
    used: torch.Tensor
    tokens: torch.Tensor
    states: torch.Tensor


def decode_into(codec: Transform, packed: Sequence[Packed], out: torch.Tensor, rotated: bool, pages: Pages | None = None) -> bool:
    """Decode ``packed``, of streams of any strides, into ``out`` ``[batch, kv_head, token, dim]`` with dense channels.

    ``rotated`` says nothing, for there is no rotation. Any words give some values. Raises InvalidShape when a stream is not as
    ``codec.layout`` says, and what ``Transform.source_for`` raises.
    """
    if pages is not None:
        return False
    batch, heads = out.shape[:2]
    source = codec.source_for(heads)
    if (there := _on_device(codec, source, heads, out.device)) is None:
        return False
    packed = [part for part in packed if part.tokens]
    if not packed or not out.numel():
        return True
    for part in packed:
        for name, layout in codec.layout(batch, heads, part.tokens).items():
            if name != "words":
                check_shape(name, part.streams[name], layout.shape)
    groups = torch.from_numpy(_groups(codec.chunk, packed)).to(out.device, non_blocking=True)
    chunks = _chunks(codec, [part.streams for part in packed])
    shift_cos, shift_sin = there.cos, there.sin
    pairs = there.frequencies.numel()
    if pairs:
        positions = torch.cat([_joined(part.streams["positions"])[:, 0].T.reshape(-1) for part in packed])
        # Angles of far positions need binary64.
        angles = positions.to(torch.float64)[:, None] * there.frequencies
        shift_cos, shift_sin = angles.cos().to(torch.float32), angles.sin().to(torch.float32)
    tokens = min(MOST_TOKENS, codec.chunk)
    wide = min(MOST_PAIRS, max(16, next_power_of_two(-(-codec.dim // 2))))
    of_group = codec.dim * codec.chunk * batch * heads
    at_once = max(1, PART_BYTES // (4 * of_group))
    factors = torch.empty(min(at_once, len(groups)) * of_group, dtype=torch.float32, device=out.device)
    with _on(out.device):
        for first in range(0, len(groups), at_once):
            count = min(at_once, len(groups) - first)
            _symbols(codec, chunks, there, first * batch * heads, count * batch * heads, heads, factors, None)
            grid = (count * batch * (codec.chunk // tokens) * heads, triton.cdiv(codec.dim, 2 * wide))
            _multiply[grid](
                out, *out.stride()[:3], factors, groups, chunks.used, chunks.tokens, there.rows, shift_cos, shift_sin, there.cos, there.sin,
                first, batch, HEADS=heads, DIM=codec.dim, CHUNK=codec.chunk, TOKENS=tokens, PAIRS=wide, COLUMNS=COLUMNS, TURNED=pairs,
                HALVES=source.rope is not None and source.rope.pairing == "halves", OF_LAYER=codec.scope == "layer", num_warps=WARPS,
            )  # fmt: skip
    return True


def check_chunks(codec: Transform, streams: Mapping[str, torch.Tensor], where: str) -> None:
    """``Transform.check_chunks`` on the device of ``streams``. Raises InvalidPayload for the first chunk that no encoder makes."""
    batch, heads, rows = streams["columns"].shape
    device = streams["columns"].device
    if codec.source is None or not rows:
        return
    if (there := _on_device(codec, codec.source_for(heads), heads, device)) is None:
        codec.check_chunks({name: stream.cpu().numpy() for name, stream in streams.items()}, where)
        return
    chunks = _chunks(codec, [streams])
    read = torch.empty(rows * batch * heads, dtype=torch.int32, device=device)
    states = torch.empty(rows * batch * heads, LANES, dtype=torch.int32, device=device)
    with _on(device):
        _symbols(codec, chunks, there, 0, rows * batch * heads, heads, None, (read, states))
    if ((read != chunks.counts) | (states != LEAST_STATE).any(1)).any():
        found = Decoded(numpy.empty((len(read), 0), numpy.uint8), read.cpu().numpy(), states.cpu().numpy().view(numpy.uint32))
        codec.check_ends(found, chunks.counts.cpu().numpy(), (batch, heads), where)


def _symbols(
    codec: Transform,
    chunks: Chunks,
    there: OnDevice,
    first: int,
    count: int,
    heads: int,
    factors: torch.Tensor | None,
    ends: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Decode ``count`` chunks, of whole token groups, from number ``first`` on to ``factors``, or to how they end."""
    if not count:
        return
    escapes = torch.empty(chunks.words.numel() // 2 + 1, dtype=torch.int32, device=there.slots.device) if factors is not None else None
    read, last = (None, None) if ends is None else ends
    _decode[(count,)](
        factors, read, last, escapes, chunks.words, chunks.words.numel(), chunks.begins, chunks.counts, chunks.columns, chunks.tokens,
        chunks.used, chunks.states, there.numbers, there.slots, there.values, there.unit, first, heads, DIM=codec.dim, CHUNK=codec.chunk,
        OF_LAYER=codec.scope == "layer", ALPHABET=there.values.shape[1], CHUNK_LANES=LANES, num_warps=1, num_stages=1,
    )  # fmt: skip


def _groups(chunk: int, packed: Sequence[Packed]) -> numpy.ndarray:
    """For each token group its first token of the output and its tokens there, int64 ``[row, 2]``."""
    found = []
    for part in packed:
        done = numpy.arange(0, part.tokens, chunk, dtype=numpy.int64)
        found.append(numpy.stack([part.first + done, numpy.minimum(part.tokens - done, chunk)], 1))
    return numpy.concatenate(found)


def _chunks(codec: Transform, parts: Sequence[Mapping[str, torch.Tensor]]) -> Chunks:
    """The chunks of ``parts``, each of which has its own words."""
    counts = [_in_order(_joined(streams["word_counts"])) for streams in parts]
    words = [streams["words"].reshape(-1).view(torch.int16) for streams in parts]
    firsts = numpy.cumsum([0, *(one.numel() for one in words)])
    begins = [own.cumsum(0) - own + int(first) for own, first in zip(counts, firsts, strict=False)]
    columns = _cat([_in_order(_wide(streams["columns"])) for streams in parts]).clamp_max(codec.dim).to(torch.int32)
    heads = parts[0]["columns"].shape[1]
    used = columns if codec.scope == "head" else columns.view(-1, heads).amax(1, True).repeat(1, heads).flatten()
    tokens = [_in_order(_wide(streams["tokens"]).expand(streams["columns"].shape)) for streams in parts]
    found = Chunks(
        words=_cat(words),
        begins=_cat(begins),
        counts=_cat(counts),
        columns=columns,
        used=used,
        tokens=_cat(tokens).clamp_max(codec.chunk).to(torch.int32),
        states=_cat([_in_order(streams["states"].view(torch.int16)) for streams in parts]),
    )
    # Some of them may still be views of the streams, and one row stands for many in an expanded one.
    return Chunks(*(tensor.contiguous() for tensor in found))


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _in_order(stream: torch.Tensor) -> torch.Tensor:
    """Rows ``[batch, kv_head, row, ...]`` by row, then sequence, then head."""
    return stream.movedim(2, 0).flatten(0, 2)


def _wide(stream: torch.Tensor) -> torch.Tensor:
    """Numbers of 16 bits as int64."""
    return stream.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)


def _joined(stream: torch.Tensor) -> torch.Tensor:
    """Numbers of 32 bits from their low and high halves ``[..., 2]``, int64."""
    halves = _wide(stream)
    return halves[..., 0] | halves[..., 1] << 16


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_of_tables: WeakKeyDictionary[Tables, dict[str, torch.Tensor | None]] = WeakKeyDictionary()
_of_frames: WeakKeyDictionary[Frames, dict[tuple[int, int, int, str], OnDevice | None]] = WeakKeyDictionary()
"""What was copied to devices, as long as there are tables and frames."""


def _on_device(codec: Transform, source: Frames, heads: int, device: torch.device) -> OnDevice | None:
    """``source`` on ``device``; None for tables that do not sum, whose slots are not all there."""
    kept = _of_frames.setdefault(source, {})
    key = codec.step, codec.chunk, heads, str(device)
    if key not in kept:
        with torch.inference_mode(False):
            kept[key] = _copied(codec, source, heads, device)
    return kept[key]


def _copied(codec: Transform, source: Frames, heads: int, device: torch.device) -> OnDevice | None:
    if (slots := _slots(source.tables, device)) is None:
        return None
    rope = codec.rope_of(source)
    frequencies = torch.tensor([] if rope is None else rope.frequencies, dtype=torch.float64, device="cpu")
    cos, sin = first_cos_sin(() if rope is None else rope.frequencies)
    return OnDevice(
        slots,
        (source.tables.by_symbol * codec.step_size).view(-1, source.tables.alphabet).to(device),
        torch.tensor([codec.step_size], dtype=torch.float64, device=device),
        torch.from_numpy(numpy.ascontiguousarray(codec.tables_of(source, heads))).to(device),
        source.rows_on(device).contiguous(),
        frequencies.to(device),
        cos[: codec.chunk].to(device),
        sin[: codec.chunk].to(device),
    )


def _slots(tables: Tables, device: torch.device) -> torch.Tensor | None:
    kept = _of_tables.setdefault(tables, {})
    if str(device) not in kept:
        sums = (tables.frequencies.sum(1) == TOTAL).all() and (tables.frequencies >= 0).all()
        kept[str(device)] = torch.from_numpy(slots_of(tables.frequencies).view(numpy.int32)).to(device) if sums else None
    return kept[str(device)]


@triton.jit(do_not_specialize=["word_count", "first", "heads"])
def _decode(
    factors: tl.tensor,
    read: tl.tensor,
    last: tl.tensor,
    escapes: tl.tensor,
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
    unit: tl.tensor,
    first: tl.tensor,
    heads: tl.tensor,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    OF_LAYER: tl.constexpr,
    ALPHABET: tl.constexpr,
    CHUNK_LANES: tl.constexpr,
) -> None:
    """Decode chunk ``first`` + the program's number, ``[lane]`` of symbols at a time, to ``factors`` ``[frame of a group, column, token]``.

    Without ``factors``, only to the words that it has ``read`` and to its ``last`` states. ``escapes``, int32, has room for the place of
    each escape's factor: an escape takes two words.
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
        if OF_LAYER:
            # Column c of a block is column c · heads + head of the layer's frame.
            target += head * (CHUNK - DIM * CHUNK)
            column_stride = heads * CHUNK
        listed = escapes + (begin + 1) // 2
        room = tl.minimum(tl.minimum(own, end) // 2, 1 << 30).to(tl.int32)
    for start in range(0, count, CHUNK_LANES):
        active = start + lane < count
        number = tl.load(numbers + column, active, 0).to(tl.int32)
        entry = rans.entry_of(slots + number * _SLOTS, state)
        state, at = rans.advance(state, entry, active, lane, words, at, end)
        symbol = (entry & 0xFF).to(tl.int32)
        escaping = rans.lanes_of(active & (symbol == 0), lane)
        if factors is not None:
            tl.store(target + (column * column_stride + token), tl.load(values + (number * ALPHABET + symbol)), active)
            if escaping != 0:
                ordinal = escaped + rans.before(escaping, lane)
                tl.store(listed + ordinal, column * column_stride + token, active & (symbol == 0) & (ordinal < room))
        escaped += rans.count_of(escaping)
        token += CHUNK_LANES % each
        column += CHUNK_LANES // each + (token >= each).to(tl.int32)
        token = tl.where(token >= each, token - each, token)
    if factors is None:
        tl.store(read + chunk, at + 2 * escaped)
        tl.store(last + chunk * CHUNK_LANES + lane, state.to(tl.int32, bitcast=True))
    else:
        if OF_LAYER:
            last_place = tl.load(used + chunk) * CHUNK
            for start in range(own_columns * CHUNK, last_place, CHUNK_LANES):
                place = start + lane
                tl.store(target + (place // CHUNK * column_stride + place % CHUNK), 0.0, place < last_place)
        if escaped != 0:
            # Lanes read what others have written.
            tl.debug_barrier()
            size = tl.load(unit)
            for start in range(0, tl.minimum(escaped, room), CHUNK_LANES):
                there = start + lane < tl.minimum(escaped, room)
                place = tl.load(listed + start + lane, there, 0)
                source = at + 2 * (start + lane)
                low_half = tl.load(words + source, there & (source < end), 0).to(tl.int32) & 0xFFFF
                high_half = tl.load(words + source + 1, there & (source + 1 < end), 0).to(tl.int32)
                level = (high_half << 16 | low_half).to(tl.float64)
                tl.store(target + place, (level * size).to(tl.float32), there)


@triton.jit(do_not_specialize=["first", "batch"])
def _multiply(
    out: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    factors: tl.tensor,
    groups: tl.tensor,
    used: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    shift_cos: tl.tensor,
    shift_sin: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    first: tl.tensor,
    batch: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNED: tl.constexpr,
    HALVES: tl.constexpr,
    OF_LAYER: tl.constexpr,
) -> None:
    """``TOKENS`` tokens of one head of a token group: means and products of factors with rows, turned to their positions.

    Channels are in ``PAIRS`` pairs, of which the first ``TURNED`` of a head turn. ``factors`` ``[frame of a group, column, token]`` begin
    with those of token group ``first``; ``used``, int32 ``[chunk]``, are the columns that a product takes.
    """
    tiles = CHUNK // TOKENS
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS % tiles
    of_part = tl.program_id(0) // HEADS // tiles
    sequence = of_part % batch
    group = first + of_part // batch
    of_all = group * batch + sequence
    group_first = tl.load(groups + 2 * group)
    wanted = tl.load(groups + 2 * group + 1).to(tl.int32)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    # Channels that do not turn are in pairs of neighbours, too.
    halves = (pair < TURNED) & HALVES
    one = tl.where(halves, pair, 2 * pair)
    other = tl.where(halves, pair + TURNED, 2 * pair + 1)
    chunk = of_all * HEADS + head
    local = of_part.to(tl.int64) * HEADS
    count = tl.where(tile * TOKENS < wanted, tl.load(used + chunk), 0)
    WIDTH: tl.constexpr = DIM * (HEADS if OF_LAYER else 1)
    if OF_LAYER:
        rows += head * DIM
        factors += local * (DIM * CHUNK)
        count *= HEADS
    else:
        rows += head.to(tl.int64) * ((DIM + 1) * DIM)
        factors += (local + head) * (DIM * CHUNK)
    real = token < tl.load(tokens + chunk)
    ones = tl.zeros([TOKENS, PAIRS], tl.float32)
    others = tl.zeros([TOKENS, PAIRS], tl.float32)
    for start in range(0, count, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = column < count
        factor = tl.load(factors + (column[:, None] * CHUNK + token[None, :]), there[:, None] & real[None, :], 0.0)
        row = rows + (column + 1).to(tl.int64) * WIDTH
        ones_of_rows = tl.load(row[:, None] + one[None, :], there[:, None] & (one < DIM)[None, :], 0.0)
        others_of_rows = tl.load(row[:, None] + other[None, :], there[:, None] & (other < DIM)[None, :], 0.0)
        ones = tl.dot(tl.trans(factor), ones_of_rows, ones, input_precision="tf32x3")
        others = tl.dot(tl.trans(factor), others_of_rows, others, input_precision="tf32x3")
    ones += tl.load(rows + one, one < DIM, 0.0)[None, :]
    others += tl.load(rows + other, other < DIM, 0.0)[None, :]
    if TURNED:
        turned = pair < TURNED
        group_cos = tl.load(shift_cos + of_all * TURNED + pair, turned, 1.0)[None, :]
        group_sin = tl.load(shift_sin + of_all * TURNED + pair, turned, 0.0)[None, :]
        place = token[:, None] * TURNED + pair[None, :]
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
    tl.store(place + one[None, :], ones.to(out.dtype.element_ty), stored & (one < DIM)[None, :])
    tl.store(place + other[None, :], others.to(out.dtype.element_ty), stored & (other < DIM)[None, :])
