"""Helpers that encode values block by block, so that each block's temporaries fit in a core's cache."""

from __future__ import annotations

from collections.abc import Callable

from .lazy import torch


def encode_in_blocks(
    x: torch.Tensor, head_tokens_per_block: int, encode_block: Callable[[torch.Tensor, int], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Encode blocks of tokens one after another, and join their streams.

    ``x`` is ``[batch, kv_head, token, dim]``, and ``encode_block(block, first_token)`` returns the streams of a block. A block has about
    ``head_tokens_per_block`` tokens, summed over all heads and sequences.
    """
    size = max(1, head_tokens_per_block // (x.shape[0] * x.shape[1]))
    blocks = [encode_block(block, size * number) for number, block in enumerate(torch.split(x, size, 2))]
    return {name: torch.cat([block[name] for block in blocks], 2) for name in blocks[0]}


def encode_by_rows(
    x: torch.Tensor, rows_at_once: int, encode_rows: Callable[[torch.Tensor], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Encode chunks of rows one after another and join the streams.

    Args:
        x: Values ``[batch, kv_head, token, dim]``.
        rows_at_once: Number of rows per chunk. Choose it so that a chunk's temporaries fit in a core's cache.
        encode_rows: Encodes rows ``[row, dim]`` to streams ``[row, ...]``.

    Returns:
        The streams ``[batch, kv_head, token, ...]``.

    >>> x = torch.randn(1, 2, 100, 64)
    >>> encode = kvpack.formats.encoding_blocks.encode_by_rows
    >>> encode(x, 32, lambda rows: {"norm": rows.norm(dim=-1)})["norm"].shape
    torch.Size([1, 2, 100])
    """
    chunks = [encode_rows(rows) for rows in torch.split(x.reshape(-1, x.shape[-1]), rows_at_once)]
    joined = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    return {name: stream.view(*x.shape[:-1], *stream.shape[1:]) for name, stream in joined.items()}
