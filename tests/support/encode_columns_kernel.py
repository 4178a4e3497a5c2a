"""A kernel that only packs: it calls the encoders' packing functions with digits that it loads from tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.kernels.encode.columns import WARPS, add_digits, empty_columns, store_columns

if TYPE_CHECKING:
    from kvpack.formats.columns import Columns
    from kvpack.kernels.encode.columns import PackingPlan

BLOCK_TOKENS = 16


def pack(plan: PackingPlan, packing: Columns, digits: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    """Pack ``digits``, each uint16 ``[token, symbols]`` on the CPU with at most ``BLOCK_TOKENS`` tokens, and return the planes."""
    tokens, symbols = digits[0].shape
    # Digits past the last symbol are not stored.
    padded = torch.full((len(digits), BLOCK_TOKENS, max(16, 1 << (symbols - 1).bit_length())), 77, dtype=torch.int32)
    padded[:, :tokens, :symbols] = torch.stack(digits)
    planes = [torch.full((tokens, words), 0xFFFF, dtype=torch.uint16, device=device) for words in packing.planes]
    given = planes if packing.column_bytes % 2 == 0 else [*planes[:-1], planes[-1].view(torch.uint8)]
    _pack[(1,)](
        tuple(padded.to(device)), plan.place_values, tuple(given), tokens, SYMBOLS=padded.shape[2], STREAMS=plan.streams,
        TOKENS=BLOCK_TOKENS, num_warps=WARPS,
    )  # fmt: skip
    return [plane.cpu() for plane in planes]


@triton.jit  # type: ignore[untyped-decorator]
def _pack(
    given: tl.tuple,
    place_values: tl.tensor,
    planes: tl.tuple,
    tokens: tl.tensor,
    SYMBOLS: tl.constexpr,
    STREAMS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    row = tl.arange(0, TOKENS)[:, None].to(tl.int64)
    place = row * SYMBOLS + tl.arange(0, SYMBOLS)[None, :]
    digits = ()
    for digit in tl.static_range(len(given)):
        digits = digits + (tl.load(given[digit] + place),)  # noqa: RUF005
    sums = add_digits(empty_columns(STREAMS, TOKENS), digits, place_values, 0, SYMBOLS, SYMBOLS, STREAMS)
    store_columns(sums, planes, row, row < tokens, STREAMS)
