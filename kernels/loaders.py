"""The tile loader of each codec; one without a row here is decoded by torch before it is attended."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvpack.formats.angle import Angle
from kvpack.formats.group import Group
from kvpack.formats.octahedral import Octahedral
from kvpack.formats.quaternion import Quaternion
from kvpack.formats.raw import Raw
from kvpack.formats.scalar import Scalar

from . import tiles_angle, tiles_group, tiles_octahedral, tiles_quaternion, tiles_raw, tiles_scalar

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.base import Codec

    from .tiles import Tiles

LOADERS: dict[type[Codec], Callable[[Any], Tiles | None]] = {
    Raw: tiles_raw.tiles,
    Group: tiles_group.tiles,
    Scalar: tiles_scalar.tiles,
    Octahedral: tiles_octahedral.tiles,
    Angle: tiles_angle.tiles,
    Quaternion: tiles_quaternion.tiles,
}


@lru_cache(maxsize=256)
def tiles_of(codec: Codec) -> Tiles | None:
    """The loader of ``codec``, None where there is none: a class that is not known itself may hold more than its parent's streams."""
    make = LOADERS.get(type(codec))
    return make(codec) if make else None
