"""Checksums of each token's keys and values, which show whether recorded inputs belong to a cache."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

_INTEGERS = {2: torch.int16, 4: torch.int32}
"""Integer dtypes by element size in bytes. Checksums are computed on bit patterns, so that NaN equals itself."""

_WORD_BYTES = 8
"""Size in bytes of the integers to sum. Elements are combined into such integers if a head's size is a multiple of it."""

_WORDS_AT_ONCE = 1 << 20
"""Maximum number of integers to sum in one operation."""

_FACTOR = 0x9E3779B1
"""Odd factor of the weights. The weight of a token's integer i, counted over all heads, is 2 * i + 1 times this factor."""


def has_checksums(x: Any) -> TypeGuard[torch.Tensor]:
    """Return True if ``x`` is a floating-point tensor ``[batch, kv_head, token, dim]``, for which ``checksums`` can be computed."""
    return isinstance(x, torch.Tensor) and x.dim() == 4 and x.is_floating_point() and x.element_size() in _INTEGERS


def checksums(x: torch.Tensor) -> torch.Tensor:
    """Return one checksum per token, as int64 ``[batch, token]``: a weighted sum of bit patterns modulo 2^64.

    ``x`` is ``[batch, kv_head, token, dim]``. Each head and channel has its own weight.
    """
    batch, heads, tokens, dim = x.shape
    whole = dim * x.element_size() % _WORD_BYTES == 0
    integers = torch.int64 if whole else _INTEGERS[x.element_size()]
    words = dim * x.element_size() // _WORD_BYTES if whole else dim
    weights = ((torch.arange(heads * words, device=x.device) * 2 + 1) * _FACTOR).view(heads, 1, words)
    step = max(1, _WORDS_AT_ONCE // max(1, batch * heads * words))
    sums = []
    for start in range(0, max(1, tokens), step):
        bits = x.detach()[:, :, start : start + step].contiguous().view(integers)
        sums.append((bits * weights).sum((1, 3)))
    return torch.cat(sums, 1)
