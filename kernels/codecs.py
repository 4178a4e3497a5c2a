"""Table of the kernels for each codec. PyTorch handles codecs that are not in the table.

Some parameters of these codecs have no attention kernels:

- angle with 32-bit norms, because the kernel would have to search every token for its largest norm;
- polar with unequal pairs, with several 32-bit radii, or with head dims that take too long to compile;
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
from .encode import lossless as encode_lossless
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
from .loaders.tiles import DUAL_ROW_WORDS, Tiles

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

    from .decode.rows import PreparedDecode


def unsupported(*_: Any) -> None:
    """Placeholder for a kernel that a codec lacks. Returns None."""


def reject_call(*_: Any) -> bool:
    """Placeholder for a kernel that a codec lacks. Returns False."""
    return False


class CodecKernels(NamedTuple):
    """Functions of a codec's kernels. The defaults ``unsupported`` and ``reject_call`` mean that there is no kernel.

    - ``tiles(codec)`` returns the tile loader for attention, or None.
    - ``dual_tiles(codec, dual)`` returns the dual tile loader, and ``paired_tiles(codec)`` the paired one, or None.
    - ``encode`` encodes values to streams, or returns False if it does not support them (``encode.prepare``).
    - ``prepare(codec, packed, out, rotated, pages)`` returns a decoding launch, or None (``decode.prepare``).
    - ``decode_into(codec, packed, out, rotated, pages)`` decodes with several launches, or returns False.
    - ``check_chunks(codec, streams, where)`` raises the errors of ``Codec.check_chunks``.
    - ``has_rules(codec)`` returns True if ``bitpack.rules`` checks everything that ``Codec.check`` checks about streams.
    """

    tiles: Callable[[Any], Tiles | None] = unsupported
    dual_tiles: Callable[[Any, int], Tiles | None] = unsupported
    encode: Callable[..., bool] | None = None
    prepare: Callable[..., PreparedDecode | None] = unsupported
    decode_into: Callable[..., bool] = reject_call
    check_chunks: Callable[..., None] | None = None
    has_rules: Callable[[Any], bool] = reject_call
    paired_tiles: Callable[[Any], Tiles | None] = unsupported


def supports_all(*_: Any) -> bool:
    """Placeholder for a check that always passes. Returns True."""
    return True


def codec_kernels(codec: Codec) -> CodecKernels:
    """Return the kernels of ``codec``. Only its exact class counts, because an unknown subclass may have more streams than its parent."""
    return CODECS.get(type(codec), CodecKernels())


def _has_dual_rows(codec: Codec) -> bool:
    """Return True if the rows of ``codec`` are short enough for dual tiles."""
    return all(packing.width == DUAL_ROW_WORDS for packing in codec.packings().values())


def _octahedral_tiles(codec: Octahedral) -> Tiles | None:
    return octahedral_tiles.tiles(codec) if codec.arrangement == "direct" else octahedral_dense_tiles.tiles(codec)


def _angle_tiles(codec: Angle) -> Tiles | None:
    return angle_tiles.tiles(codec) if codec.arrangement == "direct" else angle_dense_tiles.tiles(codec) or angle_thread_tiles.tiles(codec)


def _quaternion_tiles(codec: Quaternion) -> Tiles | None:
    return quaternion_tiles.tiles(codec) if codec.arrangement == "direct" else quaternion_dense_tiles.tiles(codec)


CODECS: dict[type[Codec], CodecKernels] = {
    Raw: CodecKernels(raw_tiles.tiles, has_rules=supports_all),
    Lossless: CodecKernels(encode=encode_lossless.encode, decode_into=decode_lossless.decode_into),
    Group: CodecKernels(
        group_tiles.tiles,
        lambda codec, dual: group_tiles.tiles(codec, dual) if _has_dual_rows(codec) else None,
        encode_group.encode,
        decode_group.prepare,
        has_rules=lambda codec: codec.scale_dtype != "u8",
    ),
    Minifloat: CodecKernels(minifloat_tiles.tiles, encode=encode_minifloat.encode, prepare=decode_minifloat.prepare),
    Scalar: CodecKernels(
        scalar_tiles.tiles,
        lambda codec, dual: scalar_tiles.tiles(codec, dual) if _has_dual_rows(codec) else None,
        encode_scalar.encode,
        decode_table.prepare,
        has_rules=supports_all,
        paired_tiles=scalar_tiles.paired_tiles,
    ),
    Octahedral: CodecKernels(
        _octahedral_tiles,
        lambda codec, dual: octahedral_tiles.tiles(codec, dual) if codec.arrangement == "direct" and _has_dual_rows(codec) else None,
        encode_octahedral.encode,
        decode_table.prepare,
        has_rules=lambda codec: codec.arrangement == "dense",
    ),
    Angle: CodecKernels(
        _angle_tiles,
        lambda codec, dual: angle_dual_tiles.tiles(codec, dual) if codec.arrangement == "dense" else None,
        encode_angle.encode,
        decode_table.prepare,
        has_rules=supports_all,
    ),
    Polar: CodecKernels(polar_tiles.tiles, encode=encode_polar.encode, prepare=decode_polar.prepare, has_rules=supports_all),
    Klt: CodecKernels(
        klt_tiles.tiles,
        encode=encode_klt.encode,
        # The kernel checks unused bits only in whole bytes.
        has_rules=lambda codec: all(bits == 0xFF for bits in codec.code_bit_masks),
    ),
    Transform: CodecKernels(decode_into=decode_transform.decode_into, check_chunks=decode_transform.check_chunks),
    Trellis: CodecKernels(trellis_tiles.tiles, encode=encode_trellis.encode, has_rules=supports_all),
    Quaternion: CodecKernels(_quaternion_tiles, encode=encode_quaternion.encode, prepare=decode_table.prepare, has_rules=supports_all),
}
