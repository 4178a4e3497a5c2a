"""Exact decoding of the lossless codec (spec/codecs/lossless.md, spec/rans.md).

Each program is one warp, which decodes one chunk.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy
import torch
import triton
from triton import language as tl

from kvpack.formats.lossless import FLOAT_FORMATS, Lossless
from kvpack.formats.rans import LANES, PRECISION, TOTAL
from kvpack.kernels.bitpack import columns, rans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .rows import EnginePages, PackedPart

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_GROUP_INTEGERS = tl.constexpr(14)
"""Integers per token group in the work table (``_load_group``)."""

_TABLES_AT_ONCE = 1 << 8
"""Maximum number of tables whose slots are computed together. This takes about 100 bytes per slot."""


def decode_into(codec: Lossless, packed: Sequence[PackedPart], out: torch.Tensor, rotated: bool, pages: EnginePages | None = None) -> bool:
    """Decode ``packed`` into ``out`` ``[batch, kv_head, token, dim]`` with contiguous channels. Streams may have arbitrary strides.

    Values are exact in the codec's dtype and rounded in other dtypes. ``rotated`` is ignored, because the codec has no rotation. Invalid
    words decode to arbitrary values. Returns False if ``pages`` is given, because it is not supported. Raises InvalidParameter if a stream
    does not match ``codec.layout``.
    """
    if pages is not None:
        return False
    batch, heads = out.shape[:2]
    packed = [part for part in packed if part.tokens]
    if not packed or not out.numel():
        return True
    for part in packed:
        for name, layout in codec.layout(batch, heads, part.tokens).items():
            if name != "words":
                columns.check_shape(name, part.streams[name], layout.shape)
    in_plane = codec.dtype == "bf16" and dict(codec.fields)["signed_fractions"] == 2 and codec.dim % 2 == 0
    rows, keep_alive = _work_rows(codec, packed, in_plane)
    counts = [part.streams["word_counts"].view(torch.int16).permute(2, 0, 1).flatten() for part in packed]
    # Chunks are ordered by token group, then sequence, then head, and a page's first chunk begins at its first word.
    ends = torch.cat(counts).to(torch.int64).bitwise_and_(0xFFFF).cumsum(0)
    tables = torch.cat([part.streams["frequencies"].view(torch.int16).reshape(batch * heads, -1) for part in packed])
    fraction_bits, exponent_bits = FLOAT_FORMATS[codec.dtype]
    with torch.cuda.device(out.device) if out.device.type == "cuda" else nullcontext():
        _decode[(len(rows) * batch * heads,)](
            out, *out.stride()[:3], torch.from_numpy(rows).to(out.device, non_blocking=True), ends, _slot_tables(tables), heads,
            batch * heads, DIM=codec.dim, CHUNK_LANES=LANES, FRACTION_BITS=fraction_bits, EXPONENT_BITS=exponent_bits,
            BITS=PRECISION, IN_PLANE=in_plane, EXACT=out.dtype == _DTYPES[codec.dtype], num_warps=1, num_stages=1,
        )  # fmt: skip
    del keep_alive
    return True


def _work_rows(codec: Lossless, packed: Sequence[PackedPart], in_plane: bool) -> tuple[numpy.ndarray, list[torch.Tensor]]:
    """Return the work table, int64 ``[token group, integer]``, and the tensors whose addresses it contains."""
    keep_alive: list[torch.Tensor] = []

    def address_and_strides(tensor: torch.Tensor) -> list[int]:
        tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
        keep_alive.append(tensor)
        return [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:3])]

    rows = []
    first_chunk = 0
    for page_index, part in enumerate(packed):
        batch, heads, groups = part.streams["word_counts"].shape
        digits = address_and_strides(_digit_stream(codec, part.streams, in_plane))
        states = address_and_strides(part.streams["states"])
        words = address_and_strides(part.streams["words"])[0]
        for group in range(groups):
            group_start = group * codec.chunk
            row = [
                page_index,
                min(codec.chunk, part.tokens - group_start),
                part.first + group_start,
                first_chunk + group * batch * heads,
                first_chunk,
            ]
            row += [digits[0] + group_start * digits[3], *digits[1:], states[0] + group * states[3], *states[1:3]]
            rows.append([*row, words, part.streams["words"].numel()])
        first_chunk += groups * batch * heads
    return numpy.array(rows, dtype=numpy.int64), keep_alive


def _digit_stream(codec: Lossless, streams: Mapping[str, torch.Tensor], in_plane: bool) -> torch.Tensor:
    """Return the signs and fractions: one int16 per channel or, with ``in_plane``, the stored words, with two channels each."""
    if in_plane:
        return streams["signed_fractions.0"].view(torch.int16)
    packing = codec.packings()["signed_fractions"]
    planes = [streams[f"signed_fractions.{number}"] for number in range(len(packing.planes))]
    return columns.unpack(packing, planes)[0].to(torch.int16)


def _slot_tables(frequencies: torch.Tensor) -> torch.Tensor:
    """Return the slots of all frequency tables, int32 ``[table, slot]``: symbol, frequency - 1 and first slot (``rans.slot_table``).

    Readers reject tables that do not sum to ``TOTAL``. Even in such tables, every slot gets a symbol, so that kernels stay within bounds.
    """
    return torch.cat([_batch_slots(frequencies[first : first + _TABLES_AT_ONCE]) for first in range(0, len(frequencies), _TABLES_AT_ONCE)])


def _batch_slots(frequencies: torch.Tensor) -> torch.Tensor:
    counts = frequencies.to(torch.int64).bitwise_and_(0xFFFF)
    ends = counts.cumsum(1)
    slot = torch.arange(TOTAL, device=counts.device).expand(len(counts), TOTAL).contiguous()
    symbol = torch.searchsorted(ends, slot, right=True).clamp_max_(counts.shape[1] - 1)
    frequency = counts.gather(1, symbol)
    entries = symbol | (frequency - 1 & TOTAL - 1) << 8 | (ends.gather(1, symbol) - frequency & TOTAL - 1) << 20
    # Keep the low 32 bits, as a signed number.
    return torch.where(entries >= 1 << 31, entries - (1 << 32), entries).to(torch.int32)


@triton.jit
def _load_group(row: tl.tensor, batch: tl.tensor, head: tl.tensor, sequence: tl.tensor, ends: tl.tensor) -> tl.tuple:
    """Load the table entries of one chunk from the ``row`` of its token group."""
    chunk = tl.load(row + 3) + sequence
    first_chunk = tl.load(row + 4)
    word_offset = tl.load(ends + (chunk - 1), chunk > first_chunk, 0) - tl.load(
        ends + (first_chunk - 1), (chunk > first_chunk) & (first_chunk > 0), 0
    )
    digits = (tl.load(row + 5) + batch * tl.load(row + 6) + head * tl.load(row + 7)).to(tl.pointer_type(tl.int16))
    states = (tl.load(row + 9) + batch * tl.load(row + 10) + head * tl.load(row + 11)).to(tl.pointer_type(tl.int16))
    words = tl.load(row + 12).to(tl.pointer_type(tl.int16))
    return (
        tl.load(row), tl.load(row + 1).to(tl.int32), tl.load(row + 2), digits, tl.load(row + 8) // 2, states, words, word_offset,
        tl.load(row + 13),
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "sequences"])
def _decode(
    out: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    table: tl.tensor,
    ends: tl.tensor,
    slots: tl.tensor,
    heads: tl.tensor,
    sequences: tl.tensor,
    DIM: tl.constexpr,
    CHUNK_LANES: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    BITS: tl.constexpr,
    IN_PLANE: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Decode one chunk. In each step, every lane decodes one symbol.

    ``table`` is int64 ``[token group, _GROUP_INTEGERS]``. ``ends``, int64 ``[chunk]``, contains the cumulative word counts of all chunks.
    ``slots`` is int32 ``[table, slot]``.
    """
    sequence = (tl.program_id(0) % sequences).to(tl.int64)
    batch = sequence // heads
    head = sequence % heads
    row = table + (tl.program_id(0) // sequences).to(tl.int64) * _GROUP_INTEGERS
    page_index, tokens, first, digits, digit_stride, states, words, next_word, word_count = _load_group(row, batch, head, sequence, ends)
    slots += (page_index * sequences + sequence) << BITS
    target = out + batch * batch_stride + head * head_stride + first * token_stride
    lane = tl.arange(0, CHUNK_LANES)  # [lane], like all tensors below
    state = rans.load_states(states, lane)
    count = tokens * DIM
    for begin in range(0, count, CHUNK_LANES):
        position = begin + lane
        active = position < count
        entry = rans.load_entries(slots, state)
        state, next_word = rans.advance(state, entry, active, lane, words, next_word, word_count)
        token = position // DIM
        channel = position % DIM
        exponent = (entry & 0xFF).to(tl.int32)
        if IN_PLANE:
            digit = tl.load(digits + token * digit_stride + channel % (DIM // 2), active, 0).to(tl.int32)
            digit = digit >> (channel // (DIM // 2) * 8) & 0xFF
        else:
            digit = tl.load(digits + token * digit_stride + channel, active, 0).to(tl.int32)
        bits = digit >> FRACTION_BITS << (FRACTION_BITS + EXPONENT_BITS) | exponent << FRACTION_BITS | digit & ((1 << FRACTION_BITS) - 1)
        if EXACT:
            value = bits.to(tl.int16).to(out.dtype.element_ty, bitcast=True)
        elif EXPONENT_BITS == 8:
            value = (bits << 16).to(tl.float32, bitcast=True).to(out.dtype.element_ty)
        else:
            value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(out.dtype.element_ty)
        tl.store(target + (token * token_stride + channel), value, active)
