"""The tile loader of each codec; one without a row here is decoded by torch before it is attended.

Those are angle with norms of 32 bits, of which every token's largest would be sought; polar whose pairs are not all alike, of
several radii of 32 bits, or of more dims than a compiler has patience for; and what has digits too wide for a table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvpack.formats.angle import Angle
from kvpack.formats.group import Group
from kvpack.formats.octahedral import Octahedral
from kvpack.formats.outliers import Outliers
from kvpack.formats.polar import Polar
from kvpack.formats.qjl import Qjl
from kvpack.formats.quaternion import Quaternion
from kvpack.formats.raw import Raw
from kvpack.formats.scalar import Scalar
from kvpack.formats.side_cars import WithSideCars

from . import angle as tiles_angle
from . import angle_dense as tiles_angle_dense
from . import angle_dual as tiles_angle_dual
from . import angle_thread as tiles_angle_thread
from . import group as tiles_group
from . import octahedral as tiles_octahedral
from . import octahedral_dense as tiles_octahedral_dense
from . import outliers as tiles_outliers
from . import polar as tiles_polar
from . import qjl as tiles_qjl
from . import quaternion as tiles_quaternion
from . import quaternion_dense as tiles_quaternion_dense
from . import raw as tiles_raw
from . import scalar as tiles_scalar
from .tiles import APART, DUAL_WIDTH, Tiles

if TYPE_CHECKING:
    from kvpack.formats.base import Codec
    from kvpack.formats.side_car import SideCar

Loader = Callable[[Any], Tiles | None]


def _of_arrangement(direct: Loader, dense: Loader) -> Loader:
    return lambda codec: (direct if codec.arrangement == "direct" else dense)(codec)


LOADERS: dict[type[Codec], Loader] = {
    Raw: tiles_raw.tiles,
    Group: tiles_group.tiles,
    Scalar: tiles_scalar.tiles,
    Octahedral: _of_arrangement(tiles_octahedral.tiles, tiles_octahedral_dense.tiles),
    Angle: _of_arrangement(tiles_angle.tiles, lambda codec: tiles_angle_dense.tiles(codec) or tiles_angle_thread.tiles(codec)),
    Polar: tiles_polar.tiles,
    Quaternion: _of_arrangement(tiles_quaternion.tiles, tiles_quaternion_dense.tiles),
}


def _of_eight_words(make: Callable[..., Tiles | None]) -> Callable[..., Tiles | None]:
    return lambda codec, dual: make(codec, dual) if all(p.width == DUAL_WIDTH for p in codec.packings().values()) else None


DUAL_LOADERS: dict[type[Codec], Callable[..., Tiles | None]] = {
    Group: _of_eight_words(tiles_group.tiles),
    Scalar: _of_eight_words(tiles_scalar.tiles),
    Octahedral: _of_eight_words(lambda codec, dual: tiles_octahedral.tiles(codec, dual) if codec.arrangement == "direct" else None),
    Angle: lambda codec, dual: tiles_angle_dual.tiles(codec, dual) if codec.arrangement == "dense" else None,
}


SIDE_CAR_LOADERS: dict[type[SideCar], Callable[[Tiles, Any], Tiles | None]] = {
    Outliers: lambda tiles, _: tiles_outliers.with_outliers(tiles),
    Qjl: tiles_qjl.with_signs,
}
"""What makes of a codec's loader one that loads a side-car too. ``segments`` does what maps of values and kept tokens ask for."""


@lru_cache(maxsize=256)
def tiles_of(codec: Codec) -> Tiles | None:
    """The loader of ``codec``, None where there is none: a class that is not known itself may hold more than its parent's streams."""
    if isinstance(codec, WithSideCars):
        return _with_side_cars(codec)
    make = LOADERS.get(type(codec))
    return make(codec) if make else None


def _with_side_cars(codec: WithSideCars) -> Tiles | None:
    tiles = tiles_of(codec.codec)
    for side_car in codec.side_cars:
        load = SIDE_CAR_LOADERS.get(type(side_car))
        tiles = load(tiles, side_car) if load and tiles is not None else None
    return tiles


@lru_cache(maxsize=256)
def dual_tiles_of(codec: Codec, dual: int = APART) -> Tiles | None:
    """The loader of tiles that hold two tokens a row, which lie as ``dual`` says, None where rows have another number of words."""
    make = DUAL_LOADERS.get(type(codec))
    return make(codec, dual) if make else None
