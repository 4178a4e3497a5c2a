"""Selection of sequences from a batch, in every stream."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Codec
from .lazy import torch


def select_sequences(codec: Codec, streams: Mapping[str, torch.Tensor], indices: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the streams of the sequences at ``indices``, int64 ``[row]``, in that order.

    Indices must be within the batch and on the streams' device. Rows are copied without decoding. A repeated index repeats its sequence.
    """
    counts, named = codec.entries(streams), codec.select_sequences(streams, indices)
    result = {}
    for name, layout in codec.row_layouts.items():
        if name in named:
            result[name] = named[name]
        elif layout.batch_axis is not None:
            result[name] = take_rows(streams[name], layout.batch_axis, indices)
        else:
            result[name] = take_rows(streams[name], 2, _entry_indices(counts[name], indices))
    return result


def split_sequences(codec: Codec, streams: Mapping[str, torch.Tensor], parts: int) -> list[dict[str, torch.Tensor]]:
    """Split a batch into ``parts`` parts with equal numbers of sequences. Returns the streams of each part.

    Among the streams with one row per entry, only those of raw positions are supported.
    """
    layouts, raw = codec.row_layouts, codec.raw_positions
    by_stream = {name: streams[name].chunk(parts, 0) for name, layout in layouts.items() if layout.batch_axis == 0}
    batch = parts * next(iter(by_stream.values()))[0].shape[0]
    entries: list[dict[str, torch.Tensor]] = [{}] * parts if raw is None else raw.split_sequences(streams, parts, batch)
    # Copy the tensors, because a view would keep the memory of all parts alive.
    return [
        {name: by_stream[name][part].clone() if name in by_stream else entries[part][name] for name in layouts} for part in range(parts)
    ]


def _entry_indices(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the indices of the entries of the sequences at ``indices``, ordered by token and then by position in ``indices``.

    ``counts`` ``[token, batch]`` is the number of entries of each token and sequence.
    """
    first = (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)
    chosen, starts = counts[:, indices].flatten(), first[:, indices].flatten()
    # Entry i of a token and sequence is i rows after its first entry, in the source and in the result.
    moved = starts - (chosen.cumsum(0) - chosen)
    shift = moved.repeat_interleave(chosen)
    return shift + torch.arange(len(shift), device=counts.device)


def take_rows(stream: torch.Tensor, axis: int, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``stream`` along ``axis`` with the indices ``rows``, int64 on the stream's device."""
    # Not every device, and not every version of PyTorch, indexes uint16.
    if stream.dtype == torch.uint16:
        return stream.view(torch.int16).index_select(axis, rows).view(torch.uint16)
    return stream.index_select(axis, rows)
