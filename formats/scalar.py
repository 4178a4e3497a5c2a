"""scalar: rotated coordinates quantized by a Lloyd-Max table, with one norm per token (spec/codecs/scalar.md).

Covers TurboQuant-MSE and, with a second width on some channels, TurboQuant+. Sources: OCTOPUS Sec. 3.1, Eq. 1-3; OScaR App. N.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from .base import MAX_DIM
from .columns import Columns, default_fields
from .encoding_blocks import encode_by_rows
from .errors import InvalidParameter
from .family import ENCODER_ONLY, SEED, CodecFamily, in_range, one_of
from .lazy import torch
from .lloyd_max import coordinate_table
from .norm_rule import NORM_RULES, normalize_rows, read_norm_rule, unbiased_norm
from .octahedral_search import midpoints, nearest_level
from .parameter_checks import Fields, check_fields, check_magnitudes, check_range
from .rotation import KINDS
from .streams import Layout
from .tables import MAX_CACHED_TABLES, cache_per_device
from .token_norms import TOKEN_NORMS, decode_norms, encode_norms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options


MIN_DIM = 2
"""Minimum head dim. A coordinate of a shorter unit vector has no density."""

ROUNDINGS = ("nearest", "scaled")
"""Rules for choosing codes: the nearest to the unit vector, or to the multiple of the vector that decodes to the nearest direction."""

SCALES = (0.85, 0.95, 1.05, 1.15)
"""The multiples of a unit vector that ``rounding=scaled`` tries. The kernels in ``kernels/`` try the same ones."""

_MAX_COMPARISONS = 15
_CHUNK_ROWS = 2048


class ChannelSet(NamedTuple):
    """Channels of the coded frame, in ascending order, with ``bits`` bits each."""

    bits: int
    channels: tuple[int, ...]


@dataclass(frozen=True)
class Scalar(CodecFamily):
    """Codec that stores ``bits`` bits per value, including the sign, and ``bits_high`` in the channels that ``high_channels`` selects.

    ``magnitude_table`` contains the 2^(bits - 1) magnitudes of a coordinate of a unit vector, ascending, little-endian float32.
    ``high_magnitude_table`` contains the magnitudes for ``bits_high``. ``high_channels`` has one bit per channel of the coded frame, lowest
    bit first. Without a second width, ``bits_high`` is 0, and these two parameters are empty. ``norm_rule`` and ``rounding`` affect only
    the encoder and are not stored.
    """

    id: ClassVar[str] = "scalar"
    stores_directions: ClassVar[bool] = True

    dim: int = field(metadata=in_range(MIN_DIM, MAX_DIM))
    bits: int = field(metadata=in_range(1, 8))
    bits_high: int
    high_channels: bytes
    norm: str = field(metadata=one_of(TOKEN_NORMS))
    rotation_kind: str = field(metadata=one_of(KINDS))
    seed: int = field(metadata=SEED)
    magnitude_table: bytes
    high_magnitude_table: bytes
    fields: Fields
    norm_rule: str = field(default=NORM_RULES[0], compare=False, metadata=one_of(NORM_RULES) | ENCODER_ONLY)
    rounding: str = field(default=ROUNDINGS[0], compare=False, metadata=one_of(ROUNDINGS) | ENCODER_ONLY)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits_high:
            check_range(self.id, "bits_high", self.bits_high, self.bits + 1, 8)
        _check_high_channels(self.high_channels, self.dim, self.bits_high)
        check_magnitudes(self.id, "magnitude_table", self.magnitude_table, 2 ** (self.bits - 1))
        check_magnitudes(self.id, "high_magnitude_table", self.high_magnitude_table, 2 ** (self.bits_high - 1) if self.bits_high else 0)
        check_fields(self.id, self.fields, ("codes", "codes_high") if self.bits_high else ("codes",))
        if self.rounding == "scaled" and self.norm_rule != "unbiased":
            raise InvalidParameter(
                f"codec {self.id}: rounding=scaled needs norm_rule=unbiased, but norm_rule is {self.norm_rule}: scaled codes may represent "
                "up to 1.15 times a token, which no other rule corrects. Set norm_rule=unbiased, or omit rounding="
            )
        self.packings()
        _ = self.rotation

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        bits = cls.option(options, "bits", None, "b")
        high = options.integer("high", 0, bits + 1, 8)
        share = options.integer("share", 0, 1, MAX_DIM)
        norm = cls.option(options, "norm", "fp16")
        rotation = cls.option(options, "rotation_kind", "signed-hadamard", "rotation")
        seed = cls.option(options, "seed", 0)
        rule = read_norm_rule(options)
        rounding = cls.option(options, "rounding", ROUNDINGS[0])
        options.finish()
        cls.check_value("dim", dim)
        if share and not high:
            raise InvalidParameter(f"codec {cls.id}: share={share} has no effect without high=<bits>: add high=<bits>, or omit share=")
        table, fields = coordinate_table(dim, 2 ** (bits - 1)), ("codes", default_fields(dim, (2**bits,)))
        if not high:
            return cls(dim, bits, 0, b"", norm, rotation, seed, table, b"", (fields,), rule, rounding)
        # Choose the first channels, because a rotation makes all channels similar, and half of them, as in TurboQuant+.
        count = share or dim // 2
        check_range(cls.id, "share", count, 1, dim - 1)
        channels = ((1 << count) - 1).to_bytes(-(-dim // 8), "little")
        both = (("codes", default_fields(dim - count, (2**bits,))), ("codes_high", default_fields(count, (2**high,))))
        tables = table, coordinate_table(dim, 2 ** (high - 1))
        return cls(dim, bits, high, channels, norm, rotation, seed, *tables, both, rule, rounding)

    @property
    def nominal_bits(self) -> float:
        return sum(part.bits * len(part.channels) for part in self.channel_sets) / self.dim

    @property
    def channel_sets(self) -> tuple[ChannelSet, ...]:
        """Channels of each width, in the order of the code streams."""
        return _channel_sets(self.dim, self.bits, self.bits_high, self.high_channels)

    def packings(self) -> dict[str, Columns]:
        return _packings(self.channel_sets, self.fields)

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        return {"norm": Layout(TOKEN_NORMS[self.norm], (batch, heads, tokens))}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        streams = encode_by_rows(x, _CHUNK_ROWS, self._encode_rows)
        return streams | {"norm": encode_norms(streams["norm"], self.norm, "norm of a token")}

    def _encode_rows(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode rows ``[row, dim]`` to streams, with norms in float32."""
        unit, norm = normalize_rows(rows, self.rotation)
        codes = self._nearest_codes(unit) if self.rounding == "nearest" else self._best_codes(unit)
        if self.norm_rule == "unbiased":
            norm = unbiased_norm(norm, unit, self._decode_unit(codes), TOKEN_NORMS[self.norm])
        return self.pack_digits(*codes) | {"norm": norm}

    def _nearest_codes(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the codes nearest to ``values`` ``[row, dim]``: for each width, float32 or int32 ``[row, channel]``."""
        codes = []
        for part, table in zip(self.channel_sets, self._magnitude_tables, strict=True):
            own = values if self.bits_high == 0 else values.index_select(-1, _channel_indices(part, values.device))
            level = _nearest_levels(own.abs(), table)
            negative = torch.lt(own, 0, out=torch.empty_like(level))
            codes.append(level.add_(negative, alpha=2 ** (part.bits - 1)))
        return codes

    def _best_codes(self, unit: torch.Tensor) -> list[torch.Tensor]:
        """Return the codes of the best multiple of each unit row, for each width. Multiples are taken from ``SCALES``.

        The best multiple is the one whose decoded direction is nearest to the row.
        """
        best = self._nearest_codes(unit * SCALES[0])
        sine, squares = self._squared_sine(unit, SCALES[0], best)
        for scale in SCALES[1:]:
            codes = self._nearest_codes(unit * scale)
            own_sine, own_squares = self._squared_sine(unit, scale, codes)
            better = own_sine * squares < sine * own_squares
            sine, squares = torch.where(better, own_sine, sine), torch.where(better, own_squares, squares)
            best = [torch.where(better[:, None], new, old) for new, old in zip(codes, best, strict=True)]
        return best

    def _squared_sine(self, unit: torch.Tensor, scale: float, codes: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the squared sine of the angle between each row of ``unit`` and its decoded values, as a numerator and a denominator.

        ``codes`` encode the rows times ``scale``. Both results are ``[row]``. The denominator is the sum of squares of the decoded values.
        """
        # Compare errors, not cosines: with 8 bits, cosines differ by less than the rounding of binary32 sums.
        error, whole = unit * scale - self._decode_unit(codes), unit.square().sum(-1)
        product, squares = (unit * error).sum(-1), error.square().sum(-1)
        return whole * squares - product.square(), scale * (scale * whole - 2 * product) + squares

    def _decode_unit(self, codes: list[torch.Tensor]) -> torch.Tensor:
        """Decode ``codes`` at norm 1: float32 ``[row, dim]``."""
        return self._decode_unit_digits(tuple(code.to(torch.int32) for code in codes))

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        norm = decode_norms(streams["norm"])[..., None]
        return self._decode_unit_digits(digits).view(*norm.shape[:-1], self.dim).mul_(norm)

    def _decode_unit_digits(self, digits: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Decode ``digits`` at norm 1: float32 ``[row, dim]``."""
        # Use a matrix, because PyTorch selects its columns ten times as fast as those of a four-axis tensor.
        values = []
        for codes, table in zip(digits, self._magnitude_tables, strict=True):
            values.append(signed_values(table, codes.device).index_select(0, codes.reshape(-1)).view(-1, codes.shape[-1]))
        return values[0] if self.bits_high == 0 else torch.cat(values, -1).index_select(-1, _positions(self.channel_sets, values[0].device))

    @property
    def _magnitude_tables(self) -> tuple[bytes, ...]:
        return (self.magnitude_table, self.high_magnitude_table) if self.bits_high else (self.magnitude_table,)


def _check_high_channels(channels: bytes, dim: int, bits_high: int) -> None:
    length = -(-dim // 8)
    if not bits_high:
        if channels:
            raise InvalidParameter(f"codec scalar: high_channels has {len(channels)} bytes, expected none without bits_high")
        return
    if len(channels) != length:
        raise InvalidParameter(
            f"codec scalar: high_channels has {len(channels)} bytes, expected {length}: one bit for each of {dim} channels"
        )
    mask = int.from_bytes(channels, "little")
    if mask >> dim or not 0 < mask.bit_count() < dim:
        raise InvalidParameter(
            f"codec scalar: high_channels is {channels.hex()}, expected at least one but not all of the first {dim} bits set, and no others"
        )


@lru_cache(MAX_CACHED_TABLES)
def _channel_sets(dim: int, bits: int, bits_high: int, high_channels: bytes) -> tuple[ChannelSet, ...]:
    mask = int.from_bytes(high_channels, "little")
    sets = [tuple(c for c in range(dim) if mask >> c & 1 == high) for high in (0, 1)]
    return tuple(ChannelSet(bits, channels) for bits, channels in zip((bits, bits_high), sets, strict=True) if channels)


@lru_cache(MAX_CACHED_TABLES)
def _packings(channel_sets: tuple[ChannelSet, ...], fields: Fields) -> dict[str, Columns]:
    return {name: Columns(len(part.channels), (2**part.bits,), count) for part, (name, count) in zip(channel_sets, fields, strict=True)}


def _nearest_levels(magnitudes: torch.Tensor, table: bytes) -> torch.Tensor:
    """Return the index of the table entry nearest to each magnitude, as float32 or int32."""
    bounds = midpoints(table)
    if len(bounds) <= _MAX_COMPARISONS:
        return nearest_level(magnitudes, bounds)
    # Bisection with one lookup per step is several times as fast as searchsorted.
    values, stored = magnitudes.view(-1), _level_bounds(table, magnitudes.device)
    level = torch.zeros_like(values, dtype=torch.int32)
    above, bound = torch.empty_like(level), torch.empty_like(values)
    step = len(table) // 8
    while step:
        torch.index_select(stored[step - 1 :], 0, level, out=bound)
        level.add_(torch.gt(values, bound, out=above), alpha=step)
        step //= 2
    return level.view(magnitudes.shape)


@cache_per_device
def _level_bounds(table: bytes) -> torch.Tensor:
    return torch.tensor(midpoints(table), dtype=torch.float32)


@cache_per_device
def signed_values(table: bytes) -> torch.Tensor:
    """Return the decoded value of each code, float32 ``[2 * levels]``: all magnitudes, then their negatives."""
    magnitudes = torch.tensor(struct.unpack(f"<{len(table) // 4}f", table), dtype=torch.float32)
    return torch.cat([magnitudes, -magnitudes])


@cache_per_device
def _channel_indices(channel_set: ChannelSet) -> torch.Tensor:
    return torch.tensor(channel_set.channels, dtype=torch.int64)


@cache_per_device
def _positions(channel_sets: tuple[ChannelSet, ...]) -> torch.Tensor:
    return torch.tensor([channel for part in channel_sets for channel in part.channels], dtype=torch.int64).argsort()
