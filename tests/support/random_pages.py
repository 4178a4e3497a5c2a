"""Keys or values of a layer with a random codec, contents, pages and strides."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from hypothesis import reject
from hypothesis import strategies as st

from kvpack.cache.packed_runs import PackedRuns
from kvpack.cache.side import pack_side
from kvpack.coding.encoding import suppress_rounding_warnings
from kvpack.coding.token_errors import collect_poor_fits
from kvpack.formats.errors import KvpackError
from kvpack.formats.klt import Klt
from kvpack.formats.sidecars import CodecWithSidecars
from support.klt_bases import with_widths_of_heads
from support.strategies import codecs, contents, with_poisoned_padding

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

    from kvpack.cache.side import Side


def with_gaps(stream: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``stream`` inside a larger buffer. Its rows are contiguous, but there are gaps between them."""
    return with_poisoned_padding(stream.flatten(3)).unflatten(3, stream.shape[3:]) if stream.dim() > 4 else with_poisoned_padding(stream)


@st.composite
def sides(draw: DrawFn, batch: int, heads: int, tokens: int, side: str, family: str, plain: bool) -> Side:
    """Draw a side with any codec of a family, any number of pages, any strides, and possibly a tail.

    If ``plain``, the codec has no sidecars.
    """
    codec = draw(codecs(family, bounded=False))
    if isinstance(codec, CodecWithSidecars) and (plain or draw(st.booleans())):
        codec = codec.codec
    dim = codec.dim
    if isinstance(codec, Klt) and draw(st.booleans()):
        count = heads * -(-dim // 8)
        codec = with_widths_of_heads(codec, bytes(draw(st.lists(st.integers(0, 8), min_size=count, max_size=count).filter(any))))
    x = contents(draw(st.sampled_from(("gaussian", "outliers", "constant", "zero"))), (batch, heads, tokens, dim), draw(st.integers(0, 99)))
    x = x.clamp(-100, 100)
    tail = draw(st.sampled_from((0, 0, 1, 3)))
    group = codec.group_tokens
    cuts = draw(st.lists(st.integers(0, max(0, tokens - tail)), max_size=3))
    edges = sorted({0, tokens - tail if tokens > tail else tokens, *(cut // group * group for cut in cuts)})
    try:
        with suppress_rounding_warnings(), collect_poor_fits():
            parts = [pack_side(x[:, :, a:b], codec, 0, side) for a, b in pairwise(edges)]
    except KvpackError:
        reject()
    if not parts:
        reject()
    pages = [
        replace(page, streams={name: with_gaps(stream) for name, stream in page.streams.items()}) for part in parts for page in part.runs
    ]
    dtype = draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32)))
    return replace(parts[0], runs=PackedRuns.from_runs(pages), tail=with_poisoned_padding(x[:, :, edges[-1] :].to(dtype)))
