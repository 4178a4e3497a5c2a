"""The lossless codec on the CPU, for bfloat16 in the default packing: exact splitting and joining of exponents, signs and fractions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy
import torch

from kvpack.formats.lossless import Lossless
from kvpack.runtime.memory import empty

from . import library
from . import rans as c_rans
from .unpack import MIN_VALUES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.formats.base import Codec
    from kvpack.formats.rans import Numbers

    from .sides import Side

MAX_VALUES_AT_ONCE = 1 << 21
"""Maximum number of values per block of tokens, so that a block's exponents fit in the processor's cache.

A block has at least one chunk.
"""


def supports(side: Side, dtype: torch.dtype) -> bool:
    """Return True if the C kernels can unpack ``side`` to ``dtype``. Both must be bfloat16, and the packing must be the default."""
    return _supports_codec(side.codec, dtype) and all(page.streams["signed_fractions.0"].stride(3) == 1 for page in side.runs)


def supports_encoding(codec: Codec, x: torch.Tensor) -> bool:
    """Return True if the C kernels can encode ``x`` ``[batch, kv_head, token, dim]``: nonempty bfloat16 values, in the default packing."""
    return _supports_codec(codec, x.dtype) and not x.requires_grad and x.stride(3) == 1 and x.numel() > 0


def _supports_codec(codec: Codec, dtype: torch.dtype) -> bool:
    if library.library() is None or type(codec) is not Lossless or codec.dtype != "bf16" or dtype != torch.bfloat16:
        return False
    packing = codec.packings()["signed_fractions"]
    return packing.fields == 2 and packing.symbols % 2 == 0


def encode(
    codec: Lossless, x: torch.Tensor, previous: Mapping[str, torch.Tensor] | None, threads: int | None = None, level: int = 0
) -> dict[str, torch.Tensor]:
    """Encode ``x`` to the same streams as ``formats/``. ``supports_encoding`` must return True for it.

    ``previous`` contains the streams of the preceding tokens, if any. ``level`` is an index into ``library.levels()``.
    """
    batch, heads, tokens, dim = x.shape
    counts = numpy.empty((batch * heads, 256), numpy.int64)
    plane = empty((batch, heads, tokens, dim // 2), torch.uint16, x.device)
    rows = min(max(1, MAX_VALUES_AT_ONCE // (batch * heads * dim * codec.chunk)), -(-tokens // codec.chunk))
    exponents = numpy.empty((rows * batch * heads, min(codec.chunk, tokens) * dim), numpy.uint8)
    call = library.SplitArguments(batch=batch, heads=heads, dim=dim, chunk=codec.chunk, longest=exponents.shape[1], level=level)
    call.threads = library.thread_count(threads, 1 + x.numel() // MIN_VALUES)

    def run(start: int, stop: int, *, exponents: Numbers | None = None, counts: Numbers | None = None) -> None:
        call.x, call.plane = (library.Stream.describe(tensor[:, :, start:]) for tensor in (x, plane))
        call.tokens = stop - start
        call.exponents, call.counts = (None if array is None else array.ctypes.data for array in (exponents, counts))
        library.run("split", call, "encode")

    run(0, tokens, counts=counts)
    tables = codec.choose_frequencies(counts, previous)
    parts = []
    for start in range(0, tokens, rows * codec.chunk):
        stop = min(start + rows * codec.chunk, tokens)
        run(start, stop, exponents=exponents)
        lengths = numpy.diff(numpy.append(numpy.arange(start, stop, codec.chunk), stop)) * dim
        table = numpy.tile(numpy.arange(batch * heads), len(lengths))
        symbols = exponents[: len(table)]
        parts.append(c_rans.encode_separately(symbols, numpy.repeat(lengths, batch * heads), tables, table, threads, level))
    chunks = c_rans.join_chunks(parts)
    frequencies = torch.from_numpy(tables.astype(numpy.uint16)).view(batch, heads, 1, 256)
    streams = codec.chunk_streams(chunks, batch, heads, x.device) | {"signed_fractions.0": plane, "frequencies": frequencies}
    return {name: streams[name] for name in codec.layout(batch, heads, tokens)}


def unpack_into(side: Side, out: torch.Tensor, threads: int | None = None, level: int = 0) -> None:
    """Unpack all tokens of ``side`` into ``out`` ``[batch, kv_head, token, dim]`` with contiguous channels.

    ``supports`` must return True for ``side``. ``level`` is an index into ``library.levels()``.
    """
    codec = side.codec
    assert isinstance(codec, Lossless)
    batch, heads, _, dim = out.shape
    block_tokens = max(1, MAX_VALUES_AT_ONCE // (batch * heads * dim * codec.chunk)) * codec.chunk
    first = 0
    for page in side.runs:
        for start in range(0, page.tokens, block_tokens):
            stop = min(start + block_tokens, page.tokens)
            _join_values(codec, page.rows(start, stop), out[:, :, first + start : first + stop], threads, level)
        first += page.tokens
    out[:, :, first:] = side.tail


def _join_values(codec: Lossless, streams: dict[str, torch.Tensor], out: torch.Tensor, threads: int | None, level: int) -> None:
    batch, heads, tokens, dim = out.shape
    exponents, plane = codec.exponents(streams), streams["signed_fractions.0"]
    threads = library.thread_count(threads, 1 + out.numel() // MIN_VALUES)
    call = library.JoinArguments(
        exponents.ctypes.data,
        library.Stream.describe(plane),
        library.Stream.describe(out),
        batch,
        heads,
        tokens,
        dim,
        codec.chunk,
        exponents.shape[3] * dim,
        threads,
        level,
    )
    library.run("join", call, "unpack")
