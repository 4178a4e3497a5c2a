"""All codecs by id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..codec import Codec
from .angle import angle
from .group import group
from .klt import klt
from .lossless import lossless
from .minifloat import minifloat
from .octahedral import octahedral
from .polar import polar
from .quaternion import quaternion
from .raw import raw
from .scalar import scalar
from .transform import transform
from .trellis import trellis

CODECS: dict[str, Callable[[Mapping[str, Any]], Codec]] = {
    "raw": raw,
    "group": group,
    "lossless": lossless,
    "klt": klt,
    "minifloat": minifloat,
    "octahedral": octahedral,
    "quaternion": quaternion,
    "angle": angle,
    "scalar": scalar,
    "polar": polar,
    "transform": transform,
    "trellis": trellis,
}
