"""group as tiles (spec/codecs/group.md): one affine step a field."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.formats.columns import is_power_of_two
from kvpack.kernels.words.axes import of_columns, of_tokens, parts_of, repeated, token_of_columns, tokens_behind, valid_columns
from kvpack.kernels.words.fields import load_per_token, load_planes, position_of_step, whole_planes, words_of_step
from kvpack.kernels.words.halves import affine, affine_bits, load_factors, middle_code, read_factors, scale_and_centre

from .tiles import Stream, TilePacking, Tiles, distance, fields_side_by_side, plane_streams, step_symbols, takes_whole_words, tile_packing

if TYPE_CHECKING:
    from kvpack.formats.group import Group

FEWEST_TOKENS, MOST_TOKENS = 16, 64
"""Of a tile whose tokens have ``MANY_PAIRS`` of scale and centre, and of one whose pairs are few."""

MANY_PAIRS = 32

MOST_PAIRS = 8
"""Of a token that a load is of, if a step does not need more."""

ALONG_TOKENS, ALONG_CHANNELS, WITHIN_FIELDS, EACH_VALUE = (tl.constexpr(number) for number in range(4))
"""Which pairs of scale and centre a tile needs: one a column, one a token, one a few neighbouring columns of a token, or one a value."""


class Constants(NamedTuple):
    """What the functions below know of a codec and its tiles when they are compiled.

    A row of the stream of scales has ``pairs`` of scale and centre; ``kind`` says which of them a tile needs, and ``whole_rows``
    whether rows are loaded whole. A step makes one tile of ``beside`` fields of ``bits``, ``apart`` fields from each other, in
    ``span`` columns.
    """

    packing: TilePacking
    bits: int
    beside: int
    dim: int
    size: int
    kind: int
    along_tokens: bool
    pairs: int
    span: int
    scale_bits: int
    steps: int
    planes: int
    apart: int
    whole_rows: bool


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
    if along_tokens:
        kind = ALONG_TOKENS.value
    elif one_a_token:
        kind = ALONG_CHANNELS.value
    else:
        kind = WITHIN_FIELDS.value if span % codec.size == 0 else EACH_VALUE.value
    # Rows that cut into powers of two of pairs are loaded whole: a load costs as much, however little it is of.
    in_order = kind == ALONG_CHANNELS.value or (kind != EACH_VALUE.value and apart == 1 and len(symbols) * span == codec.dim)
    whole_rows = not paired and in_order and is_power_of_two(pairs_a_row)
    streams = (*planes, Stream("scales", 32, pairs_a_row, codec.size if along_tokens else 1))
    scale_bits = {"none": 0, "fp16": 16, "fp32": 32}[codec.token_scale]
    if scale_bits:
        streams = (*streams, Stream("token_scale", scale_bits, 1))
    most_tokens = MOST_TOKENS
    if kind == WITHIN_FIELDS.value and pairs_a_row >= MANY_PAIRS:
        most_tokens = FEWEST_TOKENS
    elif kind > ALONG_CHANNELS.value or (along_tokens and codec.size % MOST_TOKENS):
        most_tokens = Tiles.most_tokens
    constants = Constants(
        packing=tile_packing(0, packing, paired),
        bits=codec.bits,
        beside=fields_side_by_side(packing, paired),
        dim=codec.dim,
        size=codec.size,
        kind=kind,
        along_tokens=along_tokens,
        pairs=pairs_a_row,
        span=span,
        scale_bits=scale_bits,
        steps=len(symbols),
        planes=len(planes),
        apart=apart,
        whole_rows=whole_rows,
    )
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
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Planes, then the pairs of each step, then the token scale. ``WHOLE``: every warp's tokens lie in one token group."""
    PACKING: tl.constexpr = CONSTANTS.packing
    DIM: tl.constexpr = CONSTANTS.dim
    SIZE: tl.constexpr = CONSTANTS.size
    KIND: tl.constexpr = CONSTANTS.kind
    PAIRS: tl.constexpr = CONSTANTS.pairs
    SPAN: tl.constexpr = CONSTANTS.span
    STEPS: tl.constexpr = CONSTANTS.steps
    PLANES: tl.constexpr = CONSTANTS.planes
    PAD: tl.constexpr = PACKING.tile_width
    PAIRED: tl.constexpr = PACKING.paired
    BEHIND: tl.constexpr = tokens_behind(PAIRED, token.shape[1])
    pairs = pointers[PLANES]
    raw = load_planes(pointers, first, token, valid, PACKING, MASKED, TURNED)
    # Of columns that share a pair, the first.
    SHARING: tl.constexpr = SIZE if KIND == WITHIN_FIELDS else 1
    column = tl.arange(0, PAD // SHARING) * SHARING
    second = column[None, :] // (PAD // 2)
    if PAIRED:
        column = column % PACKING.width
    WHOLE_ROWS: tl.constexpr = CONSTANTS.whole_rows and (KIND > ALONG_TOKENS or WHOLE)
    if WHOLE_ROWS:
        raw = raw + _pairs_of_rows(pairs, first, token, valid, CONSTANTS, MASKED, TURNED)
    for step in tl.static_range(0 if WHOLE_ROWS else STEPS):
        channel = _channel(step, column, SPAN, PACKING.width, CONSTANTS.apart)
        if KIND == ALONG_TOKENS and WHOLE:
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
        elif KIND == ALONG_CHANNELS and PAIRED:
            both = tl.arange(0, 2)[None, :]
            place = pairs + first * PAIRS + (token_of_columns(token, both, BEHIND, TURNED) * PAIRS + step * SPAN // SIZE)
            if MASKED:
                raw = raw + (tl.load(place, valid_columns(valid, both, BEHIND, TURNED), 0),)
            else:
                raw = raw + (tl.load(place),)
        elif KIND == ALONG_CHANNELS:
            raw = raw + (load_per_token(pairs, first, token, valid, PAIRS, step * SPAN // SIZE, MASKED),)
        else:
            row = first + token_of_columns(token, second, BEHIND, TURNED)
            at = of_columns(channel[None, :], TURNED)
            if KIND == ALONG_TOKENS:
                row = row // SIZE
            else:
                at = at // SIZE
            mask = of_columns((channel < DIM)[None, :], TURNED)
            if MASKED:
                mask = mask & valid_columns(valid, second, BEHIND, TURNED)
            raw = raw + (tl.load(pairs + row * PAIRS + at, mask, 0),)
    if CONSTANTS.scale_bits:
        raw = raw + load_factors(pointers[PLANES + 1], first, token, valid, CONSTANTS.scale_bits, PAIRED, MASKED, FAST)
    return raw


@triton.constexpr_function
def _pairs_together(pairs: int, each: int) -> int:
    """Of a token's ``pairs``, how many a load is of: few enough that eight tokens' lie in few rows of the banks of shared memory."""
    return min(pairs, max(each, MOST_PAIRS))


@triton.jit
def _pairs_of_rows(
    pairs: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
) -> tl.tuple:
    """The pairs of each step, from rows: those of each token, or the one that a warp's tokens share."""
    SIZE: tl.constexpr = CONSTANTS.size
    PAIRS: tl.constexpr = CONSTANTS.pairs
    STEPS: tl.constexpr = CONSTANTS.steps
    found = ()
    if CONSTANTS.along_tokens:
        # The first token of each warp stands for all of its own.
        place = pairs + ((first + tl.min(token, 1)[:, None]) // SIZE * PAIRS + tl.arange(0, PAIRS)[None, :])
        if MASKED:
            row = tl.load(place, _any(valid), 0)
        else:
            row = tl.load(place)
        found = parts_of(tl.trans(tl.reshape(row, (row.shape[0], STEPS, PAIRS // STEPS)), 0, 2, 1))
    else:
        # Of a step, one for the columns that share it.
        EACH: tl.constexpr = PAIRS // STEPS if CONSTANTS.kind == WITHIN_FIELDS else 1
        COUNT: tl.constexpr = _pairs_together(PAIRS, EACH)
        parts = ()
        for number in tl.static_range(PAIRS // COUNT):
            place = pairs + first * PAIRS + (token[:, :, None] * PAIRS + (number * COUNT + tl.arange(0, COUNT))[None, None, :])
            if MASKED:
                row = tl.load(place, valid[:, :, None], 0)
            else:
                row = tl.load(place)
            if CONSTANTS.kind == WITHIN_FIELDS:
                row = tl.reshape(row, (row.shape[0], row.shape[1], COUNT // EACH, EACH))
                if TURNED:
                    row = tl.trans(row, 0, 3, 1, 2)
                else:
                    row = tl.trans(row, 0, 1, 3, 2)
            parts = parts + parts_of(row)
        for step in tl.static_range(STEPS):
            found = found + (parts[step if CONSTANTS.kind == WITHIN_FIELDS else step * CONSTANTS.span // SIZE],)
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
    CONSTANTS: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """(code - middle) * scale + centre of the fields of ``STEP``."""
    PACKING: tl.constexpr = CONSTANTS.packing
    BITS: tl.constexpr = CONSTANTS.bits
    BESIDE: tl.constexpr = CONSTANTS.beside
    KIND: tl.constexpr = CONSTANTS.kind
    PLANES: tl.constexpr = CONSTANTS.planes
    planes = whole_planes(raw, places, 0, PACKING, TURNED, FAST)
    pair = raw[PLANES + STEP]
    scale, centre = scale_and_centre(pair, FAST)
    if KIND == WITHIN_FIELDS or (KIND == ALONG_CHANNELS and PACKING.paired):
        COPIES: tl.constexpr = CONSTANTS.size if KIND == WITHIN_FIELDS else PACKING.width
        scale = repeated(scale, COPIES, TURNED)
        centre = repeated(centre, COPIES, TURNED)
    elif KIND == ALONG_CHANNELS:
        scale = of_tokens(scale, TURNED)
        centre = of_tokens(centre, TURNED)
    elif len(pair.shape) == 2:
        scale = of_columns(scale, TURNED)
        centre = of_columns(centre, TURNED)
    if BESIDE == 1:
        value = affine_bits(planes, scale, centre, STEP * BITS, BITS, middle_code(BITS), FAST)
    else:
        words = words_of_step(planes, places, 0, PACKING, 0, BITS, STEP, BESIDE, CONSTANTS.apart, PACKING.fields, TURNED, FAST)
        value = affine(words, scale, centre, position_of_step(STEP, BITS, CONSTANTS.apart), BITS, middle_code(BITS), FAST)
    return (value,)


@triton.jit
def factor(raw: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The token scale."""
    PACKING: tl.constexpr = CONSTANTS.packing
    return read_factors(raw, CONSTANTS.planes + CONSTANTS.steps, CONSTANTS.scale_bits, PACKING.paired, FAST)
