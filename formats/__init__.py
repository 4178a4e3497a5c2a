"""The codecs: one file a family. Adding one is a file here, a row below, and a page in spec/codecs/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .angle import Angle
from .errors import UnknownCodec
from .group import Group
from .octahedral import Octahedral
from .polar import Polar
from .quaternion import Quaternion
from .raw import Raw
from .scalar import Scalar
from .side_car_options import OPTIONS
from .side_cars import SIDE_CARS, WithSideCars, codec_with

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import Codec
    from .family import CodecFamily
    from .options import Options

CODECS: dict[str, type[CodecFamily]] = {codec.id: codec for codec in (Raw, Group, Scalar, Octahedral, Angle, Polar, Quaternion)}


def codec_class(codec_id: str) -> type[CodecFamily]:
    """The class of a codec id. Raises UnknownCodec, which lists the known ones."""
    try:
        return CODECS[codec_id]
    except KeyError:
        raise UnknownCodec(f"codec {codec_id!r} is unknown; this kvpack knows {', '.join(sorted(CODECS))}") from None


def create_codec(codec_id: str, dim: int, side: str, options: Options) -> Codec:
    """The codec, with side-cars or without, that a recipe's ``options`` ask for. Raises UnknownCodec and InvalidParameter."""
    if options.mention(OPTIONS):
        return WithSideCars.create(dim, side, options)
    return codec_class(codec_id).create(dim, side, options)


def codec_from_params(params: Mapping[str, Any]) -> Codec:
    """The codec of a header's map: ``id``, its parameters, then its side-cars. Raises UnknownCodec and InvalidParameter."""
    own = {name: value for name, value in params.items() if name != "id" and name not in SIDE_CARS}
    codec = codec_class(params["id"]).from_params(own)
    return codec_with(codec, {name: params[name] for name in SIDE_CARS if name in params})
