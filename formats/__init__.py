"""Registries of all codecs and sidecars.

To add a codec or sidecar, create a module here, add it to its registry, and document it in spec/.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from .angle import Angle
from .balanced import FrameMap
from .block_rotation import BlockRotation
from .channel_order import ChannelOrder
from .channel_scale import ChannelScale
from .errors import InvalidParameter, UnknownCodec
from .family import CodecFamily
from .group import Group
from .key_mean import KeyMean
from .klt import Klt
from .lossless import Lossless
from .minifloat import Minifloat
from .norm_rule import SKETCHED_NORM_RULE
from .octahedral import Octahedral
from .outliers import Outliers
from .polar import Polar
from .qjl import Qjl
from .quaternion import Quaternion
from .raw import Raw
from .raw_positions import RawPositions
from .raw_tokens import RawTokens
from .scalar import Scalar
from .sidecar import ResidualSketch, Sidecar
from .sidecars import CodecWithSidecars
from .streams import Layout as Layout
from .transform import Transform
from .trellis import Trellis

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import Codec
    from .options import Options


class _Codecs(dict[str, type[CodecFamily]]):
    """Registry of codec families by id. Two classes cannot have the same id, but a module may be reloaded and register its class again."""

    def __setitem__(self, codec_id: str, codec: type[CodecFamily]) -> None:
        known = self.get(codec_id, codec)
        if codec.id != codec_id:
            raise InvalidParameter(
                f"codec {codec.__qualname__} is registered as {codec_id!r}, but its id is {codec.id!r}: register it as {codec.id!r}"
            )
        if (known.__module__, known.__qualname__) != (codec.__module__, codec.__qualname__):
            raise InvalidParameter(
                f"codec id {codec_id!r} already belongs to {known.__module__}.{known.__qualname__}: give {codec.__module__}."
                f"{codec.__qualname__} an id with a prefix of your own, such as 'acme-{codec_id}'"
            )
        where, params = f"codec {codec_id}: class {codec.__qualname__}", getattr(codec, "__dataclass_params__", None)
        if not (params and params.frozen and "dim" in getattr(codec, "__dataclass_fields__", ())):
            raise InvalidParameter(
                f"{where} must be a frozen dataclass with a field dim: decorate it with @dataclass(frozen=True), and declare dim: int in it"
            )
        if missing := sorted(codec.__abstractmethods__):
            raise InvalidParameter(f"{where} does not define {', '.join(missing)}: define each of these in the class")
        super().__setitem__(codec_id, codec)


CODECS: dict[str, type[CodecFamily]] = _Codecs(
    (codec.id, codec) for codec in (Raw, Lossless, Group, Minifloat, Scalar, Octahedral, Angle, Polar, Quaternion, Klt, Transform, Trellis)
)
"""Codec families by id."""

SIDECARS: dict[str, type[Sidecar]] = {
    sidecar.name: sidecar
    for sidecar in (FrameMap, ChannelScale, ChannelOrder, BlockRotation, KeyMean, Outliers, Qjl, RawTokens, RawPositions)
}
"""Sidecars by name, in the order of their keys and streams in a file."""


def codec_class(codec_id: str) -> type[CodecFamily]:
    """Look up a codec family by its id.

    Args:
        codec_id: The id, such as ``"group"``.

    Returns:
        The codec family with this id.

    Raises:
        UnknownCodec: No codec has this id. The message lists the known ids.

    >>> kvpack.formats.codec_class("group").__name__
    'Group'
    """
    try:
        return CODECS[codec_id]
    except KeyError:
        raise UnknownCodec(
            f"codec {codec_id!r} is unknown, expected one of {', '.join(sorted(CODECS))}: install a newer kvpack, or import the "
            "module that adds the codec (for commands: kvpack --import MODULE ...)"
        ) from None


def sidecar_option_names() -> tuple[str, ...]:
    """Return the names of the recipe options that select and configure sidecars."""
    return tuple(word for sidecar in SIDECARS.values() for word in sidecar.words)


def create_codec(codec_id: str, dim: int, side: str, options: Options) -> Codec:
    """Create the codec that a recipe requests, with its sidecars, if any.

    Args:
        codec_id: The codec id, such as ``"group"``.
        dim: Head dim.
        side: ``"k"`` for keys or ``"v"`` for values, which may have different defaults.
        options: The options of the codec and of its sidecars.

    Returns:
        The codec.

    Raises:
        UnknownCodec: No codec has this id.
        InvalidParameter: An option is unknown, out of range, or incompatible with another option.

    >>> from kvpack.formats.options import Options
    >>> options = Options("group", {"b": "4"})
    >>> kvpack.formats.create_codec("group", 128, "k", options).nominal_bits
    4.0
    """
    sidecars: list[Sidecar | None] = []
    if options.mentions_any(sidecar_option_names()):
        sidecars = [sidecar.from_options(dim, side, options) for sidecar in SIDECARS.values()]
        options.sketched = any(isinstance(sidecar, ResidualSketch) for sidecar in sidecars)
    return _with_sidecars(codec_class(codec_id).create(dim, side, options), sidecars)


def codec_from_params(params: Mapping[str, Any]) -> Codec:
    """Create the codec from its map in a file's header.

    Args:
        params: The key ``id``, the codec's parameters, then its sidecars by name, as returned by ``Codec.params``.

    Returns:
        The codec.

    Raises:
        UnknownCodec: No codec has this id.
        InvalidParameter: A parameter is missing, unknown, of the wrong type or out of range.

    Source: spec/container.md, Codecs.

    >>> kvpack.formats.codec_from_params({"id": "raw", "dim": 64, "dtype": "bf16"})
    Raw(dim=64, dtype='bf16')
    """
    codec_params = {name: value for name, value in params.items() if name != "id" and name not in SIDECARS}
    codec = codec_class(params["id"]).from_params(codec_params)
    sidecars = [sidecar.from_params(codec.dim, params[name]) for name, sidecar in SIDECARS.items() if name in params]
    if hasattr(codec, "norm_rule") and any(isinstance(sidecar, ResidualSketch) for sidecar in sidecars):
        codec = dataclasses.replace(codec, norm_rule=SKETCHED_NORM_RULE)  # type: ignore[type-var]
    return _with_sidecars(codec, sidecars)


def _with_sidecars(codec: CodecFamily, created: list[Sidecar | None] | list[Sidecar]) -> Codec:
    sidecars = tuple(sidecar for sidecar in created if sidecar is not None)
    return CodecWithSidecars(codec, sidecars) if sidecars else codec
