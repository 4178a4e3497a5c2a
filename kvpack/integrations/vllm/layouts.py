"""The page layouts of vLLM's attention backends, and rows of the primary tier as a PageBuffer.

A row contains the blocks of a chunk, worker by worker and layer by layer. A layer of a kvpack page is one block of one layer of one worker:
so every layout here has strides, and nothing is copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvpack.formats.errors import InvalidParameter
from kvpack.pages.buffer import PageBuffer
from kvpack.pages.geometry import PageGeometry
from kvpack.pages.layout import PageLayout

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
"""kvpack's names of vLLM's cache dtypes. 8-bit dtypes depend on scales outside the pages, and are kept as bytes."""


class Arrangement(NamedTuple):
    """The offset of the first value and the strides [head, token, channel] of K and of V in a block."""

    k: tuple[int, tuple[int, int, int]]
    v: tuple[int, tuple[int, int, int]]


def arrangement(name: str, heads: int, tokens: int, dim: int) -> Arrangement:
    """Return the layout of a block by name. Raises InvalidParameter, which lists the names."""
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
            # For each head keys by channels, then values by tokens.
            return Arrangement((0, (head, 1, tokens)), (tokens * dim, (head, dim, 1)))
    raise InvalidParameter(f"layout is {name!r}, expected one of adjacent, adjacent-tokens-first, split and cpu-vec")


class Rows:
    """The layout of rows: chunks of ``blocks`` blocks, each of ``tokens`` tokens, ``heads`` heads and ``dim`` in the layout ``name``."""

    def __init__(self, name: str, blocks: int, heads: int, tokens: int, dim: int, dtype: str) -> None:
        self.name, self._blocks = name, blocks
        self._arranged = arrangement(name, heads, tokens, dim)
        self._elements = 2 * heads * tokens * dim
        self.geometry = PageGeometry(blocks, heads, tokens, dim, dim, dtype)

    @property
    def nbytes(self) -> int:
        """The size of a row in bytes, without padding."""
        return self._blocks * self._elements * self.geometry.torch_dtype.itemsize

    def buffer(self, memory: torch.Tensor) -> PageBuffer:
        """View ``memory``, uint8 ``[row, byte]``, as slots, one for each row. Raises InvalidParameter."""
        values = memory[:, : self.nbytes].view(self.geometry.torch_dtype)
        return PageBuffer(self.geometry, *(self._blocks_of(values, *place) for place in self._arranged))

    def certify(self, layout: PageLayout) -> None:
        """Raise InvalidParameter unless ``layout``, measured with an engine's own writer for one block, is the named one."""
        page = torch.arange(self._elements, device="cpu")[None]
        for side, place in zip("kv", self._arranged, strict=True):
            if not torch.equal(self._blocks_of(page, *place)[0][0], layout.places[side][0]):
                raise InvalidParameter(
                    f"vLLM's pages do not have the layout {self.name!r}: its writer puts values elsewhere; try another layout"
                )

    def _blocks_of(self, values: torch.Tensor, first: int, strides: tuple[int, int, int]) -> list[torch.Tensor]:
        """Return views of the keys or the values of every block, each ``[row, head, token, channel]``."""
        shape = (values.shape[0], self.geometry.heads, self.geometry.tokens, self.geometry.dim_k)
        begins = range(values.storage_offset() + first, values.storage_offset() + first + values.shape[1], self._elements)
        return [values.as_strided(shape, (values.stride(0), *strides), begin) for begin in begins]
