"""Columns of a codec's tiles, and the matrices between columns and the original frame.

A matrix combines the rotation and the column order of a tile loader (OCTOPUS Eq. 13: queries are rotated, not keys). There is one matrix
for all sequences and heads, or as many as the codec's basis has.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kvpack.formats.balanced import FrameMap
from kvpack.formats.klt import Klt
from kvpack.formats.qjl import Qjl
from kvpack.kernels.loaders import klt

from . import loaders

if TYPE_CHECKING:
    from kvpack.formats.base import Codec
    from kvpack.kernels.loaders.tiles import Tiles

BLOCK_COLUMNS = 32
"""Number of columns per program that rotates queries."""


DUAL, PAIRED = 1, 2
"""Loaders to prefer for calls with few query rows: dual ones, or also paired ones."""


def loader(codec: Codec, dual: int) -> Tiles:
    """Return the tile loader of ``codec``, which must have one. With ``dual`` (``DUAL`` or ``PAIRED``), prefer the loader of that kind."""
    result = loaders.find_dual_tiles(codec) if dual else None
    if result is None and dual == PAIRED:
        result = loaders.find_paired_tiles(codec)
    result = result or loaders.find_tiles(codec)
    assert result is not None
    return result


@lru_cache(maxsize=256)
def columns(codec: Codec, dual: int) -> tuple[int, ...]:
    """Return the channel of each column, for all tiles of ``codec``. Columns without a channel are -1.

    If the loader has an offset, the offset's channel is last.
    """
    return _column_channels(codec, loader(codec, dual))


@lru_cache(maxsize=256)
def key_columns(codec: Codec, dual: int) -> tuple[int, ...]:
    tiles = loader(codec, dual)
    return _column_channels(codec, tiles.keys or tiles)


def _column_channels(codec: Codec, tiles: Tiles) -> tuple[int, ...]:
    return tuple(channel for part in tiles.channels for channel in part) + ((codec.dim,) if tiles.offset else ())


@lru_cache(maxsize=256)
def frame_dim(codec: Codec) -> int:
    """Return the number of channels that columns represent: the head dim, doubled by the signs of qjl, and increased by 1 for an offset."""
    tiles = loader(codec, 0)
    return (1 if tiles.signs is None else 2) * codec.dim + tiles.offset


@lru_cache(maxsize=256)
def query_matrix(frames: tuple[tuple[Codec, tuple[int, ...], bool], ...], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrix that ``rotate_queries`` uses to map queries to all of ``frames``, and its blocks.

    A frame is a codec, the channel of each column (-1 for none), and True if queries are written as float16 halves instead of float32.

    The matrix is float32 ``[matrix, dim, column]``. It contains the contribution of each query channel to each column, and each frame is
    padded to whole blocks of columns. The blocks are int64 ``[block, 4]``: the block's first column in its frame, the frame's number of
    columns, the number of columns of all earlier frames, and 1 for halves. Channels past the head dim are channels of qjl's rotation, or
    klt's offset.
    """
    parts, blocks = [], []
    before = 0
    with torch.inference_mode(False):
        for codec, channels, halves in frames:
            # Column -1 means that there is no channel.
            turned = torch.nn.functional.pad(_query_rotation(codec), (0, 1))[..., list(channels)]
            own = -(-len(channels) // BLOCK_COLUMNS) * BLOCK_COLUMNS
            parts.append(torch.nn.functional.pad(turned, (0, own - len(channels))))
            blocks += [[first, len(channels), before, int(halves)] for first in range(0, own, BLOCK_COLUMNS)]
            before += len(channels)
        return torch.cat(_repeat_to_equal_counts(parts), 2).contiguous().to(device), torch.tensor(blocks, dtype=torch.int64, device=device)


@lru_cache(maxsize=256)
def value_matrix(frames: tuple[tuple[Codec, tuple[int, ...]], ...], block: int, device: str) -> torch.Tensor:
    """Return the matrix from the columns of sums in ``frames`` to channels, float32 ``[matrix, column, dim]``.

    The columns of each frame are padded to a multiple of ``block``.
    """
    parts = []
    with torch.inference_mode(False):
        for codec, channels in frames:
            back = torch.nn.functional.pad(_frame_rows(codec), (0, 0, 0, 1))[:, list(channels)]
            parts.append(torch.nn.functional.pad(back, (0, 0, 0, -len(channels) % block)))
        return torch.cat(_repeat_to_equal_counts(parts), 1).contiguous().to(device)


def is_in_order(codec: Codec, channels: tuple[int, ...]) -> bool:
    """Return True if sums with one column for each of ``channels`` are already in the original frame and order."""
    return codec.rotation.kind == "none" and not isinstance(codec, Klt) and channels == tuple(range(codec.dim))


def column_signs(codec: Codec) -> tuple[torch.Tensor, float]:
    """Return the matrix from channels to the columns of the codec's tiles as its signs, float32 ``[column, dim]``, and a magnitude.

    All nonzero entries have this magnitude, because the matrix combines a Hadamard rotation and a permutation.
    """
    back = value_matrix(((codec, columns(codec, 0)),), 1, "cpu")[0]
    return back.sign(), float(back.abs().max())


@lru_cache(maxsize=256)
def frame_matrix(codec: Codec, device: str) -> torch.Tensor:
    """Return the matrix from the channels of the codec's frame to the original channels, float32 ``[matrix, frame dim, dim]``.

    It is cached on ``device``.
    """
    with torch.inference_mode(False):
        return _frame_rows(codec).contiguous().to(device)


def _repeat_to_equal_counts(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Repeat the matrices of ``parts``, ``[matrix, ...]`` each, until all parts have the same number of matrices.

    Sequences and heads use the matrices in turn.
    """
    most = math.lcm(*(part.shape[0] for part in parts))
    return [part.repeat(most // part.shape[0], 1, 1) for part in parts]


def _query_rotation(codec: Codec) -> torch.Tensor:
    """Return the matrix that maps query channels to the channels of the codec's frame, float32 ``[matrix, dim, frame dim]``."""
    if isinstance(codec, Klt):
        return _frame_rows(codec).transpose(1, 2)
    if balanced := codec.sidecar(FrameMap):
        assert balanced.source is not None
        turned = balanced.source.on_device(torch.device("cpu")).query_matrices(codec.rotation)
        qjl = codec.sidecar(Qjl)
        return turned if qjl is None else torch.cat([turned, qjl.rotation.forward(turned)], 2)
    turned = codec.rotation.forward(torch.eye(codec.dim, dtype=torch.float32, device="cpu"))
    if qjl := codec.sidecar(Qjl):
        turned = torch.cat([turned, qjl.rotation.forward(turned)], 1)
    return turned[None]


def _frame_rows(codec: Codec) -> torch.Tensor:
    """Return the matrix from the channels of the codec's frame to the original channels, float32 ``[matrix, frame dim, dim]``.

    For klt, the matrix is scaled to the units of the tables, and its last row is the mean.
    """
    if isinstance(codec, Klt):
        assert codec.source is not None
        source = codec.source.on_device(torch.device("cpu"))
        matrix = source.matrix.to(torch.float64)
        result = torch.cat([matrix / klt.table_unit(codec), source.mean.to(torch.float64) @ matrix], 2)
        return result.flatten(0, 1).to(torch.float32)
    frame = torch.eye(codec.dim, dtype=torch.float32, device="cpu")
    if qjl := codec.sidecar(Qjl):
        frame = torch.cat([frame, qjl.rotation.inverse(frame)])
    return codec.rotation.inverse(frame)[None]
