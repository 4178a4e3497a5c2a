"""Frames of a basis: the coordinates in which the ``transform`` codec represents one layer's keys or values.

A frame consists of a mean and, for each column, a vector of channels, a scale (the column's spread), and the index of the symbol table that
fits the scale. Keys are represented as they are before RoPE. Source: spec/basis.md, Transform matrices.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from . import rans
from .errors import InvalidParameter
from .inverses import check_decoded_range, invert_for_encoding
from .lazy import numpy, torch
from .tables import MAX_CACHED_TABLES

if TYPE_CHECKING:
    Numbers = numpy.ndarray[Any, Any]

PAIRINGS = ("halves", "neighbours")
"""Pairs of channels that one RoPE frequency rotates: i and i + pairs, or 2i and 2i + 1."""

MAX_TABLES = 64
MAX_ALPHABET = 256
MAX_FREQUENCY = 2.0
"""Maximum frequency in radians per position. At lower frequencies, float64 is precise enough for the angles of all positions."""

SCALES_PER_TABLE = 4
"""Number of consecutive scales that share a table; an octave has 16 scales."""

SCALES_PER_OCTAVE = 16
"""Number of scales per factor of 2 in size. The codec's steps have the same spacing."""

MAX_LEVEL = 2**31 - 1
"""Maximum magnitude of a column's level (a number of steps)."""

_ROTATED_TOKENS = 1 << 12
"""Number of tokens that are rotated together. Angles of later tokens are computed from the angles of the first tokens."""


