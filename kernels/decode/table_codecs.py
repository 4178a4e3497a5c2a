"""The codecs that ``table`` decodes, with the properties that its kernel needs; one row of ``TABLE_CODECS`` per codec."""

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
from kvpack.kernels.encode.rows import values_of

if TYPE_CHECKING:
    from kvpack.formats.base import Codec


class Piece(NamedTuple):
    """A part of one of the kernel's digits: digit ``digit`` of code stream ``stream``, shifted up by ``shift`` bits."""

    stream: int
    digit: int = 0
    shift: int = 0


class Form(NamedTuple):
    """The codec properties that the kernel needs: ``values`` per symbol, and the pieces of each of a symbol's digits.

    An octahedral symbol is one number: an index of ``index_bits``, two sign bits from bit ``signs_at`` up, and from ``norm_at`` up a norm
    code masked by ``norm_mask``. A quaternion's radius code is at most ``largest_radius``.
    """

    kind: str
    values: int
    digits: tuple[tuple[Piece, ...], ...]
    index_bits: int = 0
    signs_at: int = 0
    norm_at: int = 0
    norm_mask: int = 0
    largest_radius: int = 0


class TableCodec(NamedTuple):
    """Decoding of one codec: its form (None for unsupported options), its table ``[entry, values]``, and the norms of octahedral."""

    form: Callable[[Any], Form | None]
    table: Callable[[Any, torch.device], torch.Tensor]
    norm_table: Callable[[Any, torch.device], torch.Tensor | None] = lambda codec, device: None


def _scalar(codec: Scalar) -> Form | None:
    return None if codec.bits_high or codec.norm == LOG8 else Form("scalar", 1, ((Piece(0),),))


def _octahedral(codec: Octahedral) -> Form | None:
    """Return the form with one digit: the direction, then the signs above index and norm, or the norm above the signs."""
    if codec.norm == LOG8:
        return None
    packings, numbers = codec.packings(), _numbers(codec)
    index_bits = 2 * (codec.b_dir - 1)
    with_index = norm_extends_index(codec.b_dir, codec.b_norm)
    signs_at = index_bits + (codec.b_norm if with_index else 0)
    if "symbol" not in numbers:
        index = (Piece(numbers["index"]),) if "index" in numbers else ()
        whole = (*index, Piece(numbers["sign"], shift=signs_at))
    elif len(packings["symbol"].bases) == 1:
        whole = (Piece(0),)
    else:
        whole = (Piece(0), Piece(0, digit=1, shift=signs_at))
    norm_at = index_bits if with_index else signs_at + 2
    return Form("octahedral", 3, (whole,), index_bits, signs_at, norm_at, (1 << codec.b_norm) - 1)


def _angle(codec: Angle) -> Form:
    if codec.norm == "fp32":
        return Form("angle fp32", 2, (_pieces(codec, "angle"),))
    return Form(f"angle {codec.norm}", 2, _two_digits(codec, "angle", "norm_codes"))


def _quaternion(codec: Quaternion) -> Form:
    return Form("quaternion", 4, _two_digits(codec, "codeword", "radius"), largest_radius=(1 << codec.radius_bits) - 1)


def _numbers(codec: Codec) -> dict[str, int]:
    """Return the number of each code stream."""
    return {name: number for number, name in enumerate(codec.packings())}


def _pieces(codec: Codec, name: str) -> tuple[Piece, ...]:
    """Return the digit in stream ``name``, or in the streams of its low and high parts."""
    numbers = _numbers(codec)
    if name in numbers:
        return (Piece(numbers[name]),)
    low_bits = codec.packings()[f"{name}_low"].bases[0].bit_length() - 1
    return Piece(numbers[f"{name}_low"]), Piece(numbers[f"{name}_high"], shift=low_bits)


def _two_digits(codec: Codec, first: str, second: str) -> tuple[tuple[Piece, ...], ...]:
    """Return the two digits of a symbol in the direct arrangement, or those of streams ``first`` and ``second`` in the dense one."""
    if "symbol" in codec.packings():
        return (Piece(0),), (Piece(0, digit=1),)
    return _pieces(codec, first), _pieces(codec, second)


TABLE_CODECS: dict[type[Codec], TableCodec] = {
    Scalar: TableCodec(_scalar, lambda codec, device: signed_values(codec.magnitude_table, device)),
    Octahedral: TableCodec(
        _octahedral,
        lambda codec, device: signed_directions(codec.direction_table, device),
        lambda codec, device: values_of(codec.norm_table, device),
    ),
    Angle: TableCodec(_angle, lambda codec, device: bin_directions(codec.bins, device)),
    Quaternion: TableCodec(_quaternion, lambda codec, device: codewords(codec.seed, codec.secondary, device)),
}
"""The codecs that this kernel decodes, by exact class: a subclass may contain more than its parent's streams."""


@lru_cache(maxsize=64)
def form_of(codec: Codec) -> Form | None:
    """Return the form of ``codec``; None for a codec without a row, and for unsupported options."""
    row = TABLE_CODECS.get(type(codec))
    return row.form(codec) if row else None
