"""quaternion: chunks of four values, each stored as one of 24 S directions and a radius (spec/codecs/quaternion.md).

Source: HQMQ Sec. 3, App. B and D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar, Self

from .base import MAX_DIM, Unpacker
from .columns import MAX_BASE, Columns, default_fields, factors_of_two, next_power_of_two, row_bytes
from .encoding_blocks import encode_in_blocks
from .errors import InvalidParameter
from .family import ENCODER_ONLY, SEED, CodecFamily, in_range, one_of
from .generator import unit_quaternions
from .lazy import functional, torch
from .norm_rule import NORM_RULES, read_norm_rule, unbiased_factor
from .parameter_checks import Fields, check_fields
from .quaternion_search import UNITS, CodebookSearch
from .rotation import KINDS, Rotation, cached_rotation
from .runs import Run, RunEncoder
from .streams import Layout
from .tables import MAX_CACHED_TABLES, cache_per_device
from .token_norms import stored_norm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options

ARRANGEMENTS = ("dense", "direct")
NORMS = ("fp16", "fp32")
MAX_SECONDARY = 4096
DEFAULT_SEED = 435
"""Default seed. Errors vary by 2 to 5% between seeds; with this one, the table in the specification holds for S = 24, 48, 96 and 192."""

_QUATERNIONS_AT_ONCE = 128
"""Number of secondary quaternions whose codewords are computed together."""
_HEAD_TOKENS_PER_BLOCK = 1 << 12
_EXPONENT_BITS = 0x7F800000
_MIN_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Quaternion(CodecFamily):
    """Codec that stores four values as a radius code and a codeword, the product of a Hurwitz unit and a seeded unit quaternion.

    The values are the codeword times radius code * scale / (2^radius_bits - 1). ``secondary`` is S, the number of seeded quaternions, and
    ``norm`` is the dtype of the scale, one per token and head. ``norm_rule`` affects only the encoder and is not stored.
    """

    id: ClassVar[str] = "quaternion"
    stores_directions: ClassVar[bool] = True

    dim: int = field(metadata=in_range(1, MAX_DIM))
    secondary: int = field(metadata=in_range(1, MAX_SECONDARY))
    radius_bits: int = field(metadata=in_range(1, 8))
    arrangement: str = field(metadata=one_of(ARRANGEMENTS))
    norm: str = field(metadata=one_of(NORMS))
    rotation_kind: str = field(metadata=one_of(KINDS))
    seed: int = field(metadata=SEED)
    rotation_seed: int = field(metadata=SEED)
    fields: Fields
    norm_rule: str = field(default=NORM_RULES[0], compare=False, metadata=one_of(NORM_RULES) | ENCODER_ONLY)

    def __post_init__(self) -> None:
        super().__post_init__()
        bases = _stream_bases(self.dim, self.secondary, self.radius_bits, self.arrangement)
        check_fields(self.id, self.fields, tuple(bases))
        self.packings()
        _ = self.rotation

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        secondary = cls.option(options, "secondary", None, "s")
        radius_bits = cls.option(options, "radius_bits", None, "r")
        arrangement = cls.option(options, "arrangement", "dense")
        norm = cls.option(options, "norm", "fp16")
        rotation = cls.option(options, "rotation_kind", "none", "rotation")
        seed = cls.option(options, "seed", DEFAULT_SEED)
        rotation_seed = cls.option(options, "rotation_seed", 0)
        rule = read_norm_rule(options)
        options.finish()
        cls.check_value("dim", dim)
        bases = _stream_bases(dim, secondary, radius_bits, arrangement)
        fields = tuple((name, 1 if arrangement == "direct" else default_fields(-(-dim // 4), base)) for name, base in bases.items())
        return cls(dim, secondary, radius_bits, arrangement, norm, rotation, seed, rotation_seed, fields, rule)

    @property
    def nominal_bits(self) -> float:
        return (math.log2(UNITS * self.secondary) + self.radius_bits) / 4 + 16 / self.dim

    @cached_property
    def rotation(self) -> Rotation:
        return cached_rotation(self.rotation_kind, self.dim, self.rotation_seed)

    @property
    def codebook(self) -> torch.Tensor:
        """All codewords (w, x, y, z), float32 ``[24 S, 4]``. Codeword s * 24 + p is unit p times secondary quaternion s."""
        return codewords(self.seed, self.secondary, "cpu")

    def packings(self) -> dict[str, Columns]:
        return _packings(self.dim, self.secondary, self.radius_bits, self.arrangement, self.fields)

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        return {"scale": Layout(self._norm_dtype, (batch, heads, tokens))}

    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunEncoder:
        _codebook_search(self.seed, self.secondary).announce(math.prod(run.shape) // 4, run.device)
        return super().begin(run, previous)

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return encode_in_blocks(x, _HEAD_TOKENS_PER_BLOCK, self._encode_block)

    def _encode_block(self, x: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
        u = self.rotation.forward(x)
        padded = functional.pad(u, (0, -self.dim % 4)) if self.dim % 4 else u
        planes = [padded[..., component::4].contiguous() for component in range(4)]
        length = radius = _chunk_norms(planes)
        power = torch.ones_like(radius[..., :1])
        if not _squares_are_safe(radius):
            # A power of two scales every token near 1, if no square overflows or underflows.
            largest = u.abs().amax(-1, keepdim=True)
            power = (largest.view(torch.int32) & _EXPONENT_BITS).view(torch.float32).clamp_min_(_MIN_NORMAL)
            planes = [plane.div_(power) for plane in planes]
            length = _chunk_norms(planes)
            radius = length * power
        scale = stored_norm(radius.amax(-1), self._norm_dtype, f"a token's scale (token {start} or later)")
        stored = scale.to(torch.float32)[..., None]
        highest = 2**self.radius_bits - 1
        # Computed as in a decoder: rounding the quotient may overflow binary32 even if the scale does not.
        stored_norm(stored / highest * highest, "F32", f"the decoded largest radius of a token (token {start} or later)")
        # Codes are rounded against the stored scale; a zero scale gives zero codes.
        codes = (radius / torch.where(stored > 0, stored, torch.inf)).mul_(highest).round_().clamp_max_(highest)
        codeword = _codebook_search(self.seed, self.secondary).nearest([plane.flatten() for plane in planes]).view_as(codes)
        if self.norm_rule == "unbiased":
            # Chunks relative to the scale, and the radii and codewords to which they decode relative to it.
            relative = power / torch.where(stored > 0, stored, torch.inf)
            radii = codes / highest
            chosen = functional.embedding(codeword, codewords(self.seed, self.secondary, codes.device))
            product = (torch.stack(planes, -1) * chosen).sum(-1).mul_(radii).sum(-1) * relative[..., 0]
            squares = length.square().sum(-1) * relative[..., 0].square()
            factor = unbiased_factor(stored[..., 0], product, radii.square().sum(-1), self._norm_dtype, squares)
            scale = torch.where(torch.isfinite(factor / highest * highest), factor, stored[..., 0]).to(scale.dtype)
        return self.pack_digits(codeword, codes) | {"scale": scale}

    def pack_digits(self, *digits: torch.Tensor) -> dict[str, torch.Tensor]:
        codeword, radius = digits
        names = dict(self.fields)
        if "symbol" in names:
            return self.pack("symbol", codeword, radius)
        return self.pack_factored("codeword", codeword) | self.pack("radius", radius)

    def digits(self, streams: Mapping[str, torch.Tensor], unpacker: Unpacker = Columns.unpack) -> tuple[torch.Tensor, ...]:
        names = dict(self.fields)
        if "symbol" in names:
            return tuple(self.unpack("symbol", streams, unpacker))
        return self.unpack_factored("codeword", streams, unpacker), *self.unpack("radius", streams, unpacker)

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codeword, radius = digits
        scale = streams["scale"].to(torch.float32)[..., None]
        # The divisor is a tensor: given a Python number, CUDA devices multiply by its rounded reciprocal.
        step = scale / scale.new_full((), 2**self.radius_bits - 1)
        chunks = functional.embedding(codeword, codewords(self.seed, self.secondary, step.device)).mul_((radius * step)[..., None])
        return chunks.flatten(3)[..., : self.dim]

    @property
    def _norm_dtype(self) -> str:
        return "F16" if self.norm == "fp16" else "F32"


def _chunk_norms(planes: list[torch.Tensor]) -> torch.Tensor:
    w, x, y, z = planes
    return torch.sqrt((w * w).addcmul_(x, x).addcmul_(y, y).addcmul_(z, z))


def _squares_are_safe(radius: torch.Tensor) -> bool:
    """Return True if the square of each token's largest radius is far from overflow and underflow."""
    smallest, largest = radius.amax(-1).aminmax() if radius.numel() else (radius.new_ones(()), radius.new_ones(()))
    return bool(smallest > 2.0**-40) and bool(largest < 2.0**60)


