"""Random streams for the codec transform: levels of any size, mostly small, in chunks like those of an encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy
import torch

from kvpack.formats.transform import Transform

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.base import Codec


def transform_streams(codec: Codec, batch: int, heads: int, tokens: int, draw: Callable[[], int]) -> dict[str, torch.Tensor] | None:
    """Return streams of random levels at random positions, or None for another codec. The last columns are often 0."""
    if not isinstance(codec, Transform):
        return None

    def level() -> int:
        size = draw() % 64
        return size % 4 - 1 if size < 58 else draw() % 2001 - 1000

    groups = []
    for start in range(0, tokens, codec.chunk):
        shape = (batch, heads, codec.dim, min(codec.chunk, tokens - start))
        used = [draw() % (codec.dim + 1) for _ in range(batch * heads)]
        values = [[level() if c < count else 0 for c in range(codec.dim) for _ in range(shape[3])] for count in used]
        groups.append(numpy.array(values, numpy.int64).reshape(shape))
    source = codec.source_for(heads)
    arrays = codec.encode_levels(groups, source, (batch, heads))
    if codec.side == "k":
        positions = [[[draw() % (1 << 16), draw() % 16] for _ in groups] for _ in range(batch)]
        arrays["positions"] = numpy.array(positions, numpy.uint16).reshape(batch, 1, len(groups), 2)
    return {name: torch.from_numpy(numpy.array(arrays[name], numpy.uint16, order="C")) for name in codec.layout(1, 1, 0)}
