"""lossless on the CPU: exponents decoded and joined with signs and fractions, bit for bit, for bf16 in its default packing."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from kvpack.formats.lossless import Lossless

from . import library
from .unpack import FEWEST_VALUES

if TYPE_CHECKING:
    from .sides import Side

VALUES_AT_ONCE = 1 << 22
"""Values whose exponents are in memory at once, if a chunk of every head has no more: they fit a processor's cache."""


def supports(side: Side, dtype: torch.dtype) -> bool:
    """Whether C unpacks ``side``: values of bf16 to bf16, whose signs and fractions are the bytes of one plane."""
    codec = side.codec
    if library.library() is None or type(codec) is not Lossless or codec.dtype != "bf16" or dtype != torch.bfloat16:
        return False
    packing = codec.packings()["signed_fractions"]
    return (
        packing.fields == 2 and packing.symbols % 2 == 0 and all(page.streams["signed_fractions.0"].stride(3) == 1 for page in side.pages)
    )


def unpack_into(side: Side, out: torch.Tensor, threads: int | None = None, level: int = 0) -> None:
    """Write all tokens of a side that ``supports`` takes to ``out`` ``[batch, kv_head, token, dim]``, whole rows.

    ``level`` is a place in ``library.levels()``. Raises MemoryError.
    """
    codec = side.codec
    assert isinstance(codec, Lossless)
    batch, heads, _, dim = out.shape
    at_once = max(1, VALUES_AT_ONCE // (batch * heads * dim * codec.chunk)) * codec.chunk
    first = 0
    for page in side.pages:
        for start in range(0, page.tokens, at_once):
            stop = min(start + at_once, page.tokens)
            _join(codec, page.rows(start, stop), out[:, :, first + start : first + stop], threads, level)
        first += page.tokens
    out[:, :, first:] = side.tail


def _join(codec: Lossless, streams: dict[str, torch.Tensor], out: torch.Tensor, threads: int | None, level: int) -> None:
    compiled = library.library()
    assert compiled is not None
    batch, heads, tokens, dim = out.shape
    exponents, plane = codec.exponents(streams), streams["signed_fractions.0"]
    threads = min(library.checked_threads(threads, torch.get_num_threads()), 1 + out.numel() // FEWEST_VALUES)
    call = library.Join(
        exponents.ctypes.data,
        _stream(plane),
        _stream(out),
        batch,
        heads,
        tokens,
        dim,
        codec.chunk,
        exponents.shape[3] * dim,
        threads,
        level,
    )
    if compiled.kvpack_join(ctypes.byref(call)):
        raise MemoryError("there is not enough memory for the threads of unpacking")


def _stream(x: torch.Tensor) -> library.Stream:
    return library.Stream(x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:3]))
