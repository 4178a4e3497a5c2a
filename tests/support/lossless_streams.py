"""Random streams for the codec lossless, made from random values and tables.

Random words would seldom form a stream that an encoder can write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy
import torch

from kvpack.formats.lossless import FLOAT_FORMATS, Lossless
from kvpack.formats.rans import TOTAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.base import Codec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def lossless_streams(
    codec: Codec, batch: int, heads: int, tokens: int, draw: Callable[[], int], *, finite: bool = False
) -> dict[str, torch.Tensor] | None:
    """Return the streams of 16-bit values drawn from ``draw``, or None for a codec other than lossless.

    Values include NaN and infinities unless ``finite``.
    """
    if not isinstance(codec, Lossless):
        return None
    form = FLOAT_FORMATS[codec.dtype]
    # NaN and infinity have an odd exponent field.
    mask = 0xFFFF ^ (1 << form.fraction_bits if finite else 0)
    bits = torch.tensor([draw() & mask for _ in range(batch * heads * tokens * codec.dim)], dtype=torch.int32).to(torch.int16)
    weights = numpy.array([[draw() % 7 + 1 for _ in range(form.exponents)] for _ in range(batch * heads)], numpy.int64)
    tables = 1 + weights * (TOTAL - form.exponents) // weights.sum(1, keepdims=True)
    tables[:, 0] += TOTAL - tables.sum(1)
    streams = codec.encode_with_tables(bits.view(batch, heads, tokens, codec.dim).view(DTYPES[codec.dtype]), tables)
    frequencies = torch.from_numpy(tables.reshape(batch, heads, 1, form.exponents).astype(numpy.uint16))
    return {name: (streams | {"frequencies": frequencies})[name] for name in codec.layout(1, 1, 0)}
