"""The page layouts of vLLM's attention backends. They are described by strides, so nothing is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from kvpack.pages.layout import PageLayout

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
"""kvpack's names of vLLM's cache dtypes. Values in 8-bit dtypes depend on scales outside the pages, and are kept as bytes."""


class Arrangement(NamedTuple):
    """The offset of the first value in a block, and the strides [head, token, channel], for K and for V."""

    k: tuple[int, tuple[int, int, int]]
    v: tuple[int, tuple[int, int, int]]


def arrangement(name: str, heads: int, tokens: int, dim: int) -> Arrangement:
    """Return the arrangement called ``name`` for a block of the given shape.

    For an unknown name, raises InvalidParameter with a message that lists the valid names.
    """
    row, head = 2 * dim, 2 * tokens * dim
    match name:
        case "adjacent":
            # [head, token, K and V]: FlashAttention, Triton, FlashInfer except for nvfp4, in vLLM's layout LBHNC.
            return Arrangement((0, (head, row, 1)), (dim, (head, row, 1)))
        case "adjacent-tokens-first":
            return Arrangement((0, (row, heads * row, 1)), (dim, (row, heads * row, 1)))
        case "split":
            # [K or V, token, head]: b12x.
            return Arrangement((0, (dim, heads * dim, 1)), (heads * tokens * dim, (dim, heads * dim, 1)))
        case "cpu-vec":
            # For each head, keys as [channel, token] are followed by values as [token, channel].
            return Arrangement((0, (head, 1, tokens)), (tokens * dim, (head, dim, 1)))
    raise InvalidParameter(f"layout is {name!r}, expected one of adjacent, adjacent-tokens-first, split and cpu-vec")


def check_layout_name(name: str, layout: PageLayout) -> None:
    """Raise InvalidParameter unless ``layout``, which was detected with an engine's own writer, is the layout called ``name``."""
    geometry = layout.geometry
    heads, tokens, dim = geometry.heads, geometry.tokens, geometry.dim_k
    block = torch.arange(2 * heads * tokens * dim, device="cpu")
    for side, (first, strides) in zip("kv", arrangement(name, heads, tokens, dim), strict=True):
        if not torch.equal(block.as_strided((heads, tokens, dim), strides, first), layout.positions[side][0]):
            raise InvalidParameter(
                f"layout is {name!r}, but vLLM's own writer stores keys or values at other offsets: try another layout"
            )