@lru_cache(MAX_CACHED_TABLES)
def _stream_bases(dim: int, secondary: int, radius_bits: int, arrangement: str) -> dict[str, tuple[int, ...]]:
    """Return the bases of the digits of each code stream, by name (spec/codecs/quaternion.md, Layout)."""
    chunks, alphabet, radius = -(-dim // 4), UNITS * secondary, (1 << radius_bits,)
    if arrangement == "direct":
        base = next_power_of_two(alphabet)
        if base > MAX_BASE:
            raise InvalidParameter(
                f"codec quaternion: secondary is {secondary}, expected 1 to {MAX_BASE // UNITS} for the direct arrangement"
            )
        return {"symbol": (base, *radius)}
    low = 1 << factors_of_two(alphabet)
    split: dict[str, tuple[int, ...]] = {"codeword_low": (low,), "codeword_high": (alphabet // low,)}
    whole: dict[str, tuple[int, ...]] = {"codeword": (alphabet,)}
    if alphabet <= MAX_BASE and _stored_bytes(chunks, whole) <= _stored_bytes(chunks, split):
        return whole | {"radius": radius}
    return split | {"radius": radius}


def _stored_bytes(chunks: int, bases: dict[str, tuple[int, ...]]) -> int:
    return sum(row_bytes(chunks, base, default_fields(chunks, base)) for base in bases.values())


@lru_cache(MAX_CACHED_TABLES)
def _packings(dim: int, secondary: int, radius_bits: int, arrangement: str, fields: Fields) -> dict[str, Columns]:
    bases = _stream_bases(dim, secondary, radius_bits, arrangement)
    alphabets = (UNITS * secondary, 1 << radius_bits) if arrangement == "direct" else ()
    return {name: Columns(-(-dim // 4), bases[name], count, alphabets) for name, count in fields}


@cache_per_device
def secondary_quaternions(seed: int, count: int) -> torch.Tensor:
    """Return the ``count`` seeded unit quaternions (w, x, y, z), float32 ``[count, 4]``."""
    return torch.from_numpy(unit_quaternions(seed, count)).to(torch.float32)


@cache_per_device
def codewords(seed: int, count: int) -> torch.Tensor:
    """Return the products of all Hurwitz units with ``count`` seeded unit quaternions, float32 ``[24 * count, 4]``."""
    units = [[float(sign) if i == axis else 0.0 for i in range(4)] for axis in range(4) for sign in (1, -1)]
    units += [[-0.5 if bits >> i & 1 else 0.5 for i in range(4)] for bits in range(16)]
    # In binary64 and rounded once: the products with 0, 1/2 and 1 are exact, and the sums run left to right.
    a, b, c, d = torch.tensor(units, dtype=torch.float64).T
    result = torch.empty(count, UNITS, 4, dtype=torch.float32, device="cpu")
    # Process parts, because allocators keep the memory of large temporaries.
    secondaries = torch.split(secondary_quaternions(seed, count, "cpu"), _QUATERNIONS_AT_ONCE)
    for secondary, part in zip(secondaries, torch.split(result, _QUATERNIONS_AT_ONCE), strict=True):
        w, x, y, z = secondary.to(torch.float64).T[..., None]
        part[..., 0] = a * w - b * x - c * y - d * z
        part[..., 1] = a * x + b * w + c * z - d * y
        part[..., 2] = a * y - b * z + c * w + d * x
        part[..., 3] = a * z + b * y - c * x + d * w
    return result.flatten(0, 1)


@lru_cache(maxsize=4)
def _codebook_search(seed: int, count: int) -> CodebookSearch:
    return CodebookSearch(secondary_quaternions(seed, count, "cpu"), codewords(seed, count, "cpu"))
