"""Encode the values of a call block by block, so that the temporaries of each block fit a core's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def encode_in_blocks(
    x: torch.Tensor, tokens_of_one_head: int, encode_block: Callable[[torch.Tensor, int], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Call ``encode_block(block, first token)`` on blocks of tokens that fit a core's cache, and join the streams.

    ``x`` is ``[batch, kv_head, token, dim]``; a block has ``tokens_of_one_head`` tokens, counted over all heads.
    """
    size = max(1, tokens_of_one_head // (x.shape[0] * x.shape[1]))
    blocks = [encode_block(block, size * number) for number, block in enumerate(torch.split(x, size, 2))]
    return {name: torch.cat([block[name] for block in blocks], 2) for name in blocks[0]}


def encode_by_rows(
    x: torch.Tensor, rows_at_once: int, encode_rows: Callable[[torch.Tensor], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Call ``encode_rows`` on chunks of rows ``[row, dim]`` that fit a core's cache, and join the streams in the shape of ``x``."""
    chunks = [encode_rows(rows) for rows in torch.split(x.reshape(-1, x.shape[-1]), rows_at_once)]
    joined = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    return {name: stream.view(*x.shape[:-1], *stream.shape[1:]) for name, stream in joined.items()}
