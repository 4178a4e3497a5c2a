"""trellis: rotated coordinates as paths through a trellis, with one norm per token (spec/codecs/trellis.md).

The bits of a token form a circular string. A window of the string, which ends with the channel's own bits, selects each channel's value
from a table. Neighboring channels therefore share most of their windows, and each token can be decoded on its own. The encoder finds the
string whose values are nearest to the token (Viterbi). Sources: QTIP (Tseng et al. 2024, arXiv 2406.11235), Sec. 3.1 and 3.2; trellis-coded
quantization, Marcellin and Fischer 1990.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from .base import MAX_DIM
from .columns import Columns
from .encoding_blocks import encode_by_rows
from .errors import InvalidParameter
from .family import ENCODER_ONLY, SEED, CodecFamily, in_range, one_of
from .lazy import torch
from .norm_rule import NORM_RULES, normalize_rows, read_norm_rule, unbiased_norm
from .rotation import KINDS
from .streams import Layout
from .tables import cache_per_device
from .token_norms import TOKEN_NORMS, decode_norms, encode_norms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .options import Options

    Search = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]

MAX_BITS = 4
STATE_BITS = (8, 10)
"""Allowed numbers of bits in a window. A table has 2^bits entries."""

WORD_BITS = 16

_TABLES = Path(__file__).with_name("trellis_tables.bin")
"""Trained tables for unit variance, float16: for each of ``STATE_BITS``, the tables of 1 to ``MAX_BITS`` bits per value."""

_CPU_ROWS, _DEVICE_ROWS = 64, 4096
"""Numbers of rows encoded together on the CPU and on other devices. On the CPU, the costs of all states fit in a core's cache."""


