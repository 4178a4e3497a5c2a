"""The kernel that encodes tokens in one pass, with a ``Quantizer`` per codec.

The kernel loads rows of values, rotates them to the coded frame with a matrix product, lets the quantizer compute digits, and packs the
digits.
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

from .columns import WARPS, PackingPlan, StreamPacking, Term, add_digits, empty_columns, plan_packing, store_columns
from .rows import coordinate_matrices, input_arguments, load_origin, load_rows, move_pointers, multiply_coordinates, rotation_scale

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpack.formats.base import Codec

    from .rows import BatchOffsets


class Output(NamedTuple):
    """Memory that an encoder writes: a codec's ``streams``, and their code ``planes``, viewed in the dtype that kernels write.

    ``flag``, int32 ``[1]``, is set if ``formats/`` must encode the input instead. With ``origins``, streams and flag belong to the first
    batch entry. If the codec has ``direction_spread`` and ``errors`` is given, the relative errors of tokens are written to it, float32
    ``[batch, kv_head, token]``.
    """

    streams: dict[str, torch.Tensor]
    planes: tuple[torch.Tensor, ...]
    flag: torch.Tensor
    origins: BatchOffsets | None = None
    errors: torch.Tensor | None = None


def create_output(
    codec: Codec,
    streams: dict[str, torch.Tensor],
    flag: torch.Tensor,
    origins: BatchOffsets | None = None,
    errors: torch.Tensor | None = None,
) -> Output:
    """Create the ``Output`` for the ``streams`` of ``codec``. Planes of bytes are viewed as uint8."""
    planes: list[torch.Tensor] = []
    for name, packing in codec.packings().items():
        words = [streams[f"{name}.{plane}"] for plane in range(len(packing.planes))]
        planes += words if packing.column_bytes % 2 == 0 else [*words[:-1], words[-1].view(torch.uint8)]
    return Output(streams, tuple(planes), flag, origins, errors)


class Quantizer(NamedTuple):
    """Triton functions of a codec, which the kernel is compiled for, and their compile-time ``constants``.

    - ``quantize(values, block, state, index, constants, shape)`` returns the digits of symbol block ``index``, int32
      ``[token, symbol]`` each, and the next state; ``values`` are float32 ``[token, symbol]``, one tile per coordinate of a symbol.
    - ``above(block, state, level, constants, shape)`` does the same for each level above the first, if there are several ``levels``.
    - ``begin(block, constants, shape)`` returns the initial state.
    - ``measure`` is optional. It has the arguments of ``quantize``, is called for all blocks first, and returns the next state;
      ``decide(state, constants, shape)`` then returns the state for the first call of ``quantize``.
    - ``end(block, state, constants, shape)`` stores results per token.

    ``block`` is a ``TokenBlock``, and ``shape`` an ``EncodeShape``.
    """

    quantize: Any
    constants: tuple[Any, ...]
    begin: Any = None
    end: Any = None
    above: Any = None
    levels: int = 1
    measure: Any = None
    decide: Any = None

    @property
    def cache_key(self) -> str:
        """Key of this constant in Triton's cache of compiled code."""
        return code_key(self)


