"""The kernels of each codec, one row per codec. A codec without a row is encoded, decoded and attended by torch.

The attention kernels do not support some parameters of a codec with a row:

- angle with 32-bit norms, because the kernel would search every token for its largest norm;
- polar with unequal pairs, with several 32-bit radii, or with more dims than compile in a reasonable time;
- digits too wide for a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpack.formats.angle import Angle
from kvpack.formats.group import Group
from kvpack.formats.klt import Klt
from kvpack.formats.lossless import Lossless
from kvpack.formats.minifloat import Minifloat
from kvpack.formats.octahedral import Octahedral
from kvpack.formats.polar import Polar
from kvpack.formats.quaternion import Quaternion
from kvpack.formats.raw import Raw
from kvpack.formats.scalar import Scalar
from kvpack.formats.transform import Transform
from kvpack.formats.trellis import Trellis

from .decode import group as decode_group
from .decode import lossless as decode_lossless
from .decode import minifloat as decode_minifloat
from .decode import polar as decode_polar
from .decode import table as decode_table
from .decode import transform as decode_transform
from .encode import angle as encode_angle
from .encode import group as encode_group
from .encode import klt_heads as encode_klt
from .encode import minifloat as encode_minifloat
from .encode import octahedral as encode_octahedral
from .encode import polar as encode_polar
from .encode import quaternion as encode_quaternion
from .encode import scalar as encode_scalar
from .encode import trellis as encode_trellis
from .loaders import angle as angle_tiles
from .loaders import angle_dense as angle_dense_tiles
from .loaders import angle_dual as angle_dual_tiles
from .loaders import angle_thread as angle_thread_tiles
from .loaders import group as group_tiles
from .loaders import klt as klt_tiles
from .loaders import minifloat as minifloat_tiles
from .loaders import octahedral as octahedral_tiles
from .loaders import octahedral_dense as octahedral_dense_tiles
from .loaders import polar as polar_tiles
from .loaders import quaternion as quaternion_tiles
from .loaders import quaternion_dense as quaternion_dense_tiles
from .loaders import raw as raw_tiles
from .loaders import scalar as scalar_tiles
from .loaders import trellis as trellis_tiles
from .loaders.tiles import DUAL_WIDTH, Tiles

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

    from .decode.rows import PreparedDecode


def none(*_: Any) -> None:
    """Return None: no parameters of the codec are supported."""


def undone(*_: Any) -> bool:
    """Return False: the kernel does not support these arguments."""
    return False


class CodecKernels(NamedTuple):
    """The kernels of a codec. Each function returns None for parameters that it does not support; ``none`` stands for a missing one.

    ``tiles(codec)`` returns the tile loader of attention, and ``dual_tiles(codec, dual)`` the loader whose tiles hold two tokens per row,
    arranged by ``dual`` (``tiles.APART``). ``encode`` fills streams and returns True if it did (``encode.prepare``). ``prepare(codec,
    packed, out, rotated, pages)`` returns a launch that fills an output (``decode.prepare``); without it, ``decode_into(codec, packed, out,
    rotated, pages)`` fills an output and returns True if it did. ``check_chunks(codec, streams, where)`` raises the errors of
    ``Codec.check_chunks``. ``has_rules(codec)`` returns True if ``Codec.check`` checks nothing about the codec's streams that
    ``bitpack.rules`` does not.
    """

    tiles: Callable[[Any], Tiles | None] = none
    dual_tiles: Callable[[Any, int], Tiles | None] = none
    encode: Callable[..., bool] | None = None
    prepare: Callable[..., PreparedDecode | None] = none
    decode_into: Callable[..., bool] = undone
    check_chunks: Callable[..., None] | None = None
    has_rules: Callable[[Any], bool] = undone


def done(*_: Any) -> bool:
    """Support every parameter of the codec."""
    return True


def of_codec(codec: Codec) -> CodecKernels:
    """Return the row of ``codec`` by its exact class, because an unknown subclass may contain more streams than its parent."""
    return CODECS.get(type(codec), CodecKernels())


def _narrow(codec: Codec) -> bool:
    """Return True if rows have exactly the words that tiles of two tokens per row need."""
    return all(packing.width == DUAL_WIDTH for packing in codec.packings().values())


def _octahedral(codec: Octahedral) -> Tiles | None:
    return octahedral_tiles.tiles(codec) if codec.arrangement == "direct" else octahedral_dense_tiles.tiles(codec)


def _angle(codec: Angle) -> Tiles | None:
    return angle_tiles.tiles(codec) if codec.arrangement == "direct" else angle_dense_tiles.tiles(codec) or angle_thread_tiles.tiles(codec)


def _quaternion(codec: Quaternion) -> Tiles | None:
    return quaternion_tiles.tiles(codec) if codec.arrangement == "direct" else quaternion_dense_tiles.tiles(codec)


CODECS: dict[type[Codec], CodecKernels] = {
    Raw: CodecKernels(raw_tiles.tiles, has_rules=done),
    Lossless: CodecKernels(decode_into=decode_lossless.decode_into),
    Group: CodecKernels(
        group_tiles.tiles,
        lambda codec, dual: group_tiles.tiles(codec, dual) if _narrow(codec) else None,
        encode_group.encode,
        decode_group.prepare,
        has_rules=lambda codec: codec.scale_dtype != "u8",
    ),
    Minifloat: CodecKernels(minifloat_tiles.tiles, encode=encode_minifloat.encode, prepare=decode_minifloat.prepare),
    Scalar: CodecKernels(
        scalar_tiles.tiles,
        lambda codec, dual: scalar_tiles.tiles(codec, dual) if _narrow(codec) else None,
        encode_scalar.encode,
        decode_table.prepare,
        has_rules=done,
    ),
    Octahedral: CodecKernels(
        _octahedral,
        lambda codec, dual: octahedral_tiles.tiles(codec, dual) if codec.arrangement == "direct" and _narrow(codec) else None,
        encode_octahedral.encode,
        decode_table.prepare,
        has_rules=lambda codec: codec.arrangement == "dense",
    ),
    Angle: CodecKernels(
        _angle,
        lambda codec, dual: angle_dual_tiles.tiles(codec, dual) if codec.arrangement == "dense" else None,
        encode_angle.encode,
        decode_table.prepare,
        has_rules=done,
    ),
    Polar: CodecKernels(polar_tiles.tiles, encode=encode_polar.encode, prepare=decode_polar.prepare, has_rules=done),
    Klt: CodecKernels(
        klt_tiles.tiles,
        encode=encode_klt.encode,
        # Bits that belong to no column are looked for in bytes.
        has_rules=lambda codec: all(bits == 0xFF for bits in codec.code_bits),
    ),
    Transform: CodecKernels(decode_into=decode_transform.decode_into, check_chunks=decode_transform.check_chunks),
    Trellis: CodecKernels(trellis_tiles.tiles, encode=encode_trellis.encode, has_rules=done),
    Quaternion: CodecKernels(_quaternion, encode=encode_quaternion.encode, prepare=decode_table.prepare, has_rules=done),
}