@dataclass(frozen=True)
class Trellis(CodecFamily):
    """Codec that stores ``bits`` bits per value, including the sign. A window of ``state_bits`` bits selects each value from a table.

    ``table`` contains the unit-vector coordinate that each window decodes to, little-endian float16. ``norm_rule`` affects only the encoder
    and is not stored.
    """

    id: ClassVar[str] = "trellis"
    stores_directions: ClassVar[bool] = True

    dim: int = field(metadata=in_range(1, MAX_DIM))
    bits: int = field(metadata=in_range(1, MAX_BITS))
    state_bits: int = field(metadata=one_of(STATE_BITS))
    norm: str = field(metadata=one_of(TOKEN_NORMS))
    rotation_kind: str = field(metadata=one_of(KINDS))
    seed: int = field(metadata=SEED)
    table: bytes
    norm_rule: str = field(default=NORM_RULES[0], compare=False, metadata=one_of(NORM_RULES) | ENCODER_ONLY)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_string(self.dim, self.bits)
        _check_table(self.table, 1 << self.state_bits)
        _ = self.rotation

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        bits = cls.option(options, "bits", None, "b")
        states = int(options.choice("states", "1024", tuple(str(1 << bits) for bits in STATE_BITS)))
        norm = cls.option(options, "norm", "fp16")
        rotation = cls.option(options, "rotation_kind", "signed-hadamard", "rotation")
        seed = cls.option(options, "seed", 0)
        rule = read_norm_rule(options)
        options.finish()
        cls.check_value("dim", dim)
        _check_string(dim, bits)
        state_bits = states.bit_length() - 1
        return cls(dim, bits, state_bits, norm, rotation, seed, unit_table(dim, bits, state_bits), rule)

    @property
    def nominal_bits(self) -> float:
        return self.bits

    def packings(self) -> dict[str, Columns]:
        # Every word is a symbol, so any word is valid.
        return {"codes": Columns(self.dim * self.bits // WORD_BITS, (1 << WORD_BITS,), 1)}

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        return {"norm": Layout(TOKEN_NORMS[self.norm], (batch, heads, tokens))}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.encode_with(x, nearest_path, _CPU_ROWS if x.device.type == "cpu" else _DEVICE_ROWS)

    def encode_with(self, x: torch.Tensor, search: Search, rows_at_once: int) -> dict[str, torch.Tensor]:
        """Encode ``x``, ``rows_at_once`` rows at a time. ``search`` finds paths as ``nearest_path`` does."""
        streams = encode_by_rows(x, rows_at_once, partial(self._encode_rows, search))
        return streams | {"norm": encode_norms(streams["norm"], self.norm, "norm of a token")}

    def _encode_rows(self, search: Search, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode rows ``[row, dim]`` to streams, with norms in float32."""
        unit, norm = normalize_rows(rows, self.rotation)
        states = search(unit, window_values(self.table, unit.device), self.bits)
        if self.norm_rule == "unbiased":
            decoded = window_values(self.table, unit.device)[states]
            norm = unbiased_norm(norm, unit, decoded, TOKEN_NORMS[self.norm])
        symbols = states >> self.state_bits - self.bits
        return self.pack_digits(_pack_words(symbols, self.bits)) | {"norm": norm}

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        values = window_values(self.table, digits[0].device)[self.windows(digits[0])]
        return values.mul_(decode_norms(streams["norm"])[..., None])

    def windows(self, words: torch.Tensor) -> torch.Tensor:
        """Return the window of each channel, int64 ``[..., dim]``. ``words`` are integers ``[..., word]``."""
        first = _window_starts(self.dim, self.bits, self.state_bits, words.device)
        word, shift = first >> 4, first & WORD_BITS - 1
        following = (word + 1) % words.shape[-1]
        both = words[..., word].to(torch.int64) | words[..., following].to(torch.int64) << WORD_BITS
        return both >> shift & (1 << self.state_bits) - 1


def nearest_path(x: torch.Tensor, table: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the windows of a circular string whose values are near ``x`` ``[row, dim]``, int64 ``[row, dim]``.

    The string has ``bits`` bits per channel. ``table`` is float32 ``[2^window bits]``. A first search, with the row rotated by half its
    length, finds the bits that windows share across the ends of the row. The second search keeps these bits fixed (QTIP, Sec. 3.2).
    """
    half = x.shape[-1] // 2
    rotated_path = viterbi(x.roll(-half, -1), table, bits, None)
    return viterbi(x, table, bits, rotated_path[:, x.shape[-1] - 1 - half] >> bits)


def viterbi(x: torch.Tensor, table: torch.Tensor, bits: int, shared: torch.Tensor | None) -> torch.Tensor:
    """Return the windows of the path with the smallest squared error, int64 ``[row, dim]``.

    Unless ``shared`` is None, the low bits of the first window and the high bits of the last window must both equal ``shared``.
    """
    rows, dim = x.shape
    states, symbols = table.numel(), 1 << bits
    kept = states // symbols
    # Rows are the last axis, so that every operation runs along contiguous memory.
    by_channel = x.T.contiguous()
    by_symbol = table.view(symbols, kept, 1)
    window = torch.arange(states, device=x.device)[:, None]
    last_symbol = torch.arange(symbols, dtype=torch.int32, device=x.device)[:, None]
    cost = (by_channel[0] - table[:, None]).square_()
    if shared is not None:
        cost.masked_fill_((window & kept - 1) != shared, torch.inf)
    back = torch.empty(dim, kept, rows, dtype=torch.uint8, device=x.device)
    for channel in range(1, dim):
        # The lowest bits of a window, a symbol, leave it. Nonnegative costs have the same order as their bits, so the lowest bits of a cost
        # can contain the symbol, and one minimum finds both.
        marked = cost.view(torch.int32).view(kept, symbols, rows).bitwise_and_(-symbols).bitwise_or_(last_symbol).amin(1)
        back[channel] = marked & symbols - 1
        cost = (by_channel[channel] - by_symbol).square_().add_(marked.view(torch.float32)).view(states, rows)
    if shared is not None:
        cost.masked_fill_((window >> bits) != shared, torch.inf)
    path = torch.empty(dim, rows, dtype=torch.int64, device=x.device)
    path[-1] = cost.argmin(0)
    for channel in range(dim - 1, 0, -1):
        low = path[channel] & kept - 1
        path[channel - 1] = low << bits | back[channel].gather(0, low[None])[0]
    return path.T.contiguous()


def _pack_words(symbols: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack circular strings of ``symbols``, integers ``[row, dim]``, into words, int32 ``[row, word]``."""
    string = symbols[..., None] >> torch.arange(bits, device=symbols.device) & 1
    weights = 1 << torch.arange(WORD_BITS, device=symbols.device)
    return (string.view(len(symbols), symbols.shape[-1] * bits // WORD_BITS, WORD_BITS) * weights).sum(-1).to(torch.int32)


def _check_string(dim: int, bits: int) -> None:
    if dim * bits % WORD_BITS:
        raise InvalidParameter(
            f"codec trellis: {dim} channels of {bits} bits take {dim * bits} bits per token, expected a multiple of {WORD_BITS}"
        )


def _check_table(table: bytes, entries: int) -> None:
    if len(table) != 2 * entries:
        raise InvalidParameter(f"codec trellis: table has {len(table)} bytes, expected {2 * entries} for {entries} float16 values")
    values = struct.unpack(f"<{entries}e", table)
    if not all(-1 <= value <= 1 for value in values):
        index = next(index for index, value in enumerate(values) if not -1 <= value <= 1)
        raise InvalidParameter(f"codec trellis: entry {index} of table is {values[index]}, expected -1 to 1")


@cache
def unit_table(dim: int, bits: int, state_bits: int) -> bytes:
    """Return the trained table for unit vectors in ``dim`` dimensions, little-endian float16."""
    data, entries = _TABLES.read_bytes(), 1 << state_bits
    before = sum(MAX_BITS << smaller for smaller in STATE_BITS if smaller < state_bits) + (bits - 1) * entries
    values = struct.unpack_from(f"<{entries}e", data, 2 * before)
    return struct.pack(f"<{entries}e", *(max(-1.0, min(1.0, value * dim**-0.5)) for value in values))


@cache_per_device
def window_values(table: bytes) -> torch.Tensor:
    """Return the coordinate of the unit vector that each ``state_bits``-bit window encodes, float32 ``[2^state_bits]``."""
    return torch.tensor(struct.unpack(f"<{len(table) // 2}e", table), dtype=torch.float32)


@cache_per_device
def _window_starts(dim: int, bits: int, state_bits: int) -> torch.Tensor:
    """Return the first bit of each channel's window, int64 ``[dim]``."""
    return (bits * torch.arange(1, dim + 1) - state_bits) % (dim * bits)
