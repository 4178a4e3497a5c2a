"""Selection of the tile loader for a codec and its sidecars. Without a loader, PyTorch decodes the values before attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvpack.formats.key_mean import KeyMean
from kvpack.formats.outliers import Outliers
from kvpack.formats.qjl import Qjl
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.kernels import codecs
from kvpack.kernels.loaders import key_mean as tiles_key_mean
from kvpack.kernels.loaders import outliers as tiles_outliers
from kvpack.kernels.loaders import qjl as tiles_qjl
from kvpack.kernels.loaders.tiles import APART, Tiles

if TYPE_CHECKING:
    from kvpack.formats.base import Codec
    from kvpack.formats.sidecar import Sidecar

SIDECAR_LOADERS: dict[type[Sidecar], Callable[[Tiles, Any], Tiles | None]] = {
    KeyMean: tiles_key_mean.with_means,
    Outliers: lambda tiles, _: tiles_outliers.with_outliers(tiles),
    Qjl: tiles_qjl.with_signs,
}
"""Functions that extend a codec's loader with a sidecar. ``attend.segments`` handles value maps and raw tokens."""


@lru_cache(maxsize=256)
def find_tiles(codec: Codec) -> Tiles | None:
    return _tiles_with_sidecars(codec) if isinstance(codec, CodecWithSidecars) else codecs.codec_kernels(codec).tiles(codec)


def _tiles_with_sidecars(codec: CodecWithSidecars) -> Tiles | None:
    tiles = find_tiles(codec.codec)
    for sidecar in codec.sidecars:
        load = SIDECAR_LOADERS.get(type(sidecar))
        tiles = load(tiles, sidecar) if load and tiles is not None else None
    return tiles


@lru_cache(maxsize=256)
def find_dual_tiles(codec: Codec, dual: int = APART) -> Tiles | None:
    """Return the dual tile loader of ``codec``, or None if dual tiles do not support its number of words per row.

    ``dual`` is the arrangement of the two tokens in a tile row.
    """
    if isinstance(codec, CodecWithSidecars):
        return _with_means_only(codec, find_dual_tiles(codec.codec, dual))
    return codecs.codec_kernels(codec).dual_tiles(codec, dual)


@lru_cache(maxsize=256)
def find_paired_tiles(codec: Codec) -> Tiles | None:
    """Return the paired tile loader of ``codec`` (``Tiles.paired``), or None if there is none."""
    if isinstance(codec, CodecWithSidecars):
        return _with_means_only(codec, find_paired_tiles(codec.codec))
    return codecs.codec_kernels(codec).paired_tiles(codec)


def _with_means_only(codec: CodecWithSidecars, tiles: Tiles | None) -> Tiles | None:
    """Return ``tiles`` with the page means of ``codec``, or None if it has any other sidecar."""
    means = [sidecar for sidecar in codec.sidecars if isinstance(sidecar, KeyMean)]
    return tiles_key_mean.with_means(tiles, means[0]) if tiles is not None and len(means) == len(codec.sidecars) == 1 else None
