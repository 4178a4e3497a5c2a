"""Dtypes and layouts of stored streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any

from .lazy import numpy, torch

HALF_LIMIT = 65520.0
"""Smallest number that rounds to infinity in float16. The largest finite float16 is 65504."""

DTYPE_BYTES = {"U8": 1, "U16": 2, "F16": 2, "BF16": 2, "F32": 4}
"""Bytes per value of each stored dtype, by safetensors name."""
NUMPY_DTYPES = {"U8": "u1", "U16": "<u2", "F16": "<f2", "BF16": "<u2", "F32": "<f4"}
"""NumPy dtype of each stored dtype. Bfloat16 is read as uint16."""

NORMS = {"fp16": "F16", "fp32": "F32"}
"""Stored dtypes of norms and factors, by parameter value."""


@dataclass(frozen=True)
class Layout:
    """Dtype and shape of one stored stream.

    Attributes:
        dtype: Stored dtype by its safetensors name: U8, U16, F16, BF16 or F32.
        shape: ``[batch, kv_head or 1, row, ...]``.
        tokens_per_row: Number of consecutive tokens that one row covers.
        per: The unit that a row belongs to: ``"token"`` (``tokens_per_row`` tokens), ``"run"`` (a whole run), or ``"entry"`` (the number of
            rows for ``tokens_per_row`` tokens depends on stored flags or counts; see ``Codec.entries``).
        batch_axis: Axis of the sequences. None if the first axis is 1 for any batch size: rows are then entries, ordered by token and
            sequence.

    Source: spec/container.md, Layers.

    >>> kvpack.formats.streams.Layout("F16", (1, 8, 1000)).strides
    (8000, 1000, 1)
    """

    dtype: str
    shape: tuple[int, ...]
    tokens_per_row: int = 1
    per: str = "token"
    batch_axis: int | None = 0

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of a contiguous array of this shape, in values."""
        return _strides(self.shape)

    def array(self, data: memoryview) -> numpy.ndarray[Any, Any]:
        """View stored bytes as a NumPy array of this shape.

        Args:
            data: The stored bytes, little-endian.

        Returns:
            A view of ``data`` with the dtype that ``NUMPY_DTYPES`` names; bfloat16 is viewed as uint16.
        """
        array: numpy.ndarray[Any, Any] = numpy.frombuffer(data, NUMPY_DTYPES[self.dtype]).reshape(self.shape)
        return array


@lru_cache(maxsize=256)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate((max(1, size) for size in reversed(shape[1:])), mul, initial=1))[::-1]


class EntryStreams:
    """Interface of codecs and sidecars for streams with one row per entry. By default, there are no such streams."""

    @property
    def bases_needed(self) -> frozenset[bytes]:
        """SHA-256 of each basis that is needed to decode the values."""
        return frozenset()

    def default_entry_counts(self, batch: int, heads: int, tokens: int) -> dict[str, int]:
        """Return the number of rows of each stream with one row per entry, for a run of ``tokens`` ordinary tokens."""
        return {}

    def entries(self, streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the number of rows of each token and sequence, for each stream with one row per entry: integers ``[token, batch]``.

        An entry that covers ``tokens_per_row`` tokens counts once: integers ``[row, batch]``.
        """
        return {}

    def entry_tokens(self, streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the token indices of used entries, int64 and ascending, for each stream whose entries store token indices."""
        return {}

    def shift_tokens(self, streams: Mapping[str, torch.Tensor], tokens: int | torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the streams in ``entry_tokens`` with ``tokens`` added to their token indices. Unused entries are dropped.

        ``tokens`` is one integer, or int64 ``[entry]``.
        """
        return {}

    def select_sequences(self, streams: Mapping[str, torch.Tensor], indices: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the streams in ``entry_tokens`` for the sequences at ``indices``, int64 ``[row]``, in that order."""
        return {}
