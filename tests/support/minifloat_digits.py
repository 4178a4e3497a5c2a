"""Random digits and scales for the codec minifloat that every reader accepts.

None is NaN or infinite, and no value overflows binary32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpack.formats.minifloat import Minifloat
from kvpack.formats.sidecars import CodecWithSidecars

if TYPE_CHECKING:
    from kvpack.formats.base import Codec


def _minifloat(codec: Codec) -> Minifloat | None:
    plain = codec.codec if isinstance(codec, CodecWithSidecars) else codec
    return plain if isinstance(plain, Minifloat) else None


def make_finite(codec: Codec, digit: torch.Tensor) -> torch.Tensor:
    """Return ``digit`` with minifloat codes replaced by those of finite elements. Digits of other codecs are unchanged."""
    found = _minifloat(codec)
    if found is None:
        return digit
    magnitude = digit & (1 << found.format.bits - 1) - 1
    return torch.where(magnitude >= found.format.finite, digit & ~0x40, digit)


def block_scales(codec: Codec, numbers: torch.Tensor, spread: int = 128, middle: int = 127) -> torch.Tensor:
    """Map arbitrary integers from 0 to 255 to block scales.

    These are powers of two within ``spread`` of ``middle``, or finite e4m3 values.
    """
    found = _minifloat(codec)
    assert found is not None
    whole = numbers.to(torch.int32)
    return whole % spread + middle - spread // 2 if found.scale_dtype == "e8m0" else (whole & 0x7F).clamp_max(0x7E)


def largest_product(codec: Codec) -> float:
    """Return the product of the largest element and the largest e4m3 block scale, or 1 for other codecs."""
    found = _minifloat(codec)
    return 1.0 if found is None else found.format.largest * (448 if found.run_scale == "global_scale" else 1)
