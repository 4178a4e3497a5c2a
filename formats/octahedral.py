"""octahedral: directions of rotated triplets on an octahedron, triplet norms, and one norm per token (spec/codecs/octahedral.md).

Source: OCTOPUS Sec. 3, Eq. 1-13 and Algorithm 1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .base import MAX_DIM, PayloadRule, Unpacker
from .columns import Columns, default_fields, reduce_rows
from .encoding_blocks import encode_by_rows
from .errors import InvalidPayload
from .family import ENCODER_ONLY, SEED, CodecFamily, in_range, one_of
from .lazy import functional, numpy, torch
from .lloyd_max import direction_table, triplet_norm_table
from .norm_rule import NORM_RULES, read_norm_rule, unbiased_factor
from .octahedral_search import ROUNDINGS, codebook, codebook_directions, midpoints, nearest_level
from .parameter_checks import Fields, check_fields, check_magnitudes
from .products import product
from .rotation import KINDS, Rotation
from .streams import Layout
from .tables import MAX_CACHED_TABLES, cache_per_device
from .token_norms import TOKEN_NORMS, decode_norms, encode_norms
from .value_blocks import arrays_in_memory, first_index, row_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options
    from .value_blocks import Array

ARRANGEMENTS = ("dense", "direct")

MIN_DIM = 4
"""Minimum head dim. For a smaller head dim, the norm of a triplet has no density."""

_DIRECT_FIELDS = 3
_DIRECT_MULTIPLE = 24
_ONE_DIGIT_BITS = 8
_SIGN_PATTERNS = 4
_MAX_SCALED_DIRECTIONS = 1 << 14
"""Maximum number of (direction, norm) pairs for which a table stores all products."""
_MIN_NORMAL = 2.0**-126
_SAFE_NORMS = (2.0**-40, 2.0**40)
_CHUNK_ROWS = 4096


@dataclass(frozen=True)
class Octahedral(CodecFamily):
    """Codec that stores each rotated triplet as two octahedral coordinates of ``b_dir`` bits and a norm of ``b_norm`` bits.

    ``direction_table`` contains the 2^(b_dir - 1) magnitudes of a coordinate, and ``norm_table`` the 2^b_norm triplet norms. Both are
    ascending, little-endian float32. ``rounding`` and ``norm_rule`` affect only the encoder and are not stored.
    """

    id: ClassVar[str] = "octahedral"
    stores_directions: ClassVar[bool] = True

    dim: int = field(metadata=in_range(MIN_DIM, MAX_DIM))
    b_dir: int = field(metadata=in_range(1, 8))
    b_norm: int = field(metadata=in_range(0, 8))
    arrangement: str = field(metadata=one_of(ARRANGEMENTS))
    norm: str = field(metadata=one_of(TOKEN_NORMS))
    rotation_kind: str = field(metadata=one_of(KINDS))
    seed: int = field(metadata=SEED)
    direction_table: bytes
    norm_table: bytes
    fields: Fields
    rounding: str = field(default="local3x3", compare=False, metadata=one_of(ROUNDINGS) | ENCODER_ONLY)
    norm_rule: str = field(default=NORM_RULES[0], compare=False, metadata=one_of(NORM_RULES) | ENCODER_ONLY)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_magnitudes(self.id, "direction_table", self.direction_table, 2 ** (self.b_dir - 1))
        check_magnitudes(self.id, "norm_table", self.norm_table, 2**self.b_norm)
        check_fields(self.id, self.fields, tuple(_stream_bases(self.b_dir, self.b_norm, self.arrangement)))
        self.packings()
        _ = self.rotation

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        b_dir, b_norm = cls.option(options, "b_dir", 0), cls.option(options, "b_norm", -1)
        b = options.integer("b", 0 if b_dir and b_norm >= 0 else None, 1, 7)
        b_dir, b_norm = b_dir or b + 1, b_norm if b_norm >= 0 else b - 1
        split = None if b_dir - b_norm == 2 else (str(b_dir), str(b_norm))
        options.respell({"b": None if split else str(b_dir - 1), **dict(zip(("b_dir", "b_norm"), split or (None, None), strict=True))})
        arrangement = cls.option(options, "arrangement", "dense")
        norm = cls.option(options, "norm", "fp16")
        rotation = cls.option(options, "rotation_kind", "signed-hadamard", "rotation")
        seed = cls.option(options, "seed", 0)
        rounding = cls.option(options, "rounding", "local3x3")
        rule = read_norm_rule(options)
        options.finish()
        cls.check_value("dim", dim)
        tables = direction_table(2 ** (b_dir - 1)), triplet_norm_table(dim, 2**b_norm)
        fields = _default_fields(dim, b_dir, b_norm, arrangement)
        return cls(dim, b_dir, b_norm, arrangement, norm, rotation, seed, *tables, fields, rounding, rule)

    @property
    def nominal_bits(self) -> float:
        """Bits per value: the paper's b for its split (b + 1, b - 1); for any other split, a third of the bits of a triplet."""
        if self.b_dir - self.b_norm == 2:
            return (self.b_dir + self.b_norm) / 2
        return (2 * self.b_dir + self.b_norm) / 3

    @property
    def triplets(self) -> int:
        """Number of triplets per token. The last triplet may be padded with zeros."""
        return -(-self.dim // 3)

    def packings(self) -> dict[str, Columns]:
        return _packings(self.dim, self.b_dir, self.b_norm, self.arrangement, self.fields)

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        return {"norm": Layout(TOKEN_NORMS[self.norm], (batch, heads, tokens))}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        streams = encode_by_rows(x, _CHUNK_ROWS, self._encode_rows)
        return streams | {"norm": encode_norms(streams["norm"], self.norm, "norm of a token")}

    def _encode_rows(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode rows ``[row, dim]`` to streams, with norms in float32."""
        rows, length, norm = _scale_and_measure(rows)
        x, y, z = torch.tensor_split(product(rows, _rotation_by_coordinate(self.rotation, rows.device)), 3, -1)
        sign, above = torch.empty_like(z), torch.empty_like(z)
        sign = torch.lt(x, 0, out=sign).add_(torch.lt(y, 0, out=above), alpha=2)
        x, y, z = x.abs().contiguous(), y.abs().contiguous(), z.contiguous()
        book = codebook(self.direction_table, rows.device)
        index = book.nearest(x, y, z, self.rounding)
        # OCTOPUS Eq. 12: the best norm is nearest to the projection; scalar rounding uses the triplet's own length.
        length = length.clamp(min=_MIN_NORMAL)
        radius = (_direction_norm(x, y, z) if self.rounding == "scalar" else book.projection(index, x, y, z)).div_(length)
        norm_index = nearest_level(radius, midpoints(self.norm_table))
        if self.norm_rule == "unbiased":
            projection = book.projection(index, x, y, z).div_(length) if self.rounding == "scalar" else radius
            decoded = functional.embedding(norm_index.to(torch.int32), _table_column(self.norm_table, rows.device))[..., 0]
            product_sum = (projection * decoded).sum(-1)
            norm = unbiased_factor(norm, product_sum, decoded.square().sum(-1), TOKEN_NORMS[self.norm])
        digit = index.to(torch.float32)
        if norm_extends_index(self.b_dir, self.b_norm):
            digit.add_(norm_index, alpha=self._direction_count)
        else:
            sign.add_(norm_index, alpha=_SIGN_PATTERNS)
        return self.pack_digits(digit, sign) | {"norm": norm}

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        index, sign = digits
        carrier, place = (index, self._direction_count) if norm_extends_index(self.b_dir, self.b_norm) else (sign, _SIGN_PATTERNS)
        # Every base is a power of two.
        norm_index = carrier >> place.bit_length() - 1
        symbol = (index & self._direction_count - 1) + (sign & _SIGN_PATTERNS - 1) * self._direction_count
        if _SIGN_PATTERNS * self._direction_count << self.b_norm <= _MAX_SCALED_DIRECTIONS:
            scaled = _scaled_directions(self.direction_table, self.norm_table, symbol.device)
            triplet = functional.embedding(symbol + norm_index * (_SIGN_PATTERNS * self._direction_count), scaled)
        else:
            triplet = functional.embedding(symbol, signed_directions(self.direction_table, symbol.device))
            triplet *= functional.embedding(norm_index, _table_column(self.norm_table, symbol.device))
        return triplet.flatten(-2)[..., : self.dim] * decode_norms(streams["norm"])[..., None]

    def payload_rules(self) -> tuple[PayloadRule, ...]:
        return (self._check_padding,) if self.arrangement == "direct" else ()

    def _check_padding(self, arrays: Mapping[str, Array], where: str) -> None:
        for name, bits in _padding_bits(self.packings()["symbol"], self.triplets).items():
            whole = arrays_in_memory([arrays[name]])
            if whole is not None and not (reduce_rows(whole[0], numpy.bitwise_or) & bits).any():
                continue
            for first, (rows,) in row_blocks(arrays[name]):
                padding = rows & bits
                if not padding.any():
                    continue
                at = first_index(padding != 0, first * padding.shape[1], arrays[name].shape)
                digit = int(padding.flat[(padding != 0).argmax()])
                raise InvalidPayload(f"{where}.{name}: the word at {at} has bits {digit:#x} set in padding triplets, which must be zero")

    @property
    def _direction_count(self) -> int:
        """Number of directions in the quarter square."""
        return int(4 ** (self.b_dir - 1))

    def pack_digits(self, *digits: torch.Tensor) -> dict[str, torch.Tensor]:
        index, sign = digits
        packings = self.packings()
        if self.arrangement == "dense":
            low = self.pack("index", index) if "index" in packings else {}
            return low | self.pack("sign", sign)
        symbols = packings["symbol"].symbols
        index, sign = (functional.pad(digit, (0, symbols - self.triplets)) for digit in (index, sign))
        bits = _digit_bits(self.b_dir, self.b_norm)[0]
        if len(packings["symbol"].bases) == 1:
            return self.pack("symbol", index + sign * 2**bits)
        return self.pack("symbol", index, sign)

    def digits(self, streams: Mapping[str, torch.Tensor], unpacker: Unpacker = Columns.unpack) -> tuple[torch.Tensor, ...]:
        packings = self.packings()
        if self.arrangement == "dense":
            (sign,) = self.unpack("sign", streams, unpacker)
            return self.unpack("index", streams, unpacker)[0] if "index" in packings else torch.zeros_like(sign), sign
        digits = [digit[..., : self.triplets] for digit in self.unpack("symbol", streams, unpacker)]
        if len(digits) == 2:
            return digits[0], digits[1]
        bits = _digit_bits(self.b_dir, self.b_norm)[0]
        return digits[0] & 2**bits - 1, digits[0] >> bits


def norm_extends_index(b_dir: int, b_norm: int) -> bool:
    """Return True if the norm bits extend the index digit to a width that divides 16. Otherwise, they extend the sign digit."""
    return 2 * (b_dir - 1) + b_norm in (1, 2, 4, 8, 16)


def _digit_bits(b_dir: int, b_norm: int) -> tuple[int, int]:
    """Return the number of bits of the index digit and of the sign digit."""
    index = 2 * (b_dir - 1)
    return (index + b_norm, 2) if norm_extends_index(b_dir, b_norm) else (index, 2 + b_norm)


def _stream_bases(b_dir: int, b_norm: int, arrangement: str) -> dict[str, tuple[int, ...]]:
    """Return the bases of every code stream by name. A digit of zero bits has no base."""
    index, sign = _digit_bits(b_dir, b_norm)
    if arrangement == "dense":
        return {name: (2**bits,) for name, bits in (("index", index), ("sign", sign)) if bits}
    if index + sign <= _ONE_DIGIT_BITS or not index:
        return {"symbol": (2 ** (index + sign),)}
    return {"symbol": (2**index, 2**sign)}


def _symbol_count(dim: int, arrangement: str) -> int:
    triplets = -(-dim // 3)
    return triplets if arrangement == "dense" else -(-triplets // _DIRECT_MULTIPLE) * _DIRECT_MULTIPLE


def _default_fields(dim: int, b_dir: int, b_norm: int, arrangement: str) -> Fields:
    if arrangement == "direct":
        return (("symbol", _DIRECT_FIELDS),)
    symbols = _symbol_count(dim, arrangement)
    return tuple((stream, default_fields(symbols, bases)) for stream, bases in _stream_bases(b_dir, b_norm, arrangement).items())


@lru_cache(MAX_CACHED_TABLES)
def _packings(dim: int, b_dir: int, b_norm: int, arrangement: str, fields: Fields) -> dict[str, Columns]:
    bases = _stream_bases(b_dir, b_norm, arrangement)
    return {stream: Columns(_symbol_count(dim, arrangement), bases[stream], count) for stream, count in fields}


@lru_cache(MAX_CACHED_TABLES)
def _padding_bits(packing: Columns, triplets: int) -> dict[str, numpy.ndarray[Any, Any]]:
    """Return, for each plane of the direct arrangement, a mask of the bits that belong to padding triplets in every word."""
    return {f"symbol.{number}": numpy.array(bits, numpy.uint16) for number, bits in enumerate(packing.symbol_bits(triplets))}


def _scale_and_measure(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale rows so that their squares fit in float32.

    Returns the scaled rows, their norms ``[row, 1]``, and the original norms ``[row]``.
    """
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    if not rows.numel() or (length.min() > _SAFE_NORMS[0] and length.max() < _SAFE_NORMS[1]):
        return rows, length, length[:, 0]
    peak = rows.abs().amax(-1, keepdim=True).clamp_(min=_MIN_NORMAL)
    rows = rows / peak
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows, length, (length * peak)[:, 0]


def _direction_norm(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return (x * x).addcmul_(y, y).addcmul_(z, z).sqrt_()


@cache_per_device
def _rotation_by_coordinate(rotation: Rotation) -> torch.Tensor:
    """Return the matrix that rotates a row and reorders it: the first coordinates of all triplets, then the second, then the third."""
    matrix = functional.pad(rotation.forward(torch.eye(rotation.dim, dtype=torch.float32)), (0, -rotation.dim % 3))
    return matrix.view(rotation.dim, -1, 3).transpose(1, 2).flatten(1)


@cache_per_device
def signed_directions(table: bytes) -> torch.Tensor:
    """Return the unit direction of each symbol, float32 ``[4 * levels^2, 3]``. A symbol's two sign bits are above its index."""
    quarter = codebook_directions(table).T
    signs = torch.tensor([[1.0, 1.0, 1.0], [-1.0, 1.0, 1.0], [1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]], dtype=torch.float32)
    return (signs[:, None] * quarter).flatten(0, 1)


@cache_per_device
def _scaled_directions(directions: bytes, norms: bytes) -> torch.Tensor:
    """Return the products of all directions and all norms, rounded as in decoding, float32 ``[norm * direction, 3]``."""
    return (_table_column(norms, "cpu")[:, None] * signed_directions(directions, "cpu")).flatten(0, 1)


@cache_per_device
def _table_column(table: bytes) -> torch.Tensor:
    return torch.tensor(struct.unpack(f"<{len(table) // 4}f", table), dtype=torch.float32)[:, None]
