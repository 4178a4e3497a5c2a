"""Choice, in C, of the tokens of an engine's page that are stored raw, by the norms of its keys in place
(``formats.raw_positions.in_slots``).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy
import torch

from kvpack.formats.head_norms import FEW, GROUP_RATIO, HEADS, PAGE, SHARED_RATIO, TOKENS

from . import encode, library

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvpack.formats.raw_positions import RawPositions

    from .pages import Values

Chosen = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


class Chooser:
    """Chooses the raw tokens of ``layers`` layers of a page by keys of ``heads`` heads, ``tokens`` tokens, ``dim`` values and ``dtype``.

    ``shared``: what shares scales of the keys.
    """

    def __init__(
        self,
        raw: RawPositions,
        layers: int,
        heads: int,
        tokens: int,
        dim: int,
        dtype: torch.dtype,
        token_group: int,
        slots: int,
        shared: Collection[str],
    ) -> None:
        self._heads = heads
        self._layers, self._tokens, self._slots = layers, tokens, slots
        number = encode.DTYPES.index(dtype)
        sizes = {"layers": layers, "heads": heads, "tokens": tokens, "dim": dim, "slots": slots, "page": PAGE, "few": FEW}
        high = raw.high_norm if token_group > 1 else 0.0
        of_shared = {"shared": (HEADS, SHARED_RATIO), "grouped": (TOKENS, GROUP_RATIO)}
        ratios = {name: ratio if of in shared and raw.high_norm else 0.0 for name, (of, ratio) in of_shared.items()}
        self._call = library.RawSlots(dtype=number, low=raw.low_norm, high=high, **ratios, **sizes)

    def run(self, keys: Values, threads: int) -> tuple[Chosen, Chosen]:
        """The raw tokens of each layer, int64 ``[layer, slot]``, ascending and -1 behind the last, and counts of ``[layer, 2]``.

        They count tokens without a slot, as ``tokens_of_slots``. Raises MemoryError.
        """
        chosen = numpy.empty((self._layers, self._slots), numpy.int64)
        left_out, norms = numpy.zeros((self._layers, 2), numpy.int64), numpy.empty((self._layers, self._heads, self._tokens), numpy.float32)
        call = library.RawSlots.from_buffer_copy(self._call)
        call.x, call.threads = library.Stream(*keys), threads
        call.norms, call.chosen, call.left_out = norms.ctypes.data, chosen.ctypes.data, left_out.ctypes.data
        _run(call)
        return chosen, left_out


def measures(x: torch.Tensor) -> bool:
    """Return True if C finds the norms of ``x`` ``[batch, kv_head, token, dim]``."""
    return chooses(x.dtype) and (x.stride(3) == 1 or x.shape[3] == 1)


def norms(x: torch.Tensor) -> torch.Tensor:
    """``formats.head_norms.norms_of``. Raises MemoryError."""
    batch, heads, tokens, dim = x.shape
    found, left_out = torch.zeros(batch, heads, tokens, dtype=torch.float32, device="cpu"), numpy.zeros((batch, 2), numpy.int64)
    if x.numel():
        values = library.Stream.of(x)
        sizes = {"layers": batch, "heads": heads, "tokens": tokens, "dim": dim, "page": PAGE}
        pointers = {"norms": found.data_ptr(), "left_out": left_out.ctypes.data}
        _run(library.RawSlots(x=values, dtype=encode.DTYPES.index(x.dtype), threads=1, **pointers, **sizes))
    return found


def _run(call: library.RawSlots) -> None:
    compiled = library.library()
    assert compiled is not None
    if compiled.kvpack_raw_slots(ctypes.byref(call)):
        raise MemoryError("there is not enough memory to choose raw tokens")


def chooses(dtype: torch.dtype) -> bool:
    """Return True if C chooses by keys of ``dtype``."""
    return library.library() is not None and dtype in encode.DTYPES