class EncodeShape(NamedTuple):
    """Compile-time shape of a launch: rows of ``dim`` channels padded to ``padded_dim``, and ``tokens`` tokens per program.

    Symbols of ``coordinates`` coordinates are encoded in ``blocks`` blocks of ``block`` symbols; ``symbols`` counts the symbols of all
    levels. Matrix products split each value into ``parts`` numbers of type ``operand``, and are scaled by ``scale``. Digits are packed into
    ``streams``, which is empty for a quantizer without digits. ``measured`` is True if the errors of tokens are stored.
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
    streams: tuple[StreamPacking, ...]
    measured: bool


class TokenBlock(NamedTuple):
    """The tokens of a program: consecutive tokens of one head and sequence, beginning with token ``first``.

    ``token`` (index in the sequence), ``row`` (index over all heads) and ``valid`` are ``[token, 1]``. ``rows`` are the values ``[token,
    channel]``, or pointers to them if nothing is rotated. The sequence has index ``batch`` in the ``stored`` streams of scales, and index
    ``sequence`` in ``tables``. If errors are measured, ``errors`` are the addresses of the tokens' errors, ``[token, 1]``.
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
    errors: Any


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
    """Encode ``x`` into ``output`` with ``quantizer``. Returns False, and writes nothing, if digits cannot be packed exactly.

    A program encodes ``tokens`` tokens, ``block`` symbols at a time (0 for all ``symbols``), with ``coordinates`` values each. ``padding``
    counts symbols of levels above the first. ``terms(codec)`` is the input of ``plan_packing``, ``stored`` are the streams of scales, and
    ``tables`` are the quantizer's other tensors and numbers. ``packs`` is False if the quantizer returns no digits. ``fusion`` is passed to
    ``launch``.
    """
    plan = _cached_plan(codec, terms, symbols + padding, x.device)
    if plan is None:
        return False
    block = block or symbols
    arguments, constants = input_arguments(x, output.origins)
    launch(
        _encode, x.shape[0] * x.shape[1] * -(-x.shape[2] // tokens), x.device,
        *arguments, coordinate_matrices(codec.rotation, coordinates, symbols, block, x) if rotated else None, plan.place_values,
        output.planes,
        tuple(stored), tuple(tables) or (output.flag,), output.flag, output.flag if output.errors is None else output.errors,
        ALIGNED=constants["ALIGNED"], QUANTIZER=quantizer,
        SHAPE=EncodeShape(
            constants["DIM"], constants["PADDED_DIM"], constants["PARTS"], constants["OPERAND"], rotation_scale(codec.rotation),
            coordinates, symbols + padding, block, symbols // block, tokens, plan.streams if packs else (),
            output.errors is not None,
        ), warps=warps, fusion=fusion,
    )  # fmt: skip
    return True


@lru_cache(maxsize=256)
def _cached_plan(
    codec: Codec, terms: Callable[[Any], Mapping[str, Sequence[Term]]], symbols: int, device: torch.device
) -> PackingPlan | None:
    return plan_packing(codec, terms(codec), symbols, device)


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
    place_values: tl.tensor,
    planes: tl.tuple,
    stored: tl.tuple,
    tables: tl.tuple,
    flag: tl.tensor,
    errors: tl.tensor,
    ALIGNED: tl.constexpr,
    QUANTIZER: tl.constexpr,
    SHAPE: tl.constexpr,
) -> None:
    """Encode ``SHAPE.tokens`` tokens of one head. ``x`` is ``[batch, kv_head, token, dim]`` with arbitrary strides.

    ``matrix`` comes from ``coordinate_matrices``. If it is None, values are loaded directly, block by block.
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
        origin = load_origin(origins, batch, ALIGNED)
        x += origin.input
        planes = move_pointers(planes, origin.streams)
        stored = move_pointers(stored, origin.streams)
        flag += origin.flag
        batch = batch * 0
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    valid = token < tokens
    row = (batch * heads + head) * tokens + token
    if matrix is None:
        rows = x + batch * batch_stride + head * head_stride + token * token_stride
    else:
        rows = load_rows(x, batch_stride, head_stride, token_stride, channel_stride, batch, head, token, valid, DIM, PADDED_DIM)
    errors += (sequence * heads + head) * tokens + token
    block = TokenBlock(rows, token, row, valid, first, head, batch, sequence, heads, tokens, stored, tables, flag, errors)
    state = ()
    if QUANTIZER.begin is not None:
        state = QUANTIZER.begin(block, CONSTANTS, SHAPE)
    if QUANTIZER.measure is not None:
        for number in range(BLOCKS):
            values = _load_values(rows, valid, matrix, channel_stride, number, SHAPE)
            state = QUANTIZER.measure(values, block, state, number, CONSTANTS, SHAPE)
        state = QUANTIZER.decide(state, CONSTANTS, SHAPE)
    sums = empty_columns(STREAMS, BLOCK_TOKENS)
    if BLOCKS == 1:
        values = _load_values(rows, valid, matrix, channel_stride, 0, SHAPE)
        digits, state = QUANTIZER.quantize(values, block, state, 0, CONSTANTS, SHAPE)
        sums = add_digits(sums, digits, place_values, 0, BLOCK, SYMBOLS, STREAMS)
    else:
        for block_index in range(BLOCKS):
            values = _load_values(rows, valid, matrix, channel_stride, block_index, SHAPE)
            digits, state = QUANTIZER.quantize(values, block, state, block_index, CONSTANTS, SHAPE)
            sums = add_digits(sums, digits, place_values, block_index * BLOCK, BLOCK, SYMBOLS, STREAMS)
    first_symbol = BLOCKS * BLOCK
    for level in tl.static_range(1, LEVELS):
        digits, state = QUANTIZER.above(block, state, level, CONSTANTS, SHAPE)
        sums = add_digits(sums, digits, place_values, first_symbol, digits[0].shape[1], SYMBOLS, STREAMS)
        first_symbol += digits[0].shape[1]
    if QUANTIZER.end is not None:
        QUANTIZER.end(block, state, CONSTANTS, SHAPE)
    store_columns(sums, planes, row, valid, STREAMS)


@triton.jit
def _load_values(
    rows: tl.tensor, valid: tl.tensor, matrix: tl.tensor | None, channel_stride: tl.tensor, block_index: tl.tensor, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the coordinates of the symbols in block ``block_index``, float32 ``[token, symbol]`` each."""
    BLOCK: tl.constexpr = SHAPE.block
    COORDINATES: tl.constexpr = SHAPE.coordinates
    PADDED_DIM: tl.constexpr = SHAPE.padded_dim
    PARTS: tl.constexpr = SHAPE.parts
    OPERAND: tl.constexpr = SHAPE.operand
    values = ()
    if matrix is None:
        channel = block_index * BLOCK + tl.arange(0, BLOCK)[None, :]
        address = rows + channel.to(tl.int64) * channel_stride
        values = values + (tl.load(address, valid & (channel < SHAPE.dim), 0.0).to(tl.float32),)
    else:
        for coordinate in tl.static_range(COORDINATES):
            values = values + (
                multiply_coordinates(rows, matrix, COORDINATES * block_index + coordinate, BLOCK, PADDED_DIM, PARTS, OPERAND),
            )
    return values
