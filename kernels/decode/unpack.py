"""Unpack rotated codecs of bounded values: tiles by the loaders of attention, then back to the original frame on the matrix units.

Tiles go to the output itself, where they have as many columns as it has channels, a part at a time that the second-level cache holds.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.angle import Angle
from kvpack.formats.columns import next_power_of_two
from kvpack.formats.octahedral import Octahedral
from kvpack.formats.polar import Polar
from kvpack.formats.quaternion import Quaternion
from kvpack.formats.scalar import Scalar
from kvpack.kernels.attend import plan, rotation
from kvpack.kernels.triton_insides import CachedLaunch

from . import tiles
from .decode import FUSED_DTYPES, fits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.base import Codec

    from .rows import Packed

BOUNDED = (Angle, Octahedral, Polar, Quaternion, Scalar)
"""Codecs whose values are entries of a table times a token's factor: tiles of binary16 hold the entries of any file."""

PART_BYTES = 32 << 20
"""Bytes of tiles at once: an H200's second-level cache holds 50 MiB."""

MOST_COLUMNS = 256
"""Columns and channels whose matrix, with a tile beside it, fits the shared memory of a multiprocessor."""

ROWS, WARPS = 128, 8
"""Tokens of a program that rotates, and its warps."""


def takes(codec: Codec, out: torch.Tensor) -> bool:
    """Whether ``unpack`` takes a codec and an output: polar, whose tiles are products, only to bfloat16, which rounds more."""
    return (
        type(codec) in BOUNDED
        and (type(codec) is not Polar or out.dtype == torch.bfloat16)
        and codec.rotation.kind != "none"
        and out.dtype in FUSED_DTYPES
        and fits(out)
        and (loader := tiles.loader_of(codec)) is not None
        and loader.factor is not None
        and max(len(plan.columns(codec, False)), codec.dim) <= MOST_COLUMNS
    )


def unpack(codec: Codec, packed: Sequence[Packed], out: torch.Tensor) -> None:
    """Decode ``packed``, whose pages follow one another, into ``out`` ``[batch, kv_head, token, dim]``, in the original frame.

    The error is that of tiles of binary16, below 2^-11 of a row's values in the 2-norm (2^-10 for polar), and of rounding to the output's
    dtype.
    """
    batch, heads, tokens = out.shape[:3]
    work = tiles.work_of(codec, packed, batch, heads, out.device)
    if not work.blocks * batch * heads:
        return
    columns = len(plan.columns(codec, False))
    at_once = max(work.block_tokens, PART_BYTES // (2 * columns * batch * heads))
    factors = torch.empty(batch, heads, tokens, dtype=torch.float32, device=out.device)
    in_place = columns == codec.dim
    scratch = None if in_place else torch.empty(batch, heads, at_once, columns, dtype=torch.float16, device=out.device)
    for blocks, start, stop in work.parts(at_once):
        target = out[:, :, start:stop]
        values = target.view(torch.float16) if scratch is None else scratch[:, :, : stop - start]
        tiles.decode(codec, work, values, blocks, factors[:, :, start:stop])
        _rotate(codec, target, values, factors[:, :, start:stop])


def _rotate(codec: Codec, out: torch.Tensor, values: torch.Tensor, factors: torch.Tensor) -> None:
    matrix, size = _matrix(codec, str(out.device))
    widths = values.shape[3], matrix.shape[0], _padded(codec.dim)
    arguments = (*out.stride()[:3], *values.stride()[:3], *factors.stride()[:2], out.shape[1], out.shape[2])
    with torch.cuda.device(out.device) if out.device.type == "cuda" else nullcontext():
        launch = _launch(arguments, out.shape[0], codec.dim, widths, size, out.dtype, str(out.device))
        launch((out, 0), (values, 0), (factors, 0), (matrix, 0))


@lru_cache(maxsize=1024)
def _launch(
    arguments: tuple[int, ...], batch: int, dim: int, widths: tuple[int, int, int], size: float, dtype: torch.dtype, device: str
) -> CachedLaunch:
    """The launch for an output of ``dtype`` on ``device``."""
    heads, tokens = arguments[-2:]
    width, columns, pad = widths
    constants = {"DIM": dim, "WIDTH": width, "COLUMNS": columns, "PAD": pad, "SIZE": size, "ROWS": ROWS}
    return CachedLaunch(rotate_tiles, (triton.cdiv(tokens, ROWS), batch * heads, 1), arguments, constants, {"num_warps": WARPS})


def _padded(dim: int) -> int:
    return max(16, next_power_of_two(dim))


@lru_cache(maxsize=256)
def _matrix(codec: Codec, device: str) -> tuple[torch.Tensor, float]:
    """The signs of what each column adds to each channel, float16 ``[column, channel]`` with zeros to powers of two, and their size."""
    with torch.inference_mode(False):
        signs, size = rotation.column_signs(codec)
        padded = torch.nn.functional.pad(signs, (0, _padded(codec.dim) - codec.dim, 0, _padded(len(signs)) - len(signs)))
        return padded.to(torch.float16).to(device), size


@triton.jit(do_not_specialize=["heads", "tokens"])
def rotate_tiles(
    out: tl.tensor,
    values: tl.tensor,
    factors: tl.tensor,
    matrix: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    out_token: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    factor_batch: tl.tensor,
    factor_head: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAD: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """``ROWS`` tokens of ``values`` ``[batch, head, token, WIDTH]``, binary16, times the signs of ``matrix`` and the tokens' factors.

    ``out`` may lie where ``values`` does: a program reads its rows before it writes them.
    """
    sequence = tl.program_id(1)
    batch = (sequence // heads).to(tl.int64)
    head = (sequence % heads).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    channel = tl.arange(0, PAD)
    real = (token < tokens)[:, None]
    read = values + batch * batch_stride + head * head_stride + token[:, None] * token_stride + column[None, :]
    tile = tl.load(read, real & (column < WIDTH)[None, :], 0.0)
    signs = tl.load(matrix + column[:, None] * PAD + channel[None, :])
    factor = tl.load(factors + batch * factor_batch + head * factor_head + token, token < tokens, 0.0)
    # Every warp has read its part of the rows before one writes.
    tl.debug_barrier()
    found = tl.dot(tile, signs) * (factor * SIZE)[:, None]
    place = out + batch * out_batch + head * out_head + token[:, None] * out_token + channel[None, :]
    tl.store(place, found.to(out.dtype.element_ty), real & (channel < DIM)[None, :])
