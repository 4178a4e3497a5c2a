"""How vLLM's attention backends lay out a page, and rows of the primary tier as a PageBuffer.

A row holds, worker by worker and layer by layer, the blocks of a chunk. What kvpack calls a layer of a page is one block of one layer
of one worker, or a part of it with tokens of its own: so every arrangement here has strides, and nothing is copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvpack.formats.errors import InvalidParameter
from kvpack.pages.buffer import PageBuffer
from kvpack.pages.geometry import PageGeometry
from kvpack.pages.layout import PageLayout

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
"""kvpack's names of vLLM's cache dtypes; those of 8 bits depend on scales outside of the pages, and are kept as bytes."""
CPU_TOKENS = 32
"""Tokens that vLLM's attention on the CPU keeps together."""


class Arrangement(NamedTuple):
    """For pages of ``tokens`` tokens: the tokens of a part, and the first value and strides [part, head, token, channel] of K and of V."""

    tokens: int
    k: tuple[int, tuple[int, int, int, int]]
    v: tuple[int, tuple[int, int, int, int]]


def arrangement(name: str, heads: int, tokens: int, dim: int) -> Arrangement:
    """The arrangement of a block by its name. Raises InvalidParameter, which lists the names."""
    row = 2 * dim
    match name:
        case "adjacent":
            # [head, token, K and V]: FlashAttention, Triton, FlashInfer but for nvfp4, in vLLM's layout LBHNC.
            strides = (0, tokens * row, row, 1)
            return Arrangement(tokens, (0, strides), (dim, strides))
        case "adjacent-tokens-first":
            strides = (0, row, heads * row, 1)
            return Arrangement(tokens, (0, strides), (dim, strides))
        case "split":
            # [K or V, token, head]: b12x.
            strides = (0, dim, heads * dim, 1)
            return Arrangement(tokens, (0, strides), (heads * tokens * dim, strides))
        case "cpu-vec":
            if tokens % CPU_TOKENS:
                raise InvalidParameter(f"layout cpu-vec has blocks of a multiple of {CPU_TOKENS} tokens, found {tokens}")
            part, head = CPU_TOKENS * dim, 2 * tokens * dim
            return Arrangement(CPU_TOKENS, (0, (part, head, 1, CPU_TOKENS)), (tokens * dim, (part, head, dim, 1)))
    raise InvalidParameter(f"layout is {name!r}, expected one of adjacent, adjacent-tokens-first, split and cpu-vec")


class Rows:
    """Rows of chunks whose blocks, ``blocks`` in a row, have ``tokens`` tokens of ``heads`` heads of ``dim`` in the layout ``name``."""

    def __init__(self, name: str, blocks: int, heads: int, tokens: int, dim: int, dtype: str) -> None:
        self.name, self._blocks = name, blocks
        self._arranged = arrangement(name, heads, tokens, dim)
        self._elements, self._parts = 2 * heads * tokens * dim, tokens // self._arranged.tokens
        self.geometry = PageGeometry(blocks * self._parts, heads, self._arranged.tokens, dim, dim, dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of a row without padding."""
        return self._blocks * self._elements * self.geometry.torch_dtype.itemsize

    def buffer(self, memory: torch.Tensor) -> PageBuffer:
        """``memory``, uint8 ``[row, byte]``, as slots, one for each row. Raises InvalidShape."""
        values = memory[:, : self.nbytes].view(self.geometry.torch_dtype)
        return PageBuffer(self.geometry, *(self._parts_of(values, *place) for place in (self._arranged.k, self._arranged.v)))

    def certify(self, layout: PageLayout) -> None:
        """Raise InvalidParameter unless ``layout``, found by an engine's own writer for one block, is the named arrangement."""
        page = torch.arange(self._elements)[None]
        for side, place in zip("kv", (self._arranged.k, self._arranged.v), strict=True):
            expected = torch.cat([part[0] for part in self._parts_of(page, *place)[: self._parts]], 1)
            if not torch.equal(expected, layout.places[side][0]):
                raise InvalidParameter(f"the layout {self.name!r} is not that of this engine's pages: its writer puts values elsewhere")

    def _parts_of(self, values: torch.Tensor, first: int, strides: tuple[int, int, int, int]) -> list[torch.Tensor]:
        """One side of every part of every block, ``[row, head, token, channel]``."""
        part, *steps = strides
        shape = (values.shape[0], self.geometry.heads, self.geometry.tokens, self.geometry.dim_k)
        begins = [
            block * self._elements + number * part for block in range(values.shape[1] // self._elements) for number in range(self._parts)
        ]
        return [values.as_strided(shape, (values.stride(0), *steps), values.storage_offset() + first + begin) for begin in begins]
