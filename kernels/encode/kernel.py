"""The kernel that encodes rows: it loads them, rotates them to the coded frame, and packs the digits that a codec computes.

A codec contributes its ``Quantizer``: up to four Triton functions and their constants. A rotation is a matrix-unit product.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.kernels.bitpack.columns import launch, tile_origin
from kvpack.kernels.triton_internals import code_key

from .columns import WARPS, Plan, add_digits, empty_columns, plan_of, store_columns
from .rows import all_moved, component, components, input_of, load_rows, origin_of, scale_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpack.formats.base import Codec

    from .columns import Stream, Term
    from .rows import Origins


class Output(NamedTuple):
    """The memory that an encoder fills: a codec's ``streams``, and the code ``planes`` in the form that kernels write.

    ``flag``, int32 ``[1]``, is raised where ``formats/`` must encode. With ``origins``, streams and flag are those of the first batch
    entry.
    """

    streams: Mapping[str, torch.Tensor]
    planes: tuple[torch.Tensor, ...]
    flag: torch.Tensor
    origins: Origins | None = None


def output_of(codec: Codec, streams: Mapping[str, torch.Tensor], flag: torch.Tensor, origins: Origins | None = None) -> Output:
    """Return the output with these ``streams`` of ``codec``."""
    planes: list[torch.Tensor] = []
    for name, packing in codec.packings().items():
        words = [streams[f"{name}.{plane}"] for plane in range(len(packing.planes))]
        planes += words if packing.column_bytes % 2 == 0 else [*words[:-1], words[-1].view(torch.uint8)]
    return Output(streams, tuple(planes), flag, origins)


class Quantizer(NamedTuple):
    """A codec's functions, for which the kernel is compiled, and the ``constants`` that they all receive, a tuple of numbers.

    ``quantize(values, block, state, number, constants, shape)`` returns the digits of a block of symbols, int32 ``[token, symbol]`` each,
    and the next state; ``values`` are float32 ``[token, symbol]``, one tile for each coordinate of a symbol. ``above(block, state, level,
    constants, shape)`` returns the same for the symbols of each level above the first, if there are ``levels``. ``begin(block, constants,
    shape)`` returns the first state, and ``end(block, state, constants, shape)`` stores what belongs to whole tokens. ``block`` is a
    ``TokenBlock``, and ``shape`` a ``Shape``.
    """

    quantize: Any
    constants: tuple[Any, ...]
    begin: Any = None
    end: Any = None
    above: Any = None
    levels: int = 1

    @property
    def cache_key(self) -> str:
        """Key by which Triton names compiled code."""
        return code_key(self)


class Shape(NamedTuple):
    """Constants of a launch: ``dim`` channels in rows of ``padded_dim``, ``tokens`` per program, and ``blocks`` of ``block`` symbols.

    ``symbols`` counts those of all levels. Products with ``components`` use ``parts`` of a value in the type ``operand``, and are then
    multiplied by ``scale``; each symbol has ``coordinates``. The digits go to ``streams``, which is empty for a quantizer without digits.
    """

    dim: int
    padded_dim: int
    parts: int
    operand: Any
    scale: float
    coordinates: int
    symbols: int
    block: int
    blocks: int
    tokens: int
    streams: tuple[Stream, ...]


class TokenBlock(NamedTuple):
    """The tokens of a program, from one ``head`` of one sequence: ``token`` are their numbers from ``first`` on, of ``tokens``.

    ``token``, ``row`` (their numbers over all heads) and ``valid`` are ``[token, 1]``. ``rows`` are their values ``[token, channel]``, or
    pointers to these if nothing is rotated. The sequence has index ``batch`` in the ``stored`` streams of scales, and ``sequence`` in the
    other ``tables``.
    """

    rows: Any
    token: Any
    row: Any
    valid: Any
    first: Any
    head: Any
    batch: Any
    sequence: Any
    heads: Any
    tokens: Any
    stored: Any
    tables: Any
    flag: Any


def encode_rows(
    codec: Codec,
    x: torch.Tensor,
    output: Output,
    quantizer: Quantizer,
    terms: Callable[[Any], Mapping[str, Sequence[Term]]],
    stored: Sequence[torch.Tensor],
    tables: Sequence[Any] = (),
    *,
    symbols: int,
    tokens: int,
    coordinates: int = 1,
    block: int = 0,
    padding: int = 0,
    rotated: bool = True,
    packs: bool = True,
    warps: int = WARPS,
    fusion: bool = True,
) -> bool:
    """Encode ``x`` to ``output``. Returns False, and does nothing, if the digits of ``codec`` cannot be packed here.

    A program encodes ``tokens`` tokens, ``block`` (0: all) of their ``symbols`` at a time, of ``coordinates`` values each; ``padding``
    counts further symbols, of levels above the first. ``terms(codec)`` is the input of ``plan_of``, ``stored`` are the streams of scales,
    and ``tables`` the quantizer's other tensors and numbers. Without ``packs`` it has no digits. ``fusion`` is passed to ``launch``.
    """
    plan = _plan(codec, terms, symbols + padding, x.device)
    if plan is None:
        return False
    block = block or symbols
    arguments, constants = input_of(x, output.origins)
    launch(
        _encode, x.shape[0] * x.shape[1] * -(-x.shape[2] // tokens), x.device,
        *arguments, components(codec.rotation, coordinates, symbols, block, x) if rotated else None, plan.places, output.planes,
        tuple(stored), tuple(tables) or (output.flag,), output.flag,
        ALIGNED=constants["ALIGNED"], QUANTIZER=quantizer,
        SHAPE=Shape(
            constants["DIM"], constants["PADDED_DIM"], constants["PARTS"], constants["OPERAND"], scale_of(codec.rotation), coordinates,
            symbols + padding, block, symbols // block, tokens, plan.streams if packs else (),
        ), warps=warps, fusion=fusion,
    )  # fmt: skip
    return True


@lru_cache(maxsize=256)
def _plan(codec: Codec, terms: Callable[[Any], Mapping[str, Sequence[Term]]], symbols: int, device: torch.device) -> Plan | None:
    return plan_of(codec, terms(codec), symbols, device)


@triton.jit
def _encode(
    x: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    origins: tl.tensor,
    matrix: tl.tensor,
    places: tl.tensor,
    planes: tl.tuple,
    stored: tl.tuple,
    tables: tl.tuple,
    flag: tl.tensor,
    ALIGNED: tl.constexpr,
    QUANTIZER: tl.constexpr,
    SHAPE: tl.constexpr,
) -> None:
    """Encode ``SHAPE.tokens`` tokens of one head; ``x`` is ``[batch, kv_head, token, dim]`` of any strides.

    Without a ``matrix`` of ``components``, values are loaded directly, block by block.
    """
    CONSTANTS: tl.constexpr = QUANTIZER.constants
    LEVELS: tl.constexpr = QUANTIZER.levels
    STREAMS: tl.constexpr = SHAPE.streams
    SYMBOLS: tl.constexpr = SHAPE.symbols
    BLOCK: tl.constexpr = SHAPE.block
    BLOCKS: tl.constexpr = SHAPE.blocks
    BLOCK_TOKENS: tl.constexpr = SHAPE.tokens
    DIM: tl.constexpr = SHAPE.dim
    PADDED_DIM: tl.constexpr = SHAPE.padded_dim
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    sequence = batch
    if origins is not None:
        origin = origin_of(origins, batch, ALIGNED)
        x += origin.input
        planes = all_moved(planes, origin.streams)
        stored = all_moved(stored, origin.streams)
        flag += origin.flag
        batch = batch * 0
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    valid = token < tokens
    row = (batch * heads + head) * tokens + token
    if matrix is None:
        rows = x + batch * batch_stride + head * head_stride + token * token_stride
    else:
        rows = load_rows(x, batch_stride, head_stride, token_stride, channel_stride, batch, head, token, valid, DIM, PADDED_DIM)
    block = TokenBlock(rows, token, row, valid, first, head, batch, sequence, heads, tokens, stored, tables, flag)
    state = ()
    if QUANTIZER.begin is not None:
        state = QUANTIZER.begin(block, CONSTANTS, SHAPE)
    sums = empty_columns(STREAMS, BLOCK_TOKENS)
    if BLOCKS == 1:
        values = _values(rows, valid, matrix, channel_stride, 0, SHAPE)
        digits, state = QUANTIZER.quantize(values, block, state, 0, CONSTANTS, SHAPE)
        sums = add_digits(sums, digits, places, 0, BLOCK, SYMBOLS, STREAMS)
    else:
        for number in range(BLOCKS):
            values = _values(rows, valid, matrix, channel_stride, number, SHAPE)
            digits, state = QUANTIZER.quantize(values, block, state, number, CONSTANTS, SHAPE)
            sums = add_digits(sums, digits, places, number * BLOCK, BLOCK, SYMBOLS, STREAMS)
    at = BLOCKS * BLOCK
    for level in tl.static_range(1, LEVELS):
        digits, state = QUANTIZER.above(block, state, level, CONSTANTS, SHAPE)
        sums = add_digits(sums, digits, places, at, digits[0].shape[1], SYMBOLS, STREAMS)
        at += digits[0].shape[1]
    if QUANTIZER.end is not None:
        QUANTIZER.end(block, state, CONSTANTS, SHAPE)
    store_columns(sums, planes, row, valid, STREAMS)


@triton.jit
def _values(
    rows: tl.tensor, valid: tl.tensor, matrix: tl.tensor | None, channel_stride: tl.tensor, number: tl.tensor, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the coordinates of block ``number``, float32 ``[token, symbol]`` each."""
    BLOCK: tl.constexpr = SHAPE.block
    COORDINATES: tl.constexpr = SHAPE.coordinates
    PADDED_DIM: tl.constexpr = SHAPE.padded_dim
    PARTS: tl.constexpr = SHAPE.parts
    OPERAND: tl.constexpr = SHAPE.operand
    values = ()
    if matrix is None:
        channel = number * BLOCK + tl.arange(0, BLOCK)[None, :]
        place = rows + channel.to(tl.int64) * channel_stride
        values = values + (tl.load(place, valid & (channel < SHAPE.dim), 0.0).to(tl.float32),)
    else:
        for coordinate in tl.static_range(COORDINATES):
            values = values + (component(rows, matrix, COORDINATES * number + coordinate, BLOCK, PADDED_DIM, PARTS, OPERAND),)
    return values