class Rope(NamedTuple):
    """Rotary embedding of keys: ``frequencies`` in radians per position, float32, for the channel pairs that ``pairing`` selects.

    The frequencies are valid for sequences of at most ``longest`` tokens.
    """

    frequencies: tuple[float, ...]
    pairing: str
    longest: int | None = None

    def rotate(self, x: torch.Tensor, first: int, *, inverse: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the embedding to ``x``, float32 ``[..., token, dim]``. With ``inverse``, undo it.

        ``first`` is the position of the first token. Unless ``out`` is None, the result is written to it.
        """
        pairs = len(self.frequencies)
        sign = -1 if inverse else 1
        halves = slice(0, pairs), slice(pairs, 2 * pairs)
        first_half, second = halves if self.pairing == "halves" else (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        out = torch.empty_like(x) if out is None else out
        out[..., 2 * pairs :] = x[..., 2 * pairs :]
        for start in range(0, x.shape[-2], _ROTATED_TOKENS):
            source, target = x[..., start : start + _ROTATED_TOKENS, :], out[..., start : start + _ROTATED_TOKENS, :]
            cos, sin = (part.to(x.device) for part in self._cos_sin(first + start, source.shape[-2]))
            torch.mul(source[..., first_half], cos, out=target[..., first_half]).addcmul_(source[..., second], sin, value=-sign)
            torch.mul(source[..., second], cos, out=target[..., second]).addcmul_(source[..., first_half], sin, value=sign)
        return out

    def _cos_sin(self, first: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines for positions from ``first`` on, at most ``_ROTATED_TOKENS``: float32 ``[token, pair]`` each."""
        cos, sin = (table[:tokens] for table in first_cos_sin(self.frequencies))
        # Angles at large positions need binary64, but sums and products of their cosines and sines do not.
        at = torch.tensor(self.frequencies, dtype=torch.float64, device="cpu") * first
        shift_cos, shift_sin = at.cos().to(torch.float32), at.sin().to(torch.float32)
        return (cos * shift_cos).addcmul_(sin, shift_sin, value=-1), (sin * shift_cos).addcmul_(cos, shift_sin)


@lru_cache(MAX_CACHED_TABLES)
def first_cos_sin(frequencies: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines for the first ``_ROTATED_TOKENS`` positions, float32 ``[token, pair]`` each."""
    angles = torch.arange(_ROTATED_TOKENS, dtype=torch.float64, device="cpu")[:, None]
    angles = angles * torch.tensor(frequencies, dtype=torch.float64, device="cpu")
    return angles.cos().to(torch.float32), angles.sin().to(torch.float32)


class SymbolTables:
    """Tables for entropy coding.

    ``frequencies``, int64 ``[table, symbol]``, sum to 2^12 in each table. Symbol 0 is the escape symbol, and the other symbols are the
    levels from -``max_level`` to ``max_level``. ``values``, float32 ``[table, symbol - 1]``, are the decoded values of the levels, in
    quantization steps.
    """

    def __init__(self, frequencies: Numbers, values: torch.Tensor) -> None:
        self.frequencies = frequencies.astype(numpy.int64)
        self.values = values.to(torch.float32)

    @property
    def count(self) -> int:
        return len(self.frequencies)

    @property
    def alphabet(self) -> int:
        return int(self.frequencies.shape[1])

    @property
    def max_level(self) -> int:
        """Largest level that has a symbol."""
        return (self.alphabet - 2) // 2

    @cached_property
    def symbol_values(self) -> torch.Tensor:
        """Decoded value of every symbol in quantization steps, float32 ``[table · symbol]``. The value of the escape symbol is 0."""
        return torch.nn.functional.pad(self.values, (1, 0)).flatten()

    @cached_property
    def bits(self) -> Numbers:
        """Average bits per symbol of each table, including escapes: float64 ``[table]``."""
        counts = self.frequencies.astype(numpy.float64)
        return (rans.cost_bits(counts, self.frequencies) + counts[:, 0] * ESCAPE_BITS) / rans.TOTAL


ESCAPE_BITS = 32
"""Number of bits that follow an escape symbol: a level that has no symbol of its own."""


class Frames:
    """Frames of one layer's keys or values: one per head, or a single frame over all channels of all heads.

    ``rows`` are float32 ``[frame, 1 + column, channel]``; the first row is the mean. ``scales`` are ``[frame, column]``.
    """

    def __init__(self, rows: torch.Tensor, scales: Numbers, tables: SymbolTables, rope: Rope | None = None) -> None:
        self.rows = rows.to(torch.float32)
        self.scales = scales.astype(numpy.int64)
        self.tables = tables
        self.rope = rope
        self._device_copies: dict[str, torch.Tensor] = {}

    @property
    def count(self) -> int:
        return int(self.rows.shape[0])

    @property
    def columns(self) -> int:
        """Number of columns of a frame, which is also the number of channels."""
        return int(self.rows.shape[2])

    def heads(self, dim: int) -> int:
        return self.count * self.columns // dim

    def check_heads(self, heads: int, dim: int) -> Frames:
        """Raise InvalidParameter unless the frames are for exactly ``heads`` heads of ``dim`` channels. Returns self."""
        if self.heads(dim) != heads:
            raise InvalidParameter(f"the frames are for {self.heads(dim)} heads, but the values have {heads}: use a basis for this model")
        return self

    def rows_on_device(self, device: torch.device) -> torch.Tensor:
        """Return a cached copy of ``rows`` on ``device``."""
        if self.rows.device == device:
            return self.rows
        if str(device) not in self._device_copies:
            self._device_copies[str(device)] = self.rows.to(device)
        return self._device_copies[str(device)]

    @cached_property
    def inverse(self) -> torch.Tensor:
        """Inverse of the column rows, float32 ``[frame, channel, column]``, for encoders.

        Raises ValueTooLarge if a token could decode to infinity, or if the inverse is not accurate.
        """
        largest = self.rows.new_full(self.rows[:, 1:, 0].shape, MAX_LEVEL)
        check_decoded_range(largest, self.rows[:, 1:], self.rows[:, 0], "the frames of the basis")
        return invert_for_encoding(self.rows[:, 1:], "a frame of the basis")

    def tables_at(self, step: int) -> Numbers:
        """Return the index of each column's table at ``step``, int64 ``[frame, column]``."""
        result: Numbers = numpy.clip((step - self.scales) // SCALES_PER_TABLE, 0, self.tables.count - 1)
        return result

    def expected_bits(self, step: int) -> float:
        """Return the average bits per value that the tables predict at ``step``."""
        return float(self.tables.bits[self.tables_at(step)].mean())
