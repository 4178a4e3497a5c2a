"""polar: a tree of angles over pairs of channels, then pairs of radii, with the last radii stored (spec/codecs/polar.md).

Sources: PolarQuant (Han et al. 2025, arXiv 2502.02617). OCTOPUS Table 1 uses the same number of bits on every level.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, islice, pairwise
from math import pi
from typing import TYPE_CHECKING, ClassVar, Self

from .base import MAX_DIM
from .columns import Columns, default_fields
from .encoding_blocks import encode_in_blocks
from .errors import InvalidParameter
from .family import ENCODER_ONLY, SEED, CodecFamily, in_range, one_of
from .lazy import functional, torch
from .lloyd_max import polar_angle_table
from .norm_rule import NORM_RULES, read_norm_rule, unbiased_factor
from .octahedral_search import midpoints, nearest_level
from .parameter_checks import Fields, check_fields
from .rotation import KINDS
from .streams import NORMS, Layout
from .tables import MAX_CACHED_TABLES, cache_per_device
from .token_norms import stored_norm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options

MAX_BITS = 8

_HEAD_TOKENS_PER_BLOCK = 1 << 11


@dataclass(frozen=True)
class Level:
    """One level of the tree. An angle has ``bits`` bits, and ``counts`` contains the number of angles for each kind of pair in ``pairs``.

    A kind of pair is given by the number of channels below each of its two radii. Only an unequal last pair is of a different kind.
    """

    bits: int
    counts: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]

    @property
    def angles(self) -> int:
        """Number of angles per token.

        Each angle combines two radii. If their number is odd, the last one passes to the next level unchanged.
        """
        return sum(self.counts)


@dataclass(frozen=True)
class Polar(CodecFamily):
    """Codec that stores a tree of angles: ``bits`` lists the bits per angle of each level, separated by dots.

    The radii after the last level are stored as ``norm``. ``angle_table`` contains the angles of every level above the first, ascending,
    little-endian float32; the angles of the first level are uniform. ``norm_rule`` affects only the encoder and is not stored.
    """

    id: ClassVar[str] = "polar"
    stores_directions: ClassVar[bool] = True

    dim: int = field(metadata=in_range(2, MAX_DIM))
    bits: str
    norm: str = field(metadata=one_of(NORMS))
    rotation_kind: str = field(metadata=one_of(KINDS))
    seed: int = field(metadata=SEED)
    angle_table: bytes
    fields: Fields
    norm_rule: str = field(default=NORM_RULES[0], compare=False, metadata=one_of(NORM_RULES) | ENCODER_ONLY)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dim(self.dim)
        _check_tables(self.levels, self.angle_table)
        check_fields(self.id, self.fields, tuple(_levels_by_stream(self.levels)))
        self.packings()
        _ = self.rotation

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        words = options.integers("b", 1, MAX_BITS)
        norm = cls.option(options, "norm", "fp16")
        rotation = cls.option(options, "rotation_kind", "signed-hadamard", "rotation")
        seed = cls.option(options, "seed", 0)
        rule = read_norm_rule(options)
        options.finish()
        _check_dim(dim)
        bits = ".".join(map(str, words * _max_levels(dim) if len(words) == 1 else words))
        levels = _parse_levels(dim, bits)
        table = b"".join(polar_angle_table(*pair, 2**level.bits) for level in levels[1:] for pair in level.pairs)
        fields = tuple((name, default_fields(_symbol_count(run), (2 ** run[0].bits,))) for name, run in _levels_by_stream(levels).items())
        return cls(dim, bits, norm, rotation, seed, table, fields, rule)

    @property
    def nominal_bits(self) -> float:
        """Bits per value.

        If every angle has b bits and one radius is left, this is b, as in OCTOPUS. Otherwise, each radius counts as 16 bits (PolarQuant).
        """
        angle_bits = {level.bits for level in self.levels}
        if len(angle_bits) == 1 and self.radii == 1:
            return float(angle_bits.pop())
        return (sum(level.bits * level.angles for level in self.levels) + 16 * self.radii) / self.dim

    @property
    def levels(self) -> tuple[Level, ...]:
        """Levels of the tree, starting with the level of channel pairs."""
        return _parse_levels(self.dim, self.bits)

    @property
    def radii(self) -> int:
        """Number of radii per token after the last level."""
        return self.dim - sum(level.angles for level in self.levels)

    @property
    def stream_levels(self) -> dict[str, tuple[Level, ...]]:
        """Levels that each code stream contains."""
        return _levels_by_stream(self.levels)

    @property
    def tables(self) -> tuple[tuple[bytes, ...], ...]:
        """Angle tables of each level, one for each kind of pair. The first level has none."""
        return _split_angle_table(self.levels, self.angle_table)

    def packings(self) -> dict[str, Columns]:
        return _packings(self.levels, self.fields)

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        return {"radius": Layout(NORMS[self.norm], (batch, heads, tokens, self.radii))}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return encode_in_blocks(x, _HEAD_TOKENS_PER_BLOCK, self._encode_block)

    def _encode_block(self, x: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
        radii = self.rotation.forward(x)
        # Products of the values under each radius with their decoded direction.
        products = radii if self.norm_rule == "unbiased" else None
        codes = []
        for level, tables in zip(self.levels, self.tables, strict=True):
            paired = radii[..., : 2 * level.angles]
            first, second = paired[..., 0::2].contiguous(), paired[..., 1::2].contiguous()
            angles = torch.atan2(second, first)
            codes.append(_nearest_angles(angles, level.counts, tables) if tables else _angle_bins(angles, 2**level.bits))
            radii = torch.cat([torch.hypot(first, second), radii[..., 2 * level.angles :]], -1)
            if products is not None:
                first, second = products[..., : 2 * level.angles : 2], products[..., 1 : 2 * level.angles : 2]
                cosine, sine = _pair_directions(level, tables, codes[-1].to(torch.int32)).unbind(-1)
                products = torch.cat([(first * cosine).addcmul_(second, sine), products[..., 2 * level.angles :]], -1)
        if products is not None:
            ones = torch.ones_like(radii)
            radii = unbiased_factor(radii, products / torch.where(radii > 0, radii, ones), ones, NORMS[self.norm])
        stored = stored_norm(radii, NORMS[self.norm], f"a radius (token {start} or later)")
        remaining_codes = iter(codes)
        digits = [torch.cat(list(islice(remaining_codes, len(run))), -1) for run in _levels_by_stream(self.levels).values()]
        return self.pack_digits(*digits) | {"radius": stored}

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        radii = streams["radius"].to(torch.float32)
        runs = zip(_levels_by_stream(self.levels).values(), digits, strict=True)
        codes = [code for run, digit in runs for code in torch.split(digit, [level.angles for level in run], -1)]
        for level, tables, code in reversed(list(zip(self.levels, self.tables, codes, strict=True))):
            pairs = _pair_directions(level, tables, code).mul_(radii[..., : level.angles, None]).flatten(-2)
            radii = torch.cat([pairs, radii[..., level.angles :]], -1)
        return radii


def _check_dim(dim: int) -> None:
    Polar.check_value("dim", dim)
    if dim % 2:
        raise InvalidParameter(f"codec polar: dim is {dim}, expected an even number: channels are coded in pairs")


def _check_tables(levels: tuple[Level, ...], angle_table: bytes) -> None:
    angles = sum(len(level.pairs) << level.bits for level in levels[1:])
    if len(angle_table) != 4 * angles:
        raise InvalidParameter(f"codec polar: angle_table has {len(angle_table)} bytes, expected {4 * angles} for {angles} float32 angles")
    for number, tables in enumerate(_split_angle_table(levels, angle_table), 1):
        for table in tables:
            values = struct.unpack(f"<{len(table) // 4}f", table)
            if not all(0 <= value <= pi / 2 for value in values) or any(low >= high for low, high in pairwise(values)):
                raise InvalidParameter(
                    f"codec polar: the angles of level {number} must be in [0, pi / 2] and strictly ascending, but are {values}"
                )


def _max_levels(dim: int) -> int:
    """Return the number of levels that leave a single radius."""
    return (dim - 1).bit_length()


@lru_cache(MAX_CACHED_TABLES)
def _parse_levels(dim: int, bits: str) -> tuple[Level, ...]:
    words = bits.split(".")
    if len(words) > _max_levels(dim) or not set(words) <= set(map(str, range(1, MAX_BITS + 1))):
        raise InvalidParameter(
            f"codec polar: bits is {bits!r}, expected 1 to {_max_levels(dim)} integers from 1 to {MAX_BITS}, separated by dots, at dim "
            f"{dim}"
        )
    levels = []
    for number, word in enumerate(words):
        # The radii that enter this level cover 2^number channels each; the last may cover fewer.
        size = 1 << number
        radii = -(-dim // size)
        last = dim - (radii - 1) * size
        unequal = int(radii % 2 == 0 and last < size)
        counted = [((size, size), radii // 2 - unequal), ((size, last), unequal)]
        pairs, counts = zip(*((pair, count) for pair, count in counted if count), strict=True)
        levels.append(Level(int(word), counts, pairs))
    return tuple(levels)


@lru_cache(MAX_CACHED_TABLES)
def _split_angle_table(levels: tuple[Level, ...], angle_table: bytes) -> tuple[tuple[bytes, ...], ...]:
    remaining = iter(angle_table)
    return ((), *(tuple(bytes(islice(remaining, 4 << level.bits)) for _ in level.pairs) for level in levels[1:]))


def _symbol_count(run: tuple[Level, ...]) -> int:
    return sum(level.angles for level in run)


@lru_cache(MAX_CACHED_TABLES)
def _levels_by_stream(levels: tuple[Level, ...]) -> dict[str, tuple[Level, ...]]:
    """Return the levels of each code stream by its name, which contains the number of its first level.

    Consecutive levels with the same number of bits share a stream.
    """
    streams = {}
    for _, run in groupby(enumerate(levels, 1), lambda numbered: numbered[1].bits):
        numbers, members = zip(*run, strict=True)
        streams[f"angles{numbers[0]}"] = members
    return streams


@lru_cache(MAX_CACHED_TABLES)
def _packings(levels: tuple[Level, ...], fields: Fields) -> dict[str, Columns]:
    streams = _levels_by_stream(levels)
    return {name: Columns(_symbol_count(streams[name]), (2 ** streams[name][0].bits,), count) for name, count in fields}


def _angle_bins(angles: torch.Tensor, bins: int) -> torch.Tensor:
    turns = angles.mul_(1 / (2 * pi))
    # The fraction of a turn is in [0, 1]: a tiny negative angle rounds up to 1, which is in the last bin.
    return turns.sub_(turns.floor()).mul_(bins).floor_().clamp_max_(bins - 1)


def _nearest_angles(angles: torch.Tensor, counts: tuple[int, ...], tables: tuple[bytes, ...]) -> torch.Tensor:
    parts = zip(torch.split(angles, list(counts), -1), tables, strict=True)
    return torch.cat([nearest_level(part.contiguous(), midpoints(table)) for part, table in parts], -1)


def _pair_directions(level: Level, tables: tuple[bytes, ...], code: torch.Tensor) -> torch.Tensor:
    """Return the cosine and sine of the angle for each ``code`` of a level, ``[..., angle, 2]``."""
    if not tables:
        return functional.embedding(code, uniform_directions(2**level.bits, code.device))
    parts = zip(torch.split(code, list(level.counts), -1), tables, strict=True)
    return torch.cat([functional.embedding(part, angle_directions(table, code.device)) for part, table in parts], -2)


@cache_per_device
def uniform_directions(bins: int) -> torch.Tensor:
    """Return the cosine and sine of each bin's center, float32 ``[bins, 2]``."""
    return _cos_sin((torch.arange(bins, dtype=torch.float64) + 0.5) * (2 * pi / bins))


@cache_per_device
def angle_directions(table: bytes) -> torch.Tensor:
    """Return the cosine and sine of each angle in a table, float32 ``[angles, 2]``."""
    return _cos_sin(torch.tensor(struct.unpack(f"<{len(table) // 4}f", table), dtype=torch.float64))


def _cos_sin(angles: torch.Tensor) -> torch.Tensor:
    return torch.stack([angles.cos(), angles.sin()], -1).to(torch.float32)
