"""Table of the codecs that ``table`` decodes, with the codec properties that it needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvpack.formats.angle import Angle, bin_directions
from kvpack.formats.octahedral import Octahedral, norm_extends_index, signed_directions
from kvpack.formats.quaternion import Quaternion, codewords
from kvpack.formats.scalar import Scalar, signed_values
from kvpack.formats.token_norms import LOG8
from kvpack.kernels.encode.rows import table_values

if TYPE_CHECKING:
    from kvpack.formats.base import Codec


class DigitPiece(NamedTuple):
    """Part of a digit: digit number ``digit`` of code stream number ``stream``. Its lowest bit is bit ``shift`` of the whole digit."""

    stream: int
    digit: int = 0
    shift: int = 0


class TableForm(NamedTuple):
    """How a codec's symbols select table entries: ``width`` values per symbol, and the pieces of each digit of a symbol.

    An octahedral symbol is one number. It contains a table index of ``index_bits`` bits, two sign bits from bit ``signs_at`` on, and a norm
    code from bit ``norm_at`` on, masked by ``norm_mask``. A quaternion's radius code is at most ``largest_radius``.
    """

    kind: str
    width: int
    digits: tuple[tuple[DigitPiece, ...], ...]
    index_bits: int = 0
    signs_at: int = 0
    norm_at: int = 0
    norm_mask: int = 0
    largest_radius: int = 0


class TableCodec(NamedTuple):
    """Functions for one codec: its form (None for unsupported options), its table ``[entry, value]``, and its table of norms, if any."""

    form: Callable[[Any], TableForm | None]
    table: Callable[[Any, torch.device], torch.Tensor]
    norm_table: Callable[[Any, torch.device], torch.Tensor | None] = lambda codec, device: None


def _scalar_form(codec: Scalar) -> TableForm | None:
    return None if codec.bits_high or codec.norm == LOG8 else TableForm("scalar", 1, ((DigitPiece(0),),))


def _octahedral_form(codec: Octahedral) -> TableForm | None:
    """Return the form of the octahedral codec. Its only digit contains the direction index, the signs and the norm code."""
    if codec.norm == LOG8:
        return None
    packings, streams = codec.packings(), _stream_indices(codec)
    index_bits = 2 * (codec.b_dir - 1)
    with_index = norm_extends_index(codec.b_dir, codec.b_norm)
    signs_at = index_bits + (codec.b_norm if with_index else 0)
    if "symbol" not in streams:
        index = (DigitPiece(streams["index"]),) if "index" in streams else ()
        pieces = (*index, DigitPiece(streams["sign"], shift=signs_at))
    elif len(packings["symbol"].bases) == 1:
        pieces = (DigitPiece(0),)
    else:
        pieces = (DigitPiece(0), DigitPiece(0, digit=1, shift=signs_at))
    norm_at = index_bits if with_index else signs_at + 2
    return TableForm("octahedral", 3, (pieces,), index_bits, signs_at, norm_at, (1 << codec.b_norm) - 1)


def _angle_form(codec: Angle) -> TableForm:
    if codec.norm == "fp32":
        return TableForm("angle fp32", 2, (_digit_pieces(codec, "angle"),))
    return TableForm(f"angle {codec.norm}", 2, _two_digit_pieces(codec, "angle", "norm_codes"))


def _quaternion_form(codec: Quaternion) -> TableForm:
    return TableForm("quaternion", 4, _two_digit_pieces(codec, "codeword", "radius"), largest_radius=(1 << codec.radius_bits) - 1)


def _stream_indices(codec: Codec) -> dict[str, int]:
    return {name: number for number, name in enumerate(codec.packings())}


def _digit_pieces(codec: Codec, name: str) -> tuple[DigitPiece, ...]:
    """Return the pieces of a digit: the stream ``name``, or the two streams with its low and its high bits."""
    streams = _stream_indices(codec)
    if name in streams:
        return (DigitPiece(streams[name]),)
    low_bits = codec.packings()[f"{name}_low"].bases[0].bit_length() - 1
    return DigitPiece(streams[f"{name}_low"]), DigitPiece(streams[f"{name}_high"], shift=low_bits)


def _two_digit_pieces(codec: Codec, first: str, second: str) -> tuple[tuple[DigitPiece, ...], ...]:
    """Return the pieces of a symbol's two digits.

    They come from the stream "symbol" in the direct arrangement, otherwise from the streams ``first`` and ``second``.
    """
    if "symbol" in codec.packings():
        return (DigitPiece(0),), (DigitPiece(0, digit=1),)
    return _digit_pieces(codec, first), _digit_pieces(codec, second)


TABLE_CODECS: dict[type[Codec], TableCodec] = {
    Scalar: TableCodec(_scalar_form, lambda codec, device: signed_values(codec.magnitude_table, device)),
    Octahedral: TableCodec(
        _octahedral_form,
        lambda codec, device: signed_directions(codec.direction_table, device),
        lambda codec, device: table_values(codec.norm_table, device),
    ),
    Angle: TableCodec(_angle_form, lambda codec, device: bin_directions(codec.bins, device)),
    Quaternion: TableCodec(_quaternion_form, lambda codec, device: codewords(codec.seed, codec.secondary, device)),
}
"""Codecs that this kernel decodes. They are looked up by exact class, because a subclass may store more streams."""


@lru_cache(maxsize=64)
def table_form(codec: Codec) -> TableForm | None:
    """Return the form of ``codec``, or None if its class or its options are not supported."""
    row = TABLE_CODECS.get(type(codec))
    return row.form(codec) if row else None
