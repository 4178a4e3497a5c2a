"""group as tiles (spec/codecs/group.md): one affine step a field."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from triton import language as tl

from kvpack.formats.columns import is_power_of_two

from .axes import of_columns, of_tokens, parts_of, repeated, token_of_columns, tokens_behind, valid_columns
from .fields import load_per_token, load_planes, position_of_step, whole_planes, words_of_step
from .halves import affine, affine_bits, load_factors, middle_code, read_factors, scale_and_centre
from .tiles import Stream, Tiles, distance, fields_side_by_side, packing_constants, plane_streams, step_symbols, takes_whole_words

if TYPE_CHECKING:
    from kvpack.formats.group import Group

FEWEST_TOKENS, MOST_TOKENS = 16, 64
"""Of a tile whose tokens have ``MANY_PAIRS`` of scale and centre, and of one whose pairs are few."""

MANY_PAIRS = 32

MOST_PAIRS = 8
"""Of a token that a load is of, if a step does not need more."""

ALONG_TOKENS, ALONG_CHANNELS, WITHIN_FIELDS, EACH_VALUE = range(4)
"""Which pairs of scale and centre a tile needs: one a column, one a token, one a few neighbouring columns of a token, or one a value."""


def tiles(codec: Group, paired: int = 0) -> Tiles | None:
    """The loader of ``codec``, None where its packing has none. ``paired`` is that of the result."""
    packing = codec.packings()["codes"]
    if not takes_whole_words(packing):
        return None
    planes = plane_streams("codes", packing)
    along_tokens = codec.axis == "token"
    pairs_a_row = codec.dim if along_tokens else -(-codec.dim // codec.size)
    # Neighbouring fields may share a pair.
    apart = distance(packing, codec.bits, packing.fields, paired) if along_tokens or pairs_a_row == 1 else 1
    symbols = step_symbols(packing, apart, paired=paired)
    span = packing.width * fields_side_by_side(packing, paired)
    one_a_token = not along_tokens and (codec.size % span == 0 or pairs_a_row == 1)
    within_fields = WITHIN_FIELDS if span % codec.size == 0 else EACH_VALUE
    kind = ALONG_TOKENS if along_tokens else ALONG_CHANNELS if one_a_token else within_fields
    # Rows that cut into powers of two of pairs are loaded whole: a load costs as much, however little it is of.
    in_order = kind == ALONG_CHANNELS or (kind != EACH_VALUE and apart == 1 and len(symbols) * span == codec.dim)
    whole_rows = not paired and in_order and is_power_of_two(pairs_a_row)
    streams = (*planes, Stream("scales", 32, pairs_a_row, codec.size if along_tokens else 1))
    scale_bits = {"none": 0, "fp16": 16, "fp32": 32}[codec.token_scale]
    if scale_bits:
        streams = (*streams, Stream("token_scale", scale_bits, 1))
    most_tokens = MOST_TOKENS
    if kind == WITHIN_FIELDS and pairs_a_row >= MANY_PAIRS:
        most_tokens = FEWEST_TOKENS
    elif kind > ALONG_CHANNELS or (along_tokens and codec.size % MOST_TOKENS):
        most_tokens = Tiles.most_tokens
    constants = (
        packing_constants(0, packing, paired), codec.bits, fields_side_by_side(packing, paired), codec.dim, codec.size, kind, along_tokens,
        pairs_a_row, span, scale_bits, len(symbols), len(planes), apart, whole_rows,
    )  # fmt: skip
    return Tiles(
        load,
        decode,
        factor if scale_bits else None,
        constants,
        len(symbols),
        symbols,
        streams,
        whole_groups=codec.size if along_tokens else 1,
        most_tokens=most_tokens,
        packings=(packing,),
        paired=paired,
    )


@triton.jit
def load(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Planes, then the pairs of each step, then the token scale. ``WHOLE``: every warp's tokens lie in one token group."""
    PACKING: tl.constexpr = C[0]
    DIM: tl.constexpr = C[3]
    SIZE: tl.constexpr = C[4]
    KIND: tl.constexpr = C[5]
    PAIRS: tl.constexpr = C[7]
    SPAN: tl.constexpr = C[8]
    STEPS: tl.constexpr = C[10]
    PLANES: tl.constexpr = C[11]
    PAD: tl.constexpr = PACKING[3]
    PAIRED: tl.constexpr = PACKING[5]
    BEHIND: tl.constexpr = tokens_behind(PAIRED, token.shape[1])
    pairs = pointers[PLANES]
    raw = load_planes(pointers, first, token, valid, PACKING, MASKED, TURNED)
    # Of columns that share a pair, the first.
    SHARING: tl.constexpr = SIZE if KIND == 2 else 1
    column = tl.arange(0, PAD // SHARING) * SHARING
    second = column[None, :] // (PAD // 2)
    if PAIRED:
        column = column % PACKING[2]
    WHOLE_ROWS: tl.constexpr = C[13] and (KIND > 0 or WHOLE)
    if WHOLE_ROWS:
        raw = raw + _pairs_of_rows(pairs, first, token, valid, C, MASKED, TURNED)
    for step in tl.static_range(0 if WHOLE_ROWS else STEPS):
        channel = _channel(step, column, SPAN, PACKING[2], C[12])
        if KIND == 0 and WHOLE:
            # The first token of each warp stands for all of its own.
            row = tl.min(token, 1)[:, None]
            if PAIRED:
                row = row + second * BEHIND
            row = (first + row) // SIZE
            mask = (channel < DIM)[None, :]
            if MASKED:
                if PAIRED:
                    mask = mask & tl.where(second == 0, _any(valid[0]), _any(valid[1]))
                else:
                    mask = mask & _any(valid)
            raw = raw + (tl.load(pairs + row * PAIRS + channel[None, :], mask, 0),)
        elif KIND == 1 and PAIRED:
            both = tl.arange(0, 2)[None, :]
            place = pairs + first * PAIRS + (token_of_columns(token, both, BEHIND, TURNED) * PAIRS + step * SPAN // SIZE)
            if MASKED:
                raw = raw + (tl.load(place, valid_columns(valid, both, BEHIND, TURNED), 0),)
            else:
                raw = raw + (tl.load(place),)
        elif KIND == 1:
            raw = raw + (load_per_token(pairs, first, token, valid, PAIRS, step * SPAN // SIZE, MASKED),)
        else:
            row = first + token_of_columns(token, second, BEHIND, TURNED)
            at = of_columns(channel[None, :], TURNED)
            if KIND == 0:
                row = row // SIZE
            else:
                at = at // SIZE
            mask = of_columns((channel < DIM)[None, :], TURNED)
            if MASKED:
                mask = mask & valid_columns(valid, second, BEHIND, TURNED)
            raw = raw + (tl.load(pairs + row * PAIRS + at, mask, 0),)
    if C[9]:
        raw = raw + load_factors(pointers[PLANES + 1], first, token, valid, C[9], PAIRED, MASKED, FAST)
    return raw


@triton.constexpr_function
def _pairs_together(pairs: int, each: int) -> int:
    """Of a token's ``pairs``, how many a load is of: few enough that eight tokens' lie in few rows of the banks of shared memory."""
    return min(pairs, max(each, MOST_PAIRS))


@triton.jit
def _pairs_of_rows(
    pairs: tl.tensor, first: tl.tensor, token: tl.tensor, valid: tl.tensor, C: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr
) -> tl.tuple:
    """The pairs of each step, from rows: those of each token, or the one that a warp's tokens share."""
    SIZE: tl.constexpr = C[4]
    PAIRS: tl.constexpr = C[7]
    STEPS: tl.constexpr = C[10]
    found = ()
    if C[6]:
        # The first token of each warp stands for all of its own.
        place = pairs + ((first + tl.min(token, 1)[:, None]) // SIZE * PAIRS + tl.arange(0, PAIRS)[None, :])
        if MASKED:
            row = tl.load(place, _any(valid), 0)
        else:
            row = tl.load(place)
        found = parts_of(tl.trans(tl.reshape(row, (row.shape[0], STEPS, PAIRS // STEPS)), 0, 2, 1))
    else:
        # Of a step, one for the columns that share it.
        EACH: tl.constexpr = PAIRS // STEPS if C[5] == 2 else 1
        COUNT: tl.constexpr = _pairs_together(PAIRS, EACH)
        parts = ()
        for number in tl.static_range(PAIRS // COUNT):
            place = pairs + first * PAIRS + (token[:, :, None] * PAIRS + (number * COUNT + tl.arange(0, COUNT))[None, None, :])
            if MASKED:
                row = tl.load(place, valid[:, :, None], 0)
            else:
                row = tl.load(place)
            if C[5] == 2:
                row = tl.reshape(row, (row.shape[0], row.shape[1], COUNT // EACH, EACH))
                if TURNED:
                    row = tl.trans(row, 0, 3, 1, 2)
                else:
                    row = tl.trans(row, 0, 1, 3, 2)
            parts = parts + parts_of(row)
        for step in tl.static_range(STEPS):
            found = found + (parts[step if C[5] == 2 else step * C[8] // SIZE],)
    return found


@triton.jit
def _any(valid: tl.tensor) -> tl.tensor:
    """Whether a warp has a valid token, ``[warp, 1]``."""
    return (tl.max(valid.to(tl.int32), 1) > 0)[:, None]


@triton.jit
def _channel(step: tl.constexpr, column: tl.tensor, SPAN: tl.constexpr, WIDTH: tl.constexpr, APART: tl.constexpr) -> tl.tensor:
    """The channel of each column of a step (``tiles.step_symbols``)."""
    if APART > 1:
        channel = (step + column // WIDTH * APART) * WIDTH + column % WIDTH
    else:
        channel = step * SPAN + column
    return channel


@triton.jit
def decode(
    raw: tl.tuple,
    places: tl.tuple,
    table: tl.tensor,
    STEP: tl.constexpr,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """(code - middle) * scale + centre of the fields of ``STEP``."""
    PACKING: tl.constexpr = C[0]
    BITS: tl.constexpr = C[1]
    BESIDE: tl.constexpr = C[2]
    KIND: tl.constexpr = C[5]
    PLANES: tl.constexpr = C[11]
    planes = whole_planes(raw, places, 0, PACKING, TURNED, FAST)
    pair = raw[PLANES + STEP]
    scale, centre = scale_and_centre(pair, FAST)
    if KIND == 2 or (KIND == 1 and PACKING[5]):
        COPIES: tl.constexpr = C[4] if KIND == 2 else PACKING[2]
        scale = repeated(scale, COPIES, TURNED)
        centre = repeated(centre, COPIES, TURNED)
    elif KIND == 1:
        scale = of_tokens(scale, TURNED)
        centre = of_tokens(centre, TURNED)
    elif len(pair.shape) == 2:
        scale = of_columns(scale, TURNED)
        centre = of_columns(centre, TURNED)
    if BESIDE == 1:
        value = affine_bits(planes, scale, centre, STEP * BITS, BITS, middle_code(BITS), FAST)
    else:
        words = words_of_step(planes, places, 0, PACKING, 0, BITS, STEP, BESIDE, C[12], PACKING[4], TURNED, FAST)
        value = affine(words, scale, centre, position_of_step(STEP, BITS, C[12]), BITS, middle_code(BITS), FAST)
    return (value,)


@triton.jit
def factor(raw: tl.tuple, C: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The token scale."""
    PACKING: tl.constexpr = C[0]
    return read_factors(raw, C[11] + C[10], C[9], PACKING[5], FAST)
