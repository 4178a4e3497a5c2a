"""The codecs: one file a family. Adding one is a file here, a row below, and a page in spec/codecs/."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .angle import Angle
from .errors import UnknownCodec
from .group import Group
from .octahedral import Octahedral
from .polar import Polar
from .quaternion import Quaternion
from .raw import Raw
from .scalar import Scalar

if TYPE_CHECKING:
    from .base import Codec

CODECS: dict[str, type[Codec]] = {codec.id: codec for codec in (Raw, Group, Scalar, Octahedral, Angle, Polar, Quaternion)}


def codec_class(codec_id: str) -> type[Codec]:
    """The class of a codec id. Raises UnknownCodec, which lists the known ones."""
    try:
        return CODECS[codec_id]
    except KeyError:
        raise UnknownCodec(f"codec {codec_id!r} is unknown; this kvpack knows {', '.join(sorted(CODECS))}") from None
